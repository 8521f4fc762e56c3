/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/cuda/watchdog.h"

#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"
#include "devices/cuda/kernels.h"
#include "base/fork.h"
#include "base/util.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    SLOTS = 64,
    POLL_NS = 100000000,
    GRACE = 10,           /* polls: by then a call has left NCCL, unless it waits for room in a queue */
    EXIT_NS = 2000000000, /* the time that work under way has at exit */
};

/* A call in progress. */
typedef struct {
    int64_t deadline_ns;
    uint64_t call;
} slot;

struct spar_watchdog {
    spar_watchdog *next;
    spar_watchdog_target what;
    uint64_t call;
    int64_t inside_ns; /* the deadline of a call that has not returned to its caller; 0: none is inside */
    int grace;         /* polls that have waited for that call to return */
    int capturing;     /* that call is captured */
    CUevent last;      /* recorded after the newest watched call, */
    uint64_t stream;   /* in the stream of this id */
    uint64_t entered;  /* that of the begun call */
    uint32_t *ended;   /* page-locked: the stream writes the number of each watched call after it */
    slot slots[SLOTS];
    int first, count; /* the slots in use */
    int failed;       /* atomic: broken for good, by the failure */
    spar_failure failure;
    int reported, closing, captured;
    int revoked;   /* a revocation of the communicator was tried */
    int busy;      /* a thread revokes or aborts it */
    void *aborted; /* what that thread aborts; NULL: it revokes what.comm */
};

