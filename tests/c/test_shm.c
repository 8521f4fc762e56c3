/* Shared memory without Python: call numbers that wrap, wake-ups that must not be lost, calls that fail, and how
 * long the slowest ones take. Between real processes; and between threads, for the sanitizers that see only one.
 *
 * test_shm processes|threads WORLD CALLS: prints the median and the 99th percentile of a call in microseconds. */
#include "ipc/group.h"
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

/* What the ranks know of each other without spar. */
typedef struct {
    pthread_barrier_t barrier;
    int world, calls, quiet; /* quiet: the read end of a pipe on which nothing ever comes */
    spar_peer_info info[MOST];
    spar_setup_result opened[MOST], connected[MOST];
    spar_memory *kept[MOST];     /* threads only: each one's last output, */
    spar_peer peers[MOST][MOST]; /* and what it takes for the others' processes */
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

/* Threads share one arena, which stands for each one's own; a peer is a thread that never hangs up. */
static spar_comm *join_threads(rendezvous *m, int rank)
{
    spar_comm *comm = calloc(1, sizeof *comm);
    spar_peer *peers[MOST] = {NULL};
    int64_t offsets[MOST];
    spar_group *group;
    EXPECT(comm && !spar_arena_open(1 << 28, 1));
    EXPECT(!spar_group_open(m->world, rank, m->world, 0, &group, &m->opened[rank].offset));
    *comm = (spar_comm){.transport = &spar_transport_shm, .world = m->world, .rank = rank, .state = group};
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

/* One gather of `bytes` bytes that tell their rank and call; its output goes to *block. */
static spar_status try_gather(spar_comm *comm, int call_number, int64_t bytes, const char *text,
                              spar_status failed, int64_t limit_ns, spar_memory **block)
{
    unsigned char in[BYTES];
    const void *input = in;
    void *output = NULL;
    const int64_t one = 1, dim = 0;
    spar_tensor tensor = {1, 1, &bytes, &one, 1, &dim};
    spar_request request = {spar_op_find("gather"), comm->world, comm->rank, 0, 1, &tensor};
    spar_plan *plan;
    memset(in, (call_number * 31 + comm->rank) & 0xff, sizeof in);
    EXPECT(!spar_plan_get(&request, &plan));
    spar_call call = {.plan = plan,
                      .inputs = &input,
                      .outputs = &output,
                      .blocks = block,
                      .device = &spar_device_cpu,
                      .scale = {SPAR_UNSCALED, 0, 1},
                      .text = text,
                      .failed = failed,
                      .why = "it was told to",
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

/* Now and then one rank disagrees, or fails: all raise the same, and go on. */
static void disagree(spar_comm *comm, int call_number, int odd)
{
    spar_memory *block;
    int fails = call_number % 2, mine = comm->rank == odd;
    spar_status status = try_gather(comm, call_number, 64, mine && !fails ? "else" : "",
                                    mine && fails ? SPAR_NO_MEMORY : SPAR_OK, 20000000000, &block);
    EXPECT(status == (fails ? SPAR_NO_MEMORY : SPAR_MISMATCH));
    EXPECT(mine && fails ? strcmp(spar_last_error(), "it was told to") == 0
                         : strstr(spar_last_error(), fails ? "told to" : "calls differ") != NULL);
    for (int p = 0; p < comm->world; p++) {
        spar_description call;
        EXPECT(comm->transport->description(comm, p, &call) == !fails);
        EXPECT(fails || strstr(call.text, p == odd ? "else" : "gather") != NULL);
    }
}

/* Some fail, one of them for want of memory, and one disagrees: all tell of the lowest that failed. */
static void fail_together(spar_comm *comm)
{
    spar_memory *block;
    int last = comm->world - 1, fails = comm->rank == last || comm->rank == 1;
    spar_status status = try_gather(comm, 0, 64, comm->rank == 0 ? "else" : "",
                                    !fails               ? SPAR_OK
                                    : comm->rank == last ? SPAR_NO_MEMORY
                                                         : SPAR_INVALID,
                                    20000000000, &block);
    if (comm->world > 2)
        EXPECT(status == (comm->rank == last ? SPAR_NO_MEMORY
                          : comm->rank == 1  ? SPAR_INVALID
                                             : SPAR_MISMATCH));
    if (!fails)
        EXPECT(strcmp(spar_last_error(), "rank 1 failed: it was told to") == 0);
}

static void say_nothing(void *context, spar_description *own)
{
    (void)context;
    snprintf(own->text, sizeof own->text, "a lie");
}

/* A word from another process may be anything: nobody writes where an output cannot be. */
static void lie(spar_comm *comm, int64_t offset)
{
    static const char *const expected = "published an output outside its arena";
    spar_call_header all[MOST], own = {0};
    const spar_deadline deadline = {.at_ns = now_ns() + 20000000000};
    const int64_t bytes = 64, one = 1, dim = 0;
    spar_memory *block;
    uint32_t call;
    spar_tensor tensor = {1, 1, &bytes, &one, 1, &dim};
    spar_request request = {spar_op_find("gather"), comm->world, comm->rank, 0, 1, &tensor};
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
    EXPECT(!spar_group_begin(comm->state, &deadline, &call));
    EXPECT(!spar_group_publish(comm->state, &own, say_nothing, NULL, all, &deadline));
    EXPECT(spar_group_finish(comm->state, &deadline) == SPAR_BROKEN);
    EXPECT(strstr(spar_last_error(), expected));
}

/* One rank does not come: the others give up, and then all refuse. */
static void give_up(spar_comm *comm, rendezvous *m)
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

/* A rank's work; returns its last output. */
static spar_memory *work(rendezvous *m, spar_comm *comm)
{
    spar_memory *kept = NULL;
    int64_t *took = calloc((size_t)m->calls, sizeof *took);
    unsigned seed = (unsigned)comm->rank + 1;
    EXPECT(took != NULL);
    spar_group_start_at(comm->state, UINT32_MAX - 9); /* ten calls before the wrap */
    pthread_barrier_wait(&m->barrier);
    for (int i = 0; i < m->calls; i++) {
        const int64_t looks[] = {0, 20000, 200000}; /* sleeping at once, soon, and hardly ever */
        if (i % 500 == 0)
            spar_group_spin(comm->state, looks[(i / 500 + comm->rank) % 3]);
        int64_t begin = now_ns();
        gather(comm, i, i % 3 ? BYTES : 1 + i % BYTES, &kept);
        took[i] = now_ns() - begin;
        if (i % 97 == 5 && m->world > 1)
            disagree(comm, i, i / 97 % m->world);
        if (rand_r(&seed) % 64 == 0) /* so that now this rank is late, now that one sleeps */
            for (int64_t until = now_ns() + rand_r(&seed) % 200000; now_ns() < until;)
                ;
    }
    pthread_barrier_wait(&m->barrier);
    qsort(took, (size_t)m->calls, sizeof *took, ascending);
    if (comm->rank == 0)
        printf("%.1f %.1f\n", (double)took[m->calls / 2] / 1e3, (double)took[m->calls * 99 / 100] / 1e3);
    free(took);
    if (m->world == 1)
        return kept;
    fail_together(comm);
    if (m->calls % 2) {
        const int64_t lies[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX - 64, spar_arena_length() - 127};
        spar_memory *block;
        lie(comm, lies[m->calls / 2 % 5]);
        pthread_barrier_wait(&m->barrier);
        EXPECT(try_gather(comm, 0, 64, "", SPAR_OK, 20000000000, &block) == SPAR_BROKEN);
    } else {
        give_up(comm, m);
    }
    return kept;
}

/* ---- processes and threads ---- */

static void be_process(void *context, int rank)
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

static void *be_thread(void *argument)
{
    place *at = argument;
    rendezvous *m = at->m;
    spar_comm *comm = join_threads(m, at->rank);
    m->kept[at->rank] = work(m, comm);
    pthread_barrier_wait(&m->barrier);
    spar_memory_free(m->kept[(at->rank + 1) % m->world]); /* on another thread than its call's */
    spar_comm_close(comm);
    pthread_barrier_wait(&m->barrier);
    for (int looks = 0; at->rank == 0 && looks < 2; looks++)
        spar_arena_trim(); /* the outputs that were held back; then the mailboxes that they needed */
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
        EXPECT(pthread_create(&threads[rank], NULL, be_thread, &places[rank]) == 0);
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
    return strcmp(argv[1], "threads") == 0 ? run_threads(m) : run_ranks(m->world, be_process, m);
}
