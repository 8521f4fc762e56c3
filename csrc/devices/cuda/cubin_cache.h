/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled kernels on disk: $XDG_CACHE_HOME/spar, else ~/.cache/spar.
 *
 * A file's name has the architecture and a hash of the source, the options and NVRTC's version. A file is
 * used only if it is complete, owned by this user, and not writable by others; else it is rebuilt. If nothing
 * can be written, each process compiles for itself. */
#ifndef SPAR_CUBIN_CACHE_H
#define SPAR_CUBIN_CACHE_H

#include "base/error.h"

#include <stddef.h>

/* Gets the cubin of `source` for a compute capability (10 * major + minor); the caller frees it. Opens NVRTC.
 * `compiled` (may be NULL): whether it had to be compiled. */
spar_status spar_cubin_cache_get(const char *source, int capability, char **cubin, size_t *size,
                                 int *compiled);

#endif
