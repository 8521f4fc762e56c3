/* The control plane of a group whose ranks share a host: a mailbox for each rank, the order of calls, waiting.
 *
 * Call n of a group: all that can fail comes first; a rank publishes n; reads everybody's words; moves bytes;
 * says done n; awaits everybody's done n. A rank writes its own mailbox only (but for the waiters' counts and
 * its goodbye), and checks each value that it reads from another's. */
#ifndef SPAR_GROUP_H
#define SPAR_GROUP_H

#include "ipc/arena.h"
#include "base/deadline.h"
#include "ipc/peers.h"

#include <pthread.h>

#define SPAR_GROUP_TEXT 1024
#define SPAR_GROUP_TENSORS 16

typedef struct spar_group spar_group;

/* What a rank tells in call n. */
typedef struct {
    uint64_t signature;
    spar_status status;                  /* other than SPAR_OK: it failed, and takes no part */
    int64_t offsets[SPAR_GROUP_TENSORS]; /* of its outputs in its arena */
} spar_call_header;

/* A rank's mailbox, in its own arena, and `room` bytes behind it; *offset is what the others need. */
spar_status spar_group_open(int world, int rank, int local_ranks, int64_t room, spar_group **group,
                            int64_t *offset);

/* In the set-up: expects a rank's process (spar_peers_expect) until spar_group_end_set_up, or the group is closed. */
spar_status spar_group_expect(spar_group *group, int rank, const spar_endpoint *endpoint,
                              const spar_key *secret);
void spar_group_end_set_up(spar_group *group);

/* The other ranks' processes and their mailboxes' offsets [world]; takes over the peers, also on failure. */
spar_status spar_group_attach(spar_group *group, spar_peer **peers, const int64_t *offsets);

/* Begins call n, the next: SPAR_BROKEN where the group is. Awaits the end of a call that this rank failed. */
spar_status spar_group_begin(spar_group *group, const spar_deadline *deadline, uint32_t *call);

/* Shows this rank's words, and reads everybody's [world]. SPAR_MISMATCH or SPAR_NO_MEMORY, equal on all
 * ranks, where somebody failed or the signatures differ; the call is then over, and nothing may be moved.
 * `describe` writes what the others shall see of this rank's call: asked where they differ. */
spar_status spar_group_publish(spar_group *group, const spar_call_header *own,
                               void (*describe)(void *context, char *text, size_t size),
                               void *context, spar_call_header *all, const spar_deadline *deadline);

/* This rank has moved its bytes; returns when all have. */
spar_status spar_group_finish(spar_group *group, const spar_deadline *deadline);

/* This rank fails in the call that it began: tells the others, and does not wait for them. */
void spar_group_fail(spar_group *group, spar_status status, const char *text);

/* Breaks the group for good, on all ranks, with this reason. */
void spar_group_break(spar_group *group, const char *reason);

/* A copy of the ranks in another process's memory: only those that the group has. */
spar_ranks spar_group_read_ranks(const spar_group *group, const spar_ranks *ranks);

/* What a rank showed, where the newest call ended in a disagreement; else NULL. */
const char *spar_group_call_text(const spar_group *group, int rank);

/* How long to spin before sleeping, in ns, instead of what the cores suggest. */
void spar_group_spin(spar_group *group, int64_t spin_ns);

/* SPAR_AFFINITY=1: where ranks share cores, calls may move the calling thread to another core. */
void spar_group_allow_moves(spar_group *group);

/* Taken around a whole call, after the GIL is released. */
pthread_mutex_t *spar_group_lock(spar_group *group);

/* The bytes behind a rank's mailbox, at a bound of 64: zeros at first. For what else its ranks tell each other. */
void *spar_group_room(const spar_group *group, int rank);

/* The process that a rank is; NULL: this one. */
spar_peer *spar_group_peer(const spar_group *group, int rank);

/* Whether a rank has closed the group, or given it up. */
int spar_group_has_aborted(const spar_group *group, int rank);

/* The base and length of a rank's arena. */
char *spar_group_arena(const spar_group *group, int rank, int64_t *length);

/* Blocks whose offsets were published in a call are held back by these until it is over. */
extern const spar_quarantine spar_group_quarantine;
void spar_group_hold(spar_group *group); /* a reference for such a block */

/* Says goodbye. Neither waits nor is collective; the mailbox is used again when all have said it. */
void spar_group_close(spar_group *group);

/* Tests start near the wrap of the 32-bit call numbers; the same on all ranks, before the first call. */
void spar_group_start_at(spar_group *group, uint32_t call);

#endif
