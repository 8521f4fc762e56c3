/* SPDX-License-Identifier: Apache-2.0 */
/* The control plane of a group: do all ranks make the same call, which failed, which is missing? Transports
 * move the bytes between publish and finish, or end.
 *
 * Near ranks, those of this host, read each other's mailboxes in shared memory. Far ranks send theirs over
 * TCP, with the bytes of the call (links.h).
 *
 * publish    this rank makes call n; returns when every rank does, or one failed
 * finish     this rank has moved its bytes of call n; returns when every rank has
 * poll, end  in place of finish where each rank learns by itself that its bytes have moved: while it waits
 *            for them; and when they have, without waiting for the peers
 * fail       this rank cannot make call n; the group stays usable
 * break      the group ends on all ranks, for good
 * last call  the newest call of a rank's process, on any group (last_call.h)
 *
 * All that can fail on one rank alone comes before publish. A rank writes its own mailbox only, except for
 * peers' waiter counts and `detached` flags, and validates what it reads from a peer's. ring.h publishes
 * without waiting, for calls that run on a GPU. */
#ifndef SPAR_CONTROL_H
#define SPAR_CONTROL_H

#include "base/deadline.h"
#include "control/last_call.h"
#include "ipc/arena.h"
#include "ipc/peers.h"
#include "ipc/tcp.h"
#include "plan/place.h"
#include "plan/plan.h"

#include <pthread.h>

#define SPAR_GROUP_TEXT 1024
#define SPAR_GROUP_TENSORS 16

typedef struct spar_group spar_group;

/* A rank's call, for peers whose calls differ. */
typedef struct {
    char text[SPAR_GROUP_TEXT];
    spar_gathered_size gathered;
} spar_description;

/* Writes a rank's call for its peers, in at most `size` bytes. */
typedef void (*spar_describe)(const void *call, char *text, size_t size, spar_gathered_size *gathered);

/* What a rank publishes in call n. */
typedef struct {
    uint64_t signature;
    int64_t forward;                     /* the call's word: plan/place.h */
    spar_status status;                  /* other than SPAR_OK: it failed, and moves no bytes */
    int64_t offsets[SPAR_GROUP_TENSORS]; /* where its outputs lie in its arena */
    const char *op;                      /* for messages of far ranks; this rank's own alone */
} spar_call_header;

/* What a call moves between this rank and a far one, which shares no memory with it. */
typedef struct {
    const void *out;
    void *in;
    int64_t out_bytes, in_bytes;
} spar_parcel;

/* ---- a call ---- */

/* Returns the lock that is held during a whole call. Take it without the GIL. */
pthread_mutex_t *spar_group_lock(spar_group *group);

/* Begins the next call; SPAR_BROKEN if the group is broken. First awaits the end of the call before, if this
 * rank failed it, or ended it without waiting. */
spar_status spar_group_begin(spar_group *group, const spar_deadline *deadline, uint32_t *call);

/* Sets what the begun call moves to and from the far ranks [world]: spar_group_transfer moves it. It is
 * accessed until that returns, or publish fails. Without parcels, something else moves the bytes. */
void spar_group_carry(spar_group *group, const spar_parcel *parcels);

/* Publishes this rank's header and reads all [world]. If a rank failed, or signatures or known
 * `forward` numbers differ, every rank returns the same SPAR_MISMATCH or SPAR_NO_MEMORY; the call has then
 * ended, and no bytes may be moved. If calls differ, describe(call) writes this rank's for its peers. */
spar_status spar_group_publish(spar_group *group, const spar_call_header *own, spar_describe describe,
                               const void *call, spar_call_header *all, const spar_deadline *deadline);

/* After publish: moves the parcels. Calls arrived(context, rank) once for each far rank, when its bytes are
 * here. */
spar_status spar_group_transfer(spar_group *group, void (*arrived)(void *context, int rank), void *context,
                                const spar_deadline *deadline);

