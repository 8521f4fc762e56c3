/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that push into each other's slots, over the stand-ins of tests/standin: each is a thread with a
 * stream of its own, and all slots are memory of this process: TSan sees how peers order their accesses.
 * Outputs of direct calls lie in the slots, in segments that are taken as torch takes them.
 *
 *   test_push RANKS CALLS SLOT   each rank makes CALLS random calls over slots of SLOT bytes */
#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"
#include "../standin/memory.h"
#include "random_call.h"
#include "transports/cuda/watchdog.h"
#include "transports/push/push.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

enum { AT_ONCE = 6, CTAS = 3 };

static const uint32_t MANY = 1u << 31; /* rounds without a direct call: far from its first offer */

static const spar_scale UNSCALED = {SPAR_UNSCALED, 0, 1};

typedef struct {
    int world, calls;
    int64_t bytes; /* that a slot may have, without its words */
    char *slots[WORLD];
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
    void *owned[TENSORS]; /* the outputs that no pool has */
    spar_plan *plan;
    uint32_t *mark; /* receives 1 when it has ended; NULL: none does */
} exchange;

/* A rank's memory for outputs, cut from one segment. Once it is used up, it begins anew: calls before may
 * still write to what it hands out, in the order of the stream. */
typedef struct {
    char *segment;
    size_t bytes, used;
} pool;

static void make_group(group *g, int world, int calls, int64_t bytes)
{
    *g = (group){.world = world, .calls = calls, .bytes = bytes};
    for (int rank = 0; rank < world; rank++) {
        void *slot = aligned_alloc(4096, (size_t)(SPAR_PUSH_WORDS + bytes + 4095) / 4096 * 4096);
        EXPECT(slot);
        memset(slot, 0, SPAR_PUSH_WORDS);
        g->slots[rank] = on_device(slot);
    }
}

static void free_group(const group *g)
{
    for (int rank = 0; rank < g->world; rank++)
        free(reached(g->slots[rank]));
}

static void keep(void *unused)
{
    (void)unused;
}

/* With as little memory as a slot may have, which then grows. */
static spar_push_state *open_rank(const group *g, int rank)
{
    spar_push_state *push = NULL;
    int64_t bytes;
    EXPECT(!spar_push_first_bytes(g->world, g->bytes, &bytes));
    EXPECT(!spar_push_open(g->world, rank, 0, g->slots, bytes / 4 * 3, g->bytes, keep, NULL, &push));
    return push;
}

/* The words of a rank's slot, as the host sees them. */
static uint32_t *words_of(const group *g, int rank)
{
    return reached(g->slots[rank]);
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

static pool make_pool(spar_push_state *push, CUstream stream)
{
    pool p = {.bytes = (size_t)(push->bytes - push->heap - push->room) / 512 * 512};
    spar_outputs_enter(push->outputs);
    p.segment = p.bytes ? spar_outputs_allocate(p.bytes, 0, stream) : NULL;
    spar_outputs_enter(NULL);
    EXPECT(!p.bytes || spar_outputs_have(push->outputs, p.segment, (int64_t)p.bytes));
    return p;
}

static void free_pool(const pool *p, CUstream stream)
{
    if (p->segment)
        spar_outputs_free(p->segment, p->bytes, 0, stream);
}

/* Overwrites memory in the stream, as an earlier user of it. */
static void use_before(CUstream stream, void *memory, int64_t bytes)
{
    static _Thread_local int (*spoil)(void *, void *, size_t);
    void *library = spoil ? NULL : dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library)
        *(void **)&spoil = dlsym(library, "standin_spoil");
    EXPECT(spoil(stream, memory, (size_t)bytes) == 0);
}

static int begins_anew(const pool *memory)
{
    return memory->used > memory->bytes / 2;
}

