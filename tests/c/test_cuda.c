/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the CUDA device with the CPU's copies, over the stand-ins of tests/standin: random plans, spans
 * with any bounds, every factor, streams that run later, captured graphs.
 *
 *   test_cuda THREADS PLANS   each thread runs PLANS plans; all threads run the same ones at about the same
 *   time */
#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"
#include "devices/execute.h"
#include "random_call.h"
#include "devices/cuda/launches.h"
#include "../standin/memory.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>

enum { SPANS = 3 * WORLD, MOST_SHIFT = 16 };

static CUresult (*begin_capture)(CUstream stream, int mode);
static CUresult (*end_capture)(CUstream stream, void **graph);
static CUresult (*launch_graph)(void *graph, CUstream stream);
static CUresult (*destroy_graph)(void *graph);

typedef struct {
    uint64_t seed;
    int aligned;  /* all buffers begin at multiples of 16, which selects the wide kernels */
    int captures; /* whether it may be captured: not while another thread waits for a stream */
    CUstream stream;
    spar_scale scale;
    int64_t item; /* a span's bounds are multiples of it */
    spar_plan *plan;
    const void *inputs[TENSORS];
} run_state;

static void find(const char *name, void *function)
{
    CUresult (*get)(const char *, void **, int, uint64_t, int *);
    int status;
    void *address = dlsym(RTLD_DEFAULT, "cuGetProcAddress_v2");
    if (!address)
        address = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2");
    memcpy(&get, &address, sizeof get);
    EXPECT(get(name, function, 10010, 0, &status) == 0);
}

static void fill(uint64_t *seed, unsigned char *bytes, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        bytes[i] = (unsigned char)draw(seed, 256);
}

/* `data` has any alignment that the factor allows; the byte after its end must not change. */
typedef struct {
    unsigned char *memory, *data;
} room;

static room make(run_state *t, int64_t bytes, int contents)
{
    room r = {.memory = malloc((size_t)bytes + MOST_SHIFT + 1)};
    EXPECT(r.memory);
    r.data = r.memory + (t->aligned ? 0 : draw(&t->seed, MOST_SHIFT) / t->item * t->item);
    memset(r.memory, NOT_WRITTEN, (size_t)bytes + MOST_SHIFT + 1);
    if (contents)
        fill(&t->seed, r.data, bytes);
    return r;
}

static int is_nan(spar_dtype dtype, const unsigned char *real, int64_t size)
{
    uint64_t bits = 0;
    memcpy(&bits, real, (size_t)size);
    if (size == 2)
        return (bits & 0x7fff) > (dtype == SPAR_F16 ? 0x7c00 : 0x7f80);
    return size == 4 ? (bits & 0x7fffffff) > 0x7f800000 : bits << 1 > 0xffe0000000000000u;
}

/* Expects equal bits (any NaN equals any NaN), and an unchanged byte after the end. */
static void expect_same(const run_state *t, const unsigned char *got, const unsigned char *wanted,
                        int64_t bytes)
{
    spar_dtype dtype = t->scale.dtype;
    int64_t size = t->item >> (dtype == SPAR_C64 || dtype == SPAR_C128);
    EXPECT(got[bytes] == NOT_WRITTEN);
    for (int64_t i = 0; i + size <= bytes; i += size)
        if (memcmp(got + i, wanted + i, (size_t)size) != 0) {
            EXPECT(dtype != SPAR_UNSCALED);
            EXPECT(is_nan(dtype, got + i, size) && is_nan(dtype, wanted + i, size));
        }
}

/* Cuts a peer's packed bytes into up to three spans. */
static int cut_up(run_state *t, spar_span *spans, int peer, spar_route route, int64_t bytes,
                  unsigned char *wire)
{
    int count = 0;
    for (int64_t low = 0, high; low < bytes; low = high) {
        high = low + (1 + draw(&t->seed, (int)(bytes / t->item))) * t->item;
        if (count == 2 || high > bytes || draw(&t->seed, 2))
            high = bytes;
        spans[count++] = (spar_span){peer, route, low, high, wire ? wire + low : NULL};
    }
    return count;
}

