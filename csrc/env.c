#include "env.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TEXT "text"
#define SECONDS "seconds"
#define COUNT "count"
#define ONE_OF(words) words

const spar_env_row spar_env_rows[] = {
#define SPAR_ENV(field, variable, kind, fallback, help) {#field, variable, kind, fallback, help},
#include "env.def"
#undef SPAR_ENV
    {NULL, NULL, NULL, NULL, NULL},
};

static int is_word_of(const char *words, const char *value)
{
    size_t length = strlen(value);
    if (strchr(value, '|'))
        return 0;
    for (const char *word = words; word; word = strchr(word, '|')) {
        word += *word == '|';
        if (strncmp(word, value, length) == 0 && (word[length] == '|' || word[length] == 0))
            return 1;
    }
    return 0;
}

spar_status spar_env_get(const spar_env_row *row, const char **value)
{
    char *end;
    *value = getenv(row->variable);
    if (!*value || !**value)
        *value = row->fallback;
    if (strcmp(row->kind, TEXT) == 0 || !**value)
        return SPAR_OK;
    if (strcmp(row->kind, SECONDS) == 0) {
        double seconds = strtod(*value, &end);
        if (*end == 0 && isfinite(seconds) && seconds > 0)
            return SPAR_OK;
        return spar_fail(SPAR_INVALID, "%s is '%s'; expected a number of seconds above 0",
                         row->variable, *value);
    }
    if (strcmp(row->kind, COUNT) == 0) {
        errno = 0;
        long long count = strtoll(*value, &end, 10);
        if (*end == 0 && errno == 0 && count >= 0)
            return SPAR_OK;
        return spar_fail(SPAR_INVALID, "%s is '%s'; expected a whole number of at least 0",
                         row->variable, *value);
    }
    if (is_word_of(row->kind, *value))
        return SPAR_OK;
    return spar_fail(SPAR_INVALID, "%s is '%s'; known: %s", row->variable, *value, row->kind);
}

spar_status spar_env_field(const char *field, const char **value)
{
    for (const spar_env_row *row = spar_env_rows; row->field; row++)
        if (strcmp(row->field, field) == 0)
            return spar_env_get(row, value);
    return spar_fail(SPAR_INTERNAL, "there is no environment variable for '%s'", field);
}
