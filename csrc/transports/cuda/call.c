/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/cuda/state.h"

#include "devices/cuda/cuda.h"
#include "base/util.h"

#include <stdio.h>

int spar_gpu_serves(const spar_peer_info *info, int world, int first_rank, size_t why_not, char *reason,
                    size_t size)
{
    for (int rank = 0; rank < world; rank++) {
        const char *why = (const char *)&info[rank] + why_not;
        if (*why) {
            snprintf(reason, size, "rank %d: %.95s", first_rank + rank, why);
            return 0;
        }
    }
    return 1;
}

/* ---- a call ---- */

static spar_status check_call(const spar_gpu_state *s, const spar_call *call, int *captured)
{
    if (call->failed != SPAR_OK)
        return spar_fail(call->failed, "%s", call->why);
    if (!call->plan->pull)
        return spar_fail(SPAR_INTERNAL, "a plan without its pull side");
    return s->mover->check(s, call, captured);
}

/* Publishes call n, or that this rank cannot make it, to the ranks of this host. */
static spar_status publish(const spar_gpu_state *s, uint64_t n, const spar_call *call)
{
    const spar_call_header own = {
        .signature = call->failed == SPAR_OK ? spar_plan_signature(call->plan, call->text) : 0,
        .forward = call->forward,
        .status = call->failed,
    };
    return s->ring ? spar_ring_begin(s->ring, n, &own, spar_call_describe, call, s->compare) : SPAR_OK;
}

/* Reports to the peers that this rank cannot make call n. */
static spar_status fail_alone(spar_gpu_state *s, uint64_t n, const spar_call *call, spar_status status)
{
    spar_failure failure;
    spar_call failed = *call;
    spar_failure_keep(&failure, status);
    failed.failed = status;
    failed.why = failure.text;
    if (status == SPAR_INTERRUPTED)
        spar_watchdog_break(s->watchdog, SPAR_BROKEN);
    else if (publish(s, n, &failed) != SPAR_OK)
        spar_watchdog_break(s->watchdog, SPAR_MISMATCH);
    return spar_failure_raise(&failure);
}

/* Makes call n, which the watchdog has begun. */
static spar_status make_call(spar_gpu_state *s, uint64_t n, const spar_call *call, int captured)
{
    uint32_t *mark = s->mover->marks ? spar_watchdog_mark(s->watchdog) : NULL;
    SPAR_TRY(publish(s, n, call));
    spar_status status = s->mover->run(s, call, captured, mark);
    spar_status reason = status == SPAR_OK ? SPAR_OK : spar_watchdog_check(s->watchdog);
    return reason == SPAR_OK ? status : reason; /* NCCL fails if the watchdog broke during the call */
}

static spar_status enqueue(spar_gpu_state *s, const spar_call *call)
{
    uint64_t n = ++s->calls;
    SPAR_TRY(spar_watchdog_check(s->watchdog)); /* why it broke, rather than what followed from it */
    int captured;
    spar_status status = check_call(s, call, &captured);
    if (status != SPAR_OK)
        return fail_alone(s, n, call, status);
    SPAR_TRY(spar_watchdog_begin(s->watchdog, n, &call->deadline, captured));
    status = make_call(s, n, call, captured);
    if (status != SPAR_OK) /* the peers wait for bytes that this rank will not send */
        spar_watchdog_break(s->watchdog, status);
    int is_marked = status == SPAR_OK && s->mover->marks;
    spar_status ended = spar_watchdog_end(s->watchdog, call->stream, is_marked);
    return status != SPAR_OK ? status : ended;
}

spar_status spar_gpu_run(spar_comm *comm, spar_call *call)
{
    spar_gpu_state *s = comm->state;
    spar_entered before;
    if (!s->watchdog)
        return spar_fail(SPAR_TRANSPORT, "the group was not set up");
    SPAR_TRY(spar_cuda_enter(s->ordinal, &before));
    pthread_mutex_lock(&s->lock);
    uint32_t begun = spar_last_call_begin(call->group, call->op, (uint32_t)s->calls + 1);
    spar_status status = enqueue(s, call);
    spar_last_call_end(begun, status != SPAR_OK);
    pthread_mutex_unlock(&s->lock);
    spar_cuda_leave(&before);
    return status;
}

spar_status spar_gpu_wait(spar_comm *comm, const spar_deadline *deadline)
{
    spar_gpu_state *s = comm->state;
    spar_entered before;
    if (!s->watchdog)
        return spar_fail(SPAR_TRANSPORT, "the group was not set up");
    SPAR_TRY(spar_cuda_enter(s->ordinal, &before));
    spar_status status = spar_watchdog_wait(s->watchdog, deadline);
    spar_cuda_leave(&before);
    return status;
}

const char *spar_gpu_broken(const spar_comm *comm)
{
    const spar_gpu_state *s = comm->state;
    return s->watchdog ? spar_watchdog_broken(s->watchdog) : NULL;
}

void spar_gpu_close(spar_comm *comm)
{
    spar_gpu_state *s = comm->state;
    comm->state = NULL;
    if (!s)
        return;
    if (s->ring)
        spar_group_end_calls(s->group); /* to end a communicator may take a second, in which peers may call */
    if (s->watchdog)
        spar_watchdog_close(s->watchdog);                 /* it releases once the calls have ended */
    else if (spar_thread_start(spar_gpu_release, s) != 0) /* it waits for the device and others' calls */
        spar_gpu_release(s);
}