/* Copies the spans in one or several calls on a stream, captured or not; waits for the stream. */
static void copy(run_state *t, spar_span *spans, int count, void *const *outputs)
{
    const void *from[TENSORS];
    void *graph = NULL, *to[TENSORS];
    int captures = t->captures && draw(&t->seed, 4) == 0,
        step = 1 + draw(&t->seed, SPANS) * draw(&t->seed, 2);
    for (int i = 0; i < t->plan->ntensors; i++) {
        from[i] = on_device(t->inputs[i]);
        to[i] = outputs ? on_device(outputs[i]) : NULL;
    }
    for (int i = 0; i < count; i++)
        spans[i].wire = on_device(spans[i].wire);
    if (captures)
        EXPECT(begin_capture(t->stream, 0) == 0);
    for (int i = 0; i < count; i += step)
        EXPECT(!spar_cuda_copy_spans(t->plan, spans + i, count - i < step ? count - i : step, from, to,
                                     &t->scale, t->stream));
    if (captures) {
        EXPECT(end_capture(t->stream, &graph) == 0);
        EXPECT(launch_graph(graph, t->stream) == 0);
    }
    EXPECT(spar_cu.StreamSynchronize(t->stream) == 0);
    if (captures)
        EXPECT(destroy_graph(graph) == 0);
}

static void pack(run_state *t)
{
    const spar_plan *plan = t->plan;
    spar_span spans[SPANS];
    room wires[WORLD];
    int count = 0;
    for (int peer = 0; peer < plan->world; peer++) {
        wires[peer] = make(t, plan->push[peer].bytes, 0);
        count += cut_up(t, spans + count, peer, SPAR_PACK, plan->push[peer].bytes, wires[peer].data);
    }
    copy(t, spans, count, NULL);
    for (int peer = 0; peer < plan->world; peer++) {
        int64_t bytes = plan->push[peer].bytes;
        unsigned char *wanted = malloc((size_t)bytes + 1);
        spar_pack(plan, peer, t->inputs, NULL, wanted);
        if (t->scale.dtype != SPAR_UNSCALED && bytes)
            spar_scale_items(&t->scale, (char *)wanted, (char *)wanted, bytes / t->item, t->item, t->item);
        expect_same(t, wires[peer].data, wanted, bytes);
        free(wanted);
        free(wires[peer].memory);
    }
}

/* Copies into outputs: what the peers sent, or this rank's own part. */
static void unpack_or_copy_own(run_state *t, spar_route how)
{
    const spar_plan *plan = t->plan;
    spar_span spans[SPANS];
    room wires[WORLD];
    room rooms[2 * TENSORS];
    void *got[TENSORS], *wanted[TENSORS];
    int count = 0;
    for (int i = 0; i < 2 * plan->ntensors; i++) {
        rooms[i] = make(t, plan->tensors[i / 2].out_bytes, 0);
        (i % 2 ? wanted : got)[i / 2] = rooms[i].data;
    }
    for (int peer = 0; how == SPAR_UNPACK && peer < plan->world; peer++) {
        wires[peer] = make(t, plan->pull[peer].bytes, 1);
        count += cut_up(t, spans + count, peer, SPAR_UNPACK, plan->pull[peer].bytes, wires[peer].data);
        spar_unpack(plan, peer, wires[peer].data, wanted, &t->scale);
    }
    if (how == SPAR_PUSH) {
        spar_copy_own(plan, t->inputs, wanted, &t->scale);
        count = cut_up(t, spans, plan->rank, SPAR_PUSH, plan->push[plan->rank].bytes, NULL);
    }
    copy(t, spans, count, got);
    for (int i = 0; i < plan->ntensors; i++)
        expect_same(t, got[i], wanted[i], plan->tensors[i].out_bytes);
    for (int i = 0; i < 2 * plan->ntensors; i++)
        free(rooms[i].memory);
    for (int peer = 0; how == SPAR_UNPACK && peer < plan->world; peer++)
        free(wires[peer].memory);
}

