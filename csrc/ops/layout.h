/* A layout states which part of a global tensor each rank holds: all of it, or pieces of one dim. Extents are in
 * elements. */
#ifndef SPAR_LAYOUT_H
#define SPAR_LAYOUT_H

#include "base/error.h"

#include <stdint.h>

/* `extent` elements: at `local` in the rank's tensor, at `global` in the global one. */
typedef struct {
    int64_t local, global, extent;
} spar_piece;

typedef struct {
    int dim;            /* the sharded dim; -1: every rank holds the whole tensor */
    int world;          /* ranks */
    int64_t total;      /* the sharded dim's global extent */
    int64_t *first;     /* [world + 1]: rank r holds pieces first[r] to first[r + 1] */
    spar_piece *pieces; /* in the order in which a rank holds them */
} spar_layout;

/* The size rule: the extent of a rank's shard of `total`. The first ranks get one more each for the remainder. */
int64_t spar_shard_size(int64_t total, int world, int rank);

/* Shards contiguously, one piece per rank in rank order. `sizes` [world] must sum to `total`; NULL: the size rule. */
spar_status spar_layout_cut(spar_layout *layout, int dim, int64_t total, int world, const int64_t *sizes);

/* How a dim is sharded, and the numbers that say it; spar/_runtime/layouts.py has the same. */
enum {
    SPAR_EVEN,   /* total: by the size rule */
    SPAR_SIZES,  /* the size of each rank */
    SPAR_ZIGZAG, /* inner, total: spar_layout_zigzag over world / inner ranks, refined */
    SPAR_PACKED, /* inner, sequences, numbers...: spar_layout_packed over world / inner ranks, refined */
};

/* Reads a layout of a tensor with `ndim` dims: [-1] if every rank holds the whole, else [dim, kind, numbers...]. */
spar_status spar_layout_read(spar_layout *layout, const int64_t *numbers, int64_t count, int ndim, int world);

/* Rank r holds chunks r and 2 * world - 1 - r of 2 * world chunks by the size rule, which balances the work under a causal
 * mask. */
spar_status spar_layout_zigzag(spar_layout *layout, int dim, int64_t total, int world);

/* Shards each of several concatenated sequences on its own; a rank holds its part of each.
 * `numbers` are the lengths [sequences], sharded by the size rule; or, if `table` is set, each rank's extent of each
 * sequence [world][sequences]. */
spar_status spar_layout_packed(spar_layout *layout, int dim, int world, int64_t sequences,
                               const int64_t *numbers, int table);

/* Shards each rank's part once more over `inner` ranks by the size rule: rank u * world + r then holds part u of what
 * rank r held. Frees the layout on failure. */
spar_status spar_layout_refine(spar_layout *layout, int inner);

/* Every rank holds the whole tensor. */
void spar_layout_whole(spar_layout *layout, int world);

/* Returns the extent of the sharded dim on `rank`. */
int64_t spar_layout_extent(const spar_layout *layout, int rank);

void spar_layout_free(spar_layout *layout);

#endif