static struct {
    pthread_mutex_t lock;   /* protects all fields here and of the watchdogs */
    pthread_cond_t changed; /* poll again */
    spar_watchdog *first;
    int running, stop;
    int workers;    /* threads that free or abort what a watchdog had */
    uint32_t owner; /* a forked child has no thread, and no device */
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Breaks the watchdog with the last error, unless the status is SPAR_OK. The first reason stays. */
static void fail_watchdog(spar_watchdog *w, spar_status status)
{
    if (w->failed || status == SPAR_OK)
        return;
    spar_failure_keep(&w->failure, status);
    __atomic_store_n(&w->failed, 1, __ATOMIC_RELEASE);
    if (w->what.stop)
        __atomic_store_n(w->what.stop, SPAR_STOPPED, __ATOMIC_RELEASE);
    if (w->what.ring)
        spar_ring_abort(w->what.ring, status, &w->failure.ranks, w->failure.text);
    pthread_cond_broadcast(&all.changed);
}

/* Removes the calls that have ended. Asks nothing of the driver, which may not answer beside a full queue. */
static void retire_calls(spar_watchdog *w)
{
    uint64_t over = 0;
    uint32_t ended = __atomic_load_n(w->ended, __ATOMIC_ACQUIRE);
    for (; w->count && (int32_t)(ended - (uint32_t)w->slots[w->first].call) >= 0; w->count--) {
        over = w->slots[w->first].call;
        w->first = (w->first + 1) % SLOTS;
    }
    if (over && w->what.ring)
        spar_ring_complete(w->what.ring, over);
}

static int is_idle(const spar_watchdog *w)
{
    return !w->count && !w->inside_ns;
}

spar_status spar_watchdog_stopped(uint32_t stop)
{
    if (!stop || stop == SPAR_STOPPED)
        return SPAR_OK;
    int is_bad = stop >= SPAR_KERNEL_BAD_OFFER, rank = (int)stop - (is_bad ? SPAR_KERNEL_BAD_OFFER : 1);
    return is_bad ? spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d offered memory outside of its slot", rank)
                  : spar_fail_rank(
                        SPAR_TIMEOUT, rank,
                        "on the GPU, rank %d did not send its part of a call or of a graph's replay in time",
                        rank);
}

/* A kernel's own limit: replays of graphs are not watched otherwise. */
static spar_status check_stop(const spar_watchdog *w)
{
    uint32_t value = w->what.stop ? __atomic_load_n(w->what.stop, __ATOMIC_ACQUIRE) : 0;
    return spar_watchdog_stopped(value);
}

static spar_status check_limits(const spar_watchdog *w)
{
    const slot *oldest = &w->slots[w->first];
    int64_t now = spar_now_ns();
    uint64_t late = w->count && now >= oldest->deadline_ns ? oldest->call
                    : w->inside_ns && now >= w->inside_ns  ? w->call
                                                           : 0;
    char absent[SPAR_GROUP_TEXT / 2] = "";
    spar_ranks ranks = {0};
    if (!late)
        return SPAR_OK;
    if (w->what.ring)
        spar_ring_absent(w->what.ring, late, &ranks, absent, sizeof absent);
    return spar_fail_ranks(SPAR_TIMEOUT, &ranks, "call %llu of this group on the GPU did not end in time%s%s",
                           (unsigned long long)late, *absent ? "; not called by " : "", absent);
}

static spar_status check_all(const spar_watchdog *w)
{
    /* Without one the communicator is torch's, or about to be freed. */
    if (w->what.comm)
        SPAR_TRY(w->what.check(w->what.comm));
    if (!is_idle(w) && w->what.ring)
        SPAR_TRY(spar_ring_poll(w->what.ring, w->count ? w->slots[w->first].call : w->call));
    SPAR_TRY(check_limits(w));
    return check_stop(w);
}

/* Polls once. Requires the lock. */
static void poll_once(spar_watchdog *w)
{
    retire_calls(w);
    if (!w->failed)
        fail_watchdog(w, check_all(w));
}

/* ---- the end of a communicator ---- */

/* Starts a thread for work that may wait for the device, which may wait for the end of another communicator.
 * At exit nothing is started: it could outlive the driver. Requires the lock. */
static int start_worker(void *(*work)(void *watchdog), spar_watchdog *w)
{
    if (all.stop || spar_thread_start(work, w) != 0)
        return 0;
    all.workers++;
    return 1;
}

static void end_worker(int *done)
{
    pthread_mutex_lock(&all.lock);
    if (done)
        *done = 0;
    all.workers--;
    pthread_cond_broadcast(&all.changed);
    pthread_mutex_unlock(&all.lock);
}

/* Ends the communicator's kernels. */
static void *end_kernels(void *watchdog)
{
    spar_watchdog *w = watchdog;
    spar_entered before;
    if (spar_cuda_enter(w->what.ordinal, &before) == SPAR_OK) {
        if (w->aborted)
            w->what.abort(w->aborted);
        else
            w->what.revoke(w->what.comm);
        spar_cuda_leave(&before);
    }
    end_worker(&w->busy);
    return NULL;
}

/* Ends the communicator of a broken or unused watchdog. Requires the lock.
 *
 * An abort ends the kernels, waits for them and for the end of all graphs that have captured calls, and frees
 * the communicator. So a thread makes it, when no call is inside. A call that stays inside waits for room in
 * a queue, which only the end of the kernels makes. Then a revocation comes first, which frees nothing. But
 * it ends no kernel that is launched after it, and no later abort waits for kernels or graphs: it comes when
 * the calls are over, which may be never, and a captured communicator is not revoked. */
static void end_communicator(spar_watchdog *w)
{
    int inside = w->inside_ns != 0;
    if (!w->what.comm || w->busy || !(w->failed || w->closing))
        return;
    if (w->failed && !w->revoked ? inside && w->grace++ < GRACE : !is_idle(w))
        return;
    int revokes = inside && w->what.revoke && !w->captured;
    int keeps = w->captured && !w->failed; /* a graph may still be replayed */
    w->aborted = revokes ? NULL : w->what.comm;
    /* If no worker starts, the next poll tries again. */
    w->busy = !keeps && start_worker(end_kernels, w);
    w->revoked |= revokes && w->busy;
    if (keeps || (w->busy && !revokes))
        w->what.comm = NULL; /* nobody uses it any more */
}

static void free_marks(spar_watchdog *w)
{
    if (w->last)
        spar_cu.EventDestroy(w->last);
    if (w->ended)
        spar_cu.MemFreeHost(w->ended);
}

/* Frees the watchdog, on a thread of its own: freeing device memory waits for the device. */
static void *dispose(void *watchdog)
{
    spar_watchdog *w = watchdog;
    spar_entered before;
    /* Where this fails, the device is gone, with its memory. */
    if (spar_cuda_enter(w->what.ordinal, &before) == SPAR_OK) {
        free_marks(w);
        spar_cuda_leave(&before);
    }
    w->what.release(w->what.context);
    free(w);
    end_worker(NULL);
    return NULL;
}

/* Polls once and acts on the result; returns whether the watchdog left the list. Requires the lock. */
static int poll_and_close(spar_watchdog **link)
{
    spar_watchdog *w = *link, *next = w->next; /* dispose frees it */
    poll_once(w);
    end_communicator(w);
    if (!w->closing || w->what.comm || w->busy || !is_idle(w) || !start_worker(dispose, w))
        return 0;
    *link = next;
    return 1;
}

/* ---- the thread ---- */

static void *watchdog_thread(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&all.lock);
    for (int last = 0; all.first && !last;) { /* the last poll publishes ended calls */
        last = all.stop;
        for (spar_watchdog **link = &all.first; *link;)
            if (!poll_and_close(link))
                link = &(*link)->next;
        if (all.first && !all.stop)
            spar_cond_wait(&all.changed, &all.lock, POLL_NS);
    }
    all.running = 0;
    pthread_cond_broadcast(&all.changed);
    pthread_mutex_unlock(&all.lock);
    return NULL;
}

