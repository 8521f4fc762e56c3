/* SPDX-License-Identifier: Apache-2.0 */
/* The first exchanges of this process that failed because GPUs did not reach each other. Each may take
 * seconds, so a later group of the same processes does not try again. Any rank that remembers one reports it
 * in its setup result, so all ranks drop push together. */
#ifndef SPAR_PUSH_RECALL_H
#define SPAR_PUSH_RECALL_H

#include "transports/transport.h"

/* Remembers the reason for these ranks, of which this process has device `ordinal`. */
void spar_push_remember(const spar_peer_info *info, int world, int ordinal, const char *reason);

/* SPAR_TRANSPORT, with the reason, if all ranks of a group that is remembered are among these. */
spar_status spar_push_recall(const spar_peer_info *info, int world, int ordinal);

#endif
