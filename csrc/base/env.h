/* SPDX-License-Identifier: Apache-2.0 */
/* Parses the environment variables of env.def; Python receives numbers, not text. */
#ifndef SPAR_ENV_H
#define SPAR_ENV_H

#include "base/error.h"

#include <stdint.h>

/* The longest timeout: a year. Deadlines in nanoseconds stay far from overflow. */
#define SPAR_LONGEST_S INT64_C(31536000)
/* The largest count of any variable. */
#define SPAR_MOST (INT64_C(1) << 62)

typedef struct {
    const char *field, *variable, *kind;
    int64_t least, most; /* the bounds of a count; seconds have `most` alone, above 0 */
    const char *fallback, *help;
} spar_env_row;

/* A variable's value, or its default. UNSET: both are empty; `text` is "" and the numbers are 0. */
typedef struct {
    enum { SPAR_ENV_UNSET, SPAR_ENV_TEXT, SPAR_ENV_SECONDS, SPAR_ENV_COUNT } holds;
    const char *text; /* set for every kind of value */
    double seconds;
    int64_t count;
} spar_env_value;

/* Terminated by a row of NULLs. */
extern const spar_env_row spar_env_rows[];

/* Reads the environment for what follows. Python calls setenv with its lock held, and that frees what getenv
 * of another thread walks. So the extension calls this with the lock held, and the core reads what was kept,
 * for example in a set-up without the lock. Where this was never called, the core calls getenv. */
void spar_env_read(void);

/* The text of a variable of env.def, or of another one that env.c lists; NULL: not set. Never freed. */
const char *spar_env_text(const char *variable);

/* Parses one variable. SPAR_INVALID: the message names the variable, its value and what is expected. */
spar_status spar_env_get(const spar_env_row *row, spar_env_value *value);

/* The same by field name. "local_ranks" is the launcher's LOCAL_WORLD_SIZE, which has no row. Returns
 * SPAR_INTERNAL for an unknown field. */
spar_status spar_env_field(const char *field, spar_env_value *value);

/* Parses every row and LOCAL_WORLD_SIZE; returns the first failure. */
spar_status spar_env_check(void);

#endif
