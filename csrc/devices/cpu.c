/* Strided copies in host memory. */
#include "../device.h"
#include "../stream.h"

#include <string.h>

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

static void copy_block(const spar_block *block, const spar_dim *dims, char *d, const char *s,
                       const manner *how)
{
    int64_t at[SPAR_MAX_DIMS] = {0};
    int outer = block->ndim - 1; /* loops around the innermost one */
    const spar_dim once = {1, 0, 0};
    const spar_dim *inner = outer >= 0 ? &dims[outer] : &once;
    for (;;) {
        copy_runs(d, s, inner->extent, inner->dst, inner->src, block->run, how);
        int i = outer - 1;
        for (; i >= 0; i--) {
            d += dims[i].dst;
            s += dims[i].src;
            if (++at[i] < dims[i].extent)
                break;
            d -= dims[i].dst * dims[i].extent;
            s -= dims[i].src * dims[i].extent;
            at[i] = 0;
        }
        if (i < 0)
            return;
    }
}

/* Whether these are so many bytes that they should go past the caches. */
static int streams(const spar_block *blocks, int64_t count, const spar_dim *dims)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t part = blocks[i].run;
        for (int dim = 0; dim < blocks[i].ndim; dim++)
            part *= dims[blocks[i].dims + dim].extent;
        if (spar_streams(bytes += part))
            return 1;
    }
    return 0;
}

static spar_status copy_blocks(const spar_block *blocks, int64_t count, const spar_dim *dims,
                               const void *const *from, void *const *to, const spar_scale *scale,
                               void *stream)
{
    const manner how = {scale, streams(blocks, count, dims)};
    (void)stream;
    for (int64_t i = 0; i < count; i++)
        copy_block(&blocks[i], dims + blocks[i].dims, (char *)to[blocks[i].tensor] + blocks[i].dst,
                   (const char *)from[blocks[i].tensor] + blocks[i].src, &how);
    if (how.streams)
        spar_stream_fence();
    return SPAR_OK;
}

const spar_device spar_device_cpu = {.name = "cpu", .copy_blocks = copy_blocks};
