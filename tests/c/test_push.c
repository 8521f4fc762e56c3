/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that push into each other's slots, over the stand-ins of tests/standin: each is a thread with a
 * stream of its own, and all slots are memory of this process: TSan sees how peers order their accesses.
 *
 *   test_push RANKS CALLS SLOT   each rank makes CALLS random calls over slots of SLOT bytes */
#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"
#include "../standin/memory.h"
#include "random_call.h"
#include "transports/nccl/push.h"

#include <pthread.h>

enum { AT_ONCE = 6, CTAS = 3 };

static const spar_scale UNSCALED = {SPAR_UNSCALED, 0, 1};

typedef struct {
    int world, calls;
    int64_t bytes;
    uint64_t bases[WORLD], flags[WORLD];
} group;

typedef struct {
    const group *group;
    int rank;
} member;

/* What a call uses until the stream has ended it. */
typedef struct {
    int count;
    part parts[TENSORS];
    buffer inputs[TENSORS], outputs[TENSORS];
    spar_plan *plan;
} exchange;

static void make_group(group *g, int world, int calls, int64_t bytes)
{
    *g = (group){.world = world, .calls = calls, .bytes = bytes};
    for (int rank = 0; rank < world; rank++) {
        void *slot = aligned_alloc(256, (size_t)bytes), *flags = calloc(WORLD, sizeof(uint32_t));
        EXPECT(slot && flags);
        g->bases[rank] = (uintptr_t)on_device(slot);
        g->flags[rank] = (uintptr_t)on_device(flags);
    }
}

static void free_group(const group *g)
{
    for (int rank = 0; rank < g->world; rank++) {
        free(reached((void *)(uintptr_t)g->bases[rank]));
        free(reached((void *)(uintptr_t)g->flags[rank]));
    }
}

static spar_push_state *open_rank(const group *g, int rank)
{
    const spar_slots slots = {NULL, g->bytes, g->bases, g->flags};
    spar_push_state *push = NULL;
    EXPECT(!spar_push_open(g->world, rank, &slots, &push));
    return push;
}

/* Gathers of tensors whose neighbours are on different ranks: so many blocks that a half takes launches. */
static void draw_interleaved(int world, int *count, part *parts)
{
    *count = TENSORS;
    for (part *p = parts; p < parts + TENSORS; p++) {
        int64_t total = 0;
        *p = (part){.item = 16, .ndim = 1, .nargs = 1, .out = {.dim = -1}};
        put_number(p, 0);
        put_number(p, SPAR_PACKED);
        put_number(p, 1);
        put_number(p, EXTENT / world);
        for (int i = 0; i < EXTENT / world; i++) {
            put_number(p, world);
            for (int rank = 0; rank < world; rank++)
                assign(&p->in, &total, rank, 1);
        }
        p->whole[0] = total;
        p->args[0] = p->nargs - 1;
        put_number(p, -1);
    }
}

static void begin(exchange *x, spar_push_state *push, uint64_t seed, int64_t deadline_ns, CUstream stream)
{
    spar_tensor tensors[TENSORS];
    const void *inputs[TENSORS];
    void *outputs[TENSORS];
    if (seed % 4 == 0)
        draw_interleaved(push->world, &x->count, x->parts);
    else
        draw_call(seed, push->world, &x->count, x->parts);
    for (int t = 0; t < x->count; t++) {
        const part *p = &x->parts[t];
        x->inputs[t] = make_buffer(p, push->rank, &p->in, p->gap);
        x->outputs[t] = make_buffer(p, push->rank, &p->out, 0);
        visit(p, &x->inputs[t], 0);
        tensors[t] = tensor_of(p, &x->inputs[t]);
        inputs[t] = on_device(x->inputs[t].data);
        outputs[t] = on_device(x->outputs[t].data);
    }
    const spar_request request = {push->world, push->rank, SPAR_SIDE_PULL, x->count, tensors};
    EXPECT(!spar_plan_build(&request, &x->plan));
    const spar_call call = {.plan = x->plan,
                            .inputs = inputs,
                            .outputs = outputs,
                            .scale = UNSCALED,
                            .deadline = {.at_ns = deadline_ns},
                            .stream = stream};
    EXPECT(!spar_push_run(push, &call, 0));
}

static void end(exchange *x, int was_made)
{
    for (int t = 0; t < x->count; t++) {
        if (was_made)
            visit(&x->parts[t], &x->outputs[t], 1);
        EXPECT(x->outputs[t].data[x->outputs[t].bytes] == NOT_WRITTEN);
        free(x->inputs[t].data);
        free(x->outputs[t].data);
    }
    spar_plan_release(x->plan);
}

