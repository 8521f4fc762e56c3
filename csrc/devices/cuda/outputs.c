/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cuda/outputs.h"

#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"

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
    segment *segments;
    int closed, skipped; /* skipped: calls that are to be */
};

static struct {
    pthread_mutex_t lock;
    spar_outputs *first;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local spar_outputs *entered;

spar_status spar_outputs_open(void *memory, int64_t bytes, spar_outputs **outputs)
{
    uintptr_t from = ((uintptr_t)memory + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    uintptr_t to = (uintptr_t)memory + (uintptr_t)bytes;
    spar_outputs *o = calloc(1, sizeof *o);
    if (!o)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group's outputs");
    o->from = (char *)from;
    o->to = (char *)(to > from ? to : from);
    pthread_mutex_lock(&all.lock);
    o->next = all.first;
    all.first = o;
    pthread_mutex_unlock(&all.lock);
    *outputs = o;
    return SPAR_OK;
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

void spar_outputs_enter(spar_outputs *outputs)
{
    entered = outputs;
}

int spar_outputs_count(const void *address, int64_t bytes)
{
    int count = 0;
    pthread_mutex_lock(&all.lock);
    for (const spar_outputs *o = all.first; o; o = o->next)
        for (const segment *s = o->segments; s; s = s->next)
            count += s->from >= (const char *)address && s->from - (const char *)address < bytes;
    pthread_mutex_unlock(&all.lock);
    return count;
}

/* Forgets what is closed, once it has no segment. Requires the lock. */
static void drop_empty(void)
{
    for (spar_outputs **link = &all.first; *link;) {
        spar_outputs *o = *link;
        if (o->closed && !o->segments) {
            *link = o->next;
            free(o);
        } else {
            link = &o->next;
        }
    }
}

void spar_outputs_close(spar_outputs *o)
{
    pthread_mutex_lock(&all.lock);
    if (o)
        o->closed = 1;
    drop_empty();
    pthread_mutex_unlock(&all.lock);
}

/* Takes the first gap that is large enough; NULL: there is none. */
static void *take(spar_outputs *o, size_t bytes)
{
    segment **link = &o->segments, *made = malloc(sizeof *made);
    char *from = o->from;
    size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    for (; *link && (size_t)((*link)->from - from) < size; link = &(*link)->next)
        from = (*link)->to;
    if (!made || (size_t)((*link ? (*link)->from : o->to) - from) < size) {
        free(made);
        return NULL;
    }
    *made = (segment){*link, from, from + size};
    *link = made;
    return from;
}

EXPORT void *spar_outputs_allocate(size_t bytes, int ordinal, void *stream)
{
    CUdeviceptr other = 0;
    spar_entered before;
    (void)stream;
    pthread_mutex_lock(&all.lock);
    void *segment = entered && !entered->closed ? take(entered, bytes) : NULL;
    if (entered && !segment)
        entered->skipped = SKIPPED;
    pthread_mutex_unlock(&all.lock);
    if (segment || spar_cuda_enter(ordinal, &before) != SPAR_OK)
        return segment;
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
            if ((*link)->from == (const char *)address)
                return link;
    return NULL;
}

static void give_back(const void *address)
{
    pthread_mutex_lock(&all.lock);
    segment **link = find(address), *found = link ? *link : NULL;
    if (found)
        *link = found->next;
    free(found);
    drop_empty();
    pthread_mutex_unlock(&all.lock);
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
