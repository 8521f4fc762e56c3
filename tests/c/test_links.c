/* SPDX-License-Identifier: Apache-2.0 */
/* Groups whose ranks share no memory: calls over TCP between threads of one process.
 *
 * test_links WORLD */
#include "member.h"

#include <time.h>

static const int64_t SHORT_NS = 500000000;

typedef struct {
    pthread_barrier_t barrier;
    int world;
    spar_tcp_endpoint endpoints[MOST];
    member members[MOST];
} world;

static void join(world *w, int rank)
{
    member *m = &w->members[rank];
    open_member(m, w->world, rank);
    EXPECT(!spar_tcp_listen(w->world, rank, &w->endpoints[rank], &m->setup));
    pthread_barrier_wait(&w->barrier);
    connect_member(m, w->endpoints);
}

static void call_all_sizes(member *m)
{
    static const int64_t sizes[] = {0, 100, EAGER_BYTES, EAGER_BYTES + 1, LARGE};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    for (int i = 0; i < 4 * SIZES; i++) {
        if (i % 7 == m->rank) /* a rank that is late */
            nanosleep(&(struct timespec){0, 2000000}, NULL);
        EXPECT(!call(m, sizes[i % SIZES]));
    }
}

/* Rank 0 makes another call: all raise it, with each rank's description, and make further calls. */
static void call_differently(member *m)
{
    static const int64_t sizes[] = {100, LARGE};
    for (int i = 0; i < 4; i++) {
        int64_t bytes = sizes[i % 2];
        EXPECT(call_for(m, m->rank ? bytes : bytes + 5, m->rank ? 2 : 3, LONG_NS) == SPAR_MISMATCH);
        for (int rank = 0; rank < m->world; rank++) {
            char expected[64];
            const spar_description *made = spar_group_description(m->group, rank);
            snprintf(expected, sizeof expected, "rank %d moves %lld bytes", rank,
                     (long long)(rank ? bytes : bytes + 5));
            EXPECT(made && strcmp(made->text, expected) == 0);
        }
        EXPECT(!call(m, bytes));
    }
}

static void fail_call(member *m)
{
    spar_deadline deadline = after(LONG_NS);
    pthread_mutex_lock(spar_group_lock(m->group));
    EXPECT(!spar_group_begin(m->group, &deadline, &m->call));
    spar_group_fail(m->group, SPAR_NO_MEMORY, "an injected failure");
    pthread_mutex_unlock(spar_group_lock(m->group));
}

/* Ranks fail twice in a row, each in its turn. */
static void fail_in_turn(member *m)
{
    static const int64_t sizes[] = {100, LARGE};
    for (int i = 0; i < 2 * m->world; i++) {
        if (i / 2 == m->rank) {
            fail_call(m);
        } else {
            EXPECT(call(m, sizes[i % 2]) == SPAR_NO_MEMORY);
            EXPECT(strstr(spar_last_error(), "failed: an injected failure"));
            EXPECT(spar_last_error_ranks()->count == 1 && spar_last_error_ranks()->rank[0] == i / 2);
        }
        if (i % 2)
            EXPECT(!call(m, sizes[i % 2]));
    }
}

static void leave(world *w, int rank)
{
    pthread_barrier_wait(&w->barrier);
    spar_group_close(w->members[rank].group);
    pthread_barrier_wait(&w->barrier);
}

/* The last rank breaks the group: the others raise why, in this call and in later ones. */
static void break_group(member *m)
{
    spar_deadline deadline = after(LONG_NS);
    if (m->rank == m->world - 1) {
        EXPECT(!spar_group_begin(m->group, &deadline, &m->call));
        spar_group_break(m->group, "an injected reason");
    }
    for (int i = 0; i < 2; i++) {
        EXPECT(call(m, LARGE) == SPAR_BROKEN);
        EXPECT(strstr(spar_last_error(), "an injected reason"));
    }
}

/* The last rank makes no call: the others raise that at the deadline, and it raises that they did. */
static void miss_deadline(world *w, member *m)
{
    int is_absent = m->rank == m->world - 1;
    if (!is_absent) {
        spar_status status = call_for(m, m->world == 2 ? LARGE : 100, 1, SHORT_NS);
        EXPECT(status == SPAR_TIMEOUT);
        EXPECT(strstr(spar_last_error(), "(process 10"));
    }
    pthread_barrier_wait(&w->barrier);
    spar_status status = call(m, 100);
    EXPECT(status == SPAR_TIMEOUT || status == SPAR_BROKEN);
    EXPECT(call(m, 100) == SPAR_BROKEN);
}

/* The last rank closes the group: others raise that. */
static void close_group(world *w, member *m)
{
    int closes = m->rank == m->world - 1;
    if (closes)
        spar_group_close(m->group);
    else
        EXPECT(call(m, EAGER_BYTES) == SPAR_BROKEN && strstr(spar_last_error(), "closed the group"));
    pthread_barrier_wait(&w->barrier);
    if (!closes)
        spar_group_close(m->group);
    pthread_barrier_wait(&w->barrier);
}

typedef struct {
    world *world;
    int rank;
} place;

static void *run_rank(void *argument)
{
    const place *here = argument;
    world *w = here->world;
    member *m = &w->members[here->rank];
    for (int i = 0; i < 4; i++) {
        join(w, here->rank);
        if (i % 2)
            spar_group_start_at(m->group, UINT32_MAX - 2);
        call_all_sizes(m);
        if (i == 0) {
            call_differently(m);
            fail_in_turn(m);
            break_group(m);
        } else if (i == 1) {
            fail_in_turn(m);
        } else if (i == 2) {
            miss_deadline(w, m);
        } else {
            close_group(w, m);
            continue;
        }
        leave(w, here->rank);
    }
    return NULL;
}

static void run_world(int size)
{
    static world w;
    pthread_t threads[MOST];
    place places[MOST];
    w.world = size;
    pthread_barrier_init(&w.barrier, NULL, (unsigned)size);
    for (int rank = 0; rank < size; rank++) {
        places[rank] = (place){&w, rank};
        EXPECT(pthread_create(&threads[rank], NULL, run_rank, &places[rank]) == 0);
    }
    for (int rank = 0; rank < size; rank++)
        pthread_join(threads[rank], NULL);
    pthread_barrier_destroy(&w.barrier);
}

int test_links(int argc, char **argv)
{
    setenv("GLOO_SOCKET_IFNAME", "lo", 1);
    if (argc != 2)
        return 2;
    run_world(atoi(argv[1]));
    return 0;
}
