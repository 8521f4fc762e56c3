/* SPDX-License-Identifier: Apache-2.0 */
/* A strided copy in host memory, to one rank's outputs or to those of several. */
#ifndef SPAR_COPY_H
#define SPAR_COPY_H

#include "devices/execute.h"
#include "devices/cpu/nontemporal.h"

/* One pass over the source. */
typedef struct {
    const spar_block *blocks;
    const spar_dim *dims;
    const spar_range *ranges; /* [targets]; unless in_turn, all are as the first one */
    int targets;
    const void *const *from; /* [tensor] */
    const spar_rows *rows;   /* [tensor], or NULL; only for one target */
    const void *wire;        /* instead of `from`: the tensors, concatenated */
    void *const *const *to;  /* [target][tensor] */
    const spar_scale *scale;
    int64_t bytes;
    int in_turn;     /* the targets receive different blocks with equal loops */
    int nontemporal; /* use non-temporal stores */
} spar_copy;

/* Copies c->bytes: `each` bytes for each target. */
void spar_copy_all(spar_copy *c, int64_t each);

/* The i-th block that a target receives. */
static inline const spar_block *spar_copy_block(const spar_copy *c, int target, int64_t i)
{
    return &c->blocks[c->ranges[target].first + i];
}

/* The loop along which the source's runs share cache lines, if they do so along none further in, or -1: a
 * block's rows, which are copied together, a strip of each at a time. */
static inline int spar_copy_rows(const spar_copy *c, const spar_block *block)
{
    const spar_dim *dims = c->dims + block->dims;
    int last = block->ndim - 1, rows = -1;
    int64_t least = SPAR_CACHE_LINE;
    if (block->run >= least || last < 1)
        return -1;
    least = dims[last].src < least ? dims[last].src : least;
    for (int i = 0; i < last; i++)
        if (dims[i].src > 0 && dims[i].src < least) {
            rows = i;
            least = dims[i].src;
        }
    return rows;
}

#endif
