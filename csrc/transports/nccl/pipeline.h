/* SPDX-License-Identifier: Apache-2.0 */
/* Send/recv pipeline: staging memory and side streams.
 *
 * A call runs in steps (schedule.h). Contiguous regions are sent from and received into the tensors directly.
 * The rest is packed into staging memory before a step's group of sends and receives, and unpacked after it.
 * If a call has several steps, packing and unpacking run in a side stream, concurrent with the transfers in
 * the caller's stream, and the staging memory is double-buffered. A large part of the rank's own is copied in
 * the side stream, too. Packing scales. Only close waits for the device.
 *
 * The caller allocates staging memory for each call, in the order of its stream, which waits for the side
 * stream before the call returns. Calls that need little use memory of the pipeline's own, one after another:
 * each waits for the one before it. A captured call does not, since its replays wait for no call. */
#ifndef SPAR_PIPELINE_H
#define SPAR_PIPELINE_H

#include "transports/cuda/watchdog.h"
#include "transports/nccl/schedule.h"
#include "devices/cuda/driver.h"
#include "transports/nccl/api.h"
#include "transports/transport.h"

typedef struct {
    CUstream stream;            /* where packing and unpacking run */
    CUevent to_side, to_caller; /* the stream that waits for each */
} spar_side_stream;

typedef struct {
    int world, rank;
    int64_t cap;  /* bytes of a call's staging memory, the same on all ranks */
    int apart;    /* the ranks are on several hosts */
    char *memory; /* [SPAR_PIPELINE_KEPT] staging memory of small calls, then bytes of the first exchange */
    spar_side_stream
        side_streams[2]; /* [1] while the caller's stream is captured: then the side stream is, too */
    spar_schedule push, pull;
    const spar_call *prepared; /* the call that has begun, the capture that it is in or 0, and its steps */
    uint64_t capture;
    int64_t steps; /* 0: NCCL gathers */
} spar_pipeline;

/* A call of one step with at most so many bytes of staging memory uses the pipeline's: for such a call, an
 * allocation takes about as long on the host as everything else in the pipeline. */
enum { SPAR_PIPELINE_KEPT = 1 << 16 };

/* Opens it with this rank's cap, for world >= 2; here and below the device is entered. After a failure it is
 * closed if it has memory. */
spar_status spar_pipeline_open(spar_pipeline *pipeline, int world, int rank, int64_t cap);

/* Begins a call, and computes the bytes of staging memory that it needs of the caller. Fails if the call's
 * stream is captured while another capture has calls that use the side stream. */
spar_status spar_pipeline_prepare(spar_pipeline *pipeline, const spar_call *call, int64_t *bytes);

/* One exchange, the call that was prepared last, into its stream, which has waited for the calls before
 * unless it is captured. The call has its staging memory. Each step checks the watchdog first: SPAR_BROKEN,
 * without a text, if that is broken. */
spar_status spar_pipeline_run(spar_pipeline *pipeline, const spar_call *call, struct ncclComm *comm,
                              spar_watchdog *watchdog);

/* Exchanges a byte with every peer in the side stream, which makes NCCL connect. Waits for the peers, while
 * the deadline is not cancelled, and in NCCL without a limit. */
spar_status spar_pipeline_connect(const spar_pipeline *pipeline, struct ncclComm *comm,
                                  const spar_deadline *deadline);

/* Waits for the side streams. */
void spar_pipeline_close(spar_pipeline *pipeline);

/* Staging memory of this process's calls: the most that one took, and the sum. */
void spar_staging_stats(int64_t *peak, int64_t *total);

#endif
