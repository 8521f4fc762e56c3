/* The mailbox: one rank, whose peers' words are whatever the input says.
 *
 * A peer is an arena between pages that nobody may touch, and a shadow of what must stand in it. Whenever the rank
 * waits, the input lets the peers act: come, as they should, or write anything into their mailboxes, vanish, stay
 * silent. Then each arena must be its shadow, or its shadow with the rank's bytes where that peer's own words, if
 * they can be true, want them. A call ends in time, in success or in an error; in success where all were honest. */
#include "../csrc/ipc/group.c" /* MAGIC is known to it alone, */
#include "../csrc/ipc/wait.c"  /* and SLICE_NS to it */

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
    int silent; /* does nothing any more, and does not hang up */
} liar;

static liar liars[RANKS];

static struct {
    spar_group *group;
    int world, rank, honest, interrupted, nothing_fits;
    const spar_call *call; /* that runs; NULL between calls */
    int pushed, waits;
} now;

static mailbox *box_of(liar *l)
{
    return (mailbox *)(l->arena + l->mailbox);
}

static int is_peer(int rank)
{
    return rank < now.world && rank != now.rank;
}

/* ---- what the rank may have done ---- */

/* Where its bytes would go by a peer's words; 0 where they cannot be true, or are of another call. */
static int find_targets(liar *l, int rank, void **targets)
{
    const spar_plan *plan = now.call->plan;
    const mailbox *box = (const mailbox *)(l->shadow + l->mailbox);
    if (box->status != SPAR_OK || box->signature != spar_plan_signature(plan, now.call->text))
        return 0;
    for (int t = 0; t < plan->ntensors; t++) {
        __int128 offset = box->offsets[t], bytes = plan->tensors[t].rank_bytes[rank];
        if (offset < 0 || offset + bytes > LENGTH)
            return 0;
        targets[t] = l->shadow + offset;
    }
    return 1;
}

/* Whether an arena is its shadow, but for the two words that are others' to write. */
static int is_shadow(liar *l)
{
    mailbox *box = box_of(l), *shadow = (mailbox *)(l->shadow + l->mailbox);
    shadow->waiters = box->waiters;
    shadow->detached[now.rank] = box->detached[now.rank];
    return memcmp(l->arena, l->shadow, LENGTH) == 0;
}

/* Everything that changed since the peers last acted is right. */
static void look_at_arenas(void)
{
    void *targets[RANKS][TENSORS], *own[TENSORS];
    void *const *rows[RANKS];
    int same = 1, true_words = now.call && now.call->plan && !now.pushed;
    for (int rank = 0; rank < now.world; rank++)
        if (is_peer(rank))
            same &= is_shadow(&liars[rank]);
    if (same)
        return;
    for (int rank = 0; rank < now.world; rank++) {
        rows[rank] = targets[rank];
        if (true_words && is_peer(rank))
            true_words &= find_targets(&liars[rank], rank, targets[rank]);
    }
    EXPECT(true_words);
    for (int t = 0; t < now.call->plan->ntensors; t++)
        own[t] = malloc((size_t)now.call->plan->tensors[t].out_bytes);
    rows[now.rank] = own;
    EXPECT(!spar_push(now.call->plan, &spar_device_cpu, now.call->inputs, rows, &now.call->scale, NULL));
    for (int t = 0; t < now.call->plan->ntensors; t++)
        free(own[t]);
    now.pushed = 1;
    for (int rank = 0; rank < now.world; rank++)
        EXPECT(!is_peer(rank) || is_shadow(&liars[rank]));
}

/* ---- what the peers do ---- */

static void put(liar *l, int64_t at, const void *bytes, size_t size)
{
    memcpy(l->arena + at, bytes, size);
    memcpy(l->shadow + at, bytes, size);
}

#define PUT(l, field, value)                                                                                 \
    put(l, (l)->mailbox + (int64_t)offsetof(mailbox, field), &(__typeof__(((mailbox *)0)->field)){value},    \
        sizeof((mailbox *)0)->field)

