/* SPDX-License-Identifier: Apache-2.0 */
/* The slots of a group: this rank's own, and its peers', mapped from descriptors that ranks pass to each
 * other over the connections of their processes. */
#ifndef SPAR_PUSH_MEMORY_H
#define SPAR_PUSH_MEMORY_H

#include "control/ring.h"
#include "devices/cuda/kernels.h"
#include "transports/cuda/watchdog.h"
#include "transports/transport.h"

typedef struct spar_push_memory spar_push_memory;

/* What each rank tells all others in its setup result's token. */
typedef struct {
    int64_t limit;       /* bytes that its slot may have, without its words */
    int64_t granularity; /* of its device's memory */
    uint64_t topic;      /* of its messages (ipc/passing.h) */
} spar_push_terms;

/* Reads this rank's terms: SPAR_PUSH_SLOT, or a share of the memory of the device, which is entered. */
spar_status spar_push_terms_read(int ordinal, spar_push_terms *terms);

/* Maps the first bytes of all ranks' slots, with their words 0; all ranks call it with all terms [world].
 * `group` connects the ranks, and `ring` knows which failed, here and below. */
spar_status spar_push_memory_open(const spar_push_terms *terms, int world, int rank, int ordinal,
                                  spar_group *group, spar_ring *ring, const spar_deadline *deadline,
                                  spar_push_memory **memory);

/* The bytes of each slot without its words, how many they may become, and where the slots begin [world]. */
int64_t spar_push_memory_bytes(const spar_push_memory *memory);
int64_t spar_push_memory_limit(const spar_push_memory *memory);
char *const *spar_push_memory_slots(const spar_push_memory *memory);

/* The largest of the numbers that the ranks give in a call, which is watched and which all make. */
spar_status spar_push_memory_most(spar_push_memory *memory, spar_watchdog *watchdog, int64_t number,
                                  int64_t *most, const spar_deadline *deadline);

/* Lets the slots of all ranks grow by `bytes` at least, or of none, where one has no memory for it. All ranks
 * call it in the same call, with the same bytes. */
spar_status spar_push_memory_grow(spar_push_memory *memory, spar_watchdog *watchdog, int64_t bytes,
                                  const spar_deadline *deadline);

/* Unmaps the peers' slots; this rank's own goes with the second function, which may come later, on any
 * thread. The device is entered in both. */
void spar_push_memory_leave(spar_push_memory *memory);
void spar_push_memory_free(void *memory);

#endif
