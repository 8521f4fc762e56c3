/* SPDX-License-Identifier: Apache-2.0 */
/* Which ranks hold which documents, so that they have equal tokens and equal work of attention, and few
 * documents lie on several ranks. */
#ifndef SPAR_BALANCE_H
#define SPAR_BALANCE_H

#include "base/error.h"

#include <stdint.h>

/* The work of a document is the square of its length; a share of a document has the same share of its work,
 * as its ranks hold it from both ends inwards: of ranks a, b and c the runs are a b c b a.
 *
 * Sets the numbers of a SPAR_RUNS layout, which the caller frees, and their count. No rank has more tokens
 * or work than 1 + tolerance of the mean, where lengths allow it: few short documents cannot be cut evenly.
 * All ranks compute the same from the same arguments. */
spar_status spar_balance(const int64_t *lengths, int64_t documents, int world, double tolerance,
                         int64_t **numbers, int64_t *count);

#endif
