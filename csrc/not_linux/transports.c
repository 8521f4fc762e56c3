/* SPDX-License-Identifier: Apache-2.0 */
/* In place of transports/shm.c, torch.c, push/ and nccl/ on systems other than Linux: rows that say why they
 * cannot serve, to this rank and, where some ranks of a group run on Linux, to those. Torch serves, without
 * mailboxes. */
#include "transports/nccl/pipeline.h"
#include "base/fork.h"

#include <stdio.h>

static const char NO_SHM[] = "shared memory needs Linux (memfd, futex)";
static const char NO_TCP[] = "connections between ranks need Linux";
static const char NO_NCCL[] = "NCCL needs Linux";
static const char NO_PUSH[] = "memory of several GPUs needs Linux";

static void probe_shm(spar_peer_info *info)
{
    snprintf(info->no_shm, sizeof info->no_shm, "%s", NO_SHM);
}

static void probe_tcp(spar_peer_info *info)
{
    snprintf(info->no_tcp, sizeof info->no_tcp, "%s", NO_TCP);
}

static void probe_nccl(spar_peer_info *info)
{
    snprintf(info->no_nccl, sizeof info->no_nccl, "%s", NO_NCCL);
}

static void probe_push(spar_peer_info *info)
{
    snprintf(info->no_push, sizeof info->no_push, "%s", NO_PUSH);
}

static int shm_serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    (void)info;
    (void)world;
    (void)first_rank;
    snprintf(reason, size, "%s", NO_SHM);
    return 0;
}

static int nccl_serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    (void)info;
    (void)world;
    (void)first_rank;
    snprintf(reason, size, "%s", NO_NCCL);
    return 0;
}

static int push_serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    (void)info;
    (void)world;
    (void)first_rank;
    snprintf(reason, size, "%s", NO_PUSH);
    return 0;
}

static spar_status torch_setup(spar_comm *comm, spar_setup_result *result)
{
    (void)comm;
    (void)result;
    return spar_fail(SPAR_TRANSPORT, "%s", NO_SHM);
}

const spar_transport spar_transport_torch = {
    .name = "torch", .serves = spar_torch_serves, .setup = torch_setup};
const spar_transport spar_transport_shm = {
    .name = "shm", .device = "cpu", .probe = probe_shm, .serves = shm_serves};
const spar_transport spar_transport_tcp = {
    .name = "tcp", .device = "cpu", .probe = probe_tcp, .serves = spar_tcp_serves};
const spar_transport spar_transport_push = {
    .name = "push", .device = "cuda", .probe = probe_push, .serves = push_serves};
const spar_transport spar_transport_nccl = {
    .name = "nccl", .device = "cuda", .probe = probe_nccl, .serves = nccl_serves};

void spar_staging_stats(int64_t *peak, int64_t *total)
{
    *peak = *total = 0;
}

void spar_watchdog_fork(spar_fork_stage stage)
{
    (void)stage;
}
