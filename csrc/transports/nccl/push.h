/* SPDX-License-Identifier: Apache-2.0 */
/* Each rank writes to its peers' slots, memory of one host's GPUs that all ranks have mapped.
 *
 * A call is a number of rounds (kernels.cu), equal on all ranks. In each, a rank packs a part of what it
 * sends to each peer straight into that peer's slot, and then copies what its peers wrote from its own slot
 * into the outputs. A slot is cut into two halves, which rounds use by turns, and a half into an area for
 * each peer. Whatever a peer sends, it stays in its area. */
#ifndef SPAR_PUSH_H
#define SPAR_PUSH_H

#include "devices/cuda/kernels.h"
#include "transports/transport.h"

typedef struct {
    int world, rank;
    int64_t area;   /* bytes for each peer in half a slot */
    void *sync;     /* the spar_kernel_sync, in device memory */
    uint32_t *stop; /* atomic, in page-locked memory: see spar_kernel_sync */
    int captured;   /* a graph has a call, and may be replayed */
    char *bases[SPAR_KERNEL_RANKS];
} spar_push_state;

/* Opens it over the slots of world >= 2 ranks; the device is entered. */
spar_status spar_push_open(int world, int rank, const spar_slots *slots, spar_push_state **push);

/* One exchange, into the call's stream, which has waited for the calls before. */
spar_status spar_push_run(spar_push_state *push, const spar_call *call, int captured);

/* Keeps what graphs use, for good. NULL: does nothing. */
void spar_push_close(spar_push_state *push);

#endif
