/* SPDX-License-Identifier: Apache-2.0 */
/* The peers of mailbox.c: their arenas, what the rank may write there, and what they do while it waits. */
#ifndef FUZZ_MAILBOX_PEERS_H
#define FUZZ_MAILBOX_PEERS_H

#include "../csrc/control/group.c"   /* for its MAGIC */
#include "../csrc/control/mailbox.c" /* for its SLICE_NS */

#include "fuzz.h"

static source input;
#define DRAW(seed, bound) ((void)(seed), (int)(next_byte(&input) % (unsigned)(bound)))
#include "../tests/c/random_call.h"

#include "devices/execute.h"

#include <sys/mman.h>

extern const spar_transport spar_transport_shm;

enum { RANKS = 4, LENGTH = 1 << 15, OUTPUTS = 1 << 13, CALLS = 4 };
static const int64_t GUARD = 1ll << 32, LIMIT_NS = 1000000000;

typedef struct {
    char *arena;
    _Alignas(64) char shadow[LENGTH];
    int64_t mailbox; /* its offset */
    spar_peer peer;
    int stalled; /* makes no progress, but keeps its connection */
} fake_peer;

static fake_peer fake_peers[RANKS];

static struct {
    spar_group *group;
    int world, rank, honest, interrupted, nothing_fits;
    const spar_call *call; /* the running one; NULL between calls */
    int pushed, waits;
} now;

static mailbox *box_of(fake_peer *p)
{
    return (mailbox *)(p->arena + p->mailbox);
}

static int is_peer(int rank)
{
    return rank < now.world && rank != now.rank;
}

/* ---- what the rank may write ---- */

/* Finds where this rank's bytes go by a peer's call header; 0: it is invalid, or of another call. */
static int find_targets(fake_peer *p, int rank, void **targets)
{
    const spar_plan *plan = now.call->plan;
    const mailbox *box = (const mailbox *)(p->shadow + p->mailbox);
    if (box->status != SPAR_OK || box->signature != spar_plan_signature(plan, now.call->text))
        return 0;
    for (int t = 0; t < plan->ntensors; t++) {
        __int128 offset = box->offsets[t], bytes = plan->tensors[t].rank_bytes[rank];
        if (offset < 0 || offset + bytes > LENGTH)
            return 0;
        targets[t] = p->shadow + offset;
    }
    return 1;
}

/* Whether an arena equals its shadow, except for the two fields that this rank may write. */
static int is_shadow(fake_peer *p)
{
    mailbox *box = box_of(p), *shadow = (mailbox *)(p->shadow + p->mailbox);
    shadow->waiters = box->waiters;
    shadow->detached[now.rank] = box->detached[now.rank];
    return memcmp(p->arena, p->shadow, LENGTH) == 0;
}

/* Expects that this rank changed no arena since the peers last acted, or pushed this call's bytes. */
static void check_arenas(void)
{
    void *targets[RANKS][TENSORS], *own[TENSORS];
    void *const *rows[RANKS];
    int same = 1, valid = now.call && now.call->plan && !now.pushed;
    for (int rank = 0; rank < now.world; rank++)
        if (is_peer(rank))
            same &= is_shadow(&fake_peers[rank]);
    if (same)
        return;
    for (int rank = 0; rank < now.world; rank++) {
        rows[rank] = targets[rank];
        if (valid && is_peer(rank))
            valid &= find_targets(&fake_peers[rank], rank, targets[rank]);
    }
    EXPECT(valid);
    for (int t = 0; t < now.call->plan->ntensors; t++)
        own[t] = malloc((size_t)now.call->plan->tensors[t].out_bytes);
    rows[now.rank] = own;
    spar_push(now.call->plan, now.call->inputs, now.call->rows, rows, &now.call->scale);
    for (int t = 0; t < now.call->plan->ntensors; t++)
        free(own[t]);
    now.pushed = 1;
    for (int rank = 0; rank < now.world; rank++)
        EXPECT(!is_peer(rank) || is_shadow(&fake_peers[rank]));
}

/* ---- what the peers do ---- */

static void put(fake_peer *p, int64_t at, const void *bytes, size_t size)
{
    memcpy(p->arena + at, bytes, size);
    memcpy(p->shadow + at, bytes, size);
}

#define PUT(p, field, value)                                                                                 \
    put(p, (p)->mailbox + (int64_t)offsetof(mailbox, field), &(__typeof__(((mailbox *)0)->field)){value},    \
        sizeof((mailbox *)0)->field)