/* The next thing that an honest rank does. */
static void behave(liar *l, int rank)
{
    const spar_plan *plan = now.call->plan;
    const mailbox *box = box_of(l);
    if (l->silent)
        return;
    uint32_t call = now.group->call; /* one that this rank failed may not be over yet */
    if ((int32_t)(box->published - call) < 0) {
        int64_t offsets[SPAR_GROUP_TENSORS] = {0}, at = OUTPUTS;
        for (int t = 0; plan && t < plan->ntensors; t++) {
            offsets[t] = at;
            at += (plan->tensors[t].rank_bytes[rank] + 127) & ~127ll;
            now.nothing_fits |= at > LENGTH;
        }
        put(l, l->mailbox + (int64_t)offsetof(mailbox, offsets), offsets, sizeof offsets);
        PUT(l, signature, plan ? spar_plan_signature(plan, now.call->text) : 0);
        PUT(l, status, SPAR_OK);
        PUT(l, published, call);
    } else if ((int32_t)(box->described - now.group->own->described) < 0) {
        PUT(l, described, now.group->own->described);
    } else if ((int32_t)(box->done - call) < 0) {
        PUT(l, done, call);
    }
}

static void lie(liar *l)
{
    int64_t value = next_number(&input);
    uint32_t half = (uint32_t)value, near = now.group->call + half % 8 - 4;
    unsigned which = next_byte(&input);
    char bytes[64];
    switch (which % 10) {
    case 0:
        PUT(l, published, which & 16 ? half : near);
        break;
    case 1:
        PUT(l, done, which & 16 ? half : near);
        break;
    case 2:
        PUT(l, described, which & 16 ? half : near);
        break;
    case 3:
        PUT(l, broken, half);
        break;
    case 4:
        PUT(l, status, half);
        break;
    case 5:
        PUT(l, signature, (uint64_t)value);
        break;
    case 6: /* near an end of its arena, or anywhere */
        value = which & 16 ? (int64_t)(LENGTH - (uint64_t)value) : value;
        put(l, l->mailbox + (int64_t)offsetof(mailbox, offsets[which / 32]), &value, sizeof value);
        break;
    case 7: /* a text that has no end */
    case 8:
        memset(bytes, half, sizeof bytes);
        for (size_t at = 0; at < SPAR_GROUP_TEXT; at += sizeof bytes)
            put(l,
                l->mailbox + (int64_t)at +
                    (int64_t)(which % 10 == 7 ? offsetof(mailbox, description) : offsetof(mailbox, reason)),
                bytes, sizeof bytes);
        break;
    default:
        put(l, l->mailbox + (int64_t)(half % sizeof(mailbox) & ~7u), &value, sizeof value);
    }
}

/* One step of the peers. An input that is used up means that all behave. */
static void step(unsigned what)
{
    unsigned who = (what >> 4) % (unsigned)now.world;
    if (what % 8 == 0) {
        for (int rank = 0; rank < now.world; rank++)
            if (is_peer(rank))
                behave(&liars[rank], rank);
        return;
    }
    if (!is_peer((int)who))
        return;
    if (what % 8 < 3) {
        behave(&liars[who], (int)who);
        return;
    }
    now.honest = 0;
    if (what % 8 < 6) {
        if (what & 8) /* comes, with a lie */
            behave(&liars[who], (int)who);
        lie(&liars[who]);
    } else if (what % 8 == 6) {
        now.interrupted |= what & 8;
    } else if (what & 8) {
        liars[who].peer.socket = -1; /* hung up; and dead, as there is no such process */
    } else {
        fuzz_now_ns += next_byte(&input) % 8 * SLICE_NS;
        liars[who].silent = (int)(what >> 6 & 1);
    }
}

/* While the rank waits: a few steps, which it sees together. */
static void act(void)
{
    unsigned what = 128;
    look_at_arenas();
    EXPECT(++now.waits < 200);
    for (int steps = 0; steps < 4 && what & 128; steps++)
        step(what = next_byte(&input));
}

static int is_interrupted(void *context)
{
    (void)context;
    return now.interrupted;
}

/* ---- a call ---- */

static void check_status(spar_status status, const spar_call *call)
{
    int broken = now.group->own->broken != 0;
    switch (status) {
    case SPAR_OK:
        EXPECT(call->failed == SPAR_OK && now.group->call == now.group->own->done);
        break;
    case SPAR_TIMEOUT:
    case SPAR_PEER_LOST:
    case SPAR_BROKEN:
    case SPAR_INTERRUPTED:
    case SPAR_TRANSPORT:
        EXPECT(broken && !now.honest);
        break;
    case SPAR_MISMATCH:
    case SPAR_NO_MEMORY:
        EXPECT(!now.honest || call->failed == status);
        break;
    default:
        EXPECT(status == call->failed);
    }
    if (status != SPAR_OK)
        EXPECT(*spar_last_error());
    for (int rank = 0; rank < now.world; rank++) {
        spar_description made;
        int known = spar_transport_shm.description(&(spar_comm){.state = now.group}, rank, &made);
        EXPECT(!known || (status != SPAR_OK && strlen(made.text) < SPAR_GROUP_TEXT));
    }
    EXPECT(fuzz_now_ns < call->deadline.at_ns + 4 * LIMIT_NS);
}

