/* What the ranks of one host tell each other of calls whose bytes go another way, as over NCCL, without waiting.
 *
 * Each rank writes its newest 1,024 calls down, before it makes them. Who comes later to a call compares it with
 * what the others wrote; who finds a difference, gives up or dies is seen by the others, at their next call or by
 * who watches over theirs. An entry that was written over is not compared. Replays of graphs are not seen. */
#ifndef SPAR_CALL_RING_H
#define SPAR_CALL_RING_H

#include "transports/transport.h"

typedef struct spar_call_ring spar_call_ring;

/* The two stages of a transport's set-up; *offset goes into the verdict. After a failure of the second the ranks
 * that met this one may go on. */
spar_status spar_call_ring_open(const spar_comm *comm, const spar_peer_info *info,
                                spar_call_ring **ring, int64_t *offset);
spar_status spar_call_ring_connect(spar_call_ring *ring, const spar_comm *comm,
                                   const spar_setup_result *results, const spar_deadline *deadline);

/* This rank makes call n, counted from 1, or cannot (call->failed, call->why). SPAR_MISMATCH where another rank's
 * call n is a different one, or could not be made; else the status of whoever gave up, or went away before n. One
 * rank's failure is a difference, all ranks' is none. `compare` 0: calls are not looked at. Any thread, one at a
 * time. */
spar_status spar_call_ring_begin(spar_call_ring *ring, uint64_t n, const spar_call *call,
                                 int compare);

/* The rest is for who watches, on any thread, one at a time: */

/* This rank's calls up to n are over. */
void spar_call_ring_complete(spar_call_ring *ring, uint64_t n);

/* Call n is under way here: whether the others can still end it. The death of who came to it is told after a
 * second: what it gave may be on its way. */
spar_status spar_call_ring_poll(spar_call_ring *ring, uint64_t n);

/* Those who have not come to call n: "rank 2 (process 71), ..."; empty: all have. */
void spar_call_ring_absent(const spar_call_ring *ring, uint64_t n, spar_ranks *ranks, char *text,
                           size_t size);

/* This rank gives up, for good. The first reason stays. */
void spar_call_ring_abort(spar_call_ring *ring, spar_status status, const spar_ranks *ranks,
                          const char *reason);

/* Which call a rank's process is in, on any group. */
spar_last_call spar_call_ring_last_call(const spar_call_ring *ring, int rank);

/* NULL: does nothing. */
void spar_call_ring_close(spar_call_ring *ring);

#endif
