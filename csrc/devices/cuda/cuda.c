/* Strided copies in CUDA device memory, in a stream, by the kernels of kernels.cu. */
#include "devices/cuda/nvrtc.h"
#include "devices/cuda/cubin_cache.h"
#include "devices/device.h"
#include "devices/cuda/driver.h"
#include "devices/cuda/table_cache.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { GPUS = 64 };

static const spar_driver *cu;

#define TRY_CU(name, ...) SPAR_DRIVER_TRY(cu, name, __VA_ARGS__)

typedef struct gpu {
    CUcontext context;
    CUfunction kernels[SPAR_KERNEL_COUNT];
    spar_table_cache cache;
} gpu;

static struct {
    pthread_mutex_t lock;
    gpu *by_ordinal[GPUS]; /* atomic; never freed */
} gpus = {.lock = PTHREAD_MUTEX_INITIALIZER};

static spar_status open_libraries(void)
{
    const spar_driver *driver;
    SPAR_TRY(spar_driver_open(&driver));
    cu = driver; /* every thread stores the same value */
    return spar_nvrtc_open();
}

/* ---- launches ---- */

/* A span with its list. */
typedef struct {
    const spar_block_list *list;
    int64_t low, high;
    char *wire;
} part;

/* Common to all launches of a copy. */
typedef struct {
    gpu *gpu;
    const spar_device_table *tables;
    spar_route route;
    const void *const *from;
    void *const *to;
    int ntensors;
    spar_scale scale;
    void *stream;
} copy;

/* Chooses the widest kernel for addresses in which these bits are set. */
static spar_status choose(const copy *c, uint64_t bits, int *kernel, int64_t *tile)
{
    const spar_scale_type *type = &spar_scale_types[c->scale.dtype];
    for (int i = 0; i < SPAR_KERNEL_COUNT; i++) {
        const spar_kernel_row *row = &spar_kernel_rows[i];
        if (strcmp(row->factor, type->name) != 0 || bits & (uint64_t)(row->width - 1))
            continue;
        *kernel = i;
        *tile = row->width * SPAR_KERNEL_THREADS * SPAR_KERNEL_UNITS;
        return SPAR_OK;
    }
    return spar_fail(SPAR_INVALID,
                     "a factor for items of %lld bytes, but a tensor or a span does not begin or "
                     "step at a multiple of that",
                     (long long)type->bytes);
}

/* Launches one kernel for up to SPAR_KERNEL_SPANS parts, of tensors `tensor` and up. */
static spar_status launch(const copy *c, const part *parts, int count, int tensor)
{
    spar_kernel_copy k = {.tensor = tensor, .spans = count};
    uint64_t bits = 0;
    int64_t tile = 0, tiles = 0;
    int kernel = 0, last = c->ntensors - tensor;
    if (count == 0)
        return SPAR_OK;
    if (last > SPAR_KERNEL_TENSORS)
        last = SPAR_KERNEL_TENSORS;
    k.blocks = (const spar_kernel_block *)(uintptr_t)c->tables->memory;
    k.loops = (const spar_kernel_loop *)(k.blocks + c->tables->table.nblocks);
    k.factor = c->scale.factor;
    k.divide = c->scale.divide;
    k.packs = c->route == SPAR_PACK;
    k.unpacks = c->route == SPAR_UNPACK;
    for (int i = 0; i < last; i++) {
        if (!k.unpacks)
            bits |= (uintptr_t)(k.from[i] = c->from[tensor + i]);
        if (!k.packs)
            bits |= (uintptr_t)(k.to[i] = c->to[tensor + i]);
    }
    for (int i = 0; i < count; i++) {
        bits |= (uint64_t)parts[i].low | (uint64_t)parts[i].high | (uintptr_t)parts[i].wire;
        bits |= (k.unpacks ? 0 : parts[i].list->src_bits) | (k.packs ? 0 : parts[i].list->dst_bits);
    }
    SPAR_TRY(choose(c, bits, &kernel, &tile));
    for (int i = 0; i < count; i++) {
        k.span[i] = (spar_kernel_span){.low = parts[i].low,
                                       .high = parts[i].high,
                                       .wire = parts[i].wire,
                                       .first = parts[i].list->first,
                                       .count = parts[i].list->count,
                                       .tile = (unsigned)tiles};
        tiles += (parts[i].high - parts[i].low + tile - 1) / tile;
    }
    if (tiles > INT32_MAX)
        return spar_fail(SPAR_INVALID, "a copy in %lld pieces of %lld bytes; expected below 2^31",
                         (long long)tiles, (long long)tile);
    void *parameters[] = {&k};
    return spar_driver_check(cu->LaunchKernel(c->gpu->kernels[kernel], (unsigned)tiles, 1, 1,
                                              SPAR_KERNEL_THREADS, 1, 1, 0, c->stream, parameters, NULL),
                             "cuLaunchKernel");
}

