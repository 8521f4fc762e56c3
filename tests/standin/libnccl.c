/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for libnccl.so.2: groups of sends and receives between processes, over shared host memory,
 * executed asynchronously by the stand-in libcuda's streams.
 *
 * As in NCCL:
 * - the operations of a group progress together; messages between two ranks match in order;
 * - the groups of a communicator run one after another, whatever their streams;
 * - a group without a peer runs until the communicator is aborted or revoked;
 * - ncclCommInitRank blocks until all ranks have called it;
 * - an abort frees the communicator, also while a thread is inside a call on it. Before it ends the kernels
 *   and waits for them, and for the end of all graphs that have captured calls; after a revocation it waits
 *   for nothing. Here any later use prints a backtrace and ends the process;
 * - a revocation ends the kernels that were launched before it, and no later one, such as that of a group
 *   whose sends were called before;
 * - a message whose address is not a multiple of 16 is copied byte by byte. standin_nccl_unaligned() counts
 *   those.
 *
 * Unlike in NCCL, lengths that do not match are an error at once; NCCL's kernels hang, or move wrong bytes.
 * Not imitated: groups have no CTAs, so that communicators never wait for each other's SMs; buffers are not
 * registered for captures; a call does not set the thread's device.
 *
 * Environment variables, read at each call, inject faults:
 *
 *   STANDIN_NCCL_VERSION=22000   ncclGetVersion returns it
 *   STANDIN_NCCL_FAIL=Send:3     the third ncclSend from now on fails: ncclSystemError, with a last error
 *   STANDIN_NCCL_LATER=remote    a group ends in ncclRemoteError, which only ncclCommGetAsyncError reports
 *   STANDIN_NCCL_LATER=stall     a group makes no progress
 *   STANDIN_NCCL_SLOW_MS=300     ncclGroupEnd takes this long on the host
 *   STANDIN_NCCL_ABORT_MS=500    an abort takes this long
 *   STANDIN_NCCL_PENDING_MS=20   communicators do not block, as with NCCL_COMM_BLOCKING=0: ncclCommInitRank
 *                                and ncclGroupEnd return ncclInProgress, and a thread does the rest this much
 *                                later */
#include "nccl_work.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static _Thread_local operation *open_operations;
static _Thread_local int depth, open_count, open_room;
static _Thread_local spar_nccl_result open_error; /* a group in which a call failed launches nothing */

static spar_nccl_result fail(spar_nccl_result result, const char *text)
{
    snprintf(last_error, sizeof last_error, "%s", text);
    open_error = depth ? result : SPAR_NCCL_SUCCESS;
    return result;
}

/* Whether STANDIN_NCCL_FAIL makes this call fail. */
static int is_to_fail(const char *function)
{
    static char counted[64];
    static int calls;
    const char *wanted = setting("STANDIN_NCCL_FAIL");
    size_t length = strlen(function);
    if (!wanted || strncmp(wanted, function, length) != 0 || wanted[length] != ':')
        return 0;
    if (strcmp(counted, wanted) != 0) {
        snprintf(counted, sizeof counted, "%s", wanted);
        calls = 0;
    }
    return ++calls == atoi(wanted + length + 1);
}

/* Sleeps as long as the environment variable says. */
static void delay(const char *variable)
{
    const char *ms = setting(variable);
    if (ms)
        usleep((unsigned)atoi(ms) * 1000);
}

#define EXPORT __attribute__((visibility("default")))

EXPORT spar_nccl_result ncclGetVersion(int *version)
{
    const char *wanted = setting("STANDIN_NCCL_VERSION");
    *version = wanted ? atoi(wanted) : 22907;
    return SPAR_NCCL_SUCCESS;
}

EXPORT const char *ncclGetErrorString(spar_nccl_result result)
{
    static const char *const texts[] = {"no error",       "unhandled cuda error", "system error",
                                        "internal error", "invalid argument",     "invalid usage",
                                        "remote error",   "in progress"};
    return result < 8 ? texts[result] : "unknown result code";
}

EXPORT const char *ncclGetLastError(struct ncclComm *comm)
{
    if (comm)
        use(comm, "ncclGetLastError");
    return last_error;
}

