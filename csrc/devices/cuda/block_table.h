/* A plan's blocks as the kernels read them: lists in packed order, with precomputed divisors. Pure
 * arithmetic. */
#ifndef SPAR_BLOCK_TABLE_H
#define SPAR_BLOCK_TABLE_H

#include "devices/cuda/kernels.h"
#include "plan/plan.h"

/* What is sent to one peer, or received from it. src_bits and dst_bits are the OR of all offsets, strides and
 * runs: their lowest set bit is the alignment. */
typedef struct {
    int first, count; /* its blocks in the table */
    int64_t bytes;
    uint64_t src_bits, dst_bits;
} spar_block_list;

typedef struct {
    spar_kernel_block *blocks;
    spar_kernel_loop *loops;
    int64_t nblocks, nloops, block_room, loop_room;
    int world;
    spar_block_list *push, *pull; /* [world]; pull NULL where the plan has none */
} spar_block_table;

/* Appends a list; splits blocks above 2^30 bytes. Initialize the table with zeros. */
spar_status spar_block_table_add(spar_block_table *table, const spar_block *blocks, int64_t count,
                                 const spar_dim *dims, spar_block_list *list);

/* Builds all lists of a plan. Frees the table on failure. */
spar_status spar_block_table_build(spar_block_table *table, const spar_plan *plan);

void spar_block_table_free(spar_block_table *table);

/* Returns the offset in packed order of a list's first byte of `tensor`; lists are ordered by tensor. */
int64_t spar_block_table_begin(const spar_block_table *table, const spar_block_list *list, int tensor);

#endif