/* Makes all calls, a few at once. */
static void *run(void *argument)
{
    const member *m = argument;
    static exchange all[WORLD][AT_ONCE];
    exchange *some = all[m->rank];
    spar_entered before;
    CUstream stream;
    EXPECT(!spar_cuda_enter(0, &before));
    spar_push_state *push = open_rank(m->group, m->rank);
    EXPECT(spar_cu.StreamCreate(&stream, SPAR_CU_STREAM_NON_BLOCKING) == 0);
    for (int call = 0; call < m->group->calls; call += AT_ONCE) {
        for (int i = 0; i < AT_ONCE; i++)
            begin(&some[i], push, scramble((uint64_t)(call + i)), 0, stream);
        EXPECT(spar_cu.StreamSynchronize(stream) == 0);
        for (int i = 0; i < AT_ONCE; i++)
            end(&some[i], 1);
    }
    EXPECT(__atomic_load_n(push->stop, __ATOMIC_ACQUIRE) == 0);
    EXPECT(spar_cu.StreamDestroy(stream) == 0);
    spar_push_close(push);
    spar_cuda_leave(&before);
    return NULL;
}

/* The last peer makes no call: the wait ends by the host's word, or by its limit, and the stream goes on.
 * What follows neither waits nor writes. */
static void test_absent_peer(int by_limit)
{
    enum { RANKS = 3 };
    static exchange first, second;
    group g;
    spar_push_state *push[RANKS];
    spar_entered before;
    CUstream stream, other;
    int64_t begun = spar_now_ns();
    make_group(&g, RANKS, 0, 1 << 16);
    EXPECT(!spar_cuda_enter(0, &before));
    EXPECT(spar_cu.StreamCreate(&stream, SPAR_CU_STREAM_NON_BLOCKING) == 0);
    EXPECT(spar_cu.StreamCreate(&other, SPAR_CU_STREAM_NON_BLOCKING) == 0);
    for (int rank = 0; rank < RANKS - 1; rank++)
        push[rank] = open_rank(&g, rank);
    begin(&first, push[0], 1, by_limit ? begun : 0, stream);
    begin(&second, push[1], 1, 0, other);
    EXPECT(spar_cu.StreamQuery(stream) == SPAR_CU_NOT_READY);
    if (!by_limit)
        __atomic_store_n(push[0]->stop, UINT32_MAX, __ATOMIC_RELEASE);
    __atomic_store_n(push[1]->stop, UINT32_MAX, __ATOMIC_RELEASE);
    EXPECT(spar_cu.StreamSynchronize(stream) == 0 && spar_cu.StreamSynchronize(other) == 0);
    EXPECT(!by_limit || spar_now_ns() - begun > 900000000);
    EXPECT(__atomic_load_n(push[0]->stop, __ATOMIC_ACQUIRE) == (by_limit ? RANKS : UINT32_MAX));
    end(&first, 0);
    end(&second, 0);
    uint32_t *signalled = reached((void *)(uintptr_t)g.flags[2]);
    EXPECT(signalled[0] == 1 && signalled[1] == 1);
    unsigned char *slot = reached((void *)(uintptr_t)g.bases[2]);
    memset(slot, NOT_WRITTEN, (size_t)g.bytes);
    for (uint64_t seed = 2; seed < 8; seed++) {
        begin(&first, push[0], seed, 0, stream);
        EXPECT(spar_cu.StreamSynchronize(stream) == 0);
        end(&first, 0);
    }
    EXPECT(signalled[0] == 1);
    for (int64_t i = 0; i < g.bytes; i++)
        EXPECT(slot[i] == NOT_WRITTEN);
    EXPECT(spar_cu.StreamDestroy(stream) == 0 && spar_cu.StreamDestroy(other) == 0);
    for (int rank = 0; rank < RANKS - 1; rank++)
        spar_push_close(push[rank]);
    spar_cuda_leave(&before);
    free_group(&g);
}

static void test_small_slot(void)
{
    const uint64_t addresses[WORLD] = {0};
    const spar_slots small = {NULL, 1023, addresses, addresses}, none = {.none = "no memory"};
    spar_push_state *push;
    EXPECT(spar_push_open(3, 0, &small, &push) == SPAR_TRANSPORT);
    EXPECT(strcmp(spar_last_error(), "SPAR_PUSH_SLOT is 1023; 3 ranks need at least 1024") == 0);
    EXPECT(spar_push_open(3, 0, &none, &push) == SPAR_TRANSPORT);
    EXPECT(strcmp(spar_last_error(), "no memory") == 0);
}

int test_push(int argc, char **argv)
{
    pthread_t threads[WORLD];
    member members[WORLD];
    group g;
    EXPECT(argc == 4);
    EXPECT(!spar_driver_open() && !spar_cuda_open() && !spar_cuda_prepare(0));
    spar_kernel_ctas = CTAS;
    test_small_slot();
    test_absent_peer(0);
    test_absent_peer(1);
    make_group(&g, atoi(argv[1]), atoi(argv[2]), atoi(argv[3]));
    for (int rank = 0; rank < g.world; rank++) {
        members[rank] = (member){&g, rank};
        EXPECT(!pthread_create(&threads[rank], NULL, run, &members[rank]));
    }
    for (int rank = 0; rank < g.world; rank++)
        pthread_join(threads[rank], NULL);
    free_group(&g);
    spar_plan_cache_limit(0);
    return 0;
}
