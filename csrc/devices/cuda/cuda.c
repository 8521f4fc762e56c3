/* SPDX-License-Identifier: Apache-2.0 */
/* The copies are made by the kernels of kernels.cu. */
#include "devices/cuda/cuda.h"

#include "devices/cuda/cubin_cache.h"
#include "devices/cuda/driver.h"
#include "devices/cuda/launches.h"
#include "devices/cuda/nvrtc.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    GPUS = 64,
    MOST_CTAS = 96, /* the CTAs of a launch: enough to outrun the wire */
    SIDE_CTAS = 24, /* beside attention: an estimate of what keeps the wire busy */
};

static const int64_t ONE_CTA_BYTES = 128 << 10; /* an estimate: to copy more by one CTA takes longer than
                                                   another launch */

typedef struct {
    CUcontext context;
    CUfunction kernels[SPAR_KERNEL_COUNT];
    int ctas; /* the most CTAs of a launch */
} gpu;

static struct {
    pthread_mutex_t lock;
    gpu *by_ordinal[GPUS];    /* atomic; never freed */
    void *side_streams[GPUS]; /* atomic; NULL: none is known */
} gpus = {.lock = PTHREAD_MUTEX_INITIALIZER};

spar_status spar_cuda_open(void)
{
    SPAR_TRY(spar_driver_open());
    return spar_nvrtc_open();
}

/* ---- launches ---- */

static spar_status check_ordinal(int ordinal)
{
    return ordinal >= 0 && ordinal < GPUS
               ? SPAR_OK
               : spar_fail(SPAR_INVALID, "CUDA device %d; expected 0 to %d", ordinal, GPUS - 1);
}

static spar_status find(int ordinal, const gpu **result)
{
    SPAR_TRY(check_ordinal(ordinal));
    *result = __atomic_load_n(&gpus.by_ordinal[ordinal], __ATOMIC_ACQUIRE);
    return *result ? SPAR_OK : spar_fail(SPAR_INTERNAL, "CUDA device %d is not prepared", ordinal);
}

/* Finds the prepared device whose context is current. */
static spar_status current(const gpu **result)
{
    CUcontext context = NULL;
    if (spar_cu.CtxGetCurrent)
        SPAR_TRY_CU(CtxGetCurrent, &context);
    for (int i = 0; i < GPUS && context; i++)
        if ((*result = __atomic_load_n(&gpus.by_ordinal[i], __ATOMIC_ACQUIRE)) != NULL &&
            (*result)->context == context)
            return SPAR_OK;
    return spar_fail(SPAR_INTERNAL, "no prepared CUDA device is this thread's current one");
}

/* What all launches of a copy share. */
typedef struct {
    const gpu *gpu;
    const spar_scale *scale;
    void *stream;
    const spar_round *round; /* NULL: of none */
    int ntensors, lanes;
    int mode;       /* of the next launch */
    uint32_t *mark; /* that it sets */
    int sent;       /* its first parts are sent; -1: all */
    int count;      /* of launches */
} copy;

/* Chooses the widest kernel for addresses in which these bits are set. */
static spar_status choose(const spar_scale *scale, uint64_t bits, int *kernel)
{
    const spar_scale_type *type = &spar_scale_types[scale->dtype];
    for (*kernel = 0; *kernel < SPAR_KERNEL_COUNT; ++*kernel) {
        const spar_kernel_row *row = &spar_kernel_rows[*kernel];
        if (strcmp(row->factor, type->name) == 0 && !(bits & (uint64_t)(row->width - 1)))
            return SPAR_OK;
    }
    return spar_fail(SPAR_INVALID,
                     "a factor for items of %lld bytes, but a tensor or a span does not begin or "
                     "step at a multiple of that",
                     (long long)type->bytes);
}

/* Sets what a launch has of its round. */
static void set_round(const copy *c, spar_kernel_copy *k)
{
    const spar_round *round = c->round;
    size_t places = (size_t)c->ntensors * sizeof *k->offer;
    k->sync = round ? round->sync : NULL;
    k->mode = (unsigned short)c->mode;
    k->tensors = (unsigned short)c->ntensors;
    k->limit_ns = round ? round->limit_ns : 0;
    k->mark = c->mark;
    k->number = round ? round->number : 0;
    k->rounds = round ? round->rounds : 0;
    if (c->mode & SPAR_KERNEL_OFFERS) {
        memcpy(k->offer, round->offers, places);
        memcpy(k->last, round->last, places);
    }
}

static int is_side_stream(void *stream)
{
    int found = 0;
    for (int i = 0; i < GPUS && stream; i++)
        found |= __atomic_load_n(&gpus.side_streams[i], __ATOMIC_RELAXED) == stream;
    return found;
}

