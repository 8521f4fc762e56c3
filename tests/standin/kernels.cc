/* SPDX-License-Identifier: Apache-2.0 */
/* The copy kernels as host code: the CUDA names that they use, and a function that runs one CTA. */
#include <cmath>
#include <cstdint>
#include <cstring>

#include "devices/cuda/kernels.h"

#define __host__
#define __device__
#define __forceinline__ inline

struct uint2 {
    unsigned x, y;
} __attribute__((aligned(8)));
struct uint4 {
    unsigned x, y, z, w;
} __attribute__((aligned(16)));

static thread_local struct {
    unsigned x;
} threadIdx, blockIdx, gridDim;

static unsigned __umulhi(unsigned a, unsigned b)
{
    return unsigned((uint64_t)a * b >> 32);
}

static unsigned __float_as_uint(float value)
{
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float __uint_as_float(unsigned bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static float from_f16(unsigned short bits)
{
    int exponent = bits >> 10 & 31, rest = bits & 1023;
    float value = exponent == 0    ? std::ldexp(float(rest), -24)
                  : exponent == 31 ? (rest ? NAN : INFINITY)
                                   : std::ldexp(float(rest + 1024), exponent - 25);
    return std::copysign(value, bits >> 15 ? -1.0f : 1.0f);
}

/* Rounds to nearest even, the default rounding mode. */
static unsigned short to_f16(float value)
{
    unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    float size = std::fabs(value);
    if (std::isnan(size))
        return 0x7fff;
    if (size >= 65520)
        return sign | 0x7c00;
    if (size < 0x1p-14f)
        return sign | (unsigned short)std::nearbyint(std::ldexp(size, 24));
    int exponent = std::ilogb(size);
    return sign | (unsigned short)(((exponent + 14) << 10) +
                                   (int)std::nearbyint(std::ldexp(size, 10 - exponent)));
}

#define SPAR_SHARED(...)
#define SPAR_PTX(...)
#define SPAR_DEVICE(...) __VA_ARGS__
#include "devices/cuda/kernels.cu"

#define KERNEL(width, factor) copy<width, factor>,

/* Runs one of `ctas` CTAs of kernel `which` (a row of SPAR_KERNELS): its threads one after another, in an
 * order that depends on `from`. */
extern "C" void standin_kernel(int which, const spar_kernel_copy *c, unsigned cta, unsigned ctas,
                               unsigned from)
{
    static void (*const kernels[])(const spar_kernel_copy &) = {SPAR_KERNELS(KERNEL)};
    blockIdx.x = cta;
    gridDim.x = ctas;
    for (unsigned i = 0; i < SPAR_KERNEL_THREADS; i++) {
        threadIdx.x = (i * 77 + from) % SPAR_KERNEL_THREADS;
        kernels[which](*c);
    }
}
