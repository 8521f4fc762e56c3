/* SPDX-License-Identifier: Apache-2.0 */
/* The words of mailboxes: publishing them, waiting for those of the peers, and what aborts a group: a
 * death, a peer that aborted, Ctrl-C, the deadline. */
#include "control/links.h"

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
/* A rank that waits longer tells far ranks in which call: their timeouts of a second or more list it. */
static const int64_t TELL_NS = 400000000;
/* How often a wait yields to a rank on its own core before it blocks. Blocking costs several yields, of 2 us
 * each; but after a yield the scheduler need not run the awaited rank. */
static const int YIELDS = 4;
/* A yield of this time went to another process: a time slice takes longer, and a small call less. The next
 * one waits 20 times as long, so that such yields take at most 5% of the time. */
static const int64_t LONG_YIELD_NS = 1000000, YIELD_PAUSE = 20;
/* Polls between two reads of the clock and of the cores: 1 us, so that a migrated rank is noticed soon. */
static const int POLLS = 32;

static void wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Publishes on which core this rank runs, for peers that are to wait for it. */
static uint32_t note_core(mailbox *own)
{
    uint32_t core = (uint32_t)(sched_getcpu() + 1);
    if (__atomic_load_n(&own->core, __ATOMIC_RELAXED) != core) /* an unchanged line stays in peers' caches */
        __atomic_store_n(&own->core, core, __ATOMIC_RELAXED);
    return core;
}

void spar_mailbox_publish(mailbox *box, uint32_t *word, uint32_t value)
{
    note_core(box);
    spar_nontemporal_fence();
    /* seq_cst: the word before the count, as a sleeper writes the count before it reads the word */
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&box->waiters, __ATOMIC_SEQ_CST))
        wake(word);
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
    if (g->links)
        spar_links_break(g);
    spar_last_call_end(g->record, 1);
    wake(&g->own->published);
    wake(&g->own->done);
    wake(&g->own->described);
}

void spar_group_break(spar_group *g, const char *reason)
{
    spar_group_abort(g, SPAR_BROKEN, spar_group_open_call(g), &(spar_ranks){1, {g->rank}}, reason);
}

spar_status spar_group_pump(spar_group *g, int wait_ms)
{
    spar_status status = spar_links_pump(g, wait_ms);
    if (status != SPAR_OK)
        spar_group_break(g, spar_last_error());
    return status;
}

static uint32_t *progress_of(mailbox *box, enum spar_progress which)
{
    return which == SPAR_PUBLISHED ? &box->published : which == SPAR_DESCRIBED ? &box->described : &box->done;
}

/* Copies the ranks in another process's memory: only those that the group has. */
static spar_ranks read_ranks(const spar_group *g, const spar_ranks *ranks)
{
    spar_ranks valid = {0};
    int count = ranks->count, most = (int)(sizeof ranks->rank / sizeof *ranks->rank);
    for (int i = 0; i < count && i < most; i++)
        if (ranks->rank[i] >= 0 && ranks->rank[i] < g->world)
            spar_ranks_add(&valid, ranks->rank[i]);
    return valid;
}

/* Copies why a rank aborted. A reason that names no ranks is about the rank that wrote it. */
static spar_ranks read_reason(const spar_group *g, int rank, char *reason, size_t size)
{
    spar_ranks ranks = read_ranks(g, &g->boxes[rank]->ranks);
    char theirs[SPAR_GROUP_TEXT];
    memcpy(theirs, g->boxes[rank]->reason, sizeof theirs);
    theirs[sizeof theirs - 1] = 0;
    *reason = 0;
    if (!ranks.count || !*theirs)
        spar_append(reason, size, "rank %d%s", rank, *theirs ? ": " : " aborted");
    spar_append(reason, size, "%s", theirs);
    if (!ranks.count)
        spar_ranks_add(&ranks, rank);
    return ranks;
}

spar_status spar_group_check(spar_group *g, uint32_t call, uint32_t *broken_call)
{
    char reason[SPAR_GROUP_TEXT];
    for (int i = 0; i < g->world; i++) {
        int rank = (g->rank + i) % g->world; /* the own mailbox first */
        uint32_t broken = __atomic_load_n(&g->boxes[rank]->broken, __ATOMIC_ACQUIRE);
        if (!broken)
            continue;
        *broken_call = g->boxes[rank]->broken_call;
        if ((int32_t)(call - *broken_call) < 0)
            continue;
        int passed_on = broken == SPAR_TIMEOUT || broken == SPAR_PEER_LOST || broken == SPAR_MISMATCH;
        spar_status status = passed_on ? (spar_status)broken : SPAR_BROKEN;
        spar_ranks ranks = read_reason(g, rank, reason, sizeof reason);
        spar_group_abort(g, status, *broken_call, &ranks, reason);
        return spar_fail_ranks(status, &ranks, "%s", reason);
    }
    return SPAR_OK;
}

