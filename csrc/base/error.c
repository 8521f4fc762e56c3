/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[1536];
static _Thread_local spar_ranks last_ranks;

spar_status spar_fail_ranks(spar_status status, const spar_ranks *ranks, const char *format, ...)
{
    char text[sizeof last_error]; /* an argument may be the last error itself */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(last_error, text, sizeof text);
    last_ranks = ranks ? *ranks : (spar_ranks){0};
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
