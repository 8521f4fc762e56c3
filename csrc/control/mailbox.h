/* SPDX-License-Identifier: Apache-2.0 */
/* Private to control/: mailboxes, and a group's state.
 *
 * A rank writes its own mailbox only, except for peers' waiter counts and `detached` flags. */
#ifndef SPAR_MAILBOX_H
#define SPAR_MAILBOX_H

#include "control/control.h"

typedef struct {
    char magic[8];
    int32_t world, rank;
    _Alignas(64) uint32_t published, done, described, waiters; /* futexes: call numbers */
    uint32_t broken;      /* the status with which the owner aborted, for good; 0: it did not */
    uint32_t broken_call; /* the first that the owner does not end */
    uint32_t polls;       /* how often the owner has polled for bytes that it awaits */
    uint32_t core;        /* on which the owner ran last, plus 1; 0: not known */
    _Alignas(64) uint64_t signature;
    int64_t forward;
    uint32_t status;
    int64_t offsets[SPAR_GROUP_TENSORS];
    spar_description description; /* valid once described; its text, the failure's, once failed */
    char reason[SPAR_GROUP_TEXT]; /* why `broken` is set */
    spar_ranks ranks;             /* the ranks that caused it */
    unsigned char detached[];     /* [world] each peer's last write here; then the extra bytes */
} mailbox;

typedef struct spar_links spar_links;

struct spar_group {
    pthread_mutex_t lock;
    int world, rank;
    int64_t room; /* bytes */
    int refs;     /* atomic: the owner, each block held back, the mailbox */
    int uses;     /* atomic: the same without the mailbox; at 0 the rank detaches */
    int aborted;  /* atomic: a thread writes, or has written, the reason */
    uint32_t call;
    int unsettled; /* this rank has ended `call`, and has not awaited the others */
    uint32_t
        record;     /* of `call`, as spar_last_call_begin returned it, while something else moves its bytes */
    int mismatched; /* the newest call ended in a mismatch: see descriptions */
    int64_t spin_ns;       /* the most that a wait polls before it blocks */
    int64_t yield_from_ns; /* no yields before: one went to another process */
    spar_memory *memory;
    mailbox *own;
    spar_endpoint *expected;        /* [world] processes expected during the set-up; pid 0: none */
    spar_description *descriptions; /* [world] of the newest mismatch */
    mailbox **boxes;                /* [world] */
    uint32_t *polls;                /* [world] as they were a moment ago */
    pthread_mutex_t closing; /* guards unmapped, and reads of peers' mailboxes outside calls, on any thread */
    unsigned char *unmapped; /* [world] ranks that were dead when the group was closed: unmapped */
    spar_peer **peers;       /* [world]; NULL: oneself, and far ranks */
    spar_links *links;       /* to the far ranks, whose boxes are copies; NULL: there are none */
    const spar_parcel *parcels; /* [world] of the current call; NULL: something else moves its bytes */
    int64_t waits_ns; /* when this rank first waited for long in the call; 0: it did not; -1: it told */
    int news;         /* a far rank broke the group, or a connection ended */
};

/* Whether a progress word has reached `call`; call numbers wrap. */
static inline int spar_has_reached(const uint32_t *word, uint32_t call)
{
    return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - call) >= 0;
}

/* Whether a rank has closed or aborted the group. */
static inline int spar_group_has_aborted(const spar_group *group, int rank)
{
    return __atomic_load_n(&group->boxes[rank]->broken, __ATOMIC_ACQUIRE) != 0;
}

/* Stores a word of this rank's mailbox and wakes the ranks that wait for it. The only function that makes a
 * word visible: after all stores of this thread, non-temporal ones too. */
void spar_mailbox_publish(mailbox *own, uint32_t *word, uint32_t value);

/* Breaks the group from `call` on: peers in that call raise the same status. Keeps the first reason. */
void spar_group_abort(spar_group *group, spar_status status, uint32_t call, const spar_ranks *ranks,
                      const char *reason);

/* Sends to far ranks and receives from them (spar_links_pump); breaks the group if that fails. */
spar_status spar_group_pump(spar_group *group, int wait_ms);

/* What peers are awaited for. Far ranks: ARRIVED, their bytes are here, and those for them on their way;
 * SENT, the messages for them are on their way. */
enum spar_progress { SPAR_PUBLISHED, SPAR_DONE, SPAR_DESCRIBED, SPAR_ARRIVED, SPAR_SENT };

/* Waits until every peer's word has reached `call`, the current one. Fails with the status of a peer that
 * aborted, or this rank's own. Far ranks are not awaited for SPAR_DONE: they write to no memory of
 * others. */
spar_status spar_group_await(spar_group *group, enum spar_progress which, uint32_t call,
                             const spar_deadline *deadline);

/* The same for the far ranks alone. SPAR_ARRIVED: returns early when a far rank's bytes have arrived that the
 * caller has not taken. */
spar_status spar_group_await_far(spar_group *group, enum spar_progress which, uint32_t call,
                                 const spar_deadline *deadline);

/* The first call that this rank has not ended. */
static inline uint32_t spar_group_open_call(const spar_group *group)
{
    return __atomic_load_n(&group->own->done, __ATOMIC_RELAXED) + 1;
}

/* Adds a peer to a list of ranks and to its text: "rank 2 (process 71), rank 3 (process 72)". */
void spar_group_list(const spar_group *group, int rank, spar_ranks *ranks, char *text, size_t size);

/* Returns the `room` bytes behind a rank's mailbox, aligned to 64 and initially zero. */
void *spar_group_room(const spar_group *group, int rank);

/* Returns the status and reason of a rank that will not end `call`, and aborts this rank from the same call
 * on, *broken_call; SPAR_OK: there is none. */
spar_status spar_group_check(spar_group *group, uint32_t call, uint32_t *broken_call);

#endif