static void draw_scale(run_state *t)
{
    static const double factors[] = {2, 3, 0.1, -4, 7, 64};
    t->scale = (spar_scale){(spar_dtype)draw(&t->seed, SPAR_C128 + 1), draw(&t->seed, 2),
                            factors[draw(&t->seed, 6)]};
    if (draw(&t->seed, 3) == 0)
        t->scale.dtype = SPAR_UNSCALED;
    t->item = spar_scale_types[t->scale.dtype].bytes;
}

static void run_plan(run_state *t)
{
    static const int large[] = {24, 48, 112, 640, 4096};
    part parts[TENSORS];
    spar_tensor tensors[TENSORS];
    buffer layouts[TENSORS];
    room rooms[TENSORS];
    int world = 1 + draw(&t->seed, WORLD), rank = draw(&t->seed, world), count;
    draw_call(t->seed, world, &count, parts);
    draw_scale(t);
    t->aligned = draw(&t->seed, 2);
    for (int i = 0; i < count; i++) {
        part *p = &parts[i];
        if (t->scale.dtype != SPAR_UNSCALED)
            p->item = (int)t->item;
        else if (draw(&t->seed, 4) == 0)
            p->item = large[draw(&t->seed, i ? 3 : 5)];
        layouts[i] = make_buffer(p, rank, &p->in, p->gap, p->turn);
        rooms[i] = make(t, layouts[i].bytes, 1);
        t->inputs[i] = rooms[i].data;
        tensors[i] = tensor_of(p, &layouts[i]);
    }
    spar_request request = {world, rank, SPAR_SIDE_PULL, count, tensors};
    EXPECT(!spar_plan_get(&request, &t->plan));
    pack(t);
    unpack_or_copy_own(t, SPAR_UNPACK);
    unpack_or_copy_own(t, SPAR_PUSH);
    for (int i = 0; i < count; i++) {
        free(rooms[i].memory);
        free(layouts[i].data);
    }
    spar_plan_release(t->plan);
}

typedef struct {
    int plans, alone;
} arguments;

static void *run(void *argument)
{
    const arguments *a = argument;
    CUstream streams[2];
    spar_entered before;
    EXPECT(!spar_cuda_enter(0, &before) && !before.context);
    for (int i = 0; i < 2; i++)
        EXPECT(spar_cu.StreamCreate(&streams[i], SPAR_CU_STREAM_NON_BLOCKING) == 0);
    for (int i = 0; i < a->plans; i++) {
        run_state t = {.seed = scramble((uint64_t)i), .captures = a->alone, .stream = streams[i % 2]};
        run_plan(&t);
    }
    for (int i = 0; i < 2; i++)
        EXPECT(spar_cu.StreamDestroy(streams[i]) == 0);
    spar_cuda_leave(&before);
    return NULL;
}

/* ---- launches ---- */

typedef struct {
    spar_kernel_copy copies[64];
    int count;
} launched;

static spar_status record(void *context, spar_kernel_copy *copy, uint64_t bits)
{
    launched *l = context;
    (void)bits;
    EXPECT(l->count < 64 && copy->parts > 0);
    l->copies[l->count++] = *copy;
    return SPAR_OK;
}

/* Cuts one span of a plan of one rank with these blocks. */
static void cut_blocks(launched *l, spar_block *blocks, int count, spar_dim *dims, int64_t low, int64_t high)
{
    spar_launches launches;
    spar_range range = {0, count, high};
    const spar_plan plan = {.world = 1, .push = &range, .blocks = blocks, .dims = dims};
    const spar_span span = {0, SPAR_PUSH, low, high, NULL};
    const void *inputs[4] = {NULL};
    void *outputs[4] = {NULL};
    l->count = 0;
    spar_launches_begin(&launches, record, l);
    EXPECT(!spar_launches_add(&launches, &plan, &span, 1, inputs, outputs));
    EXPECT(!spar_launches_end(&launches));
}

