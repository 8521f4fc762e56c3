/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts copies into launches: blocks become parts in the parameters of kernels. Pure arithmetic. */
#ifndef SPAR_LAUNCHES_H
#define SPAR_LAUNCHES_H

#include "devices/cuda/kernels.h"
#include "devices/cuda/cuda.h"

/* The launches of one copy. Begin with `launch` and `context`, add spans, and end. */
typedef struct {
    /* Called with each launch; the parts' tiles are not set. `bits` is the OR of all addresses, strides, runs
     * and bounds: its lowest set bit is their alignment. */
    spar_status (*launch)(void *context, spar_kernel_copy *copy, uint64_t bits);
    void *context;
    int loops;     /* the copy's loops in use */
    uint64_t bits; /* the bits of its parts */
    spar_kernel_copy copy;
} spar_launches;

void spar_launches_begin(spar_launches *launches, spar_status (*launch)(void *, spar_kernel_copy *, uint64_t),
                         void *context);

/* Adds a plan's spans, which are ordered by `low` for each peer. `inputs` and `outputs` are as in
 * spar_cuda_copy_spans. */
spar_status spar_launches_add(spar_launches *launches, const spar_plan *plan, const spar_span *spans,
                              int count, const void *const *inputs, void *const *outputs);

/* Launches what is left. */
spar_status spar_launches_end(spar_launches *launches);

/* Sets the parts' tiles of `bytes` bytes. */
void spar_launches_tile(spar_kernel_copy *copy, int64_t bytes);

#endif
