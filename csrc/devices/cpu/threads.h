/* Copy threads: a small pool of this process's own, made when it is first needed, absent after a fork. */
#ifndef SPAR_THREADS_H
#define SPAR_THREADS_H

#include <stdint.h>

/* How many threads copy from now on, the caller's own one counted in; at least 1. */
void spar_threads_limit(int threads);

/* How many shall share a copy of so many bytes: waking one takes 50 us. */
int spar_threads_share(int64_t bytes);

/* From how many bytes for each, instead of 1 MiB: for tests. */
void spar_threads_min_bytes(int64_t bytes);

/* Calls work(context, part, parts) for each part, side by side, and returns when all are done. Where the team is busy
 * with another thread's copy, or has no threads, the caller does all parts itself. */
void spar_threads_run(void (*work)(void *context, int part, int parts), void *context, int parts);

#endif
