/* SPDX-License-Identifier: Apache-2.0 */
/* Status codes and the last error. Functions that can fail return a status. The text and the ranks of this
 * thread's newest failure are kept here; only spar_fail_ranks writes them. */
#ifndef SPAR_ERROR_H
#define SPAR_ERROR_H

#include <stddef.h>

typedef enum {
    SPAR_OK = 0,
    SPAR_INVALID,     /* Python: ValueError */
    SPAR_NO_MEMORY,   /* Python: spar.OutOfMemoryError */
    SPAR_MISMATCH,    /* calls differ between ranks; Python: spar.MismatchError */
    SPAR_TIMEOUT,     /* a deadline passed; Python: spar.ExchangeTimeoutError */
    SPAR_PEER_LOST,   /* a rank died; Python: spar.PeerLostError */
    SPAR_BROKEN,      /* an earlier call broke the group; Python: spar.GroupBrokenError */
    SPAR_INTERRUPTED, /* cancelled, as by Ctrl-C; Python's own exception is set */
    SPAR_TRANSPORT,   /* the requested transport cannot serve; Python: spar.TransportError */
    SPAR_INTERNAL,    /* a bug in spar; Python: spar.SparError */
} spar_status;

enum { SPAR_ERROR_TEXT = 1536 }; /* bytes of an error's text */

/* The ranks that caused an error: the first 64. */
typedef struct {
    int count, rank[64];
} spar_ranks;

/* Keeps the text and the ranks that caused the error (NULL: none), and returns `status`, so that a failure is
 * one line: return spar_fail(...). */
spar_status spar_fail_ranks(spar_status status, const spar_ranks *ranks, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same for an error that no rank caused, or one. */
#define spar_fail(status, ...) spar_fail_ranks(status, NULL, __VA_ARGS__)
#define spar_fail_rank(status, which, ...) spar_fail_ranks(status, &(spar_ranks){1, {which}}, __VA_ARGS__)

/* A failure that is raised later, or behind what may fail meanwhile. */
typedef struct {
    spar_status status;
    spar_ranks ranks;
    char text[SPAR_ERROR_TEXT];
} spar_failure;

/* Keeps this thread's newest failure; of SPAR_OK, nothing but the status. */
void spar_failure_keep(spar_failure *failure, spar_status status);

/* Fails with what was kept. */
spar_status spar_failure_raise(const spar_failure *failure);

void spar_ranks_add(spar_ranks *ranks, int rank);

/* The text of this thread's newest failure; valid until its next one. */
const char *spar_last_error(void);

/* The ranks that caused it. */
const spar_ranks *spar_last_error_ranks(void);

#define SPAR_TRY(expression)                                                                                 \
    do {                                                                                                     \
        spar_status status_ = (expression);                                                                  \
        if (status_ != SPAR_OK)                                                                              \
            return status_;                                                                                  \
    } while (0)

#endif
