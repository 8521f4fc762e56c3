/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/exchange.h"

#include <string.h>

/* Reads the layout of the input (`which` 0) or of the output. */
static spar_status read_layout(const spar_tensor *tensor, int which, int world, spar_layout *layout)
{
    const int64_t *args = tensor->args;
    if (tensor->nargs < 1 || args[0] < 1 || args[0] > tensor->nargs - 2)
        return spar_fail(
            SPAR_INVALID,
            "the layouts are %d ints; expected n, the n ints of the input's layout, and those of the "
            "output's, at least one each",
            tensor->nargs);
    int first = (int)args[0];
    return which ? spar_layout_read(layout, args + 1 + first, tensor->nargs - 1 - first, tensor->ndim, world)
                 : spar_layout_read(layout, args + 1, first, tensor->ndim, world);
}

static spar_status check(const spar_tensor *tensor, int rank, int64_t *global, const spar_layout *in,
                         const spar_layout *out)
{
    if (in->dim < 0 && out->dim < 0)
        return spar_fail(SPAR_INVALID, "every rank holds the whole before and after");
    memcpy(global, tensor->extents, (size_t)tensor->ndim * sizeof *global);
    if (in->dim >= 0) {
        int64_t held = spar_layout_extent(in, rank), has = tensor->extents[in->dim];
        if (held != has)
            return spar_fail(SPAR_INVALID,
                             "rank %d's input has %lld in dim %d; expected %lld, its shard of %lld", rank,
                             (long long)has, in->dim, (long long)held, (long long)in->total);
        global[in->dim] = in->total;
    }
    if (out->dim >= 0 && global[out->dim] != out->total)
        return spar_fail(SPAR_INVALID,
                         "rank %d's input has %lld in dim %d; expected %lld, the sum of all shards", rank,
                         (long long)global[out->dim], out->dim, (long long)out->total);
    return SPAR_OK;
}

spar_status spar_exchange_layouts(const spar_tensor *tensor, int world, int rank, int64_t *global,
                                  spar_layout *in, spar_layout *out)
{
    SPAR_TRY(read_layout(tensor, 0, world, in));
    spar_status status = read_layout(tensor, 1, world, out);
    if (status == SPAR_OK) {
        status = check(tensor, rank, global, in, out);
        if (status != SPAR_OK)
            spar_layout_free(out);
    }
    if (status != SPAR_OK)
        spar_layout_free(in);
    return status;
}
