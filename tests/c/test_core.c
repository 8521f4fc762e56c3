/* SPDX-License-Identifier: Apache-2.0 */
/* Random calls on ranks that are threads, for the sanitizers.
 *
 *   test_core         runs all tests; aborts on a failure
 *   test_core bench   prints the time to build a plan and to get a cached one */
#include "random_call.h"
#include "spar.h"
#include "devices/cpu/threads.h"
#include "local.h"

#include <pthread.h>
#include <time.h>

static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* ---- Calls ---- */

typedef struct {
    int rank, world;
    spar_comm *comm;
    pthread_barrier_t *barrier;
    void *(*wires)[WORLD]; /* [sender][receiver] */
} member;

static void exchange_packed(member *m, const spar_plan *plan, const spar_call *call)
{
    for (int peer = 0; peer < m->world; peer++) {
        void *wire = m->wires[m->rank][peer] = malloc((size_t)plan->push[peer].bytes);
        spar_pack(plan, peer, call->inputs, call->rows, wire);
    }
    pthread_barrier_wait(m->barrier);
    spar_copy_own(plan, call->inputs, call->outputs, &unscaled);
    for (int peer = 0; peer < m->world; peer++)
        if (peer != m->rank)
            spar_unpack(plan, peer, m->wires[peer][m->rank], call->outputs, &unscaled);
    pthread_barrier_wait(m->barrier);
    for (int peer = 0; peer < m->world; peer++)
        free(m->wires[m->rank][peer]);
}

/* One call, run or packed. If one rank's call differs, no output is written. */
static void exchange_once(member *m, uint64_t seed)
{
    int packed = draw(&seed, 3) == 2, count;
    int differs = !packed && m->world > 1 && draw(&seed, 8) == 0;
    part parts[TENSORS];
    uint64_t own_seed = seed + (differs && m->rank == m->world - 1);
    draw_call(own_seed, m->world, &count, parts);
    spar_tensor tensors[TENSORS];
    buffer in[TENSORS], out[TENSORS];
    const void *inputs[TENSORS];
    void *outputs[TENSORS];
    for (int t = 0; t < count; t++) {
        part *p = &parts[t];
        in[t] = make_buffer(p, m->rank, &p->in, p->gap, p->turn);
        out[t] = make_buffer(p, m->rank, &p->out, 0, 0);
        visit(p, &in[t], 0);
        inputs[t] = in[t].data;
        outputs[t] = out[t].data;
        tensors[t] = tensor_of(p, &in[t]);
    }
    spar_request request = {m->world, m->rank, SPAR_SIDE_PULL, count, tensors};
    spar_plan *plan;
    EXPECT(!spar_plan_get(&request, &plan));
    spar_call call = {.plan = plan,
                      .inputs = inputs,
                      .outputs = outputs,
                      .scale = unscaled,
                      .deadline = {.at_ns = now_ns() + 60000000000}};
    spar_status expected = differs ? SPAR_MISMATCH : SPAR_OK;
    if (packed)
        exchange_packed(m, plan, &call);
    else
        EXPECT(spar_comm_run(m->comm, &call) == expected);
    for (int t = 0; t < count; t++) {
        visit(&parts[t], &in[t], 1);
        EXPECT(out[t].bytes == plan->tensors[t].out_bytes);
        EXPECT(out[t].data[out[t].bytes] == NOT_WRITTEN);
        for (int64_t i = 0; differs && i < out[t].bytes; i++)
            EXPECT(out[t].data[i] == NOT_WRITTEN);
        if (!differs)
            visit(&parts[t], &out[t], 1);
        free(in[t].data);
        free(out[t].data);
    }
    spar_plan_release(plan);
}

static void *call_often(void *argument)
{
    member *m = argument;
    for (int round = 0; round < 120; round++)
        exchange_once(m, scramble((uint64_t)(round * WORLD + m->world)));
    return NULL;
}

/* Gathers a byte with a timeout of 50 ms, and frees its memory at once, as a caller that raises does. */
static void *time_out(void *argument)
{
    member *m = argument;
    const int64_t one = 1, args[] = {3, 0, SPAR_EVEN, m->world, -1};
    spar_tensor tensor = {1, 1, &one, &one, 5, args};
    spar_request request = {m->world, m->rank, 0, 1, &tensor};
    spar_plan *plan;
    void *out = calloc(1, (size_t)m->world);
    const void *in = out;
    EXPECT(!spar_plan_build(&request, &plan));
    spar_call call = {.plan = plan,
                      .inputs = &in,
                      .outputs = &out,
                      .scale = unscaled,
                      .deadline = {.at_ns = now_ns() + 50000000}};
    EXPECT(spar_comm_run(m->comm, &call) == SPAR_TIMEOUT);
    EXPECT(now_ns() < call.deadline.at_ns + 5000000000);
    free(out);
    spar_plan_release(plan);
    return NULL;
}

