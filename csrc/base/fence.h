/* SPDX-License-Identifier: Apache-2.0 */
/* Whether this build has non-temporal stores (SPAR_NONTEMPORAL), and the fence that follows them. */
#ifndef SPAR_FENCE_H
#define SPAR_FENCE_H

/* Sanitizers do not see non-temporal stores: sanitized builds use ordinary ones. Only shared memory needs
 * them, and that needs Linux. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SPAR_SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SPAR_SANITIZED
#endif
#if defined(__x86_64__) && defined(__linux__) && !defined(SPAR_SANITIZED)
#define SPAR_NONTEMPORAL
#include <immintrin.h>
#endif

/* Orders this thread's non-temporal stores before its later stores. */
static inline void spar_nontemporal_fence(void)
{
#ifdef SPAR_NONTEMPORAL
    _mm_sfence();
#endif
}

#endif