/* Moves an output to the pool, if it has room; some of them to an address that cannot be offered. */
static void take_output(pool *memory, buffer *output, uint64_t seed, CUstream stream)
{
    size_t size = ((size_t)output->bytes + 512) / 512 * 512, shift = seed % 8 == 0 ? 4 : 0;
    if (!memory || memory->used + size + 512 > memory->bytes)
        return;
    output->data = reached(memory->segment + memory->used + shift);
    memory->used += size + (shift ? 512 : 0);
    use_before(stream, on_device(output->data), output->bytes + 1);
}

/* Lets the slot grow as all ranks' do: each lacks room whenever they compare that. */
static void make_room(spar_push_state *push, const spar_plan *plan)
{
    int64_t bytes = spar_push_missing(push, plan);
    if (!bytes && spar_push_is_due(push, plan))
        bytes = spar_push_more(push, 1);
    if (bytes)
        EXPECT(!spar_push_extend(push, push->bytes + bytes, plan) && push->bytes <= push->limit);
}

static void begin(exchange *x, spar_push_state *push, uint64_t seed, int64_t deadline_ns, CUstream stream,
                  pool *memory)
{
    spar_tensor tensors[TENSORS];
    const void *inputs[TENSORS];
    void *outputs[TENSORS];
    if (memory && begins_anew(memory))
        memory->used = 0;
    if (seed % 4 == 0)
        draw_interleaved(push->world, &x->count, x->parts);
    else
        draw_call(seed, push->world, &x->count, x->parts);
    for (int t = 0; t < x->count; t++) {
        const part *p = &x->parts[t];
        x->inputs[t] = make_buffer(p, push->rank, &p->in, p->gap, p->turn);
        x->outputs[t] = make_buffer(p, push->rank, &p->out, 0, 0);
        x->owned[t] = x->outputs[t].data;
        take_output(memory, &x->outputs[t], seed, stream);
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
    make_room(push, x->plan);
    EXPECT(!spar_push_run(push, &call, 0, x->mark, 1));
}

/* `left`: whether no call after it has taken its outputs' memory. */
static void end(exchange *x, int was_made, int left)
{
    for (int t = 0; t < x->count; t++) {
        int is_left = left || x->outputs[t].data == x->owned[t];
        if (was_made && is_left)
            visit(&x->parts[t], &x->outputs[t], 1);
        EXPECT(!is_left || x->outputs[t].data[x->outputs[t].bytes] == NOT_WRITTEN);
        free(x->inputs[t].data);
        free(x->owned[t]);
    }
    spar_plan_release(x->plan);
}

/* Makes all calls, a few at once. */
static void *run(void *argument)
{
    const spar_deadline never = {0};
    const member *m = argument;
    static exchange all[WORLD][AT_ONCE];
    exchange *some = all[m->rank];
    spar_entered before;
    CUstream stream;
    EXPECT(!spar_cuda_enter(0, &before));
    spar_push_state *push = open_rank(m->group, m->rank);
    ((spar_kernel_sync *)reached(push->sync))->rounds = MANY;
    EXPECT(spar_cu.StreamCreate(&stream, SPAR_CU_STREAM_NON_BLOCKING) == 0);
    EXPECT(!spar_push_check(push, 7, &never, NULL));
    pool memory = make_pool(push, stream);
    for (int call = 0; call < m->group->calls; call += AT_ONCE) {
        int anew[AT_ONCE + 1] = {0}, left = 1;
        for (int i = 0; i < AT_ONCE; i++) {
            anew[i] = begins_anew(&memory);
            begin(&some[i], push, scramble((uint64_t)(call + i)), 0, stream, m->rank % 2 ? &memory : NULL);
        }
        EXPECT(spar_cu.StreamSynchronize(stream) == 0);
        for (int i = AT_ONCE - 1; i >= 0; i--) {
            left = left && !anew[i + 1];
            end(&some[i], 1, left);
        }
    }
    EXPECT(__atomic_load_n(push->stop, __ATOMIC_ACQUIRE) == 0);
    EXPECT(spar_cu.StreamDestroy(stream) == 0);
    free_pool(&memory, stream);
    spar_push_close(push);
    spar_cuda_leave(&before);
    return NULL;
}

/* The last peer makes no call: the wait ends by the host's word, or by its limit, and the stream goes on.
 * What follows neither waits nor writes. In a direct call it is the wait for the peer's offer. */
static void test_absent_peer(int by_limit, int direct)
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
    for (int rank = 0; rank < RANKS - 1; rank++) {
        push[rank] = open_rank(&g, rank);
        push[rank]->least = direct ? 0 : INT64_MAX;
    }
    begin(&first, push[0], 1, by_limit ? begun : 0, stream, NULL);
    begin(&second, push[1], 1, 0, other, NULL);
    EXPECT(spar_cu.StreamQuery(stream) == SPAR_CU_NOT_READY);
    if (!by_limit)
        __atomic_store_n(push[0]->stop, UINT32_MAX, __ATOMIC_RELEASE);
    __atomic_store_n(push[1]->stop, UINT32_MAX, __ATOMIC_RELEASE);
    EXPECT(spar_cu.StreamSynchronize(stream) == 0 && spar_cu.StreamSynchronize(other) == 0);
    EXPECT(!by_limit || spar_now_ns() - begun > 900000000);
    EXPECT(__atomic_load_n(push[0]->stop, __ATOMIC_ACQUIRE) == (by_limit ? RANKS : UINT32_MAX));
    end(&first, 0, 1);
    end(&second, 0, 1);
    uint32_t *signalled = words_of(&g, 2) + (direct ? SPAR_KERNEL_RANKS : 0);
    EXPECT(signalled[0] == 1 && signalled[1] == 1);
    EXPECT(!direct || (signalled[-SPAR_KERNEL_RANKS] == 0 && signalled[1 - SPAR_KERNEL_RANKS] == 0));
    unsigned char *slot = (unsigned char *)words_of(&g, 2) + SPAR_PUSH_WORDS;
    memset(slot, NOT_WRITTEN, (size_t)g.bytes);
    for (uint64_t seed = 2; seed < 8; seed++) {
        begin(&first, push[0], seed, 0, stream, NULL);
        EXPECT(spar_cu.StreamSynchronize(stream) == 0);
        end(&first, 0, 1);
    }
    EXPECT(signalled[0] == 1);
    for (int64_t i = 0; i < g.bytes; i++)
        EXPECT(slot[i] == NOT_WRITTEN);
    first.mark = calloc(1, sizeof *first.mark);
    begin(&first, push[0], 4, 0, stream, NULL);
    while (!__atomic_load_n(first.mark, __ATOMIC_ACQUIRE))
        usleep(10);
    end(&first, 0, 1);
    free(
        first
            .mark); /* as the watchdog does once a call has ended, also if its last launch has several CTAs */
    first.mark = NULL;
    spar_push_close(push[0]);
    EXPECT(spar_cu.StreamDestroy(stream) == 0 && spar_cu.StreamDestroy(other) == 0);
    spar_push_close(push[1]);
    spar_cuda_leave(&before);
    free_group(&g);
}

