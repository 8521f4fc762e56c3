/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/nccl/pipeline.h"

static const int64_t LARGE = 1 << 20; /* bytes of a rank's own part that are copied beside the wire */

static struct {
    int64_t peak, total;
} staging; /* the staging memory of all calls; atomic */

void spar_staging_stats(int64_t *peak, int64_t *total)
{
    *peak = __atomic_load_n(&staging.peak, __ATOMIC_RELAXED);
    *total = __atomic_load_n(&staging.total, __ATOMIC_RELAXED);
}

static void count_staging(int64_t bytes)
{
    int64_t peak = __atomic_load_n(&staging.peak, __ATOMIC_RELAXED);
    __atomic_add_fetch(&staging.total, bytes, __ATOMIC_RELAXED);
    while (bytes > peak &&
           !__atomic_compare_exchange_n(&staging.peak, &peak, bytes, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

static spar_status check(CUresult result)
{
    return spar_driver_check(result, "a stream or an event");
}

static spar_status open_side_stream(spar_side_stream *s)
{
    SPAR_TRY(check(spar_cu.StreamCreate(&s->stream, SPAR_CU_STREAM_NON_BLOCKING)));
    SPAR_TRY(check(spar_cu.EventCreate(&s->to_side, SPAR_CU_EVENT_DISABLE_TIMING)));
    return check(spar_cu.EventCreate(&s->to_caller, SPAR_CU_EVENT_DISABLE_TIMING));
}

spar_status spar_pipeline_open(spar_pipeline *pipeline, int world, int rank, int64_t cap)
{
    CUdeviceptr memory;
    int64_t least = (int64_t)(world - 1) * SPAR_SCHEDULE_LEAST;
    *pipeline = (spar_pipeline){.world = world, .rank = rank, .cap = cap};
    if (cap < least)
        return spar_fail(SPAR_INVALID, "SPAR_STAGING_MAX is %lld; %d ranks need at least %lld",
                         (long long)cap, world, (long long)least);
    SPAR_TRY_CU(MemAlloc, &memory, (size_t)SPAR_PIPELINE_KEPT + 2 * (size_t)world);
    pipeline->memory = (char *)(uintptr_t)memory;
    SPAR_TRY(open_side_stream(&pipeline->side_streams[0]));
    return open_side_stream(&pipeline->side_streams[1]);
}

void spar_pipeline_close(spar_pipeline *pipeline)
{
    for (int i = 0; i < 2; i++) {
        spar_side_stream *s = &pipeline->side_streams[i];
        if (s->stream) {
            spar_cu.StreamSynchronize(s->stream); /* a call may have failed half way */
            spar_cu.StreamDestroy(s->stream);
        }
        if (s->to_side)
            spar_cu.EventDestroy(s->to_side);
        if (s->to_caller)
            spar_cu.EventDestroy(s->to_caller);
    }
    spar_cu.MemFree((CUdeviceptr)(uintptr_t)pipeline->memory); /* waits for the device */
    spar_schedule_free(&pipeline->push);
    spar_schedule_free(&pipeline->pull);
}

/* ---- the wire ---- */

static spar_status send_all(const spar_pipeline *pipeline, struct ncclComm *comm, CUstream stream)
{
    for (int64_t i = 0; i < pipeline->push.nmessages; i++) {
        const spar_message *m = &pipeline->push.messages[i];
        SPAR_NCCL_TRY(Send(m->at, (size_t)m->bytes, SPAR_NCCL_UINT8, m->peer, comm, stream));
    }
    for (int64_t i = 0; i < pipeline->pull.nmessages; i++) {
        const spar_message *m = &pipeline->pull.messages[i];
        SPAR_NCCL_TRY(Recv(m->at, (size_t)m->bytes, SPAR_NCCL_UINT8, m->peer, comm, stream));
    }
    return SPAR_OK;
}

static spar_status end_group(struct ncclComm *comm, const spar_deadline *deadline, spar_status status)
{
    spar_nccl_result result = spar_nccl.GroupEnd(); /* also after a failure */
    return status == SPAR_OK ? spar_nccl_await(result, comm, deadline, "ncclGroupEnd") : status;
}

static spar_status exchange(const spar_pipeline *pipeline, const spar_call *call, struct ncclComm *comm,
                            spar_watchdog *watchdog)
{
    if (!pipeline->push.nmessages && !pipeline->pull.nmessages)
        return SPAR_OK;
    if (spar_watchdog_broken(watchdog)) /* the communicator may be about to be freed */
        return SPAR_BROKEN;
    SPAR_NCCL_TRY(GroupStart());
    return end_group(comm, &call->deadline, send_all(pipeline, comm, call->stream));
}

static spar_status send_bytes(const spar_pipeline *pipeline, struct ncclComm *comm, CUstream stream)
{
    int world = pipeline->world, rank = pipeline->rank;
    for (int i = 1; i < world; i++) {
        char *at = pipeline->memory + SPAR_PIPELINE_KEPT + 2 * i;
        SPAR_NCCL_TRY(Send(at, 1, SPAR_NCCL_UINT8, (rank + i) % world, comm, stream));
        SPAR_NCCL_TRY(Recv(at + 1, 1, SPAR_NCCL_UINT8, (rank - i + world) % world, comm, stream));
    }
    return SPAR_OK;
}

spar_status spar_pipeline_connect(const spar_pipeline *pipeline, struct ncclComm *comm,
                                  const spar_deadline *deadline)
{
    CUstream stream = pipeline->side_streams[0].stream;
    SPAR_NCCL_TRY(GroupStart());
    SPAR_TRY(end_group(comm, deadline, send_bytes(pipeline, comm, stream)));
    for (int pauses = 0;;) {
        CUresult result = spar_cu.StreamQuery(stream);
        if (result != SPAR_CU_NOT_READY)
            return spar_driver_check(result, "the first exchange over NCCL");
        SPAR_TRY(spar_nccl_check_async(comm, "the first exchange over NCCL"));
        SPAR_TRY(spar_deadline_pause(deadline, &pauses, "during the first exchange over NCCL"));
    }
}

/* ---- a call ---- */

/* Whether NCCL gathers. A host of L of the P ranks then sends P - 1 parts to others, and not L (P - L). */
static int gathers(const spar_pipeline *pipeline, const spar_call *call)
{
    return pipeline->apart && spar_nccl.AllGather && call->scale.dtype == SPAR_UNSCALED &&
           spar_schedule_is_all_gather(call->plan);
}

/* Begins both sides of a call and counts its steps. */
static spar_status begin(spar_pipeline *pipeline, const spar_call *call)
{
    const spar_plan *plan = call->plan;
    int scaled = call->scale.dtype != SPAR_UNSCALED;
    if (gathers(pipeline, call)) {
        pipeline->steps = pipeline->pull.size = 0;
        return spar_schedule_begin(&pipeline->push, plan, 0, 0, 1, call->inputs);
    }
    int64_t steps = pipeline->steps = spar_schedule_steps(plan, scaled, pipeline->cap);
    SPAR_TRY(spar_schedule_begin(&pipeline->push, plan, 0, scaled, steps, call->inputs));
    return spar_schedule_begin(&pipeline->pull, plan, 1, 0, steps, (const void *const *)call->outputs);
}

spar_status spar_pipeline_prepare(spar_pipeline *pipeline, const spar_call *call, int64_t *bytes)
{
    uint64_t other = 0;
    pipeline->prepared = NULL;
    SPAR_TRY(spar_driver_capture(call->stream, &pipeline->capture));
    if (pipeline->capture)
        SPAR_TRY(spar_driver_capture(pipeline->side_streams[1].stream, &other));
    if (other && other != pipeline->capture)
        return spar_fail(SPAR_TRANSPORT,
                         "another capture has calls of this group; end it before this one, or use a group "
                         "of its own");
    SPAR_TRY(begin(pipeline, call));
    *bytes = (1 + (pipeline->steps > 1)) * (pipeline->push.size + pipeline->pull.size);
    if (*bytes <= SPAR_PIPELINE_KEPT && pipeline->steps <= 1 && !pipeline->capture)
        *bytes = 0;
    count_staging(*bytes);
    pipeline->prepared = call;
    return SPAR_OK;
}

/* The staging buffer of a step: to the peers (0) or from them (1). */
static char *buffer_of(const spar_pipeline *pipeline, const spar_call *call, int64_t step, int direction)
{
    int64_t push = pipeline->push.size, pull = pipeline->pull.size;
    char *staging = call->staging ? call->staging : pipeline->memory;
    return staging + (step & 1) * (push + pull) + direction * push;
}

static spar_status copy_spans(const spar_call *call, const spar_schedule *side, const spar_scale *scale,
                              void *stream)
{
    return side->nspans ? spar_cuda_copy_spans(call->plan, side->spans, (int)side->nspans, call->inputs,
                                               call->outputs, scale, stream)
                        : SPAR_OK;
}

static spar_status pack(spar_pipeline *pipeline, const spar_call *call, int64_t step, void *stream)
{
    SPAR_TRY(spar_schedule_step(&pipeline->push, step, buffer_of(pipeline, call, step, 0)));
    return copy_spans(call, &pipeline->push, &call->scale, stream);
}

static spar_status unpack(const spar_pipeline *pipeline, const spar_call *call, void *stream)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    return copy_spans(call, &pipeline->pull, &unscaled, stream);
}

static spar_status copy_own(const spar_call *call, void *stream)
{
    const spar_plan *plan = call->plan;
    const spar_span own = {plan->rank, SPAR_PUSH, 0, plan->push[plan->rank].bytes, NULL};
    return own.high ? spar_cuda_copy_spans(plan, &own, 1, call->inputs, call->outputs, &call->scale, stream)
                    : SPAR_OK;
}

static CUresult wait_for(CUstream waiting, CUevent event, CUstream awaited)
{
    CUresult result = spar_cu.EventRecord(event, awaited);
    return result == SPAR_CU_SUCCESS ? spar_cu.StreamWaitEvent(waiting, event, 0) : result;
}

/* While step i is on the wire, the side stream unpacks step i - 1 and packs step i + 1. Events are recorded
 * again in every step; a wait covers what was recorded before it. */
static spar_status run_pipelined(spar_pipeline *pipeline, const spar_call *call, struct ncclComm *comm,
                                 spar_watchdog *watchdog, const spar_side_stream *side_stream, int64_t steps)
{
    CUstream caller = call->stream, side = side_stream->stream;
    SPAR_TRY(check(wait_for(side, side_stream->to_side, caller))); /* the inputs */
    SPAR_TRY(pack(pipeline, call, 0, side));
    SPAR_TRY(check(spar_cu.EventRecord(side_stream->to_caller, side)));
    SPAR_TRY(copy_own(call, side));
    for (int64_t i = 0; i < steps; i++) {
        if (i > 0) { /* step i - 1 left the wire: step i + 1 reuses its buffer */
            SPAR_TRY(check(spar_cu.StreamWaitEvent(side, side_stream->to_side, 0)));
            SPAR_TRY(unpack(pipeline, call, side));
        }
        SPAR_TRY(spar_schedule_step(&pipeline->pull, i, buffer_of(pipeline, call, i, 1)));
        /* step i is packed, and step i - 2, whose buffer it reuses, is unpacked */
        SPAR_TRY(check(spar_cu.StreamWaitEvent(caller, side_stream->to_caller, 0)));
        SPAR_TRY(exchange(pipeline, call, comm, watchdog));
        SPAR_TRY(check(spar_cu.EventRecord(side_stream->to_side, caller)));
        if (i + 1 < steps)
            SPAR_TRY(pack(pipeline, call, i + 1, side));
        SPAR_TRY(check(spar_cu.EventRecord(side_stream->to_caller, side)));
    }
    SPAR_TRY(check(spar_cu.StreamWaitEvent(side, side_stream->to_side, 0)));
    return unpack(pipeline, call, side);
}

/* The own part is copied with what is packed, or beside the wire if it is large. */
static spar_status run_single(spar_pipeline *pipeline, const spar_call *call, struct ncclComm *comm,
                              spar_watchdog *watchdog, const spar_side_stream *side_stream, int beside)
{
    CUstream caller = call->stream, side = side_stream->stream;
    SPAR_TRY(spar_schedule_step(&pipeline->push, 0, buffer_of(pipeline, call, 0, 0)));
    SPAR_TRY(spar_schedule_step(&pipeline->pull, 0, buffer_of(pipeline, call, 0, 1)));
    if (beside)
        SPAR_TRY(check(wait_for(side, side_stream->to_side, caller))); /* the inputs */
    else
        SPAR_TRY(spar_schedule_add_own(&pipeline->push));
    SPAR_TRY(copy_spans(call, &pipeline->push, &call->scale, caller));
    SPAR_TRY(exchange(pipeline, call, comm, watchdog));
    if (beside)
        SPAR_TRY(copy_own(call, side));
    return unpack(pipeline, call, caller);
}

/* NCCL copies the own part, too. */
static spar_status gather(spar_pipeline *pipeline, const spar_call *call, struct ncclComm *comm,
                          spar_watchdog *watchdog)
{
    SPAR_TRY(pack(pipeline, call, 0, call->stream));
    if (!pipeline->push.nmessages)
        return SPAR_OK;
    if (spar_watchdog_broken(watchdog)) /* the communicator may be about to be freed */
        return SPAR_BROKEN;
    const spar_message *m = pipeline->push.messages;
    spar_nccl_result result =
        spar_nccl.AllGather(m->at, call->outputs[0], (size_t)m->bytes, SPAR_NCCL_UINT8, comm, call->stream);
    return spar_nccl_await(result, comm, &call->deadline, "ncclAllGather");
}

spar_status spar_pipeline_run(spar_pipeline *pipeline, const spar_call *call, struct ncclComm *comm,
                              spar_watchdog *watchdog)
{
    const spar_side_stream *side_stream = &pipeline->side_streams[pipeline->capture != 0];
    int64_t steps = pipeline->steps;
    int beside = steps > 1 || call->plan->push[call->plan->rank].bytes >= LARGE;
    pipeline->prepared = NULL;
    if (steps == 0)
        return gather(pipeline, call, comm, watchdog);
    spar_status status = steps > 1 ? run_pipelined(pipeline, call, comm, watchdog, side_stream, steps)
                                   : run_single(pipeline, call, comm, watchdog, side_stream, beside);
    if (!beside)
        return status;
    /* also after a failure: the side stream may still use the call's tensors */
    CUresult joined = wait_for(call->stream, side_stream->to_caller, side_stream->stream);
    return status == SPAR_OK ? check(joined) : status;
}
