#include "devices/cuda/table_cache.h"

#include <stdlib.h>
#include <unistd.h>

enum { RETIRED = 1024 }; /* tables of plans that are gone are given back together: that waits */

static int64_t allocated; /* atomic */

#define TRY_CU(name, ...) SPAR_DRIVER_TRY(s->driver, name, __VA_ARGS__)

spar_status spar_uploads_open(spar_uploads *s, const spar_driver *driver)
{
    s->driver = driver;
    s->owner = getpid();
    pthread_mutex_init(&s->lock, NULL);
    TRY_CU(StreamCreate, &s->stream, SPAR_CU_STREAM_NON_BLOCKING);
    return SPAR_OK;
}

void spar_uploads_close(spar_uploads *s)
{
    s->driver->StreamDestroy(s->stream);
}

int64_t spar_uploads_allocated(void)
{
    return __atomic_load_n(&allocated, __ATOMIC_RELAXED);
}

static void free_memory(const spar_upload *u)
{
    u->uploads->driver->MemFree(u->memory);
    __atomic_sub_fetch(&allocated, u->bytes, __ATOMIC_RELAXED);
}

/* Neither CUDA nor a wait here: any thread frees plans. */
void spar_upload_retire(spar_upload *u)
{
    spar_uploads *s = u->uploads;
    if (s->owner !=
        getpid()) /* a forked child, with no device, and perhaps with a lock that nobody holds */
        return;
    spar_upload **list = u->captured ? &s->captured : &s->retired;
    spar_table_free(&u->table);
    pthread_mutex_lock(&s->lock);
    u->next = *list;
    *list = u;
    s->nretired += !u->captured;
    pthread_mutex_unlock(&s->lock);
}

/* The plan is gone. */
static void retire(spar_attached *attached)
{
    spar_upload_retire((spar_upload *)attached);
}

/* Gives retired tables back, when there are many. With the lock held. */
static void give_back(spar_uploads *s)
{
    if (s->nretired < RETIRED || s->driver->CtxSynchronize() != SPAR_CU_SUCCESS)
        return; /* somebody captures: later */
    while (s->retired) {
        spar_upload *u = s->retired;
        s->retired = u->next;
        free_memory(u);
        s->driver->EventDestroy(u->arrives);
        free(u);
    }
    s->nretired = 0;
}

/* Fills u->memory from u->table. In this thread captures allow what does not concern their streams. */
static spar_status upload_relaxed(spar_uploads *s, spar_upload *u)
{
    size_t blocks = (size_t)u->table.nblocks * sizeof *u->table.blocks;
    size_t loops = (size_t)u->table.nloops * sizeof *u->table.loops;
    give_back(s);
    u->bytes = blocks + loops ? (int64_t)(blocks + loops) : 1;
    TRY_CU(MemAlloc, &u->memory, (size_t)u->bytes);
    __atomic_add_fetch(&allocated, u->bytes, __ATOMIC_RELAXED);
    if (blocks)
        TRY_CU(MemcpyHtoDAsync, u->memory, u->table.blocks, blocks, s->stream);
    if (loops)
        TRY_CU(MemcpyHtoDAsync, u->memory + blocks, u->table.loops, loops, s->stream);
    TRY_CU(EventCreate, &u->arrives, SPAR_CU_EVENT_DISABLE_TIMING);
    TRY_CU(EventRecord, u->arrives, s->stream);
    return SPAR_OK;
}

static spar_status upload(spar_uploads *s, spar_upload *u)
{
    CUstreamCaptureMode mode = SPAR_CU_CAPTURE_RELAXED;
    TRY_CU(ThreadExchangeStreamCaptureMode, &mode);
    spar_status status = upload_relaxed(s, u);
    s->driver->ThreadExchangeStreamCaptureMode(&mode);
    if (status == SPAR_OK)
        return SPAR_OK;
    if (u->arrives)
        s->driver->EventDestroy(u->arrives);
    if (u->memory)
        free_memory(u); /* waits, if a copy is under way */
    return status;
}

static spar_upload *find(const spar_uploads *s, const spar_plan *plan)
{
    for (spar_attached *each = spar_plan_attached(plan); each; each = each->next)
        if (each->free == retire && ((spar_upload *)each)->uploads == s)
            return (spar_upload *)each;
    return NULL;
}

static spar_status new_upload(spar_uploads *s, spar_upload **made)
{
    *made = calloc(1, sizeof **made);
    if (!*made)
        return spar_fail(SPAR_NO_MEMORY, "no memory for the tables of a plan");
    (*made)->attached.free = retire;
    (*made)->uploads = s;
    return SPAR_OK;
}

/* Ends what could not be made, too. */
static spar_status finish(spar_upload *u, spar_status status, spar_upload **made)
{
    if (status == SPAR_OK) {
        *made = u;
    } else {
        spar_table_free(&u->table);
        free(u);
    }
    return status;
}

/* With the lock held. */
static spar_status make(spar_uploads *s, const spar_plan *plan, spar_upload **made)
{
    spar_upload *u;
    SPAR_TRY(new_upload(s, &u));
    spar_status status = spar_table_build(&u->table, plan);
    if (status == SPAR_OK)
        status = upload(s, u);
    if (finish(u, status, made) == SPAR_OK)
        spar_plan_attach(plan, &u->attached);
    return status;
}

spar_status spar_upload_of(spar_uploads *s, const spar_plan *plan, spar_upload **found)
{
    spar_status status = SPAR_OK;
    if ((*found = find(s, plan)) != NULL)
        return SPAR_OK;
    pthread_mutex_lock(&s->lock);
    if (!(*found = find(s, plan)))
        status = make(s, plan, found);
    pthread_mutex_unlock(&s->lock);
    return status;
}

spar_status spar_upload_blocks(spar_uploads *s, const spar_block *blocks, int64_t count,
                               const spar_dim *dims, spar_table_list *list, spar_upload **made)
{
    spar_upload *u;
    SPAR_TRY(new_upload(s, &u));
    spar_status status = spar_table_add(&u->table, blocks, count, dims, list);
    if (status == SPAR_OK) {
        pthread_mutex_lock(&s->lock);
        status = upload(s, u);
        pthread_mutex_unlock(&s->lock);
    }
    return finish(u, status, made);
}

spar_status spar_upload_await(spar_upload *u, void *stream)
{
    const spar_uploads *s = u->uploads;
    int capturing;
    SPAR_TRY(spar_driver_capturing(stream, &capturing));
    if (capturing)
        __atomic_store_n(&u->captured, 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(&u->arrived, __ATOMIC_ACQUIRE))
        return SPAR_OK;
    CUstreamCaptureMode mode = SPAR_CU_CAPTURE_RELAXED;
    TRY_CU(ThreadExchangeStreamCaptureMode, &mode);
    /* a capture cannot wait for what is not in it; the copy takes microseconds, and waits for no kernel */
    CUresult result =
        capturing ? s->driver->EventSynchronize(u->arrives) : s->driver->EventQuery(u->arrives);
    s->driver->ThreadExchangeStreamCaptureMode(&mode);
    if (result == SPAR_CU_SUCCESS)
        __atomic_store_n(&u->arrived, 1, __ATOMIC_RELEASE);
    else if ((int)result == SPAR_CU_NOT_READY)
        TRY_CU(StreamWaitEvent, stream, u->arrives, 0);
    else
        return spar_driver_check(result, "cuEventQuery");
    return SPAR_OK;
}
