/* SPDX-License-Identifier: Apache-2.0 */
/* Outputs of random calls that have gaps between their rows. */
#ifndef RANDOM_ROWS_H
#define RANDOM_ROWS_H

#include "devices/execute.h"
#include "plan/rows.h"
#include "random_call.h"

/* Gives a rank's output gaps of as many items; returns its pitch: 0 where it has no rows, or no gaps. */
static inline int64_t widen(const part *p, buffer *b, const spar_plan_tensor *tensor, int gap)
{
    int64_t width = spar_row_bytes(tensor), pitch = gap && width ? width + (int64_t)gap * p->item : 0;
    if (!pitch)
        return 0;
    b->strides[1] = pitch / p->item;
    b->strides[0] = b->strides[1] * b->extents[1];
    b->bytes = spar_rows_reach(tensor, b->bytes, pitch);
    EXPECT(b->bytes >= 0);
    free(b->data);
    b->data = malloc((size_t)b->bytes + 1);
    EXPECT(b->data);
    memset(b->data, NOT_WRITTEN, (size_t)b->bytes + 1);
    return pitch;
}

/* Expects an output's values, and nothing written between and behind them; clears it. */
static inline void check_rows(const part *p, const buffer *b)
{
    visit(p, b, 2);
    for (int64_t i = 0; i <= b->bytes; i++)
        EXPECT(b->data[i] == NOT_WRITTEN);
}

/* What a rank has of a call. */
typedef struct {
    spar_plan *plan;
    buffer in[TENSORS], out[TENSORS];
    const void *inputs[TENSORS];
    void *outputs[TENSORS];
    int64_t pitches[TENSORS];
} row_member;

/* Runs a call of which each output of each rank has other gaps: pushed, and packed. */
static inline void run_in_rows(uint64_t *seed, int world, int count, const part *parts)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    row_member *members = calloc((size_t)world, sizeof *members);
    void *const **outputs = calloc((size_t)world, sizeof *outputs);
    const int64_t **pitches = calloc((size_t)world, sizeof *pitches);
    EXPECT(members && outputs && pitches);
    for (int rank = 0; rank < world; rank++) {
        row_member *m = &members[rank];
        spar_tensor tensors[TENSORS];
        for (int t = 0; t < count; t++) {
            m->in[t] = make_buffer(&parts[t], rank, &parts[t].in, parts[t].gap);
            m->out[t] = make_buffer(&parts[t], rank, &parts[t].out, 0);
            visit(&parts[t], &m->in[t], 0);
            m->inputs[t] = m->in[t].data;
            tensors[t] = tensor_of(&parts[t], &m->in[t]);
        }
        spar_request request = {world, rank, SPAR_SIDE_PULL, count, tensors};
        EXPECT(!spar_plan_build(&request, &m->plan));
        for (int t = 0; t < count; t++) {
            m->pitches[t] = widen(&parts[t], &m->out[t], &m->plan->tensors[t], draw(seed, 4));
            m->outputs[t] = m->out[t].data;
        }
        outputs[rank] = m->outputs;
        pitches[rank] = m->pitches;
    }
    for (row_member *m = members; m < members + world; m++)
        spar_push_rows(m->plan, m->inputs, outputs, pitches, &unscaled);
    for (int i = 0; i < world * count; i++)
        check_rows(&parts[i % count], &members[i / count].out[i % count]);
    for (int from = 0; from < world; from++)
        for (int to = 0; to < world; to++) {
            const row_member *a = &members[from], *b = &members[to];
            char *wire = malloc((size_t)a->plan->push[to].bytes);
            spar_pack(a->plan, to, a->inputs, wire);
            spar_unpack_rows(b->plan, from, wire, b->outputs, b->pitches, &unscaled);
            free(wire);
        }
    for (int i = 0; i < world * count; i++) {
        row_member *m = &members[i / count];
        check_rows(&parts[i % count], &m->out[i % count]);
        free(m->in[i % count].data);
        free(m->out[i % count].data);
    }
    for (row_member *m = members; m < members + world; m++)
        spar_plan_release(m->plan);
    free(members);
    free(outputs);
    free(pitches);
}

#endif
