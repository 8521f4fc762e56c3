/* The other processes of this host: whose arenas are mapped here, and who of them lives.
 *
 * Each process listens on an abstract Unix socket; one connection per pair of processes serves all groups. It
 * carries the arenas' descriptors when it is made, and its end tells of a death. Being on the same host is a
 * connect that succeeds, not a name. Nothing here waits: callers look again. */
#ifndef SPAR_PEERS_H
#define SPAR_PEERS_H

#include "error.h"

#include <stdint.h>

/* What a process is known by; all zero: none. */
typedef struct {
    int64_t pid;
    uint64_t nonce;
} spar_endpoint;

typedef struct {
    spar_endpoint endpoint;
    char *base;     /* the peer's arena, as it is mapped here */
    int64_t length; /* of it, in bytes */
    /* the rest is peers.c's own */
    int socket, pidfd, state, groups;
    int64_t since_ns;
    char reason[80];
} spar_peer;

/* This process's endpoint; listens from the first call on. */
spar_status spar_peers_listen(spar_endpoint *own);

/* Calls on a peer, if it is this side's to call (the lower endpoint's) and the pair is not connected. It
 * succeeds when the peer's system has taken the call: the peer itself may come to it later. */
spar_status spar_peers_dial(const spar_endpoint *peer);

/* A pidfd of a process that answers on this host, the caller's; -1 where none does. Readable: it is dead. */
int spar_peers_watch(const spar_endpoint *endpoint);

/* Looks for a peer's answer, or its call: *peer is NULL until the pair is connected. */
spar_status spar_peers_meet(const spar_endpoint *endpoint, spar_peer **peer);

/* A peer that spar_peers_meet gave is not used any more. */
void spar_peers_leave(spar_peer *peer);

/* Whether the process is gone: its pidfd says so, or its connection ended and no such process is left. */
int spar_peer_is_dead(spar_peer *peer);

/* Whether its connection ended, or it is dead: it will not come, though it may still be writing. */
int spar_peer_hung_up(spar_peer *peer);

#endif
