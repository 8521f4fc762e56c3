/* SPDX-License-Identifier: Apache-2.0 */
/* J.-P. Aumasson, D. J. Bernstein: SipHash, a fast short-input PRF (2012), and its 128-bit variant of the
 * reference code. */
#include "base/siphash.h"

#include <stdint.h>
#include <string.h>

static uint64_t load(const unsigned char *bytes, size_t count)
{
    uint64_t word = 0;
    for (size_t i = 0; i < count; i++)
        word |= (uint64_t)bytes[i] << 8 * i;
    return word;
}

static void store(unsigned char *bytes, uint64_t word)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(word >> 8 * i);
}

static uint64_t rotate(uint64_t word, int bits)
{
    return word << bits | word >> (64 - bits);
}

static void mix(uint64_t v[4], int rounds)
{
    while (rounds--) {
        v[0] += v[1];
        v[2] += v[3];
        v[1] = rotate(v[1], 13) ^ v[0];
        v[3] = rotate(v[3], 16) ^ v[2];
        v[0] = rotate(v[0], 32);
        v[2] += v[1];
        v[0] += v[3];
        v[1] = rotate(v[1], 17) ^ v[2];
        v[3] = rotate(v[3], 21) ^ v[0];
        v[2] = rotate(v[2], 32);
    }
}

static void absorb(uint64_t v[4], uint64_t word)
{
    v[3] ^= word;
    mix(v, 2);
    v[0] ^= word;
}

spar_key spar_siphash(const spar_key *key, const void *data, size_t size)
{
    const unsigned char *bytes = data;
    uint64_t k0 = load(key->bytes, 8), k1 = load(key->bytes + 8, 8);
    uint64_t v[4] = {k0 ^ 0x736f6d6570736575u, k1 ^ 0x646f72616e646f6du ^ 0xee, k0 ^ 0x6c7967656e657261u,
                     k1 ^ 0x7465646279746573u};
    size_t at = 0;
    spar_key code;
    for (; at + 8 <= size; at += 8)
        absorb(v, load(bytes + at, 8));
    absorb(v, load(bytes + at, size - at) | (uint64_t)size << 56);
    v[2] ^= 0xee;
    mix(v, 4);
    store(code.bytes, v[0] ^ v[1] ^ v[2] ^ v[3]);
    v[1] ^= 0xdd;
    mix(v, 4);
    store(code.bytes + 8, v[0] ^ v[1] ^ v[2] ^ v[3]);
    return code;
}

spar_key spar_siphash_pair(const spar_key *a, const spar_key *b, const void *data, size_t size)
{
    spar_key code = spar_siphash(a, data, size), other = spar_siphash(b, data, size);
    for (size_t i = 0; i < sizeof code.bytes; i++)
        code.bytes[i] ^= other.bytes[i];
    return code;
}

int spar_key_same(const spar_key *a, const spar_key *b)
{
    unsigned char differs = 0;
    for (size_t i = 0; i < sizeof a->bytes; i++)
        differs |= a->bytes[i] ^ b->bytes[i];
    return !differs;
}
