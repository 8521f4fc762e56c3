/* Devices: whose memory the blocks of a plan lie in, and how they are copied there.
 *
 * To add one: a file in devices/ that ends in one const struct, and its name below. */
#ifndef SPAR_DEVICE_H
#define SPAR_DEVICE_H

#include "plan/plan.h"
#include "devices/scale.h"

/* Between what a span is copied. */
typedef enum {
    SPAR_PUSH,   /* this rank's inputs -> the peer's outputs; of this rank itself: its own part */
    SPAR_PACK,   /* this rank's inputs -> wire, as packed for the peer (plan->push) */
    SPAR_UNPACK, /* wire, as packed by the peer (plan->pull) -> this rank's outputs */
} spar_route;

/* Bytes low to high of what goes to, or came from, one peer, counted in packed order: 0 to push[peer].bytes
 * or pull[peer].bytes. Any byte may be a bound (of a scaled item: its first); multiples of 16 are fast. */
typedef struct {
    int peer;
    int64_t low, high;
    void *wire; /* where byte `low` lies, on the wire's side; NULL for SPAR_PUSH */
} spar_span;

typedef struct {
    const char *name; /* torch's device type */
    /* Copies `count` blocks: block i from from[blocks[i].tensor] to to[target][blocks[i].tensor], for each of
     * the targets, which get the same. `stream` is the device's queue, NULL on a CPU, where the copy is done
     * on return. */
    spar_status (*copy_blocks)(const spar_block *blocks, int64_t count, const spar_dim *dims,
                               const void *const *from, void *const *const *to, int targets,
                               const spar_scale *scale, void *stream);

    /* The rest is of devices with streams of their own, NULL on a CPU. */

    /* Whether the device's libraries can be opened: no device is touched, nothing is compiled, and the error
     * says what is missing. Cheap. */
    spar_status (*open)(void);
    /* Makes device `ordinal` of this process ready: kernels compiled or found on disk, loaded, and each
     * launched once as a no-op. Done once, up to seconds the first time; not while a stream is captured. */
    spar_status (*prepare)(int ordinal);
    /* Makes a prepared device this thread's current one, until leave gets what `before` was. The functions
     * below want it so. */
    spar_status (*enter)(int ordinal, void **before);
    void (*leave)(void *before);
    /* Copies the spans, of any number of peers, in the stream: one launch for 32 of them. inputs and outputs are
     * [plan->ntensors] (for SPAR_PUSH all spans have the same outputs). A factor may be applied on each
     * route. What a captured graph needs of the plan stays until the process ends. Neither waits for
     * the device nor allocates, but when the plan is first used on it: then its tables of blocks go there,
     * where they stay with the plan. */
    spar_status (*copy_spans)(const spar_plan *plan, spar_route route, const spar_span *spans,
                              int count, const void *const *inputs, void *const *outputs,
                              const spar_scale *scale, void *stream);
    /* Device memory for staging, aligned to 256; free waits for the device. Neither during a capture. */
    spar_status (*alloc)(int64_t bytes, void **memory);
    void (*free)(void *memory);
} spar_device;

extern const spar_device spar_device_cpu;
extern const spar_device spar_device_cuda;

#endif
