/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/arena.h"

#include "base/cgroup.h"
#include "base/fork.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { ALIGNMENT = 128, GRANULE_BITS = 18 }; /* pages are counted in granules of 256 KiB */
static const int64_t GRANULE = (int64_t)1 << GRANULE_BITS;
static const int64_t GIVEN_BACK_AT_ONCE = (int64_t)64 << 20; /* bytes in one call: about 12 ms */

enum state { FREE, USED, QUARANTINED };

/* All blocks, free ones too, are one list in address order, without gaps. */
struct spar_memory {
    spar_memory *before, *after;
    int64_t offset, size;
    enum state state;
    uint32_t call; /* published in this call of `group`; meaningful where group is not NULL */
    const spar_quarantine *rules;
    void *group;
};

static struct {
    pthread_mutex_t lock;
    pid_t pid; /* the owner's */
    uint32_t owner;
    int fd;
    char *base;
    int64_t length;
    spar_memory *first;
    uint32_t *used; /* by granule: the second when it was last known in use; 0: its pages are not there */
    uint32_t idle_s, looked; /* how long until free pages go back; when that was last looked at */
    int64_t quarantined_blocks;
    spar_arena_stats stats;
} arena = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1, .idle_s = 60};

static uint32_t now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint32_t)now.tv_sec + 1; /* never 0 */
}

