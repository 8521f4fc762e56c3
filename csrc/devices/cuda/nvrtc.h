/* CUDA's run-time compiler, NVRTC, as far as spar uses it: declared here, opened at run time. It needs neither a
 * device nor a driver. tests/test_cuda_libraries.py holds the declarations against nvrtc.h. */
#ifndef SPAR_NVRTC_H
#define SPAR_NVRTC_H

#include "base/error.h"

#include <stddef.h>

#ifndef __NVRTC_H__ /* the tests include nvrtc.h before */
typedef int nvrtcResult;
typedef struct _nvrtcProgram *nvrtcProgram;
#endif

/* X(name without "nvrtc", parameters) */
#define SPAR_NVRTC_FUNCTIONS(X)                                                                    \
    X(Version, (int *major, int *minor))                                                           \
    X(GetNumSupportedArchs, (int *count))                                                          \
    X(GetSupportedArchs, (int *archs))                                                             \
    X(CreateProgram, (nvrtcProgram * program, const char *source, const char *name, int headers,   \
                      const char *const *texts, const char *const *names))                         \
    X(CompileProgram, (nvrtcProgram program, int count, const char *const *options))               \
    X(GetCUBINSize, (nvrtcProgram program, size_t *size))                                          \
    X(GetCUBIN, (nvrtcProgram program, char *cubin))                                               \
    X(GetProgramLogSize, (nvrtcProgram program, size_t *size))                                     \
    X(GetProgramLog, (nvrtcProgram program, char *log))                                            \
    X(DestroyProgram, (nvrtcProgram * program))

/* Opens libnvrtc and finds its functions, once for the process. SPAR_TRANSPORT tells what is missing. */
spar_status spar_nvrtc_open(void);

/* 1000 * major + 10 * minor. Needs an open compiler, as what follows. */
spar_status spar_nvrtc_version(int *version);

/* The newest code that this compiler makes and a device of this compute capability (10 * major + minor) runs:
 * its own, or an earlier minor's. */
spar_status spar_nvrtc_arch(int capability, int *arch);

/* All that goes into the result beside the source and the version, as text. */
extern const char spar_nvrtc_options[];

/* Machine code (a cubin) for sm_ARCH; the caller frees it. Takes seconds. */
spar_status spar_nvrtc_compile(const char *source, int arch, char **cubin, size_t *size);

#endif
