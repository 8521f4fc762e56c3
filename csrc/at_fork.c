/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fork.h"

#include <pthread.h>

/* The handlers, in the order in which their locks are taken. */
static void (*const files[])(spar_fork_stage stage) = {
    spar_plan_cache_fork, spar_arena_fork,  spar_peers_fork,    spar_links_fork,
    spar_outputs_fork,    spar_dynlib_fork, spar_watchdog_fork,
};

enum { FILES = sizeof files / sizeof *files };

static void prepare(void)
{
    for (int i = 0; i < FILES; i++)
        files[i](SPAR_FORK_PREPARE);
}

static void in_parent(void)
{
    for (int i = FILES - 1; i >= 0; i--)
        files[i](SPAR_FORK_PARENT);
}

static void in_child(void)
{
    spar_generation_begin();
    for (int i = FILES - 1; i >= 0; i--)
        files[i](SPAR_FORK_CHILD);
}

/* Runs when the library is loaded, before any function can take a lock. */
__attribute__((constructor)) static void register_handlers(void)
{
    pthread_atfork(prepare, in_parent, in_child);
}
