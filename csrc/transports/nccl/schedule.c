/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/nccl/schedule.h"

#include "base/util.h"

#include <stdlib.h>
#include <string.h>

/* A block of at least this many bytes is its own message, without packing if it is contiguous. Smaller blocks
 * share a message, whose overhead is about the time to move this many bytes. */
static const int64_t ALONE = 1 << 16;
static const int64_t ALIGNMENT = 16; /* NCCL copies at full speed what is aligned so */

static const int64_t STEP = 32 << 20; /* bytes of a rank's tensors in a step, at least */
enum { STEPS = 4 };

static int64_t aligned(int64_t at)
{
    return (at + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static int64_t rounded(int64_t bytes)
{
    return (bytes + 255) / 256 * 256; /* at these offsets copies are fast */
}

/* The bytes of staging memory for a stream's part of a step, with its messages' padding. It has at most
 * chunk / ALONE whole blocks that are messages of their own, parts of two more, and a message between each
 * two. */
static int64_t room(int64_t chunk)
{
    return rounded(chunk + ALIGNMENT * (2 * (chunk / ALONE) + 5));
}

/* Whether rows are whole: each piece is contiguous in a contiguous tensor. */
static int has_whole_rows(const spar_plan_tensor *tensor)
{
    int dim = tensor->in_dim;
    if (dim < 0 || (tensor->out_dim >= 0 && tensor->out_dim != dim))
        return 0;
    for (int i = 0; i < dim; i++)
        if (tensor->global[i] != 1)
            return 0;
    return 1;
}

static int64_t row_bytes(const spar_plan_tensor *tensor)
{
    int64_t bytes = tensor->item_size;
    for (int i = tensor->in_dim + 1; i < tensor->ndim; i++)
        bytes *= tensor->global[i];
    return bytes;
}

/* Whether ranks whose inputs are contiguous stage nothing. Equal on all ranks: it depends on global shapes
 * and layouts alone. */
static int is_direct(const spar_plan *plan)
{
    for (int t = 0; t < plan->ntensors; t++) {
        const spar_plan_tensor *tensor = &plan->tensors[t];
        if (!has_whole_rows(tensor) || row_bytes(tensor) % ALIGNMENT)
            return 0;
        /* Of one tensor, in rank order before and after, each stream is one block. */
        if (tensor->out_dim >= 0 && (plan->ntensors > 1 || tensor->in_order || tensor->out_order))
            return 0;
    }
    for (int rank = 0; rank < plan->world; rank++) { /* what each rank sends to all others */
        const spar_range *range = rank == plan->rank ? &plan->push[rank] : &plan->pull[rank];
        for (int64_t i = 0; range->count > 1 && i < range->count; i++) {
            const spar_block *block = &plan->blocks[range->first + i];
            if (spar_block_bytes(block->run, block->ndim, plan->dims + block->dims) < ALONE)
                return 0;
        }
    }
    return 1;
}

/* The bytes of the largest input or output of all ranks. */
static int64_t largest(const spar_plan *plan)
{
    int64_t most = 0;
    for (int rank = 0; rank < plan->world; rank++) {
        int64_t in = 0, out = 0;
        for (int t = 0; t < plan->ntensors; t++) {
            const spar_plan_tensor *tensor = &plan->tensors[t];
            int64_t bytes = tensor->item_size;
            for (int i = 0; i < tensor->ndim; i++)
                bytes *= i == tensor->in_dim ? tensor->in_sizes[rank] : tensor->global[i];
            in += bytes;
            out += tensor->rank_bytes[rank];
        }
        most = in > most ? in : most;
        most = out > most ? out : most;
    }
    return most;
}

int64_t spar_schedule_steps(const spar_plan *plan, int scaled, int64_t cap)
{
    if (!scaled && is_direct(plan))
        return 1;
    int64_t bytes = largest(plan), wanted = bytes / STEP < STEPS ? bytes / STEP : STEPS;
    /* a step takes at most 4 buffers, of two directions, and of their streams' padding */
    int64_t buffer = cap / 4 - (int64_t)(plan->world - 1) * 600, least = (bytes + bytes / 1024) / buffer + 1;
    return wanted > least ? wanted : least;
}

int spar_schedule_is_all_gather(const spar_plan *plan)
{
    const spar_plan_tensor *tensor = &plan->tensors[0];
    if (plan->ntensors != 1 || tensor->out_dim >= 0 || tensor->in_order || !has_whole_rows(tensor))
        return 0;
    for (int rank = 1; rank < plan->world; rank++)
        if (tensor->in_sizes[rank] != tensor->in_sizes[0])
            return 0;
    return 1;
}

void spar_schedule_free(spar_schedule *side)
{
    free(side->messages);
    free(side->spans);
    free(side->streams);
    *side = (spar_schedule){0};
}

static spar_status add_message(spar_schedule *side, int peer, char *at, int64_t bytes)
{
    SPAR_TRY(spar_reserve((void **)&side->messages, &side->message_room, side->nmessages + 1,
                          sizeof *side->messages, "parts of a step"));
    side->messages[side->nmessages++] = (spar_message){peer, at, bytes};
    return SPAR_OK;
}

static spar_status add_span(spar_schedule *side, spar_span span)
{
    SPAR_TRY(spar_reserve((void **)&side->spans, &side->span_room, side->nspans + 1, sizeof *side->spans,
                          "parts of a step"));
    side->spans[side->nspans++] = span;
    return SPAR_OK;
}

/* Stages bytes low to high of a stream at this address. */
static spar_status stage(spar_schedule *side, int peer, int64_t low, int64_t high, char *at)
{
    spar_span *last = side->nspans ? &side->spans[side->nspans - 1] : NULL;
    if (last && last->peer == peer && last->high == low && (char *)last->wire + (low - last->low) == at) {
        last->high = high;
        return SPAR_OK;
    }
    return add_span(side, (spar_span){peer, side->pulls ? SPAR_UNPACK : SPAR_PACK, low, high, at});
}

/* The length of a block, and whether it is contiguous in this rank's tensor. */
static int64_t measure(const spar_schedule *side, const spar_block *block, int *in_one_piece)
{
    int64_t bytes = block->run;
    *in_one_piece = 1;
    for (int k = block->ndim - 1; k >= 0; k--) {
        const spar_dim *loop = &side->plan->dims[block->dims + k];
        *in_one_piece &= (side->pulls ? loop->dst : loop->src) == bytes;
        bytes *= loop->extent;
    }
    return bytes;
}

/* The address of byte `at` of a block in this rank's tensor. */
static char *address_of(const spar_schedule *side, const spar_block *block, int64_t at)
{
    return (char *)(uintptr_t)side->tensors[block->tensor] + (side->pulls ? block->dst : block->src) + at;
}

static int is_aligned(const char *address)
{
    return (uintptr_t)address % (uintptr_t)ALIGNMENT == 0;
}

/* Whether a part of the stream may be staged. */
static int is_staged(const spar_schedule *side, const spar_range *range, int64_t steps)
{
    if (side->all)
        return range->bytes > 0;
    for (int64_t i = 0, start = 0; i < range->count; i++) {
        const spar_block *block = &side->plan->blocks[range->first + i];
        int in_one_piece;
        int64_t bytes = measure(side, block, &in_one_piece);
        if ((bytes < ALONE && range->count > 1) || !in_one_piece || !is_aligned(address_of(side, block, 0)) ||
            (steps > 1 && start % ALIGNMENT))
            return 1;
        start += bytes;
    }
    return 0;
}

/* Whether two peers receive the same bytes, which are then packed once. */
static int is_shared(const spar_schedule *side, int first, int peer)
{
    const spar_range *a = &side->plan->push[first], *b = &side->plan->push[peer];
    return !side->pulls && a->first == b->first && a->count == b->count;
}

spar_status spar_schedule_begin(spar_schedule *side, const spar_plan *plan, int pulls, int all, int64_t steps,
                                const void *const *tensors)
{
    int first = (plan->rank + 1) % plan->world;
    side->plan = plan;
    side->pulls = pulls;
    side->all = all;
    side->tensors = tensors;
    side->size = 0;
    SPAR_TRY(spar_reserve((void **)&side->streams, &side->stream_room, plan->world, sizeof *side->streams,
                          "parts of a step"));
    for (int i = 1; i < plan->world; i++) {
        int peer = (plan->rank + i) % plan->world;
        const spar_range *range = &(pulls ? plan->pull : plan->push)[peer];
        spar_stream *stream = &side->streams[peer];
        *stream = (spar_stream){.chunk = rounded((range->bytes + steps - 1) / steps), .area = side->size};
        if (!(i > 1 && is_shared(side, first, peer)) && is_staged(side, range, steps))
            side->size += room(stream->chunk);
    }
    return SPAR_OK;
}

/* Schedules bytes low to high of one stream in a step. */
static spar_status step_stream(spar_schedule *side, int peer, int64_t low, int64_t high)
{
    const spar_range *range = &(side->pulls ? side->plan->pull : side->plan->push)[peer];
    spar_stream *stream = &side->streams[peer];
    int64_t joined = low;                       /* start of the blocks that share the next message */
    char *place = side->staging + stream->area; /* where that message is staged */
    for (int64_t at = low, until; at < high; at = until) {
        const spar_block *block = &side->plan->blocks[range->first + stream->block];
        int in_one_piece;
        int64_t bytes = measure(side, block, &in_one_piece), end = stream->start + bytes;
        int alone = bytes >= ALONE || range->count == 1;
        until = end < high ? end : high;
        char *address = address_of(side, block, at - stream->start);
        if (alone && at > joined) {
            SPAR_TRY(add_message(side, peer, place, at - joined));
            place += aligned(at - joined);
            joined = at;
        }
        if (alone && in_one_piece && is_aligned(address) && !side->all) {
            SPAR_TRY(add_message(side, peer, address, until - at));
        } else {
            SPAR_TRY(stage(side, peer, at, until, place + at - joined));
            if (alone) {
                SPAR_TRY(add_message(side, peer, place, until - at));
                place += aligned(until - at);
            }
        }
        if (alone)
            joined = until;
        if (until == end) {
            stream->block++;
            stream->start = end;
        }
    }
    return high > joined ? add_message(side, peer, place, high - joined) : SPAR_OK;
}

spar_status spar_schedule_step(spar_schedule *side, int64_t step, char *staging)
{
    const spar_plan *plan = side->plan;
    int world = plan->world, first = (plan->rank + 1) % world;
    int64_t messages = 0;
    side->staging = staging;
    side->nmessages = side->nspans = 0;
    for (int i = 1; i < world; i++) { /* ranks start with different peers */
        int peer = side->pulls ? (plan->rank - i + world) % world : (plan->rank + i) % world;
        const spar_stream *stream = &side->streams[peer];
        int64_t bytes = (side->pulls ? plan->pull : plan->push)[peer].bytes, low = step * stream->chunk;
        int64_t high = bytes - low < stream->chunk ? bytes : low + stream->chunk;
        if (i > 1 && is_shared(side, first, peer)) {
            for (int64_t k = 0; k < messages; k++) {
                spar_message same = side->messages[k];
                SPAR_TRY(add_message(side, peer, same.at, same.bytes));
            }
            continue;
        }
        if (low < high)
            SPAR_TRY(step_stream(side, peer, low, high));
        if (i == 1)
            messages = side->nmessages;
    }
    return SPAR_OK;
}

spar_status spar_schedule_add_own(spar_schedule *side)
{
    const spar_plan *plan = side->plan;
    int64_t bytes = plan->push[plan->rank].bytes;
    return bytes ? add_span(side, (spar_span){plan->rank, SPAR_PUSH, 0, bytes, NULL}) : SPAR_OK;
}
