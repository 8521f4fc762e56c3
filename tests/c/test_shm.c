/* Shared memory between real processes, without Python: call numbers that wrap, wake-ups that must not be lost,
 * and how long the slowest calls take.
 *
 * test_shm WORLD CALLS: prints the median and the 99th percentile of a call in microseconds. */
#include "group.h"
#include "spar.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { MOST = 8, BYTES = 2048 };

extern const spar_transport spar_transport_shm;

/* What the ranks know of each other without spar. */
typedef struct {
    pthread_barrier_t barrier;
    spar_facts facts[MOST];
    spar_verdict opened[MOST], connected[MOST];
} meeting;

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

static spar_comm *join(meeting *m, int rank, int world)
{
    spar_comm *comm;
    const spar_patience patience = {.deadline_ns = now_ns() + 20000000000};
    spar_facts_read(&m->facts[rank]);
    pthread_barrier_wait(&m->barrier);
    EXPECT(!spar_comm_open(&spar_transport_shm, m->facts, world, rank, world, &comm,
                           &m->opened[rank]));
    pthread_barrier_wait(&m->barrier);
    EXPECT(!spar_comm_connect(comm, m->opened, &patience, &m->connected[rank]));
    spar_group_start_at(comm->state, UINT32_MAX - 9); /* ten calls before the wrap */
    pthread_barrier_wait(&m->barrier);
    for (int p = 0; p < world; p++)
        EXPECT(!m->connected[p].failed);
    return comm;
}

/* A gather of `bytes` bytes that tell their rank and call. */
static void gather(spar_comm *comm, int call_number, int64_t bytes, spar_memory **kept)
{
    unsigned char in[BYTES];
    const void *input = in;
    void *output = NULL;
    spar_memory *block = NULL;
    const int64_t one = 1, dim = 0;
    spar_tensor tensor = {1, 1, &bytes, &one, 1, &dim};
    spar_request request = {spar_op_find("gather"), comm->world, comm->rank, 0, 1, &tensor};
    spar_plan *plan;
    memset(in, (call_number * 31 + comm->rank) & 0xff, sizeof in);
    EXPECT(!spar_plan_get(&request, &plan));
    spar_call call = {.plan = plan,
                      .inputs = &input,
                      .outputs = &output,
                      .blocks = &block,
                      .device = &spar_device_cpu,
                      .scale = {SPAR_UNSCALED, 0, 1},
                      .text = "",
                      .patience = {.deadline_ns = now_ns() + 20000000000}};
    EXPECT(!spar_comm_run(comm, &call));
    for (int p = 0; p < comm->world; p++)
        for (int64_t i = 0; i < bytes; i++)
            EXPECT(((unsigned char *)output)[p * bytes + i] == ((call_number * 31 + p) & 0xff));
    if (*kept)
        spar_memory_free(*kept);
    *kept = block;
    spar_plan_release(plan);
}

static int ascending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int be(meeting *m, int rank, int world, int calls)
{
    spar_comm *comm = join(m, rank, world);
    spar_memory *kept = NULL;
    int64_t *took = calloc((size_t)calls, sizeof *took);
    unsigned seed = (unsigned)rank + 1;
    EXPECT(took != NULL);
    for (int i = 0; i < calls; i++) {
        int64_t begin = now_ns();
        gather(comm, i, i % 3 ? BYTES : 1 + i % BYTES, &kept);
        took[i] = now_ns() - begin;
        if (rand_r(&seed) % 64 == 0) /* so that now this rank is late, now that one sleeps */
            for (int64_t until = now_ns() + rand_r(&seed) % 200000; now_ns() < until;)
                ;
    }
    pthread_barrier_wait(&m->barrier);
    qsort(took, (size_t)calls, sizeof *took, ascending);
    if (rank == 0)
        printf("%.1f %.1f\n", (double)took[calls / 2] / 1e3, (double)took[calls * 99 / 100] / 1e3);
    spar_memory_free(kept);
    spar_comm_close(comm);
    free(took);
    return 0;
}

int main(int argc, char **argv)
{
    int world = argc > 1 ? atoi(argv[1]) : 2, calls = argc > 2 ? atoi(argv[2]) : 1000, failed = 0;
    pthread_barrierattr_t shared;
    pid_t ranks[MOST];
    meeting *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(m != MAP_FAILED && world >= 1 && world <= MOST && calls >= 1);
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&m->barrier, &shared, (unsigned)world);
    for (int rank = 0; rank < world; rank++)
        if ((ranks[rank] = fork()) == 0)
            return be(m, rank, world, calls);
    for (int left = world; left; left--) {
        int status;
        EXPECT(wait(&status) > 0);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;
        failed = 1;
        for (int rank = 0; rank < world; rank++) /* they would wait at the barrier */
            kill(ranks[rank], SIGKILL);
    }
    return failed;
}
