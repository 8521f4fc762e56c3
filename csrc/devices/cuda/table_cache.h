/* Block tables in a CUDA device's memory. A plan's are uploaded at its first use and live as long as the
 * plan; those that a captured graph may read live until the process ends.
 *
 * All functions but spar_device_table_retire require the device to be current on this thread. */
#ifndef SPAR_TABLE_CACHE_H
#define SPAR_TABLE_CACHE_H

#include "devices/cuda/driver.h"
#include "devices/cuda/block_table.h"

#include <pthread.h>

/* One device's tables. */
typedef struct {
    const spar_driver *driver;
    CUstream stream;                              /* for uploads, concurrent with other streams */
    pid_t owner;                                  /* the process; not a forked child */
    pthread_mutex_t lock;                         /* of what follows, and around an upload */
    struct spar_device_table *retired, *captured; /* of plans that are gone; the captured ones stay */
    int nretired;
} spar_table_cache;

/* A stream that reads a table, and the event behind its newest read. */
typedef struct {
    void *stream;
    CUevent event;
} spar_table_use;

enum { SPAR_TABLE_USES = 4 };

/* A table on the device, with its host copy. */
typedef struct spar_device_table {
    spar_attached attached; /* to the plan; comes first */
    spar_table_cache *cache;
    spar_block_table table;
    CUdeviceptr memory; /* blocks, then loops */
    int64_t bytes;      /* of it */
    CUevent uploaded_event;
    spar_table_use uses[SPAR_TABLE_USES];
    int uploaded, captured;         /* atomic. Captured: a graph may read it whenever it is replayed */
    struct spar_device_table *next; /* among the retired ones */
} spar_device_table;

spar_status spar_table_cache_open(spar_table_cache *cache, const spar_driver *driver);

/* Closes an empty cache. */
void spar_table_cache_close(spar_table_cache *cache);

/* Gets the plan's table. Its first use uploads it, which allocates, also during a capture. */
spar_status spar_table_cache_get(spar_table_cache *cache, const spar_plan *plan, spar_device_table **table);

/* Uploads a table of blocks without a plan, and sets its list; the caller retires it. */
spar_status spar_device_table_make(spar_table_cache *cache, const spar_block *blocks, int64_t count,
                                   const spar_dim *dims, spar_block_list *list, spar_device_table **table);

/* Makes later work in the stream wait for the upload. */
spar_status spar_device_table_await(spar_device_table *table, void *stream);

/* Call it behind the kernels that read the table, in the same stream: the table is not freed before they
 * end. */
spar_status spar_device_table_used(spar_device_table *table, void *stream);

/* Returns the bytes of device memory of all tables, on all devices. */
int64_t spar_table_cache_allocated(void);

/* Releases a table; running kernels may still read it. On any thread. */
void spar_device_table_retire(spar_device_table *table);

#endif
