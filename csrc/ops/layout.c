/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/layout.h"

#include "base/util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t spar_shard_size(int64_t total, int world, int rank)
{
    return total / world + (rank < total % world);
}

/* Begins to fill in a layout of up to `most` pieces. */
static spar_status start(spar_layout *layout, int64_t total, int world, int64_t most)
{
    int64_t bytes;
    layout->world = world;
    layout->total = total;
    layout->first = calloc((size_t)world + 1, sizeof *layout->first);
    layout->pieces = NULL;
    if (!__builtin_mul_overflow(most, (int64_t)sizeof *layout->pieces, &bytes))
        layout->pieces = malloc((size_t)(bytes ? bytes : 1));
    if (layout->first && layout->pieces)
        return SPAR_OK;
    spar_layout_free(layout);
    return spar_fail(SPAR_NO_MEMORY, "no memory for a layout of %lld pieces on %d ranks", (long long)most,
                     world);
}

/* Appends a piece to `rank`'s, in rank order; merges it with an adjacent one. */
static void add(spar_layout *layout, int rank, int64_t global, int64_t extent)
{
    int64_t *end = &layout->first[rank + 1], local = 0;
    if (*end < layout->first[rank])
        *end = layout->first[rank];
    if (extent == 0)
        return;
    if (*end > layout->first[rank]) {
        spar_piece *last = &layout->pieces[*end - 1];
        if (last->global + last->extent == global) {
            last->extent += extent;
            return;
        }
        local = last->local + last->extent;
    }
    layout->pieces[(*end)++] = (spar_piece){local, global, extent};
}

/* Cuts into contiguous chunks; rank r holds chunk r - shift, counted round. `sizes` [world] of the chunks sum
 * to `total`; NULL: the size rule. */
static spar_status cut(spar_layout *layout, int64_t total, const int64_t *sizes, int shift)
{
    int64_t at = 0;
    int world = layout->world, chunk = (world - shift) % world;
    SPAR_TRY(start(layout, total, world, world));
    for (int i = 0; i < chunk; i++)
        at += sizes[i];
    for (int rank = 0; rank < world; rank++) {
        int64_t extent = sizes ? sizes[chunk] : spar_shard_size(total, world, rank);
        add(layout, rank, at, extent);
        at += extent;
        if (++chunk == world)
            chunk = 0, at = 0;
    }
    return SPAR_OK;
}

/* Returns the offset of `rank`'s shard of `total`. */
static int64_t shard_start(int64_t total, int world, int rank)
{
    return rank * (total / world) + (rank < total % world ? rank : total % world);
}

/* Rank r holds chunks r and 2 * world - 1 - r of 2 * world chunks by the size rule, which balances the work
 * under a causal mask. */
static spar_status zigzag(spar_layout *layout, int64_t total, int world)
{
    SPAR_TRY(start(layout, total, world, 2 * (int64_t)world));
    for (int rank = 0; rank < world; rank++) {
        int mirror = 2 * world - 1 - rank;
        add(layout, rank, shard_start(total, 2 * world, rank), spar_shard_size(total, 2 * world, rank));
        add(layout, rank, shard_start(total, 2 * world, mirror), spar_shard_size(total, 2 * world, mirror));
    }
    return SPAR_OK;
}

