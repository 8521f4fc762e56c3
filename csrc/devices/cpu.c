/* Strided copies in host memory. */
#include "../device.h"
#include "../stream.h"
#include "../team.h"

#include <string.h>

enum {
    LONG_RUN = 1 << 16,
    PAGE = 4096
}; /* bytes of a run that threads share, and of what they cut it into */

/* A constant size lets the compiler copy an item with one load and one store. */
#define COPY_ITEMS(size)                                                                           \
    case size:                                                                                     \
        for (int64_t i = 0; i < n; i++)                                                            \
            memcpy(d + i * ds, s + i * ss, size);                                                  \
        break;

/* How items are copied. */
typedef struct {
    const spar_scale *scale;
    int streams; /* past the caches */
} manner;

/* The innermost loop: n runs, `ds` and `ss` bytes apart. */
static void copy_runs(char *d, const char *s, int64_t n, int64_t ds, int64_t ss, int64_t run,
                      const manner *how)
{
    const spar_scale *scale = how->scale;
    if (scale->dtype != SPAR_UNSCALED) {
        int64_t item = spar_scale_item(scale->dtype);
        if (run == item)
            spar_scale_items(scale, d, s, n, ds, ss);
        else if (how->streams && run >= SPAR_STREAM_RUN)
            for (int64_t i = 0; i < n; i++)
                spar_scale_stream(scale, d + i * ds, s + i * ss, run);
        else
            for (int64_t i = 0; i < n; i++)
                spar_scale_items(scale, d + i * ds, s + i * ss, run / item, item, item);
        return;
    }
    switch (run) {
        COPY_ITEMS(1)
        COPY_ITEMS(2)
        COPY_ITEMS(4)
        COPY_ITEMS(8)
        COPY_ITEMS(16)
        COPY_ITEMS(32)
    default:
        if (how->streams && run >= SPAR_STREAM_RUN)
            for (int64_t i = 0; i < n; i++)
                spar_stream_copy(d + i * ds, s + i * ss, run);
        else
            for (int64_t i = 0; i < n; i++)
                memcpy(d + i * ds, s + i * ss, (size_t)run);
    }
}

/* Runs first to first + count of a block, counted as its loops go. */
static void copy_block(const spar_block *block, const spar_dim *dims, char *d, const char *s,
                       int64_t first, int64_t count, const manner *how)
{
    int64_t at[SPAR_MAX_DIMS] = {0};
    int outer = block->ndim - 1; /* loops around the innermost one */
    const spar_dim once = {1, 0, 0};
    const spar_dim *inner = outer >= 0 ? &dims[outer] : &once;
    int64_t begin = first % inner->extent;
    for (int64_t i = outer - 1, rest = first / inner->extent; rest; i--) {
        at[i] = rest % dims[i].extent;
        rest /= dims[i].extent;
        d += at[i] * dims[i].dst;
        s += at[i] * dims[i].src;
    }
    for (;;) {
        int64_t n = inner->extent - begin < count ? inner->extent - begin : count;
        copy_runs(d + begin * inner->dst, s + begin * inner->src, n, inner->dst, inner->src,
                  block->run, how);
        if ((count -= n) == 0)
            return;
        begin = 0;
        for (int i = outer - 1; i >= 0; i--) {
            d += dims[i].dst;
            s += dims[i].src;
            if (++at[i] < dims[i].extent)
                break;
            d -= dims[i].dst * dims[i].extent;
            s -= dims[i].src * dims[i].extent;
            at[i] = 0;
        }
    }
}

static int64_t runs_of(const spar_block *block, const spar_dim *dims)
{
    int64_t runs = 1;
    for (int dim = 0; dim < block->ndim; dim++)
        runs *= dims[dim].extent;
    return runs;
}

typedef struct {
    const spar_block *blocks;
    int64_t count, bytes;
    const spar_dim *dims;
    const void *const *from;
    void *const *to;
    manner how;
} copy;

/* Where a part that begins at byte `at` begins in a row of whole `unit`s: a unit is whose part it begins in. */
static int64_t cut(int64_t at, int64_t unit, int64_t end)
{
    int64_t next = at <= 0 ? 0 : (at + unit - 1) / unit * unit;
    return next < end ? next : end;
}

/* The bytes of all blocks, one behind the other, are shared evenly: by runs, and long runs by pages. */
static void copy_part(void *context, int part, int parts)
{
    const copy *c = context;
    int64_t low = c->bytes / parts * part, at = 0;
    int64_t high = part + 1 < parts ? c->bytes / parts * (part + 1) : c->bytes;
    for (int64_t i = 0; i < c->count && at < high; i++) {
        const spar_block *block = &c->blocks[i];
        const spar_dim *dims = c->dims + block->dims;
        char *d = (char *)c->to[block->tensor] + block->dst;
        const char *s = (const char *)c->from[block->tensor] + block->src;
        int64_t run = block->run, bytes = runs_of(block, dims) * run;
        int64_t first = cut(low - at, run, bytes) / run, last = cut(high - at, run, bytes) / run;
        if (run < LONG_RUN) {
            if (first < last)
                copy_block(block, dims, d, s, first, last - first, &c->how);
        } else if (low < at + bytes) {
            for (int64_t which = low > at ? (low - at) / run : 0; which < last; which++) {
                spar_block piece = *block;
                int64_t begin = cut(low - at - which * run, PAGE, run);
                piece.run = cut(high - at - which * run, PAGE, run) - begin;
                if (piece.run > 0)
                    copy_block(&piece, dims, d + begin, s + begin, which, 1, &c->how);
            }
        }
        at += bytes;
    }
    if (c->how.streams)
        spar_stream_fence();
}

static spar_status copy_blocks(const spar_block *blocks, int64_t count, const spar_dim *dims,
                               const void *const *from, void *const *to, const spar_scale *scale,
                               void *stream)
{
    int alone = spar_team_share(INT64_MAX) == 1;
    int64_t enough = alone ? spar_stream_least() : INT64_MAX; /* to decide: counting takes time */
    copy c = {blocks, count, 0, dims, from, to, {scale, 0}};
    (void)stream;
    for (int64_t i = 0; i < count && c.bytes < enough; i++)
        c.bytes += runs_of(&blocks[i], dims + blocks[i].dims) * blocks[i].run;
    c.how.streams = c.bytes >= spar_stream_least();
    int parts = alone ? 1 : spar_team_share(c.bytes);
    if (parts > 1) {
        spar_team_run(copy_part, &c, parts);
        return SPAR_OK;
    }
    for (int64_t i = 0; i < count; i++)
        copy_block(&blocks[i], dims + blocks[i].dims, (char *)to[blocks[i].tensor] + blocks[i].dst,
                   (const char *)from[blocks[i].tensor] + blocks[i].src, 0,
                   runs_of(&blocks[i], dims + blocks[i].dims), &c.how);
    if (c.how.streams)
        spar_stream_fence();
    return SPAR_OK;
}

const spar_device spar_device_cpu = {.name = "cpu", .copy_blocks = copy_blocks};
