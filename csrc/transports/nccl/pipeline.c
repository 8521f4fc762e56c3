#include "transports/nccl/pipeline.h"

#include <sched.h>

static struct {
    int64_t cap, allocated;
} staging; /* of all lanes; atomic */

void spar_staging_stats(int64_t *cap, int64_t *allocated)
{
    *cap = __atomic_load_n(&staging.cap, __ATOMIC_RELAXED);
    *allocated = __atomic_load_n(&staging.allocated, __ATOMIC_RELAXED);
}

static const spar_driver *driver(void)
{
    const spar_driver *open = NULL;
    spar_driver_open(&open); /* it was open before there was a lane */
    return open;
}

static spar_status did(CUresult result)
{
    return spar_driver_check(result, "a stream or an event");
}

static spar_status lay_siding(spar_siding *s)
{
    SPAR_TRY(did(driver()->StreamCreate(&s->stream, SPAR_CU_STREAM_NON_BLOCKING)));
    SPAR_TRY(did(driver()->EventCreate(&s->to_side, SPAR_CU_EVENT_DISABLE_TIMING)));
    return did(driver()->EventCreate(&s->to_caller, SPAR_CU_EVENT_DISABLE_TIMING));
}

spar_status spar_lane_open(spar_lane *lane, int world, int rank, int64_t most)
{
    void *memory;
    int64_t chunk = most / 4 / (world - 1) / 256 * 256; /* bounds at which copies are fast */
    *lane = (spar_lane){.world = world, .rank = rank, .cap = most, .chunk = chunk};
    if (chunk == 0)
        return spar_fail(SPAR_INVALID, "SPAR_STAGING_MAX is %lld; %d ranks need at least %lld",
                         (long long)most, world, 1024LL * (world - 1));
    SPAR_TRY(spar_device_cuda.alloc(4 * (world - 1) * chunk, &memory));
    lane->staging = memory;
    lane->room = 4 * (world - 1) * chunk;
    __atomic_add_fetch(&staging.cap, lane->cap, __ATOMIC_RELAXED);
    __atomic_add_fetch(&staging.allocated, lane->room, __ATOMIC_RELAXED);
    spar_status status = lay_siding(&lane->sidings[0]);
    if (status == SPAR_OK)
        status = lay_siding(&lane->sidings[1]);
    if (status != SPAR_OK)
        spar_lane_close(lane);
    return status;
}

void spar_lane_close(spar_lane *lane)
{
    for (int i = 0; i < 2; i++) {
        spar_siding *s = &lane->sidings[i];
        if (s->stream)
            driver()->StreamDestroy(s->stream);
        if (s->to_side)
            driver()->EventDestroy(s->to_side);
        if (s->to_caller)
            driver()->EventDestroy(s->to_caller);
    }
    spar_device_cuda.free(lane->staging);
    __atomic_sub_fetch(&staging.cap, lane->cap, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&staging.allocated, lane->room, __ATOMIC_RELAXED);
    spar_chunks_free(&lane->push);
    spar_chunks_free(&lane->pull);
}

/* ---- the wire ---- */

/* A communicator of torch's may be one whose calls return before they are in the stream. */
static spar_status settle(struct ncclComm *comm, const spar_patience *patience)
{
    for (;;) {
        spar_nccl_result result = SPAR_NCCL_SUCCESS;
        SPAR_NCCL_TRY(comm, CommGetAsyncError(comm, &result));
        if (result != SPAR_NCCL_IN_PROGRESS)
            return spar_nccl_check(result, comm, "ncclGroupEnd");
        if (patience->deadline_ns && spar_now_ns() >= patience->deadline_ns)
            return spar_fail(SPAR_TIMEOUT, "NCCL did not take the call in time");
        sched_yield();
    }
}

static spar_status send_all(const spar_lane *lane, const spar_call *call, struct ncclComm *comm)
{
    for (int64_t i = 0; i < lane->push.nmessages; i++) {
        const spar_message *m = &lane->push.messages[i];
        const char *base = m->tensor < 0 ? lane->push.staging : call->inputs[m->tensor];
        SPAR_NCCL_TRY(comm, Send(base + m->at, (size_t)m->bytes, SPAR_NCCL_UINT8, m->peer, comm,
                                 call->stream));
    }
    for (int64_t i = 0; i < lane->pull.nmessages; i++) {
        const spar_message *m = &lane->pull.messages[i];
        char *base = m->tensor < 0 ? lane->pull.staging : call->outputs[m->tensor];
        SPAR_NCCL_TRY(comm, Recv(base + m->at, (size_t)m->bytes, SPAR_NCCL_UINT8, m->peer, comm,
                                 call->stream));
    }
    return SPAR_OK;
}

static spar_status end_group(struct ncclComm *comm, const spar_patience *patience,
                             spar_status status)
{
    spar_nccl_result result = spar_nccl.GroupEnd(); /* also after a failure */
    if (status != SPAR_OK)
        return status;
    SPAR_TRY(spar_nccl_check(result, comm, "ncclGroupEnd"));
    return result == SPAR_NCCL_IN_PROGRESS ? settle(comm, patience) : SPAR_OK;
}

static spar_status wire(const spar_lane *lane, const spar_call *call, struct ncclComm *comm)
{
    if (!lane->push.nmessages && !lane->pull.nmessages)
        return SPAR_OK;
    SPAR_NCCL_TRY(comm, GroupStart());
    return end_group(comm, &call->patience, send_all(lane, call, comm));
}

