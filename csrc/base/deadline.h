/* SPDX-License-Identifier: Apache-2.0 */
/* Deadlines of waits for other ranks, and their cancellation. */
#ifndef SPAR_DEADLINE_H
#define SPAR_DEADLINE_H

#include "base/error.h"

#include <stdint.h>
#include <time.h>

/* Why a wait ends early. */
enum spar_stop { SPAR_CONTINUE, SPAR_STOP_SIGNAL, SPAR_STOP_CLOSED };

typedef struct {
    int64_t at_ns; /* CLOCK_MONOTONIC; 0: none */
    /* Polled about every 50 ms on the waiting thread; returns a spar_stop, and other than SPAR_CONTINUE
     * cancels the wait. NULL: never cancels. */
    int (*interrupted)(void *context);
    void *context;
} spar_deadline;

/* Returns SPAR_INTERRUPTED or SPAR_BROKEN if the wait is cancelled. `during` completes the message: "while
 * NCCL was set up". */
static inline spar_status spar_deadline_poll(const spar_deadline *deadline, const char *during)
{
    int stop = deadline->interrupted ? deadline->interrupted(deadline->context) : SPAR_CONTINUE;
    if (stop == SPAR_CONTINUE)
        return SPAR_OK;
    return stop == SPAR_STOP_CLOSED ? spar_fail(SPAR_BROKEN, "the group was closed %s", during)
                                    : spar_fail(SPAR_INTERRUPTED, "interrupted %s", during);
}

/* Sleeps for a moment between two polls, which it counts, and polls the deadline about every 50 ms. */
static inline spar_status spar_deadline_pause(const spar_deadline *deadline, int *pauses, const char *during)
{
    const struct timespec moment = {0, 20000};
    nanosleep(&moment, NULL);
    return ++*pauses % 500 == 0 ? spar_deadline_poll(deadline, during) : SPAR_OK;
}

/* Whether a status ends the set-up on this rank alone, which then does not take part in the next stage. */
static inline int spar_ends_wait(spar_status status)
{
    return status == SPAR_TIMEOUT || status == SPAR_INTERRUPTED || status == SPAR_BROKEN;
}

/* CLOCK_MONOTONIC. */
static inline int64_t spar_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline int spar_deadline_passed(const spar_deadline *deadline)
{
    return deadline->at_ns && spar_now_ns() >= deadline->at_ns;
}

#endif
