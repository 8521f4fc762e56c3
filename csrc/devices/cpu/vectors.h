/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels of several instruction sets share: their targets, and conversions of 16-bit floats. */
#ifndef SPAR_VECTORS_H
#define SPAR_VECTORS_H

#include "devices/cpu/processor.h"

#include <stdint.h>
#include <string.h>

/* Inlined into one function for each instruction set, and compiled for it there. */
#define INLINE static inline __attribute__((always_inline))

#ifdef __x86_64__
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX512 __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))

#endif

/* The widest vectors that the processor has: 2: AVX512, 1: AVX2, 0: neither. */
static inline int widest_vectors(void)
{
    static int found; /* one more; racing threads find the same */
    int width = __atomic_load_n(&found, __ATOMIC_RELAXED);
    if (!width) {
        width = 1 + spar_processor_has(SPAR_AVX2) + spar_processor_has(SPAR_AVX2 | SPAR_AVX512);
        __atomic_store_n(&found, width, __ATOMIC_RELAXED);
    }
    return width - 1;
}

INLINE float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The upper half is the rounded result: to the nearest, ties to even. NaN is found by a comparison that
 * cannot trap: compilers make no vectors of one that may. */
INLINE uint32_t round_bf16(float value)
{
    uint32_t bits = to_bits(value);
    return __builtin_isunordered(value, value) ? 0x7fc00000 : bits + 0x7fff + (bits >> 16 & 1);
}

INLINE float load_bf16(uint16_t half)
{
    return from_bits((uint32_t)half << 16);
}

INLINE uint16_t store_bf16(float value)
{
    return (uint16_t)(round_bf16(value) >> 16);
}

INLINE float load_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) /* infinity and NaN: the exponent of both is all ones */
        return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400)
        return from_bits(sign | ((rest << 13) + 0x38000000)); /* the exponent's bias: 127 - 15 */
    float tiny = (float)rest * 0x1p-24f;                      /* subnormal, exact in float */
    return from_bits(sign | to_bits(tiny));
}

INLINE uint16_t store_f16(float value)
{
    uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x47800000) /* 2^16 and more */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) { /* below 2^-14: adding 0.5 leaves the subnormal's bits, rounded, at the end */
        uint32_t sum = to_bits(from_bits(rest) + 0.5f);
        return (uint16_t)(sign | (sum - 0x3f000000));
    }
    rest += 0xfff + (rest >> 13 & 1); /* to the nearest, ties to even; may carry into infinity */
    return (uint16_t)(sign | ((rest - 0x38000000) >> 13));
}

#endif
