/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in for libcuda.so.1 (tests/standin), with what only the stages of benchmarks/bring_up.py call:
 * facts about the device, memory at addresses of the host, and the kernel of benchmarks/stages/peer.py, whose
 * C form is below. */
#define cuGetProcAddress_v2 standin_address
#include "../standin/libcuda.c"
#undef cuGetProcAddress_v2

#include <time.h>
#include <unistd.h>

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
    uint32_t *mine = reached(s->mine), *theirs = reached(s->theirs);
    uint64_t begin = now();
    unsigned round = 1;
    for (; round <= s->rounds; round++) {
        if (s->is_first)
            __atomic_store_n(theirs, round, __ATOMIC_RELEASE);
        while (__atomic_load_n(mine, __ATOMIC_ACQUIRE) < round && now() - begin < s->limit_ns)
            usleep(1);
        if (__atomic_load_n(mine, __ATOMIC_ACQUIRE) < round)
            break;
        if (!s->is_first)
            __atomic_store_n(theirs, round, __ATOMIC_RELEASE);
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
    } rows[] = {{"cuMemAlloc", (void *)MemAllocHere},
                {"cuModuleGetFunction", (void *)FindFunction},
                {"cuLaunchKernel", (void *)Launch},
                MORE(DriverGetVersion) MORE(DeviceGetCount) MORE(DeviceGetName) MORE(MemcpyAsync)};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].name, name) == 0) {
            *status = 0;
            *found = rows[i].function;
            return 0;
        }
    return standin_address(name, found, version, flags, status);
}