/* What the rank itself moves to its own outputs is there. */
static void check_own(const spar_call *call)
{
    for (int fill = 0; fill < 2; fill++) {
        void *expected[TENSORS];
        for (int t = 0; t < call->plan->ntensors; t++) {
            size_t bytes = (size_t)call->plan->tensors[t].out_bytes;
            expected[t] = malloc(bytes);
            if (fill)
                memcpy(expected[t], call->outputs[t], bytes);
            else
                memset(expected[t], 0, bytes);
        }
        EXPECT(!spar_copy_own(call->plan, &spar_device_cpu, call->inputs, expected, &call->scale, NULL));
        for (int t = 0; t < call->plan->ntensors; t++) {
            size_t bytes = (size_t)call->plan->tensors[t].out_bytes;
            EXPECT(!fill || memcmp(expected[t], call->outputs[t], bytes) == 0);
            free(expected[t]);
        }
    }
}

/* Any call that this rank makes; its inputs are right, and stay as they are. */
static void run_call(spar_comm *comm)
{
    part parts[TENSORS];
    buffer in[TENSORS];
    spar_tensor tensors[TENSORS];
    const void *inputs[TENSORS];
    void *outputs[TENSORS] = {NULL};
    spar_memory *blocks[TENSORS] = {NULL};
    spar_plan *plan;
    int count, fails = next_byte(&input);
    const spar_op *op = draw_call(0, now.world, &count, parts);
    for (int t = 0; t < count; t++) {
        part *p = &parts[t];
        in[t] = make_buffer(p, now.rank, &p->in, p->gap);
        visit(p, &in[t], 0);
        inputs[t] = in[t].data;
        tensors[t] = (spar_tensor){p->item, p->ndim, in[t].extents, in[t].strides, p->nargs, p->args};
    }
    spar_request request = {op, now.world, now.rank, 0, count, tensors};
    EXPECT(!spar_plan_get(&request, &plan));
    spar_call call = {.plan = fails % 16 == 15 ? NULL : plan,
                      .inputs = inputs,
                      .outputs = outputs,
                      .blocks = blocks,
                      .device = &spar_device_cpu,
                      .scale = {SPAR_UNSCALED, 0, 1},
                      .text = "",
                      .failed = fails % 16 < 14    ? SPAR_OK
                                : fails % 32 == 14 ? SPAR_NO_MEMORY
                                                   : SPAR_INVALID,
                      .why = "it was told to",
                      .deadline = {fuzz_now_ns + LIMIT_NS, is_interrupted, NULL}};
    int was_broken = now.group->own->broken != 0;
    now.pushed = now.waits = now.nothing_fits = 0;
    now.call = &call;
    spar_status status = spar_comm_run(comm, &call);
    look_at_arenas();
    now.honest &= !now.nothing_fits && now.waits * SLICE_NS < LIMIT_NS / 2; /* none too late */
    check_status(status, &call);
    /* where peers lied, the word may name another reason */
    EXPECT(!was_broken || status == SPAR_BROKEN || (!now.honest && status != SPAR_OK));
    if (status == SPAR_OK)
        check_own(&call);
    now.call = NULL;
    for (int t = 0; t < count; t++) {
        EXPECT((blocks[t] != NULL) == (status == SPAR_OK));
        visit(&parts[t], &in[t], 1);
        if (blocks[t])
            spar_memory_free(blocks[t]);
        free(in[t].data);
    }
    spar_plan_release(plan);
}

/* ---- an input ---- */

