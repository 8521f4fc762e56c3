/* Send/recv pipeline: staging buffers and side streams.
 *
 * A call runs in steps (schedule.h). Contiguous regions are sent from and received into the tensors directly.
 * The rest is packed into staging buffers before a step's group of sends and receives, and unpacked after it.
 * If a call has several steps, packing and unpacking run in a side stream, concurrent with the transfers in
 * the caller's stream, and the staging memory is double-buffered. Packing scales. Only close waits for the
 * device. */
#ifndef SPAR_PIPELINE_H
#define SPAR_PIPELINE_H

#include "transports/nccl/schedule.h"
#include "devices/cuda/driver.h"
#include "transports/nccl/api.h"
#include "transports/nccl/watchdog.h"
#include "transports/transport.h"

typedef struct {
    CUstream stream;            /* where packing and unpacking run */
    CUevent to_side, to_caller; /* the stream that waits for each */
} spar_side_stream;

typedef struct {
    int world, rank;
    int64_t cap, room; /* bytes of staging memory: at most; taken */
    int64_t chunk;     /* of a peer's stream in a step, the same on all ranks */
    char *staging;     /* [2 buffers][2 directions][world - 1][spar_schedule_room(chunk)] */
    spar_side_stream
        side_streams[2]; /* [1] while the caller's stream is captured: then the side stream is, too */
    spar_schedule push, pull;
} spar_pipeline;

/* Takes the memory, at most `most` bytes, for world >= 2; here and below the device is entered. On failure
 * nothing is kept. */
spar_status spar_pipeline_open(spar_pipeline *pipeline, int world, int rank, int64_t most);

/* One exchange, into the call's stream, which is captured or not. Each step checks the watchdog first. */
spar_status spar_pipeline_run(spar_pipeline *pipeline, const spar_call *call, struct ncclComm *comm,
                              spar_watchdog *watchdog, int captured);

/* Exchanges a byte with every peer in the side stream, which makes NCCL connect; may wait for the peers. */
spar_status spar_pipeline_connect(spar_pipeline *pipeline, struct ncclComm *comm);

/* Waits for the side streams. The pipeline must have no captured calls. */
void spar_pipeline_close(spar_pipeline *pipeline);

/* Staging memory of all open groups: the most, and what is allocated. */
void spar_staging_stats(int64_t *cap, int64_t *allocated);

#endif
