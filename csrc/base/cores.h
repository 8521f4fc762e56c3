/* The logical cores that this process may use. Reads files. */
#ifndef SPAR_CORES_H
#define SPAR_CORES_H

#include <stdint.h>

/* Logical cores, a bit each; empty: not known. */
typedef struct {
    uint64_t words[16];
} spar_core_set;

/* Gets the calling thread's affinity: on Linux, of at most 1024 cores. */
void spar_core_set_read(spar_core_set *set);

int spar_core_set_count(const spar_core_set *set);

int spar_core_sets_intersect(const spar_core_set *a, const spar_core_set *b);

/* Returns the number of cores this process may use: the minimum of its affinity (on Linux; elsewhere, of all
 * cores) and its cgroup's quota. */
int spar_cores(void);

/* Returns how many cores each of the ranks on this host would have if all of its cores, or the cgroup's quota
 * if lower, were shared out equally. */
int spar_equal_share(int local_ranks);

#endif
