/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes the mailbox protocol: one real rank, and simulated peers that the input controls.
 *
 * A peer is an arena between guard pages, and a shadow copy of its expected contents. Whenever the rank
 * waits, the input lets the peers act: follow the protocol, write anything into their mailboxes, die, or
 * stall. Then each arena must equal its shadow, or the shadow after this rank's push to the offsets that the
 * peer published, if these are valid. Each call ends in time, with success or an error; with success if all
 * peers were honest. */
#include "mailbox_peers.h"

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
        const spar_description *made = spar_group_description(now.group, rank);
        EXPECT(!made || (status != SPAR_OK && strlen(made->text) < SPAR_GROUP_TEXT));
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
        spar_copy_own(call->plan, call->inputs, expected, &call->scale);
        for (int t = 0; t < call->plan->ntensors; t++) {
            size_t bytes = (size_t)call->plan->tensors[t].out_bytes;
            EXPECT(!fill || memcmp(expected[t], call->outputs[t], bytes) == 0);
            free(expected[t]);
        }
    }
}

/* Makes a random valid call on this rank; its inputs must not change. */
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
    draw_call(0, now.world, &count, parts);
    for (int t = 0; t < count; t++) {
        part *p = &parts[t];
        in[t] = make_buffer(p, now.rank, &p->in, p->gap, p->turn);
        visit(p, &in[t], 0);
        inputs[t] = in[t].data;
        tensors[t] = tensor_of(p, &in[t]);
    }
    spar_request request = {now.world, now.rank, 0, count, tensors};
    EXPECT(!spar_plan_get(&request, &plan));
    spar_call call = {.plan = fails % 16 == 15 ? NULL : plan,
                      .inputs = inputs,
                      .outputs = outputs,
                      .blocks = blocks,
                      .scale = {SPAR_UNSCALED, 0, 1},
                      .text = "",
                      .failed = fails % 16 < 14    ? SPAR_OK
                                : fails % 32 == 14 ? SPAR_NO_MEMORY
                                                   : SPAR_INVALID,
                      .why = "an injected failure",
                      .deadline = {fuzz_now_ns + LIMIT_NS, is_interrupted, NULL}};
    int was_broken = now.group->own->broken != 0;
    now.pushed = now.waits = now.nothing_fits = 0;
    now.call = &call;
    spar_status status = spar_comm_run(comm, &call);
    check_arenas();
    now.honest &= !now.nothing_fits && now.waits * SLICE_NS < LIMIT_NS / 2; /* no step came too late */
    check_status(status, &call);
    /* corrupt peers may change the error */
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

/* ---- one input ---- */

/* Creates the peers with their mailboxes; returns 0 if the input made one invalid. */
static int create_peers(int64_t *offsets)
{
    for (int rank = 0; rank < now.world; rank++) {
        fake_peer *p = &fake_peers[rank];
        if (!is_peer(rank))
            continue;
        memset(p->arena, NOT_WRITTEN, LENGTH);
        memset(p->shadow, NOT_WRITTEN, LENGTH);
        p->mailbox = 64 * (next_byte(&input) % 8);
        mailbox empty = {.world = now.world, .rank = rank, .core = (uint32_t)rank % 2}; /* some on its core */
        memcpy(empty.magic, MAGIC, sizeof MAGIC);
        put(p, p->mailbox, &empty, sizeof empty);
        p->peer = (spar_peer){.endpoint = {INT32_MAX, (uint64_t)rank + 1},
                              .base = p->arena,
                              .length = LENGTH,
                              .socket = -1,
                              .pidfd = -1,
                              .groups = 2};
        p->stalled = 0;
        offsets[rank] = p->mailbox;
        unsigned what = next_byte(&input);
        switch (what % 8) {
        case 1:
            offsets[rank] = next_number(&input);
            break;
        case 2:
            PUT(p, world, (int32_t)next_number(&input));
            break;
        case 3:
            PUT(p, rank, (int32_t)next_number(&input));
            break;
        case 4:
            put(p, p->mailbox + what / 32, &what, 1);
            break;
        case 5:
            p->peer.length = next_number(&input) % (LENGTH / 64 + 1) * 64;
            break;
        case 6: /* a mailbox that begins inside the arena and ends outside */
            offsets[rank] = LENGTH - 64 * (8 + what / 8);
            put(p, offsets[rank], &empty, 16);
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
        EXPECT(mprotect(room + GUARD + LENGTH, SPAR_ARENA_TAIL, PROT_READ) == 0); /* its last call */
        fake_peers[rank].arena = room + GUARD;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int quiet[2] = {-1, -1}; /* a pipe that nobody writes to */
    spar_peer *peers[RANKS] = {NULL};
    int64_t offsets[RANKS] = {0}, own;
    spar_arena_stats stats;
    if (!fake_peers[0].arena)
        make_arenas();
    if (quiet[0] < 0)
        EXPECT(pipe(quiet) == 0);
    input = (source){data, data + size};
    memset(&now, 0, sizeof now);
    now.honest = 1;
    now.world = 2 + (int)(next_byte(&input) % (RANKS - 1));
    now.rank = (int)(next_byte(&input) % (unsigned)now.world);
    int honest = create_peers(offsets);
    EXPECT(!spar_group_open(now.world, now.rank, 0, &now.group, &own));
    spar_group_spin(now.group, next_byte(&input) % 4 ? 0 : 50000);
    for (int rank = 0; rank < now.world; rank++)
        if (is_peer(rank)) {
            peers[rank] = &fake_peers[rank].peer;
            peers[rank]->socket = quiet[0];
        }
    spar_comm comm = {
        .transport = &spar_transport_shm, .world = now.world, .rank = now.rank, .group = now.group};
    spar_status status = spar_group_attach(now.group, peers, offsets);
    EXPECT(status == SPAR_OK || (status == SPAR_TRANSPORT && !honest && *spar_last_error()));
    if (next_byte(&input) % 4 == 0) { /* call numbers near the wrap */
        spar_group_start_at(now.group, UINT32_MAX - 1);
        for (int rank = 0; status == SPAR_OK && rank < now.world; rank++)
            if (is_peer(rank)) {
                PUT(&fake_peers[rank], published, UINT32_MAX - 1);
                PUT(&fake_peers[rank], described, UINT32_MAX - 1);
                PUT(&fake_peers[rank], done, UINT32_MAX - 1);
            }
    }
    fuzz_on_wait = act;
    for (int i = next_byte(&input) % CALLS; status == SPAR_OK && i >= 0; i--)
        run_call(&comm);
    fuzz_on_wait = NULL;
    /* all peers leave; then nothing is allocated */
    for (int rank = 0; rank < now.world; rank++)
        if (is_peer(rank)) {
            fake_peers[rank].peer.socket = -1;
            now.group->own->detached[rank] = 1;
        }
    spar_group_close(now.group);
    for (int i = 0; i < 2; i++)
        spar_arena_trim();
    spar_arena_read_stats(&stats);
    EXPECT(stats.allocated == 0 && stats.quarantined == 0);
    return 0;
}
