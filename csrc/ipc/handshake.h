/* SPDX-License-Identifier: Apache-2.0 */
/* The handshake over one connection between two processes, for connections.c.
 *
 *     dialer   -> CALL      both endpoints, the dialer's challenge
 *     answerer -> CHALLENGE the answerer's challenge, its proof
 *     dialer   -> ARENA     the dialer's proof, and its arena's descriptor
 *     answerer -> ARENA     the answerer's proof, and its arena's descriptor
 *
 * A proof is a MAC over the whole message and both challenges, with a key that only the two processes can
 * derive. It proves that the sender knows the secrets exchanged in the group's peer info, and that the
 * message belongs to this handshake. Before a peer has authenticated, a process sends it no descriptor,
 * receives none, and reports no reason. No function here waits. */
#ifndef SPAR_HANDSHAKE_H
#define SPAR_HANDSHAKE_H

#include "ipc/peers.h"

#include <sys/socket.h>

/* The steps of a handshake. */
enum {
    CONNECTING, /* dialer: the answerer's backlog was full, or it hung up before the CALL: dial again */
    CALLED,     /* dialer: sent CALL */
    OFFERED,    /* dialer: sent ARENA */
    ACCEPTED,   /* answerer: accepted, nothing read */
    CLAIMED,    /* answerer: read CALL, which claims an endpoint */
    CHALLENGED, /* answerer: sent CHALLENGE */
};

typedef struct {
    int socket; /* -1: none */
    int step;
    int64_t since_ns;
    spar_endpoint other; /* the peer; for an answerer, what it claims */
    spar_key key;
    spar_key challenges[2]; /* the dialer's, the answerer's */
} spar_handshake;

typedef enum {
    SPAR_HANDSHAKE_PENDING,
    SPAR_HANDSHAKE_CONNECTED,
    SPAR_HANDSHAKE_LATER,   /* dialer: the answerer is full; dial again */
    SPAR_HANDSHAKE_DROPPED, /* answerer: hung up or not authenticated: close without an answer */
    SPAR_HANDSHAKE_REFUSED, /* one side failed: spar_last_error */
} spar_handshake_state;

static inline int spar_endpoint_same(const spar_endpoint *a, const spar_endpoint *b)
{
    return a->pid == b->pid && a->nonce == b->nonce;
}

/* Derives a pair's key from both secrets; the same on both sides. */
spar_key spar_handshake_key(const spar_endpoint *a, const spar_key *secret_a, const spar_endpoint *b,
                            const spar_key *secret_b);

/* Whether the peer process has this process's user; *owner: its user and, if visible, its pid. */
int spar_handshake_same_user(int socket, struct ucred *owner);

/* Sends the dialer's first message; `other` and `key` are set. The step stays CONNECTING if the answerer hung
 * up before it: dial again. */
spar_status spar_handshake_call(spar_handshake *handshake, const spar_endpoint *own);

/* Polls for the CALL; the step is CLAIMED once it was read. */
spar_handshake_state spar_handshake_read_call(spar_handshake *handshake, const spar_endpoint *own);

/* Sends the answerer's first message, to an expected endpoint. */
spar_handshake_state spar_handshake_challenge(spar_handshake *handshake, const spar_endpoint *own,
                                              const spar_key *key);

/* Polls once for either side's later messages. On SPAR_HANDSHAKE_CONNECTED the peer has its arena. */
spar_handshake_state spar_handshake_step(spar_handshake *handshake, const spar_endpoint *own,
                                         spar_peer *peer);

/* Asks the dialer to dial again, and hangs up. */
void spar_handshake_postpone(spar_handshake *handshake, const spar_endpoint *own);

/* Unmaps the peer's arena, if it is mapped. */
void spar_handshake_unmap(spar_peer *peer);

/* Opens a pidfd of the peer process; -1: the system has none. The caller closes it. */
int spar_handshake_pidfd(int socket);

#endif
