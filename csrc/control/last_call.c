/* SPDX-License-Identifier: Apache-2.0 */
#include "control/last_call.h"

#include "base/shared_text.h"

enum { GROUP = 8, OP = 8 }; /* words of 8 bytes */

/* A sequence lock: any thread of the owner writes, one at a time, while `sequence` is odd. */
typedef struct {
    uint32_t sequence, ended, call,
        unused; /* ended: the sequence of the newest call that did, + 1 if it was aborted */
    uint64_t group[GROUP], op[OP];
} shared_call;

_Static_assert(sizeof(((spar_last_call *)0)->group) == GROUP * sizeof(uint64_t) &&
                   sizeof(((spar_last_call *)0)->op) == OP * sizeof(uint64_t),
               "a copy has room for both texts");

_Static_assert(sizeof(shared_call) <= SPAR_ARENA_TAIL, "it lies behind the arena");

static shared_call *own(void)
{
    return spar_arena_is_own() ? (void *)(spar_arena_base() + spar_arena_length()) : NULL;
}

uint32_t spar_last_call_begin(const char *group, const char *op, uint32_t call)
{
    shared_call *record = own();
    uint32_t sequence = record ? __atomic_load_n(&record->sequence, __ATOMIC_RELAXED) : 1;
    if (sequence % 2 || !__atomic_compare_exchange_n(&record->sequence, &sequence, sequence + 1, 0,
                                                     __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return 0; /* another thread is recording its call, which is as new */
    __atomic_store_n(&record->call, call, __ATOMIC_RELEASE);
    spar_shared_text_write(record->group, GROUP, group ? group : "unnamed");
    spar_shared_text_write(record->op, OP, op ? op : "a call");
    __atomic_store_n(&record->sequence, sequence + 2, __ATOMIC_RELEASE);
    return sequence + 2;
}

void spar_last_call_end(uint32_t begun, int gave_up)
{
    shared_call *record = begun ? own() : NULL;
    if (record && __atomic_load_n(&record->sequence, __ATOMIC_RELAXED) == begun)
        __atomic_store_n(&record->ended, begun + (gave_up != 0), __ATOMIC_RELAXED);
}

spar_last_call spar_last_call_read(const char *base, int64_t length)
{
    const shared_call *record = (const void *)(base + length);
    spar_last_call last = {.state = SPAR_CALL_UNKNOWN};
    for (int tries = 0; tries < 100; tries++) {
        uint32_t sequence = __atomic_load_n(&record->sequence, __ATOMIC_ACQUIRE);
        last.call = __atomic_load_n(&record->call, __ATOMIC_ACQUIRE);
        uint32_t ended = __atomic_load_n(&record->ended, __ATOMIC_ACQUIRE);
        spar_shared_text_read(record->group, GROUP, last.group);
        spar_shared_text_read(record->op, OP, last.op);
        if (sequence % 2 || __atomic_load_n(&record->sequence, __ATOMIC_RELAXED) != sequence)
            continue;
        last.state = sequence == 0           ? SPAR_CALL_NONE
                     : ended == sequence     ? SPAR_CALL_ENDED
                     : ended == sequence + 1 ? SPAR_CALL_ABORTED
                                             : SPAR_CALL_RUNNING;
        break;
    }
    return last;
}
