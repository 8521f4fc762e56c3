/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a copy or a sum uses ordinary or non-temporal stores, learned from those like it.
 *
 * Ordinary ones take half the time while the output's memory is in a cache that the ranks share: in short
 * calls one after another, say. Otherwise non-temporal ones do, such as behind a kernel that used all of the
 * cache. */
#ifndef SPAR_STORES_H
#define SPAR_STORES_H

#include <stdint.h>

typedef enum { SPAR_ORDINARY, SPAR_NONTEMPORAL_STORES, SPAR_FASTER_STORES } spar_stores_kind;

/* How a copy writes to its targets; or that it is a sum. */
typedef enum { SPAR_ONE_TARGET, SPAR_IN_TURN, SPAR_THE_SAME, SPAR_SUMS, SPAR_WRITES } spar_writes;

typedef struct {
    spar_writes writes;
    int64_t bytes; /* for each target */
    spar_stores_kind kind;
    int turn;         /* of those that try this kind; -1: not measured */
    int64_t began_ns; /* if it is measured */
} spar_stores;

/* Chooses the stores of a copy that begins now. */
spar_stores spar_stores_begin(spar_writes writes, int64_t bytes);

/* Learns from that copy, which ends now, fence included. */
void spar_stores_end(const spar_stores *stores);

/* Makes all copies use this kind, which gain from non-temporal stores on some machine: for tests. */
void spar_stores_use(spar_stores_kind kind);

#endif
