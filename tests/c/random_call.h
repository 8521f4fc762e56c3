/* SPDX-License-Identifier: Apache-2.0 */
/* Random calls: the request, and what each rank holds before and after. */
#ifndef RANDOM_CALL_H
#define RANDOM_CALL_H

#include "spar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { WORLD = 8, DIMS = 4, TENSORS = 3, ARGS = 64, EXTENT = 64, NOT_WRITTEN = 0xee };

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
    int item, ndim, nargs;
    int gap, turn; /* of the input: items left out between its rows; where its dims begin in memory */
    int64_t whole[DIMS], args[ARGS];
    cut in, out;
} part;

static void put_number(part *p, int64_t number)
{
    p->args[p->nargs++] = number;
}

/* Assigns the next `count` indices to `rank`. */
static void assign(cut *c, int64_t *at, int rank, int64_t count)
{
    while (count-- > 0)
        c->owner[(*at)++] = rank;
}

/* The size of part `which` of `parts` by the size rule. */
static int64_t rule(int64_t total, int parts, int which)
{
    return total / parts + (which < total % parts);
}

/* Splits each outer rank's indices among inner ranks, by the size rule, which may be neighbours. */
static void refine(cut *c, int64_t extent, int outer, int inner, int neighbours)
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
                c->owner[i] = -1 - (int)(neighbours ? rank * inner + part : part * outer + rank);
            }
    }
    for (int64_t i = 0; i < extent; i++)
        c->owner[i] = -1 - c->owner[i];
}

static void draw_even(uint64_t *seed, int world, part *p, cut *c, int64_t *total)
{
    int64_t extent = draw(seed, 20);
    put_number(p, extent);
    for (int rank = 0; rank < world; rank++)
        assign(c, total, rank, rule(extent, world, rank));
}

static void draw_sizes(uint64_t *seed, int world, part *p, cut *c, int64_t *total)
{
    for (int rank = 0; rank < world; rank++) {
        int size = draw(seed, 4);
        put_number(p, size);
        assign(c, total, rank, size);
    }
}

static void draw_zigzag(uint64_t *seed, int outer, part *p, cut *c, int64_t *total)
{
    int64_t extent = draw(seed, 40);
    put_number(p, extent);
    for (int i = 0; i < 2 * outer; i++)
        assign(c, total, i < outer ? i : 2 * outer - 1 - i, rule(extent, 2 * outer, i));
}

static void draw_packed(uint64_t *seed, int outer, part *p, cut *c, int64_t *total)
{
    int sequences = draw(seed, 4), table = draw(seed, 2), first = p->nargs + 1;
    put_number(p, sequences);
    p->nargs += sequences * (table ? outer : 1);
    for (int s = 0; s < sequences; s++) {
        int64_t length = draw(seed, 7);
        for (int rank = 0; rank < outer; rank++) {
            int64_t size = table ? draw(seed, 3) : rule(length, outer, rank);
            assign(c, total, rank, size);
            if (table)
                p->args[first + rank * sequences + s] = size;
        }
        if (!table)
            p->args[first + s] = length;
    }
}

static void draw_rotated(uint64_t *seed, int world, part *p, cut *c, int64_t *total)
{
    int shift = draw(seed, world);
    put_number(p, shift);
    for (int chunk = 0; chunk < world; chunk++) {
        int size = draw(seed, 4);
        put_number(p, size);
        assign(c, total, (chunk + shift) % world, size);
    }
}

static void draw_runs(uint64_t *seed, int world, part *p, cut *c, int64_t *total)
{
    int documents = draw(seed, 3), first = p->nargs + 1;
    int64_t sizes[WORLD] = {0};
    put_number(p, documents);
    p->nargs += documents;
    for (int document = 0; document < documents; document++) {
        int64_t begin = *total;
        for (int runs = draw(seed, 4); runs > 0; runs--) {
            int rank = draw(seed, world), size = draw(seed, 4);
            put_number(p, rank);
            put_number(p, size);
            assign(c, total, rank, size);
            sizes[rank] += size;
        }
        p->args[first + document] = *total - begin;
    }
    for (int rank = 0; rank < world; rank++)
        put_number(p, sizes[rank]);
}

/* How each kind draws its numbers, the owner of each index, and with them the dim's extent. */
static const struct {
    void (*draw)(uint64_t *seed, int ranks, part *p, cut *c, int64_t *total);
    int inner; /* whether there are inner ranks; `ranks` are then ring ranks */
} KINDS[] = {
    /* clang-format off */
    [SPAR_EVEN] = {draw_even, 0},
    [SPAR_SIZES] = {draw_sizes, 0},
    [SPAR_ZIGZAG] = {draw_zigzag, 1},
    [SPAR_PACKED] = {draw_packed, 1},
    [SPAR_ROTATED] = {draw_rotated, 0},
    [SPAR_RUNS] = {draw_runs, 0},
    /* clang-format on */
};

