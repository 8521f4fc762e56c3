/* SPDX-License-Identifier: Apache-2.0 */
/* The connected peers, for connections.c. All functions require the lock. */
#ifndef SPAR_PEER_TABLE_H
#define SPAR_PEER_TABLE_H

#include "ipc/peers.h"

#include <pthread.h>
#include <unistd.h>

/* Guards all state of peers.c and connections.c; a leaf lock. */
extern pthread_mutex_t spar_peers_lock;

/* Returns the connected peer of an endpoint. Skips a connection that a live peer closed, for example because
 * it could not map our arena: groups may hold it for long. */
spar_peer *spar_peers_find(const spar_endpoint *endpoint);

/* Adds a peer; takes over its descriptors and mapping, also on failure. */
spar_status spar_peers_add(const spar_peer *peer);

/* Drops peers that hung up and that no group uses: they may reconnect. */
void spar_peers_sweep_locked(void);

/* In a forked child: closes the parent's connections. */
void spar_peers_close_in_child(void);

/* A message on its way between processes (passing.h). */
typedef struct {
    char magic[8];
    uint64_t topic;
    int64_t number;
} spar_message;

/* One that a peer sent and no group has taken. */
struct spar_kept_message {
    spar_kept_message *next;
    spar_message what;
    int fd;   /* -1: none */
    int lost; /* there was no room for its descriptor */
};

/* Takes a message out of a peer's list, and closes its descriptor. */
void spar_peers_drop_message(spar_kept_message **link);

static inline void spar_close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

#endif
