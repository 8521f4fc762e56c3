#include "transports/nccl/schedule.h"

#include "base/util.h"

#include <stdlib.h>
#include <string.h>

/* A block of at least this many bytes is its own message, without packing if it is contiguous. Smaller blocks
 * share a message, whose overhead is about the time to move this many bytes. */
static const int64_t ALONE = 1 << 16;
static const int64_t ALIGNMENT = 16; /* of what NCCL copies at full speed */

/* A step of a stream has at most chunk / ALONE whole blocks that are messages of their own, parts of two
 * more, and a message between each two of them. */
int64_t spar_schedule_room(int64_t chunk)
{
    return (chunk + ALIGNMENT * (2 * (chunk / ALONE) + 5) + 255) / 256 * 256;
}

static int64_t aligned(int64_t at)
{
    return (at + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

int64_t spar_schedule_steps(const spar_plan *plan, int64_t chunk)
{
    int64_t most = 0;
    for (int rank = 0; rank < plan->world; rank++) {
        if (rank == plan->rank)
            continue;
        most = plan->push[rank].bytes > most ? plan->push[rank].bytes : most;
        most = plan->pull[rank].bytes > most ? plan->pull[rank].bytes : most;
    }
    return most / chunk + (most % chunk != 0);
}

spar_status spar_schedule_begin(spar_schedule *side, const spar_plan *plan, int pulls, int all, int64_t chunk,
                                const void *const *tensors)
{
    side->plan = plan;
    side->pulls = pulls;
    side->all = all;
    side->chunk = chunk;
    side->tensors = tensors;
    SPAR_TRY(spar_reserve((void **)&side->cursors, &side->cursor_room, plan->world, sizeof *side->cursors,
                          "parts of a step"));
    memset(side->cursors, 0, (size_t)plan->world * sizeof *side->cursors);
    return SPAR_OK;
}

void spar_schedule_free(spar_schedule *side)
{
    free(side->messages);
    free(side->spans);
    free(side->cursors);
    *side = (spar_schedule){0};
}

static spar_status add_message(spar_schedule *side, int peer, int tensor, int64_t at, int64_t bytes)
{
    SPAR_TRY(spar_reserve((void **)&side->messages, &side->message_room, side->nmessages + 1,
                          sizeof *side->messages, "parts of a step"));
    side->messages[side->nmessages++] = (spar_message){peer, tensor, at, bytes};
    return SPAR_OK;
}

/* Adds the span of bytes low to high of a stream, staged from byte `at`. */
static spar_status add_span(spar_schedule *side, int peer, int64_t low, int64_t high, int64_t at)
{
    spar_span *last = side->nspans ? &side->spans[side->nspans - 1] : NULL;
    if (last && last->peer == peer && last->high == low &&
        (char *)last->wire + (low - last->low) == side->staging + at) {
        last->high = high;
        return SPAR_OK;
    }
    SPAR_TRY(spar_reserve((void **)&side->spans, &side->span_room, side->nspans + 1, sizeof *side->spans,
                          "parts of a step"));
    side->spans[side->nspans++] =
        (spar_span){peer, side->pulls ? SPAR_UNPACK : SPAR_PACK, low, high, side->staging + at};
    return SPAR_OK;
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

/* Schedules bytes low to high of one stream in a step, staged from byte `area`. */
static spar_status step_stream(spar_schedule *side, int peer, int64_t low, int64_t high, int64_t area)
{
    const spar_range *range = &(side->pulls ? side->plan->pull : side->plan->push)[peer];
    spar_cursor *cursor = &side->cursors[peer];
    int64_t joined = low; /* start of the blocks that share the next message */
    int64_t place = area; /* of that message in the staging buffer */
    for (int64_t at = low, until; at < high; at = until) {
        const spar_block *block = &side->plan->blocks[range->first + cursor->block];
        int in_one_piece;
        int64_t bytes = measure(side, block, &in_one_piece), end = cursor->start + bytes;
        int alone = bytes >= ALONE || range->count == 1;
        until = end < high ? end : high;
        int64_t begin = (side->pulls ? block->dst : block->src) + at - cursor->start;
        uintptr_t address = (uintptr_t)side->tensors[block->tensor] + (uintptr_t)begin;
        if (alone && at > joined) {
            SPAR_TRY(add_message(side, peer, -1, place, at - joined));
            place = aligned(place + at - joined);
            joined = at;
        }
        if (alone && in_one_piece && address % (uintptr_t)ALIGNMENT == 0 && !side->all) {
            SPAR_TRY(add_message(side, peer, block->tensor, begin, until - at));
        } else {
            SPAR_TRY(add_span(side, peer, at, until, place + at - joined));
            if (alone) {
                SPAR_TRY(add_message(side, peer, -1, place, until - at));
                place = aligned(place + until - at);
            }
        }
        if (alone)
            joined = until;
        if (until == end) {
            cursor->block++;
            cursor->start = end;
        }
    }
    return high > joined ? add_message(side, peer, -1, place, high - joined) : SPAR_OK;
}

/* Whether two peers receive the same bytes, which are then packed once. */
static int is_shared(const spar_schedule *side, int first, int peer)
{
    const spar_range *a = &side->plan->push[first], *b = &side->plan->push[peer];
    return !side->pulls && a->first == b->first && a->count == b->count;
}

spar_status spar_schedule_step(spar_schedule *side, int64_t step, char *staging)
{
    const spar_plan *plan = side->plan;
    int world = plan->world, first = (plan->rank + 1) % world;
    int64_t low = step * side->chunk, messages = 0;
    side->staging = staging;
    side->nmessages = side->nspans = 0;
    for (int i = 1; i < world; i++) { /* ranks start with different peers */
        int peer = side->pulls ? (plan->rank - i + world) % world : (plan->rank + i) % world;
        int64_t bytes = (side->pulls ? plan->pull : plan->push)[peer].bytes;
        int64_t high = bytes - low < side->chunk ? bytes : low + side->chunk;
        if (i > 1 && is_shared(side, first, peer)) {
            for (int64_t k = 0; k < messages; k++) {
                spar_message same = side->messages[k];
                SPAR_TRY(add_message(side, peer, same.tensor, same.at, same.bytes));
            }
            continue;
        }
        if (low < high)
            SPAR_TRY(step_stream(side, peer, low, high, (i - 1) * spar_schedule_room(side->chunk)));
        if (i == 1)
            messages = side->nmessages;
    }
    return SPAR_OK;
}
