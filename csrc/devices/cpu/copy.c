/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cpu/copy.h"

#include "devices/cpu/items.h"
#include "devices/cpu/nontemporal.h"
#include "devices/cpu/threads.h"

#include <string.h>

enum {
    LONG_RUN = 1 << 16, /* bytes of a run that threads share */
    PAGE = 4096,        /* bytes of its parts */
    TILE = 2048,        /* bytes that go to several outputs from the L1 cache */
    FEW = 8,            /* outputs that are written at a time */
    AHEAD = 2048,       /* bytes that are read ahead of short strided runs */
    ROWS_AHEAD = 4,     /* the same of rows: of those with gaps between them each may begin on another page */
    SHORT_RUN = 2048,   /* bytes: of longer runs the processor reads most ahead by itself */
    TURN = 1024,        /* bytes that are read before the first target has its next turn */
    STRIP = 256,        /* bytes of each row that are copied at a time; */
    NEAR = 1 << 14,     /* more where they are read from so many bytes, half of an L1 cache */
};

/* A constant size lets the compiler copy an item with one load and one store. Not unrolled, a loop of so few
 * instructions takes half as long again where it crosses a cache line of the program. */
#define COPY_ITEMS(size)                                                                                     \
    case size:                                                                                               \
        _Pragma("GCC unroll 4") for (int64_t i = 0; i < n; i++) memcpy(d + i * ds, s + i * ss, size);        \
        break;

/* Whether non-temporal stores gain for runs at `d` and each `ds` behind. Whole lines gain however few they
 * are: nothing of them is read. */
static int gains_nontemporal(const spar_copy *c, const char *d, int64_t ds, int64_t run)
{
    int64_t bits = (intptr_t)d | ds | run;
    return c->nontemporal && (run >= SPAR_NONTEMPORAL_RUN || (bits & (SPAR_CACHE_LINE - 1)) == 0);
}

/* Copies n runs with non-temporal stores. */
static void stream_runs(char *d, const char *s, int64_t n, int64_t ds, int64_t ss, int64_t run)
{
    int64_t ahead = n == 1 || ss == run || run > SHORT_RUN ? n : (AHEAD + run - 1) / run;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t line = 0; line < run && i + ahead < n; line += SPAR_CACHE_LINE)
            __builtin_prefetch(s + (i + ahead) * ss + line);
        spar_nontemporal_copy(d + i * ds, s + i * ss, run);
    }
}

/* Copies n runs with strides `ds` and `ss`. */
static void copy_runs(const spar_copy *c, char *d, const char *s, int64_t n, int64_t ds, int64_t ss,
                      int64_t run)
{
    const spar_scale *scale = c->scale;
    if (scale->dtype != SPAR_UNSCALED) {
        int64_t item = spar_scale_types[scale->dtype].bytes;
        if (run == item)
            spar_scale_items(scale, d, s, n, ds, ss);
        else if (gains_nontemporal(c, d, ds, run))
            for (int64_t i = 0; i < n; i++) {
                char *to = d + i * ds;
                spar_scale_nontemporal(scale, &to, 1, s + i * ss, run);
            }
        else
            for (int64_t i = 0; i < n; i++)
                spar_scale_items(scale, d + i * ds, s + i * ss, run / item, item, item);
        return;
    }
    if (ss == 0 && ds == run && spar_repeat_item(d, s, n, run, c->nontemporal))
        return;
    switch (run) {
        COPY_ITEMS(1)
        COPY_ITEMS(2)
        COPY_ITEMS(4)
        COPY_ITEMS(8)
        COPY_ITEMS(16)
        COPY_ITEMS(32)
    default:
        if (gains_nontemporal(c, d, ds, run))
            stream_runs(d, s, n, ds, ss, run);
        else
            for (int64_t i = 0; i < n; i++)
                memcpy(d + i * ds, s + i * ss, (size_t)run);
    }
}

