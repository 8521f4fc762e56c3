/* SPDX-License-Identifier: Apache-2.0 */
/* The NCCL functions that spar calls, declared here: the build needs neither NCCL nor its headers. The
 * library is opened once, at run time. Tests compare the declarations with nccl.h. */
#ifndef SPAR_NCCL_API_H
#define SPAR_NCCL_API_H

#include "base/deadline.h"

#include <stddef.h>

/* NCCL's and CUDA's own tags, so that the types are compatible. */
struct ncclComm;
struct CUstream_st;

typedef unsigned spar_nccl_result; /* ncclResult_t */

enum {
    SPAR_NCCL_SUCCESS = 0,
    SPAR_NCCL_IN_PROGRESS = 7,
    SPAR_NCCL_UINT8 = 1,      /* ncclUint8 */
    SPAR_NCCL_ID_BYTES = 128, /* NCCL_UNIQUE_ID_BYTES */
    SPAR_NCCL_LEAST = 22105,  /* 2.21.5, that of torch 2.6 */
    SPAR_NCCL_REVOKE = 22807, /* the first with ncclCommRevoke */
};

typedef struct {
    char internal[SPAR_NCCL_ID_BYTES];
} spar_nccl_id; /* ncclUniqueId */

/* name, result, parameters */
#define SPAR_NCCL_FUNCTIONS(F)                                                                               \
    F(GetVersion, spar_nccl_result, (int *version))                                                          \
    F(GetErrorString, const char *, (spar_nccl_result result))                                               \
    F(GetLastError, const char *, (struct ncclComm * comm))                                                  \
    F(GetUniqueId, spar_nccl_result, (spar_nccl_id * id))                                                    \
    F(CommInitRank, spar_nccl_result, (struct ncclComm * *comm, int world, spar_nccl_id id, int rank))       \
    F(CommCount, spar_nccl_result, (struct ncclComm *const comm, int *world))                                \
    F(CommUserRank, spar_nccl_result, (struct ncclComm *const comm, int *rank))                              \
    F(CommGetAsyncError, spar_nccl_result, (struct ncclComm * comm, spar_nccl_result * error))               \
    F(GroupStart, spar_nccl_result, (void))                                                                  \
    F(GroupEnd, spar_nccl_result, (void))                                                                    \
    F(Send, spar_nccl_result,                                                                                \
      (const void *from, size_t count, unsigned dtype, int peer, struct ncclComm *comm,                      \
       struct CUstream_st *stream))                                                                          \
    F(Recv, spar_nccl_result,                                                                                \
      (void *to, size_t count, unsigned dtype, int peer, struct ncclComm *comm, struct CUstream_st *stream)) \
    F(CommAbort, spar_nccl_result, (struct ncclComm * comm))

/* The same, where they are: NULL elsewhere. A library of the bring-up has no ncclAllGather. */
#define SPAR_NCCL_OPTIONAL_FUNCTIONS(F)                                                                      \
    F(AllGather, spar_nccl_result,                                                                           \
      (const void *from, void *to, size_t count, unsigned dtype, struct ncclComm *comm,                      \
       struct CUstream_st *stream))                                                                          \
    F(CommRevoke, spar_nccl_result, (struct ncclComm * comm, int flags)) /* 2.28.7 */

typedef struct {
#define SPAR_NCCL_FIELD(name, result, parameters) result(*name) parameters;
    SPAR_NCCL_FUNCTIONS(SPAR_NCCL_FIELD)
    SPAR_NCCL_OPTIONAL_FUNCTIONS(SPAR_NCCL_FIELD)
#undef SPAR_NCCL_FIELD
    int version; /* as 22105 is 2.21.5 */
} spar_nccl_table;

/* Valid from the first spar_nccl_open that succeeded. */
extern spar_nccl_table spar_nccl;

/* Opens libnccl.so.2: the one that torch's CUDA build has mapped, else the one that Python found.
 * SPAR_TRANSPORT, with the reason, if that fails. Cheap from the second call on. */
spar_status spar_nccl_open(void);

/* SPAR_OK, also for ncclInProgress; else SPAR_TRANSPORT with NCCL's text. */
spar_status spar_nccl_check(spar_nccl_result result, const char *what);

/* Checks for an error that the communicator reports after a call has returned. */
spar_status spar_nccl_check_async(struct ncclComm *comm, const char *what);

/* Waits for what returned `result`, which communicators that do not block return before it is done. */
spar_status spar_nccl_await(spar_nccl_result result, struct ncclComm *comm, const spar_deadline *deadline,
                            const char *what);

#define SPAR_NCCL_TRY(call) SPAR_TRY(spar_nccl_check(spar_nccl.call, "nccl" #call))

#endif
