/* A plan's blocks as the kernels read them: lists in packed order, divisors made ready. Arithmetic alone. */
#ifndef SPAR_BLOCK_TABLE_H
#define SPAR_BLOCK_TABLE_H

#include "devices/cuda/kernels.h"
#include "plan/plan.h"

/* A list: what goes to one peer, or came from it. Its bits tell alignment: the lowest one that is set in any place,
 * step or run. */
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

/* Appends a list, with blocks of 2^30 bytes or more cut up. The table begins as zeroes. */
spar_status spar_block_table_add(spar_block_table *table, const spar_block *blocks, int64_t count,
                                 const spar_dim *dims, spar_block_list *list);

/* All of a plan's. On failure the table is freed. */
spar_status spar_block_table_build(spar_block_table *table, const spar_plan *plan);

void spar_block_table_free(spar_block_table *table);

/* Where in packed order tensor `tensor` begins in a list: lists go by tensors. */
int64_t spar_block_table_begin(const spar_block_table *table, const spar_block_list *list,
                               int tensor);

#endif
