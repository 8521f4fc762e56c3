/* The stand-in's streams: each a thread that does its work later, in the order in which it was given. */
#ifndef STREAMS_H
#define STREAMS_H

#include "devices/cuda/kernels.h"

#include <pthread.h>
#include <stdint.h>

enum { UNSUPPORTED = 900, INVALIDATED = 901, UNMATCHED = 904, ISOLATION = 905 };
#define EXPORT __attribute__((visibility("default")))

typedef struct work {
    struct work *next;
    void (*run)(struct work *work);
    void (*host)(void *context);
    void *context, *to;
    const void *from;
    size_t bytes;      /* also: a grid, a ticket */
    int kernel, owned; /* owned: `from` is freed with the work */
    struct event *event;
    spar_kernel_copy copy;
} work;

typedef struct graph {
    work *first, **last;
    int spoiled;
} graph;

typedef struct event {
    uint64_t issued, done;
    graph *captured; /* where it was recorded last */
    int refs;
} event;

typedef struct stream {
    pthread_t thread;
    work *first, **last;
    int busy, ends;
    graph *capture;
    struct stream *next;
} stream;

extern pthread_mutex_t lock;   /* of everything */
extern pthread_cond_t moved;   /* broadcast when something is done, or given */
extern stream *streams;        /* all */
extern int captures;           /* under way */
extern _Thread_local int mode; /* of captures: 2 is relaxed */

/* What was made and not freed: standin_live() tells it. */
void count(int by);

/* The code with which this call is to fail; 0: it is not. */
int failure(const char *name);

#define MAY_FAIL(name)                                                                                       \
    do {                                                                                                     \
        int code_ = failure(name);                                                                           \
        if (code_)                                                                                           \
            return code_;                                                                                    \
    } while (0)

/* What a capture forbids. With the lock held. */
int forbidden(void);

#define FORBIDDEN_IN_CAPTURE                                                                                 \
    do {                                                                                                     \
        pthread_mutex_lock(&lock);                                                                           \
        int code_ = forbidden();                                                                             \
        pthread_mutex_unlock(&lock);                                                                         \
        if (code_)                                                                                           \
            return code_;                                                                                    \
    } while (0)

/* With the lock held: */
stream *new_stream(void);
stream *stream_of(void *handle); /* NULL is the legacy stream, which here is ordered with no other */
int quiet(const stream *s);
void append(void *handle, work w); /* to the stream, or the graph that it is captured into */
void drop_event(event *e);

/* The same as append, without it. */
int give(void *handle, work w);

/* Kinds of work. */
void run_kernel(work *w);
void run_copy(work *w);
void run_host(work *w);
void run_record(work *w);
void run_wait(work *w);
void free_work(work *w);

#endif
