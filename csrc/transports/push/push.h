/* SPDX-License-Identifier: Apache-2.0 */
/* Each rank writes to its peers' slots, memory of one host's GPUs that all ranks have mapped.
 *
 * A call is a number of rounds (rounds.cu), equal on all ranks. In each, a rank packs a part of what it
 * sends to each peer straight into that peer's slot; next to the following round, it copies what its peers
 * wrote from its own slot into the outputs. Rounds use two halves of a slot by turns, and a half has an area
 * for each peer. Whatever a peer sends, it stays in its area.
 *
 * A call whose outputs are not small is direct: the peers write to the outputs. Where an output is not in
 * memory that they have mapped, they write to its image, and the rank copies that, round by round. A slot
 * is: words, the two halves, and memory for outputs, in which the image lies. It grows by what the calls are,
 * so ranks agree on it without a message, up to a limit. */
#ifndef SPAR_PUSH_H
#define SPAR_PUSH_H

#include "control/ring.h"
#include "devices/cuda/kernels.h"
#include "devices/cuda/outputs.h"
#include "transports/transport.h"

enum { SPAR_PUSH_WORDS = 8192 }; /* bytes of the words at a slot's begin: signals, offers */

/* What follows the words of a slot; all offsets are from there on. */
typedef struct {
    int world, rank, ordinal;
    int64_t half, area;     /* bytes of a half, and of each peer's area in it */
    int64_t heap;           /* where the memory for outputs begins */
    int64_t bytes, limit;   /* that it has now, and may have */
    int64_t image_at, room; /* where the image lies, and how large it may be */
    int64_t least;          /* bytes of a direct call's image */
    int64_t traffic, next;  /* bytes of direct calls so far, and when ranks compare what they lack */
    spar_outputs *outputs;
    void *sync;                     /* the spar_kernel_sync, in device memory */
    uint32_t *stop;                 /* atomic, in page-locked memory: see spar_kernel_sync */
    int captured;                   /* a graph has a call, and may be replayed */
    int unreached;                  /* in the first exchanges a peer's words were wrong, or did not arrive */
    void *unended;                  /* a stream with kernels of first exchanges that failed; NULL: none */
    char *bases[SPAR_KERNEL_RANKS]; /* of each rank's slot, behind the words */
} spar_push_state;

/* The bytes that a slot of world >= 2 ranks has at first, if it may have `limit`, both without its words;
 * SPAR_TRANSPORT if that is too little. */
spar_status spar_push_first_bytes(int world, int64_t limit, int64_t *bytes);

/* Opens it over slots [world] that have so many bytes; their words are 0, and the device is entered.
 * release(context) frees this rank's slot once no output lies in it; on failure it is not called. */
spar_status spar_push_open(int world, int rank, int ordinal, char *const *slots, int64_t bytes, int64_t limit,
                           void (*release)(void *context), void *context, spar_push_state **push);

/* The deadline of a stage of the set-up: its limit, or half of what is left, so that another transport has
 * time. */
spar_deadline spar_push_stage(const spar_deadline *deadline, int64_t limit_ns);

/* The first exchanges, by both kinds of rounds, compared word by word; all ranks call it, with the same salt.
 * It fails where a rank is late, or failed, as the ring knows. */
spar_status spar_push_check(spar_push_state *push, uint32_t salt, const spar_deadline *deadline,
                            spar_ring *ring);

/* Whether calls of the plan are direct: the same on all ranks. */
int spar_push_is_direct(const spar_push_state *push, const spar_plan *plan);

/* By how many bytes slots should grow before a call of the plan, for its image; 0: by none. The same on all
 * ranks, as all is until spar_push_extend. */
int64_t spar_push_missing(const spar_push_state *push, const spar_plan *plan);

/* Counts a call of the plan; whether the ranks compare now whether their outputs lacked room. */
int spar_push_is_due(spar_push_state *push, const spar_plan *plan);

/* By how many bytes they should grow then, if a rank lacked room, or none did. */
int64_t spar_push_more(spar_push_state *push, int lacks);

/* Slots have so many bytes now: their begin is what they had, and if the call has none yet, its image takes
 * the first of the new ones. No more than before: they cannot grow. */
spar_status spar_push_extend(spar_push_state *push, int64_t bytes, const spar_plan *plan);

/* One exchange, into the call's stream, which has waited for the calls before. mark: receives the number when
 * it has ended, or NULL. */
spar_status spar_push_run(spar_push_state *push, const spar_call *call, int captured, uint32_t *mark,
                          uint32_t number);

/* Keeps what graphs use, for good. NULL: does nothing. */
void spar_push_close(spar_push_state *push);

#endif
