/* SPDX-License-Identifier: Apache-2.0 */
/* spar in C: the whole library, without Python. This header is its API.
 *
 *   python/      the extension spar._C: module, setup, plan_type, exchange_type, comm_type with its calls
 *                (calls, streams), dlpack, convert; binding.h and comm.h join them
 *   spar.[ch]    a rank's communicator in a group: open, connect, run, close
 *   transports/  move the bytes
 *     transport     the interface, the ordered table, the choice
 *     rendezvous    ranks exchange their mailboxes, connect, and take turns
 *     shm           pushes into near peers' outputs in shared memory; tcp: far ones get theirs as messages
 *     parcels       the bytes for far ranks, and from them
 *     torch         compares calls whose bytes Python moves
 *     nccl/         nccl and its set-up, its API opened at run time (api), send/recv steps (schedule) through
 *                   staging buffers and side streams (pipeline), errors and deadlines on GPUs (watchdog)
 *   control/     the order of a group's calls: who makes which, who failed, who is missing
 *     group         a group's calls, and its life
 *     mailbox       what ranks publish: storing it, waiting for it, aborting
 *     links, link_send, link_receive   mailboxes of far ranks, over TCP
 *     ring          comparison of calls without waiting, for nccl
 *     last_call     each process's newest call, for messages
 *   ipc/         between processes
 *     arena         the memory that those of one host share
 *     connections, handshake, peers, peer_table   sockets of one host, authentication, liveness
 *     address, tcp  between hosts: where this one is reached, and authenticated connections
 *   not_linux/   what other systems build in place of ipc/, control/ and the transports
 *   devices/     what is done in host memory (execute.h, scale.h, sum.h), and the dtypes that a copy scales
 *                (scale.def)
 *     cpu/          copies and packs by a plan (execute), scaling (scale), sums (sum), 16-bit floats
 *                   (vectors), the instruction sets (processor), non-temporal stores (nontemporal), copy
 *                   threads (threads)
 *     cuda/         the interface (cuda), the driver API (driver), NVRTC (nvrtc), compiled kernels on disk
 *                   (cubin_cache), the kernels (kernels.cu, rounds.cu, kernels), copies cut into their
 *                   parameters (launches), memory that processes map (mapping), and outputs in it (outputs)
 *   plan/        blocks of bytes of an exchange, a pair of layouts (plan), their cache (cache), their
 *                description (describe)
 *   ops/         which part of a tensor each rank holds (layout), and the documents that balance ranks
 *                (balance)
 *   base/        status codes and the last error (error), environment variables (env.def, env), deadlines
 *                (deadline), libraries opened at run time (dynlib), locks around fork (fork), cores and
 *                cgroup limits (cores, cgroup), the fence after non-temporal stores (fence), text in shared
 *                memory (shared_text), message authentication (siphash), utilities (util)
 *
 * A file includes headers of its own folder or of folders below it in this list. */
#ifndef SPAR_H
#define SPAR_H

#include "devices/execute.h"
#include "transports/transport.h"

/* Opens a rank's communicator over a transport that spar_choose returned; `native` may be NULL. The caller
 * sends the setup result, which has the failure and its reason, to all ranks. The status reports missing
 * memory only. */
spar_status spar_comm_open(const spar_transport *transport, const spar_peer_info *info, int world, int rank,
                           int local_ranks, const spar_native *native, spar_comm **comm,
                           spar_setup_result *result);

/* SPAR_TRANSPORT with the reason of the first rank that failed in a stage; SPAR_OK: none did. */
spar_status spar_setup_failure(const spar_setup_result *results, int world);

/* Second stage, from all ranks' setup results [world]; sets another one. The communicator can run if none
 * failed. */
spar_status spar_comm_connect(spar_comm *comm, const spar_setup_result *results,
                              const spar_deadline *deadline, spar_setup_result *result);

/* Runs one exchange; all ranks of the group must call it in the same order. */
spar_status spar_comm_run(spar_comm *comm, spar_call *call);

void spar_comm_close(spar_comm *comm);

#endif
