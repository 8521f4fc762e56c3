#include "devices/execute.h"

#include <stdlib.h>
#include <string.h>

spar_status spar_packed_blocks(const spar_plan *plan, int peer,
                               spar_status (*emit)(void *context, const spar_block *block,
                                                   const spar_dim *dims),
                               void *context)
{
    const spar_range *range = &plan->push[peer];
    int64_t at = 0;
    for (int64_t i = range->first; i < range->first + range->count; i++) {
        spar_block block = plan->blocks[i];
        spar_dim dims[SPAR_MAX_DIMS];
        int64_t stride = block.run;
        memcpy(dims, plan->dims + block.dims, (size_t)block.ndim * sizeof *dims);
        for (int k = block.ndim - 1; k >= 0; k--) {
            dims[k].dst = stride;
            stride *= dims[k].extent;
        }
        block.dst = at;
        block.dims = 0;
        at += stride;
        SPAR_TRY(emit(context, &block, dims));
    }
    return SPAR_OK;
}

typedef struct {
    const spar_device *device;
    const void *const *inputs;
    void *wire, *stream;
} pack_context;

static spar_status pack_block(void *context, const spar_block *block, const spar_dim *dims)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    pack_context *c = context;
    spar_block alone = *block;
    const void *from = c->inputs[block->tensor];
    alone.tensor = 0;
    void *const *to = &c->wire;
    return c->device->copy_blocks(&alone, 1, dims, &from, &to, 1, &unscaled, 0, c->stream);
}

spar_status spar_pack(const spar_plan *plan, const spar_device *device, int peer, const void *const *inputs,
                      void *wire, void *stream)
{
    pack_context context = {device, inputs, wire, stream};
    return spar_packed_blocks(plan, peer, pack_block, &context);
}

spar_status spar_unpack(const spar_plan *plan, const spar_device *device, int peer, const void *wire,
                        void *const *outputs, const spar_scale *scale, void *stream)
{
    const spar_range *range = &plan->pull[peer];
    const void *on_stack[8] = {NULL}, **from = on_stack;
    if (plan->ntensors > 8 && !(from = malloc((size_t)plan->ntensors * sizeof *from)))
        return spar_fail(SPAR_NO_MEMORY, "no memory for %d tensors", plan->ntensors);
    for (int t = 0; t < plan->ntensors; t++)
        from[t] = wire; /* a peer's tensors are concatenated */
    spar_status status = device->copy_blocks(plan->blocks + range->first, range->count, plan->dims, from,
                                             &outputs, 1, scale, 0, stream);
    if (from != on_stack)
        free(from);
    return status;
}

spar_status spar_copy_own(const spar_plan *plan, const spar_device *device, const void *const *inputs,
                          void *const *outputs, const spar_scale *scale, void *stream)
{
    const spar_range *range = &plan->push[plan->rank];
    return device->copy_blocks(plan->blocks + range->first, range->count, plan->dims, inputs, &outputs, 1,
                               scale, 0, stream);
}

spar_status spar_push(const spar_plan *plan, const spar_device *device, const void *const *inputs,
                      void *const *const *outputs, const spar_scale *scale, int read_soon, void *stream)
{
    const spar_range *all = plan->push;
    int same = plan->world > 1;
    for (int rank = 1; rank < plan->world; rank++)
        same &= all[rank].first == all[0].first && all[rank].count == all[0].count;
    if (same)
        return device->copy_blocks(plan->blocks + all->first, all->count, plan->dims, inputs, outputs,
                                   plan->world, scale, read_soon, stream);
    for (int i = 0; i < plan->world; i++) {
        int rank = (plan->rank + i) % plan->world; /* ranks start with different peers */
        if (!outputs[rank])
            continue;
        SPAR_TRY(device->copy_blocks(plan->blocks + all[rank].first, all[rank].count, plan->dims, inputs,
                                     &outputs[rank], 1, scale, read_soon, stream));
    }
    return SPAR_OK;
}
