/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cpu/processor.h"

#ifdef __x86_64__

#include <cpuid.h>
#include <stdint.h>

enum { KNOWN = 1 << 30 };

/* The registers that the system saves: it must save those of an instruction set. */
static uint32_t saved_registers(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int find_sets(void)
{
    const uint32_t osxsave = 1u << 27, f16c = 1u << 29, ymm = 0x6, zmm = 0xe6;
    const uint32_t avx2 = 1u << 5, f = 1u << 16, all = f | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    uint32_t a, b, c, d, features;
    int sets = KNOWN;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & osxsave))
        return sets;
    features = c;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return sets;
    uint32_t saved = saved_registers();
    if ((saved & ymm) == ymm && features & f16c && b & avx2)
        sets |= SPAR_AVX2;
    if ((saved & zmm) == zmm && b & f)
        sets |= SPAR_AVX512F | ((b & all) == all ? SPAR_AVX512 : 0);
    return sets;
}

int spar_processor_has(int sets)
{
    static int cached; /* racing threads find the same */
    int available = __atomic_load_n(&cached, __ATOMIC_RELAXED);
    if (!available) {
        available = find_sets();
        __atomic_store_n(&cached, available, __ATOMIC_RELAXED);
    }
    return (available & sets) == sets;
}

#else

int spar_processor_has(int sets)
{
    return sets == 0;
}

#endif
