/* SPDX-License-Identifier: Apache-2.0 */
/* Which copies a plan needs. */
#include "devices/execute.h"
#include "devices/cpu/copy.h"

enum {
    SHORT_STEP = 1 << 16, /* bytes from one run of a target to its next, at most */
    TOGETHER = 8,         /* targets that receive the same bytes at a time */
    LARGE = 1 << 17,      /* bytes for a target, from which on an input is read from
                      memory rather than a cache */
};

/* Whether the targets' i-th blocks have equal loops, of short steps that hold
 * one run of each. */
static int are_neighbours(const spar_copy *c, int64_t i)
{
    const spar_block *lead = spar_copy_block(c, 0, i);
    const spar_dim *loops = c->dims + lead->dims;
    int64_t low = lead->src, high = lead->src + lead->run;
    if (lead->ndim == 0 || spar_copy_rows(c, lead) >= 0 || loops[lead->ndim - 1].src > SHORT_STEP)
        return 0;
    for (int target = 1; target < c->targets; target++) {
        const spar_block *block = spar_copy_block(c, target, i);
        const spar_dim *dims = c->dims + block->dims;
        if (block->tensor != lead->tensor || block->ndim != lead->ndim)
            return 0;
        for (int dim = 0; dim < lead->ndim; dim++)
            if (dims[dim].extent != loops[dim].extent || dims[dim].src != loops[dim].src)
                return 0;
        low = block->src < low ? block->src : low;
        high = block->src + block->run > high ? block->src + block->run : high;
    }
    return high - low <= loops[lead->ndim - 1].src;
}

/* Whether to copy in turn. One target's runs alone are read with gaps, at half
 * the speed. */
static int gains_in_turn(const spar_copy *c)
{
    for (int target = 0; target < c->targets; target++)
        if (!c->to[target] || c->ranges[target].count != c->ranges->count)
            return 0;
    if (c->targets == 1 || c->bytes < (int64_t)LARGE * c->targets)
        return 0;
    for (int64_t i = 0; i < c->ranges->count; i++)
        if (!are_neighbours(c, i))
            return 0;
    return 1;
}

static const char *source_of(const spar_copy *c, const spar_block *block)
{
    return (const char *)c->from[block->tensor] + block->src;
}

/* Whether the targets' blocks are the same runs of the inputs, which each
 * receives at a place of its own. */
static int read_the_same(const spar_copy *c)
{
    for (int target = 0; target < c->targets; target++)
        if (!c->to[target] || c->ranges[target].count != c->ranges->count)
            return 0;
    for (int64_t i = 0; i < c->ranges->count; i++) {
        const spar_block *lead = spar_copy_block(c, 0, i);
        for (int target = 0; target < c->targets; target++) {
            const spar_block *block = spar_copy_block(c, target, i);
            if (block->ndim > 0 || block->run != lead->run || source_of(c, block) != source_of(c, lead) ||
                spar_is_listed(c->rows, block->tensor))
                return 0;
        }
    }
    return c->targets > 1;
}

/* Reads the i-th block of each target once. */
static void push_together(const spar_copy *c, int64_t i)
{
    const spar_block *lead = spar_copy_block(c, 0, i), block = {.run = lead->run};
    const void *const from = source_of(c, lead);
    const spar_range range = {0, 1, lead->run};
    for (int first = 0, n; first < c->targets; first += n) {
        void *at[TOGETHER], *const *to[TOGETHER];
        for (n = 0; n < TOGETHER && first + n < c->targets; n++) {
            const spar_block *own = spar_copy_block(c, first + n, i);
            at[n] = (char *)c->to[first + n][own->tensor] + own->dst;
            to[n] = &at[n];
        }
        spar_copy part = {.blocks = &block,
                          .dims = c->dims,
                          .ranges = &range,
                          .targets = n,
                          .from = &from,
                          .to = to,
                          .scale = c->scale,
                          .bytes = lead->run};
        spar_copy_all(&part, part.bytes);
    }
}

static int receive_the_same(const spar_plan *plan, void *const *const *outputs)
{
    for (int rank = 0; rank < plan->world; rank++)
        if (!outputs[rank])
            return 0;
    for (int rank = 1; rank < plan->world; rank++)
        if (plan->push[rank].first != plan->push->first || plan->push[rank].count != plan->push->count)
            return 0;
    return plan->world > 1;
}

void spar_push(const spar_plan *plan, const void *const *inputs, const spar_rows *rows,
               void *const *const *outputs, const spar_scale *scale)
{
    spar_copy c = {.blocks = plan->blocks,
                   .dims = plan->dims,
                   .ranges = plan->push,
                   .targets = plan->world,
                   .from = inputs,
                   .rows = rows,
                   .to = outputs,
                   .scale = scale,
                   .bytes = plan->push->bytes};
    if (!rows && receive_the_same(plan, outputs)) {
        spar_copy_all(&c, c.bytes);
        return;
    }
    if (read_the_same(&c)) {
        for (int64_t i = 0; i < c.ranges->count; i++)
            push_together(&c, i);
        return;
    }
    for (int rank = 1; rank < plan->world; rank++)
        c.bytes += plan->push[rank].bytes;
    if (gains_in_turn(&c)) {
        c.in_turn = 1;
        spar_copy_all(&c, c.bytes / c.targets);
        return;
    }
    c.targets = 1;
    for (int i = 0; i < plan->world; i++) {
        int rank = (plan->rank + i) % plan->world; /* ranks start with different peers */
        c.ranges = &plan->push[rank];
        c.to = &outputs[rank];
        c.bytes = c.ranges->bytes;
        if (*c.to)
            spar_copy_all(&c, c.bytes);
    }
}

void spar_copy_own(const spar_plan *plan, const void *const *inputs, void *const *outputs,
                   const spar_scale *scale)
{
    const spar_range *own = &plan->push[plan->rank];
    spar_copy c = {.blocks = plan->blocks,
                   .dims = plan->dims,
                   .ranges = own,
                   .targets = 1,
                   .from = inputs,
                   .to = &outputs,
                   .scale = scale,
                   .bytes = own->bytes};
    spar_copy_all(&c, c.bytes);
}

void spar_unpack(const spar_plan *plan, int peer, const void *wire, void *const *outputs,
                 const spar_scale *scale)
{
    const spar_range *pull = &plan->pull[peer];
    spar_copy c = {.blocks = plan->blocks,
                   .dims = plan->dims,
                   .ranges = pull,
                   .targets = 1,
                   .wire = wire,
                   .to = &outputs,
                   .scale = scale,
                   .bytes = pull->bytes};
    spar_copy_all(&c, c.bytes);
}

void spar_pack(const spar_plan *plan, int peer, const void *const *inputs, const spar_rows *rows, void *wire)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    const spar_range *push = &plan->push[peer];
    void *const *to = &wire;
    spar_dim dims[SPAR_MAX_DIMS];
    int64_t at = 0;
    for (int64_t i = 0; i < push->count; i++) {
        spar_block block = plan->blocks[push->first + i];
        const void *const *from = &inputs[block.tensor];
        spar_range range = {0, 1, spar_packed_dims(plan, &block, 0, dims)};
        spar_copy c = {.blocks = &block,
                       .dims = dims,
                       .ranges = &range,
                       .targets = 1,
                       .from = from,
                       .rows = rows ? rows + block.tensor : NULL,
                       .to = &to,
                       .scale = &unscaled,
                       .bytes = range.bytes};
        block.dst = at;
        block.dims = block.tensor = 0;
        spar_copy_all(&c, c.bytes);
        at += range.bytes;
    }
}
