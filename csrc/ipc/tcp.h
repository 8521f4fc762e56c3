/* SPDX-License-Identifier: Apache-2.0 */
/* Authenticated TCP connections between the ranks of one group that share no memory: two for each pair.
 *
 * Each rank listens on a port of its own during the group's set-up, and sends its address and a secret to all
 * ranks, over the process group. Of each pair the lower rank dials:
 *
 *     dialer   -> GREETING   both ranks, the connection's channel, the dialer's challenge
 *     answerer -> GREETING   the answerer's challenge, its proof
 *     dialer   -> GREETING   the dialer's proof
 *
 * A proof is a MAC over the greeting and both challenges, with a key that only ranks which have both secrets
 * can derive. Bytes that follow are neither authenticated nor encrypted, as those of gloo. */
#ifndef SPAR_TCP_H
#define SPAR_TCP_H

#include "base/deadline.h"
#include "base/siphash.h"

#include <stdint.h>

/* Where a rank listens, and its secret in this group. Travels as bytes. */
typedef struct {
    uint16_t family; /* AF_INET or AF_INET6; 0: the rank does not listen */
    uint16_t port;   /* in network order, as the address */
    uint32_t scope;  /* the interface of a link-local IPv6 address */
    unsigned char address[16];
    spar_key secret;
} spar_tcp_endpoint;

/* The two connections of a pair. */
enum { SPAR_TCP_CONTROL, SPAR_TCP_DATA, SPAR_TCP_CHANNELS };

typedef struct spar_tcp_setup spar_tcp_setup;

/* Writes the address at which other hosts reach this one: that of GLOO_SOCKET_IFNAME's interface; else the
 * one from which MASTER_ADDR is reached; else the first that is no loopback; else a loopback address. Port
 * and secret stay as they are. May ask a name server. */
spar_status spar_tcp_own_address(spar_tcp_endpoint *own);

/* Writes an endpoint's address as text. */
enum { SPAR_TCP_TEXT = 64 };
void spar_tcp_address_text(const spar_tcp_endpoint *endpoint, char *text);

/* First stage: listens, and writes where. */
spar_status spar_tcp_listen(int world, int rank, spar_tcp_endpoint *own, spar_tcp_setup **setup);

/* Second stage, from all ranks' endpoints [world]: connects to the ranks that are `far`; far[rank] of this
 * one is 0. Fills sockets [world], which the caller closes: nonblocking, -1 for ranks that are not far.
 * Closes what it opened on failure. Waits for peers that have not dialed or answered. */
spar_status spar_tcp_connect(spar_tcp_setup *setup, const unsigned char *far, const spar_tcp_endpoint *all,
                             const spar_deadline *deadline, int (*sockets)[SPAR_TCP_CHANNELS]);

/* Ends a set-up, which may be NULL: this rank no longer listens. */
void spar_tcp_end(spar_tcp_setup *setup);

#endif