/* Requires the lock. */
static spar_status make(int64_t max_bytes, int local_ranks)
{
    int64_t most = ((int64_t)1 << 45) / local_ranks; /* so that all arenas fit into the address space */
    int64_t cap = max_bytes ? max_bytes : spar_usable_memory() / 2 / local_ranks;
    int64_t length = (cap < most ? cap : most) & ~(GRANULE - 1);
    if (length < GRANULE)
        return spar_fail(SPAR_TRANSPORT, "an arena of %lld bytes; expected at least %lld", (long long)cap,
                         (long long)GRANULE);
    int fd = (int)syscall(SYS_memfd_create, "spar", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
        fd = (int)syscall(SYS_memfd_create, "spar", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return spar_fail(SPAR_TRANSPORT, "memfd_create: %s", strerror(errno));
    char *base = MAP_FAILED;
    size_t whole = (size_t)length + SPAR_ARENA_TAIL;
    if (ftruncate(fd, (off_t)whole) == 0 && fallocate(fd, 0, length, SPAR_ARENA_TAIL) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        base = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    spar_memory *all = calloc(1, sizeof *all);
    uint32_t *used = calloc((size_t)(length / GRANULE), sizeof *used);
    if (base == MAP_FAILED || !all || !used) {
        spar_status status =
            spar_fail(SPAR_TRANSPORT, "an arena of %lld bytes: %s", (long long)length, strerror(errno));
        if (base != MAP_FAILED)
            munmap(base, whole);
        close(fd);
        free(all);
        free(used);
        return status;
    }
    madvise(base, whole, MADV_DONTDUMP); /* a core dump would contain all of it */
    all->size = length;
    arena.first = all;
    arena.used = used;
    arena.fd = fd;
    arena.base = base;
    arena.length = length;
    arena.pid = getpid();
    arena.owner = spar_generation();
    arena.stats = (spar_arena_stats){.cap = length};
    return SPAR_OK;
}

/* Keeps the mapping, since the child may use an inherited output, but makes it private: the child's writes
 * reach neither the parent nor its peers. Pages that the child has not written still show the parent's
 * writes. It is mapped elsewhere first: if the kernel refuses (strict overcommit), the shared mapping
 * stays. */
static void make_private_in_child(void)
{
    size_t whole = (size_t)arena.length + SPAR_ARENA_TAIL;
    if (arena.fd < 0)
        return;
    void *copy = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, arena.fd, 0);
    if (copy != MAP_FAILED) {
        madvise(copy, whole, MADV_DONTDUMP);
        mremap(copy, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED, arena.base);
    }
    close(arena.fd);
    arena.fd = -1;
}

spar_status spar_arena_open(int64_t max_bytes, int local_ranks)
{
    spar_status status = SPAR_OK;
    pthread_mutex_lock(&arena.lock);
    if (!arena.base)
        status = make(max_bytes, local_ranks < 1 ? 1 : local_ranks);
    else if (!spar_arena_is_own())
        status = spar_fail(SPAR_TRANSPORT, "this is a forked child; exchange in its parent, process %d",
                           (int)arena.pid);
    pthread_mutex_unlock(&arena.lock);
    return status;
}

int spar_arena_fd(void)
{
    return arena.fd;
}

int64_t spar_arena_length(void)
{
    return arena.length;
}

char *spar_arena_base(void)
{
    return arena.base;
}

int spar_arena_has(const void *address)
{
    uintptr_t at = (uintptr_t)address, base = (uintptr_t)arena.base;
    return base && at >= base && at - base < (uintptr_t)arena.length;
}

int spar_arena_is_own(void)
{
    return arena.owner == spar_generation();
}

/* Faults the pages of [offset, offset + size) in, and marks them as used. Requires the lock. */
static spar_status populate(int64_t offset, int64_t size)
{
    int64_t last = (offset + size - 1) >> GRANULE_BITS;
    uint32_t now = now_s();
    for (int64_t i = offset >> GRANULE_BITS; i <= last; i++) {
        int64_t end = i;
        while (end <= last && !arena.used[end])
            end++;
        if (end == i) {
            arena.used[i] = now;
            continue;
        }
        char *start = arena.base + (i << GRANULE_BITS);
        size_t bytes = (size_t)(end - i) << GRANULE_BITS;
        if (madvise(start, bytes, MADV_POPULATE_WRITE) != 0) {
            if (errno != EINVAL)
                return spar_fail(SPAR_NO_MEMORY, "no memory for %zu bytes of the arena: %s", bytes,
                                 strerror(errno));
            for (size_t at = 0; at < bytes; at += 4096) /* before Linux 5.14; the pages are unused */
                ((volatile char *)start)[at] = 0;
        }
        for (arena.stats.reserved += (int64_t)bytes; i < end; i++)
            arena.used[i] = now;
        i--;
    }
    return SPAR_OK;
}

/* Returns pages of free blocks that were last used before `before` to the system, at most `most` bytes.
 * Requires the lock. */
static int64_t give_back(uint32_t before, int64_t most)
{
    int64_t returned = 0;
    for (spar_memory *block = arena.first; block && returned < most; block = block->after) {
        if (block->state != FREE)
            continue;
        int64_t from = (block->offset + GRANULE - 1) >> GRANULE_BITS;
        int64_t to = (block->offset + block->size) >> GRANULE_BITS;
        for (int64_t i = from; i < to && returned < most; i++) {
            int64_t end = i, limit = i + ((most - returned) >> GRANULE_BITS);
            while (end < to && end < limit && arena.used[end] && arena.used[end] < before)
                end++;
            if (end == i || fallocate(arena.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, i << GRANULE_BITS,
                                      (end - i) << GRANULE_BITS) != 0)
                continue;
            memset(arena.used + i, 0, (size_t)(end - i) * sizeof *arena.used);
            returned += (end - i) << GRANULE_BITS;
            i = end;
        }
    }
    arena.stats.reserved -= returned;
    arena.stats.returned += returned;
    return returned;
}

/* Called inside allocations, at most once a second: there is no thread for it. Requires the lock. */
static void give_back_idle(void)
{
    uint32_t now = now_s();
    if (now == arena.looked || now <= arena.idle_s)
        return;
    arena.looked = now;
    give_back(now - arena.idle_s, GIVEN_BACK_AT_ONCE);
}

void spar_arena_idle(uint32_t seconds)
{
    pthread_mutex_lock(&arena.lock);
    arena.idle_s = seconds;
    pthread_mutex_unlock(&arena.lock);
}

/* Merges a block with the free block behind it. Requires the lock. */
static void merge_with_next(spar_memory *block)
{
    spar_memory *next = block->after;
    if (!next || next->state != FREE)
        return;
    block->size += next->size;
    block->after = next->after;
    if (next->after)
        next->after->before = block;
    free(next);
}

static void make_free(spar_memory *block)
{
    uint32_t now = now_s();
    for (int64_t i = block->offset >> GRANULE_BITS; i <= (block->offset + block->size - 1) >> GRANULE_BITS;
         i++)
        arena.used[i] = now;
    block->state = FREE;
    block->group = NULL;
    merge_with_next(block);
    if (block->before && block->before->state == FREE)
        merge_with_next(block->before);
}

/* Frees quarantined blocks that are settled. Requires the lock. */
static void release_settled(void)
{
    for (spar_memory *block = arena.first; block && arena.quarantined_blocks; block = block->after) {
        if (block->state != QUARANTINED || !block->rules->settled(block->group, block->call))
            continue;
        block->rules->forget(block->group);
        arena.quarantined_blocks--;
        arena.stats.quarantined -= block->size;
        spar_memory *before = block->before;
        make_free(block);
        if (before && before->state == FREE)
            block = before;
    }
}

/* Leaves `size` bytes in a free block, and makes another of the rest. Requires the lock. */
static spar_status split(spar_memory *block, int64_t size)
{
    if (block->size == size)
        return SPAR_OK;
    spar_memory *rest = malloc(sizeof *rest);
    if (!rest)
        return spar_fail(SPAR_NO_MEMORY, "no memory for the arena's list");
    *rest = (spar_memory){
        .before = block, .after = block->after, .offset = block->offset + size, .size = block->size - size};
    if (rest->after)
        rest->after->before = rest;
    block->after = rest;
    block->size = size;
    return SPAR_OK;
}

spar_status spar_arena_take(int64_t bytes, spar_memory **result)
{
    if (bytes > arena.length)
        return spar_fail(SPAR_NO_MEMORY, "%lld bytes are more than the arena's %lld (SPAR_ARENA_MAX)",
                         (long long)bytes, (long long)arena.length);
    int64_t size = bytes < 1 ? ALIGNMENT : (bytes + ALIGNMENT - 1) & ~(int64_t)(ALIGNMENT - 1);
    spar_status status = SPAR_OK;
    pthread_mutex_lock(&arena.lock);
    if (arena.quarantined_blocks)
        release_settled();
    spar_memory *block = arena.first; /* the lowest that fits: its pages are the warmest */
    while (block && (block->state != FREE || block->size < size))
        block = block->after;
    if (!block)
        status =
            spar_fail(SPAR_NO_MEMORY,
                      "the arena has no %lld bytes left of %lld: %lld in use, %lld quarantined until a peer "
                      "finishes (SPAR_ARENA_MAX)",
                      (long long)size, (long long)arena.length, (long long)arena.stats.allocated,
                      (long long)arena.stats.quarantined);
    else
        status = populate(block->offset, size);
    if (status == SPAR_OK)
        status = split(block, size);
    if (status == SPAR_OK) {
        block->state = USED;
        give_back_idle();
        arena.stats.allocated += size;
        if (arena.stats.allocated > arena.stats.peak)
            arena.stats.peak = arena.stats.allocated;
        *result = block;
    }
    pthread_mutex_unlock(&arena.lock);
    return status;
}

spar_memory *spar_memory_at(const void *address, int64_t bytes)
{
    int64_t offset = (int64_t)((uintptr_t)address - (uintptr_t)arena.base);
    if (bytes < 1 || !spar_arena_has(address))
        return NULL;
    pthread_mutex_lock(&arena.lock);
    spar_memory *block = arena.first;
    while (block && block->offset + block->size <= offset)
        block = block->after;
    int whole =
        block && block->state == USED && !block->group && bytes <= block->offset + block->size - offset;
    pthread_mutex_unlock(&arena.lock);
    return whole ? block : NULL;
}

int64_t spar_memory_offset(const spar_memory *block)
{
    return block->offset;
}

void *spar_memory_address(const spar_memory *block)
{
    return arena.base + block->offset;
}

void spar_memory_publish(spar_memory *block, const spar_quarantine *rules, void *group, uint32_t call)
{
    block->rules = rules;
    block->group = group;
    block->call = call;
}

void spar_memory_free(spar_memory *block)
{
    if (!spar_arena_is_own())
        return;
    void *group = block->group;
    int waits = group && !block->rules->settled(group, block->call);
    const spar_quarantine *rules = block->rules;
    pthread_mutex_lock(&arena.lock);
    arena.stats.allocated -= block->size;
    if (waits) {
        block->state = QUARANTINED;
        arena.quarantined_blocks++;
        arena.stats.quarantined += block->size;
    } else {
        make_free(block);
    }
    pthread_mutex_unlock(&arena.lock);
    if (group && !waits)
        rules->forget(group);
}

void spar_arena_release(void)
{
    pthread_mutex_lock(&arena.lock);
    release_settled();
    pthread_mutex_unlock(&arena.lock);
}

int64_t spar_arena_trim(void)
{
    if (!spar_arena_is_own())
        return 0;
    pthread_mutex_lock(&arena.lock);
    release_settled();
    int64_t returned = give_back(UINT32_MAX, INT64_MAX);
    pthread_mutex_unlock(&arena.lock);
    return returned;
}

void spar_arena_read_stats(spar_arena_stats *stats)
{
    pthread_mutex_lock(&arena.lock);
    *stats = arena.stats;
    pthread_mutex_unlock(&arena.lock);
}

void spar_arena_fork(spar_fork_stage stage)
{
    if (stage == SPAR_FORK_PREPARE)
        pthread_mutex_lock(&arena.lock);
    if (stage == SPAR_FORK_CHILD)
        make_private_in_child();
    if (stage != SPAR_FORK_PREPARE)
        pthread_mutex_unlock(&arena.lock);
}
