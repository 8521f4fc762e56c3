/* SPDX-License-Identifier: Apache-2.0 */
/* A layout states which part of a global tensor each rank holds: all of it, or pieces of one dim. Extents are
 * in elements. */
#ifndef SPAR_LAYOUT_H
#define SPAR_LAYOUT_H

#include "base/error.h"

#include <stdint.h>

/* `extent` elements: at `local` in the rank's tensor, at `global` in the global one. */
typedef struct {
    int64_t local, global, extent;
} spar_piece;

typedef struct {
    int dim;                /* the sharded dim; -1: every rank holds the whole tensor */
    int world;              /* ranks */
    int64_t total;          /* the sharded dim's global extent */
    int64_t *first;         /* [world + 1]: rank r holds pieces first[r] to first[r + 1] */
    spar_piece *pieces;     /* in the order in which a rank holds them */
    int64_t kind, count;    /* as they were read, for spar_layout_describe */
    const int64_t *numbers; /* [count] after the kind; the caller's */
} spar_layout;

/* The size rule: the extent of a rank's shard of `total`. The first ranks get one more each for the
 * remainder. */
int64_t spar_shard_size(int64_t total, int world, int rank);

/* The kinds of layouts, and the ints that describe each; spar/_exchange/layouts.py has the same. With `inner`
 * ranks, each of R = world / inner ranks' part is sharded once more by the size rule: rank u * R + r holds
 * part u of what rank r of R holds. If `inner` is negative, -inner ranks are neighbours: rank r * -inner + u
 * holds it. */
enum {
    SPAR_EVEN,    /* total: by the size rule */
    SPAR_SIZES,   /* the size of each rank */
    SPAR_ZIGZAG,  /* inner, total: rank r of R holds chunks r and 2R - 1 - r of 2R chunks by the size rule */
    SPAR_PACKED,  /* inner, sequences, and the length of each, or [R][sequences] each rank's extent of each */
    SPAR_ROTATED, /* shift, the size of each chunk: rank r holds chunk r - shift, counted round */
    SPAR_RUNS,    /* documents, the length of each, rank and size of each run in order, each rank's size */
};

/* Reads a layout of a tensor with `ndim` dims: [-1] if every rank holds the whole, else [dim, kind,
 * numbers...]. */
spar_status spar_layout_read(spar_layout *layout, const int64_t *numbers, int64_t count, int ndim, int world);

/* Reads what each rank holds of each of several packed sequences, table [world][sequences]. Sets the
 * lengths [sequences], the least entry or 0 if that is less, and what `rank` holds. A sum above 2^63 - 1
 * becomes that. Returns whether the size rule shards every sequence so: then SPAR_PACKED needs its lengths
 * only. */
int spar_packed_lengths(const int64_t *table, int world, int64_t sequences, int rank, int64_t *lengths,
                        int64_t *least, int64_t *held);

/* Returns the extent of the sharded dim on `rank`. */
int64_t spar_layout_extent(const spar_layout *layout, int rank);

/* Appends how the pieces lie on the ranks: "zigzag", "packed [3, 5]", ... What does not fit becomes a digest,
 * so that other numbers have another text. */
void spar_layout_describe(const spar_layout *layout, char *text, size_t size);

void spar_layout_free(spar_layout *layout);

#endif
