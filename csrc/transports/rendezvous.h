/* SPDX-License-Identifier: Apache-2.0 */
/* The mailboxes of a communicator, and its connections to far ranks: they are exchanged in its set-up, and
 * its calls pass through them one at a time. */
#ifndef SPAR_RENDEZVOUS_H
#define SPAR_RENDEZVOUS_H

#include "control/control.h"
#include "transports/transport.h"

/* Whether all ranks are near to each other; else the reason. */
int spar_rendezvous_possible(const spar_peer_info *info, int world, int first_rank, char *reason,
                             size_t size);

/* First stage: allocates this rank's mailbox with `room` bytes behind it, and expects and dials the near
 * peers. *offset, where the mailbox lies, is for the setup result. Does not wait. Keeps nothing on
 * failure. */
spar_status spar_rendezvous_begin(const spar_comm *comm, int64_t room, spar_group **group, int64_t *offset);

/* Second stage, from all ranks' results: attaches the near peers' mailboxes, and connects the far ones. */
spar_status spar_rendezvous_end(const spar_comm *comm, spar_group *group, const spar_setup_result *results,
                                const spar_deadline *deadline);

/* Slots of transports that compare each call there: both stages, and the end. */
spar_status spar_rendezvous_setup(spar_comm *comm, spar_setup_result *result);
spar_status spar_rendezvous_connect(spar_comm *comm, const spar_setup_result *results,
                                    const spar_deadline *deadline);
void spar_rendezvous_close(spar_comm *comm);

/* One call of a group on this rank, which has begun as call n. `room` has what the caller asked for, for each
 * rank. */
typedef spar_status (*spar_turn)(spar_comm *comm, spar_call *call, void *room, uint32_t n);

/* Runs a call in its turn: holds the group's lock, begins the call, and records it as this process's last
 * call. One without outputs goes on until spar_group_end. SPAR_INTERRUPTED in call->failed breaks the group.
 * each: the bytes of room for each rank, taken before. */
spar_status spar_rendezvous_run(spar_comm *comm, spar_call *call, spar_turn turn, size_t each);

#endif
