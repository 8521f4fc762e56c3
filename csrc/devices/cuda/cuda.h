/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA devices: copies of a plan's blocks in device memory, in a stream. */
#ifndef SPAR_CUDA_H
#define SPAR_CUDA_H

#include "devices/scale.h"
#include "plan/plan.h"

/* A span's source and destination. */
typedef enum {
    SPAR_PUSH,   /* this rank's inputs -> the peer's outputs; for the rank itself: its own part */
    SPAR_PACK,   /* this rank's inputs -> wire, as packed for the peer (plan->push) */
    SPAR_UNPACK, /* wire, as packed by the peer (plan->pull) -> this rank's outputs */
    SPAR_DIRECT, /* this rank's inputs -> the peer's outputs, where the peer offers to have them */
    SPAR_IMAGE,  /* wire, this rank's image: what the peer wrote there -> this rank's outputs */
} spar_route;

/* Bytes low to high of what is sent to or received from one peer, in packed order: 0 to push[peer].bytes or
 * pull[peer].bytes. Bounds may be any byte (of scaled items: their first); multiples of 16 are fast. */
typedef struct {
    int peer;
    spar_route route;
    int64_t low, high;
    void *wire; /* where byte `low` lies, on the wire's side, or the image; NULL for others */
} spar_span;

/* An image has a call's outputs one behind the other, each at a multiple of 256 bytes and with the room that
 * the largest of all ranks takes. Where the tensor lies in it; of plan->ntensors: the size of the image. */
int64_t spar_image_at(const spar_plan *plan, int tensor);

/* A thread's state before it entered a device. */
typedef struct {
    void *context;
    int mode; /* its capture mode */
} spar_entered;

/* Opens the driver and NVRTC. Cheap: touches no device, compiles nothing. The error names what is missing. */
spar_status spar_cuda_open(void);

/* Prepares device `ordinal`: compiles the kernels or reads them from disk, loads them, and launches each once
 * as a no-op. Done once; takes seconds the first time. Not during a capture. */
spar_status spar_cuda_prepare(int ordinal);

/* Makes a prepared device current on this thread, and puts the thread into the relaxed capture mode, in which
 * it invalidates no capture. spar_cuda_leave restores both; but a thread that had no context keeps that of
 * device 0, as CUDA's runtime would leave it: torch warns if it calls cuBLAS on a thread without one. The
 * functions below require a device to be current. */
spar_status spar_cuda_enter(int ordinal, spar_entered *before);
void spar_cuda_leave(const spar_entered *before);

/* Copies spans of any number of peers and routes in the stream, those of a peer and route in order: one
 * launch for about 60 blocks, of a bounded number of CTAs. inputs and outputs are [plan->ntensors]. Every
 * route can scale. It neither allocates nor waits for the device. A graph keeps what a captured copy needs,
 * besides the tensors. */
spar_status spar_cuda_copy_spans(const spar_plan *plan, const spar_span *spans, int count,
                                 const void *const *inputs, void *const *outputs, const spar_scale *scale,
                                 void *stream);

/* Rounds between ranks that write to each other's slots: see rounds.cu. */
typedef struct {
    int ordinal;       /* of the prepared device that is current */
    void *sync;        /* the rank's spar_kernel_sync, in device memory */
    uint64_t limit_ns; /* how long a wait may take; 0: without a limit */
    /* What is sent, what rounds before have received, and what this one has, one behind the other. */
    const spar_span *spans;
    int sent, beside, behind;
    uint32_t rounds; /* 1, or all those of a direct call */
    /* [plan->ntensors] in a direct call's first round, else NULL: where the peers write this rank's outputs,
     * from its slot's first half on, in 16 bytes; and the last place that a peer may offer */
    const uint32_t *offers, *last;
    /* In host memory, receives the number when the round has ended: of a call's last round. Or NULL. */
    uint32_t *mark;
    uint32_t number;
} spar_round;

/* Copies what is sent, scaled, to the peers' slots and outputs, and next to it what rounds before have
 * received. Then it waits for all peers, and copies what this round has received. Received bytes go to
 * `targets` [plan->ntensors], of an image to those that are not NULL. `wire` is an address in the first half
 * of a slot, or the image's. */
spar_status spar_cuda_copy_round(const spar_plan *plan, const void *const *inputs, void *const *outputs,
                                 void *const *targets, const spar_scale *scale, const spar_round *round,
                                 void *stream);

/* Side streams, in which calls run beside others' kernels: their launches have fewer CTAs. */
spar_status spar_cuda_set_side_stream(int ordinal, void *stream);

#endif