/* Blocks over 2^30 bytes are cut in order, without a gap, and each byte keeps its place. */
static void test_large_blocks(void)
{
    const int64_t giga = 1 << 30;
    static launched l;
    spar_dim dims[] = {{3, 5 * giga, 3 * giga}, {5, giga, giga / 2}, {7, 1, 2}};
    spar_block blocks[] = {
        {.src = 16, .dst = 32, .run = 3 * giga + 48, .tensor = 0},
        {.src = 0, .dst = 0, .run = giga / 4, .ndim = 2, .tensor = 1},
        {.src = 0, .dst = 0, .run = 2 * giga, .ndim = 1, .tensor = 2},
        {.src = 0, .dst = 0, .run = 1, .ndim = 1, .dims = 2, .tensor = 3},
    };
    int64_t bytes = 0, all = 3 * giga + 48 + 15 * (giga / 4) + 6 * giga + 7;
    cut_blocks(&l, blocks, 4, dims, 0, all);
    EXPECT(l.count == 1);
    const spar_kernel_part *part = l.copies[0].part;
    for (int i = 0; i < l.copies[0].parts; i++) {
        EXPECT(part[i].low == 0 && part[i].high > 0 && part[i].high <= giga);
        bytes += part[i].high;
    }
    EXPECT(l.copies[0].parts == 4 + 3 * 2 + 3 * 2 + 1 && bytes == all);
    EXPECT((int64_t)(uintptr_t)part[2].from == 16 + 2 * giga && part[3].high == 48 && part[3].loops == 1);
    EXPECT((int64_t)(uintptr_t)part[5].from == 4 * giga && (int64_t)(uintptr_t)part[5].to == 2 * giga);
    EXPECT((int64_t)(uintptr_t)part[13].from == 6 * giga);
    cut_blocks(&l, blocks, 4, dims, 2 * giga + 5, 3 * giga + 64); /* from the first block to the second */
    part = l.copies[0].part;
    EXPECT(l.copies[0].parts == 3 && part[0].low == 5 && part[0].high == giga);
    EXPECT((int64_t)(uintptr_t)part[0].from == 16 + 2 * giga);
    EXPECT(part[1].low == 0 && part[1].high == 48 && part[2].low == 0 && part[2].high == 16);
}

/* Few peers' blocks are one launch; blocks of one shape share their loops; many blocks are more launches. */
static void test_blocks_of_a_launch(void)
{
    enum { MANY = 400 };
    static launched l;
    static spar_block blocks[MANY];
    static spar_dim dims[MANY];
    int64_t at = 0;
    int parts = 0;
    for (int i = 0; i < MANY; i++) {
        dims[i] = (spar_dim){16, 4096, 256};
        blocks[i] = (spar_block){.src = at, .dst = at, .run = 256, .ndim = 1, .dims = i};
        at += 4096;
    }
    cut_blocks(&l, blocks, 64, dims, 0, 64 * 4096); /* of 64 ranks */
    EXPECT(l.count == 1 && l.copies[0].parts == 64);
    EXPECT(l.copies[0].part[0].loop == 0 && l.copies[0].part[63].loop == 0);
    for (int i = 0; i < MANY; i++)
        dims[i].src += i; /* no two are alike */
    cut_blocks(&l, blocks, 7, dims, 0, 7 * 4096);
    EXPECT(l.count == 1 && l.copies[0].parts == 7 && l.copies[0].part[6].loop == 12);
    cut_blocks(&l, blocks, MANY, dims, 0, MANY * 4096);
    EXPECT(l.count == (MANY + SPAR_KERNEL_LOOPS / 2 - 1) / (SPAR_KERNEL_LOOPS / 2));
    for (int i = 0; i < l.count; i++) {
        for (int k = 0; k < l.copies[i].parts; k++)
            EXPECT((int64_t)(uintptr_t)l.copies[i].part[k].from == (parts + k) * 4096);
        parts += l.copies[i].parts;
    }
    EXPECT(parts == MANY);
}

