/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cuda/nvrtc.h"
#include "base/dynlib.h"

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* No contraction: a factor must round as the CPU's does. */
#define NO_CONTRACTION "--fmad=false"
#define STANDARD "--std=c++17"

const char spar_nvrtc_options[] = NO_CONTRACTION " " STANDARD;

static struct {
#define FIELD(name, parameters) nvrtcResult(*name) parameters;
    SPAR_NVRTC_FUNCTIONS(FIELD)
#undef FIELD
    const char *(*GetErrorString)(nvrtcResult result);
} nvrtc;

static spar_status find_functions(void *handle)
{
#define FIND(name, parameters) SPAR_TRY(spar_dynlib_function(handle, "libnvrtc", "nvrtc" #name, &nvrtc.name));
    SPAR_NVRTC_FUNCTIONS(FIND)
#undef FIND
    return spar_dynlib_function(handle, "libnvrtc", "nvrtcGetErrorString", &nvrtc.GetErrorString);
}

spar_status spar_nvrtc_open(void)
{
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so",
                                        NULL};
    static spar_dynlib_once once = SPAR_DYNLIB_ONCE("libnvrtc", names, find_functions);
    return spar_dynlib_open_once(&once);
}

static spar_status check(nvrtcResult result, const char *what)
{
    if (result == 0)
        return SPAR_OK;
    return spar_fail(SPAR_TRANSPORT, "nvrtc%s: %s", what, nvrtc.GetErrorString(result));
}

spar_status spar_nvrtc_version(int *version)
{
    int major, minor;
    SPAR_TRY(check(nvrtc.Version(&major, &minor), "Version"));
    *version = 1000 * major + 10 * minor;
    return SPAR_OK;
}

spar_status spar_nvrtc_arch(int capability, int *arch)
{
    int archs[256], count = 0, version;
    *arch = 0;
    SPAR_TRY(spar_nvrtc_version(&version));
    SPAR_TRY(check(nvrtc.GetNumSupportedArchs(&count), "GetNumSupportedArchs"));
    if (count > (int)(sizeof archs / sizeof *archs))
        return spar_fail(SPAR_TRANSPORT, "NVRTC knows %d architectures", count);
    SPAR_TRY(check(nvrtc.GetSupportedArchs(archs), "GetSupportedArchs"));
    for (int i = 0; i < count; i++)
        if (archs[i] / 10 == capability / 10 && archs[i] <= capability && archs[i] > *arch)
            *arch = archs[i];
    if (*arch)
        return SPAR_OK;
    return spar_fail(SPAR_TRANSPORT, "NVRTC %d.%d makes no code for compute capability %d.%d", version / 1000,
                     version % 1000 / 10, capability / 10, capability % 10);
}

/* The first lines of what the compiler wrote. */
static spar_status fail_with_log(nvrtcProgram program, nvrtcResult result)
{
    size_t size = 0;
    char *log = NULL;
    if (nvrtc.GetProgramLogSize(program, &size) == 0 && size > 1 && (log = calloc(size, 1)))
        nvrtc.GetProgramLog(program, log);
    spar_fail(SPAR_TRANSPORT, "nvrtcCompileProgram: %s: %.1000s", nvrtc.GetErrorString(result),
              log ? log : "");
    free(log);
    return SPAR_TRANSPORT;
}

static spar_status compile(nvrtcProgram program, int arch, char **cubin, size_t *size)
{
    char target[32];
    const char *options[] = {target, NO_CONTRACTION, STANDARD};
    snprintf(target, sizeof target, "--gpu-architecture=sm_%d", arch);
    nvrtcResult result = nvrtc.CompileProgram(program, 3, options);
    if (result != 0)
        return fail_with_log(program, result);
    SPAR_TRY(check(nvrtc.GetCUBINSize(program, size), "GetCUBINSize"));
    *cubin = malloc(*size);
    if (!*cubin)
        return spar_fail(SPAR_NO_MEMORY, "no memory for kernels of %zu bytes", *size);
    spar_status status = check(nvrtc.GetCUBIN(program, *cubin), "GetCUBIN");
    if (status != SPAR_OK)
        free(*cubin);
    return status;
}

spar_status spar_nvrtc_compile(const char *source, int arch, char **cubin, size_t *size)
{
    nvrtcProgram program;
    const char *now = setlocale(LC_ALL, NULL); /* before 12.6.2 the compiler leaves another one */
    char *locale = now ? strdup(now) : NULL;
    spar_status status =
        check(nvrtc.CreateProgram(&program, source, "spar.cu", 0, NULL, NULL), "CreateProgram");
    if (status == SPAR_OK) {
        status = compile(program, arch, cubin, size);
        nvrtc.DestroyProgram(&program);
    }
    now = setlocale(LC_ALL, NULL);
    if (locale && now && strcmp(now, locale) != 0)
        setlocale(LC_ALL, locale);
    free(locale);
    return status;
}
