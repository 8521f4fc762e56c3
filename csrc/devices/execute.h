/* Copies by the plan: straight into every rank's outputs, where a transport can write there; packed, where it can
 * only move one run of bytes to each peer.
 *
 * The packed bytes for one peer are the blocks of plan->push[peer] in their order, each row-major. The receiver
 * finds them as plan->pull[sender]. A rank's own part is not packed: it goes straight over. */
#ifndef SPAR_EXECUTE_H
#define SPAR_EXECUTE_H

#include "devices/device.h"

/* Packs what goes to `peer` into `wire`, plan->push[peer].bytes long; a factor is left to spar_unpack. */
spar_status spar_pack(const spar_plan *plan, const spar_device *device, int peer,
                      const void *const *inputs, void *wire, void *stream);

/* Unpacks what came from `peer` (plan->pull[peer].bytes) into the outputs. */
spar_status spar_unpack(const spar_plan *plan, const spar_device *device, int peer,
                        const void *wire, void *const *outputs, const spar_scale *scale,
                        void *stream);

/* A rank's own part, from its inputs to its outputs. */
spar_status spar_copy_own(const spar_plan *plan, const spar_device *device,
                          const void *const *inputs, void *const *outputs, const spar_scale *scale,
                          void *stream);

/* A rank's part in the exchange: from its inputs into outputs[rank][tensor] of every rank, its own too. */
spar_status spar_push(const spar_plan *plan, const spar_device *device, const void *const *inputs,
                      void *const *const *outputs, const spar_scale *scale, void *stream);

/* Calls `emit` with each block of push[peer] as it is packed: dst is its place in the packed bytes. */
spar_status spar_packed_blocks(const spar_plan *plan, int peer,
                               spar_status (*emit)(void *context, const spar_block *block,
                                                   const spar_dim *dims),
                               void *context);

#endif
