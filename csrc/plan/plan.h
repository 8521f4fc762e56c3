/* SPDX-License-Identifier: Apache-2.0 */
/* The exchange plan: which strided region of one rank's input becomes which strided region of another's
 * output.
 *
 * An exchange is a pair of layouts of one global tensor: what each rank holds before, and after. They may
 * shard the same dim. Shapes, plans, signatures and transports follow from the two layouts; so does the
 * inverse, which swaps them. An input of which every rank holds the whole needs no communication: each rank
 * selects its shard.
 *
 * A plan is arithmetic on shapes, strides, layouts, world and rank. Every rank computes every other rank's
 * side of it, so building one needs no communication. It counts bytes; it is independent of dtype, device, OS
 * and Python. */
#ifndef SPAR_PLAN_H
#define SPAR_PLAN_H

#include "ops/layout.h"

#include <stddef.h>

#define SPAR_MAX_DIMS 64 /* as many as torch allows */

/* One loop of a block; strides in bytes. */
typedef struct {
    int64_t extent, src, dst;
} spar_dim;

/* `run` contiguous bytes, repeated over `ndim` loops (outer first), from byte `src` of the sender's
 * tensor to byte `dst` of the receiver's. */
typedef struct {
    int64_t src, dst, run;
    int64_t dims; /* index of its first loop in the plan's dims */
    int32_t tensor, ndim;
} spar_block;

/* The bytes of a block: its run, in each iteration of its loops. */
static inline int64_t spar_block_bytes(int64_t run, int ndim, const spar_dim *dims)
{
    for (int i = 0; i < ndim; i++)
        run *= dims[i].extent;
    return run;
}

/* Blocks first to first + count, which move `bytes` bytes. */
typedef struct {
    int64_t first, count, bytes;
} spar_range;

/* One tensor of a plan. */
typedef struct {
    int64_t item_size;
    int ndim;
    int64_t global[SPAR_MAX_DIMS], out[SPAR_MAX_DIMS]; /* extents of the whole, of this rank's output */
    int64_t out_bytes;
    int in_dim, out_dim;              /* the dims that the layouts cut, or -1 */
    uint32_t in_order, out_order;     /* which pieces each rank holds; 0: one each, in rank order */
    char in_words[64], out_words[64]; /* the orders in words; empty where the order is 0 */
    int64_t *in_sizes, *out_sizes;    /* [world] what each rank holds of these dims */
    int64_t *rank_bytes;              /* [world] the size of each rank's output */
} spar_plan_tensor;

typedef struct spar_plan {
    int world, rank, ntensors;
    spar_plan_tensor *tensors;
    /* push[p]: my inputs -> rank p's outputs. A transport that can write there needs no other list.
     * Where every rank is sent the same, the ranges are one. */
    spar_range *push;
    /* pull[p]: the packed bytes that rank p sent -> my outputs (SPAR_SIDE_PULL). Packed means: the blocks
     * of push[me] on rank p in their order, each row-major, nothing between them. */
    spar_range *pull;
    spar_block *blocks;
    spar_dim *dims;
    uint64_t signature; /* equal on all ranks that make the same global call */
    uint64_t sent;      /* bytes of this rank's inputs that go to other ranks */
    int64_t footprint;  /* about how many bytes of memory it takes */
    int refs;           /* atomic; the cache's own one counted in */
} spar_plan;

/* One tensor of a request, as one rank sees it. */
typedef struct {
    int64_t item_size;      /* bytes of an element */
    int ndim;               /* 1 to SPAR_MAX_DIMS */
    const int64_t *extents; /* [ndim] of this rank's input, in elements */
    const int64_t *strides; /* [ndim] of this rank's input, in elements, at least 0 */
    int nargs;              /* the two layouts: n, the n ints of the input's layout, those of the output's */
    const int64_t *args;    /* see spar_layout_read */
} spar_tensor;

enum { SPAR_SIDE_PULL = 1 };

typedef struct {
    int world, rank;
    int sides; /* SPAR_SIDE_PULL where the transport packs */
    int ntensors;
    const spar_tensor *tensors;
} spar_request;

/* Checks that ranks, dims and item sizes are in range; build and get call it. */
spar_status spar_request_check(const spar_request *request);

/* Copies the loops of a block, with the strides that its packed bytes have for the sender who packs them, or
 * for the receiver who unpacks them; returns how many bytes these are. */
int64_t spar_packed_dims(const spar_plan *plan, const spar_block *block, int unpacks, spar_dim *dims);

/* Builds a plan. SPAR_INVALID: the message names the value, the rank and what is expected. */
spar_status spar_plan_build(const spar_request *request, spar_plan **plan);

/* Returns a plan of the bounded LRU cache (SPAR_PLAN_CACHE plans of 64 MiB in total), or builds it. */
spar_status spar_plan_get(const spar_request *request, spar_plan **plan);

/* Adds an owner to a plan that this thread holds; returns the plan. */
spar_plan *spar_plan_keep(spar_plan *plan);

/* Balance each build, get or keep with one release. */
void spar_plan_release(spar_plan *plan);

/* Hashes the plan and `text`, which has everything else that must be equal on all ranks. */
uint64_t spar_plan_signature(const spar_plan *plan, const char *text);

/* Describes the global call, the same on all ranks, truncated to `size`:
 * "[1, 8, 4]: dim 1 in [4, 4] -> dim 2 in [2, 2]". */
void spar_plan_describe(const spar_plan *plan, char *text, size_t size);

/* Describes a call of the plan in one line: op, which may be NULL, plan, `text` and, unless 0, its number and
 * the call's word (plan/place.h). A plan that is too long for `size` ends in "...", and the
 * rest is whole: up to half of `size`. */
void spar_plan_describe_call(const spar_plan *plan, const char *op, const char *text, int64_t number,
                             int64_t forward, char *line, size_t size);

/* What each rank holds of the gathered dim. Calls with an equal `rest` differ in nothing else; 0: not one
 * such dim, or the caller passed the sizes. */
typedef struct {
    int64_t rest, dim, size;
} spar_gathered_size;

/* `text` is as in spar_plan_signature. */
spar_gathered_size spar_plan_gathered(const spar_plan *plan, const char *text);

typedef struct {
    int64_t cached, hits, misses;
} spar_plan_stats;

void spar_plan_cache_stats(spar_plan_stats *stats);

/* Sets the capacity of the cache in plans; 0: none. */
void spar_plan_cache_limit(int64_t capacity);

#endif
