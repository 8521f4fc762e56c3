/* One rank's side of an exchange over a wire that moves runs of bytes between pairs of ranks, step by step.
 *
 * What goes from one rank to another is a stream: the packed bytes of plan->push[receiver] there, of
 * plan->pull[sender] here. Step k moves bytes k * chunk to (k + 1) * chunk of each stream, in messages whose
 * lengths follow from the lengths of the stream's blocks alone. So both ends cut alike, though each decides for
 * itself which messages lie in its tensors as they are, and which go through its staging memory. */
#ifndef SPAR_SCHEDULE_H
#define SPAR_SCHEDULE_H

#include "devices/device.h"

/* To or from `peer`, at byte `at` of this rank's tensor; of its staging memory where tensor is -1. */
typedef struct {
    int peer, tensor;
    int64_t at, bytes;
} spar_message;

/* Where a stream's next step begins. */
typedef struct {
    int64_t block, start; /* its first block, and the byte of the stream at which that begins */
} spar_cursor;

/* One side of a call. The arrays are kept from call to call, and grow when they must. */
typedef struct {
    const spar_plan *plan;
    int pulls;     /* 0: push, from inputs; 1: pull, to outputs */
    int all;       /* every message goes through staging, as one whose items are scaled */
    int64_t chunk; /* bytes of a peer's stream in a step, and of its area of staging memory */
    char *staging; /* (world - 1) * chunk bytes; where the next step's messages go through */
    spar_message *messages; /* of the newest step; of each peer in its stream's order */
    spar_span *spans; /* of the newest step: what to pack before, or to unpack after, they move */
    spar_cursor *cursors; /* [world] */
    int64_t nmessages, nspans;
    int64_t message_room, span_room, cursor_room;
} spar_schedule;

/* How many steps a call of this rank has; 0 where it neither sends nor receives. */
int64_t spar_schedule_steps(const spar_plan *plan, int64_t chunk);

/* A call begins. The plan must have its pull side where `pulls` is set. */
spar_status spar_schedule_begin(spar_schedule *side, const spar_plan *plan, int pulls, int all,
                                int64_t chunk);

/* The next step, in order, through this staging memory. */
spar_status spar_schedule_step(spar_schedule *side, int64_t step, char *staging);

void spar_schedule_free(spar_schedule *side);

#endif
