/* SPDX-License-Identifier: Apache-2.0 */
/* The state that the ranks of the local transport share; it outlives their comms. */
#ifndef SPAR_LOCAL_H
#define SPAR_LOCAL_H

#include "transports/transport.h"

extern const spar_transport spar_transport_local;

typedef struct spar_local_world spar_local_world;

spar_local_world *spar_local_world_new(int world);
void spar_local_world_free(spar_local_world *world);

#endif
