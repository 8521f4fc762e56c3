/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan.h"

#include "base/util.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 1 << 20, MOST_ARGS = 1 << 26 }; /* sanity limits */

/* A plan under construction. */
typedef struct {
    spar_plan *plan;
    int64_t blocks, block_room, dims, dim_room;
} builder;

/* Where the elements of one rank's tensor lie. */
typedef struct {
    int64_t strides[SPAR_MAX_DIMS]; /* bytes */
    int64_t bytes;                  /* from the first element's first byte to the last one's last */
} placement;

/* Row-major strides of `extents`, in bytes. */
static spar_status place_contiguous(int ndim, const int64_t *extents, int64_t item_size, placement *place)
{
    int64_t stride = item_size;
    place->bytes = 0;
    for (int i = ndim - 1; i >= 0; i--) {
        place->strides[i] = stride;
        if (__builtin_mul_overflow(stride, extents[i], &stride))
            return spar_fail(SPAR_INVALID, "a tensor with a dim of %lld has more than 2^63 bytes",
                             (long long)extents[i]);
    }
    place->bytes = stride;
    return SPAR_OK;
}

static spar_status place_strided(const spar_tensor *tensor, placement *place)
{
    int64_t last = tensor->item_size;
    int empty = 0;
    for (int i = 0; i < tensor->ndim; i++) {
        int64_t stride, reach;
        if (tensor->extents[i] < 0 || tensor->strides[i] < 0)
            return spar_fail(SPAR_INVALID, "dim %d has extent %lld and stride %lld; expected at least 0", i,
                             (long long)tensor->extents[i], (long long)tensor->strides[i]);
        empty |= tensor->extents[i] == 0;
        if (__builtin_mul_overflow(tensor->strides[i], tensor->item_size, &stride) ||
            __builtin_mul_overflow(stride, tensor->extents[i] - 1, &reach) ||
            __builtin_add_overflow(last, reach, &last))
            return spar_fail(SPAR_INVALID, "dim %d (extent %lld, stride %lld) reaches past 2^63 bytes", i,
                             (long long)tensor->extents[i], (long long)tensor->strides[i]);
        place->strides[i] = stride;
    }
    place->bytes = empty ? 0 : last;
    return SPAR_OK;
}

/* The extents that `rank` holds under `layout`. */
static void local_extents(const spar_plan_tensor *shape, const spar_layout *layout, int rank,
                          int64_t *extents)
{
    memcpy(extents, shape->global, (size_t)shape->ndim * sizeof *extents);
    if (layout->dim >= 0)
        extents[layout->dim] = spar_layout_extent(layout, rank);
}

/* Whether an outer loop of this stride continues where the inner one ends. */
static int adjoins(int64_t outer, int64_t inner, int64_t extent)
{
    int64_t end;
    return !__builtin_mul_overflow(inner, extent, &end) && outer == end;
}

static int has_zero(int ndim, const int64_t *extents)
{
    for (int i = 0; i < ndim; i++)
        if (extents[i] == 0)
            return 1;
    return 0;
}

/* Appends one block. Merges loops that are adjacent on both sides, and a contiguous innermost loop into the
 * run. */
