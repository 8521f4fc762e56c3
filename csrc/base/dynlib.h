/* Libraries of others that are opened at run time, by name. Nothing of them is needed to build. */
#ifndef SPAR_DYNLIB_H
#define SPAR_DYNLIB_H

#include "base/error.h"

#include <pthread.h>

/* Where Python found a library, as "libnvrtc" in a package of its own: tried before the names that the system
 * knows. Kept until the process ends; NULL forgets it. Only before the library is first opened does it matter. */
void spar_dynlib_set_path(const char *library, const char *path);

/* Opens the first of `names` (ends in NULL) that can be opened; never closed. The error tells each one's. */
spar_status spar_dynlib_open(const char *library, const char *const *names, void **handle);

/* The function of this name; its absence is an error that names the library. */
spar_status spar_dynlib_function(void *handle, const char *library, const char *name,
                                 void *function);

/* A library that is opened once for the process; begins with SPAR_DYNLIB_ONCE. */
typedef struct spar_dynlib_once {
    const char *library;
    const char *const *names;          /* as of spar_dynlib_open */
    spar_status (*find)(void *handle); /* its functions */
    pthread_mutex_t lock;
    int tried, listed;
    struct spar_dynlib_once *next;
    spar_status status;
    char why[256];
} spar_dynlib_once;

#define SPAR_DYNLIB_ONCE(library, names, find)                                                     \
    {(library), (names), (find), PTHREAD_MUTEX_INITIALIZER, 0, 0, NULL, SPAR_OK, ""}

/* Opens it and finds its functions; what failed the first time is told again. */
spar_status spar_dynlib_open_once(spar_dynlib_once *once);

#endif
