/* SPDX-License-Identifier: Apache-2.0 */
/* Sums with each width that this CPU has, and shared by threads: the same bits at all alignments, lengths and
 * numbers of parts, and nothing else is written. test_sums.py compares the bits with torch's. */
#include "../../csrc/devices/cpu/sum.c"

#include <stdio.h>
#include <stdlib.h>

enum { ROOM = 16384, EDGE = 64, MOST_PARTS = 7 };

static void check(const char *what, spar_sum_kind kind, int count, const char *got, const char *expected)
{
    if (memcmp(got, expected, ROOM) == 0)
        return;
    fprintf(stderr, "%s, kind %d, of %d parts: a different result\n", what, kind, count);
    abort();
}

/* Draws numbers whose sums are not NaN: which bits a NaN keeps depends on the CPU. */
static void draw(spar_sum_kind kind, char *to, unsigned *seed)
{
    int64_t size = kind == SPAR_SUM_F64 || kind == SPAR_SUM_C128  ? 8
                   : kind == SPAR_SUM_F32 || kind == SPAR_SUM_C64 ? 4
                                                                  : 2;
    for (int64_t i = 0; i < ROOM; i++)
        to[i] = (char)rand_r(seed);
    for (int64_t i = size - 1; i < ROOM; i += size)
        to[i] &= ~0x20; /* a lower exponent */
}

int test_sum(int argc, char **argv)
{
    static const int64_t sizes[SPAR_SUM_KINDS] = {0, 1, 1, 2, 4, 8, 2, 2, 4, 8, 4, 8, 16};
    static _Alignas(EDGE) char from[MOST_PARTS][ROOM], to[ROOM], expected[ROOM];
    unsigned seed = 1;
    int rounds = argc > 1 ? atoi(argv[1]) : 3000;
    spar_threads_limit(3);
    spar_threads_min_bytes(4096);
    for (int round = 0; round < rounds; round++) {
        spar_sum_kind kind = SPAR_SUM_BOOL + round % (SPAR_SUM_KINDS - 1);
        int count = 1 + rand_r(&seed) % MOST_PARTS;
        int64_t to_at = rand_r(&seed) % EDGE, most = (ROOM - 2 * EDGE) / sizes[kind];
        int64_t bytes = rand_r(&seed) % (round % 3 ? most : most < 300 ? most : 300) * sizes[kind];
        const char *parts[MOST_PARTS];
        for (int part = 0; part < count; part++) {
            int64_t at = rand_r(&seed) % EDGE; /* its items need no alignment */
            draw(kind, from[part], &seed);
            memmove(from[part] + at, from[part], ROOM - EDGE);
            parts[part] = from[part] + at;
        }
        memset(expected, 'x', sizeof expected);
        range_plain(kind, expected + to_at, parts, count, 0, bytes);
        for (int i = 0; i <= widest_vectors(); i++) {
            memset(to, 'x', sizeof to);
            summers[i](kind, to + to_at, parts, count, 0, bytes);
            check("one width", kind, count, to, expected);
        }
        memset(to, 'x', sizeof to);
        spar_sum(kind, to + to_at, parts, count, bytes);
        check("threads", kind, count, to, expected);
    }
    spar_threads_limit(1);
    spar_threads_min_bytes(1 << 20);
    return 0;
}
