/* SPDX-License-Identifier: Apache-2.0 */
/* The shm transport without Python: call numbers that wrap, wake-ups that must not be lost, calls that fail,
 * and the latency of the slowest calls. Ranks are processes, or threads for the sanitizers, which see one
 * process only.
 *
 * test_shm processes|threads WORLD CALLS: prints the median and the 99th percentile of a call in
 * microseconds. */
#include "control/control.h"
#include "processes.h"
#include "spar.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { MOST = 8, BYTES = 2048 };

extern const spar_transport spar_transport_shm;

/* What the ranks exchange without spar. */
typedef struct {
    pthread_barrier_t barrier;
    int world, calls, quiet; /* quiet: the read end of a pipe that nobody writes to */
    spar_peer_info info[MOST];
    spar_setup_result opened[MOST], connected[MOST];
    spar_memory *kept[MOST];     /* threads only: the last output of each rank, */
    spar_peer peers[MOST][MOST]; /* and its simulated peer processes */
} rendezvous;

static void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* ---- joining ---- */

static spar_comm *join_processes(rendezvous *m, int rank)
{
    spar_comm *comm;
    const spar_deadline deadline = {.at_ns = now_ns() + 20000000000};
    spar_peer_info_read(&m->info[rank]);
    pthread_barrier_wait(&m->barrier);
    EXPECT(!spar_comm_open(&spar_transport_shm, m->info, m->world, rank, m->world, NULL, &comm,
                           &m->opened[rank]));
    pthread_barrier_wait(&m->barrier);
    EXPECT(!spar_comm_connect(comm, m->opened, &deadline, &m->connected[rank]));
    pthread_barrier_wait(&m->barrier);
    for (int p = 0; p < m->world; p++)
        EXPECT(!m->connected[p].failed);
    return comm;
}

/* Threads share one arena, which stands for the arena of each rank; their connections never hang up. */
static spar_comm *join_threads(rendezvous *m, int rank)
{
    spar_comm *comm = calloc(1, sizeof *comm);
    spar_peer *peers[MOST] = {NULL};
    int64_t offsets[MOST];
    spar_group *group;
    EXPECT(comm && !spar_arena_open(1 << 28, 1));
    EXPECT(!spar_group_open(m->world, rank, 0, &group, &m->opened[rank].offset));
    *comm = (spar_comm){.transport = &spar_transport_shm, .world = m->world, .rank = rank, .group = group};
    pthread_barrier_wait(&m->barrier);
    for (int p = 0; p < m->world; p++) {
        offsets[p] = m->opened[p].offset;
        if (p == rank)
            continue;
        peers[p] = &m->peers[rank][p];
        *peers[p] = (spar_peer){.endpoint = {getpid(), (uint64_t)p + 1},
                                .base = spar_arena_base(),
                                .length = spar_arena_length(),
                                .socket = m->quiet,
                                .pidfd = -1,
                                .groups = 1,
                                .readers = 1};
    }
    EXPECT(!spar_group_attach(group, peers, offsets));
    return comm;
}

/* ---- calls ---- */

static _Thread_local int64_t forward_call; /* the call whose gradient a gather moves */

/* Gathers `bytes` bytes that encode the rank and the call; *block: the output. */
static spar_status try_gather(spar_comm *comm, int call_number, int64_t bytes, const char *text,
                              spar_status failed, int64_t limit_ns, spar_memory **block)
{
    unsigned char in[BYTES];
    const void *input = in;
    void *output = NULL;
    const int64_t one = 1, args[] = {3, 0, SPAR_EVEN, bytes * comm->world, -1};
    spar_tensor tensor = {1, 1, &bytes, &one, 5, args};
    spar_request request = {comm->world, comm->rank, 0, 1, &tensor};
    spar_plan *plan;
    memset(in, (call_number * 31 + comm->rank) & 0xff, sizeof in);
    EXPECT(!spar_plan_get(&request, &plan));
    spar_call call = {.plan = plan,
                      .inputs = &input,
                      .outputs = &output,
                      .blocks = block,
                      .scale = {SPAR_UNSCALED, 0, 1},
                      .text = text,
                      .forward = forward_call,
                      .failed = failed,
                      .why = "an injected failure",
                      .op = "gather",
                      .deadline = {.at_ns = now_ns() + limit_ns}};
    *block = NULL;
    spar_status status = spar_comm_run(comm, &call);
    EXPECT((status == SPAR_OK) == (*block != NULL));
    for (int p = 0; status == SPAR_OK && p < comm->world; p++)
        for (int64_t i = 0; i < bytes; i++)
            EXPECT(((unsigned char *)output)[p * bytes + i] == ((call_number * 31 + p) & 0xff));
    spar_plan_release(plan);
    return status;
}