static spar_status add_block(builder *b, spar_range *range, int tensor, int ndim, const int64_t *extents,
                             const placement *from, const placement *to, int64_t src, int64_t dst)
{
    spar_dim loops[SPAR_MAX_DIMS];
    int64_t run = b->plan->tensors[tensor].item_size;
    int64_t src_end, dst_end, bytes = run;
    int n = 0; /* loops, innermost first */
    for (int i = ndim - 1; i >= 0; i--) {
        bytes *= extents[i];
        if (extents[i] == 1)
            continue;
        spar_dim loop = {extents[i], from->strides[i], to->strides[i]};
        if (n == 0 && loop.src == run && loop.dst == run)
            run *= loop.extent;
        else if (n > 0 && adjoins(loop.src, loops[n - 1].src, loops[n - 1].extent) &&
                 adjoins(loop.dst, loops[n - 1].dst, loops[n - 1].extent))
            loops[n - 1].extent *= loop.extent;
        else
            loops[n++] = loop;
    }
    if (__builtin_add_overflow(range->bytes, bytes, &range->bytes))
        return spar_fail(SPAR_INVALID, "with %lld bytes more, one rank sends another over 2^63",
                         (long long)bytes);
    src_end = src + run;
    dst_end = dst + run;
    for (int i = 0; i < n; i++) {
        src_end += (loops[i].extent - 1) * loops[i].src;
        dst_end += (loops[i].extent - 1) * loops[i].dst;
    }
    if (src < 0 || src_end > from->bytes || dst < 0 || dst_end > to->bytes)
        return spar_fail(SPAR_INTERNAL,
                         "a block reaches from byte %lld to %lld of %lld, and to byte %lld of %lld",
                         (long long)src, (long long)src_end, (long long)from->bytes, (long long)dst_end,
                         (long long)to->bytes);
    SPAR_TRY(spar_reserve((void **)&b->plan->blocks, &b->block_room, b->blocks + 1, sizeof(spar_block),
                          "blocks of a plan"));
    SPAR_TRY(spar_reserve((void **)&b->plan->dims, &b->dim_room, b->dims + n, sizeof(spar_dim),
                          "blocks of a plan"));
    b->plan->blocks[b->blocks++] =
        (spar_block){.src = src, .dst = dst, .run = run, .dims = b->dims, .tensor = tensor, .ndim = n};
    for (int i = n - 1; i >= 0; i--)
        b->plan->dims[b->dims++] = loops[i];
    range->count++;
    return SPAR_OK;
}

/* Narrows two pieces of one dim to what both have; returns whether that is anything. */
static int intersect(spar_piece *a, spar_piece *z)
{
    int64_t begin = a->global > z->global ? a->global : z->global;
    int64_t end =
        a->global + a->extent < z->global + z->extent ? a->global + a->extent : z->global + z->extent;
    *a = (spar_piece){a->local + begin - a->global, begin, end - begin};
    *z = (spar_piece){z->local + begin - z->global, begin, end - begin};
    return begin < end;
}

/* Appends the blocks of one tensor from `sender` to `receiver`: each piece of the sender's layout, crossed
 * with each piece of the receiver's, or cut to what both have if the dim is the same. `from` NULL: the sender
 * packed them. */
static spar_status add_pair(builder *b, spar_range *range, int tensor, const spar_layout *in,
                            const spar_layout *out, int sender, int receiver, const placement *from)
{
    const spar_plan_tensor *shape = &b->plan->tensors[tensor];
    int64_t extents[SPAR_MAX_DIMS];
    placement to, packed;
    if (in->dim < 0 && sender != receiver)
        return SPAR_OK; /* a whole input is copied from the rank's own */
    local_extents(shape, out, receiver, extents);
    SPAR_TRY(place_contiguous(shape->ndim, extents, shape->item_size, &to));
    memcpy(extents, shape->global, sizeof extents);
    const spar_piece whole = {0, 0, 0};
    const spar_piece *a = &whole, *z = &whole;
    int64_t na = 1, nz = 1;
    if (in->dim >= 0) {
        a = in->pieces + in->first[sender];
        na = in->first[sender + 1] - in->first[sender];
    }
    if (out->dim >= 0) {
        z = out->pieces + out->first[receiver];
        nz = out->first[receiver + 1] - out->first[receiver];
    }
    for (int64_t i = 0; i < na; i++) {
        for (int64_t j = 0; j < nz; j++) {
            const placement *source = from;
            int64_t src = 0, dst = 0;
            spar_piece sent = a[i], received = z[j]; /* local: in the sender's tensor, in the receiver's */
            if (in->dim == out->dim && !intersect(&sent, &received))
                continue;
            if (in->dim >= 0)
                extents[in->dim] = sent.extent;
            if (out->dim >= 0)
                extents[out->dim] = received.extent;
            if (has_zero(shape->ndim, extents))
                continue;
            if (in->dim >= 0 && in->dim != out->dim)
                dst += sent.global * to.strides[in->dim];
            if (out->dim >= 0)
                dst += received.local * to.strides[out->dim];
            if (from) {
                src += in->dim >= 0 ? sent.local * from->strides[in->dim] : 0;
                src += out->dim >= 0 && out->dim != in->dim ? received.global * from->strides[out->dim] : 0;
            } else {
                SPAR_TRY(place_contiguous(shape->ndim, extents, shape->item_size, &packed));
                src = range->bytes;
                if (__builtin_add_overflow(packed.bytes, src, &packed.bytes))
                    packed.bytes = INT64_MAX; /* add_block rejects the sum */
                source = &packed;
            }
            SPAR_TRY(add_block(b, range, tensor, shape->ndim, extents, source, &to, src, dst));
        }
    }
    return SPAR_OK;
}