static void in_threads(void *(*function)(void *), void *arguments, size_t size, int count)
{
    pthread_t threads[WORLD];
    for (int i = 0; i < count; i++)
        EXPECT(!pthread_create(&threads[i], NULL, function, (char *)arguments + (size_t)i * size));
    for (int i = 0; i < count; i++)
        EXPECT(!pthread_join(threads[i], NULL));
}

static void test_world(int size)
{
    spar_local_world *shared = spar_local_world_new(size);
    spar_peer_info info[WORLD];
    spar_setup_result results[WORLD], last;
    const spar_deadline forever = {0};
    void *wires[WORLD][WORLD];
    member members[WORLD];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, (unsigned)size);
    for (int rank = 0; rank < size; rank++) {
        spar_peer_info_read(&info[rank]);
        info[rank].local_world = (uint64_t)(uintptr_t)shared;
        members[rank] = (member){rank, size, NULL, &barrier, wires};
    }
    for (int rank = 0; rank < size; rank++)
        EXPECT(!spar_comm_open(&spar_transport_local, info, size, rank, size, NULL, &members[rank].comm,
                               &results[rank]));
    for (int rank = 0; rank < size; rank++)
        EXPECT(!spar_comm_connect(members[rank].comm, results, &forever, &last) && !last.failed);
    in_threads(call_often, members, sizeof *members, size);
    if (size > 1) { /* rank 0 calls only after the others have timed out */
        in_threads(time_out, members + 1, sizeof *members, size - 1);
        time_out(members);
    }
    for (int rank = 0; rank < size; rank++)
        spar_comm_close(members[rank].comm);
    pthread_barrier_destroy(&barrier);
    spar_local_world_free(shared);
}

/* ---- The cache ---- */

static void *hammer(void *argument)
{
    uint64_t seed = *(uint64_t *)argument;
    for (int i = 0; i < 3000; i++) {
        const int64_t extent = 1 + draw(&seed, 12), stride = 1, args[] = {3, 0, SPAR_EVEN, 8 * extent, -1};
        spar_tensor tensor = {1, 1, &extent, &stride, 5, args};
        spar_request request = {8, draw(&seed, 2), 0, 1, &tensor};
        spar_plan *plan;
        if (draw(&seed, 100) == 0)
            spar_plan_cache_limit(draw(&seed, 10));
        EXPECT(!spar_plan_get(&request, &plan));
        EXPECT(plan->rank == request.rank && plan->tensors[0].out[0] == 8 * extent);
        spar_plan_release(plan);
    }
    return NULL;
}

/* Requests the same new plan, which is slow to build, in all threads at once. */
static void *get_together(void *barrier)
{
    const int64_t one = 1, args[] = {3, 0, SPAR_EVEN, 4096, -1};
    spar_tensor tensor = {1, 1, &one, &one, 5, args};
    spar_request request = {4096, 0, SPAR_SIDE_PULL, 1, &tensor};
    spar_plan *plan;
    pthread_barrier_wait(barrier);
    EXPECT(!spar_plan_get(&request, &plan));
    spar_plan_release(plan);
    return NULL;
}

static void test_cache(void)
{
    uint64_t seeds[WORLD] = {1, 2, 3, 4, 5, 6, 7, 8};
    spar_plan_stats before, after;
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, WORLD);
    for (int i = 0; i < 5; i++) {
        spar_plan_cache_limit(0);
        spar_plan_cache_limit(10);
        in_threads(get_together, &barrier, 0, WORLD);
        spar_plan_cache_stats(&after);
        EXPECT(after.cached == 1);
    }
    pthread_barrier_destroy(&barrier);
    spar_plan_cache_stats(&before);
    in_threads(hammer, seeds, sizeof *seeds, WORLD);
    spar_plan_cache_limit(-1); /* as 0: the cache keeps nothing */
    spar_plan_cache_stats(&after);
    EXPECT(after.cached == 0);
    EXPECT(after.hits + after.misses == before.hits + before.misses + WORLD * 3000);
}

/* ---- Hostile requests ---- */

static spar_status request_plan(int world, int rank, int count, const spar_tensor *tensors)
{
    spar_request request = {world, rank, SPAR_SIDE_PULL, count, tensors};
    spar_plan *plan;
    spar_status status = spar_plan_get(&request, &plan);
    EXPECT(status == SPAR_OK || (status == SPAR_INVALID && *spar_last_error()));
    if (status == SPAR_OK)
        spar_plan_release(plan);
    return status;
}

