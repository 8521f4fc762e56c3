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
static const int64_t MOST_HALF = 32 << 20;   /* what is packed is small, or longer than the limit allows */
static const int64_t DIRECT_BYTES = 1 << 20; /* an estimate: to copy them takes as long as to offer them */
static const int64_t MOST_ROUNDS = 8;        /* of an image: a wait takes longer than a short copy hides */
static const int64_t CALLS_BETWEEN = 16; /* of the largest image: comparisons of what ranks lack, at first */

_Static_assert((int)SPAR_KERNEL_TENSORS >= (int)SPAR_GROUP_TENSORS, "each has an offer");
_Static_assert((2 + SPAR_KERNEL_TENSORS) * SPAR_KERNEL_RANKS * sizeof(uint32_t) <= SPAR_PUSH_WORDS,
               "the words have room");

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

/* The rounds in which this rank makes a call. */
typedef struct {
    const spar_call *call;
    int64_t count, most;  /* of rounds; of bytes for a peer in each */
    int is_direct;        /* the peers write to the outputs, or to their images */
    void *const *targets; /* what the bytes that come are copied to; NULL: the peers write all there */
} schedule;

/* Adds the part of a stream that moves in a round. */
static spar_status add_span(const schedule *s, int64_t round, spar_span *span, int *count, int64_t bytes)
{
    int64_t chunk = aligned((bytes + s->count - 1) / s->count + ALIGNMENT - 1);
    span->low = round * chunk;
    span->high = bytes - span->low < chunk ? bytes : span->low + chunk;
    if (chunk > s->most)
        return spar_fail(SPAR_INTERNAL, "%lld bytes for rank %d in a round; there is room for %lld",
                         (long long)chunk, span->peer, (long long)s->most);
    *count += span->low < span->high;
    return SPAR_OK;
}

/* What goes to the peers, and the own part in the first round. */
static spar_status list_sent(const spar_push_state *p, const schedule *s, int64_t round, spar_span *spans,
                             int *count)
{
    const spar_plan *plan = s->call->plan;
    for (int i = 1; i < p->world; i++) { /* ranks start with different peers */
        int peer = (p->rank + i) % p->world;
        spans[*count] = (spar_span){.peer = peer, .route = SPAR_PACK, .wire = area_of(p, p->rank, peer)};
        if (s->is_direct)
            spans[*count] = (spar_span){.peer = peer, .route = SPAR_DIRECT};
        SPAR_TRY(add_span(s, round, &spans[*count], count, plan->push[peer].bytes));
    }
    int64_t own = round == 0 ? plan->push[p->rank].bytes : 0;
    spans[*count] = (spar_span){.peer = p->rank, .route = SPAR_PUSH, .high = own};
    *count += own > 0;
    return SPAR_OK;
}

/* What the peers wrote to the slot, and is copied from there. */
static spar_status list_received(const spar_push_state *p, const schedule *s, int64_t round, spar_span *spans,
                                 int *count)
{
    for (int i = 1; i < p->world && s->targets; i++) {
        int peer = (p->rank - i + p->world) % p->world;
        spans[*count] = (spar_span){.peer = peer, .route = SPAR_UNPACK, .wire = area_of(p, peer, p->rank)};
        if (s->is_direct)
            spans[*count] =
                (spar_span){.peer = peer, .route = SPAR_IMAGE, .wire = p->bases[p->rank] + p->image_at};
        SPAR_TRY(add_span(s, round, &spans[*count], count, s->call->plan->pull[peer].bytes));
    }
    return SPAR_OK;
}

/* What a round receives is copied next to what the next one sends, so that the wire is not idle. */
static spar_status run_round(const spar_push_state *p, const schedule *s, int64_t index, spar_round *round)
{
    const spar_call *call = s->call;
    spar_span spans[3 * SPAR_KERNEL_RANKS];
    int sent = 0, beside = 0, behind = 0;
    SPAR_TRY(list_sent(p, s, index, spans, &sent));
    if (index > 0)
        SPAR_TRY(list_received(p, s, index - 1, spans + sent, &beside));
    if (index + 1 == s->count)
        SPAR_TRY(list_received(p, s, index, spans + sent + beside, &behind));
    round->spans = spans;
    round->sent = sent;
    round->beside = beside;
    round->behind = behind;
    return spar_cuda_copy_round(call->plan, call->inputs, call->outputs, s->targets, &call->scale, round,
                                call->stream);
}

