/* SPDX-License-Identifier: Apache-2.0 */
#include "streams.h"

#include "memory.h"

#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void standin_kernel(int which, const spar_kernel_copy *c, unsigned cta, unsigned ctas, unsigned from);

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
stream *streams;
int captures;
_Thread_local int mode;
static stream *legacy;
static int live, unloaded, blocked; /* blocked: threads that wait for room in a queue */

EXPORT int standin_live(void);
EXPORT int standin_live(void)
{
    return __atomic_load_n(&live, __ATOMIC_SEQ_CST);
}

void count(int by)
{
    __atomic_add_fetch(&live, by, __ATOMIC_SEQ_CST);
}

static pthread_mutex_t environment = PTHREAD_MUTEX_INITIALIZER;

const char *standin_getenv(const char *name)
{
    pthread_mutex_lock(&environment);
    const char *text = getenv(name);
    pthread_mutex_unlock(&environment);
    return text;
}

int standin_setenv(const char *name, const char *value)
{
    pthread_mutex_lock(&environment);
    int result = value ? setenv(name, value, 1) : unsetenv(name);
    pthread_mutex_unlock(&environment);
    return result;
}

static __attribute__((destructor)) void unload(void)
{
    const char *ms = standin_getenv("STANDIN_UNLOAD_MS");
    __atomic_store_n(&unloaded, 1, __ATOMIC_SEQ_CST);
    if (ms)
        usleep((unsigned)atoi(ms) * 1000);
}

EXPORT void standin_in_use(void);
EXPORT void standin_in_use(void)
{
    void *frames[64];
    if (!__atomic_load_n(&unloaded, __ATOMIC_SEQ_CST))
        return;
    fprintf(stderr, "stand-in: a call after libcuda's destructors ran\n");
    backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
    abort();
}

enum { FUNCTIONS = 48, LINE = 64 };

static const char *functions[FUNCTIONS]; /* that were called */
static _Thread_local unsigned short called[FUNCTIONS];

static void count_call(const char *name)
{
    int i = 0;
    pthread_mutex_lock(&lock);
    while (functions[i] && strcmp(functions[i], name) != 0)
        i++;
    functions[i] = name;
    pthread_mutex_unlock(&lock);
    called[i]++;
}

EXPORT const char *standin_calls(void);
EXPORT const char *standin_calls(void)
{
    static char text[FUNCTIONS * LINE];
    char *end = text;
    *end = 0;
    for (int i = 0; i < FUNCTIONS; i++) {
        if (called[i])
            end += snprintf(end, LINE, "%s %d\n", functions[i], called[i]);
        called[i] = 0;
    }
    return text;
}

int failure(const char *name)
{
    standin_in_use();
    count_call(name);
    static int calls;
    static char counted[128];
    const char *plan = standin_getenv("STANDIN_FAIL");
    size_t length = strlen(name);
    int nth = 0, code = 0;
    if (!plan || strncmp(plan, name, length) != 0 || plan[length] != ':')
        return 0;
    pthread_mutex_lock(&lock);
    if (strncmp(counted, plan, sizeof counted) != 0) { /* a new plan */
        calls = 0;
        snprintf(counted, sizeof counted, "%s", plan);
    }
    int call = ++calls;
    pthread_mutex_unlock(&lock);
    sscanf(plan + length, ":%d:%d", &nth, &code);
    return call == nth ? code : 0;
}

static int invalidate(void)
{
    for (stream *s = streams; s; s = s->next)
        if (s->capture)
            s->capture->spoiled = 1;
    return UNSUPPORTED;
}

int unsafe(void)
{
    return captures && mode != 2 ? invalidate() : 0;
}

int conflict(int captured)
{
    return captured ? invalidate() : unsafe();
}

/* Runs every second CTA from `odd` on, in a permuted order. Two threads run a kernel, so that TSan detects
 * races between CTAs. */
static void *run_ctas(void *argument)
{
    work *w = argument;
    size_t half = w->bytes / 2 + (w->odd == 0 && w->bytes % 2), seed = (uintptr_t)w >> 4;
    for (size_t i = 0; i < half; i++)
        standin_kernel(w->kernel, &w->copy, (unsigned)(2 * ((i + seed) % half)) + (unsigned)w->odd,
                       (unsigned)w->bytes, (unsigned)(seed + i) % SPAR_KERNEL_THREADS);
    return NULL;
}

