/* SPDX-License-Identifier: Apache-2.0 */
/* The state of one group's NCCL transport on this rank, shared by its set-up and its calls. */
#ifndef SPAR_NCCL_STATE_H
#define SPAR_NCCL_STATE_H

#include "transports/nccl/pipeline.h"
#include "transports/nccl/push.h"
#include "transports/nccl/watchdog.h"
#include "transports/transport.h"

#include <pthread.h>

typedef struct {
    pthread_mutex_t lock; /* held during a call; protects what follows */
    pthread_cond_t connected;
    int refs; /* atomic: held by the comm or its watchdog, and by the thread that sets NCCL up */
    int ordinal;
    spar_nccl_id id;
    spar_pipeline pipeline;
    spar_push_state *push; /* moves the bytes; NULL: NCCL does */
    spar_group *group;     /* joins the ranks if all are on one host; else NULL, as is its ring */
    spar_ring *ring;
    int compare;
    uint64_t calls;
    struct ncclComm *own, *native; /* native: torch's, at the set-up */
    spar_watchdog *watchdog;
    /* The thread that sets NCCL up sets `finished`, with its result. `abandoned`: no thread waits for it. */
    int finished, abandoned;
    spar_failure result;
} spar_nccl_state;

/* Whether no rank has a reason against it in its field at `why_not`; else why. */
int spar_cuda_serves(const spar_peer_info *info, int world, int first_rank, size_t why_not, char *reason,
                     size_t size);

/* The stages of the set-up: slots of spar_transport_nccl. */
spar_status spar_nccl_setup(spar_comm *comm, spar_setup_result *result);
spar_status spar_nccl_connect(spar_comm *comm, const spar_setup_result *results,
                              const spar_deadline *deadline);

/* Stages that other transports share: the state with its ring, in the first one; in the second one, the ring
 * is connected on all ranks or dropped, then `connect` called, with the device entered, and the watchdog
 * opened. */
spar_status spar_nccl_make_state(spar_comm *comm, spar_setup_result *result, spar_nccl_state **state);
spar_status spar_nccl_connect_state(spar_comm *comm, const spar_setup_result *results,
                                    const spar_deadline *deadline,
                                    spar_status (*connect)(spar_comm *comm, const spar_deadline *deadline));

/* Slots of each transport with this state. */
spar_status spar_nccl_run(spar_comm *comm, spar_call *call);
spar_status spar_nccl_wait(spar_comm *comm, const spar_deadline *deadline);
const char *spar_nccl_broken(const spar_comm *comm);
void spar_nccl_close(spar_comm *comm);

/* Drops a reference to the state. The last one frees it, which waits for the device. Returns NULL. */
void *spar_nccl_release(void *state);

#endif