static void gather(spar_comm *comm, int call_number, int64_t bytes, spar_memory **kept)
{
    spar_memory *block;
    EXPECT(!try_gather(comm, call_number, bytes, "", SPAR_OK, 20000000000, &block));
    if (*kept)
        spar_memory_free(*kept);
    *kept = block;
}

/* Sums bytes that encode the rank and the call: a matrix whose columns are scattered. The own part stays in
 * the input if the matrix has one row. */
static void reduce_scatter(spar_comm *comm, int call_number, int64_t rows)
{
    enum { WIDTH = 100 };
    unsigned char in[3 * MOST * WIDTH], sum = 0;
    const void *input = in;
    void *output = NULL;
    spar_memory *block = NULL;
    const int64_t columns = WIDTH * comm->world, extents[] = {1, rows, columns};
    const int64_t strides[] = {rows * columns, columns, 1};
    const int64_t args[] = {3, 0, SPAR_EVEN, comm->world, 2, SPAR_EVEN, columns};
    spar_tensor tensor = {1, 3, extents, strides, 7, args};
    spar_request request = {comm->world, comm->rank, 0, 1, &tensor};
    spar_plan *plan;
    memset(in, call_number * 31 + comm->rank, sizeof in);
    EXPECT(!spar_plan_get(&request, &plan));
    spar_call call = {.plan = plan,
                      .inputs = &input,
                      .outputs = &output,
                      .blocks = &block,
                      .scale = {SPAR_UNSCALED, 0, 1},
                      .sum = SPAR_SUM_I8,
                      .text = "",
                      .op = "reduce_scatter",
                      .deadline = {.at_ns = now_ns() + 20000000000}};
    EXPECT(!spar_comm_run(comm, &call));
    for (int p = 0; p < comm->world; p++)
        sum = (unsigned char)(sum + call_number * 31 + p);
    for (int64_t i = 0; i < rows * WIDTH; i++)
        EXPECT(((unsigned char *)output)[i] == sum);
    spar_memory_free(block);
    spar_plan_release(plan);
}

/* The call of rank `odd` differs or fails: all ranks raise the same error, and the group stays usable. */
static void disagree(spar_comm *comm, int call_number, int odd)
{
    spar_memory *block;
    int fails = call_number % 2, mine = comm->rank == odd;
    spar_status status = try_gather(comm, call_number, 64, mine && !fails ? "other" : "",
                                    mine && fails ? SPAR_NO_MEMORY : SPAR_OK, 20000000000, &block);
    EXPECT(status == (fails ? SPAR_NO_MEMORY : SPAR_MISMATCH));
    EXPECT(mine && fails ? strcmp(spar_last_error(), "an injected failure") == 0
                         : strstr(spar_last_error(), fails ? "injected" : "calls differ") != NULL);
    for (int p = 0; p < comm->world; p++) {
        const spar_description *call = spar_group_description(comm->group, p);
        EXPECT((call == NULL) == fails);
        EXPECT(fails || strstr(call->text, p == odd ? "other" : "gather") != NULL);
    }
}

/* Ranks move the gradients of different calls; where one does not know its call, it agrees with any. */
static void cross(spar_comm *comm, int call_number, int odd)
{
    spar_memory *block;
    forward_call = comm->rank == odd ? 0 : 7;
    EXPECT(!try_gather(comm, call_number, 64, "", SPAR_OK, 20000000000, &block));
    spar_memory_free(block);
    forward_call = comm->rank == odd ? 8 : 7;
    EXPECT(try_gather(comm, call_number, 64, "", SPAR_OK, 20000000000, &block) == SPAR_MISMATCH);
    forward_call = 0;
}

