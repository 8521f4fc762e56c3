/* SPDX-License-Identifier: Apache-2.0 */
/* Copies with non-temporal stores: above the cache size, a store that does not read its line first takes half
 * the time. They are weakly ordered: a thread that made some calls spar_nontemporal_fence before it
 * publishes. */
#ifndef SPAR_NONTEMPORAL_H
#define SPAR_NONTEMPORAL_H

#include "base/fence.h"

#include <stdint.h>
#include <string.h>

enum { SPAR_CACHE_LINE = 64 };

/* The shortest run that gains: below it, the unaligned bytes at both ends cost more. */
enum { SPAR_NONTEMPORAL_RUN = 256 };

/* Returns the least bytes of a copy that gains; INT64_MAX if the processor has no such stores. */
int64_t spar_nontemporal_min(void);

/* Sets that number of bytes; 0: what the L2 cache's size gives. For tests. */
void spar_nontemporal_use_min(int64_t bytes);

/* Copies n bytes. */
void spar_nontemporal_copy(char *to, const char *from, int64_t n);

/* Copies one line; `to` is aligned to it. */
static inline void spar_nontemporal_line(char *to, const char *line)
{
#ifdef SPAR_NONTEMPORAL
    for (int part = 0; part < SPAR_CACHE_LINE; part += 16)
        _mm_stream_si128((__m128i *)(to + part), _mm_load_si128((const __m128i *)(line + part)));
#else
    memcpy(to, line, SPAR_CACHE_LINE);
#endif
}

#ifdef SPAR_NONTEMPORAL
/* Copies one line in one store. */
__attribute__((target("avx512f"))) static inline void spar_nontemporal_line_avx512(char *to, const char *line)
{
    _mm512_stream_si512((void *)to, _mm512_load_si512(line));
}
#else
#define spar_nontemporal_line_avx512 spar_nontemporal_line
#endif

#endif
