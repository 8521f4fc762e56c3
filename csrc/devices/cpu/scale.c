/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/scale.h"
#include "devices/cpu/nontemporal.h"
#include "devices/cpu/vectors.h"

#include <math.h>
#include <string.h>

const spar_scale_type spar_scale_types[] = {
    [SPAR_UNSCALED] = {"as_is", NULL, 1, 0},
#define SPAR_SCALE_TYPE(NAME, name, torch_name, bytes, dlpack_code)                                          \
    [SPAR_##NAME] = {#name, torch_name, bytes, dlpack_code},
#include "devices/scale.def"
#undef SPAR_SCALE_TYPE
};

enum { STEP = 2 * SPAR_CACHE_LINE }; /* with one alone, gcc makes no good vectors */

#define SAME(x) (x)

/* n items of one type, times or divided by `by`; with the strides known where both sides are contiguous. */
#define SCALER(name, type, wide, load, store)                                                                \
    INLINE void name##_strided(char *d, const char *s, int64_t n, int64_t ds, int64_t ss, wide by,           \
                               int divide)                                                                   \
    {                                                                                                        \
        for (int64_t i = 0; i < n; i++) {                                                                    \
            type item;                                                                                       \
            memcpy(&item, s + i * ss, sizeof item);                                                          \
            item = store(divide ? load(item) / by : load(item) * by);                                        \
            memcpy(d + i * ds, &item, sizeof item);                                                          \
        }                                                                                                    \
    }                                                                                                        \
    INLINE void name(char *d, const char *s, int64_t n, int64_t ds, int64_t ss, double factor, int divide)   \
    {                                                                                                        \
        wide by = (wide)factor;                                                                              \
        if (ds != sizeof(type) || ss != sizeof(type))                                                        \
            name##_strided(d, s, n, ds, ss, by, divide);                                                     \
        else if (divide)                                                                                     \
            name##_strided(d, s, n, sizeof(type), sizeof(type), by, 1);                                      \
        else                                                                                                 \
            name##_strided(d, s, n, sizeof(type), sizeof(type), by, 0);                                      \
    }

SCALER(scale_f16, uint16_t, float, load_f16, store_f16)
SCALER(scale_bf16_items, uint16_t, float, load_bf16, store_bf16)
SCALER(scale_f32, float, float, SAME, SAME)
SCALER(scale_f64, double, double, SAME, SAME)

/* Contiguous bf16 two at a time, as the halves of a word: nothing has to change its place in a vector. */
INLINE void scale_bf16_pairs(char *d, const char *s, int64_t pairs, float by, int divide)
{
    for (int64_t i = 0; i < pairs; i++) {
        uint32_t pair;
        memcpy(&pair, s + 4 * i, sizeof pair);
        float high = from_bits(pair & 0xffff0000), low = from_bits(pair << 16);
        uint32_t a = round_bf16(divide ? high / by : high * by);
        uint32_t b = round_bf16(divide ? low / by : low * by);
        pair = (a & 0xffff0000) | b >> 16;
        memcpy(d + 4 * i, &pair, sizeof pair);
    }
}

INLINE void scale_bf16(char *d, const char *s, int64_t n, int64_t ds, int64_t ss, double factor, int divide)
{
    int64_t pairs = ds == 2 && ss == 2 ? n / 2 : 0;
    if (divide)
        scale_bf16_pairs(d, s, pairs, (float)factor, 1);
    else
        scale_bf16_pairs(d, s, pairs, (float)factor, 0);
    scale_bf16_items(d + 4 * pairs, s + 4 * pairs, n - 2 * pairs, ds, ss, factor, divide);
}

/* Complex items, as torch multiplies and divides them by a real number: with the terms of the zero imaginary
 * part, which matter for infinities and signed zeros, and a division as a product with the reciprocal. */
#define COMPLEX_SCALER(name, type)                                                                           \
    INLINE void name(char *d, const char *s, int64_t n, int64_t ds, int64_t ss, double factor, int divide)   \
    {                                                                                                        \
        const type by = (type)factor, inverse = 1 / by, zero = 0, ratio = zero / by;                         \
        for (int64_t i = 0; i < n; i++) {                                                                    \
            type x[2], y[2];                                                                                 \
            memcpy(x, s + i * ss, sizeof x);                                                                 \
            y[0] = divide ? (x[0] + x[1] * ratio) * inverse : x[0] * by - x[1] * zero;                       \
            y[1] = divide ? (x[1] - x[0] * ratio) * inverse : x[0] * zero + x[1] * by;                       \
            memcpy(d + i * ds, y, sizeof y);                                                                 \
        }                                                                                                    \
    }

COMPLEX_SCALER(scale_c64, float)
COMPLEX_SCALER(scale_c128, double)

INLINE void scale_any(const spar_scale *scale, char *d, const char *s, int64_t n, int64_t ds, int64_t ss)
{
    double factor = scale->factor;
    int divide = scale->divide;
    switch (scale->dtype) {
#define SPAR_SCALE_TYPE(NAME, name, ...)                                                                     \
    case SPAR_##NAME:                                                                                        \
        scale_##name(d, s, n, ds, ss, factor, divide);                                                       \
        break;
#include "devices/scale.def"
#undef SPAR_SCALE_TYPE
    default:
        break;
    }
}

/* One line past the caches; `to` is aligned to it. */
typedef void put_line(char *to, const char *line);

INLINE void put_lines(put_line *put, char *const *to, int targets, int64_t at, const char *lines)
{
    for (int target = 0; target < targets; target++)
        for (int64_t line = 0; line < STEP; line += SPAR_CACHE_LINE)
            put(to[target] + at + line, lines + line);
}

