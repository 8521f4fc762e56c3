/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cpu/nontemporal.h"

#include "devices/cpu/processor.h"

#include <string.h>
#include <unistd.h>

#ifdef SPAR_NONTEMPORAL

/* Copy whole cache lines: n is a multiple of SPAR_CACHE_LINE, and `to` is aligned to it. */
__attribute__((target("avx512f"))) static void copy_lines_avx512(char *to, const char *from, int64_t n)
{
    int64_t at = 0;
    for (; at + 4 * SPAR_CACHE_LINE <= n; at += 4 * SPAR_CACHE_LINE) {
        __m512i a = _mm512_loadu_si512(from + at), b = _mm512_loadu_si512(from + at + SPAR_CACHE_LINE);
        __m512i c = _mm512_loadu_si512(from + at + 2 * SPAR_CACHE_LINE);
        __m512i d = _mm512_loadu_si512(from + at + 3 * SPAR_CACHE_LINE);
        _mm512_stream_si512((void *)(to + at), a);
        _mm512_stream_si512((void *)(to + at + SPAR_CACHE_LINE), b);
        _mm512_stream_si512((void *)(to + at + 2 * SPAR_CACHE_LINE), c);
        _mm512_stream_si512((void *)(to + at + 3 * SPAR_CACHE_LINE), d);
    }
    for (; at < n; at += SPAR_CACHE_LINE)
        _mm512_stream_si512((void *)(to + at), _mm512_loadu_si512(from + at));
}

static void copy_lines_sse2(char *to, const char *from, int64_t n)
{
    for (int64_t at = 0; at < n; at += SPAR_CACHE_LINE) {
        const __m128i *s = (const __m128i *)(from + at);
        __m128i *d = (__m128i *)(to + at);
        __m128i a = _mm_loadu_si128(s), b = _mm_loadu_si128(s + 1);
        __m128i c = _mm_loadu_si128(s + 2), e = _mm_loadu_si128(s + 3);
        _mm_stream_si128(d, a);
        _mm_stream_si128(d + 1, b);
        _mm_stream_si128(d + 2, c);
        _mm_stream_si128(d + 3, e);
    }
}

static void copy_lines(char *to, const char *from, int64_t n)
{
    if (spar_processor_has(SPAR_AVX512F))
        copy_lines_avx512(to, from, n);
    else
        copy_lines_sse2(to, from, n);
}

static int64_t least; /* 0: not computed yet; racing threads find the same */

void spar_nontemporal_use_min(int64_t bytes)
{
    __atomic_store_n(&least, bytes, __ATOMIC_RELAXED);
}

/* An eighth of the L2 cache: callers ask for one peer's part of a call. */
int64_t spar_nontemporal_min(void)
{
    int64_t bytes = __atomic_load_n(&least, __ATOMIC_RELAXED);
    if (!bytes) {
        long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
        bytes = cache > 0 ? cache / 8 : 256 << 10;
        __atomic_store_n(&least, bytes, __ATOMIC_RELAXED);
    }
    return bytes;
}

void spar_nontemporal_copy(char *to, const char *from, int64_t n)
{
    int64_t head = -(intptr_t)to & (SPAR_CACHE_LINE - 1);
    if (head == 0 && (n & (SPAR_CACHE_LINE - 1)) == 0) {
        copy_lines(to, from, n);
        return;
    }
    if (head > n)
        head = n;
    int64_t lines = (n - head) & ~(int64_t)(SPAR_CACHE_LINE - 1);
    memcpy(to, from, (size_t)head);
    copy_lines(to + head, from + head, lines);
    memcpy(to + head + lines, from + head + lines, (size_t)(n - head - lines));
}

#else

void spar_nontemporal_use_min(int64_t bytes)
{
    (void)bytes;
}

int64_t spar_nontemporal_min(void)
{
    return INT64_MAX;
}

void spar_nontemporal_copy(char *to, const char *from, int64_t n)
{
    memcpy(to, from, (size_t)n);
}

#endif
