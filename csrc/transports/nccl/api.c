/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/nccl/api.h"

#include "base/dynlib.h"

#include <string.h>

spar_nccl_table spar_nccl;

static spar_status find_functions(void *library)
{
#define FIND(name, result, parameters)                                                                       \
    SPAR_TRY(spar_dynlib_function(library, "libnccl", "nccl" #name, &spar_nccl.name));
    SPAR_NCCL_FUNCTIONS(FIND)
#undef FIND
    if (spar_nccl.GetVersion(&spar_nccl.version) != SPAR_NCCL_SUCCESS)
        return spar_fail(SPAR_TRANSPORT, "ncclGetVersion failed");
    if (spar_nccl.version < SPAR_NCCL_LEAST)
        return spar_fail(SPAR_TRANSPORT, "libnccl is NCCL %d.%d.%d; expected 2.21.5 or newer",
                         spar_nccl.version / 10000, spar_nccl.version / 100 % 100, spar_nccl.version % 100);
    spar_dynlib_function(library, "libnccl", "ncclAllGather", &spar_nccl.AllGather); /* else it stays NULL */
    if (spar_nccl.version < SPAR_NCCL_REVOKE)
        return SPAR_OK;
    return spar_dynlib_function(library, "libnccl", "ncclCommRevoke", &spar_nccl.CommRevoke);
}

spar_status spar_nccl_open(void)
{
    static const char *const names[] = {"libnccl.so.2", NULL};
    static spar_dynlib_once once = SPAR_DYNLIB_ONCE("libnccl", names, find_functions);
    return spar_dynlib_open_once(&once);
}

spar_status spar_nccl_check(spar_nccl_result result, const char *what)
{
    if (result == SPAR_NCCL_SUCCESS || result == SPAR_NCCL_IN_PROGRESS)
        return SPAR_OK;
    const char *last = spar_nccl.GetLastError(NULL); /* the process's, since the communicator may be gone */
    return spar_fail(SPAR_TRANSPORT, "%.*s: %s%s%s", (int)strcspn(what, "("), what,
                     spar_nccl.GetErrorString(result), last && *last ? ": " : "", last && *last ? last : "");
}

spar_status spar_nccl_await(spar_nccl_result result, struct ncclComm *comm, const spar_deadline *deadline,
                            const char *what)
{
    for (int pauses = 0; result == SPAR_NCCL_IN_PROGRESS;) {
        if (spar_deadline_passed(deadline))
            return spar_fail(SPAR_TIMEOUT, "NCCL did not enqueue the call in time");
        SPAR_TRY(spar_deadline_pause(deadline, &pauses, "while NCCL enqueued a call"));
        SPAR_NCCL_TRY(CommGetAsyncError(comm, &result));
    }
    return spar_nccl_check(result, what);
}

spar_status spar_nccl_check_async(struct ncclComm *comm, const char *what)
{
    spar_nccl_result error = SPAR_NCCL_SUCCESS;
    SPAR_NCCL_TRY(CommGetAsyncError(comm, &error));
    return spar_nccl_check(error, what);
}
