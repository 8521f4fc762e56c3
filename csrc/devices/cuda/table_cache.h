/* Tables in a CUDA device's memory, where its kernels read them. A plan's go there at its first use and stay as long
 * as the plan does; what a captured graph may read stays until the process ends.
 *
 * All but retiring wants the device to be this thread's current one. */
#ifndef SPAR_TABLE_CACHE_H
#define SPAR_TABLE_CACHE_H

#include "devices/cuda/driver.h"
#include "devices/cuda/block_table.h"

#include <pthread.h>

/* Those of one device. */
typedef struct {
    const spar_driver *driver;
    CUstream stream;      /* they go there in it, beside what others do */
    pid_t owner;          /* the process; not a forked child */
    pthread_mutex_t lock; /* of what follows, and around an upload */
    struct spar_device_table *retired,
        *captured; /* of plans that are gone; the captured ones stay */
    int nretired;
} spar_table_cache;

/* Tables on the device, and what they were made of. */
typedef struct spar_device_table {
    spar_attached attached; /* to the plan; comes first */
    spar_table_cache *cache;
    spar_block_table table;
    CUdeviceptr memory; /* blocks, then loops */
    int64_t bytes;      /* of it */
    CUevent uploaded_event;
    int uploaded, captured; /* atomic. Captured: a graph may read it whenever it is replayed */
    struct spar_device_table *next; /* among the retired ones */
} spar_device_table;

spar_status spar_table_cache_open(spar_table_cache *cache, const spar_driver *driver);

/* Of uploads that nothing was uploaded to. */
void spar_table_cache_close(spar_table_cache *cache);

/* The plan's tables, which its first use uploads: that allocates, also during a capture. */
spar_status spar_table_cache_get(spar_table_cache *cache, const spar_plan *plan,
                                 spar_device_table **table);

/* A table of blocks without a plan, and its list; the caller retires it. */
spar_status spar_device_table_make(spar_table_cache *cache, const spar_block *blocks, int64_t count,
                                   const spar_dim *dims, spar_block_list *list,
                                   spar_device_table **table);

/* What the stream does from now on may read the tables. */
spar_status spar_device_table_await(spar_device_table *table, void *stream);

/* Bytes of device memory that tables take, on all devices. */
int64_t spar_table_cache_allocated(void);

/* Nobody asks for it any more; kernels that run may still read it. On any thread. */
void spar_device_table_retire(spar_device_table *table);

#endif
