/* SPDX-License-Identifier: Apache-2.0 */
/* Any ProcessGroup of torch: Python packs and moves the bytes (spar/_transports/torch.py).
 *
 * Each call is compared here before: run publishes it, and returns while the call goes on. Python polls the
 * group while the bytes move, and ends the call. */
#include "transports/rendezvous.h"

static spar_status compare(spar_comm *comm, spar_call *call, void *all, uint32_t n)
{
    const spar_call_header own = {
        .signature = spar_plan_signature(call->plan, call->text) ^ (uint64_t)call->number,
        .forward = call->forward,
        .op = call->op,
    };
    (void)n;
    return spar_group_publish(comm->group, &own, spar_call_describe, call, all, &call->deadline);
}

static spar_status run(spar_comm *comm, spar_call *call)
{
    return spar_rendezvous_run(comm, call, compare, sizeof(spar_call_header));
}

const spar_transport spar_transport_torch = {
    .name = "torch",
    .serves = spar_torch_serves,
    .setup = spar_rendezvous_setup,
    .connect = spar_rendezvous_connect,
    .run = run,
    .close = spar_rendezvous_close,
};
