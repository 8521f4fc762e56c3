/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of the CUDA driver, libcuda.so.1, that spar calls: declared here, opened at run time.
 *
 * Each is looked up by its name and the CUDA version that introduced the parameters below (cuGetProcAddress),
 * which later versions keep. tests/gpu/test_cuda_libraries.py checks the declarations against cuda.h. */
#ifndef SPAR_DRIVER_H
#define SPAR_DRIVER_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

#ifndef CUDA_VERSION /* the tests include cuda.h before */
typedef int CUresult, CUdevice, CUdevice_attribute;
typedef int CUstreamCaptureStatus, CUstreamCaptureMode;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct {
    int type, id;
} CUmemLocation;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;
typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;
typedef int CUmemAllocationHandleType, CUmemAllocationGranularity_flags;
#endif

_Static_assert(sizeof(CUmemAllocationProp) == 32 && offsetof(CUmemAllocationProp, location) == 8 &&
                   sizeof(CUmemAccessDesc) == 12 && offsetof(CUmemAccessDesc, flags) == 8,
               "the same as cuda.h has");

enum {
    SPAR_CU_SUCCESS = 0,
    SPAR_CU_OUT_OF_MEMORY = 2,
    SPAR_CU_NOT_READY = 600,
    SPAR_CU_SMS = 16, /* device attributes */
    SPAR_CU_COMPUTE_MAJOR = 75,
    SPAR_CU_COMPUTE_MINOR = 76,
    SPAR_CU_HOST_PORTABLE = 1,
    SPAR_CU_HOST_MAPPED = 2,
    SPAR_CU_STREAM_NON_BLOCKING = 1,
    SPAR_CU_EVENT_DISABLE_TIMING = 2,
    SPAR_CU_CAPTURE_NONE = 0,    /* what a stream does */
    SPAR_CU_CAPTURE_RELAXED = 2, /* a thread's mode: what captures of others do not see is allowed */
    SPAR_CU_PINNED = 1,          /* memory that other processes can map: its type, */
    SPAR_CU_ON_DEVICE = 1,       /* where it lies, */
    SPAR_CU_DESCRIPTOR = 1,      /* what opens it, */
    SPAR_CU_RECOMMENDED = 1,     /* which granularity is asked for, */
    SPAR_CU_READ_WRITE = 3,      /* and what is allowed */
};

