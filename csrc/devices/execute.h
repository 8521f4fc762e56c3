/* SPDX-License-Identifier: Apache-2.0 */
/* Execute a plan in host memory: push straight into all ranks' outputs if the transport can write there; else
 * pack one run of bytes for each peer. cpu/ has the code.
 *
 * The packed bytes for one peer are the blocks of plan->push[peer] in their order, each row-major. The
 * receiver unpacks them by plan->pull[sender]. A rank's own part is copied without packing. */
#ifndef SPAR_EXECUTE_H
#define SPAR_EXECUTE_H

#include "devices/scale.h"
#include "plan/plan.h"

/* Where the rows of a tensor lie, which its plan has one behind the other, in blocks without loops. */
typedef struct {
    const int64_t *index; /* row i lies at stride * index[i]; NULL: the tensor is as the plan has it */
    int64_t bytes, stride;
} spar_rows;

static inline int spar_is_listed(const spar_rows *rows, int tensor)
{
    return rows && rows[tensor].index;
}

/* Packs what is sent to `peer` into `wire`, plan->push[peer].bytes long; spar_unpack scales. rows: [tensor],
 * or NULL, as of all functions here. */
void spar_pack(const spar_plan *plan, int peer, const void *const *inputs, const spar_rows *rows, void *wire);

/* Unpacks what was received from `peer` (plan->pull[peer].bytes) into the outputs. */
void spar_unpack(const spar_plan *plan, int peer, const void *wire, void *const *outputs,
                 const spar_scale *scale);

/* Copies a rank's own part from its inputs to its outputs. */
void spar_copy_own(const spar_plan *plan, const void *const *inputs, void *const *outputs,
                   const spar_scale *scale);

/* Copies from a rank's inputs into outputs[rank][tensor] of every rank, including its own; except for ranks
 * whose row is NULL. */
void spar_push(const spar_plan *plan, const void *const *inputs, const spar_rows *rows,
               void *const *const *outputs, const spar_scale *scale);

#endif
