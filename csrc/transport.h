/* Transports execute plans.
 *
 * A transport is one file in transports/ that ends in one const struct; the ordered table in transport.c
 * holds a row for each. The first that can serve a group moves its bytes: a pure function of the facts that
 * all ranks exchanged, so that every rank comes to the same choice, for the same reason. */
#ifndef SPAR_TRANSPORT_H
#define SPAR_TRANSPORT_H

#include "device.h"

#define SPAR_BLOB_SIZE 128

/* What a rank tells all others about itself, once per group. */
typedef struct {
    char version[24];     /* of spar */
    char error[160];      /* why this rank cannot take part; empty: it can */
    char transport[40];   /* SPAR_TRANSPORT */
    char check[8];        /* SPAR_CHECK */
    uint64_t local_world; /* where all ranks are threads of one process: the world's address */
    char reserved[16];    /* zero */
} spar_facts;

typedef struct {
    const spar_plan *plan;
    const void *const *inputs; /* [plan->ntensors] */
    void *const *outputs;      /* [plan->ntensors] contiguous, plan->tensors[t].out_bytes long */
    const spar_device *device; /* whose memory they lie in */
    spar_scale scale;
    void *stream;        /* the device's queue; NULL on a CPU */
    int64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
} spar_call;

typedef struct spar_comm spar_comm;

typedef struct {
    const char *name;
    /* Whether it can serve a group of these ranks, and the reason. Pure; any rank may ask. */
    int (*serves)(const spar_facts *facts, int world, const char *device, char *reason,
                  size_t size);
    /* Fills in the blob [SPAR_BLOB_SIZE] that all ranks will see. */
    spar_status (*setup)(spar_comm *comm, const spar_facts *own, void *blob);
    /* Reads everybody's blobs [world][SPAR_BLOB_SIZE], one behind the other. */
    spar_status (*connect)(spar_comm *comm, const void *blobs);
    /* One exchange: NULL where Python moves the bytes (the torch transport). */
    spar_status (*run)(spar_comm *comm, const spar_call *call);
    /* The same in two: start publishes and returns; wait returns when the outputs are whole and the inputs
     * are no longer read. The call must live as long. */
    spar_status (*start)(spar_comm *comm, const spar_call *call);
    spar_status (*wait)(spar_comm *comm, const spar_call *call);
    /* Frees what setup made. Never waits. */
    void (*close)(spar_comm *comm);
} spar_transport;

struct spar_comm {
    const spar_transport *transport;
    int world, rank;
    void *state; /* the transport's own */
};

/* The ordered table; it ends in NULL. */
extern const spar_transport *const spar_transports[];

typedef struct {
    const spar_transport *transport;
    char reason[192];
    int rejected; /* rows that were looked at before it */
    const char *rejected_names[16];
    char rejected_reasons[16][192];
} spar_choice;

/* This rank's facts, its settings read from the environment. A setting that cannot be read is told in
 * facts->error, so that all ranks fail together. */
void spar_facts_read(spar_facts *facts);

/* The transport for these ranks and this device type. Fails where ranks disagree, or where the one that is
 * forced cannot serve. */
spar_status spar_choose(const spar_facts *facts, int world, const char *device,
                        spar_choice *choice);

#endif
