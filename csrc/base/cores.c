/* SPDX-License-Identifier: Apache-2.0 */
#include "base/cores.h"

#include "base/cgroup.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

void spar_core_set_read(spar_core_set *set)
{
    memset(set, 0, sizeof *set);
#ifdef __linux__
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) == 0)
        for (int core = 0; core < CPU_SETSIZE && core < (int)sizeof set->words * 8; core++)
            if (CPU_ISSET(core, &cpus))
                set->words[core / 64] |= (uint64_t)1 << core % 64;
#endif
}

static int count_of(const spar_core_set *set)
{
    int count = 0;
    for (size_t i = 0; i < sizeof set->words / sizeof *set->words; i++)
        count += __builtin_popcountll(set->words[i]);
    return count;
}

static const spar_core_set *set_of(const spar_core_set *sets, size_t stride, int rank)
{
    return (const void *)((const char *)sets + (size_t)rank * stride);
}

static int intersect(const spar_core_set *a, const spar_core_set *b)
{
    for (size_t i = 0; i < sizeof a->words / sizeof *a->words; i++)
        if (a->words[i] & b->words[i])
            return 1;
    return 0;
}

static int at_most_quota(int cores)
{
    int64_t quota = spar_cgroup_cores("");
    return quota < cores ? (int)quota : cores;
}

int spar_cores(void)
{
    spar_core_set own;
    spar_core_set_read(&own);
    int cores = count_of(&own);
    return at_most_quota(cores ? cores : (int)sysconf(_SC_NPROCESSORS_ONLN));
}

/* Whether a launcher bound each rank to cores of its own. */
static int are_bound_apart(const spar_core_set *sets, size_t stride, int world)
{
    for (int rank = 0; rank < world; rank++) {
        const spar_core_set *set = set_of(sets, stride, rank);
        if (!count_of(set))
            return 0;
        for (int other = 0; other < rank; other++)
            if (intersect(set, set_of(sets, stride, other)))
                return 0;
    }
    return world > 1;
}

int spar_core_share(const spar_core_set *sets, size_t stride, int world, int rank, int local_ranks)
{
    int ranks = local_ranks < 1 ? 1 : local_ranks, share = spar_cores() / ranks;
    if (!are_bound_apart(sets, stride, world))
        return share;
    int usable = count_of(set_of(sets, stride, rank));
    int equal = at_most_quota((int)sysconf(_SC_NPROCESSORS_ONLN)) / ranks;
    int bound = usable < equal ? usable : equal; /* ranks of other groups may have the same cores */
    return bound > share ? bound : share;
}
