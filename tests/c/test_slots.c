/* SPDX-License-Identifier: Apache-2.0 */
/* What calls on GPUs are made of, over the stand-ins of tests/standin: memory for outputs, streams and their
 * order, the first size of a slot. */
#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"
#include "../standin/memory.h"
#include "member.h"
#include "transports/cuda/watchdog.h"
#include "transports/push/push.h"

#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

static const spar_scale UNSCALED = {SPAR_UNSCALED, 0, 1};

static int64_t used(void)
{
    int64_t bytes, taken;
    spar_outputs_stats(&bytes, &taken);
    return taken;
}

static void note(void *released)
{
    *(int *)released = 1;
}

/* Segments are taken from the first gap; where none is left, memory is ordinary. What is in use when the
 * group is closed is kept until it is freed, in any order, and nothing is taken from it any more. */
static void test_segments(void)
{
    enum { BYTES = 8192, LONGER = 16384 };
    int released = 0;
    spar_outputs *outputs = NULL;
    spar_entered before;
    char *memory = aligned_alloc(512, LONGER), *device = on_device(memory), *taken[4], *other;
    EXPECT(!spar_cuda_enter(0, &before) && !spar_outputs_open(device, note, &released, &outputs));
    spar_outputs_extend(outputs, BYTES);
    spar_outputs_enter(outputs);
    for (int i = 0; i < 4; i++)
        EXPECT((taken[i] = spar_outputs_allocate(2000, 0, NULL)) == device + i * 2048L);
    EXPECT(!spar_outputs_lacked(outputs));
    EXPECT((other = spar_outputs_allocate(1, 0, NULL)) && !spar_outputs_have(outputs, other, 1));
    EXPECT(spar_outputs_lacked(outputs) && !spar_outputs_lacked(outputs));
    spar_outputs_free(other, 1, 0, NULL);
    for (int i = 0; i < 65; i++)
        EXPECT(spar_outputs_serve(outputs) == (i == 64));
    spar_outputs_free(taken[2], 2000, 0, NULL);
    spar_outputs_free(taken[1], 2000, 0, NULL);
    EXPECT((taken[1] = spar_outputs_allocate(4096, 0, NULL)) == device + 2048);
    EXPECT(spar_outputs_have(outputs, device, BYTES) && !spar_outputs_have(outputs, device + 1, BYTES));
    EXPECT(!spar_outputs_have(outputs, memory, 1) && used() == 8192);
    EXPECT(spar_outputs_keep(outputs, 4096, 512) == SPAR_INTERNAL);
    EXPECT(spar_outputs_keep(outputs, BYTES, 512) == SPAR_INTERNAL);
    spar_outputs_extend(outputs, LONGER);
    EXPECT(!spar_outputs_keep(outputs, BYTES, 512) && !spar_outputs_keep(outputs, BYTES + 512, 1024));
    EXPECT((other = spar_outputs_allocate(512, 0, NULL)) == device + BYTES && used() == 8704);
    spar_outputs_free(other, 512, 0, NULL);
    spar_outputs_free(taken[0], 2000, 0, NULL);
    spar_outputs_close(outputs);
    EXPECT((other = spar_outputs_allocate(1, 0, NULL)) && (other < device || other >= device + LONGER));
    spar_outputs_enter(NULL);
    spar_outputs_free(other, 1, 0, NULL);
    spar_outputs_free(taken[1], 4096, 0, NULL);
    EXPECT(used() == 2048 && !released);
    spar_outputs_free(taken[3], 2000, 0, NULL);
    EXPECT(used() == 0 && released);
    spar_cuda_leave(&before);
    free(memory);
}

static int event_waits;
static unsigned long long stream_id = 7;

static int count_wait(CUstream stream, CUevent event, unsigned flags)
{
    (void)stream, (void)event, (void)flags;
    event_waits++;
    return 0;
}

static int tell_id(CUstream stream, unsigned long long *id)
{
    (void)stream;
    *id = stream_id;
    return 0;
}

