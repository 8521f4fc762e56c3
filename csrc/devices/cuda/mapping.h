/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory that other processes can map.
 *
 * A mapping is a range of addresses, reserved once, of which a begin has memory: pieces one behind the other,
 * of this process's device or of another process's, so that it can grow and stay where it is. Physical memory
 * lives until no process maps it. The device is entered in all functions. */
#ifndef SPAR_MAPPING_H
#define SPAR_MAPPING_H

#include "base/error.h"

#include <stdint.h>

enum { SPAR_MAPPING_PIECES = 64 };

typedef struct {
    char *base;
    int64_t reserved, mapped; /* bytes */
    int ordinal, count;
    int64_t pieces[SPAR_MAPPING_PIECES]; /* their bytes */
} spar_mapping;

/* The bytes of which lengths of a device's pieces are multiples. */
spar_status spar_mapping_granularity(int ordinal, int64_t *bytes);

/* Reserves addresses for `bytes` at most; each function below needs that. */
spar_status spar_mapping_reserve(spar_mapping *mapping, int ordinal, int64_t bytes);

/* Adds a piece of new memory; *fd opens it for other processes, and the caller closes it. SPAR_NO_MEMORY if
 * the device has none. */
spar_status spar_mapping_grow(spar_mapping *mapping, int64_t bytes, int *fd);

/* Adds a piece that is another process's, of the same length there. The caller keeps the descriptor. */
spar_status spar_mapping_import(spar_mapping *mapping, int64_t bytes, int fd);

/* Unmaps the newest piece. */
void spar_mapping_shrink(spar_mapping *mapping);

/* Unmaps all pieces, and gives the addresses back. One that was not reserved: does nothing. */
void spar_mapping_free(spar_mapping *mapping);

#endif
