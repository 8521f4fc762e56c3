/* SPDX-License-Identifier: Apache-2.0 */
/* Copies to outputs that have gaps between their rows: those of a plan, once its blocks are placed anew. */
#include "devices/execute.h"
#include "plan/rows.h"

enum { FEW_RANKS = 64 };

/* Pushes to all ranks at once; returns 0 if their blocks are too many. */
static int push_at_once(spar_rows *rows, const spar_plan *plan, const void *const *inputs,
                        void *const *const *outputs, const int64_t *const *pitches, const spar_scale *scale)
{
    spar_range ranges[FEW_RANKS];
    spar_plan placed = *plan;
    for (int rank = 0; rank < plan->world; rank++) {
        if (rank == FEW_RANKS)
            return 0;
        ranges[rank] = spar_rows_add(rows, plan, &plan->push[rank], 0, pitches[rank]);
        if (ranges[rank].count != plan->push[rank].count)
            return 0;
    }
    placed.blocks = rows->blocks;
    placed.dims = rows->dims;
    placed.push = ranges;
    spar_push(&placed, inputs, outputs, scale);
    return 1;
}

void spar_push_rows(const spar_plan *plan, const void *const *inputs, void *const *const *outputs,
                    const int64_t *const *pitches, const spar_scale *scale)
{
    spar_rows rows;
    rows.nblocks = rows.ndims = 0;
    if (push_at_once(&rows, plan, inputs, outputs, pitches, scale))
        return;
    for (int i = 0; i < plan->world; i++) {
        int rank = (plan->rank + i) % plan->world; /* ranks start with different peers */
        spar_range range;
        for (int64_t at = 0; outputs[rank] && at < plan->push[rank].count; at += range.count) {
            rows.nblocks = rows.ndims = 0;
            range = spar_rows_add(&rows, plan, &plan->push[rank], at, pitches[rank]);
            const spar_plan part = {.world = 1, .push = &range, .blocks = rows.blocks, .dims = rows.dims};
            spar_push(&part, inputs, &outputs[rank], scale);
        }
    }
}

void spar_unpack_rows(const spar_plan *plan, int peer, const void *wire, void *const *outputs,
                      const int64_t *pitches, const spar_scale *scale)
{
    spar_rows rows;
    spar_range range;
    for (int64_t at = 0; at < plan->pull[peer].count; at += range.count) {
        rows.nblocks = rows.ndims = 0;
        range = spar_rows_add(&rows, plan, &plan->pull[peer], at, pitches);
        const spar_plan part = {.world = 1, .pull = &range, .blocks = rows.blocks, .dims = rows.dims};
        spar_unpack(&part, 0, wire, outputs, scale);
    }
}
