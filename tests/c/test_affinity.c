/* SPDX-License-Identifier: Apache-2.0 */
/* SPAR_AFFINITY, over simulated cores: ranks spread evenly from any start, whatever their peers publish. */
#define spar_group_share_cores share_cores_of_test
#define spar_group_allow_moves allow_moves_of_test
#define spar_group_publish_core publish_core_of_test
#define spar_group_balance_cores balance_cores_of_test
#define spar_cores cores_of_test
#define sched_getcpu core_of_test
#define sched_getaffinity affinity_of_test
#define sched_setaffinity set_affinity_of_test
#define clock_gettime affinity_clock_of_test
#include "../../csrc/control/affinity.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { MOST_RANKS = 24, MOST_CORES = 8 };

static struct {
    int world, cores, rank; /* the running rank */
    int at[MOST_RANKS], moves;
    cpu_set_t allowed, mask;
    int64_t now_ns;
} now;

static _Noreturn void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; %d ranks, %d cores, at", line, condition, now.world, now.cores);
    for (int rank = 0; rank < now.world; rank++)
        fprintf(stderr, " %d", now.at[rank]);
    fprintf(stderr, "\n");
    abort();
}

int cores_of_test(void)
{
    return now.cores;
}

int core_of_test(void)
{
    return now.at[now.rank];
}

int affinity_of_test(pid_t pid, size_t size, cpu_set_t *set)
{
    EXPECT(pid == 0 && size == sizeof *set);
    *set = now.mask;
    return 0;
}

/* Moves the running rank to the only core of the set, or restores its mask. */
int set_affinity_of_test(pid_t pid, size_t size, const cpu_set_t *set)
{
    EXPECT(pid == 0 && size == sizeof *set);
    int restores = !CPU_EQUAL(&now.mask, &now.allowed);
    now.mask = *set;
    if (restores)
        return 0;
    EXPECT(CPU_COUNT(set) == 1 && !CPU_ISSET(now.at[now.rank], set));
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, set))
            now.at[now.rank] = core;
    now.moves++;
    return 0;
}

int affinity_clock_of_test(clockid_t clock, struct timespec *time)
{
    (void)clock;
    *time = (struct timespec){now.now_ns / 1000000000, now.now_ns % 1000000000};
    return 0;
}

static spar_group groups[MOST_RANKS];
static mailbox boxes[MOST_RANKS];
static mailbox *all[MOST_RANKS];

static void begin(int world, int cores, int local_ranks, int moving)
{
    now.world = world;
    now.cores = cores;
    CPU_ZERO(&now.allowed);
    for (int core = 0; core < cores; core++)
        CPU_SET(core, &now.allowed);
    now.mask = now.allowed;
    memset(groups, 0, sizeof groups);
    memset(boxes, 0, sizeof boxes);
    for (int rank = 0; rank < world; rank++) {
        all[rank] = &boxes[rank];
        groups[rank] =
            (spar_group){.world = world, .rank = rank, .boxes = all, .own = all[rank], .spin_ns = 200000};
        boxes[rank].core = -1;
        share_cores_of_test(&groups[rank], local_ranks, cores / local_ranks);
        if (moving)
            allow_moves_of_test(&groups[rank]);
    }
}

/* One call on all ranks; returns how many of them move. */
static int call(void)
{
    int before = now.moves, on[MOST_CORES] = {0};
    for (now.rank = 0; now.rank < now.world; now.rank++)
        publish_core_of_test(&groups[now.rank]);
    for (int rank = 0; rank < now.world; rank++)
        on[now.at[rank]]++;
    for (now.rank = 0; now.rank < now.world; now.rank++) {
        int from = now.at[now.rank];
        balance_cores_of_test(&groups[now.rank]);
        EXPECT(CPU_EQUAL(&now.mask, &now.allowed));
        EXPECT(now.at[now.rank] == from || on[now.at[now.rank]] + 2 <= on[from]);
    }
    return now.moves - before;
}

static int most_on_a_core(void)
{
    int on[MOST_CORES] = {0}, most = 0;
    for (int rank = 0; rank < now.world; rank++)
        if (++on[now.at[rank]] > most)
            most = on[now.at[rank]];
    return most;
}

static void draw_cores(unsigned *seed)
{
    for (int rank = 0; rank < now.world; rank++)
        now.at[rank] = rand_r(seed) % (1 + rand_r(seed) % now.cores);
}

int test_affinity(int argc, char **argv)
{
    unsigned seed = 1;
    (void)argc;
    (void)argv;
    now.now_ns = 1;
    for (int round = 0; round < 20000; round++) {
        int cores = 1 + rand_r(&seed) % MOST_CORES, world = 2 + rand_r(&seed) % (MOST_RANKS - 1);
        int fair_share = (world + cores - 1) / cores;
        now.now_ns += 1000000000;
        begin(world, cores, world, 1);
        draw_cores(&seed);
        int unbalanced = world > cores && most_on_a_core() > fair_share;
        EXPECT((call() > 0) == unbalanced);
        for (int calls = 0; calls < world; calls++) {
            now.now_ns += 10000000;
            call();
        }
        EXPECT(world <= cores || most_on_a_core() <= fair_share);
        int settled = now.moves;
        now.now_ns += 10000000;
        EXPECT(!call());
        EXPECT(now.moves == settled);

        begin(world, cores, world, 0); /* SPAR_AFFINITY=0: neither moves nor publishes its core */
        draw_cores(&seed);
        EXPECT(!call());
        for (int rank = 0; rank < world; rank++)
            EXPECT(boxes[rank].core == -1);

        begin(world, cores, world + 1, 1); /* the host has ranks outside this group */
        draw_cores(&seed);
        EXPECT(!call());
        begin(world, cores, world, 1);
        draw_cores(&seed);
        for (int rank = 0; rank < world; rank++)
            groups[rank].spin_ns = 0; /* the kernel places a rank that blocks at once */
        EXPECT(!call());

        begin(world, cores, world, 1); /* the process was restricted to one core later */
        draw_cores(&seed);
        CPU_ZERO(&now.allowed);
        CPU_SET(now.at[0], &now.allowed);
        now.mask = now.allowed;
        for (int rank = 0; rank < world; rank++)
            now.at[rank] = now.at[0];
        EXPECT(!call());

        begin(world, cores, world, 1); /* peers may publish any core */
        draw_cores(&seed);
        for (now.rank = 0; now.rank < world; now.rank++)
            publish_core_of_test(&groups[now.rank]);
        for (int rank = 1; rank < world; rank++)
            boxes[rank].core = rand_r(&seed) % 2 ? now.at[0] : (int32_t)((unsigned)rand_r(&seed) * 2u);
        now.rank = 0;
        balance_cores_of_test(&groups[0]);
        EXPECT(CPU_EQUAL(&now.mask, &now.allowed) && now.at[0] < cores);
    }
    begin(3, 2, 3, 1);
    now.now_ns += 1000000000;
    for (int moved = 0; moved < 2; moved++) { /* at most one move every 5 ms */
        now.at[0] = now.at[1] = now.at[2] = 0;
        EXPECT(call() == !moved);
        now.now_ns += 1000000;
    }
    return 0;
}
