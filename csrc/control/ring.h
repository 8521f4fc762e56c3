/* SPDX-License-Identifier: Apache-2.0 */
/* The asynchronous mode of the control plane: it compares calls between the ranks of one host without
 * waiting, where another transport, such as NCCL, moves their bytes.
 *
 * Each rank records its newest 1,024 calls in a ring in shared memory, before it makes them. A later rank
 * compares its call with the recorded ones. Peers detect mismatches, aborts and deaths at their next call,
 * or through their watchdog. An overwritten entry is not compared; graph replays are not recorded. */
#ifndef SPAR_RING_H
#define SPAR_RING_H

#include "control/control.h"

typedef struct spar_ring spar_ring;

/* The bytes that a rank's ring needs behind its mailbox. */
int64_t spar_ring_room(void);

/* Opens the ring of a group, which the caller connects before the first call and closes after the ring. */
spar_status spar_ring_open(spar_group *group, spar_ring **ring);

/* Publishes that this rank makes call n, counted from 1, or that it cannot (own->status). The offsets of
 * `own` are not used; describe(call) describes the call for peers.
 *
 * SPAR_MISMATCH if another rank's call n differs or could not be made, unless no rank could make it; else
 * the status of a rank that will not end call n. `compare` 0: does not compare. Any thread, one at a time.
 */
spar_status spar_ring_begin(spar_ring *ring, uint64_t n, const spar_call_header *own, spar_describe describe,
                            const void *call, int compare);

/* For the watchdog, on any thread, one at a time: */

/* Publishes that this rank's calls up to n have ended. */
void spar_ring_complete(spar_ring *ring, uint64_t n);

/* Polls whether peers can still complete call n, which this rank is in. The death of a peer that had made the
 * call is reported after a second, since its bytes may still arrive. */
spar_status spar_ring_poll(spar_ring *ring, uint64_t n);

/* Lists the ranks that have not made call n: "rank 2 (process 71), ..."; empty: all have. */
void spar_ring_absent(const spar_ring *ring, uint64_t n, spar_ranks *ranks, char *text, size_t size);

/* Aborts this rank for good; keeps the first reason. */
void spar_ring_abort(spar_ring *ring, spar_status status, const spar_ranks *ranks, const char *reason);

/* NULL: does nothing. */
void spar_ring_close(spar_ring *ring);

#endif
