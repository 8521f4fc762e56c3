/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fork.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

/* The handlers, in the order in which their locks are taken. */
static void (*const files[])(spar_fork_stage stage) = {
    spar_plan_cache_fork, spar_arena_fork,  spar_peers_fork,
    spar_links_fork,      spar_dynlib_fork, spar_watchdog_fork,
};

enum { FILES = sizeof files / sizeof *files };

static uint32_t newest = 1;         /* that this process, or its parent, had */
static uint32_t *current = &newest; /* in a page that the kernel clears in each child, also of a raw clone */

uint32_t spar_generation(void)
{
    uint32_t number = __atomic_load_n(current, __ATOMIC_RELAXED);
    if (number)
        return number;
    __atomic_compare_exchange_n(current, &number, newest + 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    newest = __atomic_load_n(current, __ATOMIC_RELAXED);
    return newest;
}

static void place_generation(void)
{
#ifdef MADV_WIPEONFORK
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return;
    if (madvise(page, size, MADV_WIPEONFORK) != 0) { /* before Linux 4.14 */
        munmap(page, size);
        return;
    }
    current = page;
    *current = newest;
#endif
}

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
    __atomic_store_n(current, ++newest, __ATOMIC_RELAXED); /* an emulator may not clear the page */
    for (int i = FILES - 1; i >= 0; i--)
        files[i](SPAR_FORK_CHILD);
}

/* Runs when the library is loaded, before any function can take a lock. */
__attribute__((constructor)) static void register_handlers(void)
{
    place_generation();
    pthread_atfork(prepare, in_parent, in_child);
}
