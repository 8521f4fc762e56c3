/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL: sends and receives of device memory, on any number of hosts. setup.c sets a group up, pipeline.h
 * moves the bytes. */
#include "transports/nccl/state.h"

#include <stddef.h>
#include <stdio.h>

static void probe(spar_peer_info *info)
{
    if (spar_cuda_open() != SPAR_OK || spar_nccl_open() != SPAR_OK)
        snprintf(info->no_nccl, sizeof info->no_nccl, "%s", spar_last_error());
}

static int serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    if (!spar_gpu_serves(info, world, first_rank, offsetof(spar_peer_info, no_nccl), reason, size))
        return 0;
    if (world == 1)
        snprintf(reason, size, "this process has CUDA and NCCL");
    else
        snprintf(reason, size, "all %d ranks have CUDA and NCCL", world);
    return 1;
}

/* ---- a call ---- */

static spar_status check(const spar_gpu_state *gpu, const spar_call *call, int *captured)
{
    const spar_nccl_state *s = (const spar_nccl_state *)gpu;
    *captured = s->pipeline.capture != 0;
    if (!s->own && !call->native)
        return spar_fail(SPAR_TRANSPORT, "torch's communicator is gone: was the group destroyed?");
    return s->pipeline.prepared == call ? SPAR_OK : spar_fail(SPAR_INTERNAL, "a call that was not prepared");
}

static spar_status run(spar_gpu_state *gpu, const spar_call *call, int captured, uint32_t *mark)
{
    (void)mark; /* NCCL's kernels do not write it */
    spar_nccl_state *s = (spar_nccl_state *)gpu;
    struct ncclComm *comm = s->own ? s->own : call->native;
    (void)captured; /* the pipeline knows */
    if (!s->own)    /* the watchdog does not check torch's communicator */
        SPAR_TRY(spar_nccl_check_async(comm, "an earlier call of NCCL"));
    SPAR_TRY(spar_watchdog_order(gpu->watchdog, call->stream));
    return spar_pipeline_run(&s->pipeline, call, comm, gpu->watchdog);
}

static void close_pipeline(spar_gpu_state *gpu)
{
    spar_nccl_state *s = (spar_nccl_state *)gpu;
    if (s->pipeline.memory)
        spar_pipeline_close(&s->pipeline);
    pthread_cond_destroy(&s->connected);
}

static const spar_gpu_mover mover = {check, run, close_pipeline, .marks = 0};

static spar_status prepare(spar_comm *comm, const spar_call *call, int64_t *bytes)
{
    spar_nccl_state *s = comm->state;
    spar_entered before;
    *bytes = 0;
    if (!s->gpu.watchdog || spar_watchdog_broken(s->gpu.watchdog) || !call->plan->pull)
        return SPAR_OK; /* run reports it */
    SPAR_TRY(spar_cuda_enter(s->gpu.ordinal, &before));
    pthread_mutex_lock(&s->gpu.lock);
    spar_status status = spar_pipeline_prepare(&s->pipeline, call, bytes);
    pthread_mutex_unlock(&s->gpu.lock);
    spar_cuda_leave(&before);
    return status;
}

static spar_status setup(spar_comm *comm, spar_setup_result *result)
{
    return spar_nccl_setup(comm, &mover, result);
}

const spar_transport spar_transport_nccl = {
    .name = "nccl",
    .device = "cuda",
    .probe = probe,
    .serves = serves,
    .setup = setup,
    .connect = spar_nccl_connect,
    .prepare = prepare,
    .run = spar_gpu_run,
    .wait = spar_gpu_wait,
    .broken = spar_gpu_broken,
    .close = spar_gpu_close,
};