/* Publishes that this rank has moved its bytes; returns when all near ranks have. */
spar_status spar_group_finish(spar_group *group, const spar_deadline *deadline);

/* The call goes on outside, until spar_group_end: `record` of its last call is ended then, or by an abort. */
void spar_group_go_on(spar_group *group, uint32_t record);

/* Returns what ends this rank's wait for its bytes early, as publish does: a peer's death, for one. */
spar_status spar_group_poll(spar_group *group, const spar_deadline *deadline);

/* Publishes that this rank has moved its bytes; the next call begins when all near ranks have, and all
 * far ranks have made this one. */
void spar_group_end(spar_group *group);

/* Publishes that this rank failed in the call that it began; does not wait. */
void spar_group_fail(spar_group *group, spar_status status, const char *text);

/* Breaks the group for good, on all ranks, with this reason, from the first call on that this rank did not
 * end. */
void spar_group_break(spar_group *group, const char *reason);

/* A rank's description of its call if the newest call ended in a mismatch; else NULL. Its text is empty if
 * the error's has it. */
const spar_description *spar_group_description(const spar_group *group, int rank);

/* Quarantines a block of this rank, to which peers may write in a call: once freed, it is not reused until
 * the call has ended on every rank. */
void spar_group_quarantine(spar_group *group, spar_memory *block, uint32_t call);

/* The last call of a rank's process, on any group. */
spar_last_call spar_group_last_call(const spar_group *group, int rank);

/* How far a rank is, for spar.debug. Statuses: SPAR_OK if it did not. */
typedef struct {
    uint32_t published, done; /* its newest calls */
    uint32_t broken;          /* the status with which it broke the group */
    uint32_t status;          /* with which it failed the published call */
    int ended;                /* whether its process has */
} spar_words;

/* Any thread may read them, also during a call; 0: the rank's mailbox is not attached yet. */
int spar_group_words(const spar_group *group, int rank, spar_words *words);

/* The process of a near rank, for ipc/passing.h; NULL: it is this one, or far. */
spar_peer *spar_group_peer(const spar_group *group, int rank);

/* The base and length of the arena of a near rank. */
char *spar_group_arena(const spar_group *group, int rank, int64_t *length);

/* ---- life ---- */

/* Allocates a rank's mailbox in its own arena, with `room` bytes behind it; peers need *offset. */
spar_status spar_group_open(int world, int rank, int64_t room, spar_group **group, int64_t *offset);

/* Expects a rank's process (spar_peers_expect) until spar_group_end_set_up or spar_group_close. */
spar_status spar_group_expect(spar_group *group, int rank, const spar_endpoint *endpoint,
                              const spar_key *secret);
void spar_group_end_set_up(spar_group *group);

/* Takes over the connections to the far ranks, those with far[rank] != 0. pids [world] are for messages. */
spar_status spar_group_link(spar_group *group, const unsigned char *far, const int64_t *pids,
                            int (*sockets)[SPAR_TCP_CHANNELS]);

/* Attaches the near ranks' processes and the offsets of their mailboxes [world]; peers[rank] is NULL for
 * others. Takes over the peers, also on failure. */
spar_status spar_group_attach(spar_group *group, spar_peer **peers, const int64_t *offsets);

/* Sets the spin time before sleeping. */
void spar_group_spin(spar_group *group, int64_t spin_ns);

/* Tells the peers that this rank makes no further call, as closing does. The group stays open. */
void spar_group_end_calls(spar_group *group);

/* Closes the group, which may be NULL. Neither waits nor is collective; the mailbox is reused when every peer
 * has detached. Does nothing in a forked child, which leaves its parent's mailbox alone. */
void spar_group_close(spar_group *group);

/* Sets the call number from which tests start, near its wrap: the same on all ranks, before the first
 * call. */
void spar_group_start_at(spar_group *group, uint32_t call);

#endif
