/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cuda/mapping.h"

#include "devices/cuda/driver.h"

#include <unistd.h>

static CUmemAllocationProp properties_of(int ordinal)
{
    return (CUmemAllocationProp){.type = SPAR_CU_PINNED,
                                 .requestedHandleTypes = SPAR_CU_DESCRIPTOR,
                                 .location = {SPAR_CU_ON_DEVICE, ordinal}};
}

spar_status spar_mapping_granularity(int ordinal, int64_t *bytes)
{
    const CUmemAllocationProp properties = properties_of(ordinal);
    size_t granularity = 0;
    SPAR_TRY_CU(MemGetAllocationGranularity, &granularity, &properties, SPAR_CU_RECOMMENDED);
    *bytes = (int64_t)granularity;
    return SPAR_OK;
}

spar_status spar_mapping_reserve(spar_mapping *m, int ordinal, int64_t bytes)
{
    CUdeviceptr base = 0;
    SPAR_TRY_CU(MemAddressReserve, &base, (size_t)bytes, 0, 0, 0);
    *m = (spar_mapping){.base = (char *)(uintptr_t)base, .reserved = bytes, .ordinal = ordinal};
    return SPAR_OK;
}

/* Maps the memory behind the newest piece. */
static spar_status add_piece(spar_mapping *m, CUmemGenericAllocationHandle memory, int64_t bytes)
{
    const CUmemAccessDesc access = {.location = {SPAR_CU_ON_DEVICE, m->ordinal}, .flags = SPAR_CU_READ_WRITE};
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)(m->base + m->mapped);
    if (bytes > m->reserved - m->mapped || m->count == SPAR_MAPPING_PIECES)
        return spar_fail(SPAR_INTERNAL, "a piece of %lld bytes behind %lld of %lld", (long long)bytes,
                         (long long)m->mapped, (long long)m->reserved);
    SPAR_TRY_CU(MemMap, at, (size_t)bytes, 0, memory, 0);
    CUresult result = spar_cu.MemSetAccess(at, (size_t)bytes, &access, 1);
    if (result != SPAR_CU_SUCCESS) {
        spar_cu.MemUnmap(at, (size_t)bytes);
        return spar_driver_check(result, "cuMemSetAccess");
    }
    m->pieces[m->count++] = bytes;
    m->mapped += bytes;
    return SPAR_OK;
}

spar_status spar_mapping_grow(spar_mapping *m, int64_t bytes, int *fd)
{
    const CUmemAllocationProp properties = properties_of(m->ordinal);
    CUmemGenericAllocationHandle memory;
    int made = -1;
    SPAR_TRY_CU(MemCreate, &memory, (size_t)bytes, &properties, 0);
    spar_status status =
        spar_driver_check(spar_cu.MemExportToShareableHandle(&made, memory, SPAR_CU_DESCRIPTOR, 0),
                          "cuMemExportToShareableHandle");
    if (status == SPAR_OK)
        status = add_piece(m, memory, bytes);
    spar_cu.MemRelease(memory); /* the mapping and the descriptor keep it */
    if (status == SPAR_OK)
        *fd = made;
    else if (made >= 0)
        close(made);
    return status;
}

spar_status spar_mapping_import(spar_mapping *m, int64_t bytes, int fd)
{
    CUmemGenericAllocationHandle memory;
    SPAR_TRY_CU(MemImportFromShareableHandle, &memory, (void *)(intptr_t)fd, SPAR_CU_DESCRIPTOR);
    spar_status status = add_piece(m, memory, bytes);
    spar_cu.MemRelease(memory);
    return status;
}

void spar_mapping_shrink(spar_mapping *m)
{
    int64_t bytes = m->pieces[--m->count];
    m->mapped -= bytes;
    spar_cu.MemUnmap((CUdeviceptr)(uintptr_t)(m->base + m->mapped), (size_t)bytes);
}

void spar_mapping_free(spar_mapping *m)
{
    if (!m->base)
        return;
    while (m->count)
        spar_mapping_shrink(m);
    spar_cu.MemAddressFree((CUdeviceptr)(uintptr_t)m->base, (size_t)m->reserved);
    m->base = NULL;
}
