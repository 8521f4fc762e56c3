/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cuda/launches.h"

#include <string.h>

enum {
    LARGEST = 1 << 30, /* bytes of a part's block: what kernels divide is below 2^31 */
    RECENT = 4,        /* parts whose loops a new part may share */
};

/* A block, or a piece of one, between two addresses. */
typedef struct {
    uintptr_t from, to;
    int64_t run;
    int ndim;
    unsigned char slot; /* see spar_kernel_part */
    const spar_dim *dims;
} piece;

void spar_launches_begin(spar_launches *l, spar_status (*launch)(void *, spar_kernel_copy *, uint64_t),
                         void *context)
{
    l->launch = launch;
    l->context = context;
    l->copy.parts = l->loops = 0;
    l->bits = 0;
}

spar_status spar_launches_end(spar_launches *l)
{
    spar_status status = l->copy.parts ? l->launch(l->context, &l->copy, l->bits) : SPAR_OK;
    l->copy.parts = l->loops = 0;
    l->bits = 0;
    return status;
}

void spar_launches_tile(spar_kernel_copy *copy, int64_t bytes)
{
    copy->tiles = 0;
    for (int i = 0; i < copy->parts; i++) {
        spar_kernel_part *part = &copy->part[i];
        part->tile = copy->tiles;
        copy->tiles += (unsigned)((part->high - part->low + bytes - 1) / bytes);
    }
}

/* See spar_divisor. */
static spar_divisor divisor(int64_t number)
{
    unsigned shift = 0;
    while ((int64_t)1 << shift < number)
        shift++;
    uint64_t magic = ((uint64_t)1 << 32) * (((uint64_t)1 << shift) - (uint64_t)number);
    return (spar_divisor){(unsigned)number, (unsigned)(magic / (uint64_t)number + 1), shift};
}

/* Finds the same loops among those of the latest parts, or appends them. */
static int place_loops(spar_launches *l, const spar_kernel_loop *loops, int count)
{
    const spar_kernel_copy *c = &l->copy;
    for (int i = c->parts - 1; i >= 0 && i >= c->parts - RECENT; i--)
        if (c->part[i].loops == count &&
            memcmp(&c->loop[c->part[i].loop], loops, (size_t)count * sizeof *loops) == 0)
            return c->part[i].loop;
    if (l->loops + count > SPAR_KERNEL_LOOPS)
        return -1;
    memcpy(&l->copy.loop[l->loops], loops, (size_t)count * sizeof *loops);
    l->loops += count;
    return l->loops - count;
}

/* Adds bytes low to high of a piece. */
static spar_status add_part(spar_launches *l, const piece *p, int64_t low, int64_t high)
{
    spar_kernel_loop loops[SPAR_KERNEL_LOOPS];
    int count = p->ndim + 1, place;
    uint64_t bits = (uint64_t)p->from | (uint64_t)p->to | (uint64_t)low | (uint64_t)high;
    for (int i = 0; i < count; i++) {
        int64_t extent = i < p->ndim ? p->dims[i].extent : p->run;
        loops[i] = i < p->ndim ? (spar_kernel_loop){.src = p->dims[i].src, .dst = p->dims[i].dst}
                               : (spar_kernel_loop){.src = 1, .dst = 1};
        if (i > 0) /* kernels do not need the outermost extent */
            loops[i].extent = divisor(extent);
        if (i < p->ndim)
            bits |= (uint64_t)loops[i].src | (uint64_t)loops[i].dst;
        else if (i > 0)
            bits |= (uint64_t)extent;
    }
    if (l->copy.parts == SPAR_KERNEL_PARTS)
        SPAR_TRY(spar_launches_end(l));
    if ((place = place_loops(l, loops, count)) < 0) {
        SPAR_TRY(spar_launches_end(l));
        place = place_loops(l, loops, count);
    }
    l->bits |= bits;
    l->copy.part[l->copy.parts++] = (spar_kernel_part){.from = (const char *)p->from,
                                                       .to = (char *)p->to,
                                                       .low = (unsigned)low,
                                                       .high = (unsigned)high,
                                                       .loop = (short)place,
                                                       .loops = (unsigned char)count,
                                                       .slot = p->slot};
    return SPAR_OK;
}

/* Adds bytes low to high of a piece, some of whose bytes may be outside of it. Splits it along the outermost
 * loop, or the run, until it is small enough. */
