/* SPDX-License-Identifier: Apache-2.0 */
/* Scaling with each width that this CPU has, and with non-temporal stores: the same bits at all alignments
 * and lengths, and nothing else is written. test_scales.py compares the bits with torch's. */
#include "../../csrc/devices/cpu/scale.c"

#include <stdio.h>
#include <stdlib.h>

enum { ROOM = 8192, EDGE = 64 };

static void check(const char *what, const spar_scale *scale, const char *got, const char *expected)
{
    if (memcmp(got, expected, ROOM) == 0)
        return;
    fprintf(stderr, "%s of dtype %d, %s %g: a different result\n", what, scale->dtype,
            scale->divide ? "divided by" : "times", scale->factor);
    abort();
}

/* Draws items that are not NaN: which bits a NaN keeps depends on the CPU. */
static void draw(spar_dtype dtype, char *to, int64_t bytes, unsigned *seed)
{
    for (int64_t i = 0; i < bytes; i++)
        to[i] = (char)rand_r(seed);
    int64_t part = dtype <= SPAR_BF16 ? 2 : dtype == SPAR_F32 || dtype == SPAR_C64 ? 4 : 8;
    for (int64_t i = part - 1; i < bytes; i += part)
        if ((to[i] & 0x7c) == 0x7c) /* the exponent's upper bits */
            to[i] ^= 0x20;
}

int test_scale(int argc, char **argv)
{
    static _Alignas(EDGE) char from[ROOM], to[ROOM], expected[ROOM], other[2 * ROOM];
    static const double factors[] = {2, 3, 0.5, -4, 7, 1e-3};
    unsigned seed = 1;
    (void)argc;
    (void)argv;
    for (int round = 0; round < 5000; round++) {
        spar_scale scale = {SPAR_F16 + rand_r(&seed) % 6, rand_r(&seed) % 2, factors[rand_r(&seed) % 6]};
        int64_t item = spar_scale_types[scale.dtype].bytes;
        int64_t to_at = rand_r(&seed) % 16 * item, from_at = rand_r(&seed) % EDGE;
        int64_t n = rand_r(&seed) % (round % 2 ? (ROOM - 16 * item) / item - EDGE : 20);
        draw(scale.dtype, from + from_at, ROOM - from_at - EDGE, &seed);
        memset(expected, 'x', sizeof expected);
        items_plain(&scale, expected + to_at, from + from_at, n, item, item);
        for (int i = 0; i <= widest_vectors(); i++) {
            memset(to, 'x', sizeof to);
            scalers[i].items(&scale, to + to_at, from + from_at, n, item, item);
            check("one width", &scale, to, expected);
            int64_t lines = n * item & ~(int64_t)(STEP - 1);
            memset(to, 'x', sizeof to);
            scalers[i].lines(&scale, &(char *){to}, 1, from + from_at, 0, lines);
            spar_nontemporal_fence();
            if (memcmp(to, expected + to_at, (size_t)lines) != 0)
                return 1;
        }
        memset(to, 'x', sizeof to);
        spar_scale_items(&scale, to + to_at, from + from_at, n, item, item);
        check("the chosen width", &scale, to, expected);
        memset(to, 'x', sizeof to);
        memset(other, 'x', sizeof other);
        int64_t shift =
            rand_r(&seed) % 4 ? 0 : item; /* outputs with different alignment have other cache lines */
        char *targets[] = {to + to_at, other + to_at, other + ROOM + to_at + shift};
        spar_scale_nontemporal(&scale, targets, 3, from + from_at, n * item);
        spar_nontemporal_fence();
        check("the non-temporal copy", &scale, to, expected);
        check("the second output", &scale, other, expected);
        memmove(other + ROOM + to_at, other + ROOM + to_at + shift, (size_t)(n * item));
        memset(other + ROOM + to_at + n * item, 'x', (size_t)shift);
        check("the third output", &scale, other + ROOM, expected);
    }
    return 0;
}
