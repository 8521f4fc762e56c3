/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's side of an exchange over sends and receives of contiguous bytes, step by step.
 *
 * The bytes from one rank to another are a stream: packed as plan->push[receiver] on the sender and as
 * plan->pull[sender] on the receiver. Each stream is cut into the call's number of steps, equally. The
 * lengths of its messages depend on that number and on the lengths of the stream's blocks only, so both
 * ranks compute the same messages. Each rank decides by itself which messages use its tensors directly, and
 * which use staging memory.
 *
 * Every message begins at a multiple of 16 bytes on this rank: elsewhere NCCL copies byte by byte. A
 * contiguous block at another address is staged, and staged messages are padded. */
#ifndef SPAR_SCHEDULE_H
#define SPAR_SCHEDULE_H

#include "devices/cuda/cuda.h"

/* A message to or from `peer`, in a tensor of this rank or in its staging buffer. */
typedef struct {
    int peer;
    char *at;
    int64_t bytes;
} spar_message;

/* One peer's stream. */
typedef struct {
    int64_t chunk;        /* bytes that a step moves */
    int64_t area;         /* its part's offset in a staging buffer */
    int64_t block, start; /* where the next step begins, and that block's offset in the stream */
} spar_stream;

/* One side of a call. The arrays are reused by later calls and grow on demand. */
typedef struct {
    const spar_plan *plan;
    int pulls;                  /* 0: push, from inputs; 1: pull, to outputs */
    int all;                    /* every message is staged, because its items are scaled */
    int64_t size;               /* bytes of a step's staging buffer; 0: nothing is staged */
    const void *const *tensors; /* this rank's inputs, or outputs */
    char *staging;              /* `size` bytes, for the next step */
    spar_message *messages;     /* the newest step's; each peer's are in its stream's order */
    spar_span *spans;           /* what to pack before the newest step, or to unpack after it */
    spar_stream *streams;       /* [world] */
    int64_t nmessages, nspans;
    int64_t message_room, span_room, stream_room;
} spar_schedule;

/* A cap on staging memory is at least this for each peer. */
enum { SPAR_SCHEDULE_LEAST = 4096 };

/* The number of steps of a call, equal on all ranks: at most 4, of at least 32 MiB, but as many as the cap on
 * staging memory requires. 1 if ranks whose inputs are contiguous stage nothing. */
int64_t spar_schedule_steps(const spar_plan *plan, int scaled, int64_t cap);

/* Whether the call is an all-gather of equal parts: each rank's input to every rank, in rank order. */
int spar_schedule_is_all_gather(const spar_plan *plan);

/* Begins a call on these inputs or outputs. If `pulls` is set, the plan must have its pull side. */
spar_status spar_schedule_begin(spar_schedule *side, const spar_plan *plan, int pulls, int all, int64_t steps,
                                const void *const *tensors);

/* Schedules the next step, in order, over this staging buffer. */
spar_status spar_schedule_step(spar_schedule *side, int64_t step, char *staging);

/* Adds this rank's own part to the spans of the newest step. */
spar_status spar_schedule_add_own(spar_schedule *side);

void spar_schedule_free(spar_schedule *side);

#endif
