/* SPDX-License-Identifier: Apache-2.0 */
/* The state of one group's NCCL transport on this rank, shared by its set-up and its calls. */
#ifndef SPAR_NCCL_STATE_H
#define SPAR_NCCL_STATE_H

#include "transports/cuda/state.h"
#include "transports/nccl/pipeline.h"

typedef struct {
    spar_gpu_state gpu; /* its lock protects what follows */
    pthread_cond_t connected;
    spar_nccl_id id;
    spar_pipeline pipeline;
    struct ncclComm *own, *native; /* native: torch's, at the set-up */
    /* The thread that sets NCCL up sets `finished`, with its result. `abandoned`: no thread waits for it. */
    int finished, abandoned;
    spar_failure result;
} spar_nccl_state;

/* The stages of the set-up. */
spar_status spar_nccl_setup(spar_comm *comm, const spar_gpu_mover *mover, spar_setup_result *result);
spar_status spar_nccl_connect(spar_comm *comm, const spar_setup_result *results,
                              const spar_deadline *deadline);

#endif
