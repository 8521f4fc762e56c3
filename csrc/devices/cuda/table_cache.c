#include "devices/cuda/table_cache.h"

#include <stdlib.h>
#include <unistd.h>

enum { RETIRED = 1024 }; /* freed in batches, since the driver may wait for the device */

static int64_t allocated; /* atomic */

#define TRY_CU(name, ...) SPAR_DRIVER_TRY(c->driver, name, __VA_ARGS__)

spar_status spar_table_cache_open(spar_table_cache *c, const spar_driver *driver)
{
    c->driver = driver;
    c->owner = getpid();
    pthread_mutex_init(&c->lock, NULL);
    TRY_CU(StreamCreate, &c->stream, SPAR_CU_STREAM_NON_BLOCKING);
    return SPAR_OK;
}

void spar_table_cache_close(spar_table_cache *c)
{
    c->driver->StreamDestroy(c->stream);
}

int64_t spar_table_cache_allocated(void)
{
    return __atomic_load_n(&allocated, __ATOMIC_RELAXED);
}

static void free_memory(const spar_device_table *t)
{
    t->cache->driver->MemFree(t->memory);
    __atomic_sub_fetch(&allocated, t->bytes, __ATOMIC_RELAXED);
}

/* Calls no CUDA function and does not wait: any thread may free a plan. */
void spar_device_table_retire(spar_device_table *t)
{
    spar_table_cache *c = t->cache;
    if (c->owner != getpid()) /* a forked child has no device, and the lock may be held forever */
        return;
    spar_device_table **list = t->captured ? &c->captured : &c->retired;
    spar_block_table_free(&t->table);
    pthread_mutex_lock(&c->lock);
    t->next = *list;
    *list = t;
    c->nretired += !t->captured;
    pthread_mutex_unlock(&c->lock);
}

/* Called when the plan is freed. */
static void retire(spar_attached *attached)
{
    spar_device_table_retire((spar_device_table *)attached);
}

/* Whether no kernel reads the table any more. */
static int is_unused(const spar_device_table *t)
{
    const spar_driver *driver = t->cache->driver;
    int unused = driver->EventQuery(t->uploaded_event) == SPAR_CU_SUCCESS;
    for (int i = 0; i < SPAR_TABLE_USES && unused; i++)
        unused = !t->uses[i].event || driver->EventQuery(t->uses[i].event) == SPAR_CU_SUCCESS;
    return unused;
}

static void free_device_table(spar_device_table *t)
{
    for (int i = 0; i < SPAR_TABLE_USES; i++)
        if (t->uses[i].event)
            t->cache->driver->EventDestroy(t->uses[i].event);
    t->cache->driver->EventDestroy(t->uploaded_event);
    free_memory(t);
    free(t);
}

/* Frees retired tables if there are many. Waits for no stream: a wait for the device would invalidate any
 * capture. With the lock held. */
static void free_retired(spar_table_cache *c)
{
    if (c->nretired < RETIRED)
        return;
    for (spar_device_table **link = &c->retired; *link;) {
        spar_device_table *t = *link;
        if (!is_unused(t)) {
            link = &t->next;
            continue;
        }
        *link = t->next;
        c->nretired--;
        free_device_table(t);
    }
}

/* Uploads t->table. */
static spar_status try_upload(spar_table_cache *c, spar_device_table *t)
{
    size_t blocks = (size_t)t->table.nblocks * sizeof *t->table.blocks;
    size_t loops = (size_t)t->table.nloops * sizeof *t->table.loops;
    free_retired(c);
    t->bytes = blocks + loops ? (int64_t)(blocks + loops) : 1;
    TRY_CU(MemAlloc, &t->memory, (size_t)t->bytes);
    __atomic_add_fetch(&allocated, t->bytes, __ATOMIC_RELAXED);
    if (blocks)
        TRY_CU(MemcpyHtoDAsync, t->memory, t->table.blocks, blocks, c->stream);
    if (loops)
        TRY_CU(MemcpyHtoDAsync, t->memory + blocks, t->table.loops, loops, c->stream);
    TRY_CU(EventCreate, &t->uploaded_event, SPAR_CU_EVENT_DISABLE_TIMING);
    TRY_CU(EventRecord, t->uploaded_event, c->stream);
    return SPAR_OK;
}

static spar_status upload(spar_table_cache *c, spar_device_table *t)
{
    spar_status status = try_upload(c, t);
    if (status == SPAR_OK)
        return SPAR_OK;
    if (t->uploaded_event)
        c->driver->EventDestroy(t->uploaded_event);
    if (t->memory) {
        c->driver->StreamSynchronize(c->stream); /* it may still copy */
        free_memory(t);
    }
    return status;
}

