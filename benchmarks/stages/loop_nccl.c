/* SPDX-License-Identifier: Apache-2.0 */
/* A libnccl.so.2 for ranks that share one GPU, so that streams, events and captures run on hardware where
 * NCCL itself refuses two ranks on a device (before 2.30).
 *
 * It is the tests' stand-in (tests/standin/libnccl.c, nccl_work.c), whose host functions in the stream move
 * bytes between processes, over the real driver. Host functions may not read device memory, so each message
 * passes through page-locked memory: a copy in the stream before the stand-in's group, or after it. The
 * stand-in's faults (STANDIN_NCCL_*) work here, too.
 *
 * Preload it, and the real libnccl.so.2 behind it by its full path if torch needs that:
 * LD_PRELOAD=LOOP:REAL. */
#define ncclSend host_send
#define ncclRecv host_receive
#define ncclGroupStart host_group_start
#define ncclGroupEnd host_group_end
#define ncclAllGather host_all_gather
#include "../../tests/standin/libnccl.c"
#include "../../tests/standin/nccl_work.c"
#undef ncclSend
#undef ncclRecv
#undef ncclGroupStart
#undef ncclGroupEnd
#undef ncclAllGather

#include <dlfcn.h>
#include <pthread.h>

enum { RELAXED = 2, PORTABLE = 1 };

/* Page-locked memory of a message; freed to the list of blocks when the stream has passed it. */
typedef struct block {
    struct block *next;
    char *bytes;
    size_t size;
    int busy; /* atomic */
} block;

typedef struct message {
    struct ncclComm *comm;
    struct CUstream_st *stream;
    char *device;
    size_t bytes;
    unsigned dtype;
    int sends, peer;
    block *block;
} message;

static _Thread_local message *messages;
static _Thread_local int loop_depth, loop_count, loop_room;
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;
static long groups; /* atomic: ended without an error */

static struct {
    unsigned (*MemHostAlloc)(void **memory, size_t bytes, unsigned flags);
    unsigned (*MemcpyAsync)(uint64_t to, uint64_t from, size_t bytes, struct CUstream_st *stream);
    unsigned (*LaunchHostFunc)(struct CUstream_st *stream, void (*function)(void *), void *context);
    unsigned (*ThreadExchangeStreamCaptureMode)(int *mode);
} driver;

/* Returns 0 if a function is missing. */
static int open_driver(void)
{
    static int opened;
    unsigned (*find)(const char *, void *, int, uint64_t, int *) = NULL;
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *address;
    int found;
    if (opened)
        return 1;
    if (!library || !(address = dlsym(library, "cuGetProcAddress_v2")))
        return 0;
    memcpy(&find, &address, sizeof address);
    find("cuMemHostAlloc", &driver.MemHostAlloc, 2020, 0, &found);
    find("cuMemcpyAsync", &driver.MemcpyAsync, 4000, 0, &found);
    find("cuThreadExchangeStreamCaptureMode", &driver.ThreadExchangeStreamCaptureMode, 10010, 0, &found);
    address = dlsym(library, "cuLaunchHostFunc");
    memcpy(&driver.LaunchHostFunc, &address, sizeof address);
    opened = driver.MemHostAlloc && driver.MemcpyAsync && driver.LaunchHostFunc &&
             driver.ThreadExchangeStreamCaptureMode;
    return opened;
}

/* An idle block of a fitting size, else a new one. NULL: no memory. */
static block *take_block(size_t bytes)
{
    int mode = RELAXED;
    block *b;
    pthread_mutex_lock(&blocks_lock);
    for (b = blocks; b; b = b->next)
        if (b->size >= bytes && b->size / 4 <= bytes && !__atomic_load_n(&b->busy, __ATOMIC_ACQUIRE))
            break;
    if (!b && (b = calloc(1, sizeof *b))) {
        void *memory = NULL;
        b->size = bytes < 4096 ? 4096 : bytes;
        driver.ThreadExchangeStreamCaptureMode(&mode); /* some thread may be capturing */
        unsigned code = driver.MemHostAlloc(&memory, b->size, PORTABLE);
        driver.ThreadExchangeStreamCaptureMode(&mode);
        if (code) {
            free(b);
            b = NULL;
        } else {
            b->bytes = memory;
            b->next = blocks;
            blocks = b;
        }
    }
    if (b)
        b->busy = 1;
    pthread_mutex_unlock(&blocks_lock);
    return b;
}

static void release_block(void *taken)
{
    __atomic_store_n(&((block *)taken)->busy, 0, __ATOMIC_RELEASE);
}

