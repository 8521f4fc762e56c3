/* SPDX-License-Identifier: Apache-2.0 */
/* Set-up of the NCCL transport: ranks agree on a communicator, and make a first exchange.
 *
 * All ranks use torch's communicator if every rank has one; else they make one, which allocates buffers
 * again. */
#include "base/env.h"
#include "base/util.h"
#include "transports/nccl/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const int64_t POLL_NS = 50000000;
enum { GRACE = 20 }; /* polls for a thread to leave NCCL before its communicator is freed */

/* A rank's token in the first stage's setup result. */
typedef struct {
    spar_nccl_id id; /* rank 0's, if the ranks may need their own communicator */
    int64_t cap;     /* on a call's staging memory */
    int32_t has_native, has_id;
} token;

_Static_assert(sizeof(token) <= sizeof(((spar_setup_result *)0)->token), "it travels in the setup result");

static spar_status make(spar_nccl_state *s, const spar_comm *comm, token *own)
{
    spar_env_value most;
    SPAR_TRY(spar_env_field("staging_max", &most));
    SPAR_TRY(spar_pipeline_open(&s->pipeline, comm->world, comm->rank, most.count));
    s->pipeline.apart = comm->nfar > 0;
    s->native = comm->native.comm;
    own->has_native = s->native != NULL;
    own->cap = most.count;
    if (comm->rank == 0 && !own->has_native) {
        SPAR_NCCL_TRY(GetUniqueId(&own->id));
        own->has_id = 1;
    }
    return SPAR_OK;
}

spar_status spar_nccl_setup(spar_comm *comm, const spar_gpu_mover *mover, spar_setup_result *result)
{
    token own = {0};
    spar_entered before;
    SPAR_TRY(spar_cuda_open());
    SPAR_TRY(spar_nccl_open());
    SPAR_TRY(spar_gpu_setup(comm, mover, sizeof(spar_nccl_state), result));
    spar_nccl_state *s = comm->state;
    spar_cond_init(&s->connected);
    SPAR_TRY(spar_cuda_enter(s->gpu.ordinal, &before));
    spar_status status = make(s, comm, &own);
    spar_cuda_leave(&before);
    memcpy(result->token, &own, sizeof own);
    return status;
}

static int is_abandoned(void *state)
{
    spar_nccl_state *s = state;
    pthread_mutex_lock(&s->gpu.lock);
    int abandoned = s->abandoned;
    pthread_mutex_unlock(&s->gpu.lock);
    return abandoned;
}

/* Runs the NCCL calls that may block on peers without a limit, and the first exchange, which connects all
 * pairs of ranks; on a thread of its own. */
static spar_status init_communicator(spar_nccl_state *s)
{
    const spar_deadline until = {.interrupted = is_abandoned, .context = s};
    struct ncclComm *comm = s->native;
    int world, rank, own_world = s->pipeline.world, own_rank = s->pipeline.rank;
    if (!comm) {
        spar_nccl_result begun = spar_nccl.CommInitRank(&comm, own_world, s->id, own_rank);
        SPAR_TRY(spar_nccl_check(begun, "ncclCommInitRank"));
        spar_status status = spar_nccl_await(begun, comm, &until, "ncclCommInitRank");
        pthread_mutex_lock(&s->gpu.lock);
        int abandoned = s->abandoned || status != SPAR_OK;
        s->own = abandoned ? NULL : comm;
        pthread_mutex_unlock(&s->gpu.lock);
        if (abandoned) {
            spar_nccl.CommAbort(comm);
            return status;
        }
    }
    SPAR_NCCL_TRY(CommCount(comm, &world));
    SPAR_NCCL_TRY(CommUserRank(comm, &rank));
    if (world != own_world || rank != own_rank)
        return spar_fail(SPAR_TRANSPORT, "torch's communicator is rank %d of %d; expected %d of %d", rank,
                         world, own_rank, own_world);
    return spar_pipeline_connect(&s->pipeline, comm, &until);
}

static void *set_up_thread(void *context)
{
    spar_nccl_state *s = context;
    spar_entered before;
    spar_status status = spar_cuda_enter(s->gpu.ordinal, &before);
    if (status == SPAR_OK) {
        status = init_communicator(s);
        spar_cuda_leave(&before);
    }
    pthread_mutex_lock(&s->gpu.lock);
    s->finished = 1;
    spar_failure_keep(&s->result, status);
    pthread_cond_signal(&s->connected);
    pthread_mutex_unlock(&s->gpu.lock);
    return spar_gpu_release(s);
}

/* Returns another status than SPAR_OK if the wait must end: a signal, a timeout, a failed peer on this
 * host. */
