/* SPDX-License-Identifier: Apache-2.0 */
/* The first exchanges of a group, which show that its ranks' GPUs can write to each other's slots. */
#include "devices/cuda/cuda.h"
#include "devices/cuda/driver.h"
#include "transports/cuda/watchdog.h"
#include "transports/push/push.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum {
    CALLS = 12,   /* of each kind two in several rounds, and two in one, in which both halves are used */
    WORDS = 1024, /* from each rank to each, at most */
    PACKED = 0,   /* the kinds: through the slot; */
    IMAGED = 1,   /* direct, to an image; to memory of the slot */
};

static const char DURING[] = "while push was set up";
static const int64_t LIMIT_NS = 3000000000; /* of the first exchange */
static const int64_t END_NS = 5000000000;   /* for kernels to see that they must end */

typedef struct {
    spar_push_state *push;
    uint32_t salt;
    int words;
    size_t bytes; /* a rank's input has, and its output */
    spar_plan *plan;
    CUstream stream;
    char *memory; /* on the device: the inputs of all calls, then the outputs of those that are not direct */
    char *outputs[CALLS];
    uint32_t *host; /* room for `memory` */
} check;

static int kind_of(int which)
{
    return which / 2 % 3;
}

/* No two are equal, and other groups have others. */
static uint32_t word(const check *c, int which, int from, int to, int at)
{
    int number = ((which * SPAR_KERNEL_RANKS + from) * SPAR_KERNEL_RANKS + to) * WORDS + at;
    return (uint32_t)number * 2654435761u + c->salt;
}

/* Each rank sends a run of words to each. */
static spar_status make_plan(check *c)
{
    int64_t world = c->push->world, columns = world * c->words;
    const int64_t args[] = {3, 0, SPAR_EVEN, world, 1, SPAR_EVEN, columns}; /* rows before, columns after */
    const int64_t extents[] = {1, columns}, strides[] = {columns, 1};
    const spar_tensor tensor = {sizeof(uint32_t), 2, extents, strides, 7, args};
    const spar_request request = {c->push->world, c->push->rank, SPAR_SIDE_PULL, 1, &tensor};
    return spar_plan_build(&request, &c->plan);
}

/* Allocates all, writes the inputs, and clears the outputs. */
static spar_status prepare(check *c)
{
    const spar_push_state *p = c->push;
    int64_t most = p->half / (int64_t)sizeof(uint32_t) / p->world;
    c->words = most < WORDS ? (int)most : WORDS;
    c->bytes = (size_t)(p->world * c->words) * sizeof(uint32_t);
    CUdeviceptr memory;
    SPAR_TRY(make_plan(c));
    if (!(c->host = calloc(2 * CALLS, c->bytes)))
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", p->world);
    SPAR_TRY_CU(StreamCreate, &c->stream, SPAR_CU_STREAM_NON_BLOCKING);
    SPAR_TRY_CU(MemAlloc, &memory, 2 * CALLS * c->bytes);
    c->memory = (char *)(uintptr_t)memory;
    const int count = p->world * c->words;
    uint32_t *zeros = c->host + (ptrdiff_t)CALLS * count;
    for (int i = 0; i < CALLS * count; i++)
        c->host[i] = word(c, i / count, p->rank, i % count / c->words, i % c->words);
    SPAR_TRY(spar_driver_write(memory, c->host, 2 * CALLS * c->bytes));
    for (int which = 0; which < CALLS; which++) {
        char *mapped = p->bases[p->rank] + p->heap + p->room + (size_t)which * c->bytes;
        c->outputs[which] = c->memory + (size_t)(CALLS + which) * c->bytes;
        if (kind_of(which) <= IMAGED || !spar_outputs_have(p->outputs, mapped, (int64_t)c->bytes))
            continue;
        c->outputs[which] = mapped;
        SPAR_TRY(spar_driver_write((CUdeviceptr)(uintptr_t)mapped, zeros, c->bytes));
    }
    return SPAR_OK;
}

static spar_status enqueue(check *c, const spar_deadline *deadline)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    spar_push_state *p = c->push;
    const int64_t least = p->least, area = p->area, half = p->half, part = c->words * 4 / 3 / 256 * 256;
    spar_status status = SPAR_OK;
    for (int which = 0; which < CALLS && status == SPAR_OK; which++) {
        const void *input = c->memory + (size_t)which * c->bytes;
        void *output = c->outputs[which];
        const spar_call call = {.plan = c->plan,
                                .inputs = &input,
                                .outputs = &output,
                                .scale = unscaled,
                                .stream = c->stream,
                                .deadline = *deadline};
        p->least = kind_of(which) == PACKED ? INT64_MAX : 0;
        p->area = which >= CALLS / 2 ? area : part > 256 ? part : 256;
        p->half = which >= CALLS / 2 ? half : (int64_t)c->bytes;
        status = spar_push_run(p, &call, 0, NULL, 0);
    }
    p->least = least;
    p->area = area;
    p->half = half;
    return status;
}

