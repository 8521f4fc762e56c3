/* What happens to the process-wide locks when some thread forks.
 *
 * Each file with a process-wide lock has a function here. Locks that are only held shortly, and around nothing that
 * may fork itself, are taken before the fork and released after it on both sides, so that what they guard is whole
 * in the child. The others (a library's loading, a GPU's watchdog) are made anew in the child, which has none of the
 * threads that may have held them. A group's lock, held during whole calls, is neither: a child's calls on a group
 * fail before it. */
#ifndef SPAR_FORK_H
#define SPAR_FORK_H

typedef enum { SPAR_FORK_PREPARE, SPAR_FORK_PARENT, SPAR_FORK_CHILD } spar_fork_stage;

void spar_plan_cache_fork(spar_fork_stage stage);
void spar_arena_fork(spar_fork_stage stage);
void spar_peers_fork(spar_fork_stage stage);

void spar_dynlib_fork(spar_fork_stage stage);
void spar_nccl_fork(spar_fork_stage stage);
void spar_watchdog_fork(spar_fork_stage stage);

#endif
