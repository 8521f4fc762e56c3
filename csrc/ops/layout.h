/* A layout says which part of a global tensor each rank holds: all of it, or the pieces of one dim.
 *
 * This is the one idea under every operation: an operation is a pair of layouts of the same global
 * tensor, the one its input has and the one its output shall have. Everything else (shapes, blocks,
 * the inverse) is arithmetic on the two. Extents are counted in elements. */
#ifndef SPAR_LAYOUT_H
#define SPAR_LAYOUT_H

#include "base/error.h"

#include <stdint.h>

/* `extent` elements that lie at `local` in the rank's tensor and at `global` in the whole one. */
typedef struct {
    int64_t local, global, extent;
} spar_piece;

typedef struct {
    int dim;            /* the dim that is cut; -1: every rank holds the whole tensor */
    int world;          /* ranks */
    int64_t total;      /* the cut dim's global extent */
    int64_t *first;     /* [world + 1]: rank r holds pieces first[r] to first[r + 1] */
    spar_piece *pieces; /* in the order in which a rank holds them */
} spar_layout;

/* The size rule: rank's share of `total`; the remainder goes one each to the first ranks. */
int64_t spar_shard_size(int64_t total, int world, int rank);

/* One piece a rank, in rank order; `sizes` [world] must sum to `total`, NULL means the size rule. */
spar_status spar_layout_cut(spar_layout *layout, int dim, int64_t total, int world,
                            const int64_t *sizes);

/* Rank r holds chunks r and 2 * world - 1 - r of the 2 * world equal ones: with a causal mask, all have the same
 * work. `total` must be a multiple of their number. */
spar_status spar_layout_zigzag(spar_layout *layout, int dim, int64_t total, int world);

/* Several sequences lie one behind the other, and each is cut by itself: a rank holds its part of each.
 * `numbers` [sequences] are their lengths, cut by the size rule; or, where `table` is set, [world][sequences]
 * what each rank holds of each. */
spar_status spar_layout_packed(spar_layout *layout, int dim, int world, int64_t sequences,
                               const int64_t *numbers, int table);

/* Cuts what each rank holds once more, among `inner` ranks, by the size rule: then rank u * world + r has part u
 * of what rank r had. On failure the layout is freed. */
spar_status spar_layout_refine(spar_layout *layout, int inner);

/* Every rank holds all of it. */
void spar_layout_whole(spar_layout *layout, int world);

/* How many elements of the cut dim `rank` holds. */
int64_t spar_layout_extent(const spar_layout *layout, int rank);

void spar_layout_free(spar_layout *layout);

#endif
