/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/nccl/api.h"

#include "base/fork.h"
#include "base/dynlib.h"

#include <pthread.h>
#include <string.h>

spar_nccl_table spar_nccl;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int opened;

static spar_status open_locked(void)
{
    static const char *const names[] = {"libnccl.so.2", NULL};
    void *library;
    spar_nccl_table table;
    SPAR_TRY(spar_dynlib_open("libnccl", names, &library));
#define FIND(name, result, parameters)                                                                       \
    SPAR_TRY(spar_dynlib_function(library, "libnccl", "nccl" #name, &table.name));
    SPAR_NCCL_FUNCTIONS(FIND)
#undef FIND
    if (table.GetVersion(&table.version) != SPAR_NCCL_SUCCESS)
        return spar_fail(SPAR_TRANSPORT, "ncclGetVersion failed");
    if (table.version < SPAR_NCCL_LEAST)
        return spar_fail(SPAR_TRANSPORT, "libnccl is NCCL %d.%d.%d; expected 2.21.5 or newer",
                         table.version / 10000, table.version / 100 % 100, table.version % 100);
    table.CommRevoke = NULL;
    if (spar_dynlib_function(library, "libnccl", "ncclAllGather", &table.AllGather) != SPAR_OK)
        table.AllGather = NULL;
    if (table.version >= SPAR_NCCL_REVOKE)
        SPAR_TRY(spar_dynlib_function(library, "libnccl", "ncclCommRevoke", &table.CommRevoke));
    spar_nccl = table;
    __atomic_store_n(&opened, 1, __ATOMIC_RELEASE);
    return SPAR_OK;
}

spar_status spar_nccl_open(void)
{
    if (__atomic_load_n(&opened, __ATOMIC_ACQUIRE))
        return SPAR_OK;
    pthread_mutex_lock(&lock);
    spar_status status = opened ? SPAR_OK : open_locked();
    pthread_mutex_unlock(&lock);
    return status;
}

/* The lock is not held across a fork: the library may fork while it is loaded. */
void spar_nccl_fork(spar_fork_stage stage)
{
    if (stage == SPAR_FORK_CHILD)
        pthread_mutex_init(&lock, NULL);
}

spar_status spar_nccl_check(spar_nccl_result result, const char *what)
{
    if (result == SPAR_NCCL_SUCCESS || result == SPAR_NCCL_IN_PROGRESS)
        return SPAR_OK;
    const char *last = spar_nccl.GetLastError(NULL); /* the process's, since the communicator may be gone */
    return spar_fail(SPAR_TRANSPORT, "%.*s: %s%s%s", (int)strcspn(what, "("), what,
                     spar_nccl.GetErrorString(result), last && *last ? ": " : "", last && *last ? last : "");
}

spar_status spar_nccl_check_async(struct ncclComm *comm, const char *what)
{
    spar_nccl_result error = SPAR_NCCL_SUCCESS;
    SPAR_NCCL_TRY(CommGetAsyncError(comm, &error));
    return spar_nccl_check(error, what);
}
