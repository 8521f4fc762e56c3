/* How the ranks of a group that share a host find each other's mailboxes, in a transport's set-up. */
#ifndef SPAR_RENDEZVOUS_H
#define SPAR_RENDEZVOUS_H

#include "ipc/group.h"
#include "transports/transport.h"

/* Whether each rank is a process of its own that can be met; else why not. */
int spar_rendezvous_possible(const spar_peer_info *info, int world, int first_rank, char *reason,
                             size_t size);

/* First stage: this rank's mailbox with `room` bytes behind it (spar_group_room); the others are expected, and dialed.
 * Does not wait. On failure nothing is kept. */
spar_status spar_rendezvous_begin(const spar_comm *comm, const spar_peer_info *info, int64_t room,
                                  spar_group **group, int64_t *offset);

/* Second stage, from everybody's verdicts: their mailboxes. */
spar_status spar_rendezvous_end(const spar_comm *comm, spar_group *group,
                                const spar_setup_result *results, const spar_deadline *deadline);

#endif