static spar_status launch(void *context, spar_kernel_copy *k, uint64_t bits)
{
    copy *c = context;
    int kernel, waits = c->mode & (SPAR_KERNEL_OFFERS | SPAR_KERNEL_WAITS);
    SPAR_TRY(choose(c->scale, bits, &kernel));
    spar_launches_tile(k, (int64_t)spar_kernel_rows[kernel].width * SPAR_KERNEL_THREADS * SPAR_KERNEL_UNITS);
    k->factor = c->scale->factor;
    k->divide = c->scale->divide;
    k->sent = c->sent >= 0 && c->sent < k->parts ? k->part[c->sent].tile : k->tiles;
    k->lanes = (unsigned)c->lanes;
    set_round(c, k);
    unsigned most = (unsigned)(spar_kernel_ctas ? spar_kernel_ctas : c->gpu->ctas);
    most = is_side_stream(c->stream) && most > SIDE_CTAS ? SIDE_CTAS : most;
    unsigned ctas = waits || !k->tiles ? 1 : k->tiles < most ? k->tiles : most;
    void *parameters[] = {k};
    SPAR_TRY_CU(LaunchKernel, c->gpu->kernels[kernel], ctas, 1, 1, SPAR_KERNEL_THREADS, 1, 1, 0, c->stream,
                parameters, NULL);
    c->count++;
    c->mode = 0; /* what follows a full launch goes on with its copies */
    c->sent = c->sent > 0 ? 0 : c->sent;
    return SPAR_OK;
}

spar_status spar_cuda_copy_spans(const spar_plan *plan, const spar_span *spans, int count,
                                 const void *const *inputs, void *const *outputs, const spar_scale *scale,
                                 void *stream)
{
    copy c = {.scale = scale, .stream = stream, .lanes = 1, .sent = -1};
    spar_launches launches;
    SPAR_TRY(current(&c.gpu));
    spar_launches_begin(&launches, launch, &c);
    SPAR_TRY(spar_launches_add(&launches, plan, spans, count, inputs, outputs));
    return spar_launches_end(&launches);
}

/* ---- rounds ---- */

/* Launches what is left of a copy, also if nothing is. */
static spar_status end_copy(copy *c, spar_launches *launches, int mode)
{
    c->mode = mode;
    return launches->copy.parts ? spar_launches_end(launches) : launch(c, &launches->copy, 0);
}

static int64_t bytes_of(const spar_span *spans, int count)
{
    int64_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += spans[i].high - spans[i].low;
    return bytes;
}

/* Whether one launch, or a full one and others, are faster than one that waits besides. */
static int is_small(const spar_round *r, const spar_scale *scale)
{
    return !r->offers && !r->beside && (int)scale->dtype == SPAR_UNSCALED &&
           bytes_of(r->spans, r->sent + r->behind) <= ONE_CTA_BYTES;
}

spar_status spar_cuda_copy_round(const spar_plan *plan, const void *const *inputs, void *const *outputs,
                                 void *const *targets, const spar_scale *scale, const spar_round *r,
                                 void *stream)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    enum { SIGNALS = SPAR_KERNEL_SIGNALS, WAITS = SPAR_KERNEL_WAITS, WIDEST = 16 };
    const spar_span *beside = r->spans + r->sent, *behind = beside + r->beside;
    copy c = {.scale = scale,
              .stream = stream,
              .round = r,
              .ntensors = plan->ntensors,
              .lanes = r->sent + r->beside > 0 ? r->sent + r->beside : 1,
              .sent = -1};
    spar_launches launches;
    SPAR_TRY(find(r->ordinal, &c.gpu));
    spar_launches_begin(&launches, launch, &c);
    if (r->offers)
        SPAR_TRY(end_copy(&c, &launches, SPAR_KERNEL_OFFERS));
    if (r->beside) {
        c.scale = &unscaled;
        SPAR_TRY(spar_launches_add(&launches, plan, beside, r->beside, inputs, targets));
        /* Another kernel scales what is sent, or would copy it by fewer bytes at a time. */
        if ((int)scale->dtype != SPAR_UNSCALED || launches.bits % WIDEST)
            SPAR_TRY(spar_launches_end(&launches));
        c.scale = scale;
    }
    SPAR_TRY(spar_launches_add(&launches, plan, r->spans, r->sent, inputs, outputs));
    if (is_small(r, scale) && !c.count) {
        c.sent = launches.copy.parts;
        c.mode = SIGNALS | WAITS;
        SPAR_TRY(spar_launches_add(&launches, plan, behind, r->behind, inputs, targets));
        c.mark = r->mark;
        return end_copy(&c, &launches, c.count ? 0 : SIGNALS | WAITS);
    }
    SPAR_TRY(end_copy(&c, &launches, SIGNALS));
    c.scale = &unscaled;
    c.sent = 0;
    c.mark = r->behind ? NULL : r->mark;
    SPAR_TRY(end_copy(&c, &launches, WAITS));
    if (!r->behind)
        return SPAR_OK;
    SPAR_TRY(spar_launches_add(&launches, plan, behind, r->behind, inputs, targets));
    c.mark = r->mark;
    return end_copy(&c, &launches, 0);
}

spar_status spar_cuda_set_side_stream(int ordinal, void *stream)
{
    SPAR_TRY(check_ordinal(ordinal));
    __atomic_store_n(&gpus.side_streams[ordinal], stream, __ATOMIC_RELAXED);
    return SPAR_OK;
}

