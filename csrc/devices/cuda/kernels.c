#include "devices/cuda/kernels.h"

#define ROW(width, factor) {"copy_" #width "_" #factor, #factor, width},
#define KERNEL(width, factor)                                                                                \
    "extern \"C\" __global__ void __launch_bounds__(SPAR_KERNEL_THREADS, 4) copy_" #width "_" #factor        \
    "(const __grid_constant__ spar_kernel_copy c)\n{\n    copy<" #width ", " #factor ">(c);\n}\n"

const spar_kernel_row spar_kernel_rows[] = {SPAR_KERNELS(ROW)};

const char spar_kernel_source[] =
#define SPAR_SHARED(...) #__VA_ARGS__ "\n"
#define SPAR_PTX(...) #__VA_ARGS__ "\n"
#define SPAR_DEVICE(...) #__VA_ARGS__ "\n"
#include "devices/cuda/kernels.cu"
    SPAR_KERNELS(KERNEL);
