/* SPDX-License-Identifier: Apache-2.0 */
/* A libcuda.so.1 and a libnccl.so.2 whose functions do nothing and return success: what a call costs over
 * them is spar's own cost. NULL_RANK and NULL_WORLD are those of each communicator.
 *
 * Under valgrind --tool=callgrind --instr-atstart=no, instructions are counted between null_count(1) and
 * null_count(0). */
#include "devices/cuda/driver.h"
#include "transports/nccl/api.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_STOP_INSTRUMENTATION
#define CALLGRIND_DUMP_STATS
#endif

#define EXPORT __attribute__((visibility("default")))
#pragma GCC diagnostic ignored "-Wunused-parameter"

#define NOTHING(name, version, parameters)                                                                   \
    static CUresult nothing_##name parameters                                                                \
    {                                                                                                        \
        return 0;                                                                                            \
    }
SPAR_DRIVER_FUNCTIONS(NOTHING)

static char object; /* what handles point to */
static _Thread_local CUcontext current;

static CUresult get_current(CUcontext *context)
{
    *context = current;
    return 0;
}

static CUresult set_current(CUcontext context)
{
    current = context;
    return 0;
}

static CUresult retain(CUcontext *context, CUdevice device)
{
    *context = (CUcontext)&object;
    return 0;
}

static CUresult attribute(int *value, CUdevice_attribute which, CUdevice device)
{
    *value = (int)which == SPAR_CU_COMPUTE_MAJOR ? 9 : 0;
    return 0;
}

static CUresult allocate(CUdeviceptr *memory, size_t bytes)
{
    *memory = (uintptr_t)malloc(bytes);
    return 0;
}

static CUresult allocate_host(void **memory, size_t bytes, unsigned flags)
{
    *memory = malloc(bytes);
    return 0;
}

static CUresult write_value(CUstream stream, CUdeviceptr to, uint32_t value, unsigned flags)
{
    *(uint32_t *)(uintptr_t)to = value;
    return 0;
}

EXPORT int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
#define ROW(name, version, parameters) {"cu" #name, (void *)nothing_##name},
    static const struct {
        const char *name;
        void *function;
    } rows[] = {{"cuCtxGetCurrent", (void *)get_current},
                {"cuCtxSetCurrent", (void *)set_current},
                {"cuDevicePrimaryCtxRetain", (void *)retain},
                {"cuDeviceGetAttribute", (void *)attribute},
                {"cuMemAlloc", (void *)allocate},
                {"cuMemHostAlloc", (void *)allocate_host},
                {"cuStreamWriteValue32", (void *)write_value},
                SPAR_DRIVER_FUNCTIONS(ROW)};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].name, name) == 0) {
            *found = rows[i].function;
            return 0;
        }
    return 500;
}

static int number(const char *variable)
{
    const char *text = getenv(variable);
    return text ? atoi(text) : 0;
}

EXPORT spar_nccl_result ncclGetVersion(int *version)
{
    *version = SPAR_NCCL_LEAST;
    return 0;
}

EXPORT const char *ncclGetErrorString(spar_nccl_result result)
{
    return "";
}

EXPORT const char *ncclGetLastError(struct ncclComm *comm)
{
    return "";
}

EXPORT spar_nccl_result ncclGetUniqueId(spar_nccl_id *id)
{
    return 0;
}

EXPORT spar_nccl_result ncclCommInitRank(struct ncclComm **comm, int world, spar_nccl_id id, int rank)
{
    *comm = (struct ncclComm *)&object;
    return 0;
}

EXPORT spar_nccl_result ncclCommCount(struct ncclComm *const comm, int *world)
{
    *world = number("NULL_WORLD");
    return 0;
}

EXPORT spar_nccl_result ncclCommUserRank(struct ncclComm *const comm, int *rank)
{
    *rank = number("NULL_RANK");
    return 0;
}

EXPORT spar_nccl_result ncclCommGetAsyncError(struct ncclComm *comm, spar_nccl_result *error)
{
    *error = 0;
    return 0;
}

EXPORT spar_nccl_result ncclGroupStart(void)
{
    return 0;
}

EXPORT spar_nccl_result ncclGroupEnd(void)
{
    return 0;
}

EXPORT spar_nccl_result ncclSend(const void *from, size_t count, unsigned dtype, int peer,
                                 struct ncclComm *comm, struct CUstream_st *stream)
{
    return 0;
}

EXPORT spar_nccl_result ncclRecv(void *to, size_t count, unsigned dtype, int peer, struct ncclComm *comm,
                                 struct CUstream_st *stream)
{
    return 0;
}

EXPORT spar_nccl_result ncclCommAbort(struct ncclComm *comm)
{
    return 0;
}

EXPORT void null_count(int begins)
{
    if (begins) {
        CALLGRIND_START_INSTRUMENTATION;
    } else {
        CALLGRIND_DUMP_STATS;
        CALLGRIND_STOP_INSTRUMENTATION;
    }
}
