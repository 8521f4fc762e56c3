/* SPDX-License-Identifier: Apache-2.0 */
/* The arena: this process's part of the memory that the ranks of one host share.
 *
 * One sparse memfd per process, mapped once at full length by its owner and by every peer: it never grows,
 * and nothing in it moves. Processes exchange offsets, never pointers. Outputs and mailboxes are blocks of
 * it. Blocks may be freed on any thread, without Python, also after the interpreter has ended; nothing is
 * unmapped at exit. */
#ifndef SPAR_ARENA_H
#define SPAR_ARENA_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

typedef struct spar_memory spar_memory; /* a block */

/* When a freed block whose offset a call published may be reused. `settled` is called without the caller's
 * locks; `forget` drops the reference that the block held. */
typedef struct {
    int (*settled)(void *call_group, uint32_t call);
    void (*forget)(void *call_group);
} spar_quarantine;

typedef struct {
    int64_t cap, reserved, allocated, peak, quarantined, returned; /* bytes; returned: over all time */
} spar_arena_stats;

/* Creates the arena, once per process. `max_bytes` 0: half of the memory of this host or cgroup, divided by
 * `local_ranks`. SPAR_TRANSPORT has the reason of a failure. */
spar_status spar_arena_open(int64_t max_bytes, int local_ranks);

/* Bytes mapped behind the arena, always present, for last_call.c. */
enum { SPAR_ARENA_TAIL = 4096 };

/* The memfd, the arena's length and its address in this process; after a successful open. */
int spar_arena_fd(void);
int64_t spar_arena_length(void);
char *spar_arena_base(void);

/* Allocates a block of at least `bytes` and faults its pages in; SPAR_NO_MEMORY over the cap. */
spar_status spar_arena_take(int64_t bytes, spar_memory **block);

/* The block in use that holds `bytes` at `address`, of which no slow peer of an earlier call may still write
 * any; NULL: none. The caller keeps it from being freed. */
spar_memory *spar_memory_at(const void *address, int64_t bytes);

/* Its offset in the arena, and its address. */
int64_t spar_memory_offset(const spar_memory *block);
void *spar_memory_address(const spar_memory *block);

/* Call before publishing the offset: once freed, the block is not reused until `rules->settled(group,
 * call)`. */
void spar_memory_publish(spar_memory *block, const spar_quarantine *rules, void *group, uint32_t call);

/* Frees a block; it is quarantined while a peer may write to it. Does nothing in a forked child. */
void spar_memory_free(spar_memory *block);

/* Frees quarantined blocks that no peer can write to any more, as spar_arena_take does. */
void spar_arena_release(void);

/* Returns free pages to the system; returns the number of bytes. spar_arena_take returns pages that were free
 * for a minute. */
int64_t spar_arena_trim(void);

/* Sets that time, for tests. */
void spar_arena_idle(uint32_t seconds);

void spar_arena_read_stats(spar_arena_stats *stats);

/* Whether the address lies in the arena; in a forked child, in its parent's. */
int spar_arena_has(const void *address);

/* Whether this process made the arena; false in a forked child. */
int spar_arena_is_own(void);

#endif
