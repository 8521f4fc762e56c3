/* SPDX-License-Identifier: Apache-2.0 */
/* What the transports of CUDA tensors share, nccl and push: a group's state on this rank, its set-up, and
 * its calls, which are given to a stream. */
#ifndef SPAR_GPU_STATE_H
#define SPAR_GPU_STATE_H

#include "transports/cuda/watchdog.h"
#include "transports/transport.h"

#include <pthread.h>

typedef struct spar_gpu_state spar_gpu_state;

/* How a transport moves the bytes; the device is entered. */
typedef struct {
    /* Fails if it cannot make the call; *captured: whether that is captured. */
    spar_status (*check)(const spar_gpu_state *state, const spar_call *call, int *captured);
    /* One exchange, into the call's stream, after spar_watchdog_order. mark: NULL, or receives the call's
     * number, state->calls, when it has ended; see marks. */
    spar_status (*run)(spar_gpu_state *state, const spar_call *call, int captured, uint32_t *mark);
    /* Frees what the transport's set-up made, in whole or in part. */
    void (*close)(spar_gpu_state *state);
    int marks; /* whether its kernels write the mark */
} spar_gpu_mover;

/* The first field of a transport's own state. */
struct spar_gpu_state {
    pthread_mutex_t lock; /* held during a call; protects what follows */
    int refs;             /* atomic: held by the comm or its watchdog, and by a thread of the set-up */
    int ordinal;
    const spar_gpu_mover *mover;
    spar_group *group; /* joins the ranks if all are on one host; else NULL, as is its ring */
    spar_ring *ring;
    int compare;
    uint64_t calls;
    spar_watchdog *watchdog;
};

/* Whether no rank has a reason against it in its field at `why_not`; else why. */
int spar_gpu_serves(const spar_peer_info *info, int world, int first_rank, size_t why_not, char *reason,
                    size_t size);

/* First set-up stage: makes comm->state, of `size` bytes that are 0 otherwise, with its ring. */
spar_status spar_gpu_setup(spar_comm *comm, const spar_gpu_mover *mover, size_t size,
                           spar_setup_result *result);

/* The transport's own part of the second stage. Adds to the target what it has of it. */
typedef spar_status (*spar_gpu_connecting)(spar_comm *comm, const spar_setup_result *results,
                                           const spar_deadline *deadline, spar_watchdog_target *what);

/* Second set-up stage: connects the ring on all ranks or drops it, calls `connect` with the device entered,
 * and opens the watchdog. */
spar_status spar_gpu_connect(spar_comm *comm, const spar_setup_result *results, const spar_deadline *deadline,
                             spar_gpu_connecting connect);

/* Drops a reference to the state. The last one frees it, which waits for the device. Returns NULL. */
void *spar_gpu_release(void *state);

/* Slots of both transports. */
spar_status spar_gpu_run(spar_comm *comm, spar_call *call);
spar_status spar_gpu_wait(spar_comm *comm, const spar_deadline *deadline);
const char *spar_gpu_broken(const spar_comm *comm);
void spar_gpu_close(spar_comm *comm);

#endif
