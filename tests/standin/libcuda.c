/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for libcuda.so.1: device memory is the host's, at addresses that the host cannot read or write
 * (memory.h), each stream is a thread that runs its work asynchronously, kernels are the host build of
 * kernels.cu.
 *
 * - STANDIN_DEVICES: the number of devices (1).
 * - STANDIN_FAIL=cuName:n:code: the nth call of a function fails with that code.
 * - STANDIN_DELAY_US: each item of a stream's work starts after a random delay of up to this (50).
 * - STANDIN_LATE_MS: the first item of a new stream's work starts so late.
 * - STANDIN_QUEUE: a launch blocks while its stream has so many items in its queue (2^20). Meanwhile other
 *   threads' calls on streams and events block, too.
 * - STANDIN_UNLOAD_MS: its destructors take this long. A call after their begin prints a backtrace and ends
 *   the process.
 *
 * Captures use the global mode: an unsafe call of a thread that has not switched to the relaxed mode fails,
 * and invalidates the capture. So does a wait for a captured stream or event, or for the device, in every
 * mode (graphs.c).
 *
 * A call of a thread without a current context fails, except of those that need none. cuGetProcAddress finds
 * a function for the CUDA version that introduced it, and later ones; none for per-thread default streams.
 *
 * standin_live() returns the number of objects created and not freed; standin_calls() the functions that this
 * thread has called since it called that before, with their number, a line each.
 *
 * Not imitated:
 * - Kernels and copies take any memory of the host, as on a machine that shares all of it with the GPU.
 * - All kernels run at once, whatever their CTAs and SMs: kernels that wait for each other never lack room.
 * - The legacy stream does not synchronize with other streams, and priorities have no effect.
 * - A context has no memory, stream or event of its own: an object of one device works on another. */
#include "devices/cuda/driver.h"
#include "mapping.h"
#include "memory.h"
#include "streams.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES = 8, SMS = 20, INVALID = 1, NO_MEMORY = 2, NOT_READY = 600 };

static int contexts[DEVICES];
static _Thread_local int *current;

int has_context(void)
{
    return current != NULL;
}

static int Init(unsigned flags)
{
    (void)flags;
    return failure("cuInit");
}

static int GetErrorName(int error, const char **name)
{
    *name = error == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_A_STAND_IN";
    return 0;
}

static int GetErrorString(int error, const char **text)
{
    static _Thread_local char words[32];
    snprintf(words, sizeof words, "error %d", error);
    *text = words;
    return 0;
}

static int DeviceGet(int *device, int ordinal)
{
    const char *text = standin_getenv("STANDIN_DEVICES");
    int number = text ? atoi(text) : 1;
    *device = ordinal;
    return ordinal < 0 || ordinal >= number || ordinal >= DEVICES ? 101 : 0;
}

static int DeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == SPAR_CU_COMPUTE_MAJOR ? 9 : attribute == SPAR_CU_SMS ? SMS : 0;
    return 0;
}

static int DevicePrimaryCtxRetain(int **context, int device)
{
    *context = &contexts[device];
    return 0;
}

static int CtxGetCurrent(int **context)
{
    *context = current;
    return failure("cuCtxGetCurrent");
}

static int CtxSetCurrent(int *context)
{
    current = context;
    return failure("cuCtxSetCurrent");
}

static int CtxSynchronize(void)
{
    MAY_FAIL("cuCtxSynchronize");
    MAY_CONFLICT(conflict(captures));
    pthread_mutex_lock(&lock);
    for (stream *s = streams; s;)
        if (quiet(s)) {
            s = s->next;
        } else { /* streams may be destroyed meanwhile */
            pthread_cond_wait(&moved, &lock);
            s = streams;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int ModuleLoadData(void **module, const void *image)
{
    MAY_FAIL("cuModuleLoadData");
    *module = &contexts;
    return strcmp(image, "stand-in") == 0 ? 0 : 200;
}

static int ModuleGetFunction(void **function, void *module, const char *name)
{
#define NAME(width, factor) "copy_" #width "_" #factor,
    static const char *const names[] = {SPAR_KERNELS(NAME)};
    MAY_FAIL("cuModuleGetFunction");
    (void)module;
    for (int i = 0; i < SPAR_KERNEL_COUNT; i++)
        if (strcmp(names[i], name) == 0) {
            *function = (void *)(intptr_t)(i + 1);
            return 0;
        }
    return 500;
}

static int LaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned by,
                        unsigned bz, unsigned shared, void *handle, void **parameters, void **extra)
{
    MAY_FAIL("cuLaunchKernel");
    if (!x || x > SMS * 3 / 4 || y != 1 || z != 1 || threads != SPAR_KERNEL_THREADS || by != 1 || bz != 1 ||
        shared || extra)
        return INVALID;
    work w = {.run = run_kernel, .kernel = (int)(intptr_t)function - 1, .bytes = x};
    w.copy = *(spar_kernel_copy *)parameters[0];
    return give(handle, w);
}

static int MemAlloc(uint64_t *memory, size_t bytes)
{
    MAY_FAIL("cuMemAlloc");
    MAY_CONFLICT(unsafe());
    void *made = bytes ? aligned_alloc(256, (bytes + 255) / 256 * 256) : NULL;
    *memory = (uintptr_t)on_device(made);
    count(made != NULL);
    return made ? 0 : bytes ? NO_MEMORY : INVALID;
}

/* Does not wait: the driver's may, or not. */
static int MemFree(uint64_t memory)
{
    MAY_FAIL("cuMemFree");
    MAY_CONFLICT(unsafe());
    free(reached((void *)(uintptr_t)memory));
    count(-1);
    return 0;
}

static int MemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    MAY_FAIL("cuMemHostAlloc");
    MAY_CONFLICT(unsafe());
    *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    count(*memory != NULL);
    return *memory ? 0 : NO_MEMORY;
}

