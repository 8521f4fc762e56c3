/* SPDX-License-Identifier: Apache-2.0 */
#include "base/env.h"

#include "base/util.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TEXT "text", 0, 0
#define SECONDS(most) "seconds", 0, most
#define COUNT(most) "count", 0, most
#define ONE_OF(words) words, 0, 0

const spar_env_row spar_env_rows[] = {
#define SPAR_ENV(field, variable, kind, fallback, help) {#field, variable, kind, fallback, help},
#include "base/env.def"
#undef SPAR_ENV
    {NULL, NULL, NULL, 0, 0, NULL, NULL},
};

/* Set by torchrun: not one of spar's settings, so not in the table. */
static const spar_env_row local_ranks = {"local_ranks",       "LOCAL_WORLD_SIZE", "count", 1, INT32_MAX, "",
                                         "ranks on this host"};

static int is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Parses digits only, saturating at INT64_MAX. Returns their end; `text` if there are none. */
static const char *read_digits(const char *text, int64_t *count)
{
    for (*count = 0; is_digit(*text); text++)
        *count = *count > INT64_MAX / 10 - 1 ? INT64_MAX : *count * 10 + (*text - '0');
    return text;
}

/* 12, 0.5, .5 or 1e3: strtod would follow the locale, and accept blanks, signs, hexadecimal and inf. */
static int read_decimal(const char *text, double *number)
{
    int digits = 0;
    double exponent = 0;
    for (*number = 0; is_digit(*text); text++, digits++)
        *number = *number * 10 + (*text - '0');
    if (*text == '.')
        for (text++; is_digit(*text); text++, digits++, exponent--)
            *number = *number * 10 + (*text - '0');
    if (!digits)
        return 0;
    if (*text == 'e' || *text == 'E') {
        int64_t power;
        int minus = *++text == '-';
        text += minus || *text == '+';
        const char *end = read_digits(text, &power);
        if (end == text)
            return 0;
        text = end;
        exponent += minus ? -(double)power : (double)power;
    }
    *number = exponent < 0 ? *number / pow(10, -exponent) : *number * pow(10, exponent);
    return *text == 0;
}

spar_status spar_env_get(const spar_env_row *row, spar_env_value *value)
{
    const char *text = getenv(row->variable);
    if (!text || !*text)
        text = row->fallback;
    *value = (spar_env_value){.holds = *text ? SPAR_ENV_TEXT : SPAR_ENV_UNSET, .text = text};
    if (strcmp(row->kind, "text") == 0 || !*text)
        return SPAR_OK;
    if (strcmp(row->kind, "seconds") == 0) {
        value->holds = SPAR_ENV_SECONDS;
        if (read_decimal(text, &value->seconds) && value->seconds > 0 && value->seconds <= (double)row->most)
            return SPAR_OK;
        return spar_fail(SPAR_INVALID, "%s is '%.40s'; expected a number of seconds above 0 and at most %lld",
                         row->variable, text, (long long)row->most);
    }
    if (strcmp(row->kind, "count") == 0) {
        value->holds = SPAR_ENV_COUNT;
        const char *end = read_digits(text, &value->count);
        if (end != text && *end == 0 && value->count >= row->least && value->count <= row->most)
            return SPAR_OK;
        return spar_fail(SPAR_INVALID, "%s is '%.40s'; expected an integer from %lld to %lld", row->variable,
                         text, (long long)row->least, (long long)row->most);
    }
    if (spar_lists(row->kind, '|', text))
        return SPAR_OK;
    return spar_fail(SPAR_INVALID, "%s is '%.40s'; known: %s", row->variable, text, row->kind);
}

spar_status spar_env_field(const char *field, spar_env_value *value)
{
    for (const spar_env_row *row = spar_env_rows; row->field; row++)
        if (strcmp(row->field, field) == 0)
            return spar_env_get(row, value);
    if (strcmp(field, local_ranks.field) == 0)
        return spar_env_get(&local_ranks, value);
    return spar_fail(SPAR_INTERNAL, "there is no environment variable for '%s'", field);
}

spar_status spar_env_check(void)
{
    spar_env_value ignored;
    for (const spar_env_row *row = spar_env_rows; row->field; row++)
        SPAR_TRY(spar_env_get(row, &ignored));
    return spar_env_get(&local_ranks, &ignored);
}
