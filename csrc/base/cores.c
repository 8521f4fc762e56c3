#include "base/cores.h"

#include "base/cgroup.h"

#include <sched.h>
#include <unistd.h>

static int available(void)
{
#ifdef __linux__
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) == 0)
        return CPU_COUNT(&cpus);
#endif
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

int spar_cores(void)
{
    int cores = available();
    int64_t quota = spar_cgroup_cores("");
    return quota < cores ? (int)quota : cores;
}