/* Copies a run to several outputs with non-temporal stores; reads and scales it once. */
static void scale_to_all(const spar_copy *c, int tensor, int64_t dst, const char *s, int64_t run)
{
    char *to[FEW];
    for (int first = 0; first < c->targets; first += FEW) {
        int targets = c->targets - first < FEW ? c->targets - first : FEW;
        for (int i = 0; i < targets; i++)
            to[i] = (char *)c->to[first + i][tensor] + dst;
        spar_scale_nontemporal(c->scale, to, targets, s, run);
    }
}

static void copy_to_all(const spar_copy *c, int tensor, int64_t dst, const char *s, int64_t run)
{
    int64_t n;
    for (int64_t at = 0; at < run; at += n) {
        /* Only whole lines are written then. */
        n = TILE - ((dst + at) & (SPAR_CACHE_LINE - 1));
        n = n < run - at ? n : run - at;
        for (int64_t line = 0; line < TILE; line += SPAR_CACHE_LINE) /* overlap reading with the stores */
            __builtin_prefetch(s + at + n + line);
        for (int target = 0; target < c->targets; target++)
            spar_nontemporal_copy((char *)c->to[target][tensor] + dst + at, s + at, n);
    }
}

/* Runs the innermost loop of a block. */
static void copy_inner(const spar_copy *c, int tensor, int64_t dst, const char *s, int64_t n, int64_t ds,
                       int64_t ss, int64_t run)
{
    if (c->targets > 1 && gains_nontemporal(c, (char *)c->to[0][tensor] + dst, ds, run))
        for (int64_t i = 0; i < n; i++)
            if (c->scale->dtype == SPAR_UNSCALED)
                copy_to_all(c, tensor, dst + i * ds, s + i * ss, run);
            else
                scale_to_all(c, tensor, dst + i * ds, s + i * ss, run);
    else
        for (int target = 0; target < c->targets; target++)
            copy_runs(c, (char *)c->to[target][tensor] + dst, s, n, ds, ss, run);
}

/* Copies n runs of each row in strips, each of which ends where a line of the first row does. */
static void copy_strips(const spar_copy *c, int tensor, int64_t dst, const char *s, int64_t n,
                        const spar_dim *columns, const spar_dim *rows, int64_t run)
{
    int64_t ds = columns->dst, ss = columns->src, length;
    int64_t most = NEAR / ss > STRIP / run ? NEAR / ss : STRIP / run;
    int squares = c->scale->dtype == SPAR_UNSCALED && ds == run && rows->src == run;
    for (; n > 0; n -= length) {
        length = most - ((intptr_t)((char *)c->to[0][tensor] + dst) & (SPAR_CACHE_LINE - 1)) / run;
        length = length < n ? length : n;
        for (int target = 0; target < c->targets; target++) {
            char *d = (char *)c->to[target][tensor] + dst;
            if (squares &&
                spar_transpose_items(d, s, rows->extent, length, rows->dst, ss, run, c->nontemporal))
                continue;
            for (int64_t i = 0; i < rows->extent; i++)
                copy_runs(c, d + i * rows->dst, s + i * rows->src, length, ds, ss, run);
        }
        dst += length * ds;
        s += length * ss;
    }
}

/* Copies bytes low to high of a block whose rows are listed. */
static void copy_listed(const spar_copy *c, const spar_block *block, int64_t low, int64_t high)
{
    const spar_rows *rows = &c->rows[block->tensor];
    const char *from = c->from[block->tensor];
    char *d = (char *)c->to[0][block->tensor] + block->dst + low;
    int64_t row = (block->src + low) / rows->bytes, skipped = (block->src + low) % rows->bytes;
    int64_t last = (block->src + high - 1) / rows->bytes;
    for (int64_t n, left = high - low; left > 0; left -= n, d += n, row++, skipped = 0) {
        n = rows->bytes - skipped < left ? rows->bytes - skipped : left;
        for (int64_t line = 0; n <= SHORT_RUN && line < n && row + ROWS_AHEAD <= last;
             line += SPAR_CACHE_LINE)
            __builtin_prefetch(from + rows->index[row + ROWS_AHEAD] * rows->stride + line);
        copy_runs(c, d, from + rows->index[row] * rows->stride + skipped, 1, n, n, n);
    }
}