static int MemFreeHost(void *memory)
{
    MAY_FAIL("cuMemFreeHost");
    MAY_CONFLICT(unsafe());
    free(memory);
    count(-1);
    return 0;
}

/* The newest copy from pageable memory, which the driver may still make when the call has returned: here it
 * waits for the next work of the default stream. */
static struct {
    void *to, *bytes;
    size_t count;
} late;

static void arrive(void)
{
    if (late.bytes)
        memcpy(reached(late.to), late.bytes, late.count);
    free(late.bytes);
    late.bytes = NULL;
}

static int MemcpyHtoD(uint64_t to, const void *from, size_t bytes)
{
    MAY_FAIL("cuMemcpyHtoD");
    MAY_CONFLICT(unsafe());
    pthread_mutex_lock(&lock);
    arrive();
    late.to = (void *)(uintptr_t)to;
    late.count = bytes;
    late.bytes = malloc(bytes);
    memcpy(late.bytes, from, bytes);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int MemcpyDtoH(void *to, uint64_t from, size_t bytes)
{
    MAY_FAIL("cuMemcpyDtoH");
    MAY_CONFLICT(unsafe());
    pthread_mutex_lock(&lock);
    arrive();
    memcpy(to, reached((void *)(uintptr_t)from), bytes);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int StreamCreate(stream **made, unsigned flags)
{
    (void)flags;
    MAY_FAIL("cuStreamCreate");
    pthread_mutex_lock(&lock);
    *made = new_stream();
    pthread_mutex_unlock(&lock);
    return 0;
}

static int StreamGetId(void *handle, unsigned long long *id)
{
    MAY_FAIL("cuStreamGetId");
    pthread_mutex_lock(&lock);
    *id = stream_of(handle)->id;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int StreamDestroy(stream *s)
{
    MAY_FAIL("cuStreamDestroy");
    MAY_CONFLICT(unsafe());
    pthread_mutex_lock(&lock);
    s->ends = 1;
    pthread_cond_signal(&s->given);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int StreamSynchronize(void *handle)
{
    MAY_FAIL("cuStreamSynchronize");
    MAY_CONFLICT(conflict(stream_of(handle)->capture != NULL));
    pthread_mutex_lock(&lock);
    stream *s = stream_of(handle);
    while (!quiet(s))
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int StreamQuery(void *handle)
{
    MAY_FAIL("cuStreamQuery");
    MAY_CONFLICT(conflict(stream_of(handle)->capture != NULL));
    pthread_mutex_lock(&lock);
    enter_driver(NULL);
    int code = quiet(stream_of(handle)) ? 0 : NOT_READY;
    pthread_mutex_unlock(&lock);
    return code;
}

static int StreamGetCaptureInfo(void *handle, int *status, uint64_t *id)
{
    MAY_FAIL("cuStreamGetCaptureInfo");
    pthread_mutex_lock(&lock);
    stream *s = stream_of(handle);
    *status = s->capture ? 1 + !!s->capture->spoiled : 0;
    *id = s->capture ? s->capture->id : 0;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int StreamWriteValue32(void *handle, uint64_t address, uint32_t value, unsigned flags)
{
    MAY_FAIL("cuStreamWriteValue32");
    return flags ? INVALID
                 : give(handle, (work){.run = run_write, .to = (void *)(uintptr_t)address, .bytes = value});
}

static int ThreadExchangeStreamCaptureMode(int *wanted)
{
    int before = mode;
    mode = *wanted;
    *wanted = before;
    return failure("cuThreadExchangeStreamCaptureMode");
}

/* The graph that the event's newest record belongs to, if it is still being captured. */
static graph *capture_of(const event *e)
{
    for (stream *s = streams; s; s = s->next)
        if (s->capture && s->capture->id == e->capture)
            return s->capture;
    return NULL;
}

static int StreamWaitEvent(void *handle, event *e, unsigned flags)
{
    int code = 0;
    (void)flags;
    MAY_FAIL("cuStreamWaitEvent");
    pthread_mutex_lock(&lock);
    stream *s = stream_of(handle);
    graph *g = capture_of(e);
    enter_driver(s);
    if (e->capture && !g)
        code = CAPTURED_EVENT;
    else if (s->capture && g != s->capture)
        code = s->capture->spoiled = g ? MERGE : ISOLATION;
    else if (g) { /* the stream joins the capture */
        s->capture = g;
        append(handle, (work){.run = run_nothing, .needs = {NULL, e->node}});
    } else if (e->done < e->issued) {
        e->refs++;
        append(handle, (work){.run = run_wait, .event = e, .bytes = e->issued});
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int EventCreate(event **made, unsigned flags)
{
    (void)flags;
    MAY_FAIL("cuEventCreate");
    *made = calloc(1, sizeof **made);
    (*made)->refs = 1;
    count(1);
    return 0;
}

static int EventDestroy(event *e)
{
    MAY_FAIL("cuEventDestroy");
    pthread_mutex_lock(&lock);
    drop_event(e);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int EventRecord(event *e, void *handle)
{
    MAY_FAIL("cuEventRecord");
    pthread_mutex_lock(&lock);
    stream *s = stream_of(handle);
    enter_driver(s);
    e->capture = s->capture ? s->capture->id : 0;
    e->node = s->tail;
    if (!s->capture) {
        e->refs++;
        append(handle, (work){.run = run_record, .event = e, .bytes = ++e->issued});
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int EventQuery(event *e)
{
    MAY_FAIL("cuEventQuery");
    pthread_mutex_lock(&lock);
    enter_driver(NULL);
    int code = conflict(e->capture != 0);
    if (!code && e->done < e->issued)
        code = NOT_READY;
    pthread_mutex_unlock(&lock);
    return code;
}

/* The stand-in for libnccl looks it up by name, and launches its work with it. It needs no context: NCCL sets
 * the device by itself. */
EXPORT int cuLaunchHostFunc(void *handle, void (*function)(void *), void *context)
{
    int code = failure("cuLaunchHostFunc");
    return code ? code : give(handle, (work){.run = run_host, .host = function, .context = context});
}

/* The device's address of memory that a test has allocated. */
EXPORT void *standin_on_device(const void *memory);
EXPORT void *standin_on_device(const void *memory)
{
    return on_device(memory);
}

/* Overwrites memory in the stream, as whoever gets it next from an allocator that follows the stream's
 * order. */
EXPORT int standin_spoil(void *handle, void *memory, size_t bytes);
EXPORT int standin_spoil(void *handle, void *memory, size_t bytes)
{
    return give(handle, (work){.run = run_spoil, .to = memory, .bytes = bytes});
}

enum { LEGACY_STREAM = 1, SYMBOL_NOT_FOUND = 1, VERSION_NOT_SUFFICIENT = 2, NOT_FOUND = 500 };

EXPORT int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
#define ROW(name, version, parameters) {"cu" #name, (void *)name, version},
    static const struct {
        const char *name;
        void *function;
        int version;
    } rows[] = {SPAR_DRIVER_FUNCTIONS(ROW) SPAR_DRIVER_NEWER_FUNCTIONS(ROW) /* and what only tests call */
                ROW(StreamBeginCapture, 10010, ) ROW(StreamEndCapture, 10000, ) ROW(GraphLaunch, 10000, )
                    ROW(GraphDestroy, 10000, )};
    const char *without = standin_getenv("STANDIN_LACKS");
    *status = SYMBOL_NOT_FOUND;
    *found = NULL;
    if (flags & ~(uint64_t)LEGACY_STREAM)
        return NOT_FOUND;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].name, name) == 0 && !(without && strcmp(without, name) == 0)) {
            if (version < rows[i].version) {
                *status = VERSION_NOT_SUFFICIENT;
                return NOT_FOUND;
            }
            *found = rows[i].function;
            *status = 0;
            return 0;
        }
    return NOT_FOUND;
}
