/* SPDX-License-Identifier: Apache-2.0 */
/* Small utilities that several layers use. */
#ifndef SPAR_UTIL_H
#define SPAR_UTIL_H

#include "base/error.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* Grows an array to at least `needed` items, doubling its capacity. SPAR_NO_MEMORY: "no memory for 17
 * `what`". */
spar_status spar_reserve(void **array, int64_t *capacity, int64_t needed, size_t item, const char *what);

/* Appends to the text in a buffer of `size` bytes; what does not fit is cut off. Returns 0 if it was full
 * before, else 1. */
int spar_append(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Whether a list has this word, which holds no separator. */
int spar_lists(const char *words, char separator, const char *word);

static inline uint64_t spar_hash(uint64_t hash, int64_t word)
{
    hash = (hash ^ (uint64_t)word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
}

/* A condition variable whose timed waits do not depend on the wall clock. */
void spar_cond_init(pthread_cond_t *cond);

/* Waits until spar_now_ns() + `ns` at most, and returns what pthread_cond_timedwait does. */
int spar_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t ns);

/* Starts a detached thread that handles no signals: those belong to the program's threads. Returns 0 or an
 * errno. */
int spar_thread_start(void *(*work)(void *context), void *context);

#endif
