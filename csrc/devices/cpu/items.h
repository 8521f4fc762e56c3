/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of small items, many in one store. Each returns 0, and copies nothing, where that gains nothing.
 * Those with non-temporal stores must be followed by spar_nontemporal_fence. */
#ifndef SPAR_ITEMS_H
#define SPAR_ITEMS_H

#include <stdint.h>

/* Writes the item at `s` n times, contiguously. */
int spar_repeat_item(char *d, const char *s, int64_t n, int64_t item, int nontemporal);

/* Transposes: item (row, column) at s + row * item + column * ss goes to d + row * ds + column * item. */
int spar_transpose_items(char *d, const char *s, int64_t rows, int64_t columns, int64_t ds, int64_t ss,
                         int64_t item, int nontemporal);

#endif
