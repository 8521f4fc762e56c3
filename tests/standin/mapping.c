/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's device memory that processes share: a memfd each, mapped into addresses that were reserved.
 *
 * - STANDIN_ASTRAY: imported memory is another process's up to this byte alone: what is written behind it is
 *   lost, as by a GPU that cannot reach its peer. */
#include "mapping.h"

#include "memory.h"
#include "streams.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { INVALID = 1, NO_MEMORY = 2, PAGE = 4096 };

typedef struct {
    int fd, is_imported;
} shared;

int MemGetInfo(size_t *unused, size_t *total)
{
    MAY_FAIL("cuMemGetInfo");
    *unused = *total = (size_t)2 << 30;
    return 0;
}

int MemGetAllocationGranularity(size_t *granularity, const void *properties, int which)
{
    (void)properties;
    (void)which;
    MAY_FAIL("cuMemGetAllocationGranularity");
    *granularity = PAGE;
    return 0;
}

static int make_shared(uint64_t *handle, int fd, int is_imported)
{
    shared *s = fd < 0 ? NULL : malloc(sizeof *s);
    if (!s)
        return fd < 0 ? INVALID : NO_MEMORY;
    *s = (shared){fd, is_imported};
    *handle = (uintptr_t)s;
    count(1);
    return 0;
}

int MemCreate(uint64_t *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags)
{
    MAY_FAIL("cuMemCreate");
    MAY_CONFLICT(unsafe());
    if (!bytes || bytes % PAGE || flags || properties->type != 1 || properties->requestedHandleTypes != 1 ||
        properties->location.type != 1)
        return INVALID;
    int fd = memfd_create("device memory", MFD_CLOEXEC);
    return fd >= 0 && ftruncate(fd, (off_t)bytes) != 0 ? NO_MEMORY : make_shared(handle, fd, 0);
}

int MemRelease(uint64_t handle)
{
    shared *s = (shared *)(uintptr_t)handle;
    MAY_FAIL("cuMemRelease");
    close(s->fd);
    free(s);
    count(-1);
    return 0;
}

int MemExportToShareableHandle(int *fd, uint64_t handle, int type, unsigned long long flags)
{
    MAY_FAIL("cuMemExportToShareableHandle");
    *fd = fcntl(((shared *)(uintptr_t)handle)->fd, F_DUPFD_CLOEXEC, 0);
    return type != 1 || flags || *fd < 0 ? INVALID : 0;
}

int MemImportFromShareableHandle(uint64_t *handle, void *fd, int type)
{
    MAY_FAIL("cuMemImportFromShareableHandle");
    return type != 1 ? INVALID : make_shared(handle, fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 0), 1);
}

int MemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wanted,
                      unsigned long long flags)
{
    MAY_FAIL("cuMemAddressReserve");
    if (!bytes || bytes % PAGE || alignment || wanted || flags)
        return INVALID;
    void *memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (uintptr_t)on_device(memory);
    count(memory != MAP_FAILED);
    return memory == MAP_FAILED ? NO_MEMORY : 0;
}

int MemAddressFree(uint64_t address, size_t bytes)
{
    MAY_FAIL("cuMemAddressFree");
    count(-1);
    return munmap(reached((void *)(uintptr_t)address), bytes) == 0 ? 0 : INVALID;
}

int MemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags)
{
    const shared *s = (shared *)(uintptr_t)handle;
    char *at = reached((void *)(uintptr_t)address);
    const char *astray = standin_getenv("STANDIN_ASTRAY");
    struct stat status;
    MAY_FAIL("cuMemMap");
    MAY_CONFLICT(unsafe());
    if (fstat(s->fd, &status) != 0 || offset || flags || bytes != (size_t)status.st_size ||
        mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, s->fd, 0) == MAP_FAILED)
        return INVALID;
    size_t from = astray && s->is_imported ? (size_t)atol(astray) : bytes;
    if (from < bytes && mmap(at + from, bytes - from, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                             0) == MAP_FAILED)
        return INVALID;
    count(1);
    return 0;
}

int MemUnmap(uint64_t address, size_t bytes)
{
    void *at = reached((void *)(uintptr_t)address);
    MAY_FAIL("cuMemUnmap");
    MAY_CONFLICT(unsafe());
    count(-1);
    return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) ==
                   MAP_FAILED
               ? INVALID
               : 0;
}

int MemSetAccess(uint64_t address, size_t bytes, const CUmemAccessDesc *access, size_t number)
{
    MAY_FAIL("cuMemSetAccess");
    if (number != 1 || access->flags != 3 || access->location.type != 1)
        return INVALID;
    return mprotect(reached((void *)(uintptr_t)address), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : INVALID;
}