static spar_status add_piece(spar_launches *l, piece p, int64_t low, int64_t high)
{
    int64_t bytes = spar_block_bytes(p.run, p.ndim, p.dims);
    spar_dim loops[SPAR_MAX_DIMS];
    low = low > 0 ? low : 0;
    high = high < bytes ? high : bytes;
    if (low >= high)
        return SPAR_OK;
    if (bytes <= LARGEST && p.ndim < SPAR_KERNEL_LOOPS)
        return add_part(l, &p, low, high);
    if (p.ndim == 0) {
        for (int64_t at = low / LARGEST * LARGEST; at < high; at += LARGEST) {
            piece cut = p;
            cut.from += (uintptr_t)at;
            cut.to += (uintptr_t)at;
            cut.run = bytes - at < LARGEST ? bytes - at : LARGEST;
            SPAR_TRY(add_piece(l, cut, low - at, high - at));
        }
        return SPAR_OK;
    }
    int64_t extent = p.dims->extent, iteration = bytes / extent, iterations = LARGEST / iteration;
    memcpy(loops, p.dims, (size_t)p.ndim * sizeof *loops);
    if (iterations <= 1 || p.ndim >= SPAR_KERNEL_LOOPS) { /* one at a time, without that loop */
        p.ndim--;
        iterations = 1;
    }
    p.dims = loops + (iterations == 1);
    for (int64_t i = low / iteration / iterations * iterations; i * iteration < high; i += iterations) {
        piece cut = p;
        cut.from += (uintptr_t)(i * loops->src);
        cut.to += (uintptr_t)(i * loops->dst);
        if (iterations > 1)
            loops->extent = extent - i < iterations ? extent - i : iterations;
        SPAR_TRY(add_piece(l, cut, low - i * iteration, high - i * iteration));
    }
    return SPAR_OK;
}

int64_t spar_image_at(const spar_plan *plan, int tensor)
{
    int64_t at = 0;
    for (int t = 0; t < tensor; t++) {
        int64_t most = 0;
        for (int rank = 0; rank < plan->world; rank++)
            most = plan->tensors[t].rank_bytes[rank] > most ? plan->tensors[t].rank_bytes[rank] : most;
        at += (most + 255) / 256 * 256;
    }
    return at;
}

/* Adds bytes low to high of a block; the span's side of the wire is packed. */
static spar_status add_block(spar_launches *l, const spar_plan *plan, const spar_block *block,
                             const spar_span *span, const void *const *inputs, void *const *outputs,
                             int64_t start, int64_t low, int64_t high)
{
    static const unsigned char slots[] = {0, SPAR_KERNEL_PEER_SLOT, SPAR_KERNEL_OWN_SLOT,
                                          SPAR_KERNEL_PEER_OUTPUT, 0};
    spar_dim dims[SPAR_MAX_DIMS];
    piece p = {.run = block->run, .ndim = block->ndim, .dims = plan->dims + block->dims};
    uintptr_t wire = (uintptr_t)span->wire + (uintptr_t)(start - span->low), dst = (uintptr_t)block->dst;
    int from_wire = span->route == SPAR_UNPACK || span->route == SPAR_IMAGE;
    if (span->route == SPAR_IMAGE && !outputs[block->tensor])
        return SPAR_OK;
    p.slot = slots[span->route];
    p.from = from_wire ? wire : (uintptr_t)inputs[block->tensor] + (uintptr_t)block->src;
    if (span->route == SPAR_PACK)
        p.to = wire;
    else if (span->route == SPAR_DIRECT)
        p.to = (uintptr_t)SPAR_KERNEL_TO(span->peer, block->tensor) + dst;
    else
        p.to = (uintptr_t)outputs[block->tensor] + dst;
    if (from_wire || span->route == SPAR_PACK) {
        spar_packed_dims(plan, block, from_wire, dims);
        p.dims = dims;
    }
    if (span->route == SPAR_IMAGE) { /* it has the output's layout */
        p.from = (uintptr_t)span->wire + (uintptr_t)spar_image_at(plan, block->tensor) + dst;
        for (int i = 0; i < p.ndim; i++)
            dims[i].src = dims[i].dst;
    }
    return add_piece(l, p, low - start, high - start);
}

spar_status spar_launches_add(spar_launches *l, const spar_plan *plan, const spar_span *spans, int count,
                              const void *const *inputs, void *const *outputs)
{
    const spar_range *walked = NULL;
    int64_t block = 0, start = 0; /* a block of `walked`, and its offset in packed order */
    for (int i = 0; i < count; i++) {
        const spar_span *span = &spans[i];
        const spar_range *range = span->peer < 0 || span->peer >= plan->world ? NULL
                                  : span->route != SPAR_UNPACK && span->route != SPAR_IMAGE
                                      ? &plan->push[span->peer]
                                  : plan->pull ? &plan->pull[span->peer]
                                               : NULL;
        if (!range || span->low < 0 || span->low > span->high || span->high > range->bytes)
            return spar_fail(SPAR_INVALID, "a copy of bytes %lld to %lld of rank %d of %d",
                             (long long)span->low, (long long)span->high, span->peer, plan->world);
        if (range != walked || span->low < start)
            block = start = 0;
        walked = range;
        for (; block < range->count; block++) {
            const spar_block *b = &plan->blocks[range->first + block];
            int64_t end = start + spar_block_bytes(b->run, b->ndim, plan->dims + b->dims);
            if (start >= span->high)
                break;
            if (end > span->low)
                SPAR_TRY(add_block(l, plan, b, span, inputs, outputs, start, span->low, span->high));
            if (end > span->high) /* the next span may continue here */
                break;
            start = end;
        }
    }
    return SPAR_OK;
}
