/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/cuda/state.h"

#include "base/env.h"
#include "base/util.h"
#include "devices/cuda/cuda.h"
#include "transports/rendezvous.h"

#include <stdlib.h>
#include <string.h>

void *spar_gpu_release(void *state)
{
    spar_gpu_state *s = state;
    spar_entered before;
    if (__atomic_sub_fetch(&s->refs, 1, __ATOMIC_ACQ_REL))
        return NULL;
    if (spar_cuda_enter(s->ordinal, &before) != SPAR_OK)
        return NULL; /* the device is gone, with its memory */
    s->mover->close(s);
    spar_ring_close(s->ring);
    spar_group_close(s->group);
    spar_cuda_leave(&before);
    pthread_mutex_destroy(&s->lock);
    free(s);
    return NULL;
}

/* Opens the ring if all ranks share this host. It is optional: *offset is -1 without one. */
static void open_ring(spar_gpu_state *s, const spar_comm *comm, int64_t *offset)
{
    char reason[96];
    if (!spar_rendezvous_possible(comm->info, comm->world, 0, reason, sizeof reason) ||
        spar_rendezvous_begin(comm, spar_ring_room(), &s->group, offset) != SPAR_OK ||
        spar_ring_open(s->group, &s->ring) != SPAR_OK)
        *offset = -1;
}

spar_status spar_gpu_setup(spar_comm *comm, const spar_gpu_mover *mover, size_t size,
                           spar_setup_result *result)
{
    spar_env_value check;
    SPAR_TRY(spar_env_field("check", &check));
    SPAR_TRY(spar_cuda_prepare(comm->native.ordinal));
    spar_gpu_state *s = calloc(1, size);
    if (!s)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", comm->world);
    pthread_mutex_init(&s->lock, NULL);
    s->refs = 1;
    s->ordinal = comm->native.ordinal;
    s->mover = mover;
    s->compare = strcmp(check.text, "0") != 0;
    comm->state = s;
    open_ring(s, comm, &result->offset);
    return SPAR_OK;
}

/* If one rank has no call ring, no rank uses it. */
static spar_status connect_ring(spar_gpu_state *s, spar_comm *comm, const spar_setup_result *results,
                                const spar_deadline *deadline)
{
    int all = s->ring != NULL;
    for (int rank = 0; rank < comm->world; rank++)
        all = all && results[rank].offset >= 0;
    spar_status status = all ? spar_rendezvous_end(comm, s->group, results, deadline) : SPAR_TRANSPORT;
    if (status == SPAR_OK) {
        comm->group = s->group; /* the state outlives the communicator, and closes the group */
        return SPAR_OK;
    }
    spar_ring_close(s->ring);
    /* Once peers have connected, the mailbox stays: they may still read it. */
    if (!all)
        spar_group_close(s->group);
    s->ring = NULL;
    s->group = NULL;
    return spar_ends_wait(status) ? status : SPAR_OK;
}

spar_status spar_gpu_connect(spar_comm *comm, const spar_setup_result *results, const spar_deadline *deadline,
                             spar_gpu_connecting connect)
{
    spar_gpu_state *s = comm->state;
    spar_entered before;
    SPAR_TRY(connect_ring(s, comm, results, deadline));
    SPAR_TRY(spar_cuda_enter(s->ordinal, &before));
    spar_watchdog_target what = {
        .ordinal = s->ordinal, .ring = s->ring, .release = spar_gpu_release, .context = s};
    spar_status status = connect(comm, results, deadline, &what);
    if (status == SPAR_OK)
        status = spar_watchdog_open(&what, &s->watchdog);
    spar_cuda_leave(&before);
    if (status != SPAR_OK && s->ring)
        spar_ring_abort(s->ring, status, spar_last_error_ranks(), spar_last_error());
    return status;
}
