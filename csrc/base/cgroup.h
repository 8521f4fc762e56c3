/* Limits of the process's cgroup and of its parents, up to the root of each mount, v1 and v2.
 *
 * `root` is put before every path that is read: "" but in tests. What is missing or not readable sets no limit. Where a
 * mount does not show the process's cgroup (another cgroup namespace), the mount's root alone counts. */
#ifndef SPAR_CGROUP_H
#define SPAR_CGROUP_H

#include <stdint.h>

/* Bytes: the least memory.max, memory.high and memory.limit_in_bytes; INT64_MAX: none. */
int64_t spar_cgroup_memory(const char *root);

/* Cores: the least CPU quota, rounded down, at least 1; INT64_MAX: none. */
int64_t spar_cgroup_cores(const char *root);

#endif
