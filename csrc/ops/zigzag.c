/* zigzag_split:   rank r holds chunks r and 2R-1-r of x.chunk(2R, dim)
 * zigzag_gather:  the inverse: natural order
 *
 * With inner > 1 there are inner * R ranks: the shard of each of R ring ranks is sharded once more over inner (Ulysses)
 * ranks; rank = inner rank * R + ring rank. */
#include "ops/table.h"

static spar_status layouts(const spar_op *op, const spar_tensor *tensor, int world, int rank, int64_t *global,
                           spar_layout *in, spar_layout *out)
{
    int dim, gathers = op == &spar_op_zigzag_gather;
    spar_layout *sharded = gathers ? in : out;
    if (tensor->nargs != 3)
        return spar_fail(SPAR_INVALID, "%s takes %s; %d were given for %d ranks", op->name, op->args,
                         tensor->nargs, world);
    SPAR_TRY(spar_op_dim(op, tensor, 0, &dim));
    SPAR_TRY(spar_op_inner(op, tensor, 1, world));
    int inner = (int)tensor->args[1];
    SPAR_TRY(spar_layout_zigzag(sharded, dim, tensor->args[2], world / inner));
    SPAR_TRY(spar_layout_refine(sharded, inner));
    return spar_op_shard(op, tensor, rank, global, gathers, in, out);
}

const spar_op spar_op_zigzag_split = {
    .name = "zigzag_split",
    .inverse = "zigzag_gather",
    .args = "[dim, inner, total]",
    .layouts = layouts,
};

const spar_op spar_op_zigzag_gather = {
    .name = "zigzag_gather",
    .inverse = "zigzag_split",
    .args = "[dim, inner, total]",
    .layouts = layouts,
};