uint64_t spar_plan_signature(const spar_plan *plan, const char *text)
{
    uint64_t hash = plan->signature;
    for (; *text; text++)
        hash = spar_hash(hash, *text);
    return hash;
}

/* Hashes the order of pieces over ranks; 0 if each rank has one piece, in rank order. */
static uint32_t order_of(const spar_layout *layout)
{
    int64_t at = 0, natural = 1;
    uint64_t hash = 1;
    for (int64_t i = 0; layout->dim >= 0 && i < layout->first[layout->world]; i++) {
        const spar_piece *piece = &layout->pieces[i];
        natural &= piece->local == 0 && piece->global == at;
        at = piece->global + piece->extent;
        hash = spar_hash(spar_hash(hash, piece->global), piece->extent);
    }
    return natural ? 0 : (uint32_t)(hash >> 32) | 1;
}

static uint64_t mix_layout(uint64_t hash, const spar_layout *layout)
{
    hash = spar_hash(hash, layout->dim);
    if (layout->dim < 0)
        return hash;
    for (int rank = 0; rank <= layout->world; rank++)
        hash = spar_hash(hash, layout->first[rank]);
    for (int64_t i = 0; i < layout->first[layout->world]; i++)
        hash = spar_hash(spar_hash(hash, layout->pieces[i].global), layout->pieces[i].extent);
    return hash;
}

/* Shapes of one tensor, and its part of the signature. */
static spar_status set_shape(spar_plan *plan, int which, const spar_layout *in, const spar_layout *out)
{
    spar_plan_tensor *shape = &plan->tensors[which];
    int64_t extents[SPAR_MAX_DIMS];
    placement place;
    SPAR_TRY(place_contiguous(shape->ndim, shape->global, shape->item_size, &place));
    local_extents(shape, out, plan->rank, shape->out);
    SPAR_TRY(place_contiguous(shape->ndim, shape->out, shape->item_size, &place));
    shape->out_bytes = place.bytes;
    shape->in_dim = in->dim;
    shape->out_dim = out->dim;
    shape->in_order = order_of(in);
    shape->out_order = order_of(out);
    if (shape->in_order)
        spar_layout_describe(in, shape->in_words, sizeof shape->in_words);
    if (shape->out_order)
        spar_layout_describe(out, shape->out_words, sizeof shape->out_words);
    shape->in_sizes = malloc((size_t)plan->world * 3 * sizeof(int64_t));
    if (!shape->in_sizes)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a plan of %d ranks", plan->world);
    shape->out_sizes = shape->in_sizes + plan->world;
    shape->rank_bytes = shape->out_sizes + plan->world;
    for (int rank = 0; rank < plan->world; rank++) {
        shape->in_sizes[rank] = in->dim >= 0 ? spar_layout_extent(in, rank) : 0;
        shape->out_sizes[rank] = out->dim >= 0 ? spar_layout_extent(out, rank) : 0;
        local_extents(shape, out, rank, extents);
        SPAR_TRY(place_contiguous(shape->ndim, extents, shape->item_size, &place));
        shape->rank_bytes[rank] = place.bytes;
    }
    plan->signature = spar_hash(spar_hash(plan->signature, shape->item_size), shape->ndim);
    for (int i = 0; i < shape->ndim; i++)
        plan->signature = spar_hash(plan->signature, shape->global[i]);
    plan->signature = mix_layout(mix_layout(plan->signature, in), out);
    return SPAR_OK;
}

