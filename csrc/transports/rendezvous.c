/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/rendezvous.h"

#include "base/env.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const int64_t LONGEST_NS = 30000000000;

int spar_rendezvous_possible(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    for (int rank = 0; rank < world; rank++) {
        if (info[rank].endpoint.pid <= 0) {
            snprintf(reason, size, "rank %d: %.60s", first_rank + rank, info[rank].no_shm);
            return 0;
        }
        for (int other = 0; other < rank; other++) {
            int same_process = info[other].endpoint.nonce == info[rank].endpoint.nonce;
            if (same_process || memcmp(info[other].host, info[rank].host, sizeof info->host) != 0) {
                snprintf(reason, size, "ranks %d and %d are %s", first_rank + other, first_rank + rank,
                         same_process ? "one process" : "on different hosts");
                return 0;
            }
        }
    }
    return 1;
}

spar_status spar_rendezvous_begin(const spar_comm *comm, int64_t room, spar_group **group, int64_t *offset)
{
    const spar_peer_info *info = comm->info;
    spar_env_value arena_max, spin;
    SPAR_TRY(spar_env_field("arena_max", &arena_max));
    SPAR_TRY(spar_env_field("spin_us", &spin));
    SPAR_TRY(spar_arena_open(arena_max.count, comm->local_ranks));
    SPAR_TRY(spar_group_open(comm->world, comm->rank, room, group, offset));
    if (spin.holds)
        spar_group_spin(*group, spin.count * 1000);
    for (int rank = 0; rank < comm->world; rank++) {
        spar_status status = rank == comm->rank || spar_is_far(comm, rank)
                                 ? SPAR_OK
                                 : spar_group_expect(*group, rank, &info[rank].endpoint, &info[rank].secret);
        if (status != SPAR_OK) {
            spar_group_close(*group);
            *group = NULL;
            return status;
        }
    }
    return SPAR_OK;
}

static spar_status connect_far(const spar_comm *comm, spar_group *group, const spar_setup_result *results,
                               const spar_deadline *deadline)
{
    spar_tcp_endpoint *endpoints = calloc((size_t)comm->world, sizeof *endpoints);
    int64_t *pids = calloc((size_t)comm->world, sizeof *pids);
    int (*sockets)[SPAR_TCP_CHANNELS] = calloc((size_t)comm->world, sizeof *sockets);
    spar_status status = SPAR_NO_MEMORY;
    if (!endpoints || !pids || !sockets)
        spar_fail(status, "no memory for %d peers", comm->world);
    else
        status = SPAR_OK;
    for (int rank = 0; rank < comm->world && status == SPAR_OK; rank++) {
        memcpy(&endpoints[rank], results[rank].token, sizeof *endpoints);
        pids[rank] = comm->info[rank].endpoint.pid;
    }
    if (status == SPAR_OK)
        status = spar_tcp_connect(comm->tcp, comm->far, endpoints, deadline, sockets);
    if (status == SPAR_OK)
        status = spar_group_link(group, comm->far, pids, sockets);
    free(endpoints);
    free(pids);
    free(sockets);
    return status;
}

static spar_status await_peer(const spar_comm *comm, int rank, const spar_deadline *deadline,
                              spar_peer **peer)
{
    const struct timespec moment = {0, 500000};
    int64_t begin = spar_now_ns();
    for (int polls = 1;; polls++) {
        SPAR_TRY(spar_peers_poll(&comm->info[rank].endpoint, peer));
        if (*peer)
            return SPAR_OK;
        if (spar_deadline_passed(deadline))
            return spar_fail_rank(SPAR_TIMEOUT, rank, "rank %d did not answer", rank);
        if (spar_now_ns() - begin >
            LONGEST_NS) /* every process is alive: fall back rather than wait longer */
            return spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d did not answer for 30 s", rank);
        if (polls % 100 == 0)
            SPAR_TRY(spar_deadline_poll(deadline, "during the rendezvous"));
        nanosleep(&moment, NULL);
    }
}

/* Keeps the first failure, which does not end the connecting, because peers wait for this rank. Returns
 * another status than SPAR_OK if the wait must end. */
static spar_status keep_first(spar_failure *first, spar_status status)
{
    if (spar_ends_wait(status))
        return status;
    if (first->status == SPAR_OK)
        spar_failure_keep(first, status);
    return SPAR_OK;
}

