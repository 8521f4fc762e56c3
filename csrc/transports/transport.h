/* SPDX-License-Identifier: Apache-2.0 */
/* Transports execute plans.
 *
 * A transport is a file or a folder in transports/ that ends in one const struct; the ordered table in
 * transport.c has a row for each. The first that can serve a group moves its bytes. The choice depends on the
 * peer info of all ranks alone, so every rank makes the same choice, for the same reason. Between push and
 * nccl the ranks then choose by time (spar/_group/trial.py). */
#ifndef SPAR_TRANSPORT_H
#define SPAR_TRANSPORT_H

#include "base/cores.h"
#include "control/control.h"
#include "devices/scale.h"
#include "devices/execute.h"
#include "devices/sum.h"
#include "plan/plan.h"

/* What a rank sends to all ranks about itself, once per group. */
typedef struct {
    char version[24];       /* spar's */
    char error[160];        /* why this rank cannot exchange; empty: it can */
    char transport[40];     /* SPAR_TRANSPORT */
    char check[8];          /* SPAR_CHECK */
    uint64_t local_world;   /* where all ranks are threads of one process: the world's address */
    spar_endpoint endpoint; /* its process's; none: see no_shm */
    spar_key secret;        /* authenticates the group's processes on its host to it */
    char no_shm[64];        /* why it has no endpoint */
    char no_tcp[64];        /* why it cannot connect to other hosts; empty: it can */
    char no_nccl[96];       /* why NCCL, or CUDA, cannot be used; empty: they can be opened */
    char no_push[96];       /* why CUDA cannot be used; empty: it can be opened */
    uint64_t host[2];       /* the system, and its network; equal where processes may share memory */
    spar_core_set cores;    /* on which it may run */
} spar_peer_info;

/* A rank's result of one set-up stage: all ranks continue, or all reject the transport. */
typedef struct {
    int32_t failed;
    int32_t cause; /* 1 + the rank that the reason names; 0: it names none */
    char reason[88];
    int64_t offset;  /* where its mailbox lies, if it has one */
    char token[152]; /* nccl, push: see there; where it listens for far ranks: spar_tcp_endpoint */
} spar_setup_result;

typedef struct {
    const spar_plan *plan;     /* NULL: this rank failed before it had one; see failed */
    const void *const *inputs; /* [plan->ntensors] */
    const spar_rows *rows;     /* [plan->ntensors], or NULL; only for shm and tcp */
    /* [plan->ntensors] contiguous, plan->tensors[t].out_bytes long. A transport that has memory of its own
     * for them takes it in run, and gives it in `blocks` [plan->ntensors]; the caller frees them. */
    void **outputs;
    spar_memory **blocks;
    /* [plan->ntensors], or NULL: the caller's own memory for each output. An output that the transport can
     * write there has no block; the caller copies the others. */
    void *const *targets;
    spar_scale scale;
    /* Unless SPAR_NO_SUM: the plan's outputs have a row from each rank, and `blocks` receive the sums of the
     * rows instead. Only for transports that have memory of their own for outputs. */
    spar_sum_kind sum;
    const char *text; /* what else must be equal on all ranks: the dtype, the factor, ... */
    int64_t number;   /* the caller's count of the group's calls; equal on all ranks, too */
    int64_t forward;  /* the call's word: plan/place.h */
    void *stream;     /* the device's queue; NULL on a CPU */
    void *native;     /* the caller's own communicator, as spar_native has it, now */
    void *staging;    /* memory of the device, for this call alone, aligned to 256 bytes; see prepare */
    spar_deadline deadline;
    spar_status failed;     /* other than SPAR_OK: report this failure to the peers, with `why`; */
    const char *why;        /* SPAR_INTERRUPTED: the group is broken with it */
    const char *group, *op; /* names for messages */
} spar_call;

/* The spar_describe of a spar_call: one line (spar_plan_describe_call), or why the call failed; and what this
 * rank holds of the dim that the call gathers. */
void spar_call_describe(const void *call, char *text, size_t size, spar_gathered_size *gathered);

/* What a rank has on its device. */
typedef struct {
    int ordinal; /* the device's number in this process */
    void *comm;  /* a communicator of the caller's that may be used (torch's ncclComm_t), or NULL */
} spar_native;

typedef struct spar_comm spar_comm;