/* The newest failure as one after which all ranks compare how their set-ups ended, and fall back together. */
static spar_status fall_back(void)
{
    return spar_fail_ranks(SPAR_TRANSPORT, spar_last_error_ranks(), "%s", spar_last_error());
}

static spar_status await(const check *c, const spar_deadline *deadline, spar_ring *ring)
{
    CUresult state;
    for (int pauses = 0; (state = spar_cu.StreamQuery(c->stream)) == SPAR_CU_NOT_READY;) {
        SPAR_TRY(spar_deadline_pause(deadline, &pauses, DURING));
        if (ring && pauses % 500 == 0 && spar_ring_poll(ring, 1) != SPAR_OK)
            return fall_back();
    }
    SPAR_TRY(spar_driver_check(state, "cuStreamQuery"));
    uint32_t stop = __atomic_load_n(c->push->stop, __ATOMIC_ACQUIRE);
    c->push->unreached = stop && stop <= SPAR_KERNEL_RANKS;
    if (c->push->unreached)
        return spar_fail_rank(SPAR_TRANSPORT, (int)stop - 1,
                              "rank %d did not send its words in time in the first exchange over push",
                              (int)stop - 1);
    return spar_watchdog_stopped(stop) == SPAR_OK ? SPAR_OK : fall_back();
}

static spar_status compare(const check *c)
{
    for (int which = 0; which < CALLS; which++) {
        SPAR_TRY_CU(MemcpyDtoH, c->host, (CUdeviceptr)(uintptr_t)c->outputs[which], c->bytes);
        for (int from = 0; from < c->push->world; from++)
            for (int i = 0; i < c->words; i++)
                if (c->host[from * c->words + i] != word(c, which, from, c->push->rank, i)) {
                    c->push->unreached = 1;
                    return spar_fail_rank(SPAR_TRANSPORT, from,
                                          "wrong words from rank %d in the first exchange over push", from);
                }
    }
    return SPAR_OK;
}

/* Frees what kernels may use only if they have ended. */
static void end(check *c)
{
    int64_t until = spar_now_ns() + END_NS;
    const spar_deadline never = {0};
    int pauses = 0;
    CUresult state = SPAR_CU_SUCCESS;
    while (c->stream && (state = spar_cu.StreamQuery(c->stream)) == SPAR_CU_NOT_READY &&
           spar_now_ns() < until) {
        __atomic_store_n(c->push->stop, SPAR_STOPPED, __ATOMIC_RELEASE);
        spar_deadline_pause(&never, &pauses, DURING);
    }
    if (c->stream && state == SPAR_CU_NOT_READY)
        c->push->unended = c->stream;
    if (c->stream && state == SPAR_CU_SUCCESS)
        spar_cu.StreamDestroy(c->stream);
    if (c->memory && state == SPAR_CU_SUCCESS)
        spar_cu.MemFree((CUdeviceptr)(uintptr_t)c->memory);
    if (c->plan)
        spar_plan_release(c->plan);
    free(c->host);
}

spar_deadline spar_push_stage(const spar_deadline *deadline, int64_t limit_ns)
{
    spar_deadline stage = *deadline;
    int64_t now = spar_now_ns(), half = (deadline->at_ns - now) / 2;
    stage.at_ns = now + (deadline->at_ns && half < limit_ns ? half : limit_ns);
    return stage;
}

spar_status spar_push_check(spar_push_state *push, uint32_t salt, const spar_deadline *deadline,
                            spar_ring *ring)
{
    check c = {.push = push, .salt = salt};
    const spar_deadline until = spar_push_stage(deadline, LIMIT_NS);
    spar_failure failure;
    spar_status status = prepare(&c);
    if (status == SPAR_OK)
        status = enqueue(&c, &until);
    if (status == SPAR_OK)
        status = await(&c, &until, ring);
    if (status == SPAR_OK)
        status = compare(&c);
    spar_failure_keep(&failure, status);
    end(&c);
    return spar_failure_raise(&failure);
}