/* Takes an honest rank's next step. */
static void follow_protocol(fake_peer *p, int rank)
{
    const spar_plan *plan = now.call->plan;
    const mailbox *box = box_of(p);
    if (p->stalled)
        return;
    uint32_t call = now.group->call; /* a call that this rank failed may not have ended */
    if ((int32_t)(box->published - call) < 0) {
        int64_t offsets[SPAR_GROUP_TENSORS] = {0}, at = OUTPUTS;
        for (int t = 0; plan && t < plan->ntensors; t++) {
            offsets[t] = at;
            at += (plan->tensors[t].rank_bytes[rank] + 127) & ~127ll;
            now.nothing_fits |= at > LENGTH;
        }
        put(p, p->mailbox + (int64_t)offsetof(mailbox, offsets), offsets, sizeof offsets);
        PUT(p, signature, plan ? spar_plan_signature(plan, now.call->text) : 0);
        PUT(p, status, SPAR_OK);
        PUT(p, published, call);
    } else if ((int32_t)(box->described - now.group->own->described) < 0) {
        PUT(p, described, now.group->own->described);
    } else if ((int32_t)(box->done - call) < 0) {
        PUT(p, done, call);
    }
}

/* Writes an arbitrary value into a field of a mailbox. */
static void corrupt(fake_peer *p)
{
    int64_t value = next_number(&input);
    uint32_t half = (uint32_t)value, near = now.group->call + half % 8 - 4;
    unsigned which = next_byte(&input);
    char bytes[64];
    switch (which % 10) {
    case 0:
        PUT(p, published, which & 16 ? half : near);
        break;
    case 1:
        PUT(p, done, which & 16 ? half : near);
        break;
    case 2:
        PUT(p, described, which & 16 ? half : near);
        break;
    case 3:
        PUT(p, broken, half);
        break;
    case 4:
        PUT(p, status, half);
        break;
    case 5:
        PUT(p, signature, (uint64_t)value);
        break;
    case 6: /* an offset near the end of its arena, or anywhere */
        value = which & 16 ? (int64_t)(LENGTH - (uint64_t)value) : value;
        put(p, p->mailbox + (int64_t)offsetof(mailbox, offsets[which / 32]), &value, sizeof value);
        break;
    case 7: /* a text without a terminator */
    case 8:
        memset(bytes, half, sizeof bytes);
        for (size_t at = 0; at < SPAR_GROUP_TEXT; at += sizeof bytes)
            put(p,
                p->mailbox + (int64_t)at +
                    (int64_t)(which % 10 == 7 ? offsetof(mailbox, description) : offsetof(mailbox, reason)),
                bytes, sizeof bytes);
        break;
    default:
        put(p, p->mailbox + (int64_t)(half % sizeof(mailbox) & ~7u), &value, sizeof value);
    }
}

/* One step of the peers. After the input's end, all follow the protocol. */
static void step(unsigned what)
{
    int actor = (int)((what >> 4) % (unsigned)now.world);
    if (what % 8 == 0) {
        for (int rank = 0; rank < now.world; rank++)
            if (is_peer(rank))
                follow_protocol(&fake_peers[rank], rank);
        return;
    }
    if (!is_peer(actor))
        return;
    if (what % 8 < 3) {
        follow_protocol(&fake_peers[actor], actor);
        return;
    }
    now.honest = 0;
    if (what % 8 < 6) {
        if (what & 8) /* a correct step, with a corrupt field */
            follow_protocol(&fake_peers[actor], actor);
        corrupt(&fake_peers[actor]);
    } else if (what % 8 == 6) {
        now.interrupted |= what & 8;
    } else if (what & 8) {
        fake_peers[actor].peer.socket = -1; /* hung up, and dead: no such process exists */
    } else {
        fuzz_now_ns += next_byte(&input) % 8 * SLICE_NS;
        fake_peers[actor].stalled = (int)(what >> 6 & 1);
    }
}

/* Runs while the rank waits: up to four steps, which become visible together. */
static void act(void)
{
    unsigned what = 128;
    check_arenas();
    EXPECT(++now.waits < 200);
    for (int steps = 0; steps < 4 && what & 128; steps++)
        step(what = next_byte(&input));
}

static int is_interrupted(void *context)
{
    (void)context;
    return now.interrupted;
}

#endif
