/* A factor, applied to items on their way: to the bit what torch computes for their dtype. */
#ifndef SPAR_SCALE_H
#define SPAR_SCALE_H

#include <stdint.h>

/* The item types that a factor can be applied to while copying. */
typedef enum {
    SPAR_UNSCALED = 0,
    SPAR_F16,
    SPAR_BF16,
    SPAR_F32,
    SPAR_F64,
    SPAR_C64,
    SPAR_C128,
} spar_dtype;

/* What happens to each item: x * factor, or x / factor. */
typedef struct {
    spar_dtype dtype; /* SPAR_UNSCALED: the bytes are copied as they are */
    int divide;
    double factor;
} spar_scale;

/* Bytes of an item; 1 where the dtype is SPAR_UNSCALED. */
int64_t spar_scale_item(spar_dtype dtype);

/* The same factor, as a product where that gives the same bits: x / 2^k is x * 2^-k, several times faster. */
spar_scale spar_scale_simple(const spar_scale *scale);

/* n items, `ds` and `ss` bytes apart, of a dtype that is scaled; also in place. */
void spar_scale_items(const spar_scale *scale, char *to, const char *from, int64_t n, int64_t ds,
                      int64_t ss);

/* The same for items that lie one behind the other, past the caches, to each of the targets. */
void spar_scale_nontemporal(const spar_scale *scale, char *const *to, int targets, const char *from,
                            int64_t bytes);

#endif