static int64_t saturating_sum(int64_t a, int64_t b)
{
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

int spar_packed_lengths(const int64_t *table, int world, int64_t sequences, int rank, int64_t *lengths,
                        int64_t *least, int64_t *held)
{
    int by_rule = 1;
    *least = *held = 0;
    for (int64_t s = 0; s < sequences; s++) {
        lengths[s] = 0;
        for (int r = 0; r < world; r++) {
            int64_t part = table[r * sequences + s];
            *least = part < *least ? part : *least;
            lengths[s] = saturating_sum(lengths[s], part);
            *held = r == rank ? saturating_sum(*held, part) : *held;
        }
        for (int r = 0; by_rule && r < world; r++)
            by_rule = table[r * sequences + s] == spar_shard_size(lengths[s], world, r);
    }
    return by_rule;
}

/* Shards each of several concatenated sequences on its own; a rank holds its part of each. `numbers` are the
 * lengths [sequences], sharded by the size rule; or, if `table` is set, each rank's extent of each sequence
 * [world][sequences]. */
static spar_status packed(spar_layout *layout, int world, int64_t sequences, const int64_t *numbers,
                          int table)
{
    int64_t total = 0, *at;
    for (int64_t i = 0; i < (table ? world * sequences : sequences); i++)
        if (numbers[i] < 0 || __builtin_add_overflow(total, numbers[i], &total))
            return spar_fail(SPAR_INVALID,
                             "the size of sequence %lld is %lld; expected at least 0, and a sum "
                             "below 2^63",
                             (long long)(sequences ? i % sequences : 0), (long long)numbers[i]);
    SPAR_TRY(start(layout, total, world, sequences * world));
    at = calloc((size_t)sequences + 1, sizeof *at); /* global offset of the next part of each */
    if (!at) {
        spar_layout_free(layout);
        return spar_fail(SPAR_NO_MEMORY, "no memory for %lld sequences", (long long)sequences);
    }
    for (int64_t s = 0, end = 0; s < sequences; s++) {
        at[s] = end;
        for (int rank = 0; rank < (table ? world : 1); rank++)
            end += numbers[rank * sequences + s];
    }
    for (int rank = 0; rank < world; rank++) {
        add(layout, rank, 0, 0);
        for (int64_t s = 0; s < sequences; s++) {
            int64_t extent = table ? numbers[rank * sequences + s] : spar_shard_size(numbers[s], world, rank);
            add(layout, rank, table ? at[s] : at[s] + shard_start(numbers[s], world, rank), extent);
            at[s] += table ? extent : 0;
        }
    }
    free(at);
    return SPAR_OK;
}

/* Shards each rank's part once more over `inner` ranks by the size rule: rank u * world + r then holds part u
 * of what rank r held; with `neighbours` rank r * inner + u does. Frees the layout on failure. */
static spar_status refine(spar_layout *layout, int inner, int neighbours)
{
    spar_layout outer = *layout;
    if (inner == 1)
        return SPAR_OK;
    int64_t pieces = outer.first[outer.world];
    spar_status status =
        start(layout, outer.total, outer.world * inner, pieces + (int64_t)outer.world * inner);
    for (int rank = 0; status == SPAR_OK && rank < layout->world; rank++) {
        int from = neighbours ? rank / inner : rank % outer.world;
        int part = neighbours ? rank % inner : rank / outer.world;
        int64_t held = spar_layout_extent(&outer, from);
        int64_t begin = shard_start(held, inner, part), end = begin + spar_shard_size(held, inner, part);
        add(layout, rank, 0, 0);
        for (int64_t i = outer.first[from]; i < outer.first[from + 1]; i++) {
            const spar_piece *piece = &outer.pieces[i];
            int64_t low = piece->local > begin ? piece->local : begin;
            int64_t high = piece->local + piece->extent < end ? piece->local + piece->extent : end;
            if (low < high)
                add(layout, rank, piece->global + (low - piece->local), high - low);
        }
    }
    spar_layout_free(&outer);
    return status;
}

static spar_status check_total(int64_t total)
{
    return total < 0 ? spar_fail(SPAR_INVALID, "the total is %lld; expected at least 0", (long long)total)
                     : SPAR_OK;
}

/* Reads the numbers of a kind that has inner ranks; there are at least two. */
static spar_status read_refined(spar_layout *layout)
{
    int64_t signed_inner = layout->numbers[0], second = layout->numbers[1], count = layout->count - 2;
    int world = layout->world;
    if (signed_inner == 0 || signed_inner < -world || signed_inner > world || world % signed_inner)
        return spar_fail(SPAR_INVALID, "%lld inner ranks; expected a divisor of the %d ranks",
                         (long long)signed_inner, world);
    int inner = abs((int)signed_inner), outer = world / inner;
    if (layout->kind == SPAR_ZIGZAG) {
        SPAR_TRY(check_total(second));
        SPAR_TRY(zigzag(layout, second, outer));
    } else {
        int table = second != count;
        if (second < 0 || second > count || (table && second * outer != count))
            return spar_fail(SPAR_INVALID,
                             "%lld numbers for %lld sequences on %d ranks; expected a length of each, or a "
                             "size of each on each rank",
                             (long long)count, (long long)second, outer);
        SPAR_TRY(packed(layout, outer, second, layout->numbers + 2, table));
    }
    return refine(layout, inner, signed_inner < 0);
}

static spar_status read_sizes(spar_layout *layout, const int64_t *sizes, int64_t count, int64_t shift)
{
    int64_t total = 0;
    int world = layout->world;
    if (shift < 0 || shift >= world)
        return spar_fail(SPAR_INVALID, "a shift of %lld ranks; expected 0 to %d", (long long)shift,
                         world - 1);
    if (count != world)
        return spar_fail(SPAR_INVALID, "%lld sizes; expected one for each of %d ranks", (long long)count,
                         world);
    for (int p = 0; p < world; p++)
        if (sizes[p] < 0 || __builtin_add_overflow(total, sizes[p], &total))
            return spar_fail(SPAR_INVALID,
                             "the size given for rank %d is %lld; expected at least 0, and a sum below 2^63",
                             p, (long long)sizes[p]);
    return cut(layout, total, sizes, (int)shift);
}

/* Returns the sum of sizes; -1 if one is negative, or the sum is above 2^63 - 1. */
static int64_t checked_sum(const int64_t *sizes, int64_t count, int step)
{
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        if (sizes[i * step] < 0 || __builtin_add_overflow(total, sizes[i * step], &total))
            return -1;
    return total;
}

/* Reads runs of documents, listed in the order of the whole. Their ranks, and the sums for readers that do
 * not add them up, must agree with the runs. */
static spar_status read_runs(spar_layout *layout, const int64_t *numbers, int64_t count)
{
    int world = layout->world;
    int64_t documents = numbers[0], rest = count - 1 - world;
    if (documents < 0 || documents > rest || (rest - documents) % 2)
        return spar_fail(
            SPAR_INVALID,
            "%lld numbers for %lld documents on %d ranks; expected a length of each, a rank and a "
            "size of each run, and a size of each rank",
            (long long)count, (long long)documents, world);
    const int64_t *runs = numbers + 1 + documents, *sizes = numbers + count - world;
    int64_t most = (rest - documents) / 2, total = checked_sum(runs + 1, most, 2);
    if (total < 0 || checked_sum(numbers + 1, documents, 1) != total)
        return spar_fail(SPAR_INVALID,
                         "runs of %lld; expected sizes of at least 0 that are together as long "
                         "as the documents, below 2^63",
                         (long long)total);
    for (int64_t i = 0; i < most; i++)
        if (runs[2 * i] < 0 || runs[2 * i] >= world)
            return spar_fail(SPAR_INVALID, "a run on rank %lld; expected 0 to %d", (long long)runs[2 * i],
                             world - 1);
    SPAR_TRY(start(layout, total, world, most));
    for (int rank = 0; rank < world; rank++) {
        add(layout, rank, 0, 0);
        for (int64_t i = 0, at = 0; i < most; at += runs[2 * i++ + 1])
            if (runs[2 * i] == rank)
                add(layout, rank, at, runs[2 * i + 1]);
        int64_t held = spar_layout_extent(layout, rank);
        if (held != sizes[rank]) {
            spar_layout_free(layout);
            return spar_fail(SPAR_INVALID, "runs of %lld on rank %d; expected its size, %lld",
                             (long long)held, rank, (long long)sizes[rank]);
        }
    }
    return SPAR_OK;
}

spar_status spar_layout_read(spar_layout *layout, const int64_t *numbers, int64_t count, int ndim, int world)
{
    int64_t dim = count ? numbers[0] : -1, kind = count > 1 ? numbers[1] : -1;
    *layout = (spar_layout){.dim = -1, .world = world};
    if (count == 1 && dim == -1)
        return SPAR_OK;
    if (dim < 0 || dim >= ndim)
        return spar_fail(SPAR_INVALID, "a dim is %lld; expected 0 to %d", (long long)dim, ndim - 1);
    numbers += 2;
    count -= 2;
    *layout =
        (spar_layout){.dim = (int)dim, .world = world, .kind = kind, .count = count, .numbers = numbers};
    if (kind == SPAR_SIZES)
        return read_sizes(layout, numbers, count, 0);
    if (kind == SPAR_ROTATED && count >= 1)
        return read_sizes(layout, numbers + 1, count - 1, numbers[0]);
    if (kind == SPAR_RUNS && count >= 1)
        return read_runs(layout, numbers, count);
    if ((kind == SPAR_ZIGZAG && count == 2) || (kind == SPAR_PACKED && count >= 2))
        return read_refined(layout);
    if (kind != SPAR_EVEN || count != 1)
        return spar_fail(
            SPAR_INVALID,
            "a layout of kind %lld has %lld numbers; expected kind 0 with 1, 1 with a size for each "
            "rank, 2 with 2, 3 with 2 or more, 4 with a shift and a size for each rank, or 5 with 1 or more",
            (long long)kind, (long long)(count > 0 ? count : 0));
    SPAR_TRY(check_total(numbers[0]));
    return cut(layout, numbers[0], NULL, 0);
}

int64_t spar_layout_extent(const spar_layout *layout, int rank)
{
    if (layout->first[rank] == layout->first[rank + 1])
        return 0;
    const spar_piece *last = &layout->pieces[layout->first[rank + 1] - 1];
    return last->local + last->extent;
}

/* Appends the numbers as a list, and what follows; a digest replaces the last of them if they do not fit. */
static void put_numbers(char *text, size_t size, const int64_t *numbers, int64_t count, const char *rest)
{
    enum { DIGEST = sizeof ", ..., digest 01234567]" };
    size_t begin = strlen(text), shown = begin;
    uint64_t hash = 0;
    for (int64_t i = 0; i < count; i++) {
        spar_append(text, size, "%s%lld", i ? ", " : "[", (long long)numbers[i]);
        hash = spar_hash(hash, numbers[i]);
        if (strlen(text) + DIGEST + strlen(rest) < size)
            shown = strlen(text);
    }
    if (strlen(text) + sizeof "]" + strlen(rest) > size) {
        text[shown] = 0;
        spar_append(text, size, "%s..., digest %08x", shown > begin ? ", " : "[", (unsigned)(hash >> 32));
    }
    spar_append(text, size, "]%s", rest);
}

void spar_layout_describe(const spar_layout *layout, char *text, size_t size)
{
    const int64_t *numbers = layout->numbers;
    char inner[64] = "";
    if ((layout->kind == SPAR_ZIGZAG || layout->kind == SPAR_PACKED) && llabs(numbers[0]) > 1)
        snprintf(inner, sizeof inner, ", each part in %lld%s", llabs(numbers[0]),
                 numbers[0] < 0 ? " neighbours" : "");
    if (layout->kind == SPAR_ZIGZAG) {
        spar_append(text, size, "zigzag%s", inner);
    } else if (layout->kind == SPAR_PACKED) {
        spar_append(text, size, "packed ");
        put_numbers(text, size, numbers + 2, layout->count - 2, inner);
    } else if (layout->kind == SPAR_RUNS) {
        spar_append(text, size, "runs ");
        put_numbers(text, size, numbers, layout->count, "");
    } else if (layout->kind == SPAR_ROTATED) {
        spar_append(text, size, "rotated by %lld", (long long)numbers[0]);
    }
}

void spar_layout_free(spar_layout *layout)
{
    free(layout->first);
    free(layout->pieces);
    layout->first = NULL;
    layout->pieces = NULL;
}
