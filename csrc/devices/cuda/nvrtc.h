/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of NVRTC, CUDA's run-time compiler, that spar calls: declared here, opened at run time. It
 * needs neither a device nor a driver. tests/gpu/test_cuda_libraries.py checks the declarations against
 * nvrtc.h. */
#ifndef SPAR_NVRTC_H
#define SPAR_NVRTC_H

#include "base/error.h"

#include <stddef.h>

#ifndef __NVRTC_H__ /* the tests include nvrtc.h before */
typedef int nvrtcResult;
typedef struct _nvrtcProgram *nvrtcProgram;
#endif

/* X(name without "nvrtc", parameters) */
#define SPAR_NVRTC_FUNCTIONS(X)                                                                              \
    X(Version, (int *major, int *minor))                                                                     \
    X(GetNumSupportedArchs, (int *count))                                                                    \
    X(GetSupportedArchs, (int *archs))                                                                       \
    X(CreateProgram, (nvrtcProgram * program, const char *source, const char *name, int headers,             \
                      const char *const *texts, const char *const *names))                                   \
    X(CompileProgram, (nvrtcProgram program, int count, const char *const *options))                         \
    X(GetCUBINSize, (nvrtcProgram program, size_t *size))                                                    \
    X(GetCUBIN, (nvrtcProgram program, char *cubin))                                                         \
    X(GetProgramLogSize, (nvrtcProgram program, size_t *size))                                               \
    X(GetProgramLog, (nvrtcProgram program, char *log))                                                      \
    X(DestroyProgram, (nvrtcProgram * program))

/* Opens libnvrtc and looks its functions up, once per process. SPAR_TRANSPORT names what is missing. */
spar_status spar_nvrtc_open(void);

/* Gets 1000 * major + 10 * minor. NVRTC must be open for this and what follows. */
spar_status spar_nvrtc_version(int *version);

/* Gets the newest architecture that NVRTC compiles for and a device of this compute capability (10 * major +
 * minor) runs: its own, or one of an earlier minor. */
spar_status spar_nvrtc_arch(int capability, int *arch);

/* The options, which the cubin depends on besides the source and the version. */
extern const char spar_nvrtc_options[];

/* Compiles a cubin for sm_ARCH; the caller frees it. Takes seconds. */
spar_status spar_nvrtc_compile(const char *source, int arch, char **cubin, size_t *size);

#endif