static unsigned copy(const message *m, int to_host)
{
    uint64_t device = (uintptr_t)m->device, host = (uintptr_t)m->block->bytes;
    return driver.MemcpyAsync(to_host ? host : device, to_host ? device : host, m->bytes, m->stream);
}

static spar_nccl_result give_to_stand_in(void)
{
    spar_nccl_result result = host_group_start();
    for (int i = 0; i < loop_count && !result; i++) {
        const message *m = &messages[i];
        result = m->sends ? host_send(m->block->bytes, m->bytes, m->dtype, m->peer, m->comm, m->stream)
                          : host_receive(m->block->bytes, m->bytes, m->dtype, m->peer, m->comm, m->stream);
    }
    spar_nccl_result ended = host_group_end();
    return result ? result : ended;
}

/* A captured block is never reused: each replay uses it again. */
static spar_nccl_result run_messages(void)
{
    unsigned code = 0;
    if (!open_driver())
        return fail(SYSTEM_ERROR, "the driver lacks functions that the loop needs");
    for (int i = 0; i < loop_count; i++)
        if (!(messages[i].block = take_block(messages[i].bytes)))
            return fail(SYSTEM_ERROR, "the loop has no page-locked memory");
    for (int i = 0; i < loop_count && !code; i++)
        code = messages[i].sends ? copy(&messages[i], 1) : 0;
    spar_nccl_result result = code ? fail(SYSTEM_ERROR, "cuMemcpyAsync failed") : give_to_stand_in();
    if (result)
        return result;
    for (int i = 0; i < loop_count && !code; i++) {
        if (!messages[i].sends)
            code = copy(&messages[i], 0);
        if (!code && !is_captured(messages[i].stream))
            code = driver.LaunchHostFunc(messages[i].stream, release_block, messages[i].block);
    }
    if (code)
        return fail(SYSTEM_ERROR, "a copy or a host function failed");
    __atomic_add_fetch(&groups, 1, __ATOMIC_RELAXED);
    return SPAR_NCCL_SUCCESS;
}

EXPORT long loop_groups(void);
EXPORT long loop_groups(void)
{
    return __atomic_load_n(&groups, __ATOMIC_RELAXED);
}

EXPORT spar_nccl_result ncclGroupStart(void);
EXPORT spar_nccl_result ncclGroupStart(void)
{
    loop_depth++;
    return SPAR_NCCL_SUCCESS;
}

EXPORT spar_nccl_result ncclGroupEnd(void);
EXPORT spar_nccl_result ncclGroupEnd(void)
{
    if (loop_depth == 0)
        return fail(INVALID_USAGE, "no group was started");
    if (--loop_depth)
        return SPAR_NCCL_SUCCESS;
    spar_nccl_result result = loop_count ? run_messages() : SPAR_NCCL_SUCCESS;
    loop_count = 0;
    return result;
}

static spar_nccl_result append(message m)
{
    if (loop_count == loop_room) {
        loop_room = loop_room ? 2 * loop_room : 16;
        messages = realloc(messages, (size_t)loop_room * sizeof *messages);
    }
    messages[loop_count++] = m;
    if (loop_depth)
        return SPAR_NCCL_SUCCESS;
    ncclGroupStart();
    return ncclGroupEnd();
}

EXPORT spar_nccl_result ncclSend(const void *from, size_t count, unsigned dtype, int peer,
                                 struct ncclComm *comm, struct CUstream_st *stream);
EXPORT spar_nccl_result ncclSend(const void *from, size_t count, unsigned dtype, int peer,
                                 struct ncclComm *comm, struct CUstream_st *stream)
{
    return append((message){comm, stream, (char *)(uintptr_t)from, count, dtype, 1, peer, NULL});
}

EXPORT spar_nccl_result ncclRecv(void *to, size_t count, unsigned dtype, int peer, struct ncclComm *comm,
                                 struct CUstream_st *stream);
EXPORT spar_nccl_result ncclRecv(void *to, size_t count, unsigned dtype, int peer, struct ncclComm *comm,
                                 struct CUstream_st *stream)
{
    return append((message){comm, stream, to, count, dtype, 0, peer, NULL});
}

/* All that spar looks up, so that a function that is added there is missed when this is built. */
#define ADDRESS(name, result, parameters) (void *)(uintptr_t)nccl##name,
EXPORT void *const loop_functions[] = {SPAR_NCCL_FUNCTIONS(ADDRESS)};
