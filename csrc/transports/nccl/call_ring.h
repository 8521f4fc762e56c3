/* Compares calls between the ranks of one host, without waiting, if another transport, such as NCCL, moves
 * their bytes.
 *
 * Each rank records its newest 1,024 calls in a ring in shared memory, before it makes them. A later rank
 * compares its call with the recorded ones. Peers detect mismatches, aborts and deaths at their next call, or
 * through their watchdog. An overwritten entry is not compared; graph replays are not recorded. */
#ifndef SPAR_CALL_RING_H
#define SPAR_CALL_RING_H

#include "transports/transport.h"

typedef struct spar_call_ring spar_call_ring;

/* The two stages of a transport's set-up; *offset goes into the setup result. After a failed second stage,
 * ranks that connected to this one may continue. */
spar_status spar_call_ring_open(const spar_comm *comm, const spar_peer_info *info, spar_call_ring **ring,
                                int64_t *offset);
spar_status spar_call_ring_connect(spar_call_ring *ring, const spar_comm *comm,
                                   const spar_setup_result *results, const spar_deadline *deadline);

/* This rank makes call n, counted from 1, or cannot (call->failed, call->why). SPAR_MISMATCH where another
 * rank's call n is a different one, or could not be made; else the status of whoever gave up, or went away
 * before n. One rank's failure is a difference, all ranks' is none. `compare` 0: calls are not looked at. Any
 * thread, one at a time. */
spar_status spar_call_ring_begin(spar_call_ring *ring, uint64_t n, const spar_call *call, int compare);

/* What `rank` holds of the gathered dim in this rank's newest call; 0 if its call was not recorded. */
int spar_call_ring_gathered(const spar_call_ring *ring, int rank, spar_gathered *gathered);

/* For the watchdog, on any thread, one at a time: */

/* Publishes that this rank's calls up to n have ended. */
void spar_call_ring_complete(spar_call_ring *ring, uint64_t n);

/* Polls whether peers can still complete call n, which this rank is in. The death of a peer that had made the
 * call is reported after a second, since its bytes may still arrive. */
spar_status spar_call_ring_poll(spar_call_ring *ring, uint64_t n);

/* Lists the ranks that have not made call n: "rank 2 (process 71), ..."; empty: all have. */
void spar_call_ring_absent(const spar_call_ring *ring, uint64_t n, spar_ranks *ranks, char *text,
                           size_t size);

/* Aborts this rank for good; keeps the first reason. */
void spar_call_ring_abort(spar_call_ring *ring, spar_status status, const spar_ranks *ranks,
                          const char *reason);

/* The last call of a rank's process, on any group. */
spar_last_call spar_call_ring_last_call(const spar_call_ring *ring, int rank);

/* NULL: does nothing. */
void spar_call_ring_close(spar_call_ring *ring);

#endif
