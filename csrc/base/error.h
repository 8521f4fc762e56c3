/* Status codes and the last error's text. Every function that can fail returns a status; the text of the
 * newest failure of this thread is kept here, written by spar_fail alone. */
#ifndef SPAR_ERROR_H
#define SPAR_ERROR_H

typedef enum {
    SPAR_OK = 0,
    SPAR_INVALID,     /* an argument's value; Python: ValueError */
    SPAR_TYPE,        /* an argument's type; Python: TypeError */
    SPAR_NO_MEMORY,   /* Python: spar.OutOfMemoryError */
    SPAR_MISMATCH,    /* the ranks disagree; Python: spar.MismatchError */
    SPAR_TIMEOUT,     /* a time limit; Python: spar.ExchangeTimeoutError */
    SPAR_PEER_LOST,   /* a rank is gone; Python: spar.PeerLostError */
    SPAR_BROKEN,      /* an earlier call broke the group; Python: spar.GroupBrokenError */
    SPAR_INTERRUPTED, /* the caller was asked to stop, as by Ctrl-C; Python's own exception is set */
    SPAR_TRANSPORT,   /* a transport that was asked for cannot serve; Python: spar.TransportError */
    SPAR_INTERNAL,    /* a bug in spar; Python: spar.SparError */
} spar_status;

/* The ranks that caused an error, the first of them where they are many. */
typedef struct {
    int count, rank[64];
} spar_ranks;

/* Keeps the text and returns `status`, so that a failure is one line: return spar_fail(...). */
spar_status spar_fail(spar_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The same for an error that one rank caused, or several. */
spar_status spar_fail_rank(spar_status status, int rank, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
spar_status spar_fail_ranks(spar_status status, const spar_ranks *ranks, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

void spar_ranks_add(spar_ranks *ranks, int rank);

/* The text of this thread's newest failure; valid until its next one. */
const char *spar_last_error(void);

/* The ranks that caused it. */
const spar_ranks *spar_last_error_ranks(void);

#define SPAR_TRY(expression)                                                                       \
    do {                                                                                           \
        spar_status status_ = (expression);                                                        \
        if (status_ != SPAR_OK)                                                                    \
            return status_;                                                                        \
    } while (0)

#define SPAR_TRY_GOTO(status, expression, label)                                                   \
    do {                                                                                           \
        (status) = (expression);                                                                   \
        if ((status) != SPAR_OK)                                                                   \
            goto label;                                                                            \
    } while (0)

#endif
