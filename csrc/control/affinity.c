/* SPDX-License-Identifier: Apache-2.0 */
/* SPAR_AFFINITY=1: spreads ranks that share cores over them. A spinning rank looks busy to the scheduler,
 * which may leave three ranks on one core and one on another for hundreds of calls. */
#include "control/mailbox.h"

#include "base/cores.h"

#include <sched.h>

/* A move takes 75 us. The least time between two moves of a rank: the kernel may balance better. */
static const int64_t REST_NS = 5000000;

void spar_group_share_cores(spar_group *g, int local_ranks, int core_share)
{
    int cores = spar_cores();
    g->own_core = core_share > 0;
    /* of the others' ranks nothing is known */
    g->fair_share = local_ranks > g->world ? g->world : (g->world + cores - 1) / cores;
}

void spar_group_allow_moves(spar_group *g)
{
    g->may_move = !g->own_core;
}

void spar_group_publish_core(spar_group *g)
{
    if (g->may_move)
        __atomic_store_n(&g->own->core, sched_getcpu(), __ATOMIC_RELAXED);
}

static int core_of(const spar_group *g, int rank)
{
    return __atomic_load_n(&g->boxes[rank]->core, __ATOMIC_RELAXED);
}

void spar_group_balance_cores(spar_group *g)
{
    int here = core_of(g, g->rank), crowd = 0;
    if (!g->may_move || here < 0 || !g->spin_ns || g->world <= g->fair_share)
        return;
    for (int rank = 0; rank < g->world; rank++)
        if (core_of(g, rank) == here) {
            if (rank > g->rank) /* it moves */
                return;
            crowd++;
        }
    int64_t now = crowd > g->fair_share ? spar_now_ns() : 0;
    if (now <= g->rests_until_ns)
        return;
    g->rests_until_ns = now + REST_NS;
    int ranks[CPU_SETSIZE] = {0}, to = -1;
    cpu_set_t cores, one;
    for (int rank = 0; rank < g->world; rank++) {
        int core = core_of(g, rank);
        if (core >= 0 && core < CPU_SETSIZE)
            ranks[core]++;
    }
    if (sched_getaffinity(0, sizeof cores, &cores) != 0)
        return;
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &cores) && (to < 0 || ranks[core] < ranks[to]))
            to = core;
    if (to < 0 || ranks[to] + 2 > crowd)
        return;
    CPU_ZERO(&one);
    CPU_SET(to, &one);
    if (sched_setaffinity(0, sizeof one, &one) == 0)
        sched_setaffinity(0, sizeof cores, &cores);
}
