/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's streams: each is a thread that runs its work asynchronously, in order. */
#ifndef STREAMS_H
#define STREAMS_H

#include "devices/cuda/kernels.h"

#include <pthread.h>
#include <stdint.h>

enum {
    INVALID_CONTEXT = 201,
    UNSUPPORTED = 900,
    INVALIDATED = 901,
    MERGE = 902,
    UNMATCHED = 903,
    UNJOINED = 904,
    ISOLATION = 905,
    CAPTURED_EVENT = 907,
};
#define EXPORT __attribute__((visibility("default")))

typedef struct work {
    struct work *next;
    void (*run)(struct work *work);
    void (*host)(void *context);
    void *context, *to;
    const void *from;
    size_t bytes;    /* of a copy; else the grid size, or the number of an event's record */
    int kernel, odd; /* odd: run CTAs 1, 3, ... of it */
    struct event *event;
    spar_kernel_copy copy;
    /* in a graph: */
    struct work *needs[2]; /* the nodes that end before it begins, or NULL */
    uint64_t mark;         /* the newest pass over the graph that has met it */
} work;

/* Nodes, each after those that it needs. What is held is released when the graph has been destroyed and its
 * last replay has ended. */
typedef struct graph {
    work **nodes, *held;
    int count, refs, spoiled;
    uint64_t id, marks;
    struct stream *origin;
} graph;

typedef struct event {
    uint64_t issued, done;
    uint64_t capture; /* the id of the graph that the newest record belongs to, or 0 */
    work *node;       /* of that graph: the newest before the record */
    int refs;
} event;

typedef struct stream {
    uint64_t id; /* no other one has had it */
    pthread_t thread;
    pthread_cond_t given; /* signalled when work is enqueued, and when the stream ends */
    work *first, **last;
    int busy, ends, length; /* length: of its queue */
    graph *capture;
    work *tail; /* its newest node of the capture */
    struct stream *next;
} stream;

extern pthread_mutex_t lock;   /* protects all state */
extern pthread_cond_t moved;   /* broadcast when work has ended, or a full queue has room */
extern stream *streams;        /* all of them */
extern int captures;           /* in progress */
extern _Thread_local int mode; /* the thread's capture mode; 2 is relaxed */

/* The environment: spar's threads and those of streams read it at any time, and setenv frees what getenv
 * walks. So Python must change it by the second function; a value of NULL unsets the variable. */
EXPORT const char *standin_getenv(const char *name);
EXPORT int standin_setenv(const char *name, const char *value);

/* Counts objects created and not freed; standin_live() returns the sum. */
void count(int by);

/* Counts a call of a function, for standin_calls; returns the code with which STANDIN_FAIL makes it fail, or
 * 0. */
int failure(const char *name);

/* Whether the thread has a current context, without which the driver's functions fail. */
int has_context(void);

#define MAY_FAIL(name)                                                                                       \
    do {                                                                                                     \
        int code_ = has_context() ? failure(name) : INVALID_CONTEXT;                                         \
        if (code_)                                                                                           \
            return code_;                                                                                    \
    } while (0)

/* With the lock held. An error, which invalidates all captures in progress:
 * - unsafe: for calls that CUDA allows in the relaxed mode only;
 * - conflict: the same, and in every mode if what is waited for or queried is being captured. */
int unsafe(void);
int conflict(int captured);

#define MAY_CONFLICT(check)                                                                                  \
    do {                                                                                                     \
        pthread_mutex_lock(&lock);                                                                           \
        int code_ = (check);                                                                                 \
        pthread_mutex_unlock(&lock);                                                                         \
        if (code_)                                                                                           \
            return code_;                                                                                    \
    } while (0)

/* With the lock held: */
stream *new_stream(void);
stream *stream_of(void *handle); /* NULL: the legacy stream, not synchronized with others here */
int quiet(const stream *s);
work *append(void *handle, work w); /* to the stream, or the graph that captures it */
void drop_event(event *e);
/* Blocks while the queue of this stream (NULL: of none) is full (STANDIN_QUEUE), and while another thread is
 * blocked so: the driver serves one thread at a time. */
void enter_driver(const stream *s);

/* enter_driver and append, for callers that do not hold the lock. */
int give(void *handle, work w);

/* The driver's functions that capture, of graphs.c. */
int StreamBeginCapture(void *handle, int ignored);
int StreamEndCapture(void *handle, graph **made);
int GraphLaunch(graph *g, void *handle);
int GraphDestroy(graph *g);

/* Kinds of work. */
void run_kernel(work *w);
void run_copy(work *w);
void run_spoil(work *w);
void run_host(work *w);
void run_record(work *w);
void run_wait(work *w);
void run_write(work *w);
void run_nothing(work *w);

#endif