static spar_status poll_setup(const spar_nccl_state *s, const spar_deadline *deadline)
{
    SPAR_TRY(spar_deadline_poll(deadline, "while NCCL was set up"));
    spar_status status = s->gpu.ring ? spar_ring_poll(s->gpu.ring, 1) : SPAR_OK;
    if (status != SPAR_OK) { /* all ranks compare how their set-ups ended, and fall back together */
        return spar_fail_ranks(status == SPAR_TIMEOUT ? status : SPAR_TRANSPORT, spar_last_error_ranks(),
                               "%s", spar_last_error());
    }
    if (spar_deadline_passed(deadline))
        return spar_fail(SPAR_TIMEOUT, "timed out while NCCL was set up: a rank is missing");
    return SPAR_OK;
}

/* After a failure, the thread has time to leave NCCL, since an abort, torch's too, would free what it uses. A
 * thread that waits for a peer is left to a revocation (NCCL 2.28.7), else to the abort. No abort follows a
 * revocation, since it would not wait for what the thread launches: the communicator stays. */
static spar_status connect_communicator(spar_comm *comm, const spar_deadline *deadline)
{
    spar_nccl_state *s = comm->state;
    spar_status status = SPAR_OK;
    __atomic_add_fetch(&s->gpu.refs, 1, __ATOMIC_RELAXED);
    int error = spar_thread_start(set_up_thread, s);
    if (error) {
        spar_gpu_release(s);
        return spar_fail(SPAR_TRANSPORT, "cannot start a thread to set up NCCL: %s", strerror(error));
    }
    pthread_mutex_lock(&s->gpu.lock);
    while (!s->finished && status == SPAR_OK) {
        spar_cond_wait(&s->connected, &s->gpu.lock, POLL_NS);
        pthread_mutex_unlock(&s->gpu.lock);
        status = poll_setup(s, deadline);
        pthread_mutex_lock(&s->gpu.lock);
    }
    s->abandoned = !s->finished;
    if (s->finished)
        status = spar_failure_raise(&s->result);
    for (int i = 0; (s->own || s->native) && !s->finished && i < GRACE; i++)
        spar_cond_wait(&s->connected, &s->gpu.lock, POLL_NS);
    struct ncclComm *stuck = status == SPAR_OK ? NULL : s->own;
    int revokes = !s->finished && spar_nccl.CommRevoke;
    if (stuck)
        s->own = NULL;
    pthread_mutex_unlock(&s->gpu.lock);
    if (stuck && revokes)
        spar_nccl.CommRevoke(stuck, 0);
    else if (stuck)
        spar_nccl.CommAbort(stuck);
    return status;
}

static spar_status agree_on_communicator(const spar_comm *comm, const spar_setup_result *results)
{
    spar_nccl_state *s = comm->state;
    int natives = 0;
    int64_t least = (int64_t)(comm->world - 1) * SPAR_SCHEDULE_LEAST;
    token first, other;
    memcpy(&first, results[0].token, sizeof first);
    for (int rank = 0; rank < comm->world; rank++) {
        memcpy(&other, results[rank].token, sizeof other);
        natives += other.has_native == 1;
        if (other.cap < least)
            return spar_fail_rank(SPAR_TRANSPORT, rank,
                                  "rank %d published a cap of %lld bytes on staging memory; expected %lld",
                                  rank, (long long)other.cap, (long long)least);
        if (other.cap < s->pipeline.cap)
            s->pipeline.cap = other.cap;
    }
    if (natives == comm->world)
        return SPAR_OK;
    s->native = NULL;
    if (!first.has_id)
        return spar_fail(SPAR_TRANSPORT, "only %d of %d ranks have torch's NCCL communicator", natives,
                         comm->world);
    s->id = first.id;
    return SPAR_OK;
}

static spar_status check_communicator(void *comm)
{
    return spar_nccl_check_async(comm, "an earlier call of NCCL");
}

static void abort_communicator(void *comm)
{
    spar_nccl.CommAbort(comm);
}

static void revoke_communicator(void *comm)
{
    spar_nccl.CommRevoke(comm, 0);
}

static spar_status connect(spar_comm *comm, const spar_setup_result *results, const spar_deadline *deadline,
                           spar_watchdog_target *what)
{
    (void)results; /* the id is kept by now */
    const spar_nccl_state *s = comm->state;
    SPAR_TRY(connect_communicator(comm, deadline));
    what->comm = s->own;
    what->check = check_communicator;
    what->abort = abort_communicator;
    what->revoke = spar_nccl.CommRevoke ? revoke_communicator : NULL;
    return SPAR_OK;
}

spar_status spar_nccl_connect(spar_comm *comm, const spar_setup_result *results,
                              const spar_deadline *deadline)
{
    SPAR_TRY(agree_on_communicator(comm, results));
    return spar_gpu_connect(comm, results, deadline, connect);
}