/* Splits tensors and parts into launches. */
static spar_status launch_all(const copy *c, const part *parts, int count)
{
    const spar_block_table *table = &c->tables->table;
    for (int tensor = 0; tensor < c->ntensors; tensor += SPAR_KERNEL_TENSORS) {
        part some[SPAR_KERNEL_SPANS];
        int n = 0;
        for (int i = 0; i < count; i++) {
            part p = parts[i];
            if (c->ntensors > SPAR_KERNEL_TENSORS) {
                int64_t begin = spar_block_table_begin(table, p.list, tensor);
                int64_t end = spar_block_table_begin(table, p.list, tensor + SPAR_KERNEL_TENSORS);
                p.low = p.low > begin ? p.low : begin;
                p.high = p.high < end ? p.high : end;
                p.wire = p.wire ? p.wire + (p.low - parts[i].low) : NULL;
            }
            if (p.low >= p.high)
                continue;
            some[n++] = p;
            if (n == SPAR_KERNEL_SPANS) {
                SPAR_TRY(launch(c, some, n, tensor));
                n = 0;
            }
        }
        SPAR_TRY(launch(c, some, n, tensor));
    }
    return SPAR_OK;
}

/* ---- the device ---- */

/* Finds the prepared device whose context is current. */
static spar_status current(gpu **found)
{
    CUcontext context = NULL;
    if (cu)
        TRY_CU(CtxGetCurrent, &context);
    for (int i = 0; i < GPUS && context; i++)
        if ((*found = __atomic_load_n(&gpus.by_ordinal[i], __ATOMIC_ACQUIRE)) != NULL &&
            (*found)->context == context)
            return SPAR_OK;
    return spar_fail(SPAR_INTERNAL, "no prepared CUDA device is this thread's current one");
}

static spar_status copy_spans(const spar_plan *plan, spar_route route, const spar_span *spans, int count,
                              const void *const *inputs, void *const *outputs, const spar_scale *scale,
                              void *stream)
{
    enum { ON_STACK = 64 };
    part on_stack[ON_STACK], *parts = on_stack;
    gpu *g;
    spar_device_table *t;
    SPAR_TRY(current(&g));
    SPAR_TRY(spar_table_cache_get(&g->cache, plan, &t));
    const spar_block_list *lists = route == SPAR_UNPACK ? t->table.pull : t->table.push;
    if (!lists)
        return spar_fail(SPAR_INTERNAL, "the plan was built without what is pulled");
    for (int i = 0; i < count; i++)
        if (spans[i].peer < 0 || spans[i].peer >= plan->world || spans[i].low < 0 ||
            spans[i].low > spans[i].high || spans[i].high > lists[spans[i].peer].bytes)
            return spar_fail(SPAR_INVALID, "a copy of bytes %lld to %lld of rank %d of %d",
                             (long long)spans[i].low, (long long)spans[i].high, spans[i].peer, plan->world);
    if (count > ON_STACK && !(parts = malloc((size_t)count * sizeof *parts)))
        return spar_fail(SPAR_NO_MEMORY, "no memory for %d spans", count);
    for (int i = 0; i < count; i++)
        parts[i] = (part){&lists[spans[i].peer], spans[i].low, spans[i].high, spans[i].wire};
    const copy c = {g, t, route, inputs, outputs, plan->ntensors, spar_scale_simple(scale), stream};
    spar_status status = spar_device_table_await(t, stream);
    if (status == SPAR_OK) {
        status = launch_all(&c, parts, count);
        spar_status used = spar_device_table_used(t, stream);
        status = status == SPAR_OK ? used : status;
    }
    if (parts != on_stack)
        free(parts);
    return status;
}

/* Copies blocks without a plan, by a table for this copy only. */
static spar_status copy_blocks(const spar_block *blocks, int64_t count, const spar_dim *dims,
                               const void *const *from, void *const *const *to, int targets,
                               const spar_scale *scale, void *stream)
{
    spar_block_list list;
    gpu *g;
    spar_device_table *t;
    SPAR_TRY(current(&g));
    SPAR_TRY(spar_device_table_make(&g->cache, blocks, count, dims, &list, &t));
    int ntensors = 0;
    for (int64_t i = 0; i < count; i++)
        ntensors = blocks[i].tensor < ntensors ? ntensors : blocks[i].tensor + 1;
    const part whole = {&list, 0, list.bytes, NULL};
    spar_status status = spar_device_table_await(t, stream);
    for (int target = 0; target < targets && status == SPAR_OK; target++) {
        const copy c = {g, t, SPAR_PUSH, from, to[target], ntensors, spar_scale_simple(scale), stream};
        status = launch_all(&c, &whole, 1);
    }
    if (status == SPAR_OK)
        status = spar_device_table_used(t, stream);
    spar_device_table_retire(t);
    return status;
}

