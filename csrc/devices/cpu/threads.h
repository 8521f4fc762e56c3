/* SPDX-License-Identifier: Apache-2.0 */
/* Copy threads: a small pool, started when first needed, absent after a fork. */
#ifndef SPAR_THREADS_H
#define SPAR_THREADS_H

#include <stdint.h>

/* Sets the number of copying threads, including the caller's; at least 1. */
void spar_threads_limit(int threads);

/* Returns how many threads should share a copy of `bytes` bytes: waking one takes 50 us. */
int spar_threads_share(int64_t bytes);

/* Sets the least bytes for each thread, instead of 1 MiB: for tests. */
void spar_threads_min_bytes(int64_t bytes);

/* Calls work(context, part, parts) for each part in parallel; returns when all are done. If the pool is busy
 * with another thread's copy, or has no threads, the caller runs all parts. */
void spar_threads_run(void (*work)(void *context, int part, int parts), void *context, int parts);

#endif
