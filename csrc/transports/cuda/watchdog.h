/* SPDX-License-Identifier: Apache-2.0 */
/* Watches calls that run on GPUs, without blocking their callers.
 *
 * A call on a GPU returns before its bytes have moved. One thread per process polls every 100 ms while there
 * are groups: the communicators' asynchronous errors, which calls have ended, the peers, and the deadlines. A
 * failure breaks the watchdog for good: an own communicator is aborted, so that its kernels end and the
 * stream continues, and the next call raises. Graph replays are not watched.
 *
 * The streams, or their kernels, write the numbers of calls that have ended to page-locked memory. So the
 * thread asks no function of the driver: such a function may wait for a launch that waits for room in a
 * queue, which only the abort makes. */
#ifndef SPAR_WATCHDOG_H
#define SPAR_WATCHDOG_H

#include "control/ring.h"

typedef struct spar_watchdog spar_watchdog;

/* What a broken watchdog writes to the word that ends waits. */
static const uint32_t SPAR_STOPPED = UINT32_MAX;

/* What a kernel wrote to that word, as an error. 0 and SPAR_STOPPED: none. */
spar_status spar_watchdog_stopped(uint32_t stop);

/* What is watched, and freed when the watchdog has closed. */
typedef struct {
    int ordinal;     /* device */
    spar_ring *ring; /* NULL: the ranks are not all on one host */
    uint32_t *stop;  /* atomic; ends the waits of a push, or one has set it (rounds.cu); NULL: none */
    void *comm;      /* a communicator, aborted when the watchdog breaks or closes; NULL: none, or torch's */
    spar_status (*check)(void *comm); /* for an error that it reports after a call has returned */
    void (*abort)(void *comm);        /* ends its kernels, and frees it */
    void (*revoke)(void *comm);       /* ends its kernels alone; NULL: its library cannot */
    void *(*release)(void *context);  /* frees what the calls use, when all have ended; on its own thread */
    void *context;
} spar_watchdog_target;

/* On failure nothing is kept. */
spar_status spar_watchdog_open(const spar_watchdog_target *what, spar_watchdog **watchdog);

/* Fails if the watchdog is broken: the first time with what broke it, then with SPAR_BROKEN. */
spar_status spar_watchdog_check(spar_watchdog *watchdog);

/* Begins call n, unless the watchdog is broken; calls begin one after another. A communicator with captured
 * calls is not aborted when the watchdog closes. Here and below the device is entered. */
spar_status spar_watchdog_begin(spar_watchdog *watchdog, uint64_t n, const spar_deadline *deadline,
                                int captured);

/* Where a kernel of the begun call may write the call's number, in its 32 low bits, when the call has ended;
 * NULL: it is captured. */
uint32_t *spar_watchdog_mark(const spar_watchdog *watchdog);

/* Ends the call, which is in `stream`, whole or in part: it is watched from now on, unless it is captured.
 * is_marked: a kernel marks its end; else the stream does. */
spar_status spar_watchdog_end(spar_watchdog *watchdog, void *stream, int is_marked);

/* Breaks the watchdog with the last error, after a call that failed. The first reason stays. */
void spar_watchdog_break(spar_watchdog *watchdog, spar_status status);

/* What broke it, or NULL; valid as long as the watchdog. Takes no lock: a call checks it before each of its
 * steps. */
const char *spar_watchdog_broken(spar_watchdog *watchdog);

/* Makes `stream` wait for the newest watched call, unless this one, which has begun, is captured: so they end
 * in order. */
spar_status spar_watchdog_order(spar_watchdog *watchdog, void *stream);

/* Returns when all calls have ended, or with what broke the watchdog. */
spar_status spar_watchdog_wait(spar_watchdog *watchdog, const spar_deadline *deadline);

/* No call follows. Does not wait: release is called later. */
void spar_watchdog_close(spar_watchdog *watchdog);

#endif
