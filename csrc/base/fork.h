/* SPDX-License-Identifier: Apache-2.0 */
/* The process-wide locks around a fork.
 *
 * Each file with a process-wide lock has a function here, which at_fork.c calls:
 * - Locks that are held briefly, around code that never forks, are taken before the fork and released after
 *   it in both processes. What they guard is therefore consistent in the child.
 * - The others (library loading, the GPU watchdog) are initialized again in the child, which lacks the
 *   threads that may have held them.
 * - A group's lock, held during whole calls, is neither: a child's calls on the group fail before they take
 *   it. */
#ifndef SPAR_FORK_H
#define SPAR_FORK_H

#include <stdint.h>

/* Returns a number that differs between a process and its forked children; never 0. Unlike getpid, which
 * takes longer than a small copy, it is no system call. A child is known also if no handler of a fork ran. */
uint32_t spar_generation(void);

/* Begins the generation of a forked child, in it. */
void spar_generation_begin(void);

typedef enum { SPAR_FORK_PREPARE, SPAR_FORK_PARENT, SPAR_FORK_CHILD } spar_fork_stage;

void spar_plan_cache_fork(spar_fork_stage stage);
void spar_arena_fork(spar_fork_stage stage);
void spar_peers_fork(spar_fork_stage stage);
void spar_links_fork(spar_fork_stage stage);
void spar_outputs_fork(spar_fork_stage stage);

void spar_dynlib_fork(spar_fork_stage stage);
void spar_watchdog_fork(spar_fork_stage stage);

#endif
