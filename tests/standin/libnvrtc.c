/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for libnvrtc: its "machine code" is a text that the stand-in for libcuda accepts. With
 * STANDIN_NVRTC_FAILS it does not compile; STANDIN_NVRTC_MS: it takes this long. */
#include <locale.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char code[] = "stand-in";

int nvrtcVersion(int *major, int *minor)
{
    *major = 12;
    *minor = 9;
    return 0;
}

int nvrtcGetNumSupportedArchs(int *count)
{
    *count = 3;
    return 0;
}

int nvrtcGetSupportedArchs(int *archs)
{
    memcpy(archs, (int[]){75, 80, 90}, 3 * sizeof *archs);
    return 0;
}

int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers,
                       const char *const *texts, const char *const *names)
{
    (void)source, (void)name, (void)headers, (void)texts, (void)names;
    *program = malloc(1);
    return 0;
}

int nvrtcCompileProgram(void *program, int count, const char *const *options)
{
    (void)program, (void)count, (void)options;
    const char *ms = getenv("STANDIN_NVRTC_MS");
    setlocale(LC_ALL, "C"); /* as NVRTC before 12.6.2 */
    if (ms)
        usleep((unsigned)atoi(ms) * 1000);
    return getenv("STANDIN_NVRTC_FAILS") ? 6 : 0;
}

int nvrtcGetCUBINSize(void *program, size_t *size)
{
    (void)program;
    *size = sizeof code;
    return 0;
}

int nvrtcGetCUBIN(void *program, char *cubin)
{
    (void)program;
    memcpy(cubin, code, sizeof code);
    return 0;
}

int nvrtcGetProgramLogSize(void *program, size_t *size)
{
    (void)program;
    *size = sizeof "a line of the log";
    return 0;
}

int nvrtcGetProgramLog(void *program, char *log)
{
    (void)program;
    strcpy(log, "a line of the log");
    return 0;
}

int nvrtcDestroyProgram(void **program)
{
    free(*program);
    return 0;
}

const char *nvrtcGetErrorString(int result)
{
    return result ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS";
}
