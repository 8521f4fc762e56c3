/* How long to wait for other ranks, and whether to go on. */
#ifndef SPAR_PATIENCE_H
#define SPAR_PATIENCE_H

#include <stdint.h>
#include <time.h>

typedef struct {
    int64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    /* Asked about every 50 ms, on the waiting thread: other than 0 ends the wait. NULL: never. */
    int (*interrupted)(void *context);
    void *context;
} spar_patience;

/* CLOCK_MONOTONIC. */
static inline int64_t spar_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

#endif
