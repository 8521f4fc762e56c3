/* SPDX-License-Identifier: Apache-2.0 */
/* Scaling during a copy, bit-identical to torch for each dtype. */
#ifndef SPAR_SCALE_H
#define SPAR_SCALE_H

#include <stdint.h>

/* The dtypes of scale.def. */
typedef enum {
    SPAR_UNSCALED = 0,
#define SPAR_SCALE_TYPE(NAME, ...) SPAR_##NAME,
#include "devices/scale.def"
#undef SPAR_SCALE_TYPE
    SPAR_SCALE_TYPES, /* their number, with SPAR_UNSCALED */
} spar_dtype;

typedef struct {
    const char *name, *torch_name;
    uint8_t bytes; /* an item's size */
    uint8_t dlpack_code;
} spar_scale_type;

/* The dtypes by code; SPAR_UNSCALED is {"as_is", NULL, 1, 0}. */
extern const spar_scale_type spar_scale_types[SPAR_SCALE_TYPES];

/* Each item becomes x * factor or x / factor. */
typedef struct {
    spar_dtype dtype; /* SPAR_UNSCALED: the bytes are copied as they are */
    int divide;
    double factor;
} spar_scale;

/* Replaces a division by a multiplication if that gives the same bits: x / 2^k is x * 2^-k, several times
 * faster. Call it once for each exchange: copies do not. */
spar_scale spar_scale_simple(const spar_scale *scale);

/* Scales n items with destination stride `ds` and source stride `ss`, in bytes; may be in place. */
void spar_scale_items(const spar_scale *scale, char *to, const char *from, int64_t n, int64_t ds, int64_t ss);

/* Scales contiguous items to each of the targets, with non-temporal stores. */
void spar_scale_nontemporal(const spar_scale *scale, char *const *to, int targets, const char *from,
                            int64_t bytes);

#endif
