/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/nccl/push.h"

#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"
#include "transports/nccl/state.h"
#include "transports/rendezvous.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int64_t ALIGNMENT = 256; /* of areas and of their parts: copies are fast */
static const int64_t LATER_NS =
    1000000000; /* a kernel's limit is behind that of the watchdog, which knows why */

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

/* Adds the part of a stream that moves in this round. */
static spar_status add_span(const spar_push_state *p, spar_span *span, int *count, int64_t bytes,
                            int64_t round, int64_t rounds)
{
    int64_t chunk = ((bytes + rounds - 1) / rounds + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    span->low = round * chunk;
    span->high = bytes - span->low < chunk ? bytes : span->low + chunk;
    if (chunk > p->area)
        return spar_fail(SPAR_INTERNAL, "%lld bytes for rank %d in a round; its area has %lld",
                         (long long)chunk, span->peer, (long long)p->area);
    *count += span->low < span->high;
    return SPAR_OK;
}

/* Packs into the peers' slots, and copies the own part in the first round. */
static spar_status fill_slots(const spar_push_state *p, const spar_call *call, int64_t round, int64_t rounds,
                              const spar_round *half)
{
    const spar_plan *plan = call->plan;
    spar_span spans[SPAR_KERNEL_RANKS];
    int count = 0;
    for (int i = 1; i < p->world; i++) { /* ranks start with different peers */
        int peer = (p->rank + i) % p->world;
        spans[count] = (spar_span){.peer = peer, .route = SPAR_PACK, .wire = area_of(p, p->rank, peer)};
        SPAR_TRY(add_span(p, &spans[count], &count, plan->push[peer].bytes, round, rounds));
    }
    int64_t own = round == 0 ? plan->push[p->rank].bytes : 0;
    spans[count] = (spar_span){.peer = p->rank, .route = SPAR_PUSH, .high = own};
    count += own > 0;
    return spar_cuda_copy_round(plan, spans, count, call->inputs, call->outputs, &call->scale, half,
                                call->stream);
}

static spar_status empty_slot(const spar_push_state *p, const spar_call *call, int64_t round, int64_t rounds,
                              const spar_round *half)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    spar_span spans[SPAR_KERNEL_RANKS];
    int count = 0;
    for (int i = 1; i < p->world; i++) {
        int peer = (p->rank - i + p->world) % p->world;
        spans[count] = (spar_span){.peer = peer, .route = SPAR_UNPACK, .wire = area_of(p, peer, p->rank)};
        SPAR_TRY(add_span(p, &spans[count], &count, call->plan->pull[peer].bytes, round, rounds));
    }
    return spar_cuda_copy_round(call->plan, spans, count, call->inputs, call->outputs, &unscaled, half,
                                call->stream);
}

spar_status spar_push_run(spar_push_state *p, const spar_call *call, int captured)
{
    int64_t rounds = (longest_stream(call->plan) + p->area - 1) / p->area;
    int64_t left = call->deadline.at_ns - spar_now_ns();
    spar_round first = {.sync = p->sync}, second = {.sync = p->sync, .second = 1};
    if (call->deadline.at_ns)
        second.limit_ns = (uint64_t)((left > 0 ? left : 0) + LATER_NS);
    p->captured |= captured;
    rounds = rounds > 0 ? rounds : 1;
    for (int64_t round = 0; round < rounds; round++) {
        SPAR_TRY(fill_slots(p, call, round, rounds, &first));
        SPAR_TRY(empty_slot(p, call, round, rounds, &second));
    }
    return SPAR_OK;
}

/* ---- set-up ---- */

/* Allocates `sync` and `stop`, and writes the first. */
static spar_status upload(spar_push_state *p, const spar_slots *slots, int64_t half)
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
                             .half = (unsigned long long)half,
                             .stop = p->stop,
                             .mine = (const unsigned *)(uintptr_t)slots->flags[p->rank]};
    for (int rank = 0; rank < p->world; rank++)
        sync.theirs[rank] = (unsigned *)(uintptr_t)slots->flags[rank] + p->rank;
    SPAR_TRY_CU(MemcpyHtoD, memory, &sync, sizeof sync);
    return SPAR_OK;
}

spar_status spar_push_open(int world, int rank, const spar_slots *slots, spar_push_state **push)
{
    int64_t half = slots->bytes / 2 / ALIGNMENT * ALIGNMENT;
    if (slots->none)
        return spar_fail(SPAR_TRANSPORT, "%s", slots->none);
    if (half < (world - 1) * ALIGNMENT)
        return spar_fail(SPAR_TRANSPORT, "SPAR_PUSH_SLOT is %lld; %d ranks need at least %lld",
                         (long long)slots->bytes, world, (long long)(2 * (world - 1) * ALIGNMENT));
    spar_push_state *p = calloc(1, sizeof *p);
    if (!p)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", world);
    p->world = world;
    p->rank = rank;
    p->area = half / (world - 1) / ALIGNMENT * ALIGNMENT;
    for (int i = 0; i < world; i++)
        p->bases[i] = (char *)(uintptr_t)slots->bases[i];
    spar_status status = upload(p, slots, half);
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
    free(p);
}

static spar_status setup(spar_comm *comm, spar_setup_result *result)
{
    spar_nccl_state *s;
    if (comm->native.no_slot)
        return spar_fail(SPAR_TRANSPORT, "%s", comm->native.no_slot);
    SPAR_TRY(spar_cuda_open());
    return spar_nccl_make_state(comm, result, &s);
}

static spar_status open_slots(spar_comm *comm, const spar_deadline *deadline)
{
    spar_nccl_state *s = comm->state;
    (void)deadline;
    return spar_push_open(comm->world, comm->rank, &comm->slots, &s->push);
}

static spar_status connect_slots(spar_comm *comm, const spar_setup_result *results,
                                 const spar_deadline *deadline)
{
    return spar_nccl_connect_state(comm, results, deadline, open_slots);
}

/* ---- the transport ---- */

static void probe(spar_peer_info *info)
{
    if (spar_cuda_open() != SPAR_OK)
        snprintf(info->no_push, sizeof info->no_push, "%s", spar_last_error());
}

static int serves(const spar_peer_info *info, int world, int first_rank, const char *device, char *reason,
                  size_t size)
{
    if (!spar_cuda_serves(info, world, first_rank, device, offsetof(spar_peer_info, no_push), reason, size))
        return 0;
    if (!spar_rendezvous_possible(info, world, first_rank, reason, size))
        return 0;
    if (world > SPAR_KERNEL_RANKS) {
        snprintf(reason, size, "%d ranks; expected at most %d", world, SPAR_KERNEL_RANKS);
        return 0;
    }
    snprintf(reason, size, "%s on this host can write to each other's GPUs",
             world == 1 ? "ranks" : "all ranks");
    return 1;
}

static int is_captured(const spar_comm *comm)
{
    const spar_nccl_state *s = comm->state;
    return s && s->push && s->push->captured;
}

const spar_transport spar_transport_push = {
    .name = "push",
    .probe = probe,
    .serves = serves,
    .setup = setup,
    .connect = connect_slots,
    .run = spar_nccl_run,
    .wait = spar_nccl_wait,
    .broken = spar_nccl_broken,
    .captured = is_captured,
    .close = spar_nccl_close,
};
