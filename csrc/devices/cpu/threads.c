/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cpu/threads.h"

#include "base/fork.h"
#include "base/util.h"

#include <pthread.h>

enum { MOST = 64 };

static struct {
    pthread_mutex_t in_use; /* held by the thread whose copy runs */
    pthread_mutex_t lock;
    pthread_cond_t begins, ends;
    uint32_t owner;        /* a forked child has no threads */
    int64_t min_bytes;     /* bytes */
    int limit, threads;    /* most, with the caller; started, without */
    int parts, next, left; /* the parts of the copy: all, the next one, those not done */
    void (*work)(void *context, int part, int parts);
    void *context;
} pool = {.in_use = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .begins = PTHREAD_COND_INITIALIZER,
          .ends = PTHREAD_COND_INITIALIZER,
          .limit = 1,
          .min_bytes = 1 << 20};

void spar_threads_limit(int threads)
{
    int limit = threads < 1 ? 1 : threads > MOST ? MOST : threads;
    __atomic_store_n(&pool.limit, limit, __ATOMIC_RELAXED);
}

int spar_threads_share(int64_t bytes)
{
    int64_t limit = __atomic_load_n(&pool.limit, __ATOMIC_RELAXED);
    if (limit == 1)
        return 1;
    int64_t min_bytes = bytes / __atomic_load_n(&pool.min_bytes, __ATOMIC_RELAXED);
    return min_bytes < 1 ? 1 : (int)(min_bytes < limit ? min_bytes : limit);
}

void spar_threads_min_bytes(int64_t bytes)
{
    __atomic_store_n(&pool.min_bytes, bytes, __ATOMIC_RELAXED);
}

/* Runs parts while any are left. Requires the lock. */
static void take_parts(void)
{
    while (pool.next < pool.parts) {
        int part = pool.next++, parts = pool.parts;
        pthread_mutex_unlock(&pool.lock);
        pool.work(pool.context, part, parts);
        pthread_mutex_lock(&pool.lock);
        if (--pool.left == 0)
            pthread_cond_signal(&pool.ends);
    }
}

static void *serve(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        take_parts();
        pthread_cond_wait(&pool.begins, &pool.lock);
    }
    return NULL;
}

/* Starts up to `wanted` threads. If a thread cannot start, the rest take its parts. With in_use held. */
static void start_threads(int wanted)
{
    while (pool.threads < wanted && spar_thread_start(serve, NULL) == 0)
        pool.threads++;
}

/* Whether this process owns the pool; the first caller does. With in_use held. */
static int is_own(void)
{
    if (!pool.owner)
        pool.owner = spar_generation();
    return pool.owner == spar_generation();
}

void spar_threads_run(void (*work)(void *context, int part, int parts), void *context, int parts)
{
    int taken = parts > 1 && pthread_mutex_trylock(&pool.in_use) == 0;
    if (!taken || !is_own()) {
        for (int part = 0; part < parts; part++)
            work(context, part, parts);
        if (taken)
            pthread_mutex_unlock(&pool.in_use);
        return;
    }
    start_threads(parts - 1);
    pthread_mutex_lock(&pool.lock);
    pool.work = work;
    pool.context = context;
    pool.next = 0;
    pool.parts = pool.left = parts;
    pthread_cond_broadcast(&pool.begins);
    take_parts();
    while (pool.left)
        pthread_cond_wait(&pool.ends, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.in_use);
}
