#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[1536];
static _Thread_local spar_ranks last_ranks;

/* An argument may be the last error itself. */
static spar_status fail(spar_status status, spar_ranks ranks, const char *format, va_list args)
{
    char text[sizeof last_error];
    vsnprintf(text, sizeof text, format, args);
    memcpy(last_error, text, sizeof text);
    last_ranks = ranks;
    return status;
}

spar_status spar_fail(spar_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fail(status, (spar_ranks){0}, format, args);
    va_end(args);
    return status;
}

spar_status spar_fail_rank(spar_status status, int rank, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fail(status, (spar_ranks){1, {rank}}, format, args);
    va_end(args);
    return status;
}

spar_status spar_fail_ranks(spar_status status, const spar_ranks *ranks, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fail(status, *ranks, format, args);
    va_end(args);
    return status;
}

void spar_ranks_add(spar_ranks *ranks, int rank)
{
    if (ranks->count < (int)(sizeof ranks->rank / sizeof *ranks->rank))
        ranks->rank[ranks->count++] = rank;
}

const char *spar_last_error(void)
{
    return last_error;
}

const spar_ranks *spar_last_error_ranks(void)
{
    return &last_ranks;
}