/* A peer offers memory behind its slot, or at its last place: only the first one is refused, and nothing is
 * written. */
static void test_bad_offer(int past)
{
    static exchange x;
    group g;
    spar_entered before;
    CUstream stream;
    make_group(&g, 2, 0, 1 << 14);
    EXPECT(!spar_cuda_enter(0, &before));
    EXPECT(spar_cu.StreamCreate(&stream, SPAR_CU_STREAM_NON_BLOCKING) == 0);
    spar_push_state *push = open_rank(&g, 0);
    uint32_t *flags = words_of(&g, 0), *places = flags + 2L * SPAR_KERNEL_RANKS;
    unsigned char *slot = (unsigned char *)words_of(&g, 1) + SPAR_PUSH_WORDS;
    memset(slot, NOT_WRITTEN, (size_t)g.bytes);
    push->least = 0;
    begin(&x, push, 2, 0, stream, NULL);
    for (int t = 0; t < x.count; t++) {
        int64_t bytes = spar_image_at(x.plan, t + 1) - spar_image_at(x.plan, t);
        places[SPAR_KERNEL_TENSORS + t] = (uint32_t)((push->bytes - bytes) / 16 + past);
    }
    __atomic_store_n(&flags[SPAR_KERNEL_RANKS + 1], 1, __ATOMIC_RELEASE);
    __atomic_store_n(&flags[1], 1, __ATOMIC_RELEASE); /* nor does it wait for a signal that may be there */
    EXPECT(spar_cu.StreamSynchronize(stream) == 0);
    EXPECT(__atomic_load_n(push->stop, __ATOMIC_ACQUIRE) == (past ? SPAR_KERNEL_BAD_OFFER + 1 : 0));
    EXPECT(spar_watchdog_stopped(*push->stop) == (past ? SPAR_TRANSPORT : SPAR_OK));
    EXPECT(!past || strcmp(spar_last_error(), "rank 1 offered memory outside of its slot") == 0);
    end(&x, 0, 1);
    int64_t written = 0;
    for (int64_t i = 0; i < g.bytes; i++)
        written += slot[i] != NOT_WRITTEN;
    EXPECT(past ? written == 0 : written > 0);
    EXPECT(spar_cu.StreamDestroy(stream) == 0);
    spar_push_close(push);
    spar_cuda_leave(&before);
    free_group(&g);
}

