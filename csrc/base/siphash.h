/* SPDX-License-Identifier: Apache-2.0 */
/* SipHash-2-4 with 128 bits of output: a message authentication code. */
#ifndef SPAR_SIPHASH_H
#define SPAR_SIPHASH_H

#include <stddef.h>

/* A secret, a nonce or a code. */
typedef struct {
    unsigned char bytes[16];
} spar_key;

spar_key spar_siphash(const spar_key *key, const void *data, size_t size);

/* A code that only who has both keys can compute; the same for either order of them. */
spar_key spar_siphash_pair(const spar_key *a, const spar_key *b, const void *data, size_t size);

/* Compares in constant time. */
int spar_key_same(const spar_key *a, const spar_key *b);

#endif
