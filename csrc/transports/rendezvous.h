/* SPDX-License-Identifier: Apache-2.0 */
/* Exchanges mailboxes between the ranks of a group that share a host, in a transport's set-up. */
#ifndef SPAR_RENDEZVOUS_H
#define SPAR_RENDEZVOUS_H

#include "control/control.h"
#include "transports/transport.h"

/* Whether each rank is a process of its own with an endpoint; else the reason. */
int spar_rendezvous_possible(const spar_peer_info *info, int world, int first_rank, char *reason,
                             size_t size);

/* First stage: allocates this rank's mailbox with `room` bytes behind it, and expects and dials
 * the peers. Does not wait. Keeps nothing on failure. */
spar_status spar_rendezvous_begin(const spar_comm *comm, const spar_peer_info *info, int64_t room,
                                  spar_group **group, int64_t *offset);

/* Second stage, from all ranks' results: attaches the peers' mailboxes. */
spar_status spar_rendezvous_end(const spar_comm *comm, spar_group *group, const spar_setup_result *results,
                                const spar_deadline *deadline);

#endif
