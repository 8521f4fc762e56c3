/* NCCL: sends and receives of device memory, on any number of hosts. How the bytes go: lane.h. How errors, time
 * limits and deaths are seen without waiting for the device: watch.h.
 *
 * All ranks use torch's own communicator where each has one; else one of their own, which costs memory for its
 * buffers again. */
#include "base/env.h"
#include "transports/nccl/pipeline.h"
#include "transports/rendezvous.h"
#include "transports/nccl/watchdog.h"
#include "ipc/last_call.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* What a rank tells in the first stage's verdict. */
typedef struct {
    spar_nccl_id id; /* rank 0's, where an own communicator may be needed */
    int64_t chunk;   /* what its staging memory allows */
    int32_t has_native, has_id;
} token;

_Static_assert(sizeof(token) <= sizeof(((spar_verdict *)0)->token), "it travels in the verdict");

typedef struct {
    pthread_mutex_t lock; /* around a call, and of what follows */
    pthread_cond_t met;
    int refs; /* atomic: the comm or its watch; the thread that meets the others */
    int world, rank, ordinal;
    spar_nccl_id id;
    spar_lane lane;
    int has_lane;
    spar_ledger *ledger; /* NULL: the ranks are not all on one host */
    int compare;
    uint64_t calls;
    struct ncclComm *own, *native; /* native: as it was when the ranks met */
    spar_watch *watch;
    void *stream; /* of the newest call */
    int called;
    /* of the meeting: 1 when it is over, with how it ended; or that nobody waits for it any more */
    int over, abandoned;
    spar_status status;
    char text[256];
} state;

static void probe(spar_facts *facts)
{
    if (spar_device_cuda.open() != SPAR_OK || spar_nccl_open() != SPAR_OK)
        snprintf(facts->no_nccl, sizeof facts->no_nccl, "%s", spar_last_error());
}

static int serves(const spar_facts *facts, int world, const char *device, char *reason, size_t size)
{
    if (strcmp(device, "cuda") != 0) {
        snprintf(reason, size, "%s tensors do not lie on CUDA devices", device);
        return 0;
    }
    for (int rank = 0; rank < world; rank++)
        if (facts[rank].no_nccl[0]) {
            snprintf(reason, size, "rank %d: %.95s", rank, facts[rank].no_nccl);
            return 0;
        }
    snprintf(reason, size, "all %d ranks have CUDA and NCCL", world);
    return 1;
}

