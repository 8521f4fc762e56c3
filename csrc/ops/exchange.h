/* SPDX-License-Identifier: Apache-2.0 */
/* An exchange is a pair of layouts of one global tensor: what each rank holds before, and after.
 *
 * They may shard the same dim. Shapes, plans, signatures and transports follow from the two layouts; so does
 * the inverse, which swaps them. An input of which every rank holds the whole needs no communication: each
 * rank selects its shard. */
#ifndef SPAR_EXCHANGE_H
#define SPAR_EXCHANGE_H

#include "ops/layout.h"

#define SPAR_MAX_DIMS 64 /* as many as torch allows */

/* One tensor of a request, as one rank sees it. */
typedef struct {
    int64_t item_size;      /* bytes of an element */
    int ndim;               /* 1 to SPAR_MAX_DIMS */
    const int64_t *extents; /* [ndim] of this rank's input, in elements */
    const int64_t *strides; /* [ndim] of this rank's input, in elements, at least 0 */
    int nargs;              /* the two layouts: n, the n ints of the input's layout, those of the output's */
    const int64_t *args;    /* see spar_layout_read */
} spar_tensor;

/* Reads both layouts, checks them against the extents that `rank` holds, and sets the global extents [ndim].
 * On failure it leaves no layout to free. */
spar_status spar_exchange_layouts(const spar_tensor *tensor, int world, int rank, int64_t *global,
                                  spar_layout *in, spar_layout *out);

#endif
