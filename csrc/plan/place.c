/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/place.h"

#include "base/util.h"

static const struct {
    const char *name;
    int bits;
} fields[SPAR_PLACE_FIELDS] = {{"code", 24}, {"torch", 13}, {"random", 13}, {"numpy", 13}}; /* 63 bits */

static uint64_t mask_of(int field)
{
    return ((uint64_t)1 << fields[field].bits) - 1;
}

int64_t spar_place(const uint64_t hashes[SPAR_PLACE_FIELDS])
{
    uint64_t word = 1;
    for (int i = 0; i < SPAR_PLACE_FIELDS; i++) {
        uint64_t low = hashes[i] & mask_of(i);
        word = word << fields[i].bits | (low || !hashes[i] ? low : 1);
    }
    return (int64_t)word; /* the first bit is the sign */
}

static uint64_t field_of(int64_t word, int field)
{
    int shift = 0;
    for (int i = SPAR_PLACE_FIELDS - 1; i > field; i--)
        shift += fields[i].bits;
    return (uint64_t)word >> shift & mask_of(field);
}

int spar_forward_differs(int64_t a, int64_t b)
{
    if (a >= 0 || b >= 0)
        return a && b && a != b;
    int differs = 0;
    for (int i = 0; i < SPAR_PLACE_FIELDS; i++) {
        uint64_t x = field_of(a, i), y = field_of(b, i);
        differs |= x && y && x != y;
    }
    return differs;
}

int64_t spar_forward_merged(int64_t a, int64_t b)
{
    if (a >= 0 || b >= 0)
        return a ? a : b;
    return a | b; /* a field of one is that of the other, or one is 0 */
}

void spar_forward_describe(int64_t forward, char *text, size_t size)
{
    if (forward > 0)
        spar_append(text, size, "gradient of call %lld", (long long)forward);
    for (int i = 0; forward < 0 && i < SPAR_PLACE_FIELDS; i++)
        spar_append(text, size, "%s%s %llx", i ? ", " : "", fields[i].name,
                    (unsigned long long)field_of(forward, i));
}
