/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of a call for the far ranks, and from them: packed, unless they are one run of a tensor.
 *
 * In a gather each rank receives the same, so a part crosses to another host once: the i-th rank of a host
 * sends it to that host's i-th rank, modulo their number, which passes it on to its near ranks. */
#ifndef SPAR_PARCELS_H
#define SPAR_PARCELS_H

#include "transports/transport.h"

/* Chooses the relays of a communicator, as its state, which the caller frees. Can only fail for lack of
 * memory. */
spar_status spar_parcels_choose_relays(spar_comm *comm);

typedef struct {
    const spar_comm *comm;
    const spar_call *call;
    void *const *const *outputs; /* [world] of the near ranks, each with the call's tensors */
    spar_parcel *parcels;        /* [world] those of the far ranks are set */
    spar_memory *staging;        /* holds what is packed; NULL: nothing is */
    int64_t bytes;               /* its length */
    int gathers;
} spar_parcels;

/* Takes memory for what is packed, and packs. The call has its plan, with the pull side, and its outputs. */
spar_status spar_parcels_pack(spar_parcels *parcels);

/* Unpacks what a far rank sent, for the near ranks, too, in a gather; as spar_group_transfer calls it. */
void spar_parcels_unpack(void *parcels, int rank);

void spar_parcels_free(spar_parcels *parcels);

#endif
