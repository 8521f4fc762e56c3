/* The way of a rank's bytes through NCCL: staging memory, and streams beside the caller's.
 *
 * A call goes in steps (chunks.h). What lies in one piece is sent from and received in the tensors themselves; the
 * rest is packed into staging memory before a step's group of sends and receives, and unpacked behind it. Where a
 * call has several steps, packing and unpacking run in a stream of their own, beside the wire in the caller's, and
 * staging memory has two turns. A factor is applied by who packs. Nothing here waits for the device but close. */
#ifndef SPAR_PIPELINE_H
#define SPAR_PIPELINE_H

#include "transports/nccl/schedule.h"
#include "devices/cuda/driver.h"
#include "transports/nccl/api.h"
#include "transports/transport.h"

typedef struct {
    CUstream stream;            /* where packing and unpacking run */
    CUevent to_side, to_caller; /* who waits for whose */
} spar_side_stream;

typedef struct {
    int world, rank;
    int64_t cap, room; /* bytes of staging memory: at most; taken */
    int64_t chunk;     /* of a peer's stream in a step, the same on all ranks */
    char *staging;     /* [2 turns][2 directions][world - 1][chunk] */
    spar_side_stream
        side_streams[2]; /* [1] while the caller's stream is captured: then the siding is, too */
    spar_schedule push, pull;
} spar_pipeline;

/* Takes the memory, at most `most` bytes, for world >= 2; here and below the device is entered. On failure nothing
 * is kept. */
spar_status spar_pipeline_open(spar_pipeline *pipeline, int world, int rank, int64_t most);

/* One exchange, into the call's stream, which is captured or not. */
spar_status spar_pipeline_run(spar_pipeline *pipeline, const spar_call *call, struct ncclComm *comm,
                              int captured);

/* A byte to and from every peer, in the siding: connections are made, which may wait for the peers. */
spar_status spar_pipeline_connect(spar_pipeline *pipeline, struct ncclComm *comm);

void spar_pipeline_close(spar_pipeline *pipeline);

/* Device memory in which pieces wait for the wire: what open groups may have of it, and have. */
void spar_staging_stats(int64_t *cap, int64_t *allocated);

#endif
