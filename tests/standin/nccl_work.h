/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's communicators, and the work of their groups in streams. */
#ifndef NCCL_WORK_H
#define NCCL_WORK_H

#include "transports/nccl/api.h"

#include <stdint.h>

enum { SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { PIPE = 1 << 16, MOST_RANKS = 16 };
static const uint64_t ALIVE = 0x616c697665, FREED = 0x6672656564;

/* Bytes in flight from one rank to another. A message's length precedes it. */
typedef struct {
    _Alignas(64) uint64_t written, read; /* atomic; total bytes */
    char bytes[PIPE];
} pipe_memory;

typedef struct {
    uint32_t attached; /* atomic: number of ranks */
    pipe_memory pipes[];
} shared_memory;

struct ncclComm {
    uint64_t state; /* atomic: ALIVE or FREED */
    int world, rank;
    shared_memory *shared;
    uint32_t aborted, revoked; /* atomic flags */
    uint32_t running;          /* atomic: the number of groups launched and not ended */
    uint32_t pending;          /* atomic: calls that returned ncclInProgress, and are not over */
    uint32_t captured;         /* atomic: the number of groups in graphs that exist */
    uint32_t error;            /* atomic: an asynchronous error */
    uint64_t given, over;      /* groups launched and ended; they run in the order of their launch */
};

typedef struct {
    struct ncclComm *comm;
    struct CUstream_st *stream;
    char *bytes;
    int sends, peer;
    uint64_t length, head, at; /* of the message; bytes moved of its length, and of the message */
} operation;

extern char last_error[256];

/* Ends the process, with a backtrace. */
void crash(const char *function, const char *what);

/* Ends the process if the communicator was freed. */
void use(const struct ncclComm *comm, const char *function);

/* Sleeps, after each of the polls in a row for longer, up to a millisecond: the ranks share few cores. */
void pause_shortly(int polls);

/* Returns a function of the stand-in libcuda. */
void *cuda(const char *name);

/* The value of an environment variable, or NULL: standin_getenv of the stand-in libcuda. */
const char *setting(const char *name);

/* Launches the operations that are the communicator's, as one group, in their stream. */
spar_nccl_result launch(struct ncclComm *comm, const operation *all, int total);

#endif