static spar_status load_kernels(gpu *g, CUdevice device)
{
    int major = 0, minor = 0;
    size_t size;
    char *cubin;
    CUmodule module;
    TRY_CU(DeviceGetAttribute, &major, SPAR_CU_COMPUTE_MAJOR, device);
    TRY_CU(DeviceGetAttribute, &minor, SPAR_CU_COMPUTE_MINOR, device);
    SPAR_TRY(spar_cubin_cache_get(spar_kernel_source, 10 * major + minor, &cubin, &size, NULL));
    CUresult loaded = cu->ModuleLoadData(&module, cubin);
    free(cubin);
    SPAR_TRY(spar_driver_check(loaded, "cuModuleLoadData"));
    for (int i = 0; i < SPAR_KERNEL_COUNT; i++)
        TRY_CU(ModuleGetFunction, &g->kernels[i], module, spar_kernel_rows[i].name);
    /* The driver may load a kernel at its first launch, which would then wait for running kernels. */
    spar_kernel_copy nothing = {.spans = 0};
    void *parameters[] = {&nothing};
    for (int i = 0; i < SPAR_KERNEL_COUNT; i++)
        TRY_CU(LaunchKernel, g->kernels[i], 1, 1, 1, SPAR_KERNEL_THREADS, 1, 1, 0, g->cache.stream,
               parameters, NULL);
    TRY_CU(StreamSynchronize, g->cache.stream);
    return SPAR_OK;
}

/* With the device's primary context current; torch uses the same. */
static spar_status make_ready(CUdevice device, CUcontext context, gpu **made)
{
    gpu *g = calloc(1, sizeof *g);
    if (!g)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a device");
    g->context = context;
    spar_status status = spar_table_cache_open(&g->cache, cu);
    if (status == SPAR_OK && (status = load_kernels(g, device)) != SPAR_OK)
        spar_table_cache_close(&g->cache);
    if (status == SPAR_OK)
        *made = g;
    else
        free(g);
    return status;
}

static spar_status enter_context(CUcontext context, spar_entered *before)
{
    CUcontext current_context;
    CUstreamCaptureMode mode = SPAR_CU_CAPTURE_RELAXED;
    TRY_CU(CtxGetCurrent, &current_context);
    if (context != current_context)
        TRY_CU(CtxSetCurrent, context);
    *before = (spar_entered){current_context, SPAR_CU_CAPTURE_RELAXED};
    if (cu->ThreadExchangeStreamCaptureMode(&mode) == SPAR_CU_SUCCESS)
        before->mode = (int)mode;
    return SPAR_OK;
}

static void leave(const spar_entered *before)
{
    CUcontext context;
    CUstreamCaptureMode mode = (CUstreamCaptureMode)before->mode;
    cu->ThreadExchangeStreamCaptureMode(&mode);
    if (cu->CtxGetCurrent(&context) == SPAR_CU_SUCCESS && context != before->context)
        cu->CtxSetCurrent(before->context);
}

/* With the lock held. */
static spar_status prepare_first(int ordinal)
{
    CUdevice device;
    CUcontext context;
    spar_entered before;
    gpu *g = NULL;
    TRY_CU(Init, 0);
    TRY_CU(DeviceGet, &device, ordinal);
    TRY_CU(DevicePrimaryCtxRetain, &context, device); /* kept until the process ends */
    SPAR_TRY(enter_context(context, &before));
    spar_status status = make_ready(device, context, &g);
    leave(&before);
    if (status == SPAR_OK)
        __atomic_store_n(&gpus.by_ordinal[ordinal], g, __ATOMIC_RELEASE);
    return status;
}

static spar_status prepare(int ordinal)
{
    if (ordinal < 0 || ordinal >= GPUS)
        return spar_fail(SPAR_INVALID, "CUDA device %d; expected 0 to %d", ordinal, GPUS - 1);
    SPAR_TRY(open_libraries());
    pthread_mutex_lock(&gpus.lock);
    spar_status status = gpus.by_ordinal[ordinal] ? SPAR_OK : prepare_first(ordinal);
    pthread_mutex_unlock(&gpus.lock);
    return status;
}

static spar_status enter(int ordinal, spar_entered *before)
{
    gpu *g =
        ordinal < 0 || ordinal >= GPUS ? NULL : __atomic_load_n(&gpus.by_ordinal[ordinal], __ATOMIC_ACQUIRE);
    if (!g)
        return spar_fail(SPAR_INTERNAL, "CUDA device %d is not prepared", ordinal);
    return enter_context(g->context, before);
}

static spar_status alloc(int64_t bytes, void **memory)
{
    CUdeviceptr address;
    TRY_CU(MemAlloc, &address, (size_t)bytes);
    *memory = (void *)(uintptr_t)address;
    return SPAR_OK;
}

static void give(void *memory)
{
    cu->MemFree((CUdeviceptr)(uintptr_t)memory);
}

const spar_device spar_device_cuda = {
    .name = "cuda",
    .copy_blocks = copy_blocks,
    .open = open_libraries,
    .prepare = prepare,
    .enter = enter,
    .leave = leave,
    .copy_spans = copy_spans,
    .alloc = alloc,
    .free = give,
};