/* Copies bytes low to high of runs first to first + count of each of a block's rows, in loop order. */
static void copy_block(const spar_copy *c, const spar_block *block, int64_t first, int64_t count, int64_t low,
                       int64_t high)
{
    if (spar_is_listed(c->rows, block->tensor)) {
        copy_listed(c, block, low, high);
        return;
    }
    int64_t at[SPAR_MAX_DIMS] = {0}, dst = block->dst + low;
    const char *s = (const char *)(c->wire ? c->wire : c->from[block->tensor]) + block->src + low;
    const spar_dim *dims = c->dims + block->dims, *rows = NULL;
    int outer = block->ndim - 1, which = spar_copy_rows(c, block); /* loops around the innermost one */
    const spar_dim once = {1, 0, 0};
    spar_dim others[SPAR_MAX_DIMS];
    if (which >= 0) { /* one of those is not run here */
        rows = &dims[which];
        memcpy(others, dims, (size_t)which * sizeof *dims);
        memcpy(others + which, rows + 1, (size_t)(outer-- - which) * sizeof *dims);
        dims = others;
    }
    const spar_dim *inner = outer >= 0 ? &dims[outer] : &once;
    int64_t begin = first % inner->extent;
    for (int64_t i = outer - 1, rest = first / inner->extent; rest; i--) {
        at[i] = rest % dims[i].extent;
        rest /= dims[i].extent;
        dst += at[i] * dims[i].dst;
        s += at[i] * dims[i].src;
    }
    for (;;) {
        int64_t n = inner->extent - begin < count ? inner->extent - begin : count;
        if (rows)
            copy_strips(c, block->tensor, dst + begin * inner->dst, s + begin * inner->src, n, inner, rows,
                        block->run);
        else
            copy_inner(c, block->tensor, dst + begin * inner->dst, s + begin * inner->src, n, inner->dst,
                       inner->src, high - low);
        if ((count -= n) == 0)
            return;
        begin = 0;
        for (int i = outer - 1; i >= 0; i--) {
            dst += dims[i].dst;
            s += dims[i].src;
            if (++at[i] < dims[i].extent)
                break;
            dst -= dims[i].dst * dims[i].extent;
            s -= dims[i].src * dims[i].extent;
            at[i] = 0;
        }
    }
}

/* Copies iterations first to first + count of the loops that the targets' i-th blocks have in common. Their
 * runs are neighbours in the source, and the targets have their turns so often that it is read from end to
 * end. */
static void copy_in_turn(const spar_copy *c, int64_t i, int64_t first, int64_t count)
{
    const spar_block *lead = spar_copy_block(c, 0, i);
    const spar_dim *loops = c->dims + lead->dims;
    int64_t at[SPAR_MAX_DIMS];
    int last = lead->ndim - 1;
    int64_t most = lead->run < SPAR_CACHE_LINE && loops[last].src < TURN ? TURN / loops[last].src : 1;
    for (int dim = last; dim >= 0; dim--) {
        at[dim] = first % loops[dim].extent;
        first /= loops[dim].extent;
    }
    for (int64_t n; count > 0; count -= n) {
        n = loops[last].extent - at[last];
        n = most < n ? most : n;
        n = count < n ? count : n;
        for (int target = 0; target < c->targets; target++) {
            const spar_block *block = spar_copy_block(c, target, i);
            const spar_dim *dims = c->dims + block->dims;
            int64_t src = block->src, dst = block->dst;
            for (int dim = 0; dim <= last; dim++) {
                src += at[dim] * dims[dim].src;
                dst += at[dim] * dims[dim].dst;
            }
            char *d = (char *)c->to[target][block->tensor] + dst;
            const char *from = (const char *)c->from[block->tensor] + src;
            if (n == 1 && block->run <= SHORT_RUN)
                for (int64_t line = 0; line < block->run; line += SPAR_CACHE_LINE)
                    __builtin_prefetch(from + ROWS_AHEAD * dims[last].src + line);
            if (n == 1) /* as constants they save a short run half its time */
                copy_runs(c, d, from, 1, 0, 0, block->run);
            else
                copy_runs(c, d, from, n, dims[last].dst, dims[last].src, block->run);
        }
        at[last] += n;
        for (int dim = last; dim > 0 && at[dim] == loops[dim].extent; dim--) {
            at[dim] = 0;
            at[dim - 1]++;
        }
    }
}