/* X(name without "cu", version, parameters) */
#define SPAR_DRIVER_FUNCTIONS(X)                                                                             \
    X(Init, 2000, (unsigned int flags))                                                                      \
    X(GetErrorName, 6000, (CUresult error, const char **name))                                               \
    X(GetErrorString, 6000, (CUresult error, const char **text))                                             \
    X(DeviceGet, 2000, (CUdevice * device, int ordinal))                                                     \
    X(DeviceGetAttribute, 2000, (int *value, CUdevice_attribute attribute, CUdevice device))                 \
    X(DevicePrimaryCtxRetain, 7000, (CUcontext * context, CUdevice device))                                  \
    X(CtxGetCurrent, 4000, (CUcontext * context))                                                            \
    X(CtxSetCurrent, 4000, (CUcontext context))                                                              \
    X(CtxSynchronize, 2000, (void))                                                                          \
    X(ModuleLoadData, 2000, (CUmodule * module, const void *image))                                          \
    X(ModuleGetFunction, 2000, (CUfunction * function, CUmodule module, const char *name))                   \
    X(LaunchKernel, 4000,                                                                                    \
      (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,                   \
       unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,          \
       CUstream stream, void **parameters, void **extra))                                                    \
    X(MemAlloc, 3020, (CUdeviceptr * memory, size_t bytes))                                                  \
    X(MemFree, 3020, (CUdeviceptr memory))                                                                   \
    X(MemGetInfo, 3020, (size_t *free, size_t *total))                                                       \
    X(MemGetAllocationGranularity, 10020,                                                                    \
      (size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags which))        \
    X(MemCreate, 10020,                                                                                      \
      (CUmemGenericAllocationHandle * memory, size_t bytes, const CUmemAllocationProp *prop,                 \
       unsigned long long flags))                                                                            \
    X(MemRelease, 10020, (CUmemGenericAllocationHandle memory))                                              \
    X(MemExportToShareableHandle, 10020,                                                                     \
      (void *handle, CUmemGenericAllocationHandle memory, CUmemAllocationHandleType type,                    \
       unsigned long long flags))                                                                            \
    X(MemImportFromShareableHandle, 10020,                                                                   \
      (CUmemGenericAllocationHandle * memory, void *handle, CUmemAllocationHandleType type))                 \
    X(MemAddressReserve, 10020,                                                                              \
      (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags)) \
    X(MemAddressFree, 10020, (CUdeviceptr address, size_t bytes))                                            \
    X(MemMap, 10020,                                                                                         \
      (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle memory,                \
       unsigned long long flags))                                                                            \
    X(MemUnmap, 10020, (CUdeviceptr address, size_t bytes))                                                  \
    X(MemSetAccess, 10020, (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)) \
    X(MemHostAlloc, 2020, (void **memory, size_t bytes, unsigned int flags))                                 \
    X(MemFreeHost, 2000, (void *memory))                                                                     \
    X(MemcpyHtoD, 3020, (CUdeviceptr to, const void *from, size_t bytes))                                    \
    X(MemcpyDtoH, 3020, (void *to, CUdeviceptr from, size_t bytes))                                          \
    X(StreamCreate, 2000, (CUstream * stream, unsigned int flags))                                           \
    X(StreamDestroy, 4000, (CUstream stream))                                                                \
    X(StreamSynchronize, 2000, (CUstream stream))                                                            \
    X(StreamQuery, 2000, (CUstream stream))                                                                  \
    X(StreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned int flags))                           \
    X(StreamWriteValue32, 11070, (CUstream stream, CUdeviceptr to, uint32_t value, unsigned int flags))      \
    X(StreamGetCaptureInfo, 10010, (CUstream stream, CUstreamCaptureStatus * status, uint64_t *id))          \
    X(ThreadExchangeStreamCaptureMode, 10010, (CUstreamCaptureMode * mode))                                  \
    X(EventCreate, 2000, (CUevent * event, unsigned int flags))                                              \
    X(EventDestroy, 4000, (CUevent event))                                                                   \
    X(EventRecord, 2000, (CUevent event, CUstream stream))                                                   \
    X(EventQuery, 2000, (CUevent event))

/* What older drivers may lack: NULL there. */
#define SPAR_DRIVER_NEWER_FUNCTIONS(X) X(StreamGetId, 12000, (CUstream stream, unsigned long long *id))

typedef struct {
#define SPAR_DRIVER_FIELD(name, version, parameters) CUresult(*name) parameters;
    SPAR_DRIVER_FUNCTIONS(SPAR_DRIVER_FIELD)
    SPAR_DRIVER_NEWER_FUNCTIONS(SPAR_DRIVER_FIELD)
#undef SPAR_DRIVER_FIELD
} spar_driver;

/* Valid from the first spar_driver_open that succeeded. */
extern spar_driver spar_cu;

/* Opens libcuda and looks its functions up, once per process; touches no device. SPAR_TRANSPORT names what is
 * missing. Cheap from the second call on. */
spar_status spar_driver_open(void);

/* SPAR_OK, or "WHAT: the driver's text (its name)": SPAR_NO_MEMORY where the device has none, else
 * SPAR_TRANSPORT. Needs an open driver. */
spar_status spar_driver_check(CUresult result, const char *what);

/* Copies to the device's memory and waits until the bytes are there. cuMemcpyHtoD alone may return while they
 * are in the driver's own staging memory (CUDA's "API synchronization behavior"), and a kernel of another
 * stream or process would not find them. */
spar_status spar_driver_write(CUdeviceptr to, const void *from, size_t bytes);

/* The capture of the stream into a graph: a number of its own, or 0 if there is none. */
spar_status spar_driver_capture(void *stream, uint64_t *capture);

/* A number that no other stream of the process has, nor had where the driver is of CUDA 12: a handle may be
 * that of an earlier stream, which was destroyed while it had work. */
spar_status spar_driver_stream_id(void *stream, uint64_t *id);

#define SPAR_TRY_CU(name, ...) SPAR_TRY(spar_driver_check(spar_cu.name(__VA_ARGS__), "cu" #name))

#endif
