/* Machine code that was compiled once, kept on disk: $XDG_CACHE_HOME/spar, else ~/.cache/spar.
 *
 * A file's name tells the architecture and a hash of the source, the options and the compiler's version. It is used
 * only if it is whole, a file of this user, and written by nobody else; otherwise it is made anew. Where nothing can be
 * written, each process compiles for itself. */
#ifndef SPAR_CUBIN_CACHE_H
#define SPAR_CUBIN_CACHE_H

#include "base/error.h"

#include <stddef.h>

/* The code of `source` for a device of this compute capability (10 * major + minor); the caller frees it. Opens the
 * compiler. `compiled` (may be NULL): whether it had to be compiled. */
spar_status spar_cubin_cache_get(const char *source, int capability, char **cubin, size_t *size,
                                 int *compiled);

#endif
