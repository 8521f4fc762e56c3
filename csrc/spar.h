/* spar in C: the whole library, without Python.
 *
 *   error.h      status codes, the last error's text
 *   env.h        environment variables (env.def)
 *   layout.h     which part of a tensor each rank holds: the one idea
 *   ops.h, ops/  operations: each a pair of layouts
 *   plan.h       blocks of bytes that follow from them; cache
 *   device.h, devices/          how blocks are copied
 *   pack.h       packing, for transports that move runs of bytes
 *   transport.h, transports/    who moves the bytes, and the choice
 *   spar.h       a rank's part in a group: open, connect, run
 *   binding.h    module.c, plan_object.c: the only files that know Python
 *
 * Includes point upwards in this list only. */
#ifndef SPAR_H
#define SPAR_H

#include "pack.h"
#include "transport.h"

/* A rank's part in a group. Chooses the transport from everybody's facts [world] and sets it up; `blob`
 * [SPAR_BLOB_SIZE] is what the others must see of it in spar_comm_connect. */
spar_status spar_comm_open(const spar_facts *facts, int world, int rank, const char *device,
                           spar_comm **comm, void *blob);

/* Everybody's blobs [world][SPAR_BLOB_SIZE]; after it the comm can run. */
spar_status spar_comm_connect(spar_comm *comm, const void *blobs);

/* One exchange; all ranks of the group call it in the same order. */
spar_status spar_comm_run(spar_comm *comm, const spar_call *call);

void spar_comm_close(spar_comm *comm);

#endif
