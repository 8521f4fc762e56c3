/* SPDX-License-Identifier: Apache-2.0 */
/* In place of ipc/ and control/ on systems other than Linux: there is no arena, no peer is known, and no
 * group has mailboxes. */
#include "control/control.h"
#include "ipc/arena.h"
#include "ipc/peers.h"
#include "base/fork.h"

#include <string.h>

spar_status spar_arena_take(int64_t bytes, spar_memory **block)
{
    *block = NULL;
    return spar_fail(SPAR_TRANSPORT, "no shared memory for %lld bytes: it needs Linux", (long long)bytes);
}

void *spar_memory_address(const spar_memory *block)
{
    (void)block;
    return NULL;
}

void spar_memory_free(spar_memory *block)
{
    (void)block;
}

int64_t spar_arena_trim(void)
{
    return 0;
}

void spar_arena_read_stats(spar_arena_stats *stats)
{
    memset(stats, 0, sizeof *stats);
}

int spar_arena_has(const void *address)
{
    (void)address;
    return 0;
}

int spar_arena_is_own(void)
{
    return 0;
}

void spar_arena_fork(spar_fork_stage stage)
{
    (void)stage;
}

uint32_t spar_last_call_begin(const char *group, const char *op, uint32_t call)
{
    (void)group;
    (void)op;
    (void)call;
    return 0;
}

void spar_last_call_end(uint32_t begun, int gave_up)
{
    (void)begun;
    (void)gave_up;
}

const spar_description *spar_group_description(const spar_group *group, int rank)
{
    (void)group;
    (void)rank;
    return NULL;
}

spar_last_call spar_group_last_call(const spar_group *group, int rank)
{
    (void)group;
    (void)rank;
    return (spar_last_call){.state = SPAR_CALL_UNKNOWN};
}

int spar_group_words(const spar_group *group, int rank, spar_words *words)
{
    (void)group;
    (void)rank;
    (void)words;
    return 0;
}

spar_status spar_group_poll(spar_group *group, const spar_deadline *deadline)
{
    (void)group;
    (void)deadline;
    return SPAR_OK;
}

void spar_group_end(spar_group *group)
{
    (void)group;
}

spar_status spar_tcp_own_address(spar_tcp_endpoint *own)
{
    (void)own;
    return spar_fail(SPAR_TRANSPORT, "connections between ranks need Linux");
}

void spar_tcp_address_text(const spar_tcp_endpoint *endpoint, char *text)
{
    (void)endpoint;
    *text = 0;
}

void spar_peers_sweep(void)
{
}

spar_peers_counts spar_peers_count(void)
{
    return (spar_peers_counts){0};
}

void spar_peers_fork(spar_fork_stage stage)
{
    (void)stage;
}

void spar_links_fork(spar_fork_stage stage)
{
    (void)stage;
}
