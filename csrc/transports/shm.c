/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory: each rank pushes its regions straight into its near peers' outputs, which are blocks of
 * their arenas. One read and one write per byte, the permutation included; no staging.
 *
 * The transport tcp is the same for a group with far ranks: what goes to those travels with the call. */
#include "transports/parcels.h"
#include "transports/rendezvous.h"
#include "devices/execute.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void probe(spar_peer_info *info)
{
    if (spar_peers_listen(&info->endpoint, &info->secret) != SPAR_OK)
        snprintf(info->no_shm, sizeof info->no_shm, "%s", spar_last_error());
}

static int serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    if (!spar_rendezvous_possible(info, world, first_rank, reason, size))
        return 0;
    if (world == 1) /* asked before the peers are known */
        snprintf(reason, size, "ranks of one host share its memory");
    else
        snprintf(reason, size, "all %d ranks share this host's memory", world);
    return 1;
}

static spar_status tcp_setup(spar_comm *comm, spar_setup_result *result)
{
    for (int rank = 0; rank < comm->world && comm->nfar == 0; rank++) {
        comm->hosts[rank] = rank;
        comm->far[rank] = rank != comm->rank;
    }
    comm->nfar = comm->nfar ? comm->nfar : comm->world - 1;
    SPAR_TRY(spar_parcels_choose_relays(comm));
    return spar_rendezvous_setup(comm, result);
}

static void tcp_close(spar_comm *comm)
{
    spar_rendezvous_close(comm);
    free(comm->state);
}

/* The addresses of a rank's outputs. Offsets come from another process, so they are checked against its
 * arena. */
static spar_status find_outputs(const spar_comm *comm, const spar_plan *plan, const spar_call_header *all,
                                int rank, void **outputs)
{
    int64_t length;
    char *base = spar_group_arena(comm->group, rank, &length);
    for (int t = 0; t < plan->ntensors; t++) {
        int64_t offset = all[rank].offsets[t], bytes = plan->tensors[t].rank_bytes[rank];
        if (offset < 0 || bytes > length || offset > length - bytes)
            return spar_fail_rank(
                SPAR_TRANSPORT, rank,
                "rank %d published an output outside its arena: %lld bytes at %lld, length %lld", rank,
                (long long)bytes, (long long)offset, (long long)length);
        outputs[t] = base + offset;
    }
    return SPAR_OK;
}

/* The call headers of all ranks, and the addresses of their outputs. */
typedef struct {
    spar_call_header *headers;
    void *(*outputs)[SPAR_GROUP_TENSORS];
    void *const **rows; /* the rows of `outputs` */
    const char **parts; /* the buffers that a sum adds */
    spar_parcel *parcels;
} all_headers;

enum {
    EACH = sizeof(spar_call_header) + SPAR_GROUP_TENSORS * sizeof(void *) + 2 * sizeof(void *) +
    sizeof(spar_parcel)
};

static all_headers split_room(char *room, size_t world)
{
    all_headers all = {.headers = (void *)room};
    all.outputs = (void *)(room += world * sizeof *all.headers);
    all.rows = (void *)(room += world * sizeof *all.outputs);
    all.parts = (void *)(room += world * sizeof *all.rows);
    all.parcels = (void *)(room + world * sizeof *all.parts);
    return all;
}

/* Where the sums of a call go, and whether this rank's own part stays in its input. */
typedef struct {
    spar_memory *blocks[SPAR_GROUP_TENSORS]; /* NULL: to memory of the caller */
    void *to[SPAR_GROUP_TENSORS];
    int own_stays;
} sums;

static spar_status push(const spar_comm *comm, const spar_call *call, const all_headers *all, int own_stays)
{
    for (int rank = 0; rank < comm->world; rank++) { /* before any peer is written to */
        if (spar_is_far(comm, rank)) {
            all->rows[rank] = NULL;
            continue;
        }
        SPAR_TRY(find_outputs(comm, call->plan, all->headers, rank, all->outputs[rank]));
        all->rows[rank] = all->outputs[rank];
    }
    if (own_stays)
        all->rows[comm->rank] = NULL;
    spar_push(call->plan, call->inputs, call->rows, all->rows, &call->scale);
    return SPAR_OK;
}

/* The block of an output that the caller wants in memory of its own, if that lies in the arena; else NULL. */
static spar_memory *target_block(const spar_call *call, int t)
{
    if (call->targets)
        call->outputs[t] = call->targets[t];
    return call->targets ? spar_memory_at(call->targets[t], call->plan->tensors[t].out_bytes) : NULL;
}

/* Whether each of this rank's own blocks is one run of bytes. */
static int has_long_runs(const spar_plan *plan)
{
    const spar_range *own = &plan->push[plan->rank];
    for (int64_t i = own->first; i < own->first + own->count; i++)
        if (plan->blocks[i].ndim > 0)
            return 0;
    return 1;
}

/* A sum adds rows, one from each rank. */
static spar_status check_sum(const spar_call *call)
{
    const spar_plan *plan = call->plan;
    for (int t = 0; t < plan->ntensors && call->sum; t++)
        if (plan->tensors[t].in_dim != 0 || plan->tensors[t].out[0] != plan->world)
            return spar_fail(SPAR_INVALID, "a sum over %lld rows; expected one of each of %d ranks",
                             (long long)plan->tensors[t].out[0], plan->world);
    return SPAR_OK;
}

/* Chooses the memory of a sum: the caller's, or a block. */
static spar_status place_sum(const spar_call *call, int t, sums *results)
{
    if (call->targets) {
        results->to[t] = call->targets[t];
        return SPAR_OK;
    }
    SPAR_TRY(spar_arena_take(call->plan->tensors[t].out_bytes / call->plan->world, &results->blocks[t]));
    results->to[t] = spar_memory_address(results->blocks[t]);
    return SPAR_OK;
}