/* Draws a layout that shards a dim of `extent`, too. */
static cut draw_other_layout(uint64_t *seed, int world, part *p, int dim, int64_t extent)
{
    cut c = {.dim = dim};
    int64_t total = 0;
    put_number(p, dim);
    if (draw(seed, 2)) {
        int64_t left = extent;
        put_number(p, SPAR_SIZES);
        for (int rank = 0; rank < world; rank++) {
            int64_t size = rank == world - 1 ? left : draw(seed, (int)left + 1);
            put_number(p, size);
            assign(&c, &total, rank, size);
            left -= size;
        }
        return c;
    }
    put_number(p, SPAR_ZIGZAG);
    put_number(p, 1);
    put_number(p, extent);
    for (int i = 0; i < 2 * world; i++)
        assign(&c, &total, i < world ? i : 2 * world - 1 - i, rule(extent, 2 * world, i));
    return c;
}

/* Draws a layout that shards `dim`, and sets that dim's extent. */
static cut draw_layout(uint64_t *seed, int world, part *p, int dim)
{
    cut c = {.dim = dim};
    int kind = draw(seed, sizeof KINDS / sizeof *KINDS), inner = 1, neighbours = 0;
    int64_t total = 0;
    put_number(p, dim);
    put_number(p, kind);
    if (KINDS[kind].inner) {
        inner += draw(seed, world);
        while (world % inner)
            inner--;
        neighbours = draw(seed, 2);
        put_number(p, neighbours ? -inner : inner);
    }
    KINDS[kind].draw(seed, world / inner, p, &c, &total);
    p->whole[dim] = total;
    refine(&c, total, world / inner, inner, neighbours);
    return c;
}

/* Draws two layouts, of which at least one shards a dim. */
static void draw_layouts(uint64_t *seed, int world, part *p)
{
    enum { BEFORE, AFTER, SAME, BOTH };
    const cut whole = {.dim = -1};
    int sharded = draw(seed, p->ndim > 1 ? 4 : 3), dim = draw(seed, p->ndim);
    p->nargs = 1;
    p->in = p->out = whole;
    if (sharded == AFTER)
        put_number(p, -1);
    else
        p->in = draw_layout(seed, world, p, dim);
    p->args[0] = p->nargs - 1;
    if (sharded == BEFORE)
        put_number(p, -1);
    else if (sharded == SAME)
        p->out = draw_other_layout(seed, world, p, dim, p->whole[dim]);
    else
        p->out = draw_layout(seed, world, p,
                             sharded == AFTER ? dim : (dim + 1 + draw(seed, p->ndim - 1)) % p->ndim);
}

/* All ranks draw the same call from the same seed. */
static void draw_call(uint64_t seed, int world, int *count, part *parts)
{
    static const int items[] = {1, 2, 3, 4, 8, 16};
    *count = 1 + draw(&seed, TENSORS);
    for (part *p = parts; p < parts + *count; p++) {
        *p = (part){.item = items[draw(&seed, 6)], .ndim = 1 + draw(&seed, DIMS)};
        int memory = draw(&seed, 3 * DIMS);
        p->gap = memory % 3;
        p->turn = memory / 3;
        for (int i = 0; i < p->ndim; i++)
            p->whole[i] = draw(&seed, p->ndim == 2 ? 20 : 7);
        draw_layouts(&seed, world, p);
    }
}

/* One rank's tensor. */
typedef struct {
    int dim;
    int64_t extents[DIMS], strides[DIMS], bytes;
    int64_t place[EXTENT]; /* of each index of the cut dim, in the global tensor */
    unsigned char *data;
} buffer;

/* In memory the dims are rotated by `turn`. */
static buffer make_buffer(const part *p, int rank, const cut *c, int gap, int turn)
{
    buffer b = {.dim = c->dim, .bytes = p->item};
    memcpy(b.extents, p->whole, sizeof b.extents);
    if (c->dim >= 0)
        b.extents[c->dim] = 0;
    for (int64_t i = 0; c->dim >= 0 && i < p->whole[c->dim]; i++)
        if (c->owner[i] == rank)
            b.place[b.extents[c->dim]++] = i;
    for (int i = p->ndim - 1; i >= 0; i--) {
        int dim = (i + turn) % p->ndim;
        b.strides[dim] = b.bytes / p->item;
        b.bytes = b.bytes * b.extents[dim] + (i == p->ndim - 1 ? gap * p->item : 0);
    }
    b.data = malloc((size_t)b.bytes + 1);
    EXPECT(b.data);
    memset(b.data, NOT_WRITTEN, (size_t)b.bytes + 1);
    return b;
}

/* The tensor of which `b` is one rank's input. */
static inline spar_tensor tensor_of(const part *p, const buffer *b)
{
    return (spar_tensor){p->item, p->ndim, b->extents, b->strides, p->nargs, p->args};
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
