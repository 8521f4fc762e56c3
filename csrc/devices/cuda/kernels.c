/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cuda/kernels.h"

_Static_assert(sizeof(spar_kernel_copy) <= 4096, "a kernel's parameters, on every architecture");

#define TEXT(...) #__VA_ARGS__
#define VALUE(number) TEXT(number)
#define ROW(width, factor) {"copy_" #width "_" #factor, #factor, width},
#define KERNEL(width, factor)                                                                                \
    "extern \"C\" __global__ void __launch_bounds__(SPAR_KERNEL_THREADS, 4096 / (SPAR_KERNEL_THREADS * "     \
    "SPAR_KERNEL_UNITS)) copy_" #width "_" #factor                                                           \
    "(const __grid_constant__ spar_kernel_copy c)\n{\n    run<" #width ", " #factor ">(c);\n}\n"

int spar_kernel_ctas;
const spar_kernel_row spar_kernel_rows[] = {SPAR_KERNELS(ROW)};

const char spar_kernel_source[] = "enum { SPAR_KERNEL_THREADS = " VALUE(
    SPAR_KERNEL_THREADS) ", SPAR_KERNEL_UNITS = " VALUE(SPAR_KERNEL_UNITS) " };\n"
#define SPAR_SHARED(...) #__VA_ARGS__ "\n"
#define SPAR_PTX(...) #__VA_ARGS__ "\n"
#define SPAR_DEVICE(...) #__VA_ARGS__ "\n"
#include "devices/cuda/kernels.cu"
#include "devices/cuda/rounds.cu"
    SPAR_KERNELS(KERNEL);