spar_status spar_request_check(const spar_request *request)
{
    if (request->world < 1 || request->world > MOST_RANKS || request->rank < 0 ||
        request->rank >= request->world)
        return spar_fail(SPAR_INVALID, "rank %d of %d ranks", request->rank, request->world);
    if (request->ntensors < 1)
        return spar_fail(SPAR_INVALID, "no tensor");
    for (int t = 0; t < request->ntensors; t++) {
        const spar_tensor *tensor = &request->tensors[t];
        if (tensor->ndim < 1 || tensor->ndim > SPAR_MAX_DIMS)
            return spar_fail(SPAR_INVALID, "rank %d's input has %d dims; expected 1 to %d", request->rank,
                             tensor->ndim, SPAR_MAX_DIMS);
        if (tensor->nargs < 0 || tensor->nargs > MOST_ARGS)
            return spar_fail(SPAR_INVALID, "%d numbers for the layouts; expected at most %d", tensor->nargs,
                             MOST_ARGS);
        if (tensor->item_size < 1 || tensor->item_size > 4096)
            return spar_fail(SPAR_INVALID, "an item of %lld bytes; expected 1 to 4096",
                             (long long)tensor->item_size);
    }
    return SPAR_OK;
}

/* Reads both layouts of a tensor. */
static spar_status read_layouts(const spar_tensor *tensor, int world, spar_layout *in, spar_layout *out)
{
    const int64_t *args = tensor->args;
    if (tensor->nargs < 1 || args[0] < 1 || args[0] > tensor->nargs - 2)
        return spar_fail(
            SPAR_INVALID,
            "the layouts are %d ints; expected n, the n ints of the input's layout, and those of the "
            "output's, at least one each",
            tensor->nargs);
    SPAR_TRY(spar_layout_read(in, args + 1, args[0], tensor->ndim, world));
    return spar_layout_read(out, args + 1 + args[0], tensor->nargs - 1 - args[0], tensor->ndim, world);
}

/* Checks the layouts against the extents that `rank` holds, and sets the global extents. */
static spar_status find_global(const spar_tensor *tensor, int rank, const spar_layout *in,
                               const spar_layout *out, int64_t *global)
{
    if (in->dim < 0 && out->dim < 0)
        return spar_fail(SPAR_INVALID, "every rank holds the whole before and after");
    memcpy(global, tensor->extents, (size_t)tensor->ndim * sizeof *global);
    if (in->dim >= 0) {
        int64_t held = spar_layout_extent(in, rank), has = tensor->extents[in->dim];
        if (held != has)
            return spar_fail(SPAR_INVALID,
                             "rank %d's input has %lld in dim %d; expected %lld, its shard of %lld", rank,
                             (long long)has, in->dim, (long long)held, (long long)in->total);
        global[in->dim] = in->total;
    }
    if (out->dim >= 0 && global[out->dim] != out->total)
        return spar_fail(SPAR_INVALID,
                         "rank %d's input has %lld in dim %d; expected %lld, the sum of all shards", rank,
                         (long long)global[out->dim], out->dim, (long long)out->total);
    return SPAR_OK;
}

