/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/sum.h"
#include "devices/cpu/nontemporal.h"
#include "devices/cpu/threads.h"
#include "devices/cpu/vectors.h"

/* Ints of one size are added alike: they wrap around. */
const spar_sum_type spar_sum_types[] = {
    {"bool", SPAR_SUM_BOOL},       {"uint8", SPAR_SUM_I8},      {"int8", SPAR_SUM_I8},
    {"int16", SPAR_SUM_I16},       {"int32", SPAR_SUM_I32},     {"int64", SPAR_SUM_I64},
    {"float16", SPAR_SUM_F16},     {"bfloat16", SPAR_SUM_BF16}, {"float32", SPAR_SUM_F32},
    {"float64", SPAR_SUM_F64},     {"complex32", SPAR_SUM_C32}, {"complex64", SPAR_SUM_C64},
    {"complex128", SPAR_SUM_C128}, {NULL, SPAR_NO_SUM},
};

/* Numbers (a complex item has two) that are added at a time, from the L1 cache: with fewer, clang unrolls
 * loops instead of making vectors of them. */
enum { SOME = 256 };

/* `n` numbers from byte `at` of each of `count` parts; their sums go to `to`. */
#define PARTS const char *const *parts, int count, int64_t at, int n

/* Two parts, whole items. */
#define TWO char *restrict to, const char *restrict a, const char *restrict b, int64_t bytes

/* A sum of two parts stays in registers; one of more has its totals in memory in between. */
#define SUMMER(name, type, wide, load, store, add)                                                           \
    INLINE void sum_two_##name(TWO)                                                                          \
    {                                                                                                        \
        type x, y;                                                                                           \
        for (int64_t i = 0; i < bytes; i += (int64_t)sizeof x) {                                             \
            memcpy(&x, a + i, sizeof x);                                                                     \
            memcpy(&y, b + i, sizeof y);                                                                     \
            x = store(add(load(x), load(y)));                                                                \
            memcpy(to + i, &x, sizeof x);                                                                    \
        }                                                                                                    \
    }                                                                                                        \
    INLINE void sum_##name(char *to, PARTS)                                                                  \
    {                                                                                                        \
        wide total[SOME];                                                                                    \
        type item;                                                                                           \
        for (int i = 0; i < n; i++) {                                                                        \
            memcpy(&item, parts[0] + at + i * (int)sizeof item, sizeof item);                                \
            total[i] = load(item);                                                                           \
        }                                                                                                    \
        for (int part = 1; part < count; part++)                                                             \
            for (int i = 0; i < n; i++) {                                                                    \
                memcpy(&item, parts[part] + at + i * (int)sizeof item, sizeof item);                         \
                total[i] = add(total[i], load(item));                                                        \
            }                                                                                                \
        for (int i = 0; i < n; i++) {                                                                        \
            item = store(total[i]);                                                                          \
            memcpy(to + i * (int)sizeof item, &item, sizeof item);                                           \
        }                                                                                                    \
    }

#define SAME(x) (x)
#define ANY(x) ((x) != 0)
#define ADD(a, b) ((a) + (b))
#define OR(a, b) ((a) | (b))

SUMMER(bool, uint8_t, uint8_t, ANY, SAME, OR)
SUMMER(i8, uint8_t, uint8_t, SAME, SAME, (uint8_t)ADD)
SUMMER(i16, uint16_t, uint16_t, SAME, SAME, (uint16_t)ADD)
SUMMER(i32, uint32_t, uint32_t, SAME, SAME, ADD)
SUMMER(i64, uint64_t, uint64_t, SAME, SAME, ADD)
SUMMER(f32, float, float, SAME, SAME, ADD)
SUMMER(f64, double, double, SAME, SAME, ADD)
SUMMER(bf16_items, uint16_t, float, load_bf16, store_bf16, ADD)

/* bf16 two at a time, as the halves of a word: nothing has to change its place in a vector. */
INLINE uint32_t store_pair(float high, float low)
{
    return (round_bf16(high) & 0xffff0000) | round_bf16(low) >> 16;
}

INLINE void sum_two_bf16(TWO)
{
    uint32_t x, y;
    int64_t pairs = bytes & ~(int64_t)3;
    for (int64_t i = 0; i < pairs; i += 4) {
        memcpy(&x, a + i, sizeof x);
        memcpy(&y, b + i, sizeof y);
        x = store_pair(from_bits(x & 0xffff0000) + from_bits(y & 0xffff0000),
                       from_bits(x << 16) + from_bits(y << 16));
        memcpy(to + i, &x, sizeof x);
    }
    sum_two_bf16_items(to + pairs, a + pairs, b + pairs, bytes - pairs);
}

