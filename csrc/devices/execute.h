/* SPDX-License-Identifier: Apache-2.0 */
/* Execute a plan: push straight into all ranks' outputs if the transport can write there; else pack one run
 * of bytes for each peer.
 *
 * The packed bytes for one peer are the blocks of plan->push[peer] in their order, each row-major. The
 * receiver unpacks them by plan->pull[sender]. A rank's own part is copied without packing. */
#ifndef SPAR_EXECUTE_H
#define SPAR_EXECUTE_H

#include "devices/device.h"

/* Packs what is sent to `peer` into `wire`, plan->push[peer].bytes long; spar_unpack scales. */
spar_status spar_pack(const spar_plan *plan, const spar_device *device, int peer, const void *const *inputs,
                      void *wire);

/* Unpacks what was received from `peer` (plan->pull[peer].bytes) into the outputs. */
spar_status spar_unpack(const spar_plan *plan, const spar_device *device, int peer, const void *wire,
                        void *const *outputs, const spar_scale *scale);

/* Copies a rank's own part from its inputs to its outputs. */
spar_status spar_copy_own(const spar_plan *plan, const spar_device *device, const void *const *inputs,
                          void *const *outputs, const spar_scale *scale);

/* Copies from a rank's inputs into outputs[rank][tensor] of every rank, including its own; except for ranks
 * whose row is NULL, which an exchange that sends every rank the same may not have. */
spar_status spar_push(const spar_plan *plan, const spar_device *device, const void *const *inputs,
                      void *const *const *outputs, const spar_scale *scale);

/* Calls `emit` with each block of push[peer] as packed: dst is its offset in the packed bytes. */
spar_status spar_packed_blocks(const spar_plan *plan, int peer,
                               spar_status (*emit)(void *context, const spar_block *block,
                                                   const spar_dim *dims),
                               void *context);

#endif