/* ---- the device ---- */

/* Launches each kernel once: the driver may load it at its first launch, which would then wait for running
 * kernels. */
static spar_status launch_nothing(const gpu *g, CUstream stream)
{
    spar_kernel_copy nothing = {.lanes = 1};
    void *parameters[] = {&nothing};
    for (int i = 0; i < SPAR_KERNEL_COUNT; i++)
        SPAR_TRY_CU(LaunchKernel, g->kernels[i], 1, 1, 1, SPAR_KERNEL_THREADS, 1, 1, 0, stream, parameters,
                    NULL);
    SPAR_TRY_CU(StreamSynchronize, stream);
    return SPAR_OK;
}

static spar_status load_kernels(gpu *g, CUdevice device)
{
    int major = 0, minor = 0, sms = 0;
    size_t size;
    char *cubin;
    CUmodule module;
    CUstream stream;
    SPAR_TRY_CU(DeviceGetAttribute, &major, SPAR_CU_COMPUTE_MAJOR, device);
    SPAR_TRY_CU(DeviceGetAttribute, &minor, SPAR_CU_COMPUTE_MINOR, device);
    SPAR_TRY_CU(DeviceGetAttribute, &sms, SPAR_CU_SMS, device);
    g->ctas = sms * 3 / 4 < MOST_CTAS ? sms * 3 / 4 : MOST_CTAS; /* NCCL's CTAs find an SM */
    g->ctas = g->ctas > 0 ? g->ctas : 1;
    SPAR_TRY(spar_cubin_cache_get(spar_kernel_source, 10 * major + minor, &cubin, &size, NULL));
    CUresult loaded = spar_cu.ModuleLoadData(&module, cubin);
    free(cubin);
    SPAR_TRY(spar_driver_check(loaded, "cuModuleLoadData"));
    for (int i = 0; i < SPAR_KERNEL_COUNT; i++)
        SPAR_TRY_CU(ModuleGetFunction, &g->kernels[i], module, spar_kernel_rows[i].name);
    SPAR_TRY_CU(StreamCreate, &stream, SPAR_CU_STREAM_NON_BLOCKING);
    spar_status status = launch_nothing(g, stream);
    spar_cu.StreamDestroy(stream);
    return status;
}

static spar_status enter_context(CUcontext context, spar_entered *before)
{
    CUcontext current_context;
    CUstreamCaptureMode mode = SPAR_CU_CAPTURE_RELAXED;
    SPAR_TRY_CU(CtxGetCurrent, &current_context);
    if (context != current_context)
        SPAR_TRY_CU(CtxSetCurrent, context);
    *before = (spar_entered){current_context, SPAR_CU_CAPTURE_RELAXED};
    if (spar_cu.ThreadExchangeStreamCaptureMode(&mode) == SPAR_CU_SUCCESS)
        before->mode = (int)mode;
    return SPAR_OK;
}

void spar_cuda_leave(const spar_entered *before)
{
    CUcontext context;
    CUstreamCaptureMode mode = (CUstreamCaptureMode)before->mode;
    spar_cu.ThreadExchangeStreamCaptureMode(&mode);
    if (spar_cu.CtxGetCurrent(&context) != SPAR_CU_SUCCESS || context == before->context)
        return;
    const gpu *first = __atomic_load_n(&gpus.by_ordinal[0], __ATOMIC_ACQUIRE);
    if (before->context || !first || first->context != context)
        spar_cu.CtxSetCurrent(before->context);
}

/* In the device's primary context, which torch uses, too. Requires the lock. */
static spar_status prepare_first(int ordinal)
{
    CUdevice device;
    CUcontext context;
    spar_entered before;
    SPAR_TRY_CU(Init, 0);
    SPAR_TRY_CU(DeviceGet, &device, ordinal);
    SPAR_TRY_CU(DevicePrimaryCtxRetain, &context, device); /* kept until the process ends */
    SPAR_TRY(enter_context(context, &before));
    gpu *g = calloc(1, sizeof *g);
    spar_status status = g ? load_kernels(g, device) : spar_fail(SPAR_NO_MEMORY, "no memory for a device");
    spar_cuda_leave(&before);
    if (status != SPAR_OK) {
        free(g);
        return status;
    }
    g->context = context;
    __atomic_store_n(&gpus.by_ordinal[ordinal], g, __ATOMIC_RELEASE);
    return SPAR_OK;
}

spar_status spar_cuda_prepare(int ordinal)
{
    SPAR_TRY(check_ordinal(ordinal));
    SPAR_TRY(spar_cuda_open());
    pthread_mutex_lock(&gpus.lock);
    spar_status status = gpus.by_ordinal[ordinal] ? SPAR_OK : prepare_first(ordinal);
    pthread_mutex_unlock(&gpus.lock);
    return status;
}

spar_status spar_cuda_enter(int ordinal, spar_entered *before)
{
    const gpu *g;
    SPAR_TRY(find(ordinal, &g));
    return enter_context(g->context, before);
}
