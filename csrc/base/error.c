/* SPDX-License-Identifier: Apache-2.0 */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[SPAR_ERROR_TEXT];
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

void spar_failure_keep(spar_failure *failure, spar_status status)
{
    failure->status = status;
    failure->ranks = status == SPAR_OK ? (spar_ranks){0} : last_ranks;
    snprintf(failure->text, sizeof failure->text, "%s", status == SPAR_OK ? "" : last_error);
}

spar_status spar_failure_raise(const spar_failure *failure)
{
    if (failure->status == SPAR_OK)
        return SPAR_OK;
    return spar_fail_ranks(failure->status, &failure->ranks, "%s", failure->text);
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
