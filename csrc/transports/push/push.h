/* SPDX-License-Identifier: Apache-2.0 */
/* Each rank writes to its peers' slots, memory of one host's GPUs that all ranks have mapped.
 *
 * A call is a number of rounds (kernels.cu), equal on all ranks. In each, a rank packs a part of what it
 * sends to each peer straight into that peer's slot, and then copies what its peers wrote from its own slot
 * into the outputs. A slot is cut into two halves, which rounds use by turns, and a half into an area for
 * each peer. Whatever a peer sends, it stays in its area.
 *
 * A call whose outputs fit a half on every rank, and are not small, is direct: one round in which the peers
 * write to the outputs. Where an output is not in memory that they have mapped, they write to its image in
 * the half, and the rank copies that. A slot is: each peer's offers, a half, memory for outputs, a half. */
#ifndef SPAR_PUSH_H
#define SPAR_PUSH_H

#include "control/ring.h"
#include "devices/cuda/kernels.h"
#include "devices/cuda/outputs.h"
#include "transports/transport.h"

typedef struct {
    int world, rank;
    int64_t half;                   /* a half's bytes, */
    int64_t area;                   /* those for each peer, */
    int64_t second;                 /* and where the second one begins, from the first one on */
    int64_t least;                  /* bytes of a direct call's outputs */
    spar_outputs *outputs;          /* in the slot; NULL: it has no room */
    void *sync;                     /* the spar_kernel_sync, in device memory */
    uint32_t *stop;                 /* atomic, in page-locked memory: see spar_kernel_sync */
    int captured;                   /* a graph has a call, and may be replayed */
    char *bases[SPAR_KERNEL_RANKS]; /* where the first halves begin */
} spar_push_state;

/* Opens it over the slots of world >= 2 ranks; the device is entered. */
spar_status spar_push_open(int world, int rank, const spar_slots *slots, spar_push_state **push);

/* The first exchanges, by both kinds of rounds, compared word by word; all ranks call it, with the same salt.
 * It fails where a rank is late, or failed, as the ring knows. */
spar_status spar_push_check(spar_push_state *push, uint32_t salt, const spar_deadline *deadline,
                            spar_ring *ring);

/* Whether calls of the plan are direct: the same on all ranks. */
int spar_push_is_direct(const spar_push_state *push, const spar_plan *plan);

/* One exchange, into the call's stream, which has waited for the calls before. */
spar_status spar_push_run(spar_push_state *push, const spar_call *call, int captured);

/* Keeps what graphs use, for good. NULL: does nothing. */
void spar_push_close(spar_push_state *push);

#endif
