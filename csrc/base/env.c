/* SPDX-License-Identifier: Apache-2.0 */
#include "base/env.h"

#include "base/util.h"

#include <locale.h>
#include <stdlib.h>
#include <string.h>
#ifdef __APPLE__
#include <xlocale.h>
#endif

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

static const char *const of_others[] = {"LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "MASTER_ADDR",
                                        "XDG_CACHE_HOME", "HOME"};

enum {
    ROWS = sizeof spar_env_rows / sizeof *spar_env_rows - 1,
    VARIABLES = ROWS + sizeof of_others / sizeof *of_others,
};

static const char *kept[VARIABLES]; /* atomic, as what follows; NULL: not set */
static int is_kept;

static const char *name_of(int variable)
{
    return variable < ROWS ? spar_env_rows[variable].variable : of_others[variable - ROWS];
}

void spar_env_read(void)
{
    for (int i = 0; i < VARIABLES; i++) {
        const char *text = getenv(name_of(i)), *before = kept[i];
        int same = text && before ? strcmp(text, before) == 0 : text == before;
        if (!same) /* a thread may still use the text before */
            __atomic_store_n(&kept[i], text ? strdup(text) : NULL, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&is_kept, 1, __ATOMIC_RELEASE);
}

const char *spar_env_text(const char *variable)
{
    if (!__atomic_load_n(&is_kept, __ATOMIC_ACQUIRE))
        return getenv(variable);
    for (int i = 0; i < VARIABLES; i++)
        if (strcmp(name_of(i), variable) == 0)
            return __atomic_load_n(&kept[i], __ATOMIC_ACQUIRE);
    return NULL;
}

/* 12, 0.5, .5 or 1e3, in any locale: without the blanks, signs, hexadecimal and inf that strtod accepts. */
static int read_decimal(const char *text, double *number)
{
    char *end;
    if (!strchr("0123456789.", *text) || text[strspn(text, "0123456789.eE+-")])
        return 0;
    locale_t locale = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
    if (!locale)
        return 0;
    *number = strtod_l(text, &end, locale);
    freelocale(locale);
    return end != text && *end == 0;
}

spar_status spar_env_get(const spar_env_row *row, spar_env_value *value)
{
    const char *text = spar_env_text(row->variable);
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
        char *end;
        value->count = strtoll(text, &end, 10); /* accepts blanks and signs, too */
        if (*text >= '0' && *text <= '9' && *end == 0 && value->count >= row->least &&
            value->count <= row->most)
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
