/* SPDX-License-Identifier: Apache-2.0 */
/* Devices whose memory the host addresses: the memory that a plan's blocks lie in, and the copies there.
 *
 * A device with streams has an interface of its own, such as cuda/cuda.h, because a transport that uses its
 * streams uses its driver, too. */
#ifndef SPAR_DEVICE_H
#define SPAR_DEVICE_H

#include "devices/scale.h"
#include "plan/plan.h"

/* Blocks of a plan, from one rank's tensors to those of one or several targets. */
typedef struct {
    const spar_block *blocks;
    const spar_dim *dims;
    const spar_range *ranges; /* [targets] of blocks; equal ones: every target receives the same */
    int targets, first;       /* which target is first where one after another is written */
    const void *const *from;  /* [tensor] */
    void *const *const *to;   /* [target][tensor]; a row is NULL: nothing is copied to that target */
    const spar_scale *scale;
} spar_copies;

typedef struct {
    /* Copies blocks; they are copied on return. */
    spar_status (*copy_blocks)(const spar_copies *copies);
} spar_device;

extern const spar_device spar_device_cpu;

#endif