typedef struct {
    const group *group;
    int rank, liar; /* liar: the rank that sends other words */
    char text[128];
} checked;

static void *check_first_exchange(void *argument)
{
    checked *c = argument;
    const spar_deadline soon = {.at_ns = spar_now_ns() + (c->liar < 0 ? 0 : 10000000000)};
    spar_entered before;
    EXPECT(!spar_cuda_enter(0, &before));
    spar_push_state *push = open_rank(c->group, c->rank);
    spar_status status = spar_push_check(push, c->rank == c->liar ? 8 : 7, &soon, NULL);
    EXPECT(status == SPAR_TRANSPORT);
    snprintf(c->text, sizeof c->text, "%s", spar_last_error());
    spar_push_close(push);
    spar_cuda_leave(&before);
    return NULL;
}

/* Wrong words, and a rank that is late, are errors on each rank. */
static void test_first_exchange(void)
{
    enum { RANKS = 3 };
    for (int liar = -1; liar < 2; liar += 2) {
        int ranks = liar < 0 ? RANKS - 1 : RANKS;
        pthread_t threads[RANKS];
        checked members[RANKS];
        group g;
        make_group(&g, RANKS, 0, 1 << 14);
        for (int rank = 0; rank < ranks; rank++) {
            members[rank] = (checked){&g, rank, liar, ""};
            EXPECT(!pthread_create(&threads[rank], NULL, check_first_exchange, &members[rank]));
        }
        for (int rank = 0; rank < ranks; rank++) {
            char text[128] = "rank 2 did not send its words in time in the first exchange over push";
            pthread_join(threads[rank], NULL);
            if (liar >= 0)
                snprintf(text, sizeof text, "wrong words from rank %d in the first exchange over push",
                         rank == liar ? 0 : liar);
            EXPECT(strcmp(members[rank].text, text) == 0);
        }
        free_group(&g);
    }
}

int test_push(int argc, char **argv)
{
    pthread_t threads[WORLD];
    member members[WORLD];
    group g;
    EXPECT(argc == 4);
    EXPECT(!spar_driver_open() && !spar_cuda_open() && !spar_cuda_prepare(0));
    spar_kernel_ctas = CTAS;
    for (int i = 0; i < 4; i++)
        test_absent_peer(i % 2, i / 2);
    test_bad_offer(0);
    test_bad_offer(1);
    test_first_exchange();
    make_group(&g, atoi(argv[1]), atoi(argv[2]), atoi(argv[3]));
    for (int i = 0; i < g.world * SPAR_KERNEL_RANKS; i++)
        words_of(&g, i / SPAR_KERNEL_RANKS)[i % SPAR_KERNEL_RANKS] = MANY; /* all have signalled them */
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
