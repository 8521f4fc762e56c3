/* The first words between two processes, which carry their arenas' descriptors; for peers.c. */
#ifndef SPAR_HELLO_H
#define SPAR_HELLO_H

#include "peers.h"

/* spar_peer.state */
enum {
    STRANGER,  /* accepted, its hello not read */
    DIALED,    /* hello sent, no answer */
    CONNECTED, /* both read */
    REFUSED,   /* it called and could not be served: `reason`, for whoever wants to meet it */
};

static inline int spar_endpoint_same(const spar_endpoint *a, const spar_endpoint *b)
{
    return a->pid == b->pid && a->nonce == b->nonce;
}

/* With this process's arena. */
spar_status spar_hello_send(int socket, const spar_endpoint *own, const spar_endpoint *to);

/* The caller shall not wait for an answer that never comes. */
void spar_hello_refuse(int socket, const spar_endpoint *own, const char *reason);

/* Of the process at the other end, the caller's; -1 where the system has none. */
int spar_hello_pidfd(int socket);

/* Reads a hello, if it is there: the peer is CONNECTED after it. Where it fails, peer->reason says why, and
 * peer->endpoint is the caller's if that could be known. */
spar_status spar_hello_read(spar_peer *peer, const spar_endpoint *own);

#endif
