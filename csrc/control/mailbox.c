/* SPDX-License-Identifier: Apache-2.0 */
/* The words of mailboxes: publishing them, waiting for those of the peers, and what aborts a group: a
 * death, a peer that aborted, Ctrl-C, the deadline. */
#include "control/mailbox.h"

#include "base/fence.h"
#include "base/util.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define cpu_relax() __builtin_ia32_pause()
#else
#define cpu_relax() __asm__ volatile("yield")
#endif

static const int64_t SLICE_NS = 50000000;
/* Duration of one poll: from YIELDED_NS on another process had the core; from PREEMPTED_NS on it was no
 * waiting rank. */
static const int64_t YIELDED_NS = 3000, PREEMPTED_NS = 1000000;

static void wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void spar_mailbox_publish(mailbox *box, uint32_t *word, uint32_t value)
{
    spar_nontemporal_fence();
    /* seq_cst: the word before the count, as a sleeper writes the count before it reads the word */
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&box->waiters, __ATOMIC_SEQ_CST))
        wake(word);
}

spar_ranks spar_group_read_ranks(const spar_group *g, const spar_ranks *ranks)
{
    spar_ranks valid = {0};
    int count = ranks->count, most = (int)(sizeof ranks->rank / sizeof *ranks->rank);
    for (int i = 0; i < count && i < most; i++)
        if (ranks->rank[i] >= 0 && ranks->rank[i] < g->world)
            spar_ranks_add(&valid, ranks->rank[i]);
    return valid;
}

void spar_group_abort(spar_group *g, spar_status status, uint32_t call, const spar_ranks *ranks,
                      const char *reason)
{
    if (__atomic_exchange_n(&g->aborted, 1, __ATOMIC_RELAXED))
        return;
    g->own->broken_call = call;
    g->own->ranks = *ranks;
    snprintf(g->own->reason, sizeof g->own->reason, "%s", reason);
    spar_mailbox_publish(g->own, &g->own->broken, (uint32_t)status);
    wake(&g->own->published);
    wake(&g->own->done);
    wake(&g->own->described);
}

static uint32_t *progress_of(mailbox *box, enum spar_progress which)
{
    return which == SPAR_PUBLISHED ? &box->published : which == SPAR_DONE ? &box->done : &box->described;
}

spar_status spar_group_check(spar_group *g, uint32_t *call)
{
    char reason[SPAR_GROUP_TEXT];
    for (int i = 0; i < g->world; i++) {
        int rank = (g->rank + i) % g->world; /* the own mailbox first */
        uint32_t broken = __atomic_load_n(&g->boxes[rank]->broken, __ATOMIC_ACQUIRE);
        if (!broken)
            continue;
        spar_status status =
            broken == SPAR_TIMEOUT || broken == SPAR_PEER_LOST ? (spar_status)broken : SPAR_BROKEN;
        memcpy(reason, g->boxes[rank]->reason, sizeof reason);
        reason[sizeof reason - 1] = 0;
        if (!*reason)
            snprintf(reason, sizeof reason, "rank %d aborted", rank);
        *call = g->boxes[rank]->broken_call;
        spar_ranks ranks = spar_group_read_ranks(g, &g->boxes[rank]->ranks);
        spar_group_abort(g, status, *call, &ranks, reason);
        return spar_fail_ranks(status, &ranks, "%s", reason);
    }
    return SPAR_OK;
}

void spar_group_list(const spar_group *g, int rank, spar_ranks *ranks, char *text, size_t size)
{
    spar_append(text, size, "%srank %d (process %lld)", *text ? ", " : "", rank,
                (long long)g->peers[rank]->endpoint.pid);
    spar_ranks_add(ranks, rank);
}

/* Aborts because of all peers whose word is missing, or only those that also hung up: "rank 2 (process 71),
 * rank 3 (process 72) died ...". SPAR_OK: there is none. */
static spar_status fail_missing(spar_group *g, spar_status status, int only_hung_up, enum spar_progress which,
                                uint32_t call, const char *what)
{
    char text[SPAR_GROUP_TEXT];
    spar_ranks ranks = {0};
    *text = 0;
    for (int rank = 0; rank < g->world && strlen(text) < sizeof text - 200; rank++) {
        int aborted = (int)__atomic_load_n(&g->boxes[rank]->broken, __ATOMIC_RELAXED);
        if (!g->peers[rank] || (only_hung_up && (aborted || !spar_peer_hung_up(g->peers[rank]))) ||
            spar_has_reached(progress_of(g->boxes[rank], which), call)) /* it finished, and may have exited */
            continue;
        spar_group_list(g, rank, &ranks, text, sizeof text);
    }
    if (!*text)
        return SPAR_OK;
    spar_append(text, sizeof text, what, (unsigned)call);
    spar_group_abort(g, status, g->call, &ranks, text);
    return spar_fail_ranks(status, &ranks, "%s", text);
}

