/* Random calls: the request, and what each rank holds before and after. */
#ifndef RANDOM_CALL_H
#define RANDOM_CALL_H

#include "spar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { WORLD = 8, DIMS = 4, TENSORS = 3, ARGS = 32, EXTENT = 64, NOT_WRITTEN = 0xee };

static void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

static uint64_t scramble(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

#ifndef DRAW /* fuzzers draw from their input */
#define DRAW(seed, bound) ((int)(scramble(*(seed) += 0x9e3779b97f4a7c15u) % (uint64_t)(bound)))
#endif

/* A number from 0 to bound - 1. */
static int draw(uint64_t *seed, int bound)
{
    return DRAW(seed, bound);
}

/* Which rank owns each index of one dim; a rank holds its indices in ascending order. */
typedef struct {
    int dim; /* -1: every rank holds all */
    int owner[EXTENT];
} cut;

typedef struct {
    int item, ndim, nargs, gap; /* gap: items left out between the input's rows */
    int64_t whole[DIMS], args[ARGS];
    cut in, out;
} part;

/* Assigns the next `count` indices to `rank`. */
static void assign(cut *c, int64_t *at, int rank, int64_t count)
{
    while (count-- > 0)
        c->owner[(*at)++] = rank;
}

static cut by_rule(const part *p, int dim, int world)
{
    cut c = {.dim = dim};
    int64_t at = 0;
    for (int rank = 0; rank < world; rank++)
        assign(&c, &at, rank, p->whole[dim] / world + (rank < p->whole[dim] % world));
    return c;
}

/* Splits each outer rank's indices among inner ranks, by the size rule. */
static void refine(cut *c, int64_t extent, int outer, int inner)
{
    for (int rank = 0; rank < outer; rank++) {
        int64_t held = 0, seen = 0;
        for (int64_t i = 0; i < extent; i++)
            held += c->owner[i] == rank;
        for (int64_t i = 0; i < extent; i++)
            if (c->owner[i] == rank) {
                int64_t big = (held / inner + 1) * (held % inner), at = seen++;
                int64_t part =
                    at < big ? at / (held / inner + 1) : held % inner + (at - big) / (held / inner);
                c->owner[i] = -1 - (int)(part * outer + rank);
            }
    }
    for (int64_t i = 0; i < extent; i++)
        c->owner[i] = -1 - c->owner[i];
}

static cut draw_sizes(uint64_t *seed, int world, part *p, int dim)
{
    cut c = {.dim = dim};
    p->nargs = 1 + world;
    p->whole[dim] = 0;
    for (int rank = 0; rank < world; rank++)
        assign(&c, &p->whole[dim], rank, p->args[1 + rank] = draw(seed, 4));
    return c;
}

static cut draw_zigzag(uint64_t *seed, int outer, part *p, int dim)
{
    cut c = {.dim = dim};
    int64_t chunk = draw(seed, 4);
    p->nargs = 3;
    p->whole[dim] = 0;
    for (int i = 0; i < 2 * outer; i++)
        assign(&c, &p->whole[dim], i < outer ? i : 2 * outer - 1 - i, chunk);
    p->args[2] = p->whole[dim];
    return c;
}

static cut draw_packed(uint64_t *seed, int outer, part *p, int dim)
{
    cut c = {.dim = dim};
    int sequences = draw(seed, 4), table = draw(seed, 2);
    p->args[2] = sequences;
    p->nargs = 3 + sequences * (table ? outer : 1);
    p->whole[dim] = 0;
    for (int s = 0; s < sequences; s++) {
        int64_t length = draw(seed, 7);
        for (int rank = 0; rank < outer; rank++) {
            int64_t size = table ? draw(seed, 3) : length / outer + (rank < length % outer);
            assign(&c, &p->whole[dim], rank, size);
            if (table)
                p->args[3 + rank * sequences + s] = size;
        }
        if (!table)
            p->args[3 + s] = length;
    }
    return c;
}

/* Draws arguments for each op. A new op fails here until it has a branch. */
static void draw_args(uint64_t *seed, const char *op, int world, part *p)
{
    int dim = draw(seed, p->ndim), other = (dim + 1 + draw(seed, p->ndim - 1)) % p->ndim;
    int splits = strstr(op, "split") != NULL, inner = 1 + draw(seed, world);
    const cut none = {.dim = -1};
    cut c;
    if (strcmp(op, "all_to_all") == 0) {
        int64_t args[] = {dim, other, p->whole[other]};
        memcpy(p->args, args, sizeof args);
        p->nargs = 3;
        p->in = by_rule(p, other, world);
        p->out = by_rule(p, dim, world);
        return;
    }
    while (world % inner)
        inner--;
    p->args[0] = dim;
    p->args[1] = inner;
    if (strncmp(op, "zigzag", 6) == 0) {
        c = draw_zigzag(seed, world / inner, p, dim);
        refine(&c, p->whole[dim], world / inner, inner);
    } else if (strncmp(op, "packed", 6) == 0) {
        c = draw_packed(seed, world / inner, p, dim);
        refine(&c, p->whole[dim], world / inner, inner);
    } else {
        EXPECT(strcmp(op, "split") == 0 || strcmp(op, "gather") == 0);
        c = by_rule(p, dim, world);
        p->args[1] = p->whole[dim];
        p->nargs = splits ? 1 : 2;
        if (draw(seed, 2))
            c = draw_sizes(seed, world, p, dim);
    }
    p->in = splits ? none : c;
    p->out = splits ? c : none;
}

/* All ranks draw the same call from the same seed. */
static const spar_op *draw_call(uint64_t seed, int world, int *count, part *parts)
{
    static const int items[] = {1, 2, 3, 4, 8, 16};
    int ops = 0;
    while (spar_ops[ops])
        ops++;
    const spar_op *op = spar_ops[draw(&seed, ops)];
    *count = 1 + draw(&seed, TENSORS);
    for (part *p = parts; p < parts + *count; p++) {
        *p = (part){.item = items[draw(&seed, 6)], .ndim = 2 + draw(&seed, 3), .gap = draw(&seed, 3)};
        for (int i = 0; i < p->ndim; i++)
            p->whole[i] = draw(&seed, p->ndim == 2 ? 20 : 7);
        draw_args(&seed, op->name, world, p);
    }
    return op;
}

/* One rank's tensor. */
typedef struct {
    int dim;
    int64_t extents[DIMS], strides[DIMS], bytes;
    int64_t place[EXTENT]; /* of each index of the cut dim, in the global tensor */
    unsigned char *data;
} buffer;

static buffer make_buffer(const part *p, int rank, const cut *c, int gap)
{
    buffer b = {.dim = c->dim, .bytes = p->item};
    memcpy(b.extents, p->whole, sizeof b.extents);
    if (c->dim >= 0)
        b.extents[c->dim] = 0;
    for (int64_t i = 0; c->dim >= 0 && i < p->whole[c->dim]; i++)
        if (c->owner[i] == rank)
            b.place[b.extents[c->dim]++] = i;
    for (int i = p->ndim - 1; i >= 0; i--) {
        b.strides[i] = b.bytes / p->item;
        b.bytes = b.bytes * b.extents[i] + (i == p->ndim - 1 ? gap * p->item : 0);
    }
    b.data = malloc((size_t)b.bytes + 1);
    EXPECT(b.data);
    memset(b.data, NOT_WRITTEN, (size_t)b.bytes + 1);
    return b;
}

/* Writes a value derived from its global index into each cell, or expects that value. */
static inline void visit(const part *p, const buffer *b, int check)
{
    int64_t cells = 1;
    for (int i = 0; i < p->ndim; i++)
        cells *= b->extents[i];
    for (int64_t cell = 0; cell < cells; cell++) {
        int64_t rest = cell, at = 0, place = 0, step = 1;
        for (int i = p->ndim - 1; i >= 0; i--) {
            int64_t index = rest % b->extents[i];
            rest /= b->extents[i];
            at += index * b->strides[i];
            place += (i == b->dim ? b->place[index] : index) * step;
            step *= p->whole[i];
        }
        uint64_t value[2] = {scramble((uint64_t)place), (uint64_t)place};
        if (check)
            EXPECT(memcmp(b->data + at * p->item, value, (size_t)p->item) == 0);
        else
            memcpy(b->data + at * p->item, value, (size_t)p->item);
    }
}

#endif