/* A graph's replays need neither its plan nor what was there when it was captured but the tensors. */
static void test_graph_outlives_its_plan(void)
{
    enum { ROWS = 3, ROW = 5 };
    const int64_t extents[] = {ROWS, ROW}, strides[] = {1, ROWS};
    const int64_t args[] = {1, -1, 0, SPAR_EVEN, ROWS};
    const spar_tensor tensor = {1, 2, extents, strides, 5, args};
    const spar_request request = {1, 0, SPAR_SIDE_PULL, 1, &tensor};
    const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    spar_span whole = {0, SPAR_PUSH, 0, ROWS * ROW, NULL};
    unsigned char from[ROWS * ROW], to[ROWS * ROW] = {0};
    const void *inputs[] = {on_device(from)};
    void *outputs[] = {on_device(to)}, *graph;
    spar_entered before;
    spar_plan *plan = NULL;
    CUstream stream;
    EXPECT(!spar_cuda_enter(0, &before) && !spar_plan_build(&request, &plan));
    EXPECT(spar_cu.StreamCreate(&stream, SPAR_CU_STREAM_NON_BLOCKING) == 0);
    EXPECT(begin_capture(stream, 0) == 0);
    EXPECT(!spar_cuda_copy_spans(plan, &whole, 1, inputs, outputs, &unscaled, stream));
    EXPECT(end_capture(stream, &graph) == 0);
    whole.high++;
    EXPECT(spar_cuda_copy_spans(plan, &whole, 1, inputs, outputs, &unscaled, stream) == SPAR_INVALID);
    spar_plan_release(plan);
    inputs[0] = outputs[0] = NULL;
    for (int i = 0; i < ROWS * ROW; i++)
        from[i] = (unsigned char)i;
    EXPECT(launch_graph(graph, stream) == 0 && spar_cu.StreamSynchronize(stream) == 0);
    for (int i = 0; i < ROWS * ROW; i++)
        EXPECT(to[i] == i % ROW * ROWS + i / ROW);
    EXPECT(destroy_graph(graph) == 0 && spar_cu.StreamDestroy(stream) == 0);
    spar_cuda_leave(&before);
}

/* A thread's context is restored; a thread without one keeps that of device 0 alone. */
static void *test_contexts(void *unused)
{
    spar_entered before;
    CUcontext first, now;
    EXPECT(!spar_cuda_prepare(1) && spar_cu.CtxGetCurrent(&now) == 0 && !now);
    EXPECT(!spar_cuda_enter(1, &before));
    spar_cuda_leave(&before);
    EXPECT(spar_cu.CtxGetCurrent(&now) == 0 && !now);
    EXPECT(!spar_cuda_enter(0, &before) && spar_cu.CtxGetCurrent(&first) == 0 && first);
    spar_cuda_leave(&before);
    EXPECT(spar_cu.CtxGetCurrent(&now) == 0 && now == first);
    EXPECT(!spar_cuda_enter(1, &before) && spar_cu.CtxGetCurrent(&now) == 0 && now != first);
    spar_cuda_leave(&before);
    EXPECT(spar_cu.CtxGetCurrent(&now) == 0 && now == first);
    return unused;
}

int test_cuda(int argc, char **argv)
{
    EXPECT(argc == 3);
    int threads = atoi(argv[1]);
    arguments shared = {atoi(argv[2]), threads == 1};
    pthread_t others[WORLD];
    test_large_blocks();
    test_blocks_of_a_launch();
    EXPECT(!spar_driver_open() && !spar_cuda_open() && !spar_cuda_prepare(0));
    find("cuStreamBeginCapture", &begin_capture);
    find("cuStreamEndCapture", &end_capture);
    find("cuGraphLaunch", &launch_graph);
    find("cuGraphDestroy", &destroy_graph);
    if (shared.alone)
        test_graph_outlives_its_plan();
    EXPECT(!pthread_create(others, NULL, test_contexts, NULL) && !pthread_join(*others, NULL));
    for (int i = 0; i < threads; i++)
        EXPECT(!pthread_create(&others[i], NULL, run, &shared));
    for (int i = 0; i < threads; i++)
        pthread_join(others[i], NULL);
    spar_plan_cache_limit(0);
    return 0;
}
