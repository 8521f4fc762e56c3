/* SPDX-License-Identifier: Apache-2.0 */
#include "base/dynlib.h"

#include "base/fork.h"
#include "base/util.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 8 };

static struct {
    pthread_mutex_t lock;
    char *names[MOST], *paths[MOST];
    spar_dynlib_once *tried; /* list of all opened or failed */
} libraries = {.lock = PTHREAD_MUTEX_INITIALIZER};

void spar_dynlib_set_path(const char *library, const char *path)
{
    int i = 0;
    pthread_mutex_lock(&libraries.lock);
    while (i < MOST - 1 && libraries.names[i] && strcmp(libraries.names[i], library) != 0)
        i++;
    if (!libraries.names[i])
        libraries.names[i] = strdup(library);
    char *before = libraries.paths[i];
    libraries.paths[i] = path ? strdup(path) : NULL;
    free(before);
    pthread_mutex_unlock(&libraries.lock);
}

static void *open_from_path(const char *library)
{
    void *handle = NULL;
    pthread_mutex_lock(&libraries.lock);
    for (int i = 0; i < MOST && !handle; i++)
        if (libraries.names[i] && libraries.paths[i] && strcmp(libraries.names[i], library) == 0)
            handle = dlopen(libraries.paths[i], RTLD_NOW | RTLD_LOCAL);
    pthread_mutex_unlock(&libraries.lock);
    return handle;
}

static spar_status open_first(const char *library, const char *const *names, void **handle)
{
    char reasons[256] = "";
    *handle = NULL;
    /* prefer a library that torch, for example, has loaded: it matches the rest of the process */
    for (int i = 0; names[i] && !*handle; i++)
        *handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!*handle)
        *handle = open_from_path(library);
    for (int i = 0; names[i] && !*handle; i++) {
        *handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        const char *why = *handle ? "" : dlerror();
        spar_append(reasons, sizeof reasons, "%s%s", *reasons ? "; " : "", why ? why : "it cannot be opened");
    }
    if (*handle)
        return SPAR_OK;
    return spar_fail(SPAR_TRANSPORT, "no %s: %s", library, reasons);
}

spar_status spar_dynlib_function(void *handle, const char *library, const char *name, void *function)
{
    void *address = dlsym(handle, name);
    if (!address)
        return spar_fail(SPAR_TRANSPORT, "this %s is too old: it has no %s", library, name);
    memcpy(function, &address, sizeof address); /* C has no cast from data to function */
    return SPAR_OK;
}

spar_status spar_dynlib_open_once(spar_dynlib_once *once)
{
    void *handle;
    pthread_mutex_lock(&libraries.lock);
    if (!once->listed) {
        once->listed = 1;
        once->next = libraries.tried;
        libraries.tried = once;
    }
    pthread_mutex_unlock(&libraries.lock);
    pthread_mutex_lock(&once->lock);
    if (!once->tried) {
        once->status = open_first(once->library, once->names, &handle);
        if (once->status == SPAR_OK)
            once->status = once->find(handle);
        if (once->status != SPAR_OK)
            strncpy(once->why, spar_last_error(), sizeof once->why - 1);
        once->tried = 1;
    }
    pthread_mutex_unlock(&once->lock);
    return once->status == SPAR_OK ? SPAR_OK : spar_fail(once->status, "%s", once->why);
}

/* The locks are not taken before a fork: a library may fork while it is being loaded. */
void spar_dynlib_fork(spar_fork_stage stage)
{
    if (stage != SPAR_FORK_CHILD)
        return;
    pthread_mutex_init(&libraries.lock, NULL);
    for (spar_dynlib_once *once = libraries.tried; once; once = once->next)
        pthread_mutex_init(&once->lock, NULL);
}