static spar_device_table *find(const spar_table_cache *c, const spar_plan *plan)
{
    for (spar_attached *each = spar_plan_attached(plan); each; each = each->next)
        if (each->free == retire && ((spar_device_table *)each)->cache == c)
            return (spar_device_table *)each;
    return NULL;
}

static spar_status new_table(spar_table_cache *c, spar_device_table **made)
{
    *made = calloc(1, sizeof **made);
    if (!*made)
        return spar_fail(SPAR_NO_MEMORY, "no memory for the tables of a plan");
    (*made)->attached.free = retire;
    (*made)->cache = c;
    return SPAR_OK;
}

/* Frees a table that could not be made. */
static spar_status finish(spar_device_table *t, spar_status status, spar_device_table **made)
{
    if (status == SPAR_OK) {
        *made = t;
    } else {
        spar_block_table_free(&t->table);
        free(t);
    }
    return status;
}

/* With the lock held. */
static spar_status make(spar_table_cache *c, const spar_plan *plan, spar_device_table **made)
{
    spar_device_table *t;
    SPAR_TRY(new_table(c, &t));
    spar_status status = spar_block_table_build(&t->table, plan);
    if (status == SPAR_OK)
        status = upload(c, t);
    if (finish(t, status, made) == SPAR_OK)
        spar_plan_attach(plan, &t->attached);
    return status;
}

spar_status spar_table_cache_get(spar_table_cache *c, const spar_plan *plan, spar_device_table **found)
{
    spar_status status = SPAR_OK;
    if ((*found = find(c, plan)) != NULL)
        return SPAR_OK;
    pthread_mutex_lock(&c->lock);
    if (!(*found = find(c, plan)))
        status = make(c, plan, found);
    pthread_mutex_unlock(&c->lock);
    return status;
}

spar_status spar_device_table_make(spar_table_cache *c, const spar_block *blocks, int64_t count,
                                   const spar_dim *dims, spar_block_list *list, spar_device_table **made)
{
    spar_device_table *t;
    SPAR_TRY(new_table(c, &t));
    spar_status status = spar_block_table_add(&t->table, blocks, count, dims, list);
    if (status == SPAR_OK) {
        pthread_mutex_lock(&c->lock);
        status = upload(c, t);
        pthread_mutex_unlock(&c->lock);
    }
    return finish(t, status, made);
}

spar_status spar_device_table_await(spar_device_table *t, void *stream)
{
    const spar_table_cache *c = t->cache;
    int capturing;
    SPAR_TRY(spar_driver_capturing(stream, &capturing));
    if (capturing)
        __atomic_store_n(&t->captured, 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(&t->uploaded, __ATOMIC_ACQUIRE))
        return SPAR_OK;
    /* a capture cannot wait for an event outside it; the copy takes microseconds and waits for no kernel */
    CUresult result =
        capturing ? c->driver->EventSynchronize(t->uploaded_event) : c->driver->EventQuery(t->uploaded_event);
    if (result == SPAR_CU_SUCCESS)
        __atomic_store_n(&t->uploaded, 1, __ATOMIC_RELEASE);
    else if ((int)result == SPAR_CU_NOT_READY)
        TRY_CU(StreamWaitEvent, stream, t->uploaded_event, 0);
    else
        return spar_driver_check(result, "cuEventQuery");
    return SPAR_OK;
}

spar_status spar_device_table_used(spar_device_table *t, void *stream)
{
    spar_table_cache *c = t->cache;
    spar_table_use *use = NULL;
    spar_status status = SPAR_OK;
    if (__atomic_load_n(&t->captured, __ATOMIC_RELAXED)) /* it stays */
        return SPAR_OK;
    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < SPAR_TABLE_USES && !use; i++)
        if (!t->uses[i].event || t->uses[i].stream == stream)
            use = &t->uses[i];
    for (int i = 0; i < SPAR_TABLE_USES && !use; i++)
        if (c->driver->EventQuery(t->uses[i].event) == SPAR_CU_SUCCESS)
            use = &t->uses[i];
    if (!use) /* more streams than are remembered: it stays, too */
        __atomic_store_n(&t->captured, 1, __ATOMIC_RELAXED);
    else if (!use->event)
        status =
            spar_driver_check(c->driver->EventCreate(&use->event, SPAR_CU_EVENT_DISABLE_TIMING), "an event");
    if (use && use->event) {
        use->stream = stream;
        status = spar_driver_check(c->driver->EventRecord(use->event, stream), "an event");
    }
    pthread_mutex_unlock(&c->lock);
    return status;
}
