/* The arena: this process's part of the memory that ranks of one host share.
 *
 * One sparse memfd per process, mapped once at full length by its owner and by every peer, so that it never
 * grows and nothing in it ever moves; whatever points into it across processes is an offset. Outputs and
 * mailboxes are blocks of it. Blocks may be freed on any thread, without Python, also when the interpreter
 * is gone; nothing is unmapped at exit. */
#ifndef SPAR_ARENA_H
#define SPAR_ARENA_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

typedef struct spar_memory spar_memory; /* a block */

/* Whether the memory that a call published may be used again: asked, with no lock of the caller's held,
 * when a block is free. `forget` pays back the reference that the block held. */
typedef struct {
    int (*settled)(void *call_group, uint32_t call);
    void (*forget)(void *call_group);
} spar_quarantine;

typedef struct {
    int64_t cap, reserved, allocated, peak, quarantined,
        returned; /* bytes; returned: over all time */
} spar_arena_stats;

/* Makes the arena, once per process. `max_bytes` 0: half of the memory of this host or cgroup, divided by
 * `local_ranks`. SPAR_TRANSPORT tells why it cannot be had. */
spar_status spar_arena_open(int64_t max_bytes, int local_ranks);

/* Bytes behind the arena, of no block: mapped with it, and present. For whereabouts.c. */
enum { SPAR_ARENA_TAIL = 4096 };

/* The memfd, the arena's length, and where this process sees it; after a successful open. */
int spar_arena_fd(void);
int64_t spar_arena_length(void);
char *spar_arena_base(void);

/* A block of at least `bytes`, its pages present; SPAR_NO_MEMORY over the cap. */
spar_status spar_arena_take(int64_t bytes, spar_memory **block);

/* Where it lies from the arena's start. */
int64_t spar_memory_offset(const spar_memory *block);
void *spar_memory_address(const spar_memory *block);

/* Before its offset is published: until `rules->settled(group, call)` the block will not be used again, even
 * when it is freed. */
void spar_memory_publish(spar_memory *block, const spar_quarantine *rules, void *group,
                         uint32_t call);

/* The call is over on all ranks: the block is the owner's alone again. */
void spar_memory_settle(spar_memory *block);

/* Gives a block back; it is quarantined as long as a peer may write to it. Does nothing in a forked child. */
void spar_memory_free(spar_memory *block);

/* Frees quarantined blocks that no peer may write to any more, as spar_arena_take does. */
void spar_arena_release(void);

/* Gives free pages back to the system; returns how many bytes. Those that were free for a minute go back by
 * themselves, inside later calls to spar_arena_take. */
int64_t spar_arena_trim(void);

/* How long, instead of a minute: for tests. */
void spar_arena_idle(uint32_t seconds);

void spar_arena_read_stats(spar_arena_stats *stats);

/* Whether the address lies in the arena; in a forked child, in that of its parent. */
int spar_arena_has(const void *address);

/* Whether this process made the arena, and is not a forked child of the one that did. */
int spar_arena_is_own(void);

#endif
