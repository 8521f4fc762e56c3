/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between processes of this host that have connected: a number each, and a descriptor perhaps.
 *
 * They go over the pair's one connection (peers.h), so they come from the process that has authenticated, in
 * the order in which it sent them. Groups tell theirs apart by topics, which the sender draws at random. What
 * comes for another group is kept for it. Nothing here waits. */
#ifndef SPAR_PASSING_H
#define SPAR_PASSING_H

#include "ipc/peers.h"

/* Sends a message; *sent: 0 if the connection takes no more at the moment, or has ended: spar_peer_hung_up
 * reports that. The caller keeps the descriptor. */
spar_status spar_peer_send(spar_peer *peer, uint64_t topic, int64_t number, int fd, int *sent);

/* Takes the oldest message of a topic; *came: 0 if there is none. The caller closes *fd, unless it is -1. */
spar_status spar_peer_receive(spar_peer *peer, uint64_t topic, int64_t *number, int *fd, int *came);

/* Drops the messages of a topic, with their descriptors. */
void spar_peer_forget(spar_peer *peer, uint64_t topic);

#endif