/* Polls about every 50 ms for what ends a wait early. */
static spar_status poll_abort(spar_group *g, enum spar_progress which, uint32_t call,
                              const spar_deadline *deadline)
{
    uint32_t broken_call;
    /* first, so that all survivors report a death */
    SPAR_TRY(fail_missing(g, SPAR_PEER_LOST, 1, which, call, " died before the end of call %u"));
    SPAR_TRY(spar_group_check(g, &broken_call));
    int stop = deadline->interrupted ? deadline->interrupted(deadline->context) : SPAR_CONTINUE;
    if (stop != SPAR_CONTINUE) {
        char text[64];
        snprintf(text, sizeof text, "rank %d %s in call %u", g->rank,
                 stop == SPAR_STOP_CLOSED ? "closed the group" : "was interrupted", (unsigned)g->call);
        spar_group_abort(g, SPAR_BROKEN, g->call, &(spar_ranks){1, {g->rank}}, text);
        return spar_fail_rank(stop == SPAR_STOP_CLOSED ? SPAR_BROKEN : SPAR_INTERRUPTED, g->rank, "%s", text);
    }
    if (spar_deadline_passed(deadline))
        return fail_missing(g, SPAR_TIMEOUT, 0, which, call, " did not make call %u in time");
    return SPAR_OK;
}

/* Spins before sleeping; returns 1 if the word arrived. Each iteration yields the core. If ranks share cores,
 * the awaited rank may be the one that gets it, so that time is not counted, unless it is long: a sleeper
 * would then be scheduled first. After a sleep it spins for shorter, after a success for longer. */
static int spin(spar_group *g, const uint32_t *word, uint32_t call)
{
    int64_t most = g->own_core ? g->spin_ns : g->current_spin_ns;
    int64_t now = most ? spar_now_ns() : 0, end = now + SLICE_NS;
    for (int64_t left = most; left > 0 && now < end;) {
        for (int i = 0; i < (g->own_core ? 32 : 1); i++) {
            if (spar_has_reached(word, call)) {
                g->current_spin_ns = 4 * most < g->spin_ns ? 4 * most : g->spin_ns;
                return 1;
            }
            cpu_relax();
        }
        sched_yield();
        int64_t begun = now;
        now = spar_now_ns();
        int64_t elapsed = now - begun;
        if (g->own_core || elapsed < YIELDED_NS || elapsed > PREEMPTED_NS)
            left -= elapsed;
    }
    g->current_spin_ns = most / 2 > g->spin_ns / 16 ? most / 2 : g->spin_ns / 16;
    return 0;
}

static spar_status await_one(spar_group *g, int rank, enum spar_progress which, uint32_t call,
                             const spar_deadline *deadline)
{
    mailbox *box = g->boxes[rank];
    uint32_t *word = progress_of(box, which);
    spar_status status = SPAR_OK;
    if (spar_has_reached(word, call))
        return SPAR_OK;
    if (spin(g, word, call))
        return SPAR_OK;
    __atomic_add_fetch(&box->waiters, 1, __ATOMIC_SEQ_CST);
    int64_t polled = spar_now_ns();
    while (status == SPAR_OK) {
        uint32_t seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
        if ((int32_t)(seen - call) >= 0)
            break;
        const struct timespec slice = {0, SLICE_NS};
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
        if (spar_now_ns() - polled >= SLICE_NS || __atomic_load_n(&box->broken, __ATOMIC_RELAXED)) {
            polled = spar_now_ns();
            if (!spar_has_reached(word, call))
                status = poll_abort(g, which, call, deadline);
        }
    }
    __atomic_sub_fetch(&box->waiters, 1, __ATOMIC_SEQ_CST);
    return status;
}

spar_status spar_group_await(spar_group *g, enum spar_progress which, uint32_t call,
                             const spar_deadline *deadline)
{
    for (int i = 1; i < g->world; i++)
        SPAR_TRY(await_one(g, (g->rank + i) % g->world, which, call, deadline));
    return SPAR_OK;
}
