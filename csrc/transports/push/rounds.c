/* SPDX-License-Identifier: Apache-2.0 */
/* The rounds of a call, and the state that they need. */
#include "transports/push/push.h"

#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static const int64_t ALIGNMENT = 256; /* of areas and of their parts: copies are fast */
static const int64_t LATER_NS =
    1000000000; /* a kernel's limit is behind that of the watchdog, which knows why */
static const int64_t MOST_BYTES = (int64_t)32 << 30; /* places are 32-bit numbers */
static const int64_t DIRECT_BYTES = 1 << 20; /* an estimate: to copy them takes as long as to offer them */

_Static_assert((int)SPAR_KERNEL_TENSORS >= (int)SPAR_GROUP_TENSORS, "each has an offer");

static int64_t aligned(int64_t bytes)
{
    return bytes / ALIGNMENT * ALIGNMENT;
}

/* ---- rounds ---- */

/* Where rank `from` writes in the first half of rank `to`'s slot. */
static char *area_of(const spar_push_state *p, int from, int to)
{
    return p->bases[to] + (from < to ? from : from - 1) * p->area;
}

static int64_t largest(const int64_t *sizes, int world)
{
    int64_t most = 0;
    for (int rank = 0; rank < world; rank++)
        most = sizes[rank] > most ? sizes[rank] : most;
    return most;
}

/* At least the bytes from any rank to any other one. Equal on all ranks: it depends on global shapes and
 * layouts alone. */
static int64_t longest_stream(const spar_plan *plan)
{
    int64_t bytes = 0;
    for (int t = 0; t < plan->ntensors; t++) {
        const spar_plan_tensor *tensor = &plan->tensors[t];
        int64_t part = tensor->in_dim < 0 ? 0 : tensor->item_size; /* what all hold, nobody sends */
        for (int i = 0; i < tensor->ndim; i++)
            if (i == tensor->out_dim) /* a rank receives no more than it holds afterwards */
                part *= largest(tensor->out_sizes, plan->world);
            else
                part *= i == tensor->in_dim ? largest(tensor->in_sizes, plan->world) : tensor->global[i];
        bytes += part;
    }
    return bytes;
}

/* One of a call's rounds. */
typedef struct {
    int64_t index, count, most; /* most: bytes for a peer */
    spar_round half;            /* it is direct if this has offers */
    void *const *outputs;       /* what the second half copies to */
} turn;

/* Adds the part of a stream that moves in this round. */
static spar_status add_span(const turn *t, spar_span *span, int *count, int64_t bytes)
{
    int64_t chunk = aligned((bytes + t->count - 1) / t->count + ALIGNMENT - 1);
    span->low = t->index * chunk;
    span->high = bytes - span->low < chunk ? bytes : span->low + chunk;
    if (chunk > t->most)
        return spar_fail(SPAR_INTERNAL, "%lld bytes for rank %d in a round; there is room for %lld",
                         (long long)chunk, span->peer, (long long)t->most);
    *count += span->low < span->high;
    return SPAR_OK;
}

/* Writes to the peers' slots, and copies the own part in the first round. */
static spar_status write_to_peers(const spar_push_state *p, const spar_call *call, const turn *t)
{
    const spar_plan *plan = call->plan;
    spar_span spans[SPAR_KERNEL_RANKS];
    int count = 0;
    for (int i = 1; i < p->world; i++) { /* ranks start with different peers */
        int peer = (p->rank + i) % p->world;
        spans[count] = (spar_span){.peer = peer, .route = SPAR_PACK, .wire = area_of(p, p->rank, peer)};
        if (t->half.offers)
            spans[count] = (spar_span){.peer = peer, .route = SPAR_DIRECT};
        SPAR_TRY(add_span(t, &spans[count], &count, plan->push[peer].bytes));
    }
    int64_t own = t->index == 0 ? plan->push[p->rank].bytes : 0;
    spans[count] = (spar_span){.peer = p->rank, .route = SPAR_PUSH, .high = own};
    count += own > 0;
    return spar_cuda_copy_round(plan, spans, count, call->inputs, call->outputs, &call->scale, &t->half,
                                call->stream);
}

/* Waits for the peers, and copies what they wrote to the slot. */
static spar_status empty_slot(const spar_push_state *p, const spar_call *call, const turn *t)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    spar_round half = {.sync = p->sync, .second = 1, .limit_ns = t->half.limit_ns};
    spar_span spans[SPAR_KERNEL_RANKS];
    int count = 0;
    for (int i = 1; i < p->world; i++) {
        int peer = (p->rank - i + p->world) % p->world;
        spans[count] = (spar_span){.peer = peer, .route = SPAR_UNPACK, .wire = area_of(p, peer, p->rank)};
        if (t->half.offers)
            spans[count] = (spar_span){.peer = peer, .route = SPAR_IMAGE, .wire = p->bases[p->rank]};
        SPAR_TRY(add_span(t, &spans[count], &count, call->plan->pull[peer].bytes));
    }
    return spar_cuda_copy_round(call->plan, spans, count, call->inputs, t->outputs, &unscaled, &half,
                                call->stream);
}

/* ---- direct rounds ---- */

int spar_push_is_direct(const spar_push_state *p, const spar_plan *plan)
{
    int64_t most = 0;
    for (int rank = 0; rank < p->world; rank++) {
        int64_t bytes = spar_image_at(plan, rank, plan->ntensors);
        most = bytes > most ? bytes : most;
    }
    return most >= p->least && most <= p->half;
}

