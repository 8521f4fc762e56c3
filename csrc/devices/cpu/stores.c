/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cpu/stores.h"

#include "base/deadline.h"
#include "devices/cpu/nontemporal.h"

enum {
    LARGE = 32, /* times the least bytes that gain: from four times the L2 cache on, all copies gain */
    SIZES = 64, /* classes of copies, by the binary logarithm of their bytes */
    TRIES = 4,  /* copies in a row that try a kind; the first finds what the other kind left in the caches */
    OFTEN = 32, /* copies from one comparison to the next at first: new memory takes longer */
    PERIOD = 512, /* later */
};

/* What was learned about a class of copies. Threads may mix their samples: one choice is then made by another
 * copy's time. */
static struct {
    uint32_t copies;
    uint32_t ps[SPAR_FASTER_STORES]; /* for each byte; the shortest of the latest tries of each kind */
} learned[SPAR_WRITES][SIZES];

static int wanted = SPAR_FASTER_STORES;

void spar_stores_use(spar_stores_kind kind)
{
    __atomic_store_n(&wanted, (int)kind, __ATOMIC_RELAXED);
}

static int size_class(int64_t bytes)
{
    return 63 - __builtin_clzll((unsigned long long)bytes | 1);
}

/* Ordinary stores drive other data out of the caches, which costs time later: so they must gain a quarter. */
static spar_stores_kind faster(const uint32_t *ps)
{
    uint32_t ordinary = __atomic_load_n(&ps[SPAR_ORDINARY], __ATOMIC_RELAXED);
    uint32_t nontemporal = __atomic_load_n(&ps[SPAR_NONTEMPORAL_STORES], __ATOMIC_RELAXED);
    return (uint64_t)ordinary * 4 <= (uint64_t)nontemporal * 3 ? SPAR_ORDINARY : SPAR_NONTEMPORAL_STORES;
}

/* Returns how many copies there were since the latest comparison began, before the n-th one. */
static uint32_t turn_of(uint32_t n)
{
    uint32_t period = PERIOD;
    while (n < period && period > OFTEN)
        period /= 2;
    return n % period;
}

spar_stores spar_stores_begin(spar_writes writes, int64_t bytes)
{
    spar_stores stores = {.writes = writes, .bytes = bytes, .kind = SPAR_ORDINARY, .turn = -1};
    int kind = __atomic_load_n(&wanted, __ATOMIC_RELAXED);
    if (bytes < spar_nontemporal_min())
        return stores;
    if (kind != SPAR_FASTER_STORES) {
        stores.kind = (spar_stores_kind)kind;
        return stores;
    }
    if (bytes / LARGE >= spar_nontemporal_min()) {
        stores.kind = SPAR_NONTEMPORAL_STORES;
        return stores;
    }
    int class = size_class(bytes);
    uint32_t turn = turn_of(__atomic_fetch_add(&learned[writes][class].copies, 1, __ATOMIC_RELAXED));
    if (turn >= TRIES * SPAR_FASTER_STORES) {
        stores.kind = faster(learned[writes][class].ps);
        return stores;
    }
    stores.kind = (spar_stores_kind)(turn / TRIES);
    stores.turn = (int)(turn % TRIES);
    stores.began_ns = spar_now_ns();
    return stores;
}

void spar_stores_end(const spar_stores *stores)
{
    if (stores->turn < 1)
        return;
    uint32_t *best = &learned[stores->writes][size_class(stores->bytes)].ps[stores->kind];
    double ps = (double)(spar_now_ns() - stores->began_ns) * 1000 / (double)stores->bytes;
    uint32_t found = ps < UINT32_MAX ? (uint32_t)ps : UINT32_MAX;
    if (stores->turn == 1 || found < __atomic_load_n(best, __ATOMIC_RELAXED))
        __atomic_store_n(best, found, __ATOMIC_RELAXED);
}
