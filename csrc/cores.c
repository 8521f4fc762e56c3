#include "cores.h"

#include <sched.h>
#include <stdio.h>

int spar_cores(void)
{
    cpu_set_t cpus;
    long long quota, period;
    int cores = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!file)
        return cores;
    if (fscanf(file, "%lld %lld", &quota, &period) == 2 && period > 0 && quota / period < cores)
        cores = quota < period ? 1 : (int)(quota / period);
    fclose(file);
    return cores;
}
