#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[1536];

spar_status spar_fail(spar_status status, const char *format, ...)
{
    char text[sizeof last_error]; /* an argument may be the last error itself */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(last_error, text, sizeof text);
    return status;
}

const char *spar_last_error(void)
{
    return last_error;
}
