/* The environment variables of env.def, as text. */
#ifndef SPAR_ENV_H
#define SPAR_ENV_H

#include "error.h"

typedef struct {
    const char *field, *variable, *kind, *fallback, *help;
} spar_env_row;

/* Ends in a row of NULLs. */
extern const spar_env_row spar_env_rows[];

/* The variable's value, or its default; SPAR_INVALID names the variable, its value and what is known. */
spar_status spar_env_get(const spar_env_row *row, const char **value);

/* The same by field name; an unknown field is SPAR_INTERNAL. */
spar_status spar_env_field(const char *field, const char **value);

#endif