void spar_group_list(const spar_group *g, int rank, spar_ranks *ranks, char *text, size_t size)
{
    long long pid = g->peers[rank] ? g->peers[rank]->endpoint.pid : spar_link_pid(g, rank);
    spar_append(text, size, "%srank %d (process %lld)", *text ? ", " : "", rank, pid);
    spar_ranks_add(ranks, rank);
}

/* Which of the ranks whose word is missing a message is about: those whose connection ended; those that
 * did not poll since g->polls was written; all. */
enum missing { HUNG_UP, IDLE, ALL };

static int is_missing(const spar_group *g, int rank, enum missing kind, enum spar_progress which)
{
    if (which >= SPAR_ARRIVED && g->peers[rank])
        return 0;
    /* A rank of another host does not tell how often it polls. */
    if (!g->peers[rank])
        return kind == HUNG_UP ? spar_link_ended(g, rank) : kind == ALL;
    if (kind == HUNG_UP)
        return !spar_group_has_aborted(g, rank) && spar_peer_hung_up(g->peers[rank]);
    return kind == ALL || __atomic_load_n(&g->boxes[rank]->polls, __ATOMIC_RELAXED) == g->polls[rank];
}

/* Aborts because of peers whose word is missing: "rank 2 (process 71), rank 3 (process 72) died ...".
 * SPAR_OK: there is none. */
static spar_status fail_missing(spar_group *g, spar_status status, enum missing kind,
                                enum spar_progress which, uint32_t call, const char *what)
{
    char text[SPAR_GROUP_TEXT];
    spar_ranks ranks = {0};
    *text = 0;
    for (int rank = 0; rank < g->world && strlen(text) < sizeof text - 200; rank++)
        if (rank != g->rank && is_missing(g, rank, kind, which) &&
            !(g->peers[rank] ? spar_has_reached(progress_of(g->boxes[rank], which), call)
                             : spar_link_has_reached(g, rank, which))) /* else it may have exited */
            spar_group_list(g, rank, &ranks, text, sizeof text);
    if (!*text)
        return SPAR_OK;
    spar_append(text, sizeof text, what, (unsigned)call);
    spar_group_abort(g, status, g->call, &ranks, text);
    return spar_fail_ranks(status, &ranks, "%s", text);
}

/* Gives the ranks that wait, too, the time to poll a few times. */
static void watch_polls(spar_group *g)
{
    const struct timespec moment = {0, SLICE_NS};
    for (int rank = 0; rank < g->world; rank++)
        g->polls[rank] = __atomic_load_n(&g->boxes[rank]->polls, __ATOMIC_RELAXED);
    for (int i = 0; i < 5; i++) {
        __atomic_add_fetch(&g->own->polls, 1, __ATOMIC_RELAXED);
        nanosleep(&moment, NULL);
    }
}

/* Polls about every 50 ms for what ends a wait early. */
static spar_status poll_abort(spar_group *g, enum spar_progress which, uint32_t call,
                              const spar_deadline *deadline)
{
    uint32_t broken_call;
    if (g->waits_ns == 0)
        g->waits_ns = spar_now_ns();
    if (g->waits_ns > 0 && spar_now_ns() - g->waits_ns > TELL_NS) {
        g->waits_ns = -1;
        spar_links_wait();
    }
    if (g->links)
        SPAR_TRY(spar_group_pump(g, 0));
    /* first, so that all survivors report a death */
    SPAR_TRY(fail_missing(g, SPAR_PEER_LOST, HUNG_UP, which, call, " died before the end of call %u"));
    SPAR_TRY(spar_group_check(g, call, &broken_call));
    int stop = deadline->interrupted ? deadline->interrupted(deadline->context) : SPAR_CONTINUE;
    if (stop != SPAR_CONTINUE) {
        char text[64];
        snprintf(text, sizeof text, "rank %d %s in call %u", g->rank,
                 stop == SPAR_STOP_CLOSED ? "closed the group" : "was interrupted", (unsigned)g->call);
        spar_group_abort(g, SPAR_BROKEN, g->call, &(spar_ranks){1, {g->rank}}, text);
        return spar_fail_rank(stop == SPAR_STOP_CLOSED ? SPAR_BROKEN : SPAR_INTERRUPTED, g->rank, "%s", text);
    }
    if (!spar_deadline_passed(deadline))
        return SPAR_OK;
    if (which == SPAR_PUBLISHED)
        return fail_missing(g, SPAR_TIMEOUT, ALL, which, call, " did not make call %u in time");
    /* If this rank does not poll, no rank of this transport does. */
    if (which < SPAR_ARRIVED && (g->own->polls || g->links)) {
        watch_polls(g);
        SPAR_TRY(spar_group_check(g, call, &broken_call)); /* one that waits for another rank has told */
    }
    SPAR_TRY(fail_missing(g, SPAR_TIMEOUT, IDLE, which, call, " did not end call %u in time"));
    return fail_missing(g, SPAR_TIMEOUT, ALL, which, call, " did not end call %u in time");
}

