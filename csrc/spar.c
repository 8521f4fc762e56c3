/* SPDX-License-Identifier: Apache-2.0 */
#include "spar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Writes a stage's status into the setup result; a status that ends the wait is returned on this rank
 * only. */
static spar_status report(spar_status status, spar_setup_result *result)
{
    const spar_ranks *ranks = spar_last_error_ranks();
    result->failed = status != SPAR_OK;
    result->cause = status != SPAR_OK && ranks->count ? 1 + ranks->rank[0] : 0;
    snprintf(result->reason, sizeof result->reason, "%s", status == SPAR_OK ? "" : spar_last_error());
    return spar_ends_wait(status) ? status : SPAR_OK;
}

spar_status spar_comm_open(const spar_transport *transport, const spar_peer_info *info, int world, int rank,
                           int local_ranks, const spar_native *native, spar_comm **comm,
                           spar_setup_result *result)
{
    if (world < 1 || rank < 0 || rank >= world)
        return spar_fail(SPAR_INVALID, "a comm for rank %d of %d", rank, world);
    spar_comm *made = calloc(1, sizeof *made);
    spar_peer_info *copy = malloc((size_t)world * sizeof *copy);
    int *hosts = calloc((size_t)world, sizeof *hosts);
    unsigned char *far = calloc((size_t)world, 1);
    if (!made || !copy || !hosts || !far) {
        free(made);
        free(copy);
        free(hosts);
        free(far);
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", world);
    }
    memcpy(copy, info, (size_t)world * sizeof *copy);
    *made = (spar_comm){.transport = transport,
                        .world = world,
                        .rank = rank,
                        .local_ranks = local_ranks,
                        .info = copy,
                        .hosts = hosts,
                        .far = far};
    spar_hosts(copy, world, hosts);
    for (int other = 0; other < world; other++)
        made->nfar += far[other] = hosts[other] != hosts[rank];
    if (native)
        made->native = *native;
    memset(result, 0, sizeof *result);
    *comm = made;
    return report(transport->setup ? transport->setup(made, result) : SPAR_OK, result);
}

spar_status spar_setup_failure(const spar_setup_result *results, int world)
{
    const spar_setup_result *first = NULL; /* a rank's own failure, rather than what others saw of it */
    for (const spar_setup_result *r = results; r < results + world; r++)
        if (r->failed && (!first || (first->cause && !r->cause)))
            first = r;
    if (!first)
        return SPAR_OK;
    int rank = (int)(first - results), length = (int)strnlen(first->reason, sizeof first->reason);
    if (length && first->cause > 0 && first->cause <= world)
        return spar_fail_rank(SPAR_TRANSPORT, first->cause - 1, "%.*s", length, first->reason);
    return spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d: %.*s", rank, length, first->reason);
}

spar_status spar_comm_connect(spar_comm *comm, const spar_setup_result *results,
                              const spar_deadline *deadline, spar_setup_result *result)
{
    memset(result, 0, sizeof *result);
    spar_status status = spar_setup_failure(results, comm->world);
    if (status == SPAR_OK && comm->transport->connect)
        status = comm->transport->connect(comm, results, deadline);
    return report(status, result);
}

spar_status spar_comm_run(spar_comm *comm, spar_call *call)
{
    if (call->plan && (call->plan->world != comm->world || call->plan->rank != comm->rank))
        return spar_fail(SPAR_INVALID, "a plan for rank %d of %d was given to rank %d of %d",
                         call->plan->rank, call->plan->world, comm->rank, comm->world);
    int64_t begin = spar_now_ns();
    spar_status status = comm->transport->run(comm, call);
    if (status == SPAR_OK && call->plan && call->outputs)
        spar_traffic_count(comm->transport, call->plan->sent, (uint64_t)(spar_now_ns() - begin));
    return status;
}

void spar_comm_close(spar_comm *comm)
{
    if (comm->transport->close)
        comm->transport->close(comm);
    free(comm->info);
    free(comm->hosts);
    free(comm->far);
    free(comm);
}
