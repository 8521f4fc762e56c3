/* Devices: the memory that a plan's blocks lie in, and the copies there.
 *
 * To add one, write a folder in devices/ with a file that ends in one const struct, and declare it below. */
#ifndef SPAR_DEVICE_H
#define SPAR_DEVICE_H

#include "plan/plan.h"
#include "devices/scale.h"

/* A span's source and destination. */
typedef enum {
    SPAR_PUSH,   /* this rank's inputs -> the peer's outputs; for the rank itself: its own part */
    SPAR_PACK,   /* this rank's inputs -> wire, as packed for the peer (plan->push) */
    SPAR_UNPACK, /* wire, as packed by the peer (plan->pull) -> this rank's outputs */
} spar_route;

/* Bytes low to high of what is sent to or received from one peer, in packed order: 0 to push[peer].bytes or
 * pull[peer].bytes. Bounds may be any byte (of scaled items: their first); multiples of 16 are fast. */
typedef struct {
    int peer;
    spar_route route;
    int64_t low, high;
    void *wire; /* where byte `low` lies, on the wire's side; NULL for SPAR_PUSH */
} spar_span;

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

/* A thread's state before it entered a device. */
typedef struct {
    void *context;
    int mode; /* of captures */
} spar_entered;

typedef struct {
    const char *name; /* torch's device type */
    /* Copies blocks; done on return. On a CPU only. */
    spar_status (*copy_blocks)(const spar_copies *copies);

    /* The slots below are for devices with streams; NULL on a CPU. */

    /* Opens the device's libraries. Cheap: touches no device, compiles nothing. The error names what is
     * missing. */
    spar_status (*open)(void);
    /* Prepares device `ordinal`: compiles the kernels or reads them from disk, loads them, and launches each
     * once as a no-op. Done once; takes seconds the first time. Not during a capture. */
    spar_status (*prepare)(int ordinal);
    /* Makes a prepared device current on this thread, and puts the thread into the relaxed capture mode, in
     * which it invalidates no capture. leave restores both. The slots below require it. */
    spar_status (*enter)(int ordinal, spar_entered *before);
    void (*leave)(const spar_entered *before);
    /* Copies spans of any number of peers and routes in the stream, those of a peer and route in order: one
     * launch for about 60 blocks, of a bounded number of CTAs. inputs and outputs are [plan->ntensors]. Every
     * route can scale. Neither allocates nor waits for the device. A graph keeps what a captured copy needs,
     * besides the tensors. */
    spar_status (*copy_spans)(const spar_plan *plan, const spar_span *spans, int count,
                              const void *const *inputs, void *const *outputs, const spar_scale *scale,
                              void *stream);
    /* Allocate and free staging memory, aligned to 256 bytes; free waits for the device. Not during a
     * capture. */
    spar_status (*alloc)(int64_t bytes, void **memory);
    void (*free)(void *memory);
} spar_device;

extern const spar_device spar_device_cpu;
extern const spar_device spar_device_cuda;

#endif
