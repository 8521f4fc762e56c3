/* spar in C: the whole library, without Python.
 *
 *   error.h      status codes, the last error's text
 *   fork.h       the process-wide locks, while some thread forks
 *   stream.h     copies past the caches
 *   scale.h      a factor, applied to items on their way
 *   team.h       threads that copy
 *   cores.h      how many cores there are to use
 *   cgroup.h     the cgroup's limits, of memory and of cores
 *   env.h        environment variables (env.def)
 *   library.h    other libraries, opened at run time
 *   driver.h     CUDA's driver
 *   compiler.h   CUDA's compiler, and
 *   cubin.h      what it made, kept on disk
 *   kernels.h    the kernels (kernels.cu), which it compiles
 *   layout.h     which part of a tensor each rank holds: the one idea
 *   ops.h, ops/  operations: each a pair of layouts
 *   plan.h       blocks of bytes that follow from them; cache
 *   tables.h     the blocks as the kernels read them
 *   uploads.h    those tables in a CUDA device's memory
 *   device.h, devices/          how blocks are copied
 *   pack.h       packing, for transports that move runs of bytes
 *   chunks.h     an exchange in steps, for transports that stage
 *   patience.h   how long to wait
 *   arena.h      the memory that ranks of one host share
 *   text.h       texts in it
 *   whereabouts.h  which call each process is in, for messages
 *   siphash.h    a message authentication code
 *   peers.h, peer_table.h  the other processes of this host, and which of them live; calls.c: how they connect
 *   hello.h      the handshake between two of them
 *   group.h      mailboxes: the order of a group's calls, verdicts
 *   mailbox.h    what they hold; wait.c: waiting, and what ends it; spread.c: ranks that share cores
 *   nccl.h       NCCL, opened at run time
 *   transport.h, transports/    who moves the bytes, and the choice
 *   meeting.h    how the ranks of one host find each other's mailboxes
 *   ledger.h     what they tell each other of calls on GPUs
 *   lane.h       a rank's way through NCCL: staging memory, streams
 *   watch.h      calls under way on a GPU: their errors and limits
 *   spar.h       a rank's part in a group: open, connect, run
 *   binding.h    module.c, plan_object.c, comm_object.c, stream_object.c, capsule.c: what knows Python
 *
 * Includes point upwards in this list only. */
#ifndef SPAR_H
#define SPAR_H

#include "devices/execute.h"
#include "transports/transport.h"

/* A rank's part in a group, over a transport that spar_choose named; `native` may be NULL. The verdict is for all
 * other ranks: it says whether this rank failed, and why; the status is about memory alone. */
spar_status spar_comm_open(const spar_transport *transport, const spar_peer_info *info, int world,
                           int rank, int local_ranks, const spar_native *native, spar_comm **comm,
                           spar_setup_result *result);

/* SPAR_TRANSPORT with the reason of the first rank that failed in a stage; SPAR_OK: none did. */
spar_status spar_setup_failure(const spar_setup_result *results, int world);

/* Second stage, from everybody's verdicts [world]; gives another verdict. Where no rank's says that it failed,
 * the comm can run. */
spar_status spar_comm_connect(spar_comm *comm, const spar_setup_result *results,
                              const spar_deadline *deadline, spar_setup_result *result);

/* One exchange; all ranks of the group call it in the same order. */
spar_status spar_comm_run(spar_comm *comm, spar_call *call);

void spar_comm_close(spar_comm *comm);

#endif
