/* SPDX-License-Identifier: Apache-2.0 */
/* The peer processes of this host: their mapped arenas and their liveness.
 *
 * Each process listens on an abstract Unix socket, whose name is public. One connection per pair of processes
 * serves all groups. After both sides have proved that they know each other's secret (handshake.h), it
 * carries the descriptors of the arenas; its hang-up reports a death. Two processes share a host if a connect
 * succeeds, whatever the host's name.
 *
 * A set-up expects its group's processes, polls spar_peers_poll for each, then ends its expectations. Only
 * expected processes are answered. A connection from another user's process is closed unread. At most a few
 * unauthenticated connections are kept, for seconds, and none after the last expectation. Only spar_peer_died
 * waits, up to 50 ms. */
#ifndef SPAR_PEERS_H
#define SPAR_PEERS_H

#include "base/error.h"
#include "base/siphash.h"

#include <stdint.h>

/* Identifies a process; all zero: none. */
typedef struct {
    int64_t pid;
    uint64_t nonce;
} spar_endpoint;

typedef struct spar_kept_message spar_kept_message;

typedef struct {
    spar_endpoint endpoint;
    char *base;     /* the peer's arena, as it is mapped here; NULL: unmapped */
    int64_t length; /* the arena's bytes */
    /* the rest is private to this folder */
    spar_key key;
    int socket, pidfd;
    int groups;              /* the number of groups that hold it */
    int readers;             /* the number of those that may still touch its arena */
    spar_kept_message *kept; /* what it sent and no group has taken (passing.h), the oldest first */
} spar_peer;

/* Gets this process's endpoint and the secret that authenticates its groups' peers to it; listens from the
 * first call on. */
spar_status spar_peers_listen(spar_endpoint *own, spar_key *secret);

/* Begins to expect a process. The lower endpoint dials if the pair is not connected: that succeeds if the
 * connection is accepted, or the backlog is full. Balance each success with one spar_peers_end. */
spar_status spar_peers_expect(const spar_endpoint *peer, const spar_key *secret);

/* Polls for an expected process: *peer is NULL until the pair is connected. */
spar_status spar_peers_poll(const spar_endpoint *endpoint, spar_peer **peer);

/* Ends one expectation of a process. */
void spar_peers_end(const spar_endpoint *endpoint);

/* Ends a group's access to the peer's arena; unmaps it if the process is dead and no other group accesses
 * it. */
void spar_peers_unmap(spar_peer *peer);

/* Ends a group's use of the peer, after spar_peers_unmap. */
void spar_peers_release(spar_peer *peer);

/* Frees dead peers that no group uses. */
void spar_peers_sweep(void);

/* Whether the process is dead: by its pidfd, or because it hung up and no such process exists. */
int spar_peer_is_dead(spar_peer *peer);

/* The same; waits up to 50 ms if the process only hung up, since an exit closes sockets first. */
int spar_peer_died(spar_peer *peer);

/* Whether it hung up or is dead: it publishes nothing more, but may still be writing. */
int spar_peer_hung_up(spar_peer *peer);

/* Connections closed because they came from another user's process, or failed to authenticate; and open ones
 * that have not authenticated yet. */
typedef struct {
    int64_t foreign, unproven;
    int pending;
} spar_peers_counts;

spar_peers_counts spar_peers_count(void);

#endif
