/* SPDX-License-Identifier: Apache-2.0 */
/* The call ring between processes: entries that are read while they change, calls that differ, a rank that
 * dies, and a rank whose memory is corrupt.
 *
 * test_ring WORLD CALLS */
#include "control/ring.h"

#include "control/mailbox.h"
#include "transports/rendezvous.h"
#include "processes.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { MOST = 8 };

typedef struct {
    pthread_barrier_t barrier;
    int world, calls, ended;
    int at[MOST]; /* each rank's call */
    spar_peer_info info[MOST];
    spar_setup_result opened[MOST];
} rendezvous;

/* A rank's call ring, and what it needs to corrupt it. */
typedef struct {
    rendezvous *m;
    int rank;
    spar_group *group;
    spar_ring *ring;
    char *mailbox; /* what the peers read, the entries behind it, too */
    uint64_t n;
    int64_t forward; /* of its next call */
    pthread_t watcher;
    int stop;
} rank_state;

static void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

static void join(rank_state *r)
{
    rendezvous *m = r->m;
    const spar_deadline deadline = {.at_ns = spar_now_ns() + 20000000000};
    const spar_comm comm = {.world = m->world, .rank = r->rank, .local_ranks = m->world, .info = m->info};
    EXPECT(!spar_peers_listen(&m->info[r->rank].endpoint, &m->info[r->rank].secret));
    pthread_barrier_wait(&m->barrier);
    EXPECT(!spar_rendezvous_begin(&comm, spar_ring_room(), &r->group, &m->opened[r->rank].offset));
    EXPECT(!spar_ring_open(r->group, &r->ring));
    pthread_barrier_wait(&m->barrier);
    EXPECT(!spar_rendezvous_end(&comm, r->group, m->opened, &deadline));
    r->mailbox = spar_arena_base() + m->opened[r->rank].offset;
    r->n = 0;
    pthread_barrier_wait(&m->barrier);
}

static void leave(rank_state *r)
{
    spar_ring_close(r->ring);
    spar_group_close(r->group);
}

/* Begins a gather of `items` items; `why`: NULL, or the reason why this rank cannot make the call. */
static spar_status begin_call(rank_state *r, int64_t items, const char *text, const char *why)
{
    const int64_t one = 1, args[] = {3, 0, SPAR_EVEN, items * r->m->world, -1};
    spar_tensor tensor = {1, 1, &items, &one, 5, args};
    spar_request request = {r->m->world, r->rank, 0, 1, &tensor};
    spar_plan *plan;
    EXPECT(!spar_plan_get(&request, &plan));
    spar_call call = {.plan = why ? NULL : plan,
                      .text = text,
                      .forward = r->forward,
                      .failed = why ? SPAR_INVALID : SPAR_OK,
                      .why = why,
                      .op = "gather"};
    const spar_call_header own = {
        .signature = why ? 0 : spar_plan_signature(plan, text), .forward = r->forward, .status = call.failed};
    spar_status status = spar_ring_begin(r->ring, ++r->n, &own, spar_call_describe, &call, 1);
    spar_plan_release(plan);
    return status;
}

/* ---- equal calls ---- */

static void *watchdog(void *argument)
{
    rank_state *r = argument;
    const struct timespec moment = {0, 100000};
    char text[300];
    spar_words words;
    for (uint64_t n = 1; !__atomic_load_n(&r->stop, __ATOMIC_ACQUIRE); n += 7) {
        EXPECT(!spar_ring_poll(r->ring, n));
        spar_ring_absent(r->ring, n, &(spar_ranks){0}, text, sizeof text);
        spar_group_last_call(r->group, (r->rank + 1) % r->m->world);
        EXPECT(spar_group_words(r->group, (r->rank + 1) % r->m->world, &words) && !words.broken);
        spar_ring_complete(r->ring, n);
        nanosleep(&moment, NULL);
    }
    return NULL;
}

