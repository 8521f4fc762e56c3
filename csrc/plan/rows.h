/* SPDX-License-Identifier: Apache-2.0 */
/* Outputs as columns of one tensor: rows with gaps between them.
 *
 * The outputs of a plan are contiguous. A rank may keep one of [B, S, ...] as columns of a wider tensor: a
 * row, all that it has of one b and s, then begins `pitch` bytes behind the row before it. Ranks need not
 * agree on that, nor know it when they build the plan: a rank publishes it with each call, beside the
 * addresses. A pitch of 0 says that there are no gaps. */
#ifndef SPAR_ROWS_H
#define SPAR_ROWS_H

#include "plan/plan.h"

/* The bytes of a row, the same on all ranks; 0: this output has no rows. */
int64_t spar_row_bytes(const spar_plan_tensor *tensor);

/* How far an output reaches that has `bytes` bytes if it is contiguous; -1: it cannot have this pitch. */
int64_t spar_rows_reach(const spar_plan_tensor *tensor, int64_t bytes, int64_t pitch);

/* The blocks of a plan as outputs have them in rows, where nothing may be allocated. */
enum { SPAR_ROWS_BLOCKS = 128, SPAR_ROWS_DIMS = 512 };
typedef struct {
    int64_t nblocks, ndims;
    spar_block blocks[SPAR_ROWS_BLOCKS];
    spar_dim dims[SPAR_ROWS_DIMS];
} spar_rows;

/* Adds blocks `first` and on of a range of the plan, for outputs of these pitches [plan->ntensors], until
 * there is no more room; returns the range of those that were added. */
spar_range spar_rows_add(spar_rows *rows, const spar_plan *plan, const spar_range *range, int64_t first,
                         const int64_t *pitches);

#endif
