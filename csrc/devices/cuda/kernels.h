/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of kernels.cu: structs shared with C, their names, and their source as text for NVRTC. */
#ifndef SPAR_KERNELS_H
#define SPAR_KERNELS_H

/* Builds for benchmarks and tests vary them. */
#ifndef SPAR_KERNEL_THREADS
#define SPAR_KERNEL_THREADS 512 /* per CTA: on an H100, 96 CTAs of 256 copy at 3/4 of its speed */
#endif
#ifndef SPAR_KERNEL_UNITS
#define SPAR_KERNEL_UNITS 4 /* each thread copies so many units, as wide as the kernel, of a tile */
#endif

#define SPAR_SHARED(...) __VA_ARGS__
#define SPAR_PTX(...)
#define SPAR_DEVICE(...)
#include "devices/cuda/kernels.cu"
#undef SPAR_SHARED
#undef SPAR_PTX
#undef SPAR_DEVICE

/* X(width, factor): copy_WIDTH_FACTOR moves WIDTH bytes at a time. Unscaled bytes may have any alignment;
 * scaled items are aligned to their size, as torch's kernels require. */
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
    int width; /* per factor, the widest first */
} spar_kernel_row;

/* The kernels, in the order of SPAR_KERNELS. */
enum { SPAR_KERNEL_COUNT = 18 };
extern const spar_kernel_row spar_kernel_rows[SPAR_KERNEL_COUNT];
extern const char spar_kernel_source[];

/* The base of a part's `to` in a peer's output: bytes from there follow. */
#define SPAR_KERNEL_TO(peer, tensor) ((unsigned long long)(peer) << 58 | (unsigned long long)(tensor) << 54)

/* CTAs of a launch at most; 0: by the device. Benchmarks vary it. */
extern int spar_kernel_ctas;

#endif
