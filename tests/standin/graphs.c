/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's captures and graphs. A graph's nodes run after those that they need, else in a random order:
 * work of two captured streams that no event orders is not ordered. */
#include "streams.h"

#include <stdlib.h>

static uint64_t ids; /* of captures */

/* Requires the lock. */
static void drop_graph(graph *g)
{
    if (--g->refs)
        return;
    for (work *held = g->held, *next; held; held = next) {
        next = held->next;
        held->host(held->context);
        free(held);
    }
    for (int i = 0; i < g->count; i++)
        free(g->nodes[i]);
    free(g->nodes);
    free(g);
    count(-1);
}

static void run_drop_graph(work *w)
{
    pthread_mutex_lock(&lock);
    drop_graph(w->context);
    pthread_mutex_unlock(&lock);
}

/* Whether the origin comes after all nodes. */
static int is_joined(graph *g)
{
    uint64_t mark = ++g->marks;
    if (g->origin->tail)
        g->origin->tail->mark = mark;
    for (int i = g->count - 1; i >= 0; i--)
        for (int k = 0; k < 2; k++)
            if (g->nodes[i]->mark == mark && g->nodes[i]->needs[k])
                g->nodes[i]->needs[k]->mark = mark;
    for (int i = 0; i < g->count; i++)
        if (g->nodes[i]->mark != mark)
            return 0;
    return 1;
}

int StreamBeginCapture(void *handle, int ignored)
{
    (void)ignored;
    pthread_mutex_lock(&lock);
    stream *s = stream_of(handle);
    s->capture = calloc(1, sizeof *s->capture);
    s->capture->refs = 1;
    s->capture->id = ++ids;
    s->capture->origin = s;
    captures++;
    count(1);
    pthread_mutex_unlock(&lock);
    return 0;
}

int StreamEndCapture(void *handle, graph **made)
{
    pthread_mutex_lock(&lock);
    stream *origin = stream_of(handle);
    graph *g = origin->capture && origin->capture->origin == origin ? origin->capture : NULL;
    int code = !g ? UNMATCHED : g->spoiled ? INVALIDATED : is_joined(g) ? 0 : UNJOINED;
    for (stream *s = streams; g && s; s = s->next)
        if (s->capture == g) {
            s->capture = NULL;
            s->tail = NULL;
        }
    captures -= g != NULL;
    *made = code ? NULL : g;
    if (g && code)
        drop_graph(g);
    pthread_mutex_unlock(&lock);
    return code;
}

static int is_ready(const work *node, uint64_t mark)
{
    return node->mark != mark && (!node->needs[0] || node->needs[0]->mark == mark) &&
           (!node->needs[1] || node->needs[1]->mark == mark);
}

/* Runs the nodes on one stream, in a random order that their needs allow. */
int GraphLaunch(graph *g, void *handle)
{
    static unsigned seed;
    pthread_mutex_lock(&lock);
    uint64_t mark = ++g->marks;
    seed += (unsigned)(uintptr_t)g;
    for (int left = g->count; left > 0; left--) {
        int i = rand_r(&seed) % g->count;
        while (!is_ready(g->nodes[i], mark))
            i = (i + 1) % g->count;
        g->nodes[i]->mark = mark;
        append(handle, *g->nodes[i]);
    }
    g->refs++;
    append(handle, (work){.run = run_drop_graph, .context = g});
    pthread_mutex_unlock(&lock);
    return 0;
}

int GraphDestroy(graph *g)
{
    pthread_mutex_lock(&lock);
    drop_graph(g);
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT int cuStreamIsCapturing(void *handle, int *status);
EXPORT int cuStreamIsCapturing(void *handle, int *status)
{
    pthread_mutex_lock(&lock);
    *status = stream_of(handle)->capture != NULL;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Calls release(context) when the graph that captures the stream is gone. */
EXPORT void standin_hold(void *handle, void (*release)(void *), void *context);
EXPORT void standin_hold(void *handle, void (*release)(void *), void *context)
{
    pthread_mutex_lock(&lock);
    graph *g = stream_of(handle)->capture;
    work *held = calloc(1, sizeof *held);
    *held = (work){.next = g->held, .host = release, .context = context};
    g->held = held;
    pthread_mutex_unlock(&lock);
}
