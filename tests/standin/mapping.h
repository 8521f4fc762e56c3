/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's functions of mapping.c. */
#ifndef MAPPING_H
#define MAPPING_H

#include "devices/cuda/driver.h"

int MemGetInfo(size_t *unused, size_t *total);
int MemGetAllocationGranularity(size_t *granularity, const void *properties, int which);
int MemCreate(uint64_t *handle, size_t bytes, const CUmemAllocationProp *properties,
              unsigned long long flags);
int MemRelease(uint64_t handle);
int MemExportToShareableHandle(int *fd, uint64_t handle, int type, unsigned long long flags);
int MemImportFromShareableHandle(uint64_t *handle, void *fd, int type);
int MemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wanted,
                      unsigned long long flags);
int MemAddressFree(uint64_t address, size_t bytes);
int MemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
int MemUnmap(uint64_t address, size_t bytes);
int MemSetAccess(uint64_t address, size_t bytes, const CUmemAccessDesc *access, size_t number);

#endif