/* Fills in a plan that has room for its tensors and ranges. The caller frees the layouts. */
static spar_status build(builder *b, const spar_request *request, spar_layout *layouts, placement *inputs)
{
    spar_plan *plan = b->plan;
    int n = plan->ntensors, gathers = 1; /* every rank is sent the same */
    plan->pull = request->sides & SPAR_SIDE_PULL ? plan->push + plan->world : NULL;
    for (int t = 0; t < n; t++) {
        const spar_tensor *tensor = &request->tensors[t];
        spar_layout *in = &layouts[2 * t], *out = in + 1;
        plan->tensors[t].item_size = tensor->item_size;
        plan->tensors[t].ndim = tensor->ndim;
        SPAR_TRY(place_strided(tensor, &inputs[t]));
        SPAR_TRY(read_layouts(tensor, plan->world, in, out));
        SPAR_TRY(find_global(tensor, plan->rank, in, out, plan->tensors[t].global));
        SPAR_TRY(set_shape(plan, t, in, out));
        gathers &= in->dim >= 0 && out->dim < 0;
    }
    /* an empty plan has arrays too: a null pointer may not even be moved by 0 */
    SPAR_TRY(spar_reserve((void **)&plan->blocks, &b->block_room, 1, sizeof(spar_block), "blocks of a plan"));
    SPAR_TRY(spar_reserve((void **)&plan->dims, &b->dim_room, 1, sizeof(spar_dim), "blocks of a plan"));
    for (int side = 0; side < 2; side++) {
        spar_range *ranges = side ? plan->pull : plan->push;
        for (int peer = 0; ranges && peer < plan->world; peer++) {
            if (!side && peer > 0 && gathers) {
                ranges[peer] = ranges[0];
                continue;
            }
            ranges[peer].first = b->blocks;
            for (int t = 0; t < n; t++) {
                const spar_layout *in = &layouts[2 * t], *out = in + 1;
                if (side)
                    SPAR_TRY(add_pair(b, &ranges[peer], t, in, out, peer, plan->rank, NULL));
                else
                    SPAR_TRY(add_pair(b, &ranges[peer], t, in, out, plan->rank, peer, &inputs[t]));
            }
        }
    }
    for (int peer = 0; peer < plan->world; peer++)
        plan->sent += peer == plan->rank ? 0 : (uint64_t)plan->push[peer].bytes;
    plan->footprint = (int64_t)sizeof *plan + b->block_room * (int64_t)sizeof(spar_block) +
                      b->dim_room * (int64_t)sizeof(spar_dim) +
                      plan->world * (2 * (int64_t)sizeof *plan->push + 3 * n * (int64_t)sizeof(int64_t));
    return SPAR_OK;
}

spar_status spar_plan_build(const spar_request *request, spar_plan **result)
{
    SPAR_TRY(spar_request_check(request));
    spar_status status = SPAR_NO_MEMORY;
    int n = request->ntensors, world = request->world;
    spar_plan *plan = calloc(1, sizeof *plan);
    spar_layout *layouts = calloc((size_t)n * 2, sizeof *layouts);
    placement *inputs = calloc((size_t)n, sizeof *inputs);
    if (plan) {
        *plan = (spar_plan){.world = world,
                            .rank = request->rank,
                            .ntensors = n,
                            .tensors = calloc((size_t)n, sizeof *plan->tensors),
                            .push = calloc((size_t)world * 2, sizeof *plan->push),
                            .signature = spar_hash(0, n),
                            .refs = 1};
    }
    if (plan && layouts && inputs && plan->tensors && plan->push)
        status = build(&(builder){.plan = plan}, request, layouts, inputs);
    else
        spar_fail(SPAR_NO_MEMORY, "no memory for a plan of %d ranks", world);
    for (int i = 0; layouts && i < 2 * n; i++)
        spar_layout_free(&layouts[i]);
    free(layouts);
    free(inputs);
    if (status == SPAR_OK)
        *result = plan;
    else if (plan)
        spar_plan_release(plan);
    return status;
}

int64_t spar_packed_dims(const spar_plan *plan, const spar_block *block, int unpacks, spar_dim *dims)
{
    int64_t stride = block->run;
    memcpy(dims, plan->dims + block->dims, (size_t)block->ndim * sizeof *dims);
    for (int i = block->ndim - 1; i >= 0; stride *= dims[i--].extent)
        *(unpacks ? &dims[i].src : &dims[i].dst) = stride;
    return stride;
}

spar_plan *spar_plan_keep(spar_plan *plan)
{
    __atomic_add_fetch(&plan->refs, 1, __ATOMIC_RELAXED);
    return plan;
}

void spar_plan_release(spar_plan *plan)
{
    if (__atomic_sub_fetch(&plan->refs, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    for (int t = 0; plan->tensors && t < plan->ntensors; t++)
        free(plan->tensors[t].in_sizes);
    free(plan->tensors);
    free(plan->push);
    free(plan->blocks);
    free(plan->dims);
    free(plan);
}