/* Keeps the peers a ring's length behind rank 0: they read entries that it is overwriting. */
static void keep_behind(const rank_state *r, int i)
{
    rendezvous *m = r->m;
    __atomic_store_n(&m->at[r->rank], i, __ATOMIC_RELEASE);
    for (int rank = r->rank ? 0 : 1; rank < (r->rank ? 1 : m->world); rank++)
        for (int ahead = 0, polls = 0;; polls++) {
            int at = __atomic_load_n(&m->at[rank], __ATOMIC_ACQUIRE);
            ahead = r->rank ? at - i : i - at;
            if (r->rank ? ahead >= 1022 || at == m->calls : ahead <= 1026)
                break;
            if (polls > 1000)
                sched_yield();
        }
}

static void agree(rank_state *r)
{
    join(r);
    r->stop = 0;
    EXPECT(pthread_create(&r->watcher, NULL, watchdog, r) == 0);
    for (int i = 0; i < r->m->calls; i++) {
        char text[40];
        snprintf(text, sizeof text, ", number %d", i % 3000);
        keep_behind(r, i);
        r->forward = (i + r->rank) % 2 ? i + 1 : 0; /* not known to all */
        EXPECT(!begin_call(r, 1 + i % 7, text, i % 11 == 5 ? "every rank fails" : NULL));
    }
    r->forward = 0;
    __atomic_store_n(&r->m->at[r->rank], r->m->calls, __ATOMIC_RELEASE);
    pthread_barrier_wait(&r->m->barrier);
    __atomic_store_n(&r->stop, 1, __ATOMIC_RELEASE);
    EXPECT(pthread_join(r->watcher, NULL) == 0);
    pthread_barrier_wait(&r->m->barrier); /* the watchers of the others still read this rank's words */
    leave(r);
}

/* ---- faults ---- */

static void one_after_another(rank_state *r, void (*act)(rank_state *r))
{
    for (int turn = 0; turn < r->m->world; turn++) {
        if (turn == r->rank)
            act(r);
        pthread_barrier_wait(&r->m->barrier);
    }
}

static void differ(rank_state *r)
{
    int last = r->rank == r->m->world - 1;
    spar_status status = begin_call(r, 4, last ? " different" : " equal", NULL);
    EXPECT(status == (last ? SPAR_MISMATCH : SPAR_OK));
    if (last) {
        EXPECT(strstr(spar_last_error(), " equal\n") && strstr(spar_last_error(), " different"));
        spar_ring_abort(r->ring, SPAR_MISMATCH, spar_last_error_ranks(), spar_last_error());
        spar_ring_abort(r->ring, SPAR_TIMEOUT, &(spar_ranks){0}, "a second reason");
    }
}

static void expect_abort(rank_state *r)
{
    if (r->rank == r->m->world - 1)
        return;
    EXPECT(spar_ring_poll(r->ring, 1) == SPAR_MISMATCH);
    EXPECT(strstr(spar_last_error(), " different"));
    spar_words words;
    EXPECT(spar_group_words(r->group, r->m->world - 1, &words) && words.broken == SPAR_MISMATCH);
    EXPECT(begin_call(r, 4, " equal", NULL) == SPAR_MISMATCH);
}

/* The last rank's exchange moves the gradient of another call. */
static void cross(rank_state *r)
{
    int last = r->rank == r->m->world - 1;
    r->forward = last ? 8 : 7;
    EXPECT(begin_call(r, 4, "", NULL) == (last ? SPAR_MISMATCH : SPAR_OK));
    EXPECT(!last || (strstr(spar_last_error(), "(gradient of call 7)\n") &&
                     strstr(spar_last_error(), "(gradient of call 8)")));
    r->forward = 0;
}

/* Rank 0 cannot make the call that its peers make. */
static void fail_alone(rank_state *r)
{
    char text[100];
    spar_ring_absent(r->ring, 1, &(spar_ranks){0}, text, sizeof text);
    EXPECT((r->rank == r->m->world - 1) == !strstr(text, "(process"));
    EXPECT(begin_call(r, 4, "", r->rank ? NULL : "no room") == (r->rank ? SPAR_MISMATCH : SPAR_OK));
    EXPECT(!r->rank || strstr(spar_last_error(), "rank 0: failed: no room"));
}

