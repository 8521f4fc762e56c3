/* Strided copies in host memory. */
#include "../device.h"
#include "../stream.h"

#include <string.h>

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float load_bf16(uint16_t half)
{
    return from_bits((uint32_t)half << 16);
}

static uint16_t store_bf16(float value)
{
    uint32_t bits = to_bits(value);
    if (value != value)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to the nearest, ties to even */
}

static float load_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) /* infinity and NaN: the exponent of both is all ones */
        return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400)
        return from_bits(sign | ((rest << 13) + 0x38000000)); /* the exponent's bias: 127 - 15 */
    float tiny = (float)rest * 0x1p-24f;                      /* subnormal, exact in float */
    return from_bits(sign | to_bits(tiny));
}

static uint16_t store_f16(float value)
{
    uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x47800000) /* 2^16 and more */
        return (uint16_t)(sign | 0x7c00);
    if (rest <
        0x38800000) { /* below 2^-14: adding 0.5 leaves the subnormal's bits, rounded, at the end */
        uint32_t sum = to_bits(from_bits(rest) + 0.5f);
        return (uint16_t)(sign | (sum - 0x3f000000));
    }
    rest += 0xfff + (rest >> 13 & 1); /* to the nearest, ties to even; may carry into infinity */
    return (uint16_t)(sign | ((rest - 0x38000000) >> 13));
}

#define SAME(x) (x)

/* n items of one type, times or divided by `by`; with the strides known where both sides are contiguous. */
#define SCALER(name, type, wide, load, store)                                                      \
    static inline void name##_strided(char *d, const char *s, int64_t n, int64_t ds, int64_t ss,   \
                                      wide by, int divide)                                         \
    {                                                                                              \
        for (int64_t i = 0; i < n; i++) {                                                          \
            type item;                                                                             \
            memcpy(&item, s + i * ss, sizeof item);                                                \
            item = store(divide ? load(item) / by : load(item) * by);                              \
            memcpy(d + i * ds, &item, sizeof item);                                                \
        }                                                                                          \
    }                                                                                              \
    static void name(char *d, const char *s, int64_t n, int64_t ds, int64_t ss, double factor,     \
                     int divide)                                                                   \
    {                                                                                              \
        wide by = (wide)factor;                                                                    \
        if (ds != sizeof(type) || ss != sizeof(type))                                              \
            name##_strided(d, s, n, ds, ss, by, divide);                                           \
        else if (divide)                                                                           \
            name##_strided(d, s, n, sizeof(type), sizeof(type), by, 1);                            \
        else                                                                                       \
            name##_strided(d, s, n, sizeof(type), sizeof(type), by, 0);                            \
    }

SCALER(scale_f16, uint16_t, float, load_f16, store_f16)
SCALER(scale_bf16, uint16_t, float, load_bf16, store_bf16)
SCALER(scale_f32, float, float, SAME, SAME)
SCALER(scale_f64, double, double, SAME, SAME)

/* Complex items, as torch multiplies and divides them by a real number: with the terms of the zero imaginary
 * part, which matter for infinities and signed zeros, and a division as a product with the reciprocal. */
#define COMPLEX_SCALER(name, type)                                                                 \
    static void name(char *d, const char *s, int64_t n, int64_t ds, int64_t ss, double factor,     \
                     int divide)                                                                   \
    {                                                                                              \
        const type by = (type)factor, inverse = 1 / by, zero = 0, ratio = zero / by;               \
        for (int64_t i = 0; i < n; i++) {                                                          \
            type x[2], y[2];                                                                       \
            memcpy(x, s + i * ss, sizeof x);                                                       \
            y[0] = divide ? (x[0] + x[1] * ratio) * inverse : x[0] * by - x[1] * zero;             \
            y[1] = divide ? (x[1] - x[0] * ratio) * inverse : x[0] * zero + x[1] * by;             \
            memcpy(d + i * ds, y, sizeof y);                                                       \
        }                                                                                          \
    }

COMPLEX_SCALER(scale_c64, float)
COMPLEX_SCALER(scale_c128, double)

static int64_t item_size(spar_dtype dtype)
{
    switch (dtype) {
    case SPAR_F16:
    case SPAR_BF16:
        return 2;
    case SPAR_F32:
        return 4;
    case SPAR_F64:
    case SPAR_C64:
        return 8;
    case SPAR_C128:
        return 16;
    default:
        return 1;
    }
}

/* n items, `ds` and `ss` bytes apart. */
static void scale_items(const spar_scale *scale, char *d, const char *s, int64_t n, int64_t ds,
                        int64_t ss)
{
    double factor = scale->factor;
    switch (scale->dtype) {
    case SPAR_F16:
        scale_f16(d, s, n, ds, ss, factor, scale->divide);
        break;
    case SPAR_BF16:
        scale_bf16(d, s, n, ds, ss, factor, scale->divide);
        break;
    case SPAR_F32:
        scale_f32(d, s, n, ds, ss, factor, scale->divide);
        break;
    case SPAR_F64:
        scale_f64(d, s, n, ds, ss, factor, scale->divide);
        break;
    case SPAR_C64:
        scale_c64(d, s, n, ds, ss, factor, scale->divide);
        break;
    case SPAR_C128:
        scale_c128(d, s, n, ds, ss, factor, scale->divide);
        break;
    case SPAR_UNSCALED:
        break;
    }
}

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
        int64_t item = item_size(scale->dtype);
        if (run == item)
            scale_items(scale, d, s, n, ds, ss);
        else
            for (int64_t i = 0; i < n; i++)
                scale_items(scale, d + i * ds, s + i * ss, run / item, item, item);
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