EXPORT spar_nccl_result ncclGetUniqueId(spar_nccl_id *id)
{
    struct timespec now;
    if (is_to_fail("GetUniqueId"))
        return fail(SYSTEM_ERROR, "the stand-in has no id");
    clock_gettime(CLOCK_MONOTONIC, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/spar-standin-%d-%lld%09ld", (int)getpid(),
             (long long)now.tv_sec, now.tv_nsec);
    return SPAR_NCCL_SUCCESS;
}

/* Runs `function` on a thread, after which the communicator is not pending any more. */
static spar_nccl_result begin_pending(struct ncclComm *comm, void *(*function)(void *), void *argument)
{
    pthread_t thread;
    __atomic_add_fetch(&comm->pending, 1, __ATOMIC_RELEASE);
    if (pthread_create(&thread, NULL, function, argument) != 0)
        crash("a pending call", "finds no thread");
    pthread_detach(thread);
    return SPAR_NCCL_IN_PROGRESS;
}

static int is_aborted(const struct ncclComm *comm)
{
    return (int)__atomic_load_n(&comm->aborted, __ATOMIC_ACQUIRE);
}

static void await_ranks(const struct ncclComm *comm)
{
    uint32_t world = (uint32_t)comm->world;
    for (int polls = 0; __atomic_load_n(&comm->shared->attached, __ATOMIC_ACQUIRE) < world; polls++) {
        if (is_aborted(comm))
            break;
        pause_shortly(polls);
    }
}

static void *init_later(void *context)
{
    struct ncclComm *comm = context;
    delay("STANDIN_NCCL_PENDING_MS");
    await_ranks(comm);
    __atomic_sub_fetch(&comm->pending, 1, __ATOMIC_RELEASE);
    return NULL;
}

EXPORT spar_nccl_result ncclCommInitRank(struct ncclComm **comm, int world, spar_nccl_id id, int rank)
{
    size_t bytes = sizeof(shared_memory) + (size_t)(world * world) * sizeof(pipe_memory);
    if (is_to_fail("CommInitRank"))
        return fail(SYSTEM_ERROR, "the stand-in cannot be connected");
    if (world > MOST_RANKS || rank < 0 || rank >= world)
        return fail(INVALID_ARGUMENT, "an impossible rank");
    int descriptor = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
    if (descriptor < 0 || ftruncate(descriptor, (off_t)bytes) != 0)
        return fail(SYSTEM_ERROR, "no shared memory");
    struct ncclComm *c = calloc(1, sizeof *c);
    c->state = ALIVE;
    c->world = world;
    c->rank = rank;
    c->shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (__atomic_add_fetch(&c->shared->attached, 1, __ATOMIC_ACQ_REL) == (uint32_t)world)
        shm_unlink(id.internal);
    if (setting("STANDIN_NCCL_PENDING_MS")) {
        *comm = c;
        return begin_pending(c, init_later, c);
    }
    await_ranks(c);
    *comm = c;
    return SPAR_NCCL_SUCCESS;
}

/* What follows a call that is in progress must wait for it. */
static spar_nccl_result ready(const struct ncclComm *comm, const char *function)
{
    use(comm, function);
    if (__atomic_load_n(&comm->pending, __ATOMIC_ACQUIRE))
        return fail(INVALID_ARGUMENT, "the communicator's previous call is in progress");
    return SPAR_NCCL_SUCCESS;
}

EXPORT spar_nccl_result ncclCommCount(struct ncclComm *const comm, int *world)
{
    if (ready(comm, "ncclCommCount"))
        return INVALID_ARGUMENT;
    *world = comm->world;
    return SPAR_NCCL_SUCCESS;
}

EXPORT spar_nccl_result ncclCommUserRank(struct ncclComm *const comm, int *rank)
{
    if (ready(comm, "ncclCommUserRank"))
        return INVALID_ARGUMENT;
    *rank = comm->rank;
    return SPAR_NCCL_SUCCESS;
}