static void release(void *context)
{
    state *s = context;
    if (__atomic_sub_fetch(&s->refs, 1, __ATOMIC_ACQ_REL))
        return;
    if (s->has_lane)
        spar_lane_close(&s->lane);
    spar_ledger_close(s->ledger);
    pthread_cond_destroy(&s->met);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* Of a set-up that failed. On a thread of its own: freeing memory waits for the device, and other groups' calls. */
static void *release_entered(void *context)
{
    state *s = context;
    void *before;
    if (spar_device_cuda.enter(s->ordinal, &before) != SPAR_OK)
        return NULL; /* the device is gone: so is what lay on it */
    release(s);
    spar_device_cuda.leave(before);
    return NULL;
}

/* ---- set-up ---- */

static spar_status make(state *s, const spar_native *native, token *own)
{
    spar_env_value most, check;
    SPAR_TRY(spar_env_field("check", &check));
    s->compare = strcmp(check.text, "0") != 0;
    SPAR_TRY(spar_env_field("staging_max", &most));
    SPAR_TRY(spar_lane_open(&s->lane, s->world, s->rank, most.count));
    s->has_lane = 1;
    s->native = native->comm;
    own->has_native = native->comm != NULL;
    own->chunk = s->lane.chunk;
    if (s->rank == 0 && !own->has_native) {
        SPAR_NCCL_TRY(NULL, GetUniqueId(&own->id));
        own->has_id = 1;
    }
    return SPAR_OK;
}

static spar_status setup(spar_comm *comm, const spar_facts *facts, spar_verdict *verdict)
{
    token own = {0};
    void *before;
    char reason[96];
    verdict->offset = -1;
    SPAR_TRY(spar_device_cuda.open());
    SPAR_TRY(spar_nccl_open());
    SPAR_TRY(spar_device_cuda.prepare(comm->native.ordinal));
    state *s = calloc(1, sizeof *s);
    if (!s)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", comm->world);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->met, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&s->lock, NULL);
    s->refs = 1;
    s->world = comm->world;
    s->rank = comm->rank;
    s->ordinal = comm->native.ordinal;
    comm->state = s;
    if (spar_meeting_possible(facts, s->world, reason, sizeof reason) &&
        spar_ledger_open(comm, facts, &s->ledger, &verdict->offset) != SPAR_OK)
        verdict->offset = -1; /* it is not needed for moving bytes */
    SPAR_TRY(spar_device_cuda.enter(s->ordinal, &before));
    spar_status status = make(s, &comm->native, &own);
    spar_device_cuda.leave(before);
    memcpy(verdict->token, &own, sizeof own);
    return status;
}

/* What may wait for the other ranks: for as long as NCCL likes. On a thread of its own. */
static spar_status meet_others(state *s)
{
    struct ncclComm *comm = s->native;
    int world, rank;
    if (!comm) {
        SPAR_NCCL_TRY(NULL, CommInitRank(&comm, s->world, s->id, s->rank));
        pthread_mutex_lock(&s->lock);
        int abandoned = s->abandoned;
        s->own = abandoned ? NULL : comm;
        pthread_mutex_unlock(&s->lock);
        if (abandoned) {
            spar_nccl.CommAbort(comm);
            return SPAR_OK;
        }
    }
    SPAR_NCCL_TRY(comm, CommCount(comm, &world));
    SPAR_NCCL_TRY(comm, CommUserRank(comm, &rank));
    if (world != s->world || rank != s->rank)
        return spar_fail(SPAR_TRANSPORT, "torch's communicator is rank %d of %d; expected %d of %d",
                         rank, world, s->rank, s->world);
    return spar_lane_greet(&s->lane, comm);
}

static void *meet(void *context)
{
    state *s = context;
    void *before = NULL;
    spar_status status = spar_device_cuda.enter(s->ordinal, &before);
    if (status == SPAR_OK)
        status = meet_others(s);
    pthread_mutex_lock(&s->lock);
    s->over = 1;
    s->status = status;
    snprintf(s->text, sizeof s->text, "%s", status == SPAR_OK ? "" : spar_last_error());
    pthread_cond_signal(&s->met);
    pthread_mutex_unlock(&s->lock);
    release(s);
    spar_device_cuda.leave(before);
    return NULL;
}

/* Other than SPAR_OK where the wait shall end. A peer on this host that failed is not waited for. */
static spar_status go_on(const state *s, const spar_patience *patience)
{
    SPAR_TRY(spar_patience_poll(patience, "while NCCL was set up"));
    spar_status status = s->ledger ? spar_ledger_look(s->ledger, 1) : SPAR_OK;
    if (status != SPAR_OK) { /* all ranks compare how their set-ups ended, and fail alike */
        char why[SPAR_GROUP_TEXT];
        snprintf(why, sizeof why, "%s", spar_last_error());
        return spar_fail(status == SPAR_TIMEOUT ? status : SPAR_TRANSPORT, "%s", why);
    }
    if (patience->deadline_ns && spar_now_ns() >= patience->deadline_ns)
        return spar_fail(SPAR_TIMEOUT, "a rank did not come while NCCL was set up");
    return SPAR_OK;
}

static spar_status await_meeting(state *s, const spar_patience *patience)
{
    spar_status status = SPAR_OK;
    pthread_mutex_lock(&s->lock);
    while (!s->over && status == SPAR_OK) {
        int64_t until = spar_now_ns() + 50000000;
        const struct timespec slice = {until / 1000000000, until % 1000000000};
        pthread_cond_timedwait(&s->met, &s->lock, &slice);
        if (s->over)
            break;
        pthread_mutex_unlock(&s->lock);
        status = go_on(s, patience);
        pthread_mutex_lock(&s->lock);
    }
    if (s->over)
        status = s->status == SPAR_OK ? SPAR_OK : spar_fail(s->status, "%s", s->text);
    s->abandoned = !s->over;
    struct ncclComm *stuck = status == SPAR_OK ? NULL : s->own;
    if (stuck)
        s->own = NULL;
    pthread_mutex_unlock(&s->lock);
    if (stuck)
        spar_nccl.CommAbort(stuck);
    return status;
}

/* The greetings have come. */
static spar_status await_greetings(const state *s, const spar_patience *patience)
{
    const spar_driver *driver;
    const struct timespec moment = {0, 200000};
    SPAR_TRY(spar_driver_open(&driver));
    for (int looks = 1;; looks++) {
        CUresult result = driver->StreamQuery(s->lane.sidings[0].stream);
        if (result != SPAR_CU_NOT_READY)
            return spar_driver_check(result, "the first exchange over NCCL");
        if (looks % 100 == 0) {
            spar_nccl_result error = SPAR_NCCL_SUCCESS;
            struct ncclComm *comm = s->own ? s->own : s->native;
            SPAR_NCCL_TRY(comm, CommGetAsyncError(comm, &error));
            SPAR_TRY(spar_nccl_check(error, comm, "the first exchange over NCCL"));
            SPAR_TRY(go_on(s, patience));
        }
        nanosleep(&moment, NULL);
    }
}

static spar_status agree(state *s, const spar_verdict *verdicts)
{
    int natives = 0;
    token first, other;
    memcpy(&first, verdicts[0].token, sizeof first);
    for (int rank = 0; rank < s->world; rank++) {
        memcpy(&other, verdicts[rank].token, sizeof other);
        natives += other.has_native == 1;
        if (other.chunk < 256 || other.chunk % 256)
            return spar_fail(SPAR_TRANSPORT, "rank %d says that it stages %lld bytes at a time",
                             rank, (long long)other.chunk);
        if (other.chunk < s->lane.chunk)
            s->lane.chunk = other.chunk;
    }
    if (natives == s->world)
        return SPAR_OK;
    s->native = NULL;
    if (!first.has_id)
        return spar_fail(SPAR_TRANSPORT, "only %d of %d ranks have a communicator of torch's",
                         natives, s->world);
    s->id = first.id;
    return SPAR_OK;
}

/* Where one rank has no ledger, none uses it. */
static spar_status connect_ledger(state *s, const spar_comm *comm, const spar_verdict *verdicts,
                                  const spar_patience *patience)
{
    int all = s->ledger != NULL;
    for (int rank = 0; rank < s->world; rank++)
        all = all && verdicts[rank].offset >= 0;
    spar_status status =
        all ? spar_ledger_connect(s->ledger, comm, verdicts, patience) : SPAR_TRANSPORT;
    if (status == SPAR_OK)
        return SPAR_OK;
    spar_ledger_close(s->ledger);
    s->ledger = NULL;
    return spar_ends_wait(status) ? status : SPAR_OK;
}

static spar_status meet_and_greet(state *s, const spar_patience *patience)
{
    pthread_t thread;
    __atomic_add_fetch(&s->refs, 1, __ATOMIC_RELAXED);
    int error = pthread_create(&thread, NULL, meet, s);
    if (error) {
        release(s);
        return spar_fail(SPAR_TRANSPORT, "no thread to set NCCL up: %s", strerror(error));
    }
    pthread_detach(thread);
    SPAR_TRY(await_meeting(s, patience));
    spar_status status = await_greetings(s, patience);
    if (status == SPAR_OK || !s->own)
        return status;
    spar_nccl.CommAbort(s->own);
    s->own = NULL;
    return status;
}

static spar_status connect_all(spar_comm *comm, const spar_verdict *verdicts,
                               const spar_patience *patience)
{
    state *s = comm->state;
    void *before;
    SPAR_TRY(agree(s, verdicts));
    SPAR_TRY(connect_ledger(s, comm, verdicts, patience));
    SPAR_TRY(spar_device_cuda.enter(s->ordinal, &before));
    spar_status status = meet_and_greet(s, patience);
    const spar_watched what = {s->own, s->ordinal, s->ledger, release, s};
    if (status == SPAR_OK)
        status = spar_watch_open(&what, &s->watch);
    spar_device_cuda.leave(before);
    if (status != SPAR_OK && s->ledger)
        spar_ledger_give_up(s->ledger, status, spar_last_error());
    return status;
}

/* ---- a call ---- */

static spar_status check_call(const state *s, const spar_call *call)
{
    if (call->failed != SPAR_OK)
        return spar_fail(call->failed, "%s", call->why);
    if (!call->plan->pull)
        return spar_fail(SPAR_INTERNAL, "a plan without its pull side");
    if (!s->own && !call->native)
        return spar_fail(SPAR_TRANSPORT, "torch's communicator is gone: was the group destroyed?");
    return SPAR_OK;
}

/* This rank cannot make call n: the others are told. */
static spar_status fail_alone(state *s, uint64_t n, const spar_call *call, spar_status status)
{
    char why[SPAR_GROUP_TEXT];
    spar_call told = *call;
    snprintf(why, sizeof why, "%s", spar_last_error());
    told.failed = status;
    told.why = why;
    if (status == SPAR_INTERRUPTED)
        spar_watch_break(s->watch, SPAR_BROKEN, why);
    else if (s->ledger && spar_ledger_enter(s->ledger, n, &told, s->compare) != SPAR_OK)
        spar_watch_break(s->watch, SPAR_MISMATCH, spar_last_error());
    return spar_fail(status, "%s", why);
}

static spar_status enqueue(state *s, const spar_call *call)
{
    struct ncclComm *comm = s->own ? s->own : call->native;
    spar_nccl_result error = SPAR_NCCL_SUCCESS;
    uint64_t n = ++s->calls;
    int captured;
    spar_status status = check_call(s, call);
    if (status == SPAR_OK)
        status = spar_driver_capturing(call->stream, &captured);
    if (status != SPAR_OK)
        return fail_alone(s, n, call, status);
    SPAR_TRY(spar_watch_begin(s->watch, n, &call->patience));
    if (s->ledger)
        status = spar_ledger_enter(s->ledger, n, call, s->compare);
    if (status == SPAR_OK && !s->own) { /* the watch does not know whether torch's is still there */
        status = spar_nccl_check(spar_nccl.CommGetAsyncError(comm, &error), comm,
                                 "ncclCommGetAsyncError");
        if (status == SPAR_OK)
            status = spar_nccl_check(error, comm, "NCCL, later");
    }
    if (status == SPAR_OK && !captured && s->called && s->stream != call->stream)
        status = spar_watch_order(s->watch, call->stream); /* it may still use staging memory */
    if (status == SPAR_OK)
        status = spar_lane_run(&s->lane, call, comm, captured);
    if (status == SPAR_OK)
        status = spar_watch_end(s->watch, call->stream, captured);
    if (status != SPAR_OK) { /* the others have been promised bytes that do not come */
        spar_watch_break(s->watch, status, spar_last_error());
        return status;
    }
    if (!captured) {
        s->stream = call->stream;
        s->called = 1;
    }
    return SPAR_OK;
}

static spar_status run(spar_comm *comm, spar_call *call)
{
    state *s = comm->state;
    void *before;
    if (!s->watch)
        return spar_fail(SPAR_TRANSPORT, "the group was not set up");
    SPAR_TRY(spar_device_cuda.enter(s->ordinal, &before));
    pthread_mutex_lock(&s->lock);
    uint32_t begun = spar_whereabouts_begin(call->group, call->op, (uint32_t)s->calls + 1);
    spar_status status = enqueue(s, call);
    spar_whereabouts_end(begun, status != SPAR_OK);
    pthread_mutex_unlock(&s->lock);
    spar_device_cuda.leave(before);
    return status;
}

static spar_status wait_for(spar_comm *comm, const spar_patience *patience)
{
    state *s = comm->state;
    void *before;
    if (!s->watch)
        return spar_fail(SPAR_TRANSPORT, "the group was not set up");
    SPAR_TRY(spar_device_cuda.enter(s->ordinal, &before));
    spar_status status = spar_watch_wait(s->watch, patience);
    spar_device_cuda.leave(before);
    return status;
}

static void where(const spar_comm *comm, int rank, char *text, size_t size)
{
    const state *s = comm->state;
    *text = 0;
    if (s->ledger)
        spar_ledger_where(s->ledger, rank, text, size);
}

static const char *broken(const spar_comm *comm)
{
    const state *s = comm->state;
    return s->watch ? spar_watch_broken(s->watch) : NULL;
}

static void close_comm(spar_comm *comm)
{
    state *s = comm->state;
    pthread_t thread;
    comm->state = NULL;
    if (!s)
        return;
    if (s->watch)
        spar_watch_close(s->watch); /* it releases when the calls are over */
    else if (pthread_create(&thread, NULL, release_entered, s) == 0)
        pthread_detach(thread);
    else
        release_entered(s);
}

const spar_transport spar_transport_nccl = {
    .name = "nccl",
    .probe = probe,
    .serves = serves,
    .setup = setup,
    .connect = connect_all,
    .run = run,
    .wait = wait_for,
    .where = where,
    .broken = broken,
    .close = close_comm,
};
