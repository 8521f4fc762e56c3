/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of several buffers, item by item, in their order, bit-identical to torch's for each dtype. */
#ifndef SPAR_SUM_H
#define SPAR_SUM_H

#include <stdint.h>

typedef enum {
    SPAR_NO_SUM,
    SPAR_SUM_BOOL,
    SPAR_SUM_I8,
    SPAR_SUM_I16,
    SPAR_SUM_I32,
    SPAR_SUM_I64,
    SPAR_SUM_F16,
    SPAR_SUM_BF16,
    SPAR_SUM_F32,
    SPAR_SUM_F64,
    SPAR_SUM_C32,
    SPAR_SUM_C64,
    SPAR_SUM_C128,
    SPAR_SUM_KINDS, /* their number, with SPAR_NO_SUM */
} spar_sum_kind;

/* How a dtype that torch adds is summed, by torch's name of it; the last row's is NULL. */
typedef struct {
    const char *torch_name;
    spar_sum_kind kind;
} spar_sum_type;

extern const spar_sum_type spar_sum_types[];

/* Adds `count` buffers of `bytes` bytes, whole items. 16-bit floats are added in float32, and rounded once.
 * Buffers may have any alignment; `to` is none of them. */
void spar_sum(spar_sum_kind kind, char *to, const char *const *parts, int count, int64_t bytes);

#endif