/* Bytes `at` to `end`, whole pairs of lines, past the caches to all targets: by way of a few on the stack, so
 * that reading, scaling and writing overlap. `dtype`, `item` and `divide` are constants where this is
 * inlined. */
INLINE void scale_lines(spar_dtype dtype, int item, int divide, double factor, put_line *put, char *const *to,
                        int targets, const char *s, int64_t at, int64_t end)
{
    const spar_scale scale = {dtype, divide, factor};
    for (; at < end; at += STEP) {
        char lines[STEP] __attribute__((aligned(SPAR_CACHE_LINE)));
        scale_any(&scale, lines, s + at, STEP / item, item, item);
        put_lines(put, to, targets, at, lines);
    }
}

#define LINES const spar_scale *scale, char *const *to, int targets, const char *s, int64_t at, int64_t end

INLINE void scale_any_lines(LINES, put_line *put)
{
    switch (2 * scale->dtype + !!scale->divide) {
#define SPAR_SCALE_TYPE(NAME, name, torch_name, bytes, ...)                                                  \
    case 2 * SPAR_##NAME:                                                                                    \
        scale_lines(SPAR_##NAME, bytes, 0, scale->factor, put, to, targets, s, at, end);                     \
        break;                                                                                               \
    case 2 * SPAR_##NAME + 1:                                                                                \
        scale_lines(SPAR_##NAME, bytes, 1, scale->factor, put, to, targets, s, at, end);                     \
        break;
#include "devices/scale.def"
#undef SPAR_SCALE_TYPE
    default:
        break;
    }
}

#define ITEMS const spar_scale *scale, char *d, const char *s, int64_t n, int64_t ds, int64_t ss

static void items_plain(ITEMS)
{
    scale_any(scale, d, s, n, ds, ss);
}

static void lines_plain(LINES)
{
    scale_any_lines(scale, to, targets, s, at, end, spar_nontemporal_line);
}

#ifdef __x86_64__
/* Contiguous f16, eight at a time; how many it did. */
AVX2 static inline int64_t scale_f16_vectors(const spar_scale *scale, char *d, const char *s, int64_t n)
{
    const __m256 by = _mm256_set1_ps((float)scale->factor);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + 2 * i)));
        x = scale->divide ? _mm256_div_ps(x, by) : _mm256_mul_ps(x, by);
        _mm_storeu_si128((__m128i *)(d + 2 * i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    return i;
}

AVX2 static inline void f16_lines(LINES, put_line *put)
{
    for (; at < end; at += STEP) {
        char lines[STEP] __attribute__((aligned(SPAR_CACHE_LINE)));
        scale_f16_vectors(scale, lines, s + at, STEP / 2);
        put_lines(put, to, targets, at, lines);
    }
}

#define VECTORS(name, target, put)                                                                           \
    target static void items_##name(ITEMS)                                                                   \
    {                                                                                                        \
        int64_t done = 0;                                                                                    \
        if (scale->dtype == SPAR_F16 && ds == 2 && ss == 2)                                                  \
            done = scale_f16_vectors(scale, d, s, n);                                                        \
        scale_any(scale, d + done * ds, s + done * ss, n - done, ds, ss);                                    \
    }                                                                                                        \
    target static void lines_##name(LINES)                                                                   \
    {                                                                                                        \
        if (scale->dtype == SPAR_F16)                                                                        \
            f16_lines(scale, to, targets, s, at, end, put);                                                  \
        else                                                                                                 \
            scale_any_lines(scale, to, targets, s, at, end, put);                                            \
    }

VECTORS(avx2, AVX2, spar_nontemporal_line)
VECTORS(avx512, AVX512, spar_nontemporal_line_avx512)
#endif

/* By the width of vectors. */
static const struct {
    void (*items)(ITEMS);
    void (*lines)(LINES);
} scalers[] = {
    {items_plain, lines_plain},
#ifdef __x86_64__
    {items_avx2, lines_avx2},
    {items_avx512, lines_avx512},
#endif
};

/* Complex items have a division of their own. */
spar_scale spar_scale_simple(const spar_scale *scale)
{
    int exponent;
    int real = scale->dtype >= SPAR_F16 && scale->dtype <= SPAR_F64;
    if (!real || !scale->divide || fabs(frexp(scale->factor, &exponent)) != 0.5 || exponent < -99 ||
        exponent > 99)
        return *scale;
    return (spar_scale){scale->dtype, 0, 1 / scale->factor};
}

void spar_scale_items(ITEMS)
{
    scalers[widest_vectors()].items(scale, d, s, n, ds, ss);
}

void spar_scale_nontemporal(const spar_scale *scale, char *const *to, int targets, const char *from,
                            int64_t bytes)
{
    const int64_t item = spar_scale_types[scale->dtype].bytes;
    int64_t head = -(intptr_t)to[0] & (SPAR_CACHE_LINE - 1), end = head;
    if (head % item == 0 && head < bytes)
        end += (bytes - head) & ~(int64_t)(STEP - 1);
    else
        head = end = 0; /* items that no line begins with: an input may lie anywhere */
    for (int target = 0; target < targets; target++) {
        if ((to[target] - to[0]) & (SPAR_CACHE_LINE - 1)) { /* its lines begin elsewhere */
            spar_scale_nontemporal(scale, to + target, targets - target, from, bytes);
            targets = target;
            break;
        }
        spar_scale_items(scale, to[target], from, head / item, item, item);
        spar_scale_items(scale, to[target] + end, from + end, (bytes - end) / item, item, item);
    }
    scalers[widest_vectors()].lines(scale, to, targets, from, head, end);
}
