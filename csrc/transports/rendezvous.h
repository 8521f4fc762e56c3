/* How the ranks of a group that share a host find each other's mailboxes, in a transport's set-up. */
#ifndef SPAR_MEETING_H
#define SPAR_MEETING_H

#include "ipc/group.h"
#include "transports/transport.h"

/* Whether each rank is a process of its own that can be met; else why not. */
int spar_meeting_possible(const spar_facts *facts, int world, char *reason, size_t size);

/* First stage: this rank's mailbox with `room` bytes behind it (spar_group_room); the others are expected, and dialed.
 * Does not wait. On failure nothing is kept. */
spar_status spar_meeting_begin(const spar_comm *comm, const spar_facts *facts, int64_t room,
                               spar_group **group, int64_t *offset);

/* Second stage, from everybody's verdicts: their mailboxes. */
spar_status spar_meeting_end(const spar_comm *comm, spar_group *group, const spar_verdict *verdicts,
                             const spar_patience *patience);

#endif
