/* How long to wait for other ranks, and whether to go on. */
#ifndef SPAR_PATIENCE_H
#define SPAR_PATIENCE_H

#include "base/error.h"

#include <stdint.h>
#include <time.h>

/* Why a wait ends early. */
enum spar_stop { SPAR_GO_ON, SPAR_STOP_SIGNAL, SPAR_STOP_CLOSED };

typedef struct {
    int64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    /* Polled about every 50 ms, on the waiting thread; returns a spar_stop. NULL: never stops. */
    int (*interrupted)(void *context);
    void *context;
} spar_patience;

/* SPAR_INTERRUPTED or SPAR_BROKEN where a wait must end early; `during`: "while NCCL was set up". */
static inline spar_status spar_patience_poll(const spar_patience *patience, const char *during)
{
    int stop = patience->interrupted ? patience->interrupted(patience->context) : SPAR_GO_ON;
    if (stop == SPAR_GO_ON)
        return SPAR_OK;
    return stop == SPAR_STOP_CLOSED ? spar_fail(SPAR_BROKEN, "the group was closed %s", during)
                                    : spar_fail(SPAR_INTERRUPTED, "interrupted %s", during);
}

/* Whether a status ends a stage for this rank alone: it cannot take part in the next one. */
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

#endif
