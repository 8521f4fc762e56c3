/* SPDX-License-Identifier: Apache-2.0 */
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

static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};

typedef struct {
    const spar_device *device;
    const void *const *inputs;
    void *wire;
} pack_context;

static spar_status pack_block(void *context, const spar_block *block, const spar_dim *dims)
{
    pack_context *c = context;
    spar_block alone = *block;
    spar_range range = {0, 1, spar_block_bytes(block->run, block->ndim, dims)};
    alone.tensor = 0;
    void *const *to = &c->wire;
    return c->device->copy_blocks(&(spar_copies){.blocks = &alone,
                                                 .dims = dims,
                                                 .ranges = &range,
                                                 .targets = 1,
                                                 .from = &c->inputs[block->tensor],
                                                 .to = &to,
                                                 .scale = &unscaled});
}

spar_status spar_pack(const spar_plan *plan, const spar_device *device, int peer, const void *const *inputs,
                      void *wire)
{
    pack_context context = {device, inputs, wire};
    return spar_packed_blocks(plan, peer, pack_block, &context);
}

/* Copies one range. */
static spar_status copy_range(const spar_plan *plan, const spar_device *device, const spar_range *range,
                              const void *const *from, void *const *outputs, const spar_scale *scale)
{
    return device->copy_blocks(&(spar_copies){.blocks = plan->blocks,
                                              .dims = plan->dims,
                                              .ranges = range,
                                              .targets = 1,
                                              .from = from,
                                              .to = &outputs,
                                              .scale = scale});
}

spar_status spar_unpack(const spar_plan *plan, const spar_device *device, int peer, const void *wire,
                        void *const *outputs, const spar_scale *scale)
{
    const void *on_stack[8] = {NULL}, **from = on_stack;
    if (plan->ntensors > 8 && !(from = malloc((size_t)plan->ntensors * sizeof *from)))
        return spar_fail(SPAR_NO_MEMORY, "no memory for %d tensors", plan->ntensors);
    for (int t = 0; t < plan->ntensors; t++)
        from[t] = wire; /* a peer's tensors are concatenated */
    spar_status status = copy_range(plan, device, &plan->pull[peer], from, outputs, scale);
    if (from != on_stack)
        free(from);
    return status;
}

spar_status spar_copy_own(const spar_plan *plan, const spar_device *device, const void *const *inputs,
                          void *const *outputs, const spar_scale *scale)
{
    return copy_range(plan, device, &plan->push[plan->rank], inputs, outputs, scale);
}

spar_status spar_push(const spar_plan *plan, const spar_device *device, const void *const *inputs,
                      void *const *const *outputs, const spar_scale *scale)
{
    return device->copy_blocks(&(spar_copies){
        .blocks = plan->blocks,
        .dims = plan->dims,
        .ranges = plan->push,
        .targets = plan->world,
        .first = plan->rank, /* ranks start with different peers */
        .from = inputs,
        .to = outputs,
        .scale = scale,
    });
}
