#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[1536];

spar_status spar_fail(spar_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *spar_last_error(void)
{
    return last_error;
}
