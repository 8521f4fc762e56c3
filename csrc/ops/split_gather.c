/* split:   y on rank r = x.split(sizes, dim)[r]      every rank holds all of x and selects its shard
 * gather:  y           = concat over p of x_p along dim
 *
 * Each is the other with its layouts swapped. */
#include "ops/table.h"

#include <string.h>

/* Returns the sizes argument, one per rank; NULL if it is missing. */
static const int64_t *given_sizes(const spar_tensor *tensor, int world)
{
    return tensor->nargs == 1 + world ? tensor->args + 1 : NULL;
}

static spar_status wrong_count(const spar_op *op, const spar_tensor *tensor, int world)
{
    return spar_fail(SPAR_INVALID, "%s takes %s; %d were given for %d ranks", op->name, op->args,
                     tensor->nargs, world);
}

static spar_status split_layouts(const spar_op *op, const spar_tensor *tensor, int world, int rank,
                                 int64_t *global, spar_layout *in, spar_layout *out)
{
    int dim;
    (void)rank;
    if (tensor->nargs != 1 && tensor->nargs != 1 + world)
        return wrong_count(op, tensor, world);
    SPAR_TRY(spar_op_dim(op, tensor, 0, &dim));
    memcpy(global, tensor->extents, (size_t)tensor->ndim * sizeof *global);
    spar_layout_whole(in, world);
    return spar_layout_cut(out, dim, global[dim], world, given_sizes(tensor, world));
}

static spar_status gather_layouts(const spar_op *op, const spar_tensor *tensor, int world, int rank,
                                  int64_t *global, spar_layout *in, spar_layout *out)
{
    int dim;
    if (tensor->nargs < 1 || (tensor->nargs > 2 && tensor->nargs != 1 + world))
        return wrong_count(op, tensor, world);
    SPAR_TRY(spar_op_dim(op, tensor, 0, &dim));
    const int64_t *sizes = given_sizes(tensor, world);
    int64_t local = tensor->extents[dim], total = 0;
    if (sizes) {
        for (int p = 0; p < world; p++)
            if (sizes[p] < 0 || __builtin_add_overflow(total, sizes[p], &total))
                return spar_fail(SPAR_INVALID,
                                 "%s: the size given for rank %d is %lld; expected at least 0, and a "
                                 "sum below 2^63",
                                 op->name, p, (long long)sizes[p]);
    } else if (tensor->nargs == 2) {
        total = tensor->args[1];
        if (total < 0)
            return spar_fail(SPAR_INVALID, "%s: the total is %lld; expected at least 0", op->name,
                             (long long)total);
    } else if (__builtin_mul_overflow(local, (int64_t)world, &total)) {
        return spar_fail(SPAR_INVALID, "%s: %d ranks with %lld each hold more than 2^63", op->name, world,
                         (long long)local);
    }
    SPAR_TRY(spar_layout_cut(in, dim, total, world, sizes));
    return spar_op_shard(op, tensor, rank, global, 1, in, out);
}

const spar_op spar_op_split = {
    .name = "split",
    .inverse = "gather",
    .args = "[dim, size of each rank...] or [dim] for the size rule",
    .layouts = split_layouts,
};

const spar_op spar_op_gather = {
    .name = "gather",
    .inverse = "split",
    .args = "[dim, size of each rank...], [dim, total] for the size rule, or [dim] for equal sizes",
    .layouts = gather_layouts,
};