void run_kernel(work *w)
{
    w->copy.sync = reached(w->copy.sync);
    for (int i = 0; i < w->copy.parts; i++) {
        w->copy.part[i].from = reached(w->copy.part[i].from);
        w->copy.part[i].to = reached(w->copy.part[i].to);
    }
    work other = *w;
    pthread_t thread;
    other.odd = 1;
    int threads = w->bytes > 1 && pthread_create(&thread, NULL, run_ctas, &other) == 0;
    run_ctas(w);
    if (threads)
        pthread_join(thread, NULL);
}

void run_copy(work *w)
{
    memcpy(reached(w->to), reached(w->from), w->bytes);
}

void run_spoil(work *w)
{
    memset(reached(w->to), 0xEE, w->bytes);
}

void run_host(work *w)
{
    w->host(w->context);
}

void drop_event(event *e)
{
    if (--e->refs == 0) {
        free(e);
        count(-1);
    }
}

void run_record(work *w)
{
    pthread_mutex_lock(&lock);
    if (w->event->done < w->bytes)
        w->event->done = w->bytes;
    drop_event(w->event);
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

void run_wait(work *w)
{
    pthread_mutex_lock(&lock);
    while (w->event->done < w->bytes)
        pthread_cond_wait(&moved, &lock);
    drop_event(w->event);
    pthread_mutex_unlock(&lock);
}

void run_write(work *w)
{
    __atomic_store_n((uint32_t *)reached(w->to), (uint32_t)w->bytes, __ATOMIC_RELEASE);
}

void run_nothing(work *w)
{
    (void)w;
}

static void *serve(void *argument)
{
    stream *s = argument;
    unsigned seed = (unsigned)(uintptr_t)s;
    const char *text = standin_getenv("STANDIN_DELAY_US");
    unsigned delay = text ? (unsigned)atoi(text) : 50;
    const char *late = standin_getenv("STANDIN_LATE_MS");
    unsigned first = late ? (unsigned)atoi(late) * 1000 : 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->first && !s->ends)
            pthread_cond_wait(&s->given, &lock);
        work *w = s->first;
        if (!w)
            break;
        if (!(s->first = w->next))
            s->last = &s->first;
        s->busy = 1;
        s->length--;
        if (blocked)
            pthread_cond_broadcast(&moved);
        pthread_mutex_unlock(&lock);
        if (first || delay)
            usleep(first ? first : (unsigned)rand_r(&seed) % delay);
        first = 0;
        w->run(w);
        free(w);
        pthread_mutex_lock(&lock);
        s->busy = 0;
        pthread_cond_broadcast(&moved);
    }
    stream **link = &streams;
    while (*link != s)
        link = &(*link)->next;
    *link = s->next;
    pthread_cond_destroy(&s->given);
    free(s);
    count(-1);
    pthread_mutex_unlock(&lock);
    return NULL;
}

stream *new_stream(void)
{
    static uint64_t ids;
    stream *s = calloc(1, sizeof *s);
    s->id = ++ids;
    pthread_cond_init(&s->given, NULL);
    s->last = &s->first;
    s->next = streams;
    streams = s;
    pthread_create(&s->thread, NULL, serve, s);
    pthread_detach(s->thread);
    count(1);
    return s;
}

stream *stream_of(void *handle)
{
    if (!handle && !legacy) {
        legacy = new_stream();
        count(-1);
    }
    return handle ? handle : legacy;
}

static void add_node(stream *s, work *w)
{
    graph *g = s->capture;
    g->nodes = realloc(g->nodes, (size_t)(g->count + 1) * sizeof *g->nodes);
    g->nodes[g->count++] = w;
    w->needs[0] = s->tail;
    s->tail = w;
}

work *append(void *handle, work w)
{
    stream *s = stream_of(handle);
    work *kept = malloc(sizeof *kept);
    *kept = w;
    kept->next = NULL;
    if (s->capture) {
        add_node(s, kept);
        return kept;
    }
    s->length++;
    *s->last = kept;
    s->last = &kept->next;
    pthread_cond_signal(&s->given);
    return kept;
}

void enter_driver(const stream *s)
{
    const char *text = standin_getenv("STANDIN_QUEUE");
    int room = text ? atoi(text) : 1 << 20;
    while (blocked)
        pthread_cond_wait(&moved, &lock);
    while (s && !s->capture && s->length >= room) {
        blocked++;
        pthread_cond_wait(&moved, &lock);
        if (--blocked == 0)
            pthread_cond_broadcast(&moved);
    }
}

int give(void *handle, work w)
{
    pthread_mutex_lock(&lock);
    enter_driver(stream_of(handle));
    append(handle, w);
    pthread_mutex_unlock(&lock);
    return 0;
}

int quiet(const stream *s)
{
    return !s->first && !s->busy;
}