/* Takes all steps that can fail on this rank alone. */
static spar_status prepare(const spar_call *call, spar_call_header *header, sums *results)
{
    if (call->plan->ntensors > SPAR_GROUP_TENSORS)
        return spar_fail(SPAR_INVALID, "%d tensors; expected at most %d", call->plan->ntensors,
                         SPAR_GROUP_TENSORS);
    SPAR_TRY(check_sum(call));
    for (int t = 0; t < call->plan->ntensors; t++) {
        if (call->sum || !target_block(call, t)) {
            SPAR_TRY(spar_arena_take(call->plan->tensors[t].out_bytes, &call->blocks[t]));
            call->outputs[t] = spar_memory_address(call->blocks[t]);
        }
        header->offsets[t] = (char *)call->outputs[t] - spar_arena_base();
        if (call->sum)
            SPAR_TRY(place_sum(call, t, results));
    }
    results->own_stays = call->sum && has_long_runs(call->plan);
    header->signature = spar_plan_signature(call->plan, call->text) ^ (uint64_t)call->number;
    header->forward = call->forward;
    header->op = call->op;
    return SPAR_OK;
}

static void drop_blocks(spar_group *group, const spar_call *call, int published, uint32_t n)
{
    for (int t = 0; call->plan && t < call->plan->ntensors; t++) {
        spar_memory *block = call->blocks[t] ? call->blocks[t] : target_block(call, t);
        if (block && published) /* a slow peer may still push into it */
            spar_group_quarantine(group, block, n);
        if (call->blocks[t])
            spar_memory_free(block);
        call->blocks[t] = NULL;
    }
}

/* Adds the parts of all ranks, and replaces them by their sums. */
static void sum_parts(const spar_call *call, const sums *results, const char **parts)
{
    const spar_plan *plan = call->plan;
    const spar_range *own = &plan->push[plan->rank];
    for (int t = 0; t < plan->ntensors && !results->own_stays; t++) {
        int64_t bytes = plan->tensors[t].out_bytes / plan->world;
        for (int rank = 0; rank < plan->world; rank++)
            parts[rank] = (const char *)call->outputs[t] + rank * bytes;
        spar_sum(call->sum, results->to[t], parts, plan->world, bytes);
    }
    for (int64_t i = own->first; i < own->first + own->count && results->own_stays; i++) {
        const spar_block *block = &plan->blocks[i];
        int64_t bytes = plan->tensors[block->tensor].out_bytes / plan->world;
        int64_t at = block->dst - plan->rank * bytes;
        for (int rank = 0; rank < plan->world; rank++)
            parts[rank] = (const char *)call->outputs[block->tensor] + rank * bytes + at;
        parts[plan->rank] = (const char *)call->inputs[block->tensor] + block->src;
        spar_sum(call->sum, (char *)results->to[block->tensor] + at, parts, plan->world, block->run);
    }
    for (int t = 0; t < plan->ntensors; t++) {
        spar_memory_free(call->blocks[t]);
        call->blocks[t] = results->blocks[t];
        call->outputs[t] = results->to[t];
    }
}

static void drop_sums(sums *results)
{
    for (int t = 0; t < SPAR_GROUP_TENSORS; t++)
        if (results->blocks[t])
            spar_memory_free(results->blocks[t]);
}

static spar_status exchange(spar_comm *comm, spar_call *call, void *room, uint32_t n)
{
    const all_headers all = split_room(room, (size_t)comm->world);
    spar_group *group = comm->group;
    spar_call_header header = {0};
    sums results = {0};
    spar_parcels far = {.comm = comm, .call = call, .parcels = all.parcels, .outputs = all.rows};
    spar_status status = prepare(call, &header, &results);
    if (status == SPAR_OK && comm->nfar)
        status = spar_parcels_pack(&far);
    if (status != SPAR_OK) {
        spar_group_fail(group, status, spar_last_error());
        drop_blocks(group, call, 0, n);
        drop_sums(&results);
        return status;
    }
    if (comm->nfar)
        spar_group_carry(group, all.parcels);
    status = spar_group_publish(group, &header, spar_call_describe, call, all.headers, &call->deadline);
    if (status == SPAR_OK)
        status = push(comm, call, &all, results.own_stays);
    if (status == SPAR_OK)
        status = spar_group_transfer(group, spar_parcels_unpack, &far, &call->deadline);
    if (status == SPAR_OK)
        status = spar_group_finish(group, &call->deadline);
    else if (status == SPAR_TRANSPORT)
        spar_group_break(group, spar_last_error());
    if (status != SPAR_OK) {
        drop_blocks(group, call, 1, n);
        drop_sums(&results);
    } else if (call->sum) {
        sum_parts(call, &results, all.parts);
    }
    spar_parcels_free(&far);
    return status;
}

static spar_status run(spar_comm *comm, spar_call *call)
{
    return spar_rendezvous_run(comm, call, exchange, EACH);
}

const spar_transport spar_transport_shm = {
    .name = "shm",
    .device = "cpu",
    .probe = probe,
    .serves = serves,
    .setup = spar_rendezvous_setup,
    .connect = spar_rendezvous_connect,
    .run = run,
    .close = spar_rendezvous_close,
};

const spar_transport spar_transport_tcp = {
    .name = "tcp",
    .device = "cpu",
    .serves = spar_tcp_serves,
    .setup = tcp_setup,
    .connect = spar_rendezvous_connect,
    .run = run,
    .close = tcp_close,
};