EXPORT spar_nccl_result ncclCommGetAsyncError(struct ncclComm *comm, spar_nccl_result *error)
{
    use(comm, "ncclCommGetAsyncError");
    *error = __atomic_load_n(&comm->pending, __ATOMIC_ACQUIRE)
                 ? SPAR_NCCL_IN_PROGRESS
                 : __atomic_load_n(&comm->error, __ATOMIC_ACQUIRE);
    return SPAR_NCCL_SUCCESS;
}

EXPORT spar_nccl_result ncclGroupStart(void)
{
    if (is_to_fail("GroupStart"))
        return fail(SYSTEM_ERROR, "the stand-in cannot start a group");
    depth++;
    return SPAR_NCCL_SUCCESS;
}

typedef struct {
    struct ncclComm *comm;
    int count;
    operation operations[];
} pending_group;

static void *launch_later(void *context)
{
    pending_group *g = context;
    delay("STANDIN_NCCL_PENDING_MS");
    spar_nccl_result result =
        is_aborted(g->comm) ? SPAR_NCCL_SUCCESS : launch(g->comm, g->operations, g->count);
    if (result)
        __atomic_store_n(&g->comm->error, result, __ATOMIC_RELEASE);
    __atomic_sub_fetch(&g->comm->pending, 1, __ATOMIC_RELEASE);
    free(g);
    return NULL;
}

/* Launches the open operations of the communicator. */
static spar_nccl_result launch_open(struct ncclComm *comm)
{
    size_t bytes = (size_t)open_count * sizeof *open_operations;
    delay("STANDIN_NCCL_SLOW_MS");
    if (!setting("STANDIN_NCCL_PENDING_MS"))
        return launch(comm, open_operations, open_count);
    pending_group *g = malloc(sizeof *g + bytes);
    g->comm = comm;
    g->count = open_count;
    memcpy(g->operations, open_operations, bytes);
    return begin_pending(comm, launch_later, g);
}

EXPORT spar_nccl_result ncclGroupEnd(void)
{
    spar_nccl_result result = SPAR_NCCL_SUCCESS;
    if (depth == 0)
        return fail(INVALID_USAGE, "no group was started");
    if (depth == 1 && is_to_fail("GroupEnd"))
        fail(SYSTEM_ERROR, "the stand-in cannot end a group");
    if (--depth)
        return SPAR_NCCL_SUCCESS;
    result = open_error;
    open_error = SPAR_NCCL_SUCCESS;
    for (int i = 0; i < open_count && (!result || result == SPAR_NCCL_IN_PROGRESS); i++) {
        int is_first = 1;
        for (int j = 0; j < i; j++)
            is_first &= open_operations[j].comm != open_operations[i].comm;
        if (is_first)
            result = launch_open(open_operations[i].comm);
    }
    open_count = 0;
    return result;
}

static int unaligned, gathers; /* atomic */

EXPORT int standin_nccl_gathers(void);
EXPORT int standin_nccl_gathers(void)
{
    return __atomic_load_n(&gathers, __ATOMIC_RELAXED);
}

EXPORT int standin_nccl_unaligned(void);
EXPORT int standin_nccl_unaligned(void)
{
    return __atomic_load_n(&unaligned, __ATOMIC_RELAXED);
}

static spar_nccl_result add(struct ncclComm *comm, struct CUstream_st *stream, int sends, void *bytes,
                            size_t count, unsigned dtype, int peer)
{
    if (ready(comm, sends ? "ncclSend" : "ncclRecv"))
        return INVALID_ARGUMENT;
    if (__atomic_load_n(&comm->revoked, __ATOMIC_ACQUIRE))
        return fail(INVALID_USAGE, "the communicator was revoked");
    if (count > 1 && (uintptr_t)bytes % 16)
        __atomic_add_fetch(&unaligned, 1, __ATOMIC_RELAXED);
    if (dtype != SPAR_NCCL_UINT8 || peer < 0 || peer >= comm->world || !count)
        return fail(INVALID_ARGUMENT, "an impossible message");
    if (open_count == open_room) {
        open_room = open_room ? 2 * open_room : 16;
        open_operations = realloc(open_operations, (size_t)open_room * sizeof *open_operations);
    }
    open_operations[open_count++] = (operation){comm, stream, bytes, sends, peer, count, 0, 0};
    if (depth)
        return SPAR_NCCL_SUCCESS;
    ncclGroupStart();
    return ncclGroupEnd();
}