/* Overwrites rank 0's mailbox and entries. The peers must still end their calls, with terminated texts. */
static void overwrite(rank_state *r, unsigned seed)
{
    size_t size = 250000; /* all that the peers read */
    if (seed == 0) {      /* its call alone: another signature, and a text without a terminator */
        char *text = memmem(r->mailbox, size, "gather", 6);
        EXPECT(text);
        memset(text - 2 * sizeof(uint64_t), 0xff, 240 + 2 * sizeof(uint64_t));
        return;
    }
    for (size_t i = 0; i < size; i++)
        r->mailbox[i] = seed == 1 ? (char)0xff : (char)rand_r(&seed);
}

static void corrupt(rank_state *r, unsigned seed)
{
    join(r);
    if (r->rank == 0) {
        EXPECT(!begin_call(r, 4, "", NULL));
        overwrite(r, seed);
    }
    pthread_barrier_wait(&r->m->barrier);
    for (int i = 0; r->rank && i < 1100; i++) {
        char text[64];
        spar_status status = begin_call(r, 4, "", NULL);
        if (seed < 2) /* random words may say that rank 0 will end this call */
            EXPECT(seed ? status != SPAR_OK : status == (i ? SPAR_OK : SPAR_MISMATCH));
        if (status != SPAR_OK)
            EXPECT(strchr(spar_last_error(), '\xff') || seed > 1);
        if (i == 0)
            EXPECT(strlen(spar_last_error()) < 1200);
        spar_status polled = spar_ring_poll(r->ring, r->n);
        EXPECT(seed > 1 || (polled == SPAR_OK) == (seed == 0));
        spar_ring_absent(r->ring, r->n, &(spar_ranks){0}, text, sizeof text);
        EXPECT(strlen(text) < sizeof text);
        spar_group_last_call(r->group, 0);
    }
    pthread_barrier_wait(&r->m->barrier);
    leave(r);
    pthread_barrier_wait(&r->m->barrier);
}

/* Rank 0 dies. Its peers report that at once for a call that it did not make, after a second for one under
 * way, and never for a completed one. */
static void die(rank_state *r)
{
    const struct timespec moment = {0, 20000000};
    spar_status status;
    join(r);
    EXPECT(!begin_call(r, 4, "", NULL) && !begin_call(r, 4, "", NULL));
    spar_ring_complete(r->ring, 1);
    pthread_barrier_wait(&r->m->barrier);
    for (int rank = 0; rank < r->m->world; rank++) {
        spar_words words;
        EXPECT(spar_group_words(r->group, rank, &words) && words.published == 2 && words.done == 1);
    }
    if (r->rank == 0)
        exit(0);
    for (int i = 0; i < 10; i++, nanosleep(&moment, NULL))
        EXPECT(!spar_ring_poll(r->ring, 1));
    int64_t begin = spar_now_ns();
    while ((status = spar_ring_poll(r->ring, 2)) == SPAR_OK && spar_now_ns() - begin < 5000000000)
        nanosleep(&moment, NULL);
    EXPECT(status == SPAR_PEER_LOST && strstr(spar_last_error(), "died before the end of call 2"));
    EXPECT(spar_now_ns() - begin > 500000000);
    nanosleep(&(struct timespec){0, 60000000}, NULL);
    EXPECT(spar_ring_poll(r->ring, 3) == SPAR_PEER_LOST);
    __atomic_add_fetch(&r->m->ended, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&r->m->ended, __ATOMIC_SEQ_CST) < r->m->world - 1)
        nanosleep(&moment, NULL);
    leave(r);
}

static void work(void *context, int rank)
{
    rank_state r = {.m = context, .rank = rank};
    agree(&r);
    join(&r);
    one_after_another(&r, differ);
    one_after_another(&r, expect_abort);
    leave(&r);
    join(&r);
    one_after_another(&r, cross);
    leave(&r);
    join(&r);
    one_after_another(&r, fail_alone);
    leave(&r);
    for (unsigned seed = 0; seed < 5; seed++)
        corrupt(&r, seed);
    die(&r);
}

int test_ring(int argc, char **argv)
{
    rendezvous *m = shared_memory(sizeof *m);
    EXPECT(m && argc == 3);
    m->world = atoi(argv[1]);
    m->calls = atoi(argv[2]);
    EXPECT(m->world >= 2 && m->world <= MOST && m->calls >= 1);
    share_barrier(&m->barrier, m->world);
    return run_ranks(m->world, work, m);
}
