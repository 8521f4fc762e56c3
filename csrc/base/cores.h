/* SPDX-License-Identifier: Apache-2.0 */
/* The logical cores that this process may use. Reads files. */
#ifndef SPAR_CORES_H
#define SPAR_CORES_H

#include <stddef.h>
#include <stdint.h>

/* Logical cores, a bit each; empty: not known. */
typedef struct {
    uint64_t words[16];
} spar_core_set;

/* Gets the calling thread's affinity: on Linux, of at most 1024 cores. */
void spar_core_set_read(spar_core_set *set);

/* Returns the number of cores this process may use: the minimum of its affinity (on Linux; elsewhere, of all
 * cores) and its cgroup's quota. */
int spar_cores(void);

/* Returns how many cores a rank may count as its own; 0: it shares one. Ranks that were bound to different
 * cores have those, others an equal share of what this process may use. sets: of each rank of a group,
 * `stride` bytes apart. local_ranks: of this job on this host, in this group or not. */
int spar_core_share(const spar_core_set *sets, size_t stride, int world, int rank, int local_ranks);

#endif