/* How many rows a block has. */
static int64_t height_of(const spar_copy *c, const spar_block *block)
{
    int rows = spar_copy_rows(c, block);
    return rows < 0 ? 1 : c->dims[block->dims + rows].extent;
}

/* The runs of each row. */
static int64_t runs_of(const spar_copy *c, const spar_block *block)
{
    return spar_block_bytes(1, block->ndim, c->dims + block->dims) / height_of(c, block);
}

/* Rounds the begin of a part up to whole `unit`s: a unit belongs to the part in which it begins. */
static int64_t cut(int64_t at, int64_t unit, int64_t end)
{
    int64_t next = at <= 0 ? 0 : (at + unit - 1) / unit * unit;
    return next < end ? next : end;
}

/* Copies bytes low to high of all blocks, split at runs, and long runs at pages. */
static void copy_range(const spar_copy *c, int64_t low, int64_t high)
{
    int64_t at = 0;
    for (int64_t i = 0; i < c->ranges->count && at < high; i++) {
        const spar_block *block = spar_copy_block(c, 0, i);
        int64_t run = block->run * height_of(c, block);
        for (int target = 1; target < c->targets && c->in_turn; target++)
            run += spar_copy_block(c, target, i)->run;
        int64_t bytes = runs_of(c, block) * run;
        int64_t first = cut(low - at, run, bytes) / run, last = cut(high - at, run, bytes) / run;
        if (c->in_turn) {
            copy_in_turn(c, i, first, last - first);
        } else if (block->run < LONG_RUN) {
            if (first < last)
                copy_block(c, block, first, last - first, 0, block->run);
        } else if (low < at + bytes) {
            for (int64_t which = low > at ? (low - at) / run : 0; which < last; which++) {
                int64_t begin = cut(low - at - which * run, PAGE, run);
                int64_t end = cut(high - at - which * run, PAGE, run);
                if (begin < end)
                    copy_block(c, block, which, 1, begin, end);
            }
        }
        at += bytes;
    }
    if (c->nontemporal)
        spar_nontemporal_fence();
}

/* Copies one of `parts` equal shares. */
static void copy_part(void *context, int part, int parts)
{
    const spar_copy *c = context;
    int64_t share = c->bytes / parts, low = share * part;
    copy_range(c, low, part + 1 < parts ? low + share : c->bytes);
}

void spar_copy_all(spar_copy *c, int64_t each)
{
    int parts = spar_threads_share(c->bytes);
    c->nontemporal = each >= spar_nontemporal_min();
    if (parts > 1) {
        spar_threads_run(copy_part, c, parts);
    } else if (c->in_turn) {
        copy_range(c, 0, c->bytes);
    } else {
        for (int64_t i = 0; i < c->ranges->count; i++) {
            const spar_block *block = spar_copy_block(c, 0, i);
            copy_block(c, block, 0, runs_of(c, block), 0, block->run);
        }
        if (c->nontemporal)
            spar_nontemporal_fence();
    }
}
