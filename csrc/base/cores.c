#include "base/cores.h"

#include "base/cgroup.h"

#include <sched.h>

int spar_cores(void)
{
    cpu_set_t cpus;
    int cores = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    int64_t quota = spar_cgroup_cores("");
    return quota < cores ? (int)quota : cores;
}
