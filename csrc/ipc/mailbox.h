/* What group.c, wait.c and spread.c alone know: mailboxes, and a group's state.
 *
 * A rank writes its own mailbox only, but for the waiters' counts and its goodbye. */
#ifndef SPAR_MAILBOX_H
#define SPAR_MAILBOX_H

#include "ipc/group.h"

typedef struct {
    char magic[8];
    int32_t world, rank;
    _Alignas(64) uint32_t published, done, described, waiters; /* futexes: call numbers */
    uint32_t broken;      /* the owner gave up, for good: the status with which */
    uint32_t broken_call; /* in which call the first rank did */
    _Alignas(64) uint64_t signature;
    uint32_t status;
    int32_t core; /* on which the rank runs, if it may move; else -1 */
    int64_t offsets[SPAR_GROUP_TENSORS];
    char text[SPAR_GROUP_TEXT];   /* of the call, where ranks disagree; valid when told or failed */
    char reason[SPAR_GROUP_TEXT]; /* of `broken` */
    spar_ranks ranks;             /* that caused it */
    unsigned char detached[];     /* [world] each member's last write; then the room */
} mailbox;

struct spar_group {
    pthread_mutex_t lock;
    int world, rank;
    int64_t room; /* bytes */
    int refs;     /* atomic: the owner, each block held back, the mailbox */
    int uses;     /* atomic: the same without the mailbox; at 0 goodbye is said */
    int aborted;  /* atomic: a thread has, or is about to, write why */
    uint32_t call;
    int failed;                       /* this rank failed `call`, whose end it has not awaited */
    int mismatched;                   /* the newest call ended in a disagreement: texts holds it */
    int64_t spin_ns, current_spin_ns; /* before sleeping: at most; now, where ranks share cores */
    int own_core;                     /* whether each rank of this host has one */
    int may_move;                     /* whether ranks share cores, with SPAR_AFFINITY=1 */
    int fair_share;                   /* ranks on a core, where it has more than one */
    int64_t rests_until_ns;           /* before it moves to another core again */
    spar_memory *memory;
    mailbox *own;
    spar_endpoint *expected; /* [world] in the set-up, whose processes are expected; pid 0: not */
    char *texts;             /* [world][SPAR_GROUP_TEXT] of the newest disagreement */
    mailbox **boxes;         /* [world] */
    pthread_mutex_t
        closing; /* of gone, and around looks at others' mailboxes outside of calls, on any thread */
    unsigned char *unmapped; /* [world] ranks that were dead when the group was closed: unmapped */
    spar_peer **peers;       /* [world]; NULL: oneself */
};

/* Call numbers wrap. */
static inline int spar_has_reached(const uint32_t *word, uint32_t call)
{
    return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - call) >= 0;
}

/* Breaks the group because of `call`: a rank that is in that call raises the same status. The first reason stays. */
void spar_group_abort(spar_group *group, spar_status status, uint32_t call, const spar_ranks *ranks,
                      const char *reason);

enum spar_progress { SPAR_PUBLISHED, SPAR_DONE, SPAR_DESCRIBED };

/* Until every member's word has come to `call`; the status of whoever gave up, or why this rank does. */
spar_status spar_group_await(spar_group *group, enum spar_progress which, uint32_t call,
                             const spar_deadline *deadline);

/* How the ranks of this host, of all groups, share its cores. */
void spar_group_share_cores(spar_group *group, int local_ranks);

/* Before this rank's words are published: stores its core, if it may move. */
void spar_group_publish_core(spar_group *group);

/* After all ranks' words were read: moves this thread, if it may move, off a core with more ranks than its fair share.
 * Restores the thread's affinity mask. */
void spar_group_balance_cores(spar_group *group);

/* The status, reason and call of a rank that gave up; SPAR_OK where none did. This rank then gives up, too. */
spar_status spar_group_check(spar_group *group, uint32_t *call);

#endif
