/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_work.h"

#include "memory.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    struct ncclComm *comm;
    uint64_t turn;
    int count, mode;
    int captured; /* each replay runs it, and sets its turn */
    operation operations[];
} group;

char last_error[256];

void crash(const char *function, const char *what)
{
    void *frames[64];
    fprintf(stderr, "stand-in: %s %s\n", function, what);
    backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
    abort();
}

void use(const struct ncclComm *comm, const char *function)
{
    if (__atomic_load_n(&comm->state, __ATOMIC_ACQUIRE) != ALIVE)
        crash(function, "uses a communicator that was aborted");
}

void pause_shortly(int polls)
{
    const struct timespec moment = {0, polls < 40 ? 20000L << polls / 8 : 1000000L};
    nanosleep(&moment, NULL);
}

static pipe_memory *pipe_of(const struct ncclComm *comm, int from, int to)
{
    return &comm->shared->pipes[from * comm->world + to];
}

/* Moves bytes between memory and a pipe, as many as the pipe has room for, or holds; returns their number. */
static uint64_t move(pipe_memory *pipe, int sends, char *bytes, uint64_t length)
{
    uint64_t written = __atomic_load_n(&pipe->written, __ATOMIC_ACQUIRE);
    uint64_t read = __atomic_load_n(&pipe->read, __ATOMIC_ACQUIRE);
    uint64_t possible = sends ? PIPE - (written - read) : written - read;
    uint64_t count = length < possible ? length : possible;
    for (uint64_t done = 0; done < count;) {
        uint64_t place = ((sends ? written : read) + done) % PIPE;
        uint64_t part = count - done < PIPE - place ? count - done : PIPE - place;
        if (sends)
            memcpy(pipe->bytes + place, bytes + done, part);
        else
            memcpy(bytes + done, pipe->bytes + place, part);
        done += part;
    }
    if (sends)
        __atomic_store_n(&pipe->written, written + count, __ATOMIC_RELEASE);
    else
        __atomic_store_n(&pipe->read, read + count, __ATOMIC_RELEASE);
    return count;
}

/* Returns whether the operation moved bytes; sets *error if the lengths do not match. */
static int advance(operation *o, spar_nccl_result *error)
{
    struct ncclComm *c = o->comm;
    pipe_memory *pipe = o->sends ? pipe_of(c, c->rank, o->peer) : pipe_of(c, o->peer, c->rank);
    uint64_t before = o->head + o->at, length = o->length;
    if (o->head < sizeof length) {
        if (!o->sends && __atomic_load_n(&pipe->written, __ATOMIC_ACQUIRE) -
                                 __atomic_load_n(&pipe->read, __ATOMIC_ACQUIRE) <
                             sizeof length)
            return 0;
        if (o->sends && PIPE - (__atomic_load_n(&pipe->written, __ATOMIC_ACQUIRE) -
                                __atomic_load_n(&pipe->read, __ATOMIC_ACQUIRE)) <
                            sizeof length)
            return 0;
        o->head += move(pipe, o->sends, (char *)&length, sizeof length);
        if (length != o->length) {
            snprintf(last_error, sizeof last_error, "rank %d sent %llu bytes, rank %d expects %llu", o->peer,
                     (unsigned long long)length, c->rank, (unsigned long long)o->length);
            *error = INVALID_USAGE;
            return 0;
        }
    }
    o->at += move(pipe, o->sends, (char *)reached(o->bytes) + o->at, o->length - o->at);
    return o->head + o->at > before;
}

static int is_over(const operation *o)
{
    return o->head == sizeof o->length && o->at == o->length;
}

static uint64_t take_turn(struct ncclComm *c)
{
    __atomic_add_fetch(&c->running, 1, __ATOMIC_RELAXED);
    return __atomic_fetch_add(&c->given, 1, __ATOMIC_RELAXED);
}