EXPORT spar_nccl_result ncclSend(const void *from, size_t count, unsigned dtype, int peer,
                                 struct ncclComm *comm, struct CUstream_st *stream)
{
    if (is_to_fail("Send"))
        return fail(SYSTEM_ERROR, "the stand-in's connection was reset");
    return add(comm, stream, 1, (void *)(uintptr_t)from, count, dtype, peer);
}

EXPORT spar_nccl_result ncclRecv(void *to, size_t count, unsigned dtype, int peer, struct ncclComm *comm,
                                 struct CUstream_st *stream)
{
    if (is_to_fail("Recv"))
        return fail(SYSTEM_ERROR, "the stand-in's connection was reset");
    return add(comm, stream, 0, to, count, dtype, peer);
}

/* As sends and receives, also to itself. */
EXPORT spar_nccl_result ncclAllGather(const void *from, void *to, size_t count, unsigned dtype,
                                      struct ncclComm *comm, struct CUstream_st *stream)
{
    spar_nccl_result result = SPAR_NCCL_SUCCESS;
    if (is_to_fail("AllGather"))
        return fail(SYSTEM_ERROR, "the stand-in's connection was reset");
    __atomic_add_fetch(&gathers, 1, __ATOMIC_RELAXED);
    depth++;
    for (int peer = 0; peer < comm->world && !result; peer++) {
        result = add(comm, stream, 1, (void *)(uintptr_t)from, count, dtype, peer);
        if (!result)
            result = add(comm, stream, 0, (char *)to + (size_t)peer * count, count, dtype, peer);
    }
    spar_nccl_result ended = ncclGroupEnd();
    return result ? result : ended;
}

/* Ends the groups under way. */
static void stop(struct ncclComm *comm)
{
    __atomic_store_n(&comm->aborted, 1, __ATOMIC_RELEASE);
    for (int polls = 0; __atomic_load_n(&comm->running, __ATOMIC_ACQUIRE) ||
                        __atomic_load_n(&comm->pending, __ATOMIC_ACQUIRE);
         polls++)
        pause_shortly(polls);
}

EXPORT spar_nccl_result ncclCommRevoke(struct ncclComm *comm, int flags)
{
    use(comm, "ncclCommRevoke");
    if (flags || __atomic_exchange_n(&comm->revoked, 1, __ATOMIC_ACQ_REL))
        return fail(INVALID_ARGUMENT, "the communicator was revoked before");
    stop(comm);
    __atomic_store_n(&comm->aborted, 0, __ATOMIC_RELEASE);
    return SPAR_NCCL_SUCCESS;
}

EXPORT spar_nccl_result ncclCommAbort(struct ncclComm *comm)
{
    int polls = 0;
    void (*in_use)(void);
    void *address = cuda("standin_in_use");
    use(comm, "ncclCommAbort");
    if (!__atomic_load_n(&comm->revoked, __ATOMIC_ACQUIRE))
        for (stop(comm); __atomic_load_n(&comm->captured, __ATOMIC_ACQUIRE);)
            pause_shortly(polls++);
    else if (__atomic_load_n(&comm->running, __ATOMIC_ACQUIRE))
        crash("ncclCommAbort", "frees a revoked communicator whose kernels run");
    delay("STANDIN_NCCL_ABORT_MS");
    memcpy(&in_use, &address, sizeof address);
    if (in_use) /* else over the real driver */
        in_use();
    if (__atomic_exchange_n(&comm->state, FREED, __ATOMIC_ACQ_REL) != ALIVE)
        crash("ncclCommAbort", "aborts a communicator twice");
    munmap(comm->shared, sizeof(shared_memory) + (size_t)(comm->world * comm->world) * sizeof(pipe_memory));
    return SPAR_NCCL_SUCCESS; /* the struct stays, so that each later use is noticed */
}
