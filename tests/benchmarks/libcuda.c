/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in for libcuda.so.1 (tests/standin), with what only the stages of benchmarks/bring_up.py call:
 * memory that is passed to other processes (a memfd here), copies to the host, and the kernel of
 * benchmarks/stages/peer.py, whose C form is below. */
#define cuGetProcAddress_v2 standin_address
#include "../standin/libcuda.c"
#undef cuGetProcAddress_v2

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { GRANULARITY = 1 << 16 };

static int DriverGetVersion(int *version)
{
    *version = 12090;
    return 0;
}

static int DeviceGetCount(int *number)
{
    *number = 1;
    return 0;
}

static int DeviceGetName(char *name, int size, int device)
{
    snprintf(name, (size_t)size, "stand-in %d", device);
    return 0;
}

/* At addresses of the host: the stages' tensors are the CPU's. */
static int MemAllocHere(uint64_t *memory, size_t bytes)
{
    int code = MemAlloc(memory, bytes);
    *memory = (uintptr_t)reached((void *)(uintptr_t)*memory);
    return code;
}

static int MemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *handle)
{
    return give(handle, (work){.run = run_copy,
                               .to = (void *)(uintptr_t)to,
                               .from = (const void *)(uintptr_t)from,
                               .bytes = bytes});
}

/* ---- memory of several processes: a handle is a descriptor and 1 ---- */

static int MemGetAllocationGranularity(size_t *size, const int *prop, int option)
{
    *size = GRANULARITY;
    return prop[0] == 1 && prop[1] == 1 && prop[2] == 1 && prop[3] == 0 && option == 1 ? 0 : INVALID;
}

static int MemCreate(uint64_t *handle, size_t bytes, const int *prop, unsigned long long flags)
{
    size_t unused;
    int descriptor = memfd_create("stand-in", MFD_CLOEXEC);
    if (MemGetAllocationGranularity(&unused, prop, 1) || bytes % GRANULARITY || flags)
        return INVALID;
    *handle = (uint64_t)descriptor + 1;
    return ftruncate(descriptor, (off_t)bytes) == 0 ? 0 : NO_MEMORY;
}

static int MemRelease(uint64_t handle)
{
    return close((int)handle - 1) == 0 ? 0 : INVALID;
}

static int MemExportToShareableHandle(int *descriptor, uint64_t handle, int type, unsigned long long flags)
{
    *descriptor = dup((int)handle - 1);
    return *descriptor >= 0 && type == 1 && !flags ? 0 : INVALID;
}

static int MemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type)
{
    int descriptor = dup((int)(intptr_t)os_handle);
    *handle = (uint64_t)descriptor + 1;
    return descriptor >= 0 && type == 1 ? 0 : INVALID;
}

static int MemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wanted,
                             unsigned long long flags)
{
    void *memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *address = (uintptr_t)memory;
    return memory != MAP_FAILED && !alignment && !wanted && !flags ? 0 : INVALID;
}

static int MemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags)
{
    void *memory = mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle - 1,
                        (off_t)offset);
    return memory != MAP_FAILED && !flags ? 0 : INVALID;
}

static int MemSetAccess(uint64_t address, size_t bytes, const int *access, size_t number)
{
    int is_known = access[0] == 1 && access[1] == 0 && access[2] == 3 && number == 1;
    return is_known && mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : INVALID;
}

static int unmap(uint64_t address, size_t bytes)
{
    return munmap((void *)(uintptr_t)address, bytes) == 0 ? 0 : INVALID;
}

/* Keeps the addresses reserved. */
static int MemUnmap(uint64_t address, size_t bytes)
{
    void *memory =
        mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return memory != MAP_FAILED ? 0 : INVALID;
}

/* ---- the kernel handshake ---- */

static const char handshake; /* its address is the function's handle */

typedef struct {
    uint32_t *mine, *theirs;
    unsigned is_first, rounds;
    unsigned long long limit_ns, *result;
} side;

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void run_handshake(void *context)
{
    side *s = context;
    uint64_t begin = now();
    unsigned round = 1;
    for (; round <= s->rounds; round++) {
        if (s->is_first)
            __atomic_store_n(s->theirs, round, __ATOMIC_RELEASE);
        while (__atomic_load_n(s->mine, __ATOMIC_ACQUIRE) < round && now() - begin < s->limit_ns)
            usleep(1);
        if (__atomic_load_n(s->mine, __ATOMIC_ACQUIRE) < round)
            break;
        if (!s->is_first)
            __atomic_store_n(s->theirs, round, __ATOMIC_RELEASE);
    }
    s->result[0] = round - 1;
    s->result[1] = now() - begin;
    free(s);
}

static int FindFunction(void **function, void *module, const char *name)
{
    if (strcmp(name, "handshake") != 0)
        return ModuleGetFunction(function, module, name);
    *function = (void *)(uintptr_t)&handshake;
    return 0;
}

static int Launch(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned by,
                  unsigned bz, unsigned shared, void *handle, void **parameters, void **extra)
{
    if (function != &handshake)
        return LaunchKernel(function, x, y, z, threads, by, bz, shared, handle, parameters, extra);
    if (x * y * z * threads * by * bz != 1 || shared || extra || !current)
        return INVALID;
    side *s = calloc(1, sizeof *s);
    memcpy(&s->mine, parameters[0], sizeof s->mine);
    memcpy(&s->theirs, parameters[1], sizeof s->theirs);
    memcpy(&s->is_first, parameters[2], sizeof s->is_first);
    memcpy(&s->rounds, parameters[3], sizeof s->rounds);
    memcpy(&s->limit_ns, parameters[4], sizeof s->limit_ns);
    memcpy(&s->result, parameters[5], sizeof s->result);
    return give(handle, (work){.run = run_host, .host = run_handshake, .context = s});
}

EXPORT int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
#define MORE(name) {"cu" #name, (void *)name},
    static const struct {
        const char *name;
        void *function;
    } rows[] = {MORE(DriverGetVersion) MORE(DeviceGetCount) MORE(DeviceGetName) MORE(MemcpyAsync)
                    MORE(MemGetAllocationGranularity) MORE(MemCreate) MORE(MemRelease)
                        MORE(MemExportToShareableHandle) MORE(MemImportFromShareableHandle)
                            MORE(MemAddressReserve) MORE(MemMap) MORE(MemSetAccess)
                                MORE(MemUnmap){"cuMemAddressFree", (void *)unmap},
                {"cuMemAlloc", (void *)MemAllocHere},
                {"cuModuleGetFunction", (void *)FindFunction},
                {"cuLaunchKernel", (void *)Launch}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].name, name) == 0) {
            *status = 0;
            *found = rows[i].function;
            return 0;
        }
    return standin_address(name, found, version, flags, status);
}