/* Advances the first unfinished operation of each peer and direction, until all are over. */
static void run_group(void *context)
{
    group *g = context;
    struct ncclComm *c = g->comm;
    spar_nccl_result error = SPAR_NCCL_SUCCESS;
    if (g->captured) {
        use(c, "a graph's replay");
        g->turn = take_turn(c);
        for (int i = 0; i < g->count; i++)
            g->operations[i].head = g->operations[i].at = 0;
    }
    for (int polls = 0; __atomic_load_n(&c->over, __ATOMIC_ACQUIRE) != g->turn; polls++) {
        use(c, "a kernel");
        pause_shortly(polls);
    }
    if (g->mode == 'r') {
        snprintf(last_error, sizeof last_error, "the stand-in's remote error");
        error = REMOTE_ERROR;
    }
    for (int left = g->count, polls = 0; left > 0 && !__atomic_load_n(&c->aborted, __ATOMIC_ACQUIRE);) {
        char busy[2][MOST_RANKS] = {{0}};
        int moved = 0;
        use(c, "a kernel");
        left = 0;
        for (int i = 0; i < g->count && !error && g->mode != 's'; i++) {
            operation *o = &g->operations[i];
            if (is_over(o) || busy[o->sends][o->peer])
                continue;
            moved |= advance(o, &error);
            if (is_over(o))
                continue;
            busy[o->sends][o->peer] = 1;
            left++;
        }
        if (error) /* the kernel runs until it is aborted */
            __atomic_store_n(&c->error, error, __ATOMIC_RELEASE);
        left += error || g->mode == 's';
        polls = moved ? 0 : polls + 1;
        if (left && polls)
            pause_shortly(polls);
    }
    __atomic_store_n(&c->over, g->turn + 1, __ATOMIC_RELEASE);
    __atomic_sub_fetch(&c->running, 1, __ATOMIC_RELEASE);
    if (!g->captured)
        free(g);
}

void *cuda(const char *name)
{
    return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
}

const char *setting(const char *name)
{
    const char *(*get)(const char *);
    void *address = cuda("standin_getenv");
    memcpy(&get, &address, sizeof address);
    return get ? get(name) : getenv(name); /* over the real driver nobody else reads it */
}

static int is_captured(struct CUstream_st *stream)
{
    int (*ask)(struct CUstream_st *, int *);
    int status = 0;
    void *address = cuda("cuStreamIsCapturing");
    memcpy(&ask, &address, sizeof address);
    ask(stream, &status);
    return status != 0;
}

/* A graph that has the group is gone. */
static void forget(void *context)
{
    group *g = context;
    use(g->comm, "a graph's end");
    __atomic_sub_fetch(&g->comm->captured, 1, __ATOMIC_RELEASE);
    free(g);
}

spar_nccl_result launch(struct ncclComm *c, const operation *all, int total)
{
    static int (*launch_host)(struct CUstream_st *, void (*)(void *), void *);
    static void (*hold)(struct CUstream_st *, void (*)(void *), void *); /* NULL over the real driver */
    if (!launch_host) {
        void *address = cuda("standin_hold");
        memcpy(&hold, &address, sizeof address);
        address = cuda("cuLaunchHostFunc");
        memcpy(&launch_host, &address, sizeof address);
    }
    const char *later = setting("STANDIN_NCCL_LATER");
    use(c, "ncclGroupEnd");
    group *g = malloc(sizeof *g + (size_t)total * sizeof *all);
    struct CUstream_st *stream = NULL;
    g->comm = c;
    g->count = 0;
    g->mode = later ? later[0] : 0;
    for (int i = 0; i < total; i++)
        if (all[i].comm == c) {
            g->operations[g->count++] = all[i];
            stream = all[i].stream;
        }
    g->captured = is_captured(stream);
    if (!g->captured)
        g->turn = take_turn(c);
    else if (hold) {
        __atomic_add_fetch(&c->captured, 1, __ATOMIC_RELAXED);
        hold(stream, forget, g);
    }
    int code = launch_host(stream, run_group, g); /* blocks while the stream's queue is full */
    use(c, "ncclGroupEnd");
    if (code)
        snprintf(last_error, sizeof last_error, "cuLaunchHostFunc failed");
    return code ? SYSTEM_ERROR : SPAR_NCCL_SUCCESS;
}
