/* SPDX-License-Identifier: Apache-2.0 */
/* Transposes and repeated items: any sizes, strides and alignments; nothing else is read or written. */
#include "devices/cpu/items.h"
#include "devices/cpu/nontemporal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHIFTS = 80, MOST = 150, ROUNDS = 6000, GUARD = 'x' };

static const int64_t items[] = {1, 2, 4, 8, 16, 32, 3, 12};

static void expect(int holds, const char *what, int64_t item, int64_t rows, int64_t columns)
{
    if (holds)
        return;
    fprintf(stderr, "%s: %lld x %lld items of %lld bytes\n", what, (long long)rows, (long long)columns,
            (long long)item);
    abort();
}

static int64_t below(unsigned *seed, int64_t bound)
{
    return rand_r(seed) % bound;
}

/* Room for n bytes from `shift` on, with nothing behind them that sanitizers would let pass. */
static char *make_room(int64_t shift, int64_t n)
{
    char *room = aligned_alloc(SPAR_CACHE_LINE, (size_t)(shift + n + 63) & ~(size_t)63);
    if (!room)
        abort();
    memset(room, GUARD, (size_t)(shift + n));
    return room;
}

static int64_t transpose(unsigned *seed)
{
    int64_t item = items[below(seed, 8)], rows = 1 + below(seed, below(seed, 4) ? 40 : MOST);
    int64_t columns = 1 + below(seed, below(seed, 4) ? 300 : 20);
    int64_t ss = rows * item + below(seed, 3) * below(seed, SHIFTS), ds = columns * item;
    ds += below(seed, 2) ? -ds & (SPAR_CACHE_LINE - 1) : below(seed, SHIFTS);
    int64_t shift = below(seed, 2) ? below(seed, 9) * item : below(seed, SHIFTS), guarded = shift + rows * ds;
    char *s = malloc((size_t)((columns - 1) * ss + rows * item)), *room = make_room(shift, rows * ds);
    char *d = room + shift;
    if (!s)
        abort();
    for (int64_t i = 0; i < (columns - 1) * ss + rows * item; i++)
        s[i] = (char)rand_r(seed);
    int done = spar_transpose_items(d, s, rows, columns, ds, ss, item, (int)below(seed, 2));
    spar_nontemporal_fence();
    for (int64_t row = 0; row < rows && done; row++)
        for (int64_t column = 0; column < columns; column++) {
            char *at = d + row * ds + column * item;
            expect(memcmp(at, s + column * ss + row * item, (size_t)item) == 0, "an item differs", item, rows,
                   columns);
            memset(at, GUARD, (size_t)item);
        }
    for (int64_t i = 0; i < guarded; i++)
        expect(room[i] == GUARD, "something else was written", item, rows, columns);
    if (item <= 16 && !(item & (item - 1)) && rows >= 16 / item && columns >= 16 / item)
        expect(done, "not transposed", item, rows, columns);
    free(s);
    free(room);
    return done;
}

static int64_t repeat(unsigned *seed)
{
    char s[32];
    int64_t item = items[below(seed, 8)], n = 1 + below(seed, 400), shift = below(seed, SHIFTS);
    char *room = make_room(shift, n * item);
    for (int64_t i = 0; i < item; i++)
        s[i] = (char)rand_r(seed);
    int done = spar_repeat_item(room + shift, s, n, item, (int)below(seed, 2));
    spar_nontemporal_fence();
    for (int64_t i = 0; i < n * item; i++)
        expect(room[shift + i] == (done ? s[i % item] : GUARD), "a repeated item differs", item, 1, n);
    for (int64_t i = 0; i < shift; i++)
        expect(room[i] == GUARD, "something else was written", item, 1, n);
    free(room);
    return done;
}

int test_items(int argc, char **argv)
{
    unsigned seed = 1;
    int64_t transposed = 0, repeated = 0;
    (void)argc;
    (void)argv;
    for (int round = 0; round < ROUNDS; round++) {
        transposed += transpose(&seed);
        repeated += repeat(&seed);
    }
    return transposed < ROUNDS / 4 || repeated < ROUNDS / 8;
}
