/* The handshake over one connection between two processes, for calls.c.
 *
 *     dialer   -> CALL      both endpoints, the dialer's challenge
 *     answerer -> CHALLENGE the answerer's challenge, its proof
 *     dialer   -> ARENA     the dialer's proof, and its arena's descriptor
 *     answerer -> ARENA     the answerer's proof, and its arena's descriptor
 *
 * A proof is a code over the whole message and both challenges, by the key that only the two processes can derive:
 * it shows that the sender knows the secrets that travel in the group's facts, and that the message is of this
 * handshake. Neither side sends a descriptor, takes one, or says why it refuses, before the other has proved itself.
 * No function here waits. */
#ifndef SPAR_HANDSHAKE_H
#define SPAR_HANDSHAKE_H

#include "ipc/peers.h"

#include <sys/socket.h>

/* How far a handshake is. */
enum {
    CONNECTING, /* dialer: the other's backlog was full */
    CALLED,     /* dialer: sent CALL */
    OFFERED,    /* dialer: sent ARENA */
    ACCEPTED,   /* answerer: has read nothing */
    CLAIMED,    /* answerer: read CALL: whose endpoint it claims is known */
    CHALLENGED, /* answerer: sent CHALLENGE */
};

typedef struct {
    int socket; /* -1: none */
    int step;
    int64_t since_ns;
    spar_endpoint other; /* an answerer only knows what the other claims */
    spar_key key;
    spar_key challenges[2]; /* the dialer's, the answerer's */
} spar_handshake;

typedef enum {
    SPAR_HANDSHAKE_PENDING,
    SPAR_HANDSHAKE_CONNECTED,
    SPAR_HANDSHAKE_LATER,   /* dialer: the answerer had no room for it: dial again */
    SPAR_HANDSHAKE_DROPPED, /* answerer: hung up, or unproven: not worth a word */
    SPAR_HANDSHAKE_REFUSED, /* one side could not go on: spar_last_error */
} spar_handshake_state;

static inline int spar_endpoint_same(const spar_endpoint *a, const spar_endpoint *b)
{
    return a->pid == b->pid && a->nonce == b->nonce;
}

/* The key of a pair, from both processes' secrets; the same on both. */
spar_key spar_handshake_key(const spar_endpoint *a, const spar_key *secret_a,
                            const spar_endpoint *b, const spar_key *secret_b);

/* Whether the process at the other end has this process's user; *owner: its user and, where it can be seen, its id. */
int spar_handshake_same_user(int socket, struct ucred *owner);

/* The dialer's first message; `hello->other` and `key` are set. */
spar_status spar_handshake_call(spar_handshake *handshake, const spar_endpoint *own);

/* The answerer's first look: CLAIMED when the CALL has come. */
spar_handshake_state spar_handshake_read_call(spar_handshake *handshake, const spar_endpoint *own);

/* The answerer's first message, to an endpoint that is expected. */
spar_handshake_state spar_handshake_challenge(spar_handshake *handshake, const spar_endpoint *own,
                                              const spar_key *key);

/* One look at what came in: either side's later steps. On SPAR_HANDSHAKE_CONNECTED the peer has the arena. */
spar_handshake_state spar_handshake_step(spar_handshake *handshake, const spar_endpoint *own,
                                         spar_peer *peer);

/* Asks a caller to dial again, and hangs up. */
void spar_handshake_postpone(spar_handshake *handshake, const spar_endpoint *own);

/* Of the process at the other end, the caller's to close; -1 where the system has none. */
int spar_handshake_pidfd(int socket);

#endif
