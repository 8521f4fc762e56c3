/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cuda/driver.h"
#include "base/dynlib.h"

#include <stdint.h>
#include <string.h>

enum { LEGACY_STREAM = 1 }; /* what NULL as a stream means; as for torch */

typedef CUresult (*get_address)(const char *name, void **function, int version, uint64_t flags);
typedef CUresult (*get_address_v2)(const char *name, void **function, int version, uint64_t flags,
                                   int *status);

spar_driver spar_cu;

static spar_status find_functions(void *handle)
{
    static const struct {
        const char *name;
        int version, is_newer;
        size_t at;
    } wanted[] = {
#define ROW(name, version, parameters) {"cu" #name, version, 0, offsetof(spar_driver, name)},
#define NEWER(name, version, parameters) {"cu" #name, version, 1, offsetof(spar_driver, name)},
        SPAR_DRIVER_FUNCTIONS(ROW) SPAR_DRIVER_NEWER_FUNCTIONS(NEWER)
#undef ROW
#undef NEWER
    };
    get_address get = NULL;
    get_address_v2 get_v2 = NULL;
    if (spar_dynlib_function(handle, "libcuda", "cuGetProcAddress_v2", &get_v2) != SPAR_OK)
        SPAR_TRY(spar_dynlib_function(handle, "libcuda", "cuGetProcAddress", &get));
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *function = NULL;
        int status = 0;
        CUresult result = get_v2
                              ? get_v2(wanted[i].name, &function, wanted[i].version, LEGACY_STREAM, &status)
                              : get(wanted[i].name, &function, wanted[i].version, LEGACY_STREAM);
        if (result != SPAR_CU_SUCCESS || !function) {
            if (wanted[i].is_newer)
                continue;
            return spar_fail(SPAR_TRANSPORT, "this libcuda is too old: it has no %s of CUDA %d.%d (error %d)",
                             wanted[i].name, wanted[i].version / 1000, wanted[i].version % 1000 / 10,
                             (int)result);
        }
        memcpy((char *)&spar_cu + wanted[i].at, &function, sizeof function);
    }
    return SPAR_OK;
}

spar_status spar_driver_open(void)
{
    static const char *const names[] = {"libcuda.so.1", NULL};
    static spar_dynlib_once once = SPAR_DYNLIB_ONCE("libcuda", names, find_functions);
    return spar_dynlib_open_once(&once);
}

spar_status spar_driver_check(CUresult result, const char *what)
{
    const char *name = "an unknown error", *text = "";
    if (result == SPAR_CU_SUCCESS)
        return SPAR_OK;
    spar_cu.GetErrorName(result, &name);
    spar_cu.GetErrorString(result, &text);
    return spar_fail((int)result == SPAR_CU_OUT_OF_MEMORY ? SPAR_NO_MEMORY : SPAR_TRANSPORT, "%s: %s (%s)",
                     what, text, name);
}

spar_status spar_driver_write(CUdeviceptr to, const void *from, size_t bytes)
{
    char last; /* read in the same stream, behind the copy */
    SPAR_TRY_CU(MemcpyHtoD, to, from, bytes);
    return spar_driver_check(spar_cu.MemcpyDtoH(&last, to + bytes - 1, 1), "cuMemcpyDtoH");
}

spar_status spar_driver_capture(void *stream, uint64_t *capture)
{
    CUstreamCaptureStatus status = SPAR_CU_CAPTURE_NONE;
    uint64_t id = 0;
    SPAR_TRY_CU(StreamGetCaptureInfo, stream, &status, &id);
    *capture = (int)status == SPAR_CU_CAPTURE_NONE ? 0 : id + 1;
    return SPAR_OK;
}

spar_status spar_driver_stream_id(void *stream, uint64_t *id)
{
    unsigned long long number = (uintptr_t)stream;
    if (spar_cu.StreamGetId)
        SPAR_TRY_CU(StreamGetId, stream, &number);
    *id = number;
    return SPAR_OK;
}
