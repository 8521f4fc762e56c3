/* SPDX-License-Identifier: Apache-2.0 */
/* The copy kernels as host code: the CUDA names that they use, and a function that runs one CTA. */
#include <cmath>
#include <cstdint>
#include <cstring>
#include <sched.h>
#include <time.h>

#include "devices/cuda/kernels.h"
#include "memory.h"

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
    return sign |
           (unsigned short)(((exponent + 14) << 10) + (int)std::nearbyint(std::ldexp(size, 10 - exponent)));
}

template <class WORD> static WORD *reach(WORD *address)
{
    return (WORD *)reached(address);
}

/* A thread that loads from one address again waits for a peer: it leaves the core, first for a moment. */
static unsigned load_relaxed(const unsigned *from)
{
    static thread_local const unsigned *last;
    static thread_local unsigned by, polls;
    polls = from == last && threadIdx.x == by ? polls + 1 : 0;
    last = from;
    by = threadIdx.x;
    const timespec moment = {0, polls < 40 ? 20000l << polls / 8 : 1000000l};
    if (polls > 4)
        nanosleep(&moment, nullptr);
    else if (polls > 0)
        sched_yield();
    return __atomic_load_n((unsigned *)reached(from), __ATOMIC_RELAXED);
}

static unsigned load_acquire(const unsigned *from)
{
    return __atomic_load_n((unsigned *)reached(from), __ATOMIC_ACQUIRE);
}

static void pause()
{
}

static void store_release(unsigned *to, unsigned value)
{
    __atomic_store_n((unsigned *)reached(to), value, __ATOMIC_RELEASE);
}

static unsigned count_to(unsigned *counter, unsigned last)
{
    unsigned before = __atomic_load_n(counter, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(counter, &before, before >= last ? 0 : before + 1, true,
                                        __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        ;
    return before;
}

static unsigned long long now_ns()
{
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

#define SPAR_SHARED(...)
#define SPAR_PTX(...)
#define SPAR_DEVICE(...) __VA_ARGS__
#include "devices/cuda/kernels.cu"
#include "devices/cuda/rounds.cu"

#define KERNEL(width, factor) copy<width, factor>,

/* One after another, in an order that depends on `from`; returns whether one of them returned another value
 * than 0. The calls stand between barriers. */
template <class PHASE> static bool all_threads(unsigned from, PHASE phase)
{
    bool any = false;
    for (unsigned i = 0; i < SPAR_KERNEL_THREADS; i++) {
        threadIdx.x = (i * 77 + from) % SPAR_KERNEL_THREADS;
        any |= phase() != 0;
    }
    return any;
}

/* Up to the copies of what a round sends, and behind them: whether no wait has ended early. */
static bool begin_round(const spar_kernel_copy *c, unsigned from)
{
    if (all_threads(from, [&] { return has_failed(*c); }))
        return false;
    if (!(c->mode & SPAR_KERNEL_OFFERS))
        return true;
    all_threads(from, [&] { return offer(*c), 0; });
    if (all_threads(from, [&] { return await_offers(*c); }))
        return false;
    all_threads(from, [&] { return end_offers(*c), 0; });
    return true;
}

static bool pass_on(const spar_kernel_copy *c, unsigned from)
{
    if (c->mode & SPAR_KERNEL_SIGNALS && all_threads(from, [&] { return is_last(*c); }))
        all_threads(from, [&] { return signal(*c), 0; });
    if (!(c->mode & SPAR_KERNEL_WAITS))
        return true;
    if (all_threads(from, [&] { return await_signals(*c); }))
        return false;
    all_threads(from, [&] { return end_rounds(*c), 0; });
    return true;
}

/* Runs one of `ctas` CTAs of kernel `which` (a row of SPAR_KERNELS). */
extern "C" void standin_kernel(int which, const spar_kernel_copy *c, unsigned cta, unsigned ctas,
                               unsigned from)
{
    static void (*const kernels[])(const spar_kernel_copy &, unsigned, unsigned) = {SPAR_KERNELS(KERNEL)};
    blockIdx.x = cta;
    gridDim.x = ctas;
    bool goes_on = !c->sync || begin_round(c, from);
    if (goes_on)
        all_threads(from, [&] { return kernels[which](*c, 0, c->sent), 0; });
    goes_on = goes_on && (!c->sync || pass_on(c, from));
    if (goes_on)
        all_threads(from, [&] { return kernels[which](*c, c->sent, c->tiles), 0; });
    if (c->mark && all_threads(from, [&] { return is_last(*c); }))
        all_threads(from, [&] { return mark_end(*c), 0; });
}
