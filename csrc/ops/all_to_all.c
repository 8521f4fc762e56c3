/* y on rank r = concat over p of x_p.split(sizes, scatter)[r] along gather.
 *
 * The input is sharded along the gather dim, the output along the scatter dim, both by the size rule. */
#include "ops/table.h"

#include <string.h>

static spar_status layouts(const spar_op *op, const spar_tensor *tensor, int world, int rank, int64_t *global,
                           spar_layout *in, spar_layout *out)
{
    int scatter, gather;
    if (tensor->nargs != 3)
        return spar_fail(SPAR_INVALID, "%s takes %s; %d were given", op->name, op->args, tensor->nargs);
    SPAR_TRY(spar_op_dim(op, tensor, 0, &scatter));
    SPAR_TRY(spar_op_dim(op, tensor, 1, &gather));
    if (scatter == gather)
        return spar_fail(SPAR_INVALID,
                         "%s: scatter_dim and gather_dim are both %d on rank %d; expected two dims", op->name,
                         scatter, rank);
    int64_t total = tensor->args[2];
    int64_t local = tensor->extents[gather];
    if (total < 0 || local != spar_shard_size(total, world, rank))
        return spar_fail(SPAR_INVALID,
                         "%s: gather_size is %lld, of which rank %d of %d holds %lld; its input's dim "
                         "%d has %lld",
                         op->name, (long long)total, rank, world,
                         (long long)(total < 0 ? 0 : spar_shard_size(total, world, rank)), gather,
                         (long long)local);
    memcpy(global, tensor->extents, (size_t)tensor->ndim * sizeof *global);
    global[gather] = total;
    SPAR_TRY(spar_layout_cut(in, gather, total, world, NULL));
    spar_status status = spar_layout_cut(out, scatter, global[scatter], world, NULL);
    if (status != SPAR_OK)
        spar_layout_free(in);
    return status;
}

const spar_op spar_op_all_to_all = {
    .name = "all_to_all",
    .inverse = "all_to_all",
    .args = "[scatter_dim, gather_dim, gather_size]",
    .layouts = layouts,
};