spar_status spar_group_poll(spar_group *g, const spar_deadline *deadline)
{
    __atomic_add_fetch(&g->own->polls, 1, __ATOMIC_RELAXED);
    return poll_abort(g, SPAR_DONE, g->call, deadline);
}

/* Returns a near peer whose word is missing, preferably one that last ran on this core, *here; -1: none. */
static int missing_peer(const spar_group *g, enum spar_progress which, uint32_t call, uint32_t core,
                        int *here)
{
    int missing = -1;
    *here = 0;
    for (int i = 1; i < g->world; i++) {
        int rank = (g->rank + i) % g->world;
        mailbox *box = g->boxes[rank];
        if (!g->peers[rank] || spar_has_reached(progress_of(box, which), call))
            continue;
        if (core && __atomic_load_n(&box->core, __ATOMIC_RELAXED) == core) {
            *here = 1;
            return rank;
        }
        if (missing < 0)
            missing = rank;
    }
    return missing;
}

/* Polls before blocking; returns the rank to block for, or -1 if all words have arrived. A peer on this core
 * cannot run while this rank polls: yield to it a few times, then block. While all missing peers run
 * elsewhere, keep the core: another process that got it would keep it for a time slice. */
static int spin(spar_group *g, enum spar_progress which, uint32_t call)
{
    int64_t begin = 0, now = 0;
    for (int yields = 0;;) {
        int here, rank = missing_peer(g, which, call, note_core(g->own), &here);
        if (rank < 0)
            return -1;
        if (!begin)
            begin = now = spar_now_ns();
        if (now - begin >= g->spin_ns || (here && (yields == YIELDS || now < g->yield_from_ns)))
            return rank;
        const uint32_t *word = progress_of(g->boxes[rank], which);
        for (int i = 0; !here && i < POLLS && !spar_has_reached(word, call); i++)
            cpu_relax();
        int64_t before = now;
        if (here) {
            yields++;
            sched_yield();
        }
        now = spar_now_ns();
        if (here && now - before > LONG_YIELD_NS)
            g->yield_from_ns = now + YIELD_PAUSE * (now - before);
    }
}

/* Blocks until a peer's word has reached `call`. */
static spar_status block(spar_group *g, int rank, enum spar_progress which, uint32_t call,
                         const spar_deadline *deadline)
{
    mailbox *box = g->boxes[rank];
    uint32_t *word = progress_of(box, which);
    spar_status status = SPAR_OK;
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
    for (int rank; (rank = spin(g, which, call)) >= 0;)
        SPAR_TRY(block(g, rank, which, call, deadline));
    return g->links && which != SPAR_DONE ? spar_group_await_far(g, which, call, deadline) : SPAR_OK;
}

spar_status spar_group_await_far(spar_group *g, enum spar_progress which, uint32_t call,
                                 const spar_deadline *deadline)
{
    int64_t polled = spar_now_ns();
    while (!spar_links_reached(g, which)) {
        SPAR_TRY(spar_group_pump(g, SLICE_NS / 1000000)); /* a network takes longer than to block */
        int64_t now = spar_now_ns();
        if (now - polled >= SLICE_NS || g->news) {
            polled = now;
            g->news = 0;
            __atomic_add_fetch(&g->own->polls, 1, __ATOMIC_RELAXED);
            if (!spar_links_reached(g, which))
                SPAR_TRY(poll_abort(g, which, call, deadline));
        }
        if (which == SPAR_ARRIVED && spar_links_arrived(g))
            return SPAR_OK;
    }
    return SPAR_OK;
}
