/* Watches calls that run on GPUs, without blocking their callers.
 *
 * A call on a GPU returns before its bytes have moved. One thread per process polls every 100 ms while there are
 * groups: the communicators' asynchronous errors, the events behind the calls, the peers, and the deadlines. A failure breaks
 * the watchdog for good: an own communicator is aborted, so that its kernels end and the stream continues, and the next
 * call raises. Graph replays are not watched. */
#ifndef SPAR_WATCHDOG_H
#define SPAR_WATCHDOG_H

#include "ipc/group.h"
#include "transports/nccl/call_ring.h"
#include "transports/nccl/api.h"

typedef struct spar_watchdog spar_watchdog;

typedef struct {
    struct ncclComm *comm; /* aborted when the watch breaks or ends; NULL: somebody else's, not touched */
    int ordinal;           /* device */
    spar_call_ring *ring;  /* of the ranks of one host; NULL: none */
    /* Frees what the calls use: on the watching thread, when none is under way any more. */
    void (*release)(void *context);
    void *context;
} spar_watchdog_target;

/* On failure nothing is kept. */
spar_status spar_watchdog_open(const spar_watchdog_target *what, spar_watchdog **watchdog);

/* Call n begins: fails where the watch is broken, the first time with what broke it, then SPAR_BROKEN. */
spar_status spar_watchdog_begin(spar_watchdog *watchdog, uint64_t n, const spar_deadline *deadline);

/* The call is in `stream`; watched from now on, unless it is captured. */
spar_status spar_watchdog_end(spar_watchdog *watchdog, void *stream, int captured);

/* The call failed half way, as the last error says: breaks the watch. The first reason stays. */
void spar_watchdog_break(spar_watchdog *watchdog, spar_status status);

/* What broke it, or NULL; valid as long as the watch. */
const char *spar_watchdog_broken(spar_watchdog *watchdog);

/* Makes `stream` wait for the newest call that is watched. */
spar_status spar_watchdog_order(spar_watchdog *watchdog, void *stream);

/* Returns when all calls are over, or with what broke the watch. */
spar_status spar_watchdog_wait(spar_watchdog *watchdog, const spar_deadline *deadline);

/* Nobody calls any more. Does not wait: release comes later. */
void spar_watchdog_close(spar_watchdog *watchdog);

#endif
