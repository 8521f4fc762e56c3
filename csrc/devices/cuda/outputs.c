/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cuda/outputs.h"

#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"
#include "base/fork.h"

#include <pthread.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    ALIGNMENT = 512, /* what torch hands out has it */
    SKIPPED = 64,    /* calls, after there was no room */
};

typedef struct segment {
    struct segment *next; /* the next one in memory */
    char *from, *to;
} segment;

struct spar_outputs {
    spar_outputs *next;
    char *from, *to;
    segment *segments, *kept;   /* kept: the one that the group has */
    int closed, skipped, lacks; /* skipped: calls that are to be */
    void (*release)(void *context);
    void *context;
};

static struct {
    pthread_mutex_t lock;
    spar_outputs *first;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local spar_outputs *entered;

spar_status spar_outputs_open(void *memory, void (*release)(void *context), void *context,
                              spar_outputs **outputs)
{
    spar_outputs *o = calloc(1, sizeof *o);
    if (!o)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group's outputs");
    o->from = o->to = memory;
    o->release = release;
    o->context = context;
    pthread_mutex_lock(&all.lock);
    o->next = all.first;
    all.first = o;
    pthread_mutex_unlock(&all.lock);
    *outputs = o;
    return SPAR_OK;
}

void spar_outputs_extend(spar_outputs *o, int64_t bytes)
{
    pthread_mutex_lock(&all.lock);
    o->to = o->from + bytes;
    o->skipped = o->lacks = 0;
    pthread_mutex_unlock(&all.lock);
}

int spar_outputs_have(const spar_outputs *o, const void *address, int64_t bytes)
{
    const char *at = address;
    return at >= o->from && at <= o->to && bytes <= o->to - at;
}

int spar_outputs_serve(spar_outputs *o)
{
    pthread_mutex_lock(&all.lock);
    int serves = o->skipped == 0;
    o->skipped -= !serves;
    pthread_mutex_unlock(&all.lock);
    return serves;
}

int spar_outputs_lacked(spar_outputs *o)
{
    pthread_mutex_lock(&all.lock);
    int lacked = o->lacks;
    o->lacks = 0;
    pthread_mutex_unlock(&all.lock);
    return lacked;
}

void spar_outputs_enter(spar_outputs *outputs)
{
    entered = outputs;
}

int spar_outputs_any_has(const void *address)
{
    int has = 0;
    pthread_mutex_lock(&all.lock);
    for (const spar_outputs *o = all.first; o; o = o->next)
        has |= spar_outputs_have(o, address, 1);
    pthread_mutex_unlock(&all.lock);
    return has;
}

void spar_outputs_stats(int64_t *bytes, int64_t *used)
{
    *bytes = *used = 0;
    pthread_mutex_lock(&all.lock);
    for (const spar_outputs *o = all.first; o; o = o->next) {
        *bytes += o->to - o->from;
        for (const segment *s = o->segments; s; s = s->next)
            *used += s == o->kept ? 0 : s->to - s->from;
    }
    pthread_mutex_unlock(&all.lock);
}

/* Takes the segment out of the list; a NULL link: does nothing. Requires the lock. */
static void remove_segment(segment **link)
{
    segment *found = link ? *link : NULL;
    if (found)
        *link = found->next;
    free(found);
}

/* Finds what is closed and has no segment, and takes it from the list of all; NULL: nothing is. Requires the
 * lock. */
static spar_outputs *take_empty(void)
{
    spar_outputs **link = &all.first;
    while (*link && !((*link)->closed && !(*link)->segments))
        link = &(*link)->next;
    spar_outputs *found = *link;
    if (found)
        *link = found->next;
    return found;
}

/* Frees what is closed and has no segment; the device is entered. */
static void release_empty(void)
{
    for (;;) {
        pthread_mutex_lock(&all.lock);
        spar_outputs *o = take_empty();
        pthread_mutex_unlock(&all.lock);
        if (!o)
            return;
        o->release(o->context);
        free(o);
    }
}

/* The link to the group's own segment, or NULL. Requires the lock. */
static segment **link_to_kept(spar_outputs *o)
{
    segment **link = &o->segments;
    while (*link && *link != o->kept)
        link = &(*link)->next;
    return *link ? link : NULL;
}

void spar_outputs_close(spar_outputs *o)
{
    if (!o)
        return;
    pthread_mutex_lock(&all.lock);
    if (o->kept)
        remove_segment(link_to_kept(o));
    o->kept = NULL;
    o->closed = 1;
    pthread_mutex_unlock(&all.lock);
    release_empty();
}

/* Adds a segment before *link, or none if there is no memory for it. Requires the lock. */
static segment *add_segment(segment **link, char *from, char *to)
{
    segment *made = malloc(sizeof *made);
    if (made) {
        *made = (segment){*link, from, to};
        *link = made;
    }
    return made;
}

static char *aligned(char *address)
{
    return (char *)(((uintptr_t)address + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

/* Takes the first gap that is large enough; NULL: there is none. Requires the lock. */
static segment *take(spar_outputs *o, size_t bytes)
{
    segment **link = &o->segments;
    char *from = aligned(o->from);
    int64_t size = (int64_t)(bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    for (; *link && (*link)->from - from < size; link = &(*link)->next)
        from = aligned((*link)->to);
    return (*link ? (*link)->from : o->to) - from < size ? NULL : add_segment(link, from, from + size);
}

spar_status spar_outputs_keep(spar_outputs *o, int64_t at, int64_t bytes)
{
    char *from = o->from + at, *to = from + bytes;
    segment **link = &o->segments, *made = NULL;
    pthread_mutex_lock(&all.lock);
    while (*link && (*link)->to <= from)
        link = &(*link)->next;
    if (to <= o->to && (!*link || (*link)->from >= to))
        made = add_segment(link, from, to);
    if (made && o->kept)
        remove_segment(link_to_kept(o));
    o->kept = made ? made : o->kept;
    pthread_mutex_unlock(&all.lock);
    return made ? SPAR_OK
                : spar_fail(SPAR_INTERNAL, "%lld bytes at %lld of a slot are not free", (long long)bytes,
                            (long long)at);
}

EXPORT void *spar_outputs_allocate(size_t bytes, int ordinal, void *stream)
{
    CUdeviceptr other = 0;
    spar_entered before;
    (void)stream;
    pthread_mutex_lock(&all.lock);
    const segment *taken = entered && !entered->closed ? take(entered, bytes) : NULL;
    if (entered && !taken) {
        entered->skipped = SKIPPED;
        entered->lacks = 1;
    }
    void *address = taken ? taken->from : NULL;
    pthread_mutex_unlock(&all.lock);
    if (address || spar_cuda_enter(ordinal, &before) != SPAR_OK)
        return address;
    if (spar_cu.MemAlloc(&other, bytes) != SPAR_CU_SUCCESS)
        other = 0;
    spar_cuda_leave(&before);
    return (void *)(uintptr_t)other;
}

/* The link to the segment that begins there, or NULL. Requires the lock. */
static segment **find(const void *address)
{
    for (spar_outputs *o = all.first; o; o = o->next)
        for (segment **link = &o->segments; *link; link = &(*link)->next)
            if ((*link)->from == (const char *)address && *link != o->kept)
                return link;
    return NULL;
}

static void give_back(const void *address)
{
    pthread_mutex_lock(&all.lock);
    remove_segment(find(address));
    pthread_mutex_unlock(&all.lock);
    release_empty();
}

/* The streams may still use a segment, and its next user may have another one: like the driver's own
 * function, this waits for the device. A segment that it cannot wait for is not used again. */
EXPORT void spar_outputs_free(void *address, size_t bytes, int ordinal, void *stream)
{
    spar_entered before;
    (void)bytes;
    (void)stream;
    if (spar_cuda_enter(ordinal, &before) != SPAR_OK)
        return;
    pthread_mutex_lock(&all.lock);
    int is_segment = find(address) != NULL;
    pthread_mutex_unlock(&all.lock);
    if (!is_segment)
        spar_cu.MemFree((CUdeviceptr)(uintptr_t)address);
    else if (spar_cu.CtxSynchronize() == SPAR_CU_SUCCESS)
        give_back(address);
    spar_cuda_leave(&before);
}

void spar_outputs_fork(spar_fork_stage stage)
{
    if (stage == SPAR_FORK_PREPARE)
        pthread_mutex_lock(&all.lock);
    else
        pthread_mutex_unlock(&all.lock);
}