static void test_edge_cases(void)
{
    const int64_t huge = 1ll << 62, zeros[64] = {0}, ones[64] = {1}, twos[] = {2, 2}, one[] = {1, 1};
    const int64_t split[] = {1, -1, 0, SPAR_EVEN, 2}, gather[] = {3, 0, SPAR_EVEN, huge, -1};
    const int64_t gather_sizes[] = {4, 0, SPAR_SIZES, 1, huge, -1};
    const spar_tensor far = {1, 1, twos, &huge, 5, split};
    const spar_tensor broadcast = {1, 2, twos, (const int64_t[]){0, huge}, 5, split};
    const spar_tensor large = {1, 1, &huge, ones, 5, gather};
    const spar_tensor few = {1, 64, ones, ones, -100, zeros};
    const spar_tensor late = {1, 1, one, one, 6, gather_sizes};
    EXPECT(!request_plan(3, 2, 1, &far));       /* an empty piece behind the last item */
    EXPECT(!request_plan(1, 0, 1, &broadcast)); /* loops that do not merge */
    EXPECT(!request_plan(1, 0, 1, &large));
    EXPECT(request_plan(1, 0, 3, (spar_tensor[]){large, large, large}));
    EXPECT(request_plan(2, 0, 2, (spar_tensor[]){late, late})); /* only what rank 0 receives is too much */
    EXPECT(request_plan(1, 0, 2, (spar_tensor[]){few, few}));   /* a key that is shorter than its header */
}

/* Changes some numbers of valid calls. */
static void test_hostile(void)
{
    const int64_t numbers[] = {1, 2, 3, 4, 0, -1, 1ll << 31, 1ll << 61, 1ll << 62, INT64_MAX, INT64_MIN};
    uint64_t seed = 1;
    int built = 0;
    for (int i = 0; i < 20000; i++) {
        part parts[TENSORS];
        spar_tensor tensors[TENSORS];
        buffer in[TENSORS];
        int world = 1 + draw(&seed, 5), rank = draw(&seed, world), count;
        draw_call(seed = scramble(seed), world, &count, parts);
        for (int t = 0; t < count; t++) {
            int64_t *const lists[] = {parts[t].args, parts[t].args, in[t].extents, in[t].strides};
            in[t] = make_buffer(&parts[t], rank, &parts[t].in, 0, 0);
            tensors[t] = tensor_of(&parts[t], &in[t]);
            for (int k = draw(&seed, 4); k > 0; k--) {
                int which = draw(&seed, 4);
                lists[which][draw(&seed, which < 2 ? parts[t].nargs : DIMS)] =
                    numbers[draw(&seed, draw(&seed, 3) ? 5 : 11)];
            }
            if (draw(&seed, 8) == 0)
                tensors[t].nargs = draw(&seed, ARGS + 2) - 1;
            if (draw(&seed, 8) == 0)
                tensors[t].ndim = draw(&seed, DIMS + 1);
            if (draw(&seed, 8) == 0)
                tensors[t].item_size = numbers[draw(&seed, 11)];
        }
        if (draw(&seed, 8) == 0)
            world = draw(&seed, 5);
        if (draw(&seed, 8) == 0)
            rank = draw(&seed, 5) - 1;
        built += request_plan(world, rank, count, tensors) == SPAR_OK;
        for (int t = 0; t < count; t++)
            free(in[t].data);
    }
    EXPECT(built > 2000 && built < 18000);
}

/* ---- The time of a plan: the best of several ---- */

static void bench(void)
{
    const int64_t extents[] = {1, 4, 2048, 128}, strides[] = {1 << 20, 1 << 18, 128, 1};
    const int64_t args[] = {3, 1, SPAR_EVEN, 4096, 2, SPAR_EVEN, 2048};
    spar_tensor tensor = {2, 4, extents, strides, 7, args};
    spar_request request = {1024, 5, SPAR_SIDE_PULL, 1, &tensor};
    int64_t cached = INT64_MAX, built = INT64_MAX;
    spar_plan *plan;
    for (int i = 0; i < 20; i++) {
        int64_t times[] = {now_ns(), 0, 0};
        EXPECT(!spar_plan_build(&request, &plan));
        times[1] = now_ns();
        spar_plan_release(plan);
        built = times[1] - times[0] < built ? times[1] - times[0] : built;
        times[1] = now_ns();
        for (int k = 0; k < 10000; k++) {
            EXPECT(!spar_plan_get(&request, &plan));
            spar_plan_release(plan);
        }
        times[2] = (now_ns() - times[1]) / 10000;
        cached = times[2] < cached ? times[2] : cached;
    }
    printf("cached_get_ns %lld\nnew_plan_us %.1f\n", (long long)cached, (double)built / 1000);
}

int test_core(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        bench();
    } else {
        for (int size = 1; size <= WORLD; size++) {
            spar_threads_limit(size % 4 + 1); /* copy threads beside the ranks' own */
            spar_threads_min_bytes(size * 8);
            test_world(size);
        }
        test_cache();
        test_edge_cases();
        test_hostile();
    }
    spar_plan_cache_limit(0);
    return 0;
}