/* Ranks fail with different errors, and one differs: all report the lowest rank that failed. */
static void fail_together(spar_comm *comm)
{
    spar_memory *block;
    int last = comm->world - 1, fails = comm->rank == last || comm->rank == 1;
    spar_status status = try_gather(comm, 0, 64, comm->rank == 0 ? "other" : "",
                                    !fails               ? SPAR_OK
                                    : comm->rank == last ? SPAR_NO_MEMORY
                                                         : SPAR_INVALID,
                                    20000000000, &block);
    if (comm->world > 2)
        EXPECT(status == (comm->rank == last ? SPAR_NO_MEMORY
                          : comm->rank == 1  ? SPAR_INVALID
                                             : SPAR_MISMATCH));
    if (!fails)
        EXPECT(strcmp(spar_last_error(), "rank 1 failed: an injected failure") == 0);
}

static void describe_call(const void *call, char *text, size_t size, spar_gathered_size *gathered)
{
    (void)call;
    (void)gathered;
    snprintf(text, size, "a corrupt call");
}

/* Rank 0 publishes an invalid offset: no peer writes there. */
static void publish_offset(spar_comm *comm, int64_t offset)
{
    static const char *const expected = "published an output outside its arena";
    spar_call_header all[MOST], own = {0};
    const spar_deadline deadline = {.at_ns = now_ns() + 20000000000};
    const int64_t bytes = 64, one = 1, args[] = {3, 0, SPAR_EVEN, bytes * comm->world, -1};
    spar_memory *block;
    uint32_t call;
    spar_tensor tensor = {1, 1, &bytes, &one, 5, args};
    spar_request request = {comm->world, comm->rank, 0, 1, &tensor};
    spar_plan *plan;
    if (comm->rank != 0) {
        spar_status status = try_gather(comm, 0, bytes, "", SPAR_OK, 20000000000, &block);
        EXPECT(status == SPAR_TRANSPORT || status == SPAR_BROKEN);
        EXPECT(strstr(spar_last_error(), expected));
        return;
    }
    EXPECT(!spar_plan_get(&request, &plan));
    own.signature = spar_plan_signature(plan, "");
    own.offsets[0] = offset;
    spar_plan_release(plan);
    EXPECT(!spar_group_begin(comm->group, &deadline, &call));
    EXPECT(!spar_group_publish(comm->group, &own, describe_call, NULL, all, &deadline));
    EXPECT(spar_group_finish(comm->group, &deadline) == SPAR_BROKEN);
    EXPECT(strstr(spar_last_error(), expected));
}

/* One rank makes no call: the others time out, and then the group is broken on all. */
static void time_out(spar_comm *comm, rendezvous *m)
{
    spar_memory *block;
    int missing = comm->world - 1;
    if (comm->rank != missing) {
        spar_status status = try_gather(comm, 0, 64, "", SPAR_OK, 200000000, &block);
        EXPECT(status == SPAR_TIMEOUT || status == SPAR_BROKEN);
        EXPECT(strstr(spar_last_error(), "did not make"));
    }
    pthread_barrier_wait(&m->barrier);
    EXPECT(try_gather(comm, 0, 64, "", SPAR_OK, 20000000000, &block) == SPAR_BROKEN);
}

