/* SPDX-License-Identifier: Apache-2.0 */
#include "base/util.h"

#include "base/deadline.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

spar_status spar_reserve(void **array, int64_t *capacity, int64_t needed, size_t item, const char *what)
{
    if (needed <= *capacity)
        return SPAR_OK;
    int64_t larger = needed < 16 ? 16 : 2 * needed;
    void *moved = realloc(*array, (size_t)larger * item);
    if (!moved)
        return spar_fail(SPAR_NO_MEMORY, "no memory for %lld %s", (long long)needed, what);
    *array = moved;
    *capacity = larger;
    return SPAR_OK;
}

int spar_append(char *text, size_t size, const char *format, ...)
{
    size_t used = strnlen(text, size);
    va_list args;
    if (used + 1 >= size)
        return 0;
    va_start(args, format);
    vsnprintf(text + used, size - used, format, args);
    va_end(args);
    return 1;
}

int spar_lists(const char *words, char separator, const char *word)
{
    size_t length = strlen(word);
    if (strchr(word, separator))
        return 0;
    for (; words; words = strchr(words, separator)) {
        words += *words == separator;
        if (strncmp(words, word, length) == 0 && (words[length] == separator || words[length] == 0))
            return 1;
    }
    return 0;
}

#ifdef __APPLE__ /* no condition variable has a clock, but one can wait for a duration */
void spar_cond_init(pthread_cond_t *cond)
{
    pthread_cond_init(cond, NULL);
}

int spar_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t ns)
{
    const struct timespec time = {ns / 1000000000, ns % 1000000000};
    return pthread_cond_timedwait_relative_np(cond, lock, &time);
}
#else
void spar_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

int spar_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t ns)
{
    int64_t until = spar_now_ns() + ns;
    const struct timespec time = {until / 1000000000, until % 1000000000};
    return pthread_cond_timedwait(cond, lock, &time);
}
#endif

int spar_thread_start(void *(*work)(void *context), void *context)
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, work, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error)
        pthread_detach(thread);
    return error;
}