typedef struct {
    const char *name;
    const char *device; /* the type of devices whose tensors it moves: "cpu", "cuda"; NULL: any */
    /* Writes into this rank's peer info what the others need to choose the transport. NULL: nothing. */
    void (*probe)(spar_peer_info *info);
    /* Whether it can serve a group of these ranks, which are numbered from `first_rank`, for tensors of a
     * device type that it moves, and the reason. Pure; any rank may ask. */
    int (*serves)(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size);
    /* First set-up stage, from all ranks' peer info; does not wait. Sets `offset` and `token` of the result,
     * which is sent to all ranks; the caller sets the failure from the status. */
    spar_status (*setup)(spar_comm *comm, spar_setup_result *result);
    /* Second set-up stage, from all ranks' results [world], none of which failed. */
    spar_status (*connect)(spar_comm *comm, const spar_setup_result *results, const spar_deadline *deadline);
    /* Before run: computes the bytes of memory that it needs in call->staging; 0: none. The call may not
     * change otherwise, and no other one comes between. NULL: it never needs any. */
    spar_status (*prepare)(spar_comm *comm, const spar_call *call, int64_t *bytes);
    /* The memory of which the call's outputs are best; NULL: any. A NULL slot: any. */
    struct spar_outputs *(*outputs)(const spar_comm *comm, const spar_call *call);
    /* One exchange; or, in a call without outputs, all that precedes it (torch). */
    spar_status (*run)(spar_comm *comm, spar_call *call);
    /* Returns when all calls given to the device's queue have ended. NULL where run returns no earlier. */
    spar_status (*wait)(spar_comm *comm, const spar_deadline *deadline);
    /* Why the group broke outside a call, or NULL. A NULL slot: that cannot happen. */
    const char *(*broken)(const spar_comm *comm);
    /* The most bytes of outputs with which a call takes the fastest way in the memory that the group keeps
     * now; the same on all ranks. A NULL slot: any, 0. */
    int64_t (*room)(const spar_comm *comm);
    /* Whether a graph has one of its calls, and may be replayed after the close. A NULL slot: none has. */
    int (*captured)(const spar_comm *comm);
    /* Frees what setup made. Never waits. */
    void (*close)(spar_comm *comm);
} spar_transport;

struct spar_comm {
    const spar_transport *transport;
    int world, rank;
    int local_ranks; /* the number of this job's ranks on this host */
    spar_native native;
    spar_peer_info *info; /* [world] */
    int *hosts;           /* [world] of each rank: see spar_hosts */
    unsigned char *far;   /* [world] whether a rank is on another host */
    int nfar;             /* how many are */
    spar_tcp_setup *tcp;  /* during the set-up: connections to those */
    spar_group *group;    /* its calls are compared there; or NULL */
    void *state;          /* the transport's own */
};

/* Fills hosts [world]: for each rank the lowest one on its host. Ranks that cannot share memory, such as
 * threads of one process, count as hosts of their own. */
void spar_hosts(const spar_peer_info *info, int world, int *hosts);

/* Whether a rank is on another host than this one. */
static inline int spar_is_far(const spar_comm *comm, int rank)
{
    return comm->nfar && comm->far[rank];
}

/* The slot `serves` of tcp, on every system: ranks of one host, too, where shm may have been excluded or have
 * failed. */
int spar_tcp_serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size);

/* The slot `serves` of torch, on every system: any group. */
int spar_torch_serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size);

/* The ordered table; it ends in NULL. */
extern const spar_transport *const spar_transports[];

/* This process's exchanges over one transport that did not fail. */
typedef struct {
    uint64_t calls;
    uint64_t bytes; /* sent to other ranks */
    uint64_t ns; /* from the begin of each to its end; on a GPU's queue, to the end of what the host does */
} spar_traffic;

/* Adds an exchange; any thread may. */
void spar_traffic_count(const spar_transport *transport, uint64_t bytes, uint64_t ns);

spar_traffic spar_traffic_of(const spar_transport *transport);

typedef struct {
    const spar_transport *transport;
    char reason[192];
    int rejected; /* the number of rows before it, which cannot serve */
    const char *rejected_names[16];
    char rejected_reasons[16][192];
} spar_choice;

/* Reads this rank's peer info, without `host`, and its settings. An invalid setting is stored in `error`, so
 * that all ranks fail alike. */
void spar_peer_info_read(spar_peer_info *info);

/* Transports whose set-up failed, known to all ranks: name and reason. */
typedef struct {
    int count;
    const char *names[16], *reasons[16];
} spar_refusal;

/* Chooses the transport for these ranks and this device type. SPAR_TRANSPORT forces one for the tensors that
 * it can move: with nccl, those of CPUs are moved as without it. Fails if settings differ between ranks, or
 * if the forced transport cannot serve. */
spar_status spar_choose(const spar_peer_info *info, int world, int first_rank, const char *device,
                        const spar_refusal *refused, spar_choice *choice);

#endif
