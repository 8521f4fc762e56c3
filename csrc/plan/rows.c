/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/rows.h"

#include <string.h>

enum { ROW_DIMS = 2 }; /* of [B, S, ...] */

int64_t spar_row_bytes(const spar_plan_tensor *tensor)
{
    int64_t bytes = tensor->item_size;
    if (tensor->ndim <= ROW_DIMS || tensor->out_dim < 0 || tensor->out_dim >= ROW_DIMS)
        return 0;
    for (int i = ROW_DIMS; i < tensor->ndim; i++)
        if (__builtin_mul_overflow(bytes, tensor->global[i], &bytes))
            return 0; /* the tensor has no items */
    return bytes;
}

int64_t spar_rows_reach(const spar_plan_tensor *tensor, int64_t bytes, int64_t pitch)
{
    int64_t width = spar_row_bytes(tensor), reach;
    if (pitch == 0 || bytes == 0)
        return bytes;
    if (width == 0 || pitch < width || __builtin_mul_overflow(bytes / width - 1, pitch, &reach) ||
        __builtin_add_overflow(reach, width, &reach))
        return -1;
    return reach;
}

/* Writes the loops of a block, outer first, whose rows of `width` bytes begin `pitch` bytes apart; returns
 * the block. They are one more than before where a run or a loop went on from row to row. */
static spar_block place(const spar_block *block, const spar_dim *dims, int64_t width, int64_t pitch,
                        spar_dim *result)
{
    spar_block placed = *block;
    placed.ndim = 0;
    for (int i = 0; i < block->ndim; i++) {
        spar_dim loop = dims[i];
        int64_t row = loop.dst ? width / loop.dst : 0; /* iterations in a row, if it takes several */
        if (loop.dst >= width) {
            loop.dst = loop.dst / width * pitch;
        } else if (row && loop.extent > row) {
            result[placed.ndim++] = (spar_dim){loop.extent / row, loop.src * row, pitch};
            loop.extent = row;
        }
        result[placed.ndim++] = loop;
    }
    if (block->run > width) {
        result[placed.ndim++] = (spar_dim){block->run / width, width, pitch};
        placed.run = width;
    }
    placed.dst = block->dst / width * pitch + block->dst % width;
    return placed;
}

spar_range spar_rows_add(spar_rows *rows, const spar_plan *plan, const spar_range *range, int64_t first,
                         const int64_t *pitches)
{
    spar_range added = {.first = rows->nblocks};
    for (int64_t i = range->first + first; i < range->first + range->count; i++) {
        const spar_block *block = &plan->blocks[i];
        const spar_dim *dims = plan->dims + block->dims;
        spar_dim *result = rows->dims + rows->ndims;
        int64_t pitch = pitches[block->tensor];
        if (rows->nblocks == SPAR_ROWS_BLOCKS || rows->ndims + block->ndim + 1 > SPAR_ROWS_DIMS)
            break;
        spar_block placed = *block;
        if (pitch)
            placed = place(block, dims, spar_row_bytes(&plan->tensors[block->tensor]), pitch, result);
        else
            memcpy(result, dims, (size_t)block->ndim * sizeof *dims);
        placed.dims = rows->ndims;
        rows->ndims += placed.ndim;
        rows->blocks[rows->nblocks++] = placed;
        added.count++;
        added.bytes += spar_block_bytes(placed.run, placed.ndim, result);
    }
    return added;
}
