/* SPDX-License-Identifier: Apache-2.0 */
/* The bounded LRU cache of plans. The key is the request itself, as an array of words. */
#include "plan/plan.h"

#include "base/fork.h"
#include "base/util.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 1024, WORDS_ON_STACK = 256, MOST_BYTES = 64 << 20 };

typedef struct entry {
    struct entry *next_in_bucket, *newer, *older;
    spar_plan *plan;
    uint64_t hash;
    size_t size; /* the bytes of the words */
    int64_t words[];
} entry;

static struct {
    pthread_mutex_t lock;
    entry *buckets[BUCKETS];
    entry *newest, *oldest;
    int64_t capacity, bytes;
    spar_plan_stats stats;
} cache = {.lock = PTHREAD_MUTEX_INITIALIZER, .capacity = 1024};

static size_t key_words(const spar_request *request)
{
    size_t words = 4;
    for (int t = 0; t < request->ntensors; t++)
        words += 3 + 2 * (size_t)request->tensors[t].ndim + (size_t)request->tensors[t].nargs;
    return words;
}

static uint64_t write_key(const spar_request *request, int64_t *words)
{
    int64_t *next = words;
    *next++ = request->world;
    *next++ = request->rank;
    *next++ = request->sides;
    *next++ = request->ntensors;
    for (int t = 0; t < request->ntensors; t++) {
        const spar_tensor *tensor = &request->tensors[t];
        *next++ = tensor->item_size;
        *next++ = tensor->ndim;
        *next++ = tensor->nargs;
        for (int i = 0; i < tensor->ndim; i++) {
            *next++ = tensor->extents[i];
            *next++ = tensor->strides[i];
        }
        for (int i = 0; i < tensor->nargs; i++)
            *next++ = tensor->args[i];
    }
    uint64_t hash = 0;
    for (const int64_t *word = words; word < next; word++)
        hash = spar_hash(hash, *word);
    return hash;
}

static void unlink_entry(entry *e)
{
    *(e->newer ? &e->newer->older : &cache.newest) = e->older;
    *(e->older ? &e->older->newer : &cache.oldest) = e->newer;
}

static void make_newest(entry *e)
{
    e->newer = NULL;
    e->older = cache.newest;
    *(cache.newest ? &cache.newest->newer : &cache.oldest) = e;
    cache.newest = e;
}

/* Returns the entry of this key and makes it the newest; NULL: a miss. Requires the lock. */
static entry *find(uint64_t hash, const int64_t *words, size_t size)
{
    for (entry *e = cache.buckets[hash % BUCKETS]; e; e = e->next_in_bucket) {
        if (e->hash != hash || e->size != size || memcmp(e->words, words, size) != 0)
            continue;
        if (e != cache.newest) {
            unlink_entry(e);
            make_newest(e);
        }
        return e;
    }
    return NULL;
}

static int64_t footprint(const entry *e)
{
    return (int64_t)e->size + e->plan->footprint;
}

/* Evicts the oldest entries until at most `keep` entries and `bytes` bytes are left; returns them, chained.
 * Requires the lock. */
static entry *evict(int64_t keep, int64_t bytes)
{
    entry *chain = NULL;
    while (cache.stats.cached > keep || (cache.oldest && cache.bytes > bytes)) {
        entry *e = cache.oldest, **link = &cache.buckets[e->hash % BUCKETS];
        unlink_entry(e);
        while (*link != e)
            link = &(*link)->next_in_bucket;
        *link = e->next_in_bucket;
        e->next_in_bucket = chain;
        chain = e;
        cache.bytes -= footprint(e);
        cache.stats.cached--;
    }
    return chain;
}

static void free_chain(entry *chain)
{
    while (chain) {
        entry *next = chain->next_in_bucket;
        spar_plan_release(chain->plan);
        free(chain);
        chain = next;
    }
}

/* Inserts a new plan, unless another thread has inserted its key in the meantime. */
static void keep(spar_plan *plan, uint64_t hash, const int64_t *words, size_t size)
{
    entry *e = malloc(sizeof *e + size), *evicted = NULL;
    if (!e)
        return; /* not caching is no failure */
    e->plan = plan;
    e->hash = hash;
    e->size = size;
    memcpy(e->words, words, size);
    pthread_mutex_lock(&cache.lock);
    if (cache.capacity == 0 || find(hash, words, size)) {
        free(e);
    } else {
        evicted = evict(cache.capacity - 1, MOST_BYTES - footprint(e));
        spar_plan_keep(plan);
        e->next_in_bucket = cache.buckets[hash % BUCKETS];
        cache.buckets[hash % BUCKETS] = e;
        make_newest(e);
        cache.bytes += footprint(e);
        cache.stats.cached++;
    }
    pthread_mutex_unlock(&cache.lock);
    free_chain(evicted);
}

spar_status spar_plan_get(const spar_request *request, spar_plan **plan)
{
    int64_t on_stack[WORDS_ON_STACK], *words = on_stack;
    SPAR_TRY(spar_request_check(request));
    size_t count = key_words(request);
    if (count > WORDS_ON_STACK && !(words = malloc(count * sizeof *words)))
        return spar_fail(SPAR_NO_MEMORY, "no memory for the key of a plan");
    uint64_t hash = write_key(request, words);
    pthread_mutex_lock(&cache.lock);
    entry *e = find(hash, words, count * sizeof *words);
    if (e) {
        *plan = spar_plan_keep(e->plan);
        cache.stats.hits++;
    } else {
        cache.stats.misses++;
    }
    pthread_mutex_unlock(&cache.lock);
    spar_status status = SPAR_OK;
    if (!e && (status = spar_plan_build(request, plan)) == SPAR_OK)
        keep(*plan, hash, words, count * sizeof *words);
    if (words != on_stack)
        free(words);
    return status;
}

void spar_plan_cache_stats(spar_plan_stats *stats)
{
    pthread_mutex_lock(&cache.lock);
    *stats = cache.stats;
    pthread_mutex_unlock(&cache.lock);
}

void spar_plan_cache_limit(int64_t capacity)
{
    pthread_mutex_lock(&cache.lock);
    cache.capacity = capacity < 0 ? 0 : capacity;
    entry *evicted = evict(cache.capacity, MOST_BYTES);
    pthread_mutex_unlock(&cache.lock);
    free_chain(evicted);
}

void spar_plan_cache_fork(spar_fork_stage stage)
{
    if (stage == SPAR_FORK_PREPARE)
        pthread_mutex_lock(&cache.lock);
    if (stage != SPAR_FORK_PREPARE)
        pthread_mutex_unlock(&cache.lock);
}
