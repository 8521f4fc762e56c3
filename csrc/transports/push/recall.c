/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/push/recall.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct record record;

struct record {
    const record *next;
    int ordinal, world;
    char reason[80];
    uint64_t processes[]; /* [world] the nonce of each */
};

/* Atomic; the others follow. None is freed: there is at most one for each set of processes and device. */
static const record *newest;

void spar_push_remember(const spar_peer_info *info, int world, int ordinal, const char *reason)
{
    record *r = malloc(sizeof *r + (size_t)world * sizeof *r->processes);
    if (!r)
        return; /* a later group tries again */
    *r = (record){.next = __atomic_load_n(&newest, __ATOMIC_ACQUIRE), .ordinal = ordinal, .world = world};
    snprintf(r->reason, sizeof r->reason, "%s", reason);
    for (int rank = 0; rank < world; rank++)
        r->processes[rank] = info[rank].endpoint.nonce;
    while (!__atomic_compare_exchange_n(&newest, &r->next, r, 0, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE))
        ;
}

static int has_process(const spar_peer_info *info, int world, uint64_t process)
{
    int rank = 0;
    while (rank < world && info[rank].endpoint.nonce != process)
        rank++;
    return rank < world;
}

static int has_all(const spar_peer_info *info, int world, const record *r)
{
    int i = 0;
    while (i < r->world && has_process(info, world, r->processes[i]))
        i++;
    return i == r->world;
}

spar_status spar_push_recall(const spar_peer_info *info, int world, int ordinal)
{
    const record *r = __atomic_load_n(&newest, __ATOMIC_ACQUIRE);
    for (; r; r = r->next)
        if (r->ordinal == ordinal && has_all(info, world, r))
            return spar_fail(SPAR_TRANSPORT, "earlier group: %s", r->reason);
    return SPAR_OK;
}
