#include "ops.h"

#include <stdio.h>
#include <string.h>

const spar_op *const spar_ops[] = {&spar_op_all_to_all, &spar_op_split, &spar_op_gather, NULL};

const spar_op *spar_op_find(const char *name)
{
    char known[256] = "";
    for (const spar_op *const *op = spar_ops; *op; op++) {
        if (strcmp((*op)->name, name) == 0)
            return *op;
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", (*op)->name);
    }
    spar_fail(SPAR_INVALID, "there is no operation '%s'; known: %s", name, known);
    return NULL;
}

spar_status spar_op_dim(const spar_op *op, const spar_tensor *tensor, int which, int *dim)
{
    int64_t value = tensor->args[which];
    if (value < 0 || value >= tensor->ndim)
        return spar_fail(SPAR_INVALID, "%s: a dim is %lld; expected 0 to %d", op->name,
                         (long long)value, tensor->ndim - 1);
    *dim = (int)value;
    return SPAR_OK;
}
