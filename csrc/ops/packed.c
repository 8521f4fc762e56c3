/* packed_split:   x is several sequences, concatenated; rank r holds its part of each, in their order
 * packed_gather:  the inverse
 *
 * Parts follow the size rule, or a table of each rank's extent of each sequence. With inner > 1 there are inner * R
 * ranks: the packed shard of each of R ring ranks is sharded once more over inner (Ulysses) ranks; rank = inner rank * R
 * + ring rank. */
#include "ops/table.h"

static spar_status layouts(const spar_op *op, const spar_tensor *tensor, int world, int rank, int64_t *global,
                           spar_layout *in, spar_layout *out)
{
    int dim, gathers = op == &spar_op_packed_gather;
    spar_layout *sharded = gathers ? in : out;
    if (tensor->nargs < 3)
        return spar_fail(SPAR_INVALID, "%s takes %s; %d were given for %d ranks", op->name, op->args,
                         tensor->nargs, world);
    SPAR_TRY(spar_op_dim(op, tensor, 0, &dim));
    SPAR_TRY(spar_op_inner(op, tensor, 1, world));
    int inner = (int)tensor->args[1], outer = world / inner;
    int64_t sequences = tensor->args[2], numbers = tensor->nargs - 3;
    int table = sequences != numbers;
    if (sequences < 0 || sequences > numbers || (table && sequences * outer != numbers))
        return spar_fail(SPAR_INVALID,
                         "%s: %lld numbers for %lld sequences on %d ranks; expected a length of each, "
                         "or a size of each on each rank",
                         op->name, (long long)numbers, (long long)sequences, outer);
    SPAR_TRY(spar_layout_packed(sharded, dim, outer, sequences, tensor->args + 3, table));
    SPAR_TRY(spar_layout_refine(sharded, inner));
    return spar_op_shard(op, tensor, rank, global, gathers, in, out);
}

const spar_op spar_op_packed_split = {
    .name = "packed_split",
    .inverse = "packed_gather",
    .args = "[dim, inner, sequences, their lengths or their sizes on each rank...]",
    .layouts = layouts,
};

const spar_op spar_op_packed_gather = {
    .name = "packed_gather",
    .inverse = "packed_split",
    .args = "[dim, inner, sequences, their lengths or their sizes on each rank...]",
    .layouts = layouts,
};
