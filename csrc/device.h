/* Devices: whose memory the blocks of a plan lie in, and how they are copied there.
 *
 * To add one: a file in devices/ that ends in one const struct, and its name below. */
#ifndef SPAR_DEVICE_H
#define SPAR_DEVICE_H

#include "plan.h"
#include "scale.h"

typedef struct {
    const char *name; /* torch's device type */
    /* Copies `count` blocks: block i from from[blocks[i].tensor] to to[target][blocks[i].tensor], for each of
     * the targets, which get the same. `stream` is the device's queue, NULL on a CPU, where the copy is done
     * on return. */
    spar_status (*copy_blocks)(const spar_block *blocks, int64_t count, const spar_dim *dims,
                               const void *const *from, void *const *const *to, int targets,
                               const spar_scale *scale, void *stream);
} spar_device;

extern const spar_device spar_device_cpu;

#endif
