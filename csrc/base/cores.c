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

int spar_core_set_count(const spar_core_set *set)
{
    int count = 0;
    for (size_t i = 0; i < sizeof set->words / sizeof *set->words; i++)
        count += __builtin_popcountll(set->words[i]);
    return count;
}

int spar_core_sets_intersect(const spar_core_set *a, const spar_core_set *b)
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
    int cores = spar_core_set_count(&own);
    return at_most_quota(cores ? cores : (int)sysconf(_SC_NPROCESSORS_ONLN));
}

int spar_equal_share(int local_ranks)
{
    return at_most_quota((int)sysconf(_SC_NPROCESSORS_ONLN)) / local_ranks;
}
