/* The kernels of kernels.cu: what C and they share, their names, and their source as text for NVRTC. */
#ifndef SPAR_KERNELS_H
#define SPAR_KERNELS_H

#define SPAR_SHARED(...) __VA_ARGS__
#define SPAR_PTX(...)
#define SPAR_DEVICE(...)
#include "devices/cuda/kernels.cu"
#undef SPAR_SHARED
#undef SPAR_PTX
#undef SPAR_DEVICE

/* X(width, factor): copy_WIDTH_FACTOR moves WIDTH bytes at a time. Bytes may lie anywhere; what a factor is applied
 * to lies at multiples of its size, as torch's own kernels want it. */
/* clang-format off */
#define SPAR_KERNELS(X)                                                                            \
    X(16, as_is) X(8, as_is) X(4, as_is) X(2, as_is) X(1, as_is)                                   \
    X(16, f16) X(4, f16) X(2, f16)                                                                 \
    X(16, bf16) X(4, bf16) X(2, bf16)                                                              \
    X(16, f32) X(4, f32)                                                                           \
    X(16, f64) X(8, f64)                                                                           \
    X(16, c64) X(8, c64)                                                                           \
    X(16, c128)
/* clang-format on */

typedef struct {
    const char *name, *factor;
    int width; /* of one factor, the widest comes first */
} spar_kernel_row;

/* In the order of SPAR_KERNELS. */
enum { SPAR_KERNEL_COUNT = 18 };
extern const spar_kernel_row spar_kernel_rows[SPAR_KERNEL_COUNT];
extern const char spar_kernel_source[];

#endif
