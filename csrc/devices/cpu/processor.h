/* SPDX-License-Identifier: Apache-2.0 */
/* The instruction sets that the processor has and the system enables. Compilers have a test of their own,
 * __builtin_cpu_supports, but with zig's runtime library it is always false. */
#ifndef SPAR_PROCESSOR_H
#define SPAR_PROCESSOR_H

enum {
    SPAR_AVX2 = 1, /* and F16C */
    SPAR_AVX512F = 2,
    SPAR_AVX512 = 4, /* F, BW, DQ and VL */
};

/* Whether it has all of these; false on other architectures than x86-64. */
int spar_processor_has(int sets);

#endif
