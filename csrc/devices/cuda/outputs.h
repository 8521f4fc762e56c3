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

/* Hands out memory of the device, which must stay mapped while spar_outputs_count says that it is in use. */
spar_status spar_outputs_open(void *memory, int64_t bytes, spar_outputs **outputs);

/* Whether all `bytes` from `address` on lie in it. */
int spar_outputs_have(const spar_outputs *outputs, const void *address, int64_t bytes);

/* Whether a call should take its outputs from it. After it had no room, some calls should not: torch keeps
 * for the pool what it was given instead. */
int spar_outputs_serve(spar_outputs *outputs);

/* The memory from which this thread takes segments; NULL: none. */
void spar_outputs_enter(spar_outputs *outputs);

/* The segments in use of those that begin at `address` or in the `bytes` behind it. */
int spar_outputs_count(const void *address, int64_t bytes);

/* Hands out no more. NULL: does nothing. */
void spar_outputs_close(spar_outputs *outputs);

/* As torch.cuda.memory.CUDAPluggableAllocator expects them; any thread. Where there is no room, the first one
 * returns other memory of the device: at an error torch would empty all of its caches. */
void *spar_outputs_allocate(size_t bytes, int ordinal, void *stream);
void spar_outputs_free(void *segment, size_t bytes, int ordinal, void *stream);

#endif