/* ---- direct calls ---- */

static int64_t image_of(const spar_plan *plan)
{
    return spar_image_at(plan, plan->ntensors);
}

int spar_push_is_direct(const spar_push_state *p, const spar_plan *plan)
{
    int64_t bytes = image_of(plan);
    return bytes >= p->least && bytes <= p->room;
}

int64_t spar_push_missing(const spar_push_state *p, const spar_plan *plan)
{
    int64_t image = image_of(plan), left = p->limit - p->bytes, room = p->room ? p->room : p->half;
    if (image < p->least || image <= p->room || image > left || p->captured)
        return 0; /* graphs have the image's place */
    while (room < image)
        room *= 2;
    return 2 * room <= left ? 2 * room : left; /* as much for the outputs */
}

int spar_push_is_due(spar_push_state *p, const spar_plan *plan)
{
    if (!spar_push_is_direct(p, plan) || p->bytes == p->limit)
        return 0;
    p->traffic += image_of(plan);
    return p->traffic >= p->next;
}

int64_t spar_push_more(spar_push_state *p, int lacks)
{
    int64_t left = p->limit - p->bytes, more = p->bytes - p->heap;
    p->next = lacks ? p->traffic + CALLS_BETWEEN * p->room : 2 * p->traffic;
    return !lacks ? 0 : more < left ? more : left;
}

spar_status spar_push_extend(spar_push_state *p, int64_t bytes, const spar_plan *plan)
{
    int64_t before = p->bytes, image = image_of(plan);
    if (bytes <= before) {
        p->limit = before;
        return SPAR_OK;
    }
    p->bytes = bytes;
    spar_outputs_extend(p->outputs, bytes - p->heap);
    if (image <= p->room)
        return SPAR_OK;
    int64_t room = aligned((bytes - before) / 2), at = aligned(before + ALIGNMENT - 1);
    room = room >= image ? room : aligned(bytes - at);
    SPAR_TRY(spar_outputs_keep(p->outputs, at - p->heap, room));
    p->image_at = at;
    p->room = room;
    return SPAR_OK;
}

/* Fills offers, last and images [ntensors]; returns how many outputs have an image: those that peers cannot
 * write to, and a graph's, since what lies there when it is replayed is not the graph's. */
static int make_offers(const spar_push_state *p, const spar_call *call, int captured, uint32_t *offers,
                       uint32_t *last, void **images)
{
    const spar_plan *plan = call->plan;
    int count = 0;
    for (int t = 0; t < plan->ntensors; t++) {
        const char *output = call->outputs[t];
        int64_t at = spar_image_at(plan, t), most = spar_image_at(plan, t + 1) - at;
        int64_t place = output - p->bases[p->rank], end = p->bytes - most;
        int is_mapped = !captured && spar_outputs_have(p->outputs, output, plan->tensors[t].out_bytes) &&
                        place % 16 == 0 && place <= end;
        offers[t] = (uint32_t)((is_mapped ? place : p->image_at + at) / 16);
        last[t] = (uint32_t)(end / 16);
        images[t] = is_mapped ? NULL : call->outputs[t];
        count += !is_mapped;
    }
    return count;
}

/* ---- calls ---- */

/* The rounds of a direct call, for ranks that copy from an image: equal on all ranks. */
static int64_t rounds_of_image(const spar_push_state *p, const spar_plan *plan)
{
    int64_t rounds = image_of(plan) / (p->half / 2);
    return rounds < 1 ? 1 : rounds < MOST_ROUNDS ? rounds : MOST_ROUNDS;
}

spar_status spar_push_run(spar_push_state *p, const spar_call *call, int captured, uint32_t *mark,
                          uint32_t number)
{
    int64_t left = call->deadline.at_ns - spar_now_ns();
    uint32_t offers[SPAR_KERNEL_TENSORS], last[SPAR_KERNEL_TENSORS];
    void *images[SPAR_KERNEL_TENSORS];
    spar_round round = {.ordinal = p->ordinal, .sync = p->sync, .number = number, .rounds = 1};
    schedule s = {.call = call, .targets = call->outputs, .is_direct = spar_push_is_direct(p, call->plan)};
    if (call->deadline.at_ns)
        round.limit_ns = (uint64_t)((left > 0 ? left : 0) + LATER_NS);
    p->captured |= captured;
    if (s.is_direct) {
        s.most = p->room;
        s.count = rounds_of_image(p, call->plan);
        s.targets = make_offers(p, call, captured, offers, last, images) ? images : NULL;
        round.offers = offers;
        round.last = last;
    } else {
        int64_t rounds = (longest_stream(call->plan) + p->area - 1) / p->area;
        s.most = p->area;
        s.count = rounds > 0 ? rounds : 1;
    }
    if (!s.targets) { /* all at once: nothing that comes is copied */
        round.rounds = (uint32_t)s.count;
        s.count = 1;
    }
    for (int64_t index = 0; index < s.count; index++) {
        round.mark = index + 1 == s.count ? mark : NULL;
        SPAR_TRY(run_round(p, &s, index, &round));
        round.offers = round.last = NULL;
    }
    return SPAR_OK;
}

