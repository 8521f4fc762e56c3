/* SPDX-License-Identifier: Apache-2.0 */
/* The word of a call, which ranks compare beside its signature.
 *
 * Positive: the number of the call whose gradient it moves. Negative: a place in a view (spar/_model), whose
 * fields are hashes of the code that ran before, and of the states of generators that it drew from. 0, and a
 * field that is 0: not known, equal to any. */
#ifndef SPAR_PLACE_H
#define SPAR_PLACE_H

#include <stddef.h>
#include <stdint.h>

enum { SPAR_PLACE_CODE, SPAR_PLACE_TORCH, SPAR_PLACE_RANDOM, SPAR_PLACE_NUMPY, SPAR_PLACE_FIELDS };

/* Packs the lowest bits of hashes; only a hash of 0 becomes a field of 0. */
int64_t spar_place(const uint64_t hashes[SPAR_PLACE_FIELDS]);

/* Whether two ranks' words cannot be of the same call. */
int spar_forward_differs(int64_t a, int64_t b);

/* What is known by either of two words that do not differ. */
int64_t spar_forward_merged(int64_t a, int64_t b);

/* Appends a word other than 0: "gradient of call 3", or "code 1f, torch 0, random 0, numpy 0". */
void spar_forward_describe(int64_t forward, char *text, size_t size);

#endif
