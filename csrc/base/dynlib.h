/* SPDX-License-Identifier: Apache-2.0 */
/* Third-party libraries, opened at run time by name. The build needs neither them nor their headers. */
#ifndef SPAR_DYNLIB_H
#define SPAR_DYNLIB_H

#include "base/error.h"

#include <pthread.h>

/* Sets the path of a library that Python found, such as "libnvrtc" in a wheel. It is tried before the
 * system's names. Call before the library is first opened; NULL clears the path. */
void spar_dynlib_set_path(const char *library, const char *path);

/* Looks a function up; if it is missing, the error names the library. */
spar_status spar_dynlib_function(void *handle, const char *library, const char *name, void *function);

/* A library that is opened once per process; initialize with SPAR_DYNLIB_ONCE. */
typedef struct spar_dynlib_once {
    const char *library;
    const char *const *names;          /* to open, NULL-terminated */
    spar_status (*find)(void *handle); /* its functions */
    pthread_mutex_t lock;
    int tried, listed;
    struct spar_dynlib_once *next;
    spar_status status;
    char why[256];
} spar_dynlib_once;

#define SPAR_DYNLIB_ONCE(library, names, find)                                                               \
    {(library), (names), (find), PTHREAD_MUTEX_INITIALIZER, 0, 0, NULL, SPAR_OK, ""}

/* Opens the library by the first of its names that can be opened, and looks its functions up; never closes
 * it. The error lists each failure. A first failure is returned again by later calls. */
spar_status spar_dynlib_open_once(spar_dynlib_once *once);

#endif
