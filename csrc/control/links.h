/* SPDX-License-Identifier: Apache-2.0 */
/* Private to control/: the words of far ranks, those that share no memory with this one, over TCP.
 *
 * This process keeps a copy of a far rank's mailbox, which that rank's messages fill. So a group reads every
 * rank's words alike; only waiting for them differs. Of a pair's two connections,
 * - one has each rank's calls in their order: what it publishes, then the call's bytes. Few bytes follow at
 *   once; more wait until all ranks have published the same call.
 * - the other has what does not wait for bytes: descriptions of calls that differ, the end of a call whose
 *   bytes move elsewhere, and why a rank broke the group.
 * `done` of the copy: the far rank's bytes have arrived, and those for it are on their way. */
#ifndef SPAR_LINKS_H
#define SPAR_LINKS_H

#include "control/mailbox.h"
#include "ipc/tcp.h"

/* Takes over the connections, also on failure, and makes the copies in group->boxes; pids [world] are for
 * messages. */
spar_status spar_links_open(spar_group *group, const unsigned char *far, const int64_t *pids,
                            int (*sockets)[SPAR_TCP_CHANNELS]);

/* Sends what this rank's mailbox has published of the current call, with its few bytes. Never waits; all
 * messages before are SPAR_SENT. op: NULL: that of this process's newest call. */
void spar_links_publish(spar_group *group, const char *op);

/* Sends this rank's description of its call, that its bytes have moved or it failed, or why it broke the
 * group. Never waits. After a break no byte of the caller's is read or written any more. */
void spar_links_describe(const spar_group *group);
void spar_links_end(const spar_group *group);
void spar_links_break(const spar_group *group);

/* Sends and receives what can be. If nothing can, it waits for that, for at most `wait_ms`. Fails if a peer
 * does not keep to the protocol: the caller breaks the group (spar_group_pump). */
spar_status spar_links_pump(spar_group *group, int wait_ms);

/* Whether a far rank has reached the current call. */
int spar_link_has_reached(spar_group *group, int rank, enum spar_progress which);

/* Whether all far ranks have published or described the current call, or it is SPAR_ARRIVED or SPAR_SENT. */
int spar_links_reached(spar_group *group, enum spar_progress which);

/* Begins to send and receive the bytes that did not follow at once. */
void spar_links_begin_bytes(spar_group *group);

/* Before a call: what is left of the bytes of earlier ones goes nowhere, since their caller has its memory
 * back. */
void spar_links_forget_bytes(spar_group *group);

/* The current call moves no bytes: far ranks end it as this one does. */
void spar_links_skip_bytes(spar_group *group);

/* Whether bytes of a far rank have arrived that are not taken yet; takes them: the rank, or -1. */
int spar_links_arrived(const spar_group *group);
int spar_links_take(const spar_group *group);

/* Whether a far rank's connections have ended, but not because it broke the group. */
int spar_link_ended(const spar_group *group, int rank);

/* The id of a far rank's process; 0: it is not known. */
int64_t spar_link_pid(const spar_group *group, int rank);

/* Tells the far ranks of all groups in which call, of any group, this process has waited for long. */
void spar_links_wait(void);

/* The newest call of a far rank, as far as it is known here: SPAR_CALL_ARRIVED; its group is empty for this
 * group. SPAR_CALL_UNKNOWN: nothing has arrived. */
spar_last_call spar_link_last_call(const spar_group *group, int rank);

/* Closes the connections, if there are any; the kernel still sends what it has of them. Frees the copies. */
void spar_links_close(spar_group *group);

#endif
