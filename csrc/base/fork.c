/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fork.h"

#include <sys/mman.h>
#include <unistd.h>

static uint32_t newest = 1;         /* the newest of this process or its parent */
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

void spar_generation_begin(void)
{
    __atomic_store_n(current, ++newest, __ATOMIC_RELAXED); /* an emulator may not clear the page */
}

/* Runs when the library is loaded, before any thread asks. */
__attribute__((constructor)) static void place_generation(void)
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