INLINE void sum_bf16(char *to, PARTS)
{
    float high[SOME / 2], low[SOME / 2];
    uint32_t pair;
    int pairs = n / 2;
    for (int i = 0; i < pairs; i++) {
        memcpy(&pair, parts[0] + at + 4 * i, sizeof pair);
        high[i] = from_bits(pair & 0xffff0000);
        low[i] = from_bits(pair << 16);
    }
    for (int part = 1; part < count; part++)
        for (int i = 0; i < pairs; i++) {
            memcpy(&pair, parts[part] + at + 4 * i, sizeof pair);
            high[i] += from_bits(pair & 0xffff0000);
            low[i] += from_bits(pair << 16);
        }
    for (int i = 0; i < pairs; i++) {
        pair = store_pair(high[i], low[i]);
        memcpy(to + 4 * i, &pair, sizeof pair);
    }
    if (n % 2)
        sum_bf16_items(to + 4 * pairs, parts, count, at + 4 * pairs, 1);
}

/* As torch adds complex numbers: a + (1 + 0i) * b. The zero terms matter for infinities and signed zeros. */
#define ADD_COMPLEX(total, i, re, im, zero)                                                                  \
    do {                                                                                                     \
        (total)[i] += (re) - (im) * (zero);                                                                  \
        (total)[(i) + 1] += (re) * (zero) + (im);                                                            \
    } while (0)

#define COMPLEX_SUMMER(name, type)                                                                           \
    INLINE void sum_##name(char *to, PARTS)                                                                  \
    {                                                                                                        \
        type total[SOME], item[2];                                                                           \
        memcpy(total, parts[0] + at, (size_t)n * sizeof *total);                                             \
        for (int part = 1; part < count; part++)                                                             \
            for (int i = 0; i < n; i += 2) {                                                                 \
                memcpy(item, parts[part] + at + i * (int)sizeof *item, sizeof item);                         \
                ADD_COMPLEX(total, i, item[0], item[1], (type)0);                                            \
            }                                                                                                \
        memcpy(to, total, (size_t)n * sizeof *total);                                                        \
    }

COMPLEX_SUMMER(c64, float)
COMPLEX_SUMMER(c128, double)

/* float16 has conversions of its own for each instruction set. */
typedef void load_halves(float *to, const char *from, int n);
typedef void store_halves(char *to, const float *from, int n);

INLINE void load_plain(float *to, const char *from, int n)
{
    for (int i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        to[i] = load_f16(half);
    }
}

INLINE void store_plain(char *to, const float *from, int n)
{
    for (int i = 0; i < n; i++) {
        uint16_t half = store_f16(from[i]);
        memcpy(to + 2 * i, &half, sizeof half);
    }
}

INLINE void sum_halves(char *to, PARTS, int complex, load_halves *load, store_halves *store)
{
    float total[SOME], next[SOME];
    load(total, parts[0] + at, n);
    for (int part = 1; part < count; part++) {
        load(next, parts[part] + at, n);
        if (complex)
            for (int i = 0; i < n; i += 2)
                ADD_COMPLEX(total, i, next[i], next[i + 1], 0.0f);
        else
            for (int i = 0; i < n; i++)
                total[i] += next[i];
    }
    store(to, total, n);
}

/* Bytes low to high of the parts, whole items; their sums go to `to`. */
#define RANGE spar_sum_kind kind, char *to, const char *const *parts, int count, int64_t low, int64_t high

/* `n` is a constant for all but the last numbers. */
#define EACH(KIND, size, ...)                                                                                \
    case SPAR_SUM_##KIND: {                                                                                  \
        int64_t at = low;                                                                                    \
        for (int n = SOME; high - at >= SOME * (size); at += SOME * (size), to += SOME * (size))             \
            __VA_ARGS__;                                                                                     \
        int n = (int)((high - at) / (size));                                                                 \
        __VA_ARGS__;                                                                                         \
        break;                                                                                               \
    }

#define EACH_ITEM(KIND, size, name) EACH(KIND, size, sum_##name(to, parts, count, at, n))
#define EACH_OF_TWO(KIND, size, name)                                                                        \
    case SPAR_SUM_##KIND:                                                                                    \
        sum_two_##name(to, parts[0] + low, parts[1] + low, high - low);                                      \
        return;

