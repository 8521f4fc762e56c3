/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/parcels.h"

#include "devices/execute.h"

#include <stdlib.h>

/* In a gather, this rank sends its part to a far rank, or receives that of one. */
enum { TO = 1, FROM = 2 };

/* The block of a range that is one run of bytes, which need not be packed; or NULL. */
static const spar_block *only_run(const spar_plan *plan, const spar_range *range)
{
    const spar_block *block = &plan->blocks[range->first];
    return range->count == 1 && block->ndim == 0 ? block : NULL;
}

/* Whether each rank receives the same: on all ranks, also those that have nothing to send. */
static int is_gather(const spar_plan *plan)
{
    for (int t = 0; t < plan->ntensors; t++)
        if (plan->tensors[t].out_dim >= 0)
            return 0;
    return 1;
}

/* The rank of a host to which `rank`, of another host, sends its part of a gather. */
static int relay_of(const spar_comm *comm, int rank, int host)
{
    int index = 0, count = 0;
    for (int other = 0; other < comm->world; other++) {
        index += other < rank && comm->hosts[other] == comm->hosts[rank];
        count += comm->hosts[other] == host;
    }
    index %= count;
    for (int other = host;; other++)
        if (comm->hosts[other] == host && index-- == 0)
            return other;
}

spar_status spar_parcels_choose_relays(spar_comm *comm)
{
    unsigned char *relays = calloc((size_t)comm->world, 1);
    if (!relays)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", comm->world);
    for (int rank = 0; rank < comm->world; rank++)
        if (comm->far[rank])
            relays[rank] =
                (unsigned char)((relay_of(comm, comm->rank, comm->hosts[rank]) == rank ? TO : 0) |
                                (relay_of(comm, rank, comm->hosts[comm->rank]) == comm->rank ? FROM : 0));
    comm->state = relays;
    return SPAR_OK;
}

/* The next part of the staging memory, which grows by it; NULL: only its length is counted. */
static void *place(char *staging, int64_t *length, int64_t bytes)
{
    char *part = staging ? staging + *length : NULL;
    *length += (bytes + 63) / 64 * 64;
    return part;
}

/* Chooses where the bytes for a far rank are, and where its bytes go: in tensors, or staging memory. */
static spar_parcel place_parcel(const spar_parcels *p, int rank, char *staging, int64_t *length)
{
    const unsigned char *relays = p->comm->state;
    const spar_call *call = p->call;
    const spar_plan *plan = call->plan;
    const spar_range *push = &plan->push[rank], *pull = &plan->pull[rank];
    const spar_block *out = only_run(plan, push), *in = only_run(plan, pull);
    spar_parcel parcel = {.out_bytes = push->bytes, .in_bytes = pull->bytes};
    if (p->gathers && !(relays[rank] & TO))
        parcel.out_bytes = 0;
    if (p->gathers && !(relays[rank] & FROM))
        parcel.in_bytes = 0;
    if (out && !spar_is_listed(call->rows, out->tensor))
        parcel.out = (const char *)call->inputs[out->tensor] + out->src;
    /* the caller's own memory stays as it is if calls differ */
    if (in && call->scale.dtype == SPAR_UNSCALED && call->blocks[in->tensor])
        parcel.in = (char *)call->outputs[in->tensor] + in->dst;
    if (!parcel.out)
        parcel.out = place(staging, length, parcel.out_bytes);
    if (!parcel.in)
        parcel.in = place(staging, length, parcel.in_bytes);
    return parcel;
}

static int is_staged(const spar_parcels *p, const void *address)
{
    const char *begin = p->staging ? spar_memory_address(p->staging) : NULL;
    return begin && (const char *)address >= begin && (const char *)address < begin + p->bytes;
}

spar_status spar_parcels_pack(spar_parcels *p)
{
    p->gathers = is_gather(p->call->plan);
    for (int rank = 0; rank < p->comm->world; rank++)
        if (p->comm->far[rank])
            place_parcel(p, rank, NULL, &p->bytes);
    if (p->bytes)
        SPAR_TRY(spar_arena_take(p->bytes, &p->staging));
    char *staging = p->staging ? spar_memory_address(p->staging) : NULL;
    int64_t at = 0;
    for (int rank = 0; rank < p->comm->world; rank++) {
        if (!p->comm->far[rank])
            continue;
        p->parcels[rank] = place_parcel(p, rank, staging, &at);
        if (is_staged(p, p->parcels[rank].out))
            spar_pack(p->call->plan, rank, p->call->inputs, p->call->rows,
                      (void *)(uintptr_t)p->parcels[rank].out);
    }
    return SPAR_OK;
}

void spar_parcels_unpack(void *context, int rank)
{
    const spar_parcels *p = context;
    const spar_parcel *parcel = &p->parcels[rank];
    for (int near = 0; near < p->comm->world && parcel->in_bytes; near++) {
        int is_own = near == p->comm->rank;
        if (p->comm->far[near] || !(p->gathers || is_own) || (is_own && !is_staged(p, parcel->in)))
            continue;
        void *const *outputs = is_own ? p->call->outputs : p->outputs[near];
        spar_unpack(p->call->plan, rank, parcel->in, outputs, &p->call->scale);
    }
}

void spar_parcels_free(spar_parcels *p)
{
    if (p->staging)
        spar_memory_free(p->staging);
    p->staging = NULL;
}