/* Stops the thread and the workers at exit, before the driver shuts down. */
static void stop(void)
{
    int64_t end = spar_now_ns() + EXIT_NS;
    if (all.owner != spar_generation())
        return;
    pthread_mutex_lock(&all.lock);
    all.stop = 1;
    pthread_cond_broadcast(&all.changed);
    while ((all.running || all.workers) && spar_now_ns() < end)
        spar_cond_wait(&all.changed, &all.lock, end - spar_now_ns());
    pthread_mutex_unlock(&all.lock);
}

/* Requires the lock. */
static spar_status start_thread(void)
{
    if (all.running)
        return SPAR_OK;
    if (!all.owner) {
        spar_cond_init(&all.changed);
        all.owner = spar_generation();
        atexit(stop);
    }
    if (spar_thread_start(watchdog_thread, NULL) != 0)
        return spar_fail(SPAR_TRANSPORT, "cannot start the watchdog thread");
    all.running = 1;
    return SPAR_OK;
}

static spar_status make_marks(spar_watchdog *w)
{
    void *memory;
    SPAR_TRY_CU(MemHostAlloc, &memory, sizeof *w->ended, SPAR_CU_HOST_PORTABLE | SPAR_CU_HOST_MAPPED);
    w->ended = memory;
    *w->ended = 0;
    SPAR_TRY_CU(EventCreate, &w->last, SPAR_CU_EVENT_DISABLE_TIMING);
    return SPAR_OK;
}

spar_status spar_watchdog_open(const spar_watchdog_target *what, spar_watchdog **watchdog)
{
    spar_watchdog *w = calloc(1, sizeof *w);
    if (!w)
        return spar_fail(SPAR_NO_MEMORY, "no memory to watch a group");
    w->what = *what;
    spar_status status = make_marks(w);
    pthread_mutex_lock(&all.lock);
    if (status == SPAR_OK)
        status = start_thread();
    if (status == SPAR_OK) {
        w->next = all.first;
        all.first = *watchdog = w;
    }
    pthread_mutex_unlock(&all.lock);
    if (status != SPAR_OK) {
        free_marks(w);
        free(w);
    }
    return status;
}

/* Requires the lock. */
static spar_status report(spar_watchdog *w)
{
    spar_status status = spar_failure_raise(&w->failure);
    return status != SPAR_OK && w->reported++ ? SPAR_BROKEN : status;
}

spar_status spar_watchdog_check(spar_watchdog *w)
{
    if (!spar_watchdog_broken(w))
        return SPAR_OK;
    pthread_mutex_lock(&all.lock);
    spar_status status = report(w);
    pthread_mutex_unlock(&all.lock);
    return status;
}

spar_status spar_watchdog_begin(spar_watchdog *w, uint64_t n, const spar_deadline *deadline, int captured)
{
    if (all.owner != spar_generation())
        return spar_fail(SPAR_TRANSPORT, "a forked child cannot exchange");
    pthread_mutex_lock(&all.lock);
    poll_once(w);
    spar_status status = report(w);
    if (status == SPAR_OK) {
        w->call = n;
        w->inside_ns = deadline->at_ns ? deadline->at_ns : INT64_MAX;
        w->capturing = captured;
        w->captured |= captured;
    }
    pthread_mutex_unlock(&all.lock);
    return status;
}