/* X(kind, bytes, name) for those that have a sum of two: others have their totals in memory. */
#define ITEMS(X)                                                                                             \
    X(BOOL, 1, bool)                                                                                         \
    X(I8, 1, i8) X(I16, 2, i16) X(I32, 4, i32) X(I64, 8, i64) X(BF16, 2, bf16) X(F32, 4, f32) X(F64, 8, f64)

INLINE void sum_range(RANGE, load_halves *load, store_halves *store)
{
    switch (count == 2 ? kind : SPAR_NO_SUM) {
        ITEMS(EACH_OF_TWO)
    default:
        break;
    }
    switch (kind) {
        ITEMS(EACH_ITEM)
        EACH(F16, 2, sum_halves(to, parts, count, at, n, 0, load, store))
        EACH(C32, 2, sum_halves(to, parts, count, at, n, 1, load, store))
        EACH_ITEM(C64, 4, c64)
        EACH_ITEM(C128, 8, c128)
    default:
        break;
    }
}

static void range_plain(RANGE)
{
    sum_range(kind, to, parts, count, low, high, load_plain, store_plain);
}

#ifdef __x86_64__
AVX2 static inline void load_f16c(float *to, const char *from, int n)
{
    int i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i))));
    load_plain(to + i, from + 2 * i, n - i);
}

AVX2 static inline void store_f16c(char *to, const float *from, int n)
{
    int i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + 2 * i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    store_plain(to + 2 * i, from + i, n - i);
}

/* Two parts, eight numbers at a time; how many bytes it did. */
AVX2 static inline int64_t sum_two_f16c(TWO)
{
    int64_t i = 0;
    for (; i + 16 <= bytes; i += 16) {
        __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(a + i)));
        __m256 y = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(b + i)));
        _mm_storeu_si128((__m128i *)(to + i),
                         _mm256_cvtps_ph(_mm256_add_ps(x, y), _MM_FROUND_TO_NEAREST_INT));
    }
    return i;
}

#define VECTORS(name, target)                                                                                \
    target static void range_##name(RANGE)                                                                   \
    {                                                                                                        \
        int64_t done = 0;                                                                                    \
        if (kind == SPAR_SUM_F16 && count == 2)                                                              \
            done = sum_two_f16c(to, parts[0] + low, parts[1] + low, high - low);                             \
        sum_range(kind, to + done, parts, count, low + done, high, load_f16c, store_f16c);                   \
    }

VECTORS(avx2, AVX2)
VECTORS(avx512, AVX512)
#endif

/* By the width of vectors. */
static void (*const summers[])(RANGE) = {
    range_plain,
#ifdef __x86_64__
    range_avx2,
    range_avx512,
#endif
};

typedef struct {
    spar_sum_kind kind;
    char *to;
    const char *const *parts;
    int count;
    int64_t bytes;
    int streams; /* whether the sums have non-temporal stores */
} sum;

/* The sums lie in the L1 cache until they are stored: with ordinary stores each line of `to` would be read
 * before. */
static void sum_streaming(const sum *s, void (*range)(RANGE), int64_t low, int64_t high)
{
    _Alignas(SPAR_CACHE_LINE) char some[4096];
    while (low < high) {
        int64_t n = high - low < (int64_t)sizeof some ? high - low : (int64_t)sizeof some;
        range(s->kind, some, s->parts, s->count, low, low + n);
        spar_nontemporal_copy(s->to + low, some, n);
        low += n;
    }
    spar_nontemporal_fence();
}

/* Sums one of `shares` shares; each but the last begins and ends at a multiple of 64 bytes. */
static void sum_share(void *context, int share, int shares)
{
    const sum *s = context;
    const int64_t size = s->bytes / shares & ~(int64_t)63, low = size * share;
    const int64_t high = share + 1 < shares ? low + size : s->bytes;
    void (*const range)(RANGE) = summers[widest_vectors()];
    if (s->streams)
        sum_streaming(s, range, low, high);
    else
        range(s->kind, s->to + low, s->parts, s->count, low, high);
}

void spar_sum(spar_sum_kind kind, char *to, const char *const *parts, int count, int64_t bytes)
{
    sum all = {kind, to, parts, count, bytes, bytes >= spar_nontemporal_min()};
    int threads = bytes > INT64_MAX / count ? 1 : spar_threads_share(bytes * count);
    spar_threads_run(sum_share, &all, threads);
}
