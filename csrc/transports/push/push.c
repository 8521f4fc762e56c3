/* SPDX-License-Identifier: Apache-2.0 */
/* Push: ranks of one host write to each other's GPUs. memory.c maps the slots, rounds.c moves the bytes,
 * check.c makes the first exchanges, recall.c keeps those that failed. */
#include "transports/push/push.h"

#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"
#include "transports/cuda/state.h"
#include "transports/push/memory.h"
#include "transports/push/recall.h"
#include "transports/rendezvous.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    spar_gpu_state gpu;
    spar_push_terms terms;
    spar_push_memory *memory;
    spar_push_state *push; /* NULL: not connected */
} state;

/* ---- a call ---- */

static spar_outputs *outputs_for(const spar_comm *comm, const spar_call *call)
{
    const state *s = comm->state;
    uint64_t capture = 0;
    spar_entered before;
    if (!s->push || !spar_push_is_direct(s->push, call->plan) ||
        spar_cuda_enter(s->gpu.ordinal, &before) != SPAR_OK)
        return NULL;
    spar_status status = spar_driver_capture(call->stream, &capture);
    spar_cuda_leave(&before);
    int serves = status == SPAR_OK && !capture && spar_outputs_serve(s->push->outputs);
    return serves ? s->push->outputs : NULL; /* run reports a failure */
}

static spar_status check(const spar_gpu_state *gpu, const spar_call *call, int *captured)
{
    uint64_t capture = 0;
    (void)gpu;
    SPAR_TRY(spar_driver_capture(call->stream, &capture));
    *captured = capture != 0;
    return SPAR_OK;
}

/* Lets the slots grow where the call's image has no room, or where outputs of calls before had none. */
static spar_status make_room(state *s, const spar_call *call)
{
    spar_push_state *p = s->push;
    int64_t lacks = 0, bytes = spar_push_missing(p, call->plan);
    if (!bytes && spar_push_is_due(p, call->plan)) {
        int lacked = spar_outputs_lacked(p->outputs);
        SPAR_TRY(spar_push_memory_most(s->memory, s->gpu.watchdog, lacked, &lacks, &call->deadline));
        bytes = spar_push_more(p, lacks != 0);
    }
    if (!bytes)
        return SPAR_OK;
    SPAR_TRY(spar_push_memory_grow(s->memory, s->gpu.watchdog, bytes, &call->deadline));
    return spar_push_extend(p, spar_push_memory_bytes(s->memory), call->plan);
}

static spar_status run(spar_gpu_state *gpu, const spar_call *call, int captured, uint32_t *mark)
{
    state *s = (state *)gpu;
    SPAR_TRY(spar_watchdog_order(gpu->watchdog, call->stream));
    if (!captured)
        SPAR_TRY(make_room(s, call));
    return spar_push_run(s->push, call, captured, mark, (uint32_t)gpu->calls);
}

static void close_slots(spar_gpu_state *gpu)
{
    state *s = (state *)gpu;
    int is_kept = s->push && s->push->captured, is_open = s->push != NULL;
    if (is_open && s->push->unended) { /* not for the device, which another stream may be capturing */
        spar_cu.StreamSynchronize(s->push->unended);
        spar_cu.StreamDestroy(s->push->unended);
    }
    if (s->memory && !is_kept)
        spar_push_memory_leave(s->memory);
    spar_push_close(s->push); /* frees this rank's slot, now or when its last output is gone */
    if (s->memory && !is_open)
        spar_push_memory_free(s->memory);
}

/* ---- set-up ---- */

static const spar_gpu_mover mover = {check, run, close_slots, .marks = 1};

_Static_assert(sizeof(spar_push_terms) <= sizeof(((spar_setup_result *)0)->token), "a token has the terms");

static spar_status setup(spar_comm *comm, spar_setup_result *result)
{
    spar_entered before;
    SPAR_TRY(spar_push_recall(comm->info, comm->world, comm->native.ordinal));
    SPAR_TRY(spar_cuda_open());
    SPAR_TRY(spar_gpu_setup(comm, &mover, sizeof(state), result));
    state *s = comm->state;
    SPAR_TRY(spar_cuda_enter(s->gpu.ordinal, &before));
    spar_status status = spar_push_terms_read(s->gpu.ordinal, &s->terms);
    spar_cuda_leave(&before);
    memcpy(result->token, &s->terms, sizeof s->terms);
    return status;
}

static spar_status open_memory(spar_comm *comm, const spar_setup_result *results,
                               const spar_deadline *deadline)
{
    state *s = comm->state;
    spar_push_terms terms[SPAR_KERNEL_RANKS];
    if (!s->gpu.ring)
        return spar_fail(SPAR_TRANSPORT, "the ranks' processes did not connect");
    for (int rank = 0; rank < comm->world; rank++)
        memcpy(&terms[rank], results[rank].token, sizeof terms[rank]);
    return spar_push_memory_open(terms, comm->world, comm->rank, s->gpu.ordinal, s->gpu.group, s->gpu.ring,
                                 deadline, &s->memory);
}

static spar_status open_slots(spar_comm *comm, const spar_setup_result *results,
                              const spar_deadline *deadline, spar_watchdog_target *what)
{
    state *s = comm->state;
    SPAR_TRY(open_memory(comm, results, deadline));
    SPAR_TRY(spar_push_open(comm->world, comm->rank, s->gpu.ordinal, spar_push_memory_slots(s->memory),
                            spar_push_memory_bytes(s->memory), spar_push_memory_limit(s->memory),
                            spar_push_memory_free, s->memory, &s->push));
    what->stop = s->push->stop;
    spar_status status =
        spar_push_check(s->push, (uint32_t)comm->info[0].endpoint.nonce, deadline, s->gpu.ring);
    if (status != SPAR_OK && s->push->unreached)
        spar_push_remember(comm->info, comm->world, comm->native.ordinal, spar_last_error());
    return status;
}

static spar_status connect_slots(spar_comm *comm, const spar_setup_result *results,
                                 const spar_deadline *deadline)
{
    return spar_gpu_connect(comm, results, deadline, open_slots);
}

/* ---- the transport ---- */

static void probe(spar_peer_info *info)
{
    if (spar_cuda_open() != SPAR_OK)
        snprintf(info->no_push, sizeof info->no_push, "%s", spar_last_error());
}

static int serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    if (!spar_gpu_serves(info, world, first_rank, offsetof(spar_peer_info, no_push), reason, size))
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

static int64_t room_of(const spar_comm *comm)
{
    const state *s = comm->state;
    return s && s->push ? s->push->room : 0;
}

static int is_captured(const spar_comm *comm)
{
    const state *s = comm->state;
    return s && s->push && s->push->captured;
}

const spar_transport spar_transport_push = {
    .name = "push",
    .device = "cuda",
    .probe = probe,
    .serves = serves,
    .setup = setup,
    .connect = connect_slots,
    .outputs = outputs_for,
    .run = spar_gpu_run,
    .wait = spar_gpu_wait,
    .broken = spar_gpu_broken,
    .room = room_of,
    .captured = is_captured,
    .close = spar_gpu_close,
};