static void *count_release(void *released)
{
    __atomic_store_n((int *)released, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* A call waits for the one before unless both are in one stream, which its handle does not show: a stream may
 * have that of another, which was destroyed. A driver without ids has handles alone. */
static void test_reused_handle(void)
{
    const spar_driver driver = spar_cu;
    static int released;
    const spar_watchdog_target what = {.release = count_release, .context = &released};
    const spar_deadline never = {0};
    spar_watchdog *watchdog;
    spar_entered before;
    CUstream stream;
    EXPECT(!spar_cuda_enter(0, &before) && !spar_watchdog_open(&what, &watchdog));
    EXPECT(spar_cu.StreamCreate(&stream, SPAR_CU_STREAM_NON_BLOCKING) == 0);
    spar_cu.StreamWaitEvent = count_wait;
    const int waits[] = {1, 1, 2, 3, 3}; /* the first call finds another stream than none */
    for (int call = 0; call < 5; call++) {
        stream_id += call == 2;
        spar_cu.StreamGetId = call < 3 ? tell_id : NULL;
        EXPECT(!spar_watchdog_begin(watchdog, (uint64_t)call + 1, &never, 0));
        EXPECT(!spar_watchdog_order(watchdog, stream) && event_waits == waits[call]);
        EXPECT(!spar_watchdog_end(watchdog, stream, 0));
    }
    EXPECT(!spar_watchdog_wait(watchdog, &never));
    spar_cu = driver;
    spar_watchdog_close(watchdog);
    while (!__atomic_load_n(&released, __ATOMIC_ACQUIRE))
        sched_yield();
    EXPECT(spar_cu.StreamDestroy(stream) == 0);
    spar_cuda_leave(&before);
}

static unsigned launched_ctas;

static int note_launch(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared, CUstream stream, void **parameters, void **extra)
{
    (void)function, (void)y, (void)z, (void)bx, (void)by, (void)bz;
    (void)shared, (void)stream, (void)parameters, (void)extra;
    launched_ctas = x;
    return 0;
}

/* Launches in a side stream have fewer CTAs; its handle is known for each device. */
static void test_side_stream(void)
{
    enum { COLUMNS = 1 << 20, MOST = 64 };
    const int64_t args[] = {3, 0, SPAR_EVEN, 2, 1, SPAR_EVEN, COLUMNS};
    const int64_t extents[] = {1, COLUMNS}, strides[] = {COLUMNS, 1};
    const spar_tensor tensor = {4, 2, extents, strides, 7, args};
    const spar_request request = {2, 0, SPAR_SIDE_PULL, 1, &tensor};
    const spar_driver driver = spar_cu;
    char side, other;
    spar_plan *plan;
    spar_entered before;
    EXPECT(!spar_cuda_enter(0, &before) && !spar_plan_build(&request, &plan));
    spar_cu.LaunchKernel = note_launch;
    spar_kernel_ctas = MOST;
    EXPECT(!spar_cuda_set_side_stream(1, &side) && spar_cuda_set_side_stream(64, &side) == SPAR_INVALID);
    for (int i = 0; i < 2; i++) {
        const void *input = on_device(&side);
        void *output = NULL;
        const spar_span span = {1, SPAR_PACK, 0, plan->push[1].bytes, on_device(&other)};
        EXPECT(!spar_cuda_copy_spans(plan, &span, 1, &input, &output, &UNSCALED, i ? &side : &other));
        EXPECT(launched_ctas == (i ? 24 : MOST));
    }
    EXPECT(!spar_cuda_set_side_stream(1, NULL));
    spar_kernel_ctas = 0;
    spar_cu = driver;
    spar_plan_release(plan);
    spar_cuda_leave(&before);
}

static void test_small_slot(void)
{
    int64_t bytes = 0;
    EXPECT(spar_push_first_bytes(3, 2047, &bytes) == SPAR_TRANSPORT);
    EXPECT(strcmp(spar_last_error(), "SPAR_PUSH_SLOT is 2047; 3 ranks need at least 2048") == 0);
    EXPECT(!spar_push_first_bytes(3, 2048, &bytes) && bytes == 2048);
    EXPECT(!spar_push_first_bytes(3, 1 << 20, &bytes) && bytes == 1 << 18);
    EXPECT(!spar_push_first_bytes(3, (int64_t)1 << 35, &bytes) && bytes == 128 << 20);
}

static void *ask_often(void *stops)
{
    while (!__atomic_load_n((int *)stops, __ATOMIC_ACQUIRE))
        used();
    return NULL;
}

/* Forks beside a thread that is inside: the children can ask, too. */
static void test_fork(void)
{
    pthread_t thread;
    int stops = 0, status = 0;
    EXPECT(!pthread_create(&thread, NULL, ask_often, &stops));
    for (int i = 0; i < 100 && status == 0; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(5);
            used();
            _exit(0);
        }
        EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    }
    __atomic_store_n(&stops, 1, __ATOMIC_RELEASE);
    EXPECT(!pthread_join(thread, NULL) && status == 0);
}

int test_slots(int argc, char **argv)
{
    (void)argc, (void)argv;
    EXPECT(!spar_driver_open() && !spar_cuda_open() && !spar_cuda_prepare(0));
    test_small_slot();
    test_fork();
    test_segments();
    test_reused_handle();
    test_side_stream();
    spar_plan_cache_limit(0);
    return 0;
}
