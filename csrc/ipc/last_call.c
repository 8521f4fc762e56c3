#include "ipc/last_call.h"

#include "base/shared_text.h"

#include <stdio.h>

enum { GROUP = 8, OP = 4 }; /* words of 8 bytes */

/* Written by any thread of its owner, one at a time: `turn` is odd meanwhile. */
typedef struct {
    uint32_t turn, ended, call,
        unused; /* ended: the turn of the newest that did, + 1 where it gave up */
    uint64_t group[GROUP], op[OP];
} whereabouts;

_Static_assert(sizeof(whereabouts) <= SPAR_ARENA_TAIL, "it lies behind the arena");

static whereabouts *own(void)
{
    return spar_arena_base() && spar_arena_is_own()
               ? (void *)(spar_arena_base() + spar_arena_length())
               : NULL;
}

uint32_t spar_whereabouts_begin(const char *group, const char *op, uint32_t call)
{
    whereabouts *w = own();
    uint32_t turn = w ? __atomic_load_n(&w->turn, __ATOMIC_RELAXED) : 1;
    if (turn % 2 || !__atomic_compare_exchange_n(&w->turn, &turn, turn + 1, 0, __ATOMIC_ACQUIRE,
                                                 __ATOMIC_RELAXED))
        return 0; /* another thread begins a call just now: that one is as new */
    __atomic_store_n(&w->call, call, __ATOMIC_RELEASE);
    spar_text_write(w->group, GROUP, group ? group : "unnamed");
    spar_text_write(w->op, OP, op ? op : "a call");
    __atomic_store_n(&w->turn, turn + 2, __ATOMIC_RELEASE);
    return turn + 2;
}

void spar_whereabouts_end(uint32_t begun, int gave_up)
{
    whereabouts *w = begun ? own() : NULL;
    if (w && __atomic_load_n(&w->turn, __ATOMIC_RELAXED) == begun)
        __atomic_store_n(&w->ended, begun + (gave_up != 0), __ATOMIC_RELAXED);
}

void spar_whereabouts_read(const char *base, int64_t length, char *text, size_t size)
{
    const whereabouts *w = (const void *)(base + length);
    char group[GROUP * sizeof(uint64_t)], op[OP * sizeof(uint64_t)];
    for (int looks = 0; looks < 100; looks++) {
        uint32_t turn = __atomic_load_n(&w->turn, __ATOMIC_ACQUIRE);
        uint32_t call = __atomic_load_n(&w->call, __ATOMIC_ACQUIRE);
        uint32_t ended = __atomic_load_n(&w->ended, __ATOMIC_ACQUIRE);
        spar_text_read(w->group, GROUP, group);
        spar_text_read(w->op, OP, op);
        if (turn % 2 || __atomic_load_n(&w->turn, __ATOMIC_RELAXED) != turn)
            continue;
        if (turn == 0)
            snprintf(text, size, "has begun no call");
        else
            snprintf(text, size, "%s %s, call %u on group '%s'",
                     ended == turn       ? "has ended"
                     : ended == turn + 1 ? "gave up in"
                                         : "is in",
                     op, (unsigned)call, group);
        return;
    }
    snprintf(text, size, "cannot be told");
}