spar_status spar_lane_greet(spar_lane *lane, struct ncclComm *comm)
{
    static const spar_patience endless = {0};
    spar_status status = SPAR_OK;
    CUstream stream = lane->sidings[0].stream;
    SPAR_NCCL_TRY(comm, GroupStart());
    for (int i = 1; status == SPAR_OK && i < lane->world; i++) {
        int to = (lane->rank + i) % lane->world,
            from = (lane->rank - i + lane->world) % lane->world;
        char *at = lane->staging + 2 * i;
        status = spar_nccl_check(spar_nccl.Send(at, 1, SPAR_NCCL_UINT8, to, comm, stream), comm,
                                 "ncclSend");
        if (status == SPAR_OK)
            status = spar_nccl_check(spar_nccl.Recv(at + 1, 1, SPAR_NCCL_UINT8, from, comm, stream),
                                     comm, "ncclRecv");
    }
    return end_group(comm, &endless, status);
}

/* ---- a call ---- */

/* Staging memory of a step: to the peers (0) or from them (1). */
static char *turn_of(const spar_lane *lane, int64_t step, int direction)
{
    return lane->staging + ((step & 1) * 2 + direction) * (lane->world - 1) * lane->chunk;
}

static spar_status pack(spar_lane *lane, const spar_call *call, int64_t step, void *stream)
{
    spar_chunks *side = &lane->push;
    SPAR_TRY(spar_chunks_step(side, step, turn_of(lane, step, 0)));
    return side->nspans
               ? call->device->copy_spans(call->plan, SPAR_PACK, side->spans, (int)side->nspans,
                                          call->inputs, call->outputs, &call->scale, stream)
               : SPAR_OK;
}

static spar_status unpack(const spar_lane *lane, const spar_call *call, void *stream)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    const spar_chunks *side = &lane->pull;
    return side->nspans
               ? call->device->copy_spans(call->plan, SPAR_UNPACK, side->spans, (int)side->nspans,
                                          call->inputs, call->outputs, &unscaled, stream)
               : SPAR_OK;
}

static spar_status copy_own(const spar_call *call, void *stream)
{
    const spar_plan *plan = call->plan;
    const spar_span own = {plan->rank, 0, plan->push[plan->rank].bytes, NULL};
    return own.high ? call->device->copy_spans(plan, SPAR_PUSH, &own, 1, call->inputs,
                                               call->outputs, &call->scale, stream)
                    : SPAR_OK;
}

/* The siding must not touch a failed call's tensors when their stream has gone on: as far as it can be had. */
static void join(const spar_siding *siding, CUstream caller)
{
    if (driver()->EventRecord(siding->to_caller, siding->stream) == SPAR_CU_SUCCESS)
        driver()->StreamWaitEvent(caller, siding->to_caller, 0);
}

static spar_status wait_for(CUstream waiting, CUevent event, CUstream awaited)
{
    SPAR_TRY(did(driver()->EventRecord(event, awaited)));
    return did(driver()->StreamWaitEvent(waiting, event, 0));
}

/* Beside the wire of step i: unpacking of step i - 1, packing of step i + 1. Each event is recorded anew in every
 * step: who waits, waits for what is recorded by then. */
static spar_status run_beside(spar_lane *lane, const spar_call *call, struct ncclComm *comm,
                              const spar_siding *siding, int64_t steps)
{
    CUstream caller = call->stream, side = siding->stream;
    SPAR_TRY(wait_for(side, siding->to_side, caller)); /* the inputs */
    SPAR_TRY(pack(lane, call, 0, side));
    SPAR_TRY(did(driver()->EventRecord(siding->to_caller, side)));
    SPAR_TRY(copy_own(call, side));
    for (int64_t i = 0; i < steps; i++) {
        if (i > 0) { /* the wire of step i - 1: of its turn comes packing i + 1, too */
            SPAR_TRY(did(driver()->StreamWaitEvent(side, siding->to_side, 0)));
            SPAR_TRY(unpack(lane, call, side));
        }
        SPAR_TRY(spar_chunks_step(&lane->pull, i, turn_of(lane, i, 1)));
        /* step i is packed, and step i - 2 unpacked, whose turn of staging memory it takes */
        SPAR_TRY(did(driver()->StreamWaitEvent(caller, siding->to_caller, 0)));
        SPAR_TRY(wire(lane, call, comm));
        SPAR_TRY(did(driver()->EventRecord(siding->to_side, caller)));
        if (i + 1 < steps)
            SPAR_TRY(pack(lane, call, i + 1, side));
        SPAR_TRY(did(driver()->EventRecord(siding->to_caller, side)));
    }
    SPAR_TRY(did(driver()->StreamWaitEvent(side, siding->to_side, 0)));
    SPAR_TRY(unpack(lane, call, side));
    return wait_for(caller, siding->to_caller, side);
}

spar_status spar_lane_run(spar_lane *lane, const spar_call *call, struct ncclComm *comm,
                          int captured)
{
    int64_t steps = spar_chunks_steps(call->plan, lane->chunk);
    int scaled = call->scale.dtype != SPAR_UNSCALED;
    SPAR_TRY(spar_chunks_begin(&lane->push, call->plan, 0, scaled, lane->chunk));
    SPAR_TRY(spar_chunks_begin(&lane->pull, call->plan, 1, 0, lane->chunk));
    if (steps > 1) {
        const spar_siding *siding = &lane->sidings[captured];
        spar_status status = run_beside(lane, call, comm, siding, steps);
        if (status != SPAR_OK)
            join(siding, call->stream);
        return status;
    }
    SPAR_TRY(pack(lane, call, 0, call->stream));
    SPAR_TRY(spar_chunks_step(&lane->pull, 0, turn_of(lane, 0, 1)));
    SPAR_TRY(wire(lane, call, comm));
    SPAR_TRY(copy_own(call, call->stream));
    return unpack(lane, call, call->stream);
}
