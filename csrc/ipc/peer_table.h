/* The connected peers, as calls.c sees them. The lock is held around each of these. */
#ifndef SPAR_PEER_TABLE_H
#define SPAR_PEER_TABLE_H

#include "ipc/peers.h"

#include <pthread.h>
#include <unistd.h>

/* Of everything in peers.c and calls.c; no lock is taken while it is held. */
extern pthread_mutex_t spar_peers_lock;

/* The connected peer of this endpoint; not by a connection that the living other side gave up, as one that could not
 * map our arena does: groups may hold it for long. */
spar_peer *spar_peers_find(const spar_endpoint *endpoint);

/* Takes over the peer's descriptors and mapping, also on failure. */
spar_status spar_peers_add(const spar_peer *peer);

/* Forgets those that no group uses and that hung up: they may call again. */
void spar_peers_sweep_locked(void);

/* A forked child must not hold its parent's connections open. */
void spar_peers_close_in_child(void);

static inline void spar_close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

#endif