/* Peers, and what they say of their mailboxes before the first call. */
static int meet(int64_t *offsets)
{
    for (int rank = 0; rank < now.world; rank++) {
        liar *l = &liars[rank];
        if (!is_peer(rank))
            continue;
        memset(l->arena, NOT_WRITTEN, LENGTH);
        memset(l->shadow, NOT_WRITTEN, LENGTH);
        l->mailbox = 64 * (next_byte(&input) % 8);
        mailbox empty = {.world = now.world, .rank = rank};
        memcpy(empty.magic, MAGIC, sizeof MAGIC);
        put(l, l->mailbox, &empty, sizeof empty);
        l->peer = (spar_peer){.endpoint = {INT32_MAX, (uint64_t)rank + 1},
                              .base = l->arena,
                              .length = LENGTH,
                              .socket = -1,
                              .pidfd = -1,
                              .groups = 2};
        l->silent = 0;
        offsets[rank] = l->mailbox;
        unsigned what = next_byte(&input);
        switch (what % 8) {
        case 1:
            offsets[rank] = next_number(&input);
            break;
        case 2:
            PUT(l, world, (int32_t)next_number(&input));
            break;
        case 3:
            PUT(l, rank, (int32_t)next_number(&input));
            break;
        case 4:
            put(l, l->mailbox + what / 32, &what, 1);
            break;
        case 5:
            l->peer.length = next_number(&input) % (LENGTH / 64 + 1) * 64;
            break;
        case 6: /* a mailbox that begins in the arena, and ends outside */
            offsets[rank] = LENGTH - 64 * (8 + what / 8);
            put(l, offsets[rank], &empty, 16);
            break;
        default:
            continue;
        }
        now.honest = 0;
    }
    return now.honest;
}

static void make_arenas(void)
{
    EXPECT(!spar_arena_open(1 << 20, 1));
    for (int rank = 0; rank < RANKS; rank++) {
        char *room = mmap(NULL, (size_t)(2 * GUARD + LENGTH), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        EXPECT(room != MAP_FAILED && mprotect(room + GUARD, LENGTH, PROT_READ | PROT_WRITE) == 0);
        EXPECT(mprotect(room + GUARD + LENGTH, SPAR_ARENA_TAIL, PROT_READ) == 0); /* whereabouts */
        liars[rank].arena = room + GUARD;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int quiet[2] = {-1, -1}; /* a pipe on which nothing ever comes */
    spar_peer *peers[RANKS] = {NULL};
    int64_t offsets[RANKS] = {0}, own;
    spar_arena_stats stats;
    if (!liars[0].arena)
        make_arenas();
    if (quiet[0] < 0)
        EXPECT(pipe(quiet) == 0);
    input = (source){data, data + size};
    memset(&now, 0, sizeof now);
    now.honest = 1;
    now.world = 2 + (int)(next_byte(&input) % (RANKS - 1));
    now.rank = (int)(next_byte(&input) % (unsigned)now.world);
    int honest = meet(offsets);
    EXPECT(!spar_group_open(now.world, now.rank, now.world, 0, &now.group, &own));
    spar_group_spin(now.group, next_byte(&input) % 4 ? 0 : 50000);
    for (int rank = 0; rank < now.world; rank++)
        if (is_peer(rank)) {
            peers[rank] = &liars[rank].peer;
            peers[rank]->socket = quiet[0];
        }
    spar_comm comm = {
        .transport = &spar_transport_shm, .world = now.world, .rank = now.rank, .state = now.group};
    spar_status status = spar_group_attach(now.group, peers, offsets);
    EXPECT(status == SPAR_OK || (status == SPAR_TRANSPORT && !honest && *spar_last_error()));
    if (next_byte(&input) % 4 == 0) { /* near the wrap */
        spar_group_start_at(now.group, UINT32_MAX - 1);
        for (int rank = 0; status == SPAR_OK && rank < now.world; rank++)
            if (is_peer(rank)) {
                PUT(&liars[rank], published, UINT32_MAX - 1);
                PUT(&liars[rank], described, UINT32_MAX - 1);
                PUT(&liars[rank], done, UINT32_MAX - 1);
            }
    }
    fuzz_waits = act;
    for (int i = next_byte(&input) % CALLS; status == SPAR_OK && i >= 0; i--)
        run_call(&comm);
    fuzz_waits = NULL;
    /* all go, and nothing is left */
    for (int rank = 0; rank < now.world; rank++)
        if (is_peer(rank)) {
            liars[rank].peer.socket = -1;
            now.group->own->detached[rank] = 1;
        }
    spar_group_close(now.group);
    for (int looks = 0; looks < 2; looks++)
        spar_arena_trim();
    spar_arena_read_stats(&stats);
    EXPECT(stats.allocated == 0 && stats.quarantined == 0);
    return 0;
}
