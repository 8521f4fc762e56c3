#include "ops/table.h"

#include "base/util.h"

#include <string.h>

const spar_op *const spar_ops[] = {
    &spar_op_all_to_all,    &spar_op_split,        &spar_op_gather,        &spar_op_zigzag_split,
    &spar_op_zigzag_gather, &spar_op_packed_split, &spar_op_packed_gather, NULL,
};

const spar_op *spar_op_find(const char *name)
{
    char known[256] = "";
    for (const spar_op *const *op = spar_ops; *op; op++) {
        if (strcmp((*op)->name, name) == 0)
            return *op;
        spar_append(known, sizeof known, "%s%s", *known ? ", " : "", (*op)->name);
    }
    spar_fail(SPAR_INVALID, "there is no operation '%s'; known: %s", name, known);
    return NULL;
}

spar_status spar_op_dim(const spar_op *op, const spar_tensor *tensor, int which, int *dim)
{
    int64_t value = tensor->args[which];
    if (value < 0 || value >= tensor->ndim)
        return spar_fail(SPAR_INVALID, "%s: a dim is %lld; expected 0 to %d", op->name, (long long)value,
                         tensor->ndim - 1);
    *dim = (int)value;
    return SPAR_OK;
}

spar_status spar_op_inner(const spar_op *op, const spar_tensor *tensor, int which, int world)
{
    int64_t inner = tensor->args[which];
    if (inner < 1 || inner > world || world % inner)
        return spar_fail(SPAR_INVALID, "%s: %lld inner ranks; expected a divisor of the %d ranks", op->name,
                         (long long)inner, world);
    return SPAR_OK;
}

spar_status spar_op_shard(const spar_op *op, const spar_tensor *tensor, int rank, int64_t *global,
                          int gathers, spar_layout *in, spar_layout *out)
{
    spar_layout *sharded = gathers ? in : out, *whole = gathers ? out : in;
    int dim = sharded->dim;
    int64_t has = tensor->extents[dim];
    int64_t expected = gathers ? spar_layout_extent(sharded, rank) : sharded->total;
    if (has != expected) {
        spar_layout_free(sharded);
        return spar_fail(
            SPAR_INVALID,
            "%s: by its sizes rank %d holds %lld of dim %d; its input's dim %d has %lld, expected as many",
            op->name, rank, (long long)expected, dim, dim, (long long)has);
    }
    memcpy(global, tensor->extents, (size_t)tensor->ndim * sizeof *global);
    global[dim] = sharded->total;
    spar_layout_whole(whole, sharded->world);
    return SPAR_OK;
}