/* Connects the near peers one after another, then all far ranks at once. */
static spar_status connect_peers(const spar_comm *comm, spar_group *group, const spar_setup_result *results,
                                 const spar_deadline *deadline, spar_peer **peers)
{
    spar_failure first = {.status = SPAR_OK};
    for (int rank = 0; rank < comm->world; rank++)
        if (rank != comm->rank && !spar_is_far(comm, rank))
            SPAR_TRY(keep_first(&first, await_peer(comm, rank, deadline, &peers[rank])));
    if (comm->nfar)
        SPAR_TRY(keep_first(&first, connect_far(comm, group, results, deadline)));
    return spar_failure_raise(&first);
}

spar_status spar_rendezvous_end(const spar_comm *comm, spar_group *group, const spar_setup_result *results,
                                const spar_deadline *deadline)
{
    spar_peer **peers = calloc((size_t)comm->world, sizeof *peers);
    int64_t *offsets = calloc((size_t)comm->world, sizeof *offsets);
    spar_status status = !peers || !offsets ? spar_fail(SPAR_NO_MEMORY, "no memory for %d peers", comm->world)
                                            : connect_peers(comm, group, results, deadline, peers);
    for (int rank = 0; offsets && rank < comm->world; rank++)
        offsets[rank] = results[rank].offset;
    if (status == SPAR_OK)
        status = spar_group_attach(group, peers, offsets);
    else
        for (int rank = 0; peers && rank < comm->world; rank++)
            if (peers[rank]) {
                spar_peers_unmap(peers[rank]);
                spar_peers_release(peers[rank]);
            }
    spar_group_end_set_up(group);
    free(peers);
    free(offsets);
    return status;
}

/* ---- slots ---- */

spar_status spar_rendezvous_setup(spar_comm *comm, spar_setup_result *result)
{
    spar_tcp_endpoint own;
    SPAR_TRY(spar_rendezvous_begin(comm, 0, &comm->group, &result->offset));
    if (!comm->nfar)
        return SPAR_OK;
    SPAR_TRY(spar_tcp_listen(comm->world, comm->rank, &own, &comm->tcp));
    memcpy(result->token, &own, sizeof own);
    return SPAR_OK;
}

spar_status spar_rendezvous_connect(spar_comm *comm, const spar_setup_result *results,
                                    const spar_deadline *deadline)
{
    spar_status status = spar_rendezvous_end(comm, comm->group, results, deadline);
    spar_tcp_end(comm->tcp);
    comm->tcp = NULL;
    return status;
}

void spar_rendezvous_close(spar_comm *comm)
{
    spar_tcp_end(comm->tcp);
    comm->tcp = NULL;
    spar_group_close(comm->group);
    comm->group = NULL;
}

/* ---- a call ---- */

static spar_status run_begun(spar_comm *comm, spar_call *call, spar_turn turn, void *room, uint32_t n)
{
    if (call->failed == SPAR_OK)
        return turn(comm, call, room, n);
    spar_group_fail(comm->group, call->failed, call->why);
    return spar_fail(call->failed, "%s", call->why);
}

static spar_status run_locked(spar_comm *comm, spar_call *call, spar_turn turn, void *room)
{
    uint32_t n;
    if (call->failed == SPAR_INTERRUPTED) {
        spar_group_break(comm->group, call->why);
        return call->failed;
    }
    SPAR_TRY(spar_group_begin(comm->group, &call->deadline, &n));
    uint32_t begun = spar_last_call_begin(call->group, call->op, n);
    spar_status status = run_begun(comm, call, turn, room, n);
    if (status == SPAR_OK && !call->outputs)
        spar_group_go_on(comm->group, begun);
    else
        spar_last_call_end(begun, status == SPAR_TIMEOUT || status == SPAR_PEER_LOST ||
                                      status == SPAR_BROKEN || status == SPAR_INTERRUPTED);
    return status;
}

spar_status spar_rendezvous_run(spar_comm *comm, spar_call *call, spar_turn turn, size_t each)
{
    _Alignas(16) char few[4096];
    size_t size = (size_t)comm->world * each;
    void *room = size > sizeof few ? malloc(size) : few; /* nothing is allocated between publish and done */
    if (!room) {
        room = few;
        call->failed = SPAR_NO_MEMORY;
        call->why = "no memory for the call headers of the ranks";
    }
    spar_status status = SPAR_TRANSPORT;
    if (!spar_arena_is_own()) {
        spar_fail(status, "a forked child cannot exchange");
    } else {
        pthread_mutex_lock(spar_group_lock(comm->group));
        status = run_locked(comm, call, turn, room);
        pthread_mutex_unlock(spar_group_lock(comm->group));
    }
    if (room != few)
        free(room);
    return status;
}
