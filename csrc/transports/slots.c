/* SPDX-License-Identifier: Apache-2.0 */
/* What transports use as their slots, on every system. */
#include "transports/transport.h"

#include <stdio.h>

int spar_tcp_serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    for (int rank = 0; rank < world; rank++)
        if (*info[rank].no_tcp) {
            snprintf(reason, size, "rank %d: %.63s", first_rank + rank, info[rank].no_tcp);
            return 0;
        }
    snprintf(reason, size, "ranks of one host share its memory, the others connect by TCP");
    return 1;
}

int spar_torch_serves(const spar_peer_info *info, int world, int first_rank, char *reason, size_t size)
{
    (void)info;
    (void)world;
    (void)first_rank;
    snprintf(reason, size, "any ProcessGroup can move packed bytes");
    return 1;
}

void spar_call_describe(const void *context, char *text, size_t size, spar_gathered_size *gathered)
{
    const spar_call *call = context;
    *gathered = (spar_gathered_size){0};
    if (call->failed != SPAR_OK) {
        snprintf(text, size, "failed: %s", call->why);
        return;
    }
    spar_plan_describe_call(call->plan, call->op, call->text, call->number, call->forward, text, size);
    *gathered = spar_plan_gathered(call->plan, call->text);
    if (gathered->rest) /* keeps its lowest bit */
        gathered->rest ^=
            (int64_t)((uint64_t)(call->forward > 0 ? call->number ^ call->forward : call->number) << 1);
}