/* ---- set-up ---- */

/* The words of a slot: two for each rank's signals, then the offers. */
static unsigned *words_of(const spar_push_state *p, int rank)
{
    return (unsigned *)(uintptr_t)(p->bases[rank] - SPAR_PUSH_WORDS);
}

/* Allocates `sync` and `stop`, and writes the first. */
static spar_status upload(spar_push_state *p)
{
    enum { OFFERS = 2 * SPAR_KERNEL_RANKS };
    CUdeviceptr memory;
    void *stop;
    SPAR_TRY_CU(MemHostAlloc, &stop, sizeof *p->stop, SPAR_CU_HOST_PORTABLE | SPAR_CU_HOST_MAPPED);
    p->stop = stop;
    *p->stop = 0;
    SPAR_TRY_CU(MemAlloc, &memory, sizeof(spar_kernel_sync));
    p->sync = (void *)(uintptr_t)memory;
    spar_kernel_sync sync = {.world = (unsigned)p->world,
                             .rank = (unsigned)p->rank,
                             .half = (unsigned long long)p->half,
                             .stop = p->stop,
                             .mine = words_of(p, p->rank),
                             .places = words_of(p, p->rank) + OFFERS};
    for (int rank = 0; rank < p->world; rank++) {
        sync.theirs[rank] = words_of(p, rank) + p->rank;
        sync.offers[rank] = words_of(p, rank) + OFFERS + (ptrdiff_t)p->rank * SPAR_KERNEL_TENSORS;
        sync.slots[rank] = p->bases[rank];
    }
    return spar_driver_write(memory, &sync, sizeof sync);
}

/* A half takes little of the limit, since most calls are direct, but has an area for each peer. */
static int64_t half_of(int world, int64_t limit)
{
    int64_t half = limit / 16 < MOST_HALF ? limit / 16 : MOST_HALF, least = (world - 1) * ALIGNMENT;
    return aligned(half > least ? half : least);
}

spar_status spar_push_first_bytes(int world, int64_t limit, int64_t *bytes)
{
    *bytes = 4 * half_of(world, limit);
    if (*bytes > limit)
        return spar_fail(SPAR_TRANSPORT, "SPAR_PUSH_SLOT is %lld; %d ranks need at least %lld",
                         (long long)limit, world, (long long)*bytes);
    return SPAR_OK;
}

spar_status spar_push_open(int world, int rank, int ordinal, char *const *slots, int64_t bytes, int64_t limit,
                           void (*release)(void *context), void *context, spar_push_state **push)
{
    spar_push_state *p = calloc(1, sizeof *p);
    if (!p)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", world);
    *p = (spar_push_state){.world = world, .rank = rank, .ordinal = ordinal, .bytes = bytes, .limit = limit};
    p->half = half_of(world, limit);
    p->area = aligned(p->half / (world - 1));
    p->heap = p->image_at = 2 * p->half;
    p->room = aligned((bytes - p->heap) / 2);
    p->least = p->half / 32 < DIRECT_BYTES ? p->half / 32 : DIRECT_BYTES;
    p->next = CALLS_BETWEEN * p->room;
    for (int i = 0; i < world; i++)
        p->bases[i] = slots[i] + SPAR_PUSH_WORDS;
    spar_status status = upload(p);
    if (status == SPAR_OK)
        status = spar_outputs_open(p->bases[rank] + p->heap, release, context, &p->outputs);
    if (status != SPAR_OK) {
        spar_push_close(p);
        return status;
    }
    spar_outputs_extend(p->outputs, bytes - p->heap);
    *push = p;
    return spar_outputs_keep(p->outputs, 0, p->room);
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
