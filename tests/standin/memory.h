/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory: a device address is that of memory of the host, with a bit set that no address of a process
 * has. So a read or a write by the host is a SIGSEGV, and any memory of the host can be the device's. The
 * stand-ins' streams reach it, as they do page-locked memory, whose address both sides share. */
#ifndef MEMORY_H
#define MEMORY_H

#include <stdint.h>

#define DEVICE_BIT ((uintptr_t)1 << 50) /* x86-64 and aarch64 map 47 and 48 bits, and more on request only */

/* What spar is given of this memory of the host. */
static inline void *on_device(const void *memory)
{
    return (void *)(memory ? (uintptr_t)memory | DEVICE_BIT : 0);
}

/* The host's address of what a stream is to read or write. */
static inline void *reached(const void *address)
{
    return (void *)((uintptr_t)address & ~DEVICE_BIT);
}

#endif
