/* The other processes of this host: whose arenas are mapped here, and which of them live.
 *
 * Each process listens on an abstract Unix socket, whose name anybody can read; one connection per pair of processes
 * serves all groups. It carries the arenas' descriptors when it is made, after both sides proved that they know each
 * other's secret (hello.h), and its end tells of a death. Being on the same host is a connect that succeeds, not a
 * name.
 *
 * A set-up expects its group's processes, then polls spar_peers_poll for each, then ends its expectations. Only
 * expected processes are answered. A connection of another user's process is closed unread; few unproven connections
 * of this user's are kept, for seconds, and none after the last expectation. Nothing here waits, but
 * spar_peer_died, shortly. */
#ifndef SPAR_PEERS_H
#define SPAR_PEERS_H

#include "base/error.h"
#include "base/siphash.h"

#include <stdint.h>

/* What a process is known by; all zero: none. */
typedef struct {
    int64_t pid;
    uint64_t nonce;
} spar_endpoint;

typedef struct {
    spar_endpoint endpoint;
    char *base;     /* the peer's arena, as it is mapped here; NULL: unmapped */
    int64_t length; /* of it, in bytes */
    /* the rest is peers.c's and calls.c's own */
    spar_key key;
    int socket, pidfd;
    int groups;  /* that hold it */
    int readers; /* of them, those that may still touch its arena */
} spar_peer;

/* This process's endpoint, and the secret by which others of its groups know it; listens from the first call on. */
spar_status spar_peers_listen(spar_endpoint *own, spar_key *secret);

/* A set-up begins to expect a process, and dials it if it is this side's to dial (the lower endpoint's) and the pair
 * is not connected. It succeeds when the peer's system has taken the call, or its backlog is full for now. Balance
 * each success with one spar_peers_end. */
spar_status spar_peers_expect(const spar_endpoint *peer, const spar_key *secret);

/* Polls for an expected process: *peer is NULL until the pair is connected. */
spar_status spar_peers_poll(const spar_endpoint *endpoint, spar_peer **peer);

/* The set-up is over, as far as this process is concerned. */
void spar_peers_end(const spar_endpoint *endpoint);

/* A pidfd of a process that answers on this host, the caller's to close; -1 where none does. Readable: it is dead.
 * SPAR_PEERS_BUSY: it lives on this host, and its backlog is full for now; SPAR_PEERS_UNKNOWN: no descriptor is left, or
 * the system has no pidfds. */
enum { SPAR_PEERS_BUSY = -2, SPAR_PEERS_UNKNOWN = -3 };
int spar_peers_open_pidfd(const spar_endpoint *endpoint);

/* A group will not touch the peer's arena any more: unmaps it where the process is dead and no other group may. */
void spar_peers_unmap(spar_peer *peer);

/* A group does not use the peer any more; after spar_peers_unmap. */
void spar_peers_release(spar_peer *peer);

/* Frees what is left of dead processes that no group uses. */
void spar_peers_sweep(void);

/* Whether the process is gone: its pidfd says so, or its connection ended and no such process is left. */
int spar_peer_is_dead(spar_peer *peer);

/* The same; where only its connection ended yet, which an exit does shortly before, it waits for up to 50 ms. */
int spar_peer_died(spar_peer *peer);

/* Whether its connection ended, or it is dead: it will not come, though it may still be writing. */
int spar_peer_hung_up(spar_peer *peer);

/* Connections that were closed because they were of another user's process, or did not prove what they claimed; and
 * unproven ones that are open now. */
typedef struct {
    int64_t foreign, unproven;
    int pending;
} spar_peers_counts;

spar_peers_counts spar_peers_count(void);

#endif