/* Fills offers and images [ntensors]: an output that peers cannot write to has an image, and no other has
 * one. A graph's outputs have images: what lies elsewhere when it is replayed is not the graph's. */
static void make_offers(const spar_push_state *p, const spar_call *call, int captured, uint32_t *offers,
                        void **images)
{
    const spar_plan *plan = call->plan;
    for (int t = 0; t < plan->ntensors; t++) {
        const char *output = call->outputs[t];
        int is_mapped =
            !captured && p->outputs && spar_outputs_have(p->outputs, output, plan->tensors[t].out_bytes);
        int64_t place = is_mapped ? output - p->bases[p->rank] - spar_image_at(plan, p->rank, t) : 1;
        offers[t] = place % 16 ? (uint32_t)SPAR_KERNEL_IMAGE : (uint32_t)(place / 16);
        images[t] = place % 16 ? call->outputs[t] : NULL;
    }
}

/* ---- calls ---- */

spar_status spar_push_run(spar_push_state *p, const spar_call *call, int captured)
{
    int64_t rounds = (longest_stream(call->plan) + p->area - 1) / p->area;
    int64_t left = call->deadline.at_ns - spar_now_ns();
    uint32_t offers[SPAR_KERNEL_TENSORS];
    void *images[SPAR_KERNEL_TENSORS];
    turn t = {
        .count = rounds > 0 ? rounds : 1, .most = p->area, .half.sync = p->sync, .outputs = call->outputs};
    if (call->deadline.at_ns)
        t.half.limit_ns = (uint64_t)((left > 0 ? left : 0) + LATER_NS);
    p->captured |= captured;
    if (spar_push_is_direct(p, call->plan)) {
        make_offers(p, call, captured, offers, images);
        t.count = 1;
        t.most = p->half;
        t.half.offers = offers;
        t.outputs = images;
    }
    for (; t.index < t.count; t.index++) {
        SPAR_TRY(write_to_peers(p, call, &t));
        SPAR_TRY(empty_slot(p, call, &t));
    }
    return SPAR_OK;
}

/* ---- set-up ---- */

/* Allocates `sync` and `stop`, and writes the first. */
static spar_status upload(spar_push_state *p, const spar_slots *slots)
{
    CUdeviceptr memory;
    void *stop;
    SPAR_TRY_CU(MemHostAlloc, &stop, sizeof *p->stop, SPAR_CU_HOST_PORTABLE | SPAR_CU_HOST_MAPPED);
    p->stop = stop;
    *p->stop = 0;
    SPAR_TRY_CU(MemAlloc, &memory, sizeof(spar_kernel_sync));
    p->sync = (void *)(uintptr_t)memory;
    spar_kernel_sync sync = {.world = (unsigned)p->world,
                             .rank = (unsigned)p->rank,
                             .last = (unsigned)(p->second / 16),
                             .half = (unsigned long long)p->second,
                             .stop = p->stop,
                             .mine = (const unsigned *)(uintptr_t)slots->flags[p->rank],
                             .places = (const unsigned *)(uintptr_t)slots->bases[p->rank]};
    for (int rank = 0; rank < p->world; rank++) {
        sync.theirs[rank] = (unsigned *)(uintptr_t)slots->flags[rank] + p->rank;
        sync.offers[rank] =
            (unsigned *)(uintptr_t)slots->bases[rank] + (ptrdiff_t)p->rank * SPAR_KERNEL_TENSORS;
        sync.slots[rank] = p->bases[rank];
    }
    return spar_driver_write(memory, &sync, sizeof sync);
}

spar_status spar_push_open(int world, int rank, const spar_slots *slots, spar_push_state **push)
{
    int64_t head = aligned(world * (int64_t)(SPAR_KERNEL_TENSORS * sizeof(uint32_t)) + ALIGNMENT - 1);
    int64_t least = (world - 1) * ALIGNMENT, bytes = slots->bytes < MOST_BYTES ? slots->bytes : MOST_BYTES;
    if (slots->none)
        return spar_fail(SPAR_TRANSPORT, "%s", slots->none);
    if (bytes < head + 2 * least)
        return spar_fail(SPAR_TRANSPORT, "SPAR_PUSH_SLOT is %lld; %d ranks need at least %lld",
                         (long long)slots->bytes, world, (long long)(head + 2 * least));
    spar_push_state *p = calloc(1, sizeof *p);
    if (!p)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", world);
    p->world = world;
    p->rank = rank;
    p->half = aligned((bytes - head) / 4);
    p->half = p->half > least ? p->half : least;
    p->area = aligned(p->half / (world - 1));
    p->second = aligned(bytes - head - p->half);
    p->least = p->half / 32 < DIRECT_BYTES ? p->half / 32 : DIRECT_BYTES;
    for (int i = 0; i < world; i++)
        p->bases[i] = (char *)(uintptr_t)slots->bases[i] + head;
    spar_status status = upload(p, slots);
    if (status == SPAR_OK && p->second > p->half)
        status = spar_outputs_open(p->bases[rank] + p->half, p->second - p->half, &p->outputs);
    if (status == SPAR_OK)
        *push = p;
    else
        spar_push_close(p);
    return status;
}

void spar_push_close(spar_push_state *p)
{
    if (!p || p->captured)
        return;
    if (p->sync)
        spar_cu.MemFree((CUdeviceptr)(uintptr_t)p->sync);
    if (p->stop)
        spar_cu.MemFreeHost(p->stop);
    spar_outputs_close(p->outputs);
    free(p);
}