uint32_t *spar_watchdog_mark(const spar_watchdog *w)
{
    return w->capturing ? NULL : w->ended;
}

/* Marks the end of the call in its stream. A later call on another stream waits for the event. */
static spar_status mark_end(const spar_watchdog *w, void *stream, int is_marked)
{
    CUdeviceptr ended = (CUdeviceptr)(uintptr_t)w->ended;
    if (!is_marked)
        SPAR_TRY_CU(StreamWriteValue32, stream, ended, (uint32_t)w->call, 0);
    SPAR_TRY_CU(EventRecord, w->last, stream);
    return SPAR_OK;
}

spar_status spar_watchdog_end(spar_watchdog *w, void *stream, int is_marked)
{
    /* It may wait for room in a queue. */
    spar_status status = w->capturing ? SPAR_OK : mark_end(w, stream, is_marked);
    pthread_mutex_lock(&all.lock);
    if (!w->capturing) { /* without its mark, it never ends */
        w->stream = w->entered;
        /* The newest slot then covers both calls, which end in order. */
        int full = w->count == SLOTS;
        slot *s = &w->slots[(w->first + w->count - full) % SLOTS];
        *s = (slot){w->inside_ns, w->call};
        w->count += !full;
    }
    w->inside_ns = 0;
    fail_watchdog(w, status);
    pthread_mutex_unlock(&all.lock);
    return status;
}

void spar_watchdog_break(spar_watchdog *w, spar_status status)
{
    pthread_mutex_lock(&all.lock);
    fail_watchdog(w, status);
    w->inside_ns = 0;
    w->reported++;
    pthread_mutex_unlock(&all.lock);
}

const char *spar_watchdog_broken(spar_watchdog *w)
{
    return __atomic_load_n(&w->failed, __ATOMIC_ACQUIRE) ? w->failure.text : NULL;
}

spar_status spar_watchdog_order(spar_watchdog *w, void *stream)
{
    if (w->capturing)
        return SPAR_OK;
    SPAR_TRY(spar_driver_stream_id(stream, &w->entered));
    if (w->stream != w->entered)
        SPAR_TRY_CU(StreamWaitEvent, stream, w->last, 0);
    return SPAR_OK;
}

/* The device's error, if it has one: then no call ends any more. */
static spar_status check_device(spar_watchdog *w)
{
    CUresult result = spar_cu.EventQuery(w->last);
    if (result == SPAR_CU_SUCCESS || result == SPAR_CU_NOT_READY)
        return SPAR_OK;
    spar_status status = spar_driver_check(result, "a call on the GPU");
    spar_watchdog_break(w, status);
    return status;
}

spar_status spar_watchdog_wait(spar_watchdog *w, const spar_deadline *deadline)
{
    for (int pauses = 0;;) {
        pthread_mutex_lock(&all.lock);
        poll_once(w);
        spar_status status = report(w);
        int over = !w->count;
        pthread_mutex_unlock(&all.lock);
        if (status != SPAR_OK || over)
            return status;
        if (spar_deadline_passed(deadline))
            return spar_fail(SPAR_TIMEOUT, "the GPU did not finish call %llu in time",
                             (unsigned long long)w->call);
        SPAR_TRY(check_device(w));
        SPAR_TRY(spar_deadline_pause(deadline, &pauses, "while the GPU was awaited"));
    }
}

void spar_watchdog_close(spar_watchdog *w)
{
    pthread_mutex_lock(&all.lock);
    w->closing = 1;
    pthread_cond_broadcast(&all.changed);
    pthread_mutex_unlock(&all.lock);
}

/* The lock is not held across a fork: the watchdog holds it while it asks NCCL. */
void spar_watchdog_fork(spar_fork_stage stage)
{
    if (stage != SPAR_FORK_CHILD)
        return;
    pthread_mutex_init(&all.lock, NULL);
    pthread_cond_init(&all.changed, NULL);
}
