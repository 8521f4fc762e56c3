#include "spar.h"

#include <stdlib.h>
#include <string.h>

spar_status spar_comm_open(const spar_facts *facts, int world, int rank, const char *device,
                           spar_comm **comm, void *blob)
{
    spar_choice choice;
    SPAR_TRY(spar_choose(facts, world, device, &choice));
    spar_comm *made = calloc(1, sizeof *made);
    if (!made)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", world);
    made->transport = choice.transport;
    made->world = world;
    made->rank = rank;
    memset(blob, 0, SPAR_BLOB_SIZE);
    spar_status status =
        made->transport->setup ? made->transport->setup(made, &facts[rank], blob) : SPAR_OK;
    if (status != SPAR_OK)
        free(made);
    else
        *comm = made;
    return status;
}

spar_status spar_comm_connect(spar_comm *comm, const void *blobs)
{
    return comm->transport->connect ? comm->transport->connect(comm, blobs) : SPAR_OK;
}

spar_status spar_comm_run(spar_comm *comm, const spar_call *call)
{
    if (!comm->transport->run)
        return spar_fail(SPAR_TRANSPORT, "the %s transport moves no bytes in C",
                         comm->transport->name);
    if (call->plan->world != comm->world || call->plan->rank != comm->rank)
        return spar_fail(SPAR_INVALID, "a plan for rank %d of %d was given to rank %d of %d",
                         call->plan->rank, call->plan->world, comm->rank, comm->world);
    return comm->transport->run(comm, call);
}

void spar_comm_close(spar_comm *comm)
{
    if (comm->transport->close)
        comm->transport->close(comm);
    free(comm);
}
