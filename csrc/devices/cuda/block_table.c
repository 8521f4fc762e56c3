#include "devices/cuda/block_table.h"

#include "base/util.h"

#include <limits.h>
#include <stdlib.h>

enum { LARGEST = 1 << 30 }; /* bytes of a block: what kernels divide is below 2^31 */

/* See spar_divisor. */
static spar_divisor divisor(int64_t number)
{
    unsigned shift = 0;
    while ((int64_t)1 << shift < number)
        shift++;
    uint64_t magic = ((uint64_t)1 << 32) * (((uint64_t)1 << shift) - (uint64_t)number);
    return (spar_divisor){(unsigned)number, (unsigned)(magic / (uint64_t)number + 1), shift};
}

static spar_status emit(spar_block_table *table, spar_block_list *list, const spar_block *block,
                        const spar_dim *dims, int64_t bytes)
{
    if (table->nblocks >= INT_MAX / 2) /* lists count them in ints */
        return spar_fail(SPAR_NO_MEMORY, "no memory for %lld %s", (long long)table->nblocks,
                         "blocks of a table");
    SPAR_TRY(spar_reserve((void **)&table->blocks, &table->block_room, table->nblocks + 1,
                          sizeof *table->blocks, "blocks of a table"));
    SPAR_TRY(spar_reserve((void **)&table->loops, &table->loop_room, table->nloops + block->ndim,
                          sizeof *table->loops, "blocks of a table"));
    table->blocks[table->nblocks++] = (spar_kernel_block){.at = list->bytes,
                                                          .src = block->src,
                                                          .dst = block->dst,
                                                          .run = divisor(block->run),
                                                          .bytes = (unsigned)bytes,
                                                          .loops = (int)table->nloops,
                                                          .ndim = (short)block->ndim,
                                                          .tensor = (short)block->tensor};
    list->src_bits |= (uint64_t)block->src | (uint64_t)block->run;
    list->dst_bits |= (uint64_t)block->dst | (uint64_t)block->run;
    for (int i = 0; i < block->ndim; i++) {
        table->loops[table->nloops++] =
            (spar_kernel_loop){dims[i].src, dims[i].dst, divisor(dims[i].extent), 0};
        list->src_bits |= (uint64_t)dims[i].src;
        list->dst_bits |= (uint64_t)dims[i].dst;
    }
    list->count++;
    list->bytes += bytes;
    return SPAR_OK;
}

/* Appends a block whose loops are `dims`, split along the outermost loop or the run until it is small
 * enough. */
static spar_status add(spar_block_table *table, spar_block_list *list, spar_block block, const spar_dim *dims)
{
    int64_t bytes = block.run, whole = block.run;
    for (int i = 0; i < block.ndim; i++)
        bytes *= dims[i].extent;
    if (bytes <= LARGEST)
        return emit(table, list, &block, dims, bytes);
    if (block.ndim == 0) {
        for (int64_t at = 0; at < whole; at += LARGEST, block.src += LARGEST, block.dst += LARGEST) {
            block.run = whole - at < LARGEST ? whole - at : LARGEST;
            SPAR_TRY(emit(table, list, &block, dims, block.run));
        }
        return SPAR_OK;
    }
    int64_t iteration = bytes / dims->extent, iterations = LARGEST / iteration;
    spar_dim loops[SPAR_MAX_DIMS];
    for (int i = 0; i < block.ndim; i++)
        loops[i] = dims[i];
    if (iterations <= 1) { /* one iteration of the outermost loop at a time, without that loop */
        block.ndim--;
        iterations = 1;
    }
    for (int64_t at = 0; at < dims->extent; at += iterations) {
        loops->extent = dims->extent - at < iterations ? dims->extent - at : iterations;
        SPAR_TRY(add(table, list, block, loops + (iterations == 1)));
        block.src += iterations * dims->src;
        block.dst += iterations * dims->dst;
    }
    return SPAR_OK;
}

spar_status spar_block_table_add(spar_block_table *table, const spar_block *blocks, int64_t count,
                                 const spar_dim *dims, spar_block_list *list)
{
    *list = (spar_block_list){.first = (int)table->nblocks};
    for (int64_t i = 0; i < count; i++) {
        if (blocks[i].tensor > SHRT_MAX)
            return spar_fail(SPAR_INVALID, "a copy of %d tensors; expected at most %d", blocks[i].tensor + 1,
                             SHRT_MAX);
        SPAR_TRY(add(table, list, blocks[i], dims + blocks[i].dims));
    }
    return SPAR_OK;
}

static spar_status add_ranges(spar_block_table *table, const spar_plan *plan, const spar_range *ranges,
                              spar_block_list *lists)
{
    for (int peer = 0; peer < plan->world; peer++)
        if (peer > 0 && ranges[peer].first == ranges[0].first && ranges[peer].count == ranges[0].count)
            lists[peer] = lists[0]; /* every rank is sent the same */
        else
            SPAR_TRY(spar_block_table_add(table, plan->blocks + ranges[peer].first, ranges[peer].count,
                                          plan->dims, &lists[peer]));
    return SPAR_OK;
}

spar_status spar_block_table_build(spar_block_table *table, const spar_plan *plan)
{
    *table = (spar_block_table){.world = plan->world};
    table->push = calloc((size_t)plan->world * 2, sizeof *table->push);
    table->pull = plan->pull && table->push ? table->push + plan->world : NULL;
    spar_status status = SPAR_OK;
    if (!table->push)
        status = spar_fail(SPAR_NO_MEMORY, "no memory for the tables of %d ranks", plan->world);
    if (status == SPAR_OK)
        status = add_ranges(table, plan, plan->push, table->push);
    if (status == SPAR_OK && table->pull)
        status = add_ranges(table, plan, plan->pull, table->pull);
    if (status != SPAR_OK)
        spar_block_table_free(table);
    return status;
}

void spar_block_table_free(spar_block_table *table)
{
    free(table->blocks);
    free(table->loops);
    free(table->push);
    *table = (spar_block_table){0};
}

int64_t spar_block_table_begin(const spar_block_table *table, const spar_block_list *list, int tensor)
{
    int low = list->first, high = list->first + list->count; /* the first block from `tensor` on */
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (table->blocks[middle].tensor < tensor)
            low = middle + 1;
        else
            high = middle;
    }
    return low < list->first + list->count ? table->blocks[low].at : list->bytes;
}
