/* SPDX-License-Identifier: Apache-2.0 */
/* A transport between ranks that are threads of one process, for tests (-DSPAR_LOCAL).
 *
 * Its protocol is that of every pushing transport: publish the call; read the peers' calls; compare; push
 * straight into the peers' outputs; publish done; wait until all ranks are done. */
#include "local.h"

#include "base/util.h"
#include "devices/execute.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    const spar_call *call; /* the newest */
    int64_t started, done; /* call numbers */
} member;

struct spar_local_world {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int world, broken;
    member members[];
};

spar_local_world *spar_local_world_new(int world)
{
    spar_local_world *w = calloc(1, sizeof *w + (size_t)world * sizeof w->members[0]);
    if (!w)
        return NULL;
    w->world = world;
    pthread_mutex_init(&w->lock, NULL);
    spar_cond_init(&w->moved);
    return w;
}

void spar_local_world_free(spar_local_world *w)
{
    pthread_cond_destroy(&w->moved);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

static int serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    for (int rank = 0; rank < world; rank++)
        if (!info[rank].local_world || info[rank].local_world != info[0].local_world) {
            snprintf(reason, size, "rank %d is not in rank %d's process", first_rank + rank, first_rank);
            return 0;
        }
    snprintf(reason, size, "all %d ranks are in one process", world);
    return 1;
}

static spar_status setup(spar_comm *comm, spar_setup_result *result)
{
    comm->state = (void *)(uintptr_t)comm->info[comm->rank].local_world;
    result->offset = comm->rank;
    return SPAR_OK;
}

static spar_status connect(spar_comm *comm, const spar_setup_result *results, const spar_deadline *deadline)
{
    (void)deadline;
    for (int rank = 0; rank < comm->world; rank++)
        if (results[rank].offset != rank)
            return spar_fail(SPAR_TRANSPORT, "the setup result of rank %d is another rank's", rank);
    return SPAR_OK;
}

/* Waits, with the lock held, until all ranks have started (or done) call n. */
static spar_status await_all(spar_local_world *w, const spar_call *call, int64_t n, int for_done)
{
    struct timespec until = {call->deadline.at_ns / 1000000000, call->deadline.at_ns % 1000000000};
    if (w->broken) /* a rank that aborted may have freed its outputs */
        return spar_fail(SPAR_TIMEOUT, "another rank aborted");
    for (int rank = 0; rank < w->world; rank++) {
        const member *m = &w->members[rank];
        while ((for_done ? m->done : m->started) < n) {
            int late = 0;
            if (w->broken)
                return spar_fail(SPAR_TIMEOUT, "another rank aborted");
            if (call->deadline.at_ns)
                late = pthread_cond_timedwait(&w->moved, &w->lock, &until);
            else
                pthread_cond_wait(&w->moved, &w->lock);
            if (late) {
                w->broken = 1;
                pthread_cond_broadcast(&w->moved);
                return spar_fail(SPAR_TIMEOUT, "rank %d did not make call %lld", rank, (long long)n);
            }
        }
    }
    return SPAR_OK;
}

static spar_status push(spar_comm *comm, const spar_call *call)
{
    spar_local_world *w = comm->state;
    void *const **outputs = malloc((size_t)comm->world * sizeof *outputs);
    if (!outputs)
        return spar_fail(SPAR_NO_MEMORY, "no memory for %d ranks", comm->world);
    for (int rank = 0; rank < comm->world; rank++)
        outputs[rank] = w->members[rank].call->outputs;
    spar_push(call->plan, call->inputs, call->rows, outputs, &call->scale);
    free(outputs);
    return SPAR_OK;
}

static spar_status run(spar_comm *comm, spar_call *call)
{
    spar_local_world *w = comm->state;
    member *own = &w->members[comm->rank];
    int differs = -1;
    pthread_mutex_lock(&w->lock);
    own->call = call;
    int64_t n = ++own->started;
    pthread_cond_broadcast(&w->moved);
    spar_status status = await_all(w, call, n, 0);
    for (int rank = 1; status == SPAR_OK && rank < comm->world && differs < 0; rank++)
        if (w->members[rank].call->plan->signature != w->members[0].call->plan->signature)
            differs = rank;
    pthread_mutex_unlock(&w->lock);
    if (status == SPAR_OK && differs < 0)
        status = push(comm, call);
    pthread_mutex_lock(&w->lock);
    own->done = n;
    pthread_cond_broadcast(&w->moved);
    if (status == SPAR_OK)
        status = await_all(w, call, n, 1);
    pthread_mutex_unlock(&w->lock);
    if (status == SPAR_OK && differs >= 0)
        return spar_fail(SPAR_MISMATCH, "calls differ between ranks 0 and %d", differs);
    return status;
}

static void close_comm(spar_comm *comm)
{
    comm->state = NULL; /* the test owns the world */
}

const spar_transport spar_transport_local = {
    .name = "local",
    .serves = serves,
    .setup = setup,
    .connect = connect,
    .run = run,
    .close = close_comm,
};
