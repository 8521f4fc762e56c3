#include "transports/nccl/watchdog.h"

#include "devices/device.h"
#include "devices/cuda/driver.h"
#include "base/fork.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 64, LOOK_NS = 100000000 };

/* A call under way. */
typedef struct {
    CUevent event; /* behind it */
    int64_t deadline_ns;
    uint64_t call;
} slot;

struct spar_watch {
    spar_watch *next;
    spar_watched what;
    uint64_t call;
    int64_t
        inside_ns; /* the deadline of a call that has not returned to its caller; 0: none, -1: no limit */
    slot slots[SLOTS];
    int first, count;   /* of the slots in use */
    spar_status status; /* other than SPAR_OK: broken, with the reason */
    char reason[SPAR_GROUP_TEXT];
    int told, closing, ending, aborted;
};

static struct {
    pthread_mutex_t lock; /* of everything here and in the watches */
    pthread_cond_t moved; /* look again */
    spar_watch *first;
    int running, stop;
    pid_t owner; /* a forked child has no thread, and no device */
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const spar_driver *driver(void)
{
    const spar_driver *open = NULL;
    spar_driver_open(&open); /* it was open before there was a watch */
    return open;
}

static void give_up(spar_watch *w, spar_status status, const char *text)
{
    if (w->status != SPAR_OK)
        return;
    w->status = status;
    snprintf(w->reason, sizeof w->reason, "%s", text);
    if (w->what.ledger)
        spar_ledger_give_up(w->what.ledger, status, text);
    pthread_cond_broadcast(&all.moved);
}

static slot *newest(spar_watch *w)
{
    return w->count ? &w->slots[(w->first + w->count - 1) % SLOTS] : NULL;
}

/* Takes the calls off that are over; SPAR_TRANSPORT where the device ended one with an error. */
static spar_status take_off(spar_watch *w)
{
    uint64_t over = 0;
    spar_status status = SPAR_OK;
    for (; w->count; w->count--, w->first = (w->first + 1) % SLOTS) {
        CUresult result = driver()->EventQuery(w->slots[w->first].event);
        if (result == SPAR_CU_NOT_READY)
            break;
        status = spar_driver_check(result, "a call on the GPU");
        if (status != SPAR_OK)
            break;
        over = w->slots[w->first].call;
    }
    if (over && w->what.ledger)
        spar_ledger_over(w->what.ledger, over);
    return status;
}

static spar_status ask_nccl(spar_watch *w)
{
    spar_nccl_result error = SPAR_NCCL_SUCCESS;
    if (!w->what.comm)
        return SPAR_OK;
    SPAR_NCCL_TRY(w->what.comm, CommGetAsyncError(w->what.comm, &error));
    return spar_nccl_check(error, w->what.comm, "NCCL, later");
}

static spar_status check_limits(const spar_watch *w)
{
    const slot *oldest = &w->slots[w->first];
    int64_t now = spar_now_ns(), limit = w->count ? oldest->deadline_ns : 0;
    uint64_t late = limit && now >= limit                     ? oldest->call
                    : w->inside_ns > 0 && now >= w->inside_ns ? w->call
                                                              : 0;
    char absent[SPAR_GROUP_TEXT / 2] = "";
    if (!late)
        return SPAR_OK;
    if (w->what.ledger)
        spar_ledger_absent(w->what.ledger, late, absent, sizeof absent);
    return spar_fail(SPAR_TIMEOUT, "call %llu of this group on the GPU did not end in time%s%s",
                     (unsigned long long)late, *absent ? "; not come to it: " : "", absent);
}

/* One look, with the lock held and the device entered. */
static void look(spar_watch *w)
{
    if (w->status != SPAR_OK)
        return;
    spar_status status = take_off(w);
    if (status == SPAR_OK)
        status = ask_nccl(w);
    int under_way = w->count || w->inside_ns;
    if (status == SPAR_OK && under_way && w->what.ledger)
        status = spar_ledger_look(w->what.ledger, w->count ? w->slots[w->first].call : w->call);
    if (status == SPAR_OK && under_way)
        status = check_limits(w);
    if (status != SPAR_OK)
        give_up(w, status, spar_last_error());
}

/* The same on a caller's thread, which, or another, may be capturing: a query must not spoil that. */
static void look_relaxed(spar_watch *w)
{
    CUstreamCaptureMode mode = SPAR_CU_CAPTURE_RELAXED;
    driver()->ThreadExchangeStreamCaptureMode(&mode);
    look(w);
    driver()->ThreadExchangeStreamCaptureMode(&mode);
}

static void look_entered(spar_watch *w)
{
    void *before;
    if (spar_device_cuda.enter(w->what.ordinal, &before) != SPAR_OK) {
        give_up(w, SPAR_TRANSPORT, spar_last_error());
        return;
    }
    look(w);
    spar_device_cuda.leave(before);
}

/* Ends a communicator that broke, or is not used any more: on a thread of its own, for it may wait for the device,
 * which may wait for the end of another one. */
static void *end_comm(void *watch)
{
    spar_watch *w = watch;
    void *before;
    if (spar_device_cuda.enter(w->what.ordinal, &before) == SPAR_OK) {
        spar_nccl.CommAbort(w->what.comm);
        spar_device_cuda.leave(before);
    }
    pthread_mutex_lock(&all.lock);
    w->aborted = 1;
    pthread_cond_broadcast(&all.moved);
    pthread_mutex_unlock(&all.lock);
    return NULL;
}

static int is_over(spar_watch *w)
{
    while (w->count && driver()->EventQuery(w->slots[w->first].event) != SPAR_CU_NOT_READY) {
        w->first = (w->first + 1) % SLOTS;
        w->count--;
    }
    return !w->count;
}

/* On a thread of its own, too: freeing memory waits for the device. */
static void *dispose(void *watch)
{
    spar_watch *w = watch;
    void *before;
    if (spar_device_cuda.enter(w->what.ordinal, &before) != SPAR_OK)
        return NULL; /* the device is gone: so is what lay on it */
    for (int i = 0; i < SLOTS; i++)
        if (w->slots[i].event)
            driver()->EventDestroy(w->slots[i].event);
    w->what.release(w->what.context);
    spar_device_cuda.leave(before);
    free(w);
    return NULL;
}

/* Whether there is a thread that does it. Signals are the program's own threads'. */
static int spawn(void *(*work)(void *context), void *context)
{
    sigset_t every, before;
    pthread_t thread;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int error = pthread_create(&thread, NULL, work, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        pthread_detach(thread);
    return !error;
}

/* One look, and what follows from it; whether the watch is off the list. With the lock held. */
static int attend(spar_watch **link)
{
    spar_watch *w = *link;
    look_entered(w);
    int ends = w->status != SPAR_OK || (w->closing && !w->inside_ns && is_over(w));
    if (ends && !w->ending) {
        if (w->what.comm)
            w->ending = spawn(end_comm, w);
        else
            w->ending = w->aborted = 1;
    }
    if (!w->closing || !w->aborted || w->inside_ns || !is_over(w))
        return 0;
    *link = w->next;
    if (spawn(dispose, w))
        return 1;
    *link = w;
    return 0;
}

static struct timespec in_a_while(int64_t ns)
{
    int64_t then = spar_now_ns() + ns;
    return (struct timespec){then / 1000000000, then % 1000000000};
}

static void *keep_watch(void *unused)
{
    CUstreamCaptureMode mode =
        SPAR_CU_CAPTURE_RELAXED; /* other threads' captures are not disturbed */
    (void)unused;
    driver()->ThreadExchangeStreamCaptureMode(&mode);
    pthread_mutex_lock(&all.lock);
    for (int last = 0; all.first && !last;) { /* the last look tells the others what is over */
        last = all.stop;
        for (spar_watch **link = &all.first; *link;)
            if (!attend(link))
                link = &(*link)->next;
        struct timespec until = in_a_while(LOOK_NS);
        if (all.first && !all.stop)
            pthread_cond_timedwait(&all.moved, &all.lock, &until);
    }
    all.running = 0;
    pthread_cond_broadcast(&all.moved);
    pthread_mutex_unlock(&all.lock);
    return NULL;
}

/* At exit: the driver's own end shall find nobody at work. */
static void stop(void)
{
    struct timespec until = in_a_while(1000000000);
    if (all.owner != getpid())
        return;
    pthread_mutex_lock(&all.lock);
    all.stop = 1;
    pthread_cond_broadcast(&all.moved);
    while (all.running && pthread_cond_timedwait(&all.moved, &all.lock, &until) != ETIMEDOUT)
        ;
    pthread_mutex_unlock(&all.lock);
}

/* With the lock held. */
static spar_status hire(void)
{
    if (all.running)
        return SPAR_OK;
    if (!all.owner) {
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(&all.moved, &attributes);
        pthread_condattr_destroy(&attributes);
        all.owner = getpid();
        atexit(stop);
    }
    if (!spawn(keep_watch, NULL))
        return spar_fail(SPAR_TRANSPORT, "no thread to watch the GPU");
    all.running = 1;
    return SPAR_OK;
}

spar_status spar_watch_open(const spar_watched *what, spar_watch **watch)
{
    spar_watch *w = calloc(1, sizeof *w);
    spar_status status = SPAR_OK;
    if (!w)
        return spar_fail(SPAR_NO_MEMORY, "no memory to watch a group");
    w->what = *what;
    for (int i = 0; status == SPAR_OK && i < SLOTS; i++)
        status = spar_driver_check(
            driver()->EventCreate(&w->slots[i].event, SPAR_CU_EVENT_DISABLE_TIMING), "an event");
    pthread_mutex_lock(&all.lock);
    if (status == SPAR_OK)
        status = hire();
    if (status == SPAR_OK) {
        w->next = all.first;
        all.first = w;
    }
    pthread_mutex_unlock(&all.lock);
    if (status == SPAR_OK) {
        *watch = w;
        return SPAR_OK;
    }
    for (int i = 0; i < SLOTS && w->slots[i].event; i++)
        driver()->EventDestroy(w->slots[i].event);
    free(w);
    return status;
}

/* With the lock held. */
static spar_status tell(spar_watch *w)
{
    if (w->status == SPAR_OK)
        return SPAR_OK;
    return spar_fail(w->told++ ? SPAR_BROKEN : w->status, "%s", w->reason);
}

spar_status spar_watch_begin(spar_watch *w, uint64_t n, const spar_patience *patience)
{
    if (all.owner != getpid())
        return spar_fail(SPAR_TRANSPORT, "a forked child cannot exchange");
    pthread_mutex_lock(&all.lock);
    look_relaxed(w);
    spar_status status = tell(w);
    if (status == SPAR_OK) {
        w->call = n;
        w->inside_ns = patience->deadline_ns ? patience->deadline_ns : -1;
    }
    pthread_mutex_unlock(&all.lock);
    return status;
}

spar_status spar_watch_end(spar_watch *w, void *stream, int captured)
{
    spar_status status = SPAR_OK;
    pthread_mutex_lock(&all.lock);
    if (!captured) {
        int full =
            w->count == SLOTS; /* then the newest slot stands for both: calls end in their order */
        slot *s = full ? newest(w) : &w->slots[(w->first + w->count) % SLOTS];
        s->deadline_ns = w->inside_ns > 0 ? w->inside_ns : 0;
        s->call = w->call;
        status = spar_driver_check(driver()->EventRecord(s->event, stream), "an event");
        w->count += !full && status == SPAR_OK;
    }
    w->inside_ns = 0;
    if (status != SPAR_OK)
        give_up(w, status, spar_last_error());
    pthread_mutex_unlock(&all.lock);
    return status;
}

void spar_watch_break(spar_watch *w, spar_status status, const char *text)
{
    pthread_mutex_lock(&all.lock);
    give_up(w, status, text);
    w->inside_ns = 0;
    w->told++;
    pthread_mutex_unlock(&all.lock);
}

const char *spar_watch_broken(spar_watch *w)
{
    pthread_mutex_lock(&all.lock);
    const char *reason = w->status == SPAR_OK ? NULL : w->reason;
    pthread_mutex_unlock(&all.lock);
    return reason;
}

spar_status spar_watch_order(spar_watch *w, void *stream)
{
    pthread_mutex_lock(&all.lock);
    slot *last = newest(w);
    spar_status status = !last
                             ? SPAR_OK
                             : spar_driver_check(driver()->StreamWaitEvent(stream, last->event, 0),
                                                 "an event of another stream");
    pthread_mutex_unlock(&all.lock);
    return status;
}

spar_status spar_watch_wait(spar_watch *w, const spar_patience *patience)
{
    const struct timespec moment = {0, 20000};
    for (int looks = 1;; looks++) {
        pthread_mutex_lock(&all.lock);
        look_relaxed(w);
        spar_status status = tell(w);
        int over = !w->count;
        pthread_mutex_unlock(&all.lock);
        if (status != SPAR_OK || over)
            return status;
        if (patience->deadline_ns && spar_now_ns() >= patience->deadline_ns)
            return spar_fail(SPAR_TIMEOUT, "the GPU did not come to the end of call %llu in time",
                             (unsigned long long)w->call);
        if (looks % 2500 == 0)
            SPAR_TRY(spar_patience_poll(patience, "while the GPU was awaited"));
        nanosleep(&moment, NULL);
    }
}

void spar_watch_close(spar_watch *w)
{
    pthread_mutex_lock(&all.lock);
    w->closing = 1;
    pthread_cond_broadcast(&all.moved);
    pthread_mutex_unlock(&all.lock);
}

/* Not taken before a fork: the watchdog holds it while it asks the driver, which may not answer. */
void spar_watch_fork(spar_fork_stage stage)
{
    if (stage != SPAR_FORK_CHILD)
        return;
    pthread_mutex_init(&all.lock, NULL);
    pthread_cond_init(&all.moved, NULL);
}
