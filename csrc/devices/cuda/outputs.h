/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that peers have mapped, as the memory of outputs: torch's caching allocator takes segments of it by
 * the two functions at the end, the allocator of a torch.cuda.MemPool. So lifetimes, streams and events stay
 * torch's. */
#ifndef SPAR_OUTPUTS_H
#define SPAR_OUTPUTS_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

typedef struct spar_outputs spar_outputs;

/* Hands out memory of the device from `memory` on, none at first. release(context) frees it, with the device
 * entered: after the close, when the last segment has been freed. */
spar_status spar_outputs_open(void *memory, void (*release)(void *context), void *context,
                              spar_outputs **outputs);

/* It has so many bytes now, no fewer than before. */
void spar_outputs_extend(spar_outputs *outputs, int64_t bytes);

/* Keeps bytes that no segment has for the group itself, from `from` on, in place of those that it kept
 * before. */
spar_status spar_outputs_keep(spar_outputs *outputs, int64_t from, int64_t bytes);

/* Whether all `bytes` from `address` on lie in it. */
int spar_outputs_have(const spar_outputs *outputs, const void *address, int64_t bytes);

/* Whether a call should take its outputs from it. After it had no room, some calls should not: torch keeps
 * for the pool what it was given instead. */
int spar_outputs_serve(spar_outputs *outputs);

/* Whether it had no room since the last time. */
int spar_outputs_lacked(spar_outputs *outputs);

/* The memory from which this thread takes segments; NULL: none. */
void spar_outputs_enter(spar_outputs *outputs);

/* Whether the address lies in one of them, of any group. */
int spar_outputs_any_has(const void *address);

/* The bytes that all of them in this process have, and those of segments in use. */
void spar_outputs_stats(int64_t *bytes, int64_t *used);

/* Hands out no more; the device is entered. NULL: does nothing. */
void spar_outputs_close(spar_outputs *outputs);

/* As torch.cuda.memory.CUDAPluggableAllocator expects them; any thread. Where there is no room, the first one
 * returns other memory of the device: at an error torch would empty all of its caches. */
void *spar_outputs_allocate(size_t bytes, int ordinal, void *stream);
void spar_outputs_free(void *segment, size_t bytes, int ordinal, void *stream);

#endif
