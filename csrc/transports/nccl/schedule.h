/* One rank's side of an exchange over sends and receives of contiguous bytes, step by step.
 *
 * The bytes from one rank to another are a stream: packed as plan->push[receiver] on the sender and as
 * plan->pull[sender] on the receiver. Step k moves bytes k * chunk to (k + 1) * chunk of each stream. The
 * lengths of its messages depend on the lengths of the stream's blocks only, so both ranks compute the same
 * messages. Each rank decides by itself which messages use its tensors directly, and which use its staging
 * buffers.
 *
 * Every message begins at a multiple of 16 bytes on this rank: elsewhere NCCL copies byte by byte. A
 * contiguous block at another address is staged, and staged messages are padded. */
#ifndef SPAR_SCHEDULE_H
#define SPAR_SCHEDULE_H

#include "devices/device.h"

/* To or from `peer`, at byte `at` of this rank's tensor, or of its staging buffer if tensor is -1. */
typedef struct {
    int peer, tensor;
    int64_t at, bytes;
} spar_message;

/* The position in a stream at which the next step begins. */
typedef struct {
    int64_t block, start; /* the first block, and its offset in the stream */
} spar_cursor;

/* One side of a call. The arrays are reused by later calls and grow on demand. */
typedef struct {
    const spar_plan *plan;
    int pulls;                  /* 0: push, from inputs; 1: pull, to outputs */
    int all;                    /* every message is staged, because its items are scaled */
    int64_t chunk;              /* bytes of a peer's stream in a step */
    const void *const *tensors; /* this rank's inputs, or outputs */
    char *staging;              /* (world - 1) * spar_schedule_room(chunk) bytes, for the next step */
    spar_message *messages;     /* of the newest step; each peer's are in its stream's order */
    spar_span *spans;           /* of the newest step: what to pack before it, or to unpack after it */
    spar_cursor *cursors;       /* [world] */
    int64_t nmessages, nspans;
    int64_t message_room, span_room, cursor_room;
} spar_schedule;

/* The number of steps of a call on this rank; 0 if it neither sends nor receives. */
int64_t spar_schedule_steps(const spar_plan *plan, int64_t chunk);

/* Returns the bytes of staging memory for a peer's part of a step, with its messages' padding. */
int64_t spar_schedule_room(int64_t chunk);

/* Begins a call on these inputs or outputs. If `pulls` is set, the plan must have its pull side. */
spar_status spar_schedule_begin(spar_schedule *side, const spar_plan *plan, int pulls, int all, int64_t chunk,
                                const void *const *tensors);

/* Schedules the next step, in order, over this staging buffer. */
spar_status spar_schedule_step(spar_schedule *side, int64_t step, char *staging);

void spar_schedule_free(spar_schedule *side);

#endif
