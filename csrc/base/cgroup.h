/* SPDX-License-Identifier: Apache-2.0 */
/* Limits of the process's cgroup and its parents, up to the root of each mount, v1 and v2.
 *
 * `root` is prepended to every path; it is "" except in tests. A missing or unreadable file sets no limit. If
 * a mount does not show the process's cgroup (another cgroup namespace), only the mount's root counts. */
#ifndef SPAR_CGROUP_H
#define SPAR_CGROUP_H

#include <stdint.h>

/* Returns the minimum of memory.max, memory.high and memory.limit_in_bytes, in bytes; INT64_MAX: no limit. */
int64_t spar_cgroup_memory(const char *root);

/* Returns the least CPU quota in cores, rounded down, at least 1; INT64_MAX: no limit. */
int64_t spar_cgroup_cores(const char *root);

/* Returns the bytes of memory that this process may use: the host's, or its cgroups' limit if lower. */
int64_t spar_usable_memory(void);

#endif