static int ascending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Runs a rank's calls; returns its last output. */
static spar_memory *work(rendezvous *m, spar_comm *comm)
{
    spar_memory *kept = NULL;
    int64_t *times = calloc((size_t)m->calls, sizeof *times);
    unsigned seed = (unsigned)comm->rank + 1;
    EXPECT(times != NULL);
    spar_group_start_at(comm->group, UINT32_MAX - 9); /* ten calls before the wrap */
    pthread_barrier_wait(&m->barrier);
    for (int i = 0; i < m->calls; i++) {
        const int64_t spins_ns[] = {0, 20000, 200000}; /* block at once, soon, and hardly ever */
        if (i % 500 == 0)
            spar_group_spin(comm->group, spins_ns[(i / 500 + comm->rank) % 3]);
        int64_t begin = now_ns();
        gather(comm, i, i % 3 ? BYTES : 1 + i % BYTES, &kept);
        times[i] = now_ns() - begin;
        if (i % 7 == 3)
            reduce_scatter(comm, i, 1 + i % 3);
        if (i % 97 == 5 && m->world > 1)
            disagree(comm, i, i / 97 % m->world);
        if (i % 97 == 50 && m->world > 1)
            cross(comm, i, i / 97 % m->world);
        if (rand_r(&seed) % 64 == 0) /* vary which rank is late, and which blocks */
            for (int64_t until = now_ns() + rand_r(&seed) % 200000; now_ns() < until;)
                ;
    }
    pthread_barrier_wait(&m->barrier);
    qsort(times, (size_t)m->calls, sizeof *times, ascending);
    if (comm->rank == 0)
        printf("%.1f %.1f\n", (double)times[m->calls / 2] / 1e3, (double)times[m->calls * 99 / 100] / 1e3);
    free(times);
    if (m->world == 1)
        return kept;
    fail_together(comm);
    pthread_barrier_wait(&m->barrier); /* ranks that failed do not wait, and the next call's limit is short */
    if (m->calls % 2) {
        const int64_t invalid[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX - 64, spar_arena_length() - 127};
        spar_memory *block;
        publish_offset(comm, invalid[m->calls / 2 % 5]);
        pthread_barrier_wait(&m->barrier);
        EXPECT(try_gather(comm, 0, 64, "", SPAR_OK, 20000000000, &block) == SPAR_BROKEN);
    } else {
        time_out(comm, m);
    }
    return kept;
}

/* ---- processes and threads ---- */

static void run_process(void *context, int rank)
{
    rendezvous *m = context;
    spar_comm *comm = join_processes(m, rank);
    spar_memory_free(work(m, comm));
    spar_comm_close(comm);
}

typedef struct {
    rendezvous *m;
    int rank;
} place;

static void *run_thread(void *argument)
{
    place *at = argument;
    rendezvous *m = at->m;
    spar_comm *comm = join_threads(m, at->rank);
    m->kept[at->rank] = work(m, comm);
    pthread_barrier_wait(&m->barrier);
    spar_memory_free(m->kept[(at->rank + 1) % m->world]); /* on another thread than that of its call */
    spar_comm_close(comm);
    pthread_barrier_wait(&m->barrier);
    for (int i = 0; at->rank == 0 && i < 2; i++)
        spar_arena_trim(); /* the quarantined outputs, then the mailboxes that they needed */
    return NULL;
}

static int run_threads(rendezvous *m)
{
    pthread_t threads[MOST];
    place places[MOST];
    spar_arena_stats stats;
    int ends[2];
    EXPECT(pipe(ends) == 0);
    m->quiet = ends[0];
    for (int rank = 0; rank < m->world; rank++) {
        places[rank] = (place){m, rank};
        EXPECT(pthread_create(&threads[rank], NULL, run_thread, &places[rank]) == 0);
    }
    for (int rank = 0; rank < m->world; rank++)
        pthread_join(threads[rank], NULL);
    spar_arena_read_stats(&stats);
    EXPECT(stats.allocated == 0 && stats.quarantined == 0 && stats.peak > 0);
    spar_plan_cache_limit(0);
    return 0;
}

int test_shm(int argc, char **argv)
{
    rendezvous *m = shared_memory(sizeof *m);
    EXPECT(m && argc == 4);
    m->world = atoi(argv[2]);
    m->calls = atoi(argv[3]);
    EXPECT(m->world >= 1 && m->world <= MOST && m->calls >= 1);
    share_barrier(&m->barrier, m->world);
    return strcmp(argv[1], "threads") == 0 ? run_threads(m) : run_ranks(m->world, run_process, m);
}
