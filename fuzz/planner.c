/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes the planner with valid calls, and with valid calls some of whose numbers were changed.
 *
 * An unchanged call runs on all ranks, and each byte must arrive at its place. The planner may reject a
 * changed call; a plan that it builds must stay in bounds, count its bytes correctly and agree between all
 * ranks. */
#include "fuzz.h"

static source input;
#define DRAW(seed, bound) ((void)(seed), (int)(next_byte(&input) % (unsigned)(bound)))
#include "../tests/c/random_call.h"

enum { ROOM = 64, RANKS = 64, SMALL = 1 << 12, MOST_ARGS = 1 << 26, MOST_RANKS = 1 << 20 };

/* One rank's request; its numbers may have any value. */
typedef struct {
    int world, rank, count;
    spar_tensor tensors[TENSORS];
    int64_t extents[TENSORS][ROOM], strides[TENSORS][ROOM], args[TENSORS][ROOM];
} fuzz_request;

static spar_request request_of(const fuzz_request *a)
{
    return (spar_request){a->world, a->rank, SPAR_SIDE_PULL, a->count, a->tensors};
}

/* ---- one plan ---- */

/* Returns how many bytes a block moves. It must stay within `from` source bytes and `to` destination
 * bytes. */
static __int128 check_block(const spar_plan *plan, const spar_block *block, __int128 from, __int128 to)
{
    __int128 src = (__int128)block->src + block->run, dst = (__int128)block->dst + block->run;
    __int128 bytes = block->run;
    EXPECT(block->run > 0 && block->src >= 0 && block->dst >= 0);
    EXPECT(block->ndim >= 0 && block->ndim <= SPAR_MAX_DIMS);
    for (const spar_dim *d = plan->dims + block->dims, *end = d + block->ndim; d < end; d++) {
        EXPECT(d->extent > 1 && d->src >= 0 && d->dst > 0);
        src += (__int128)(d->extent - 1) * d->src;
        dst += (__int128)(d->extent - 1) * d->dst;
        bytes *= d->extent;
    }
    EXPECT(src <= from && dst <= to);
    return bytes;
}

/* The length in bytes from an input's first byte to the end of its last item. */
static __int128 span_of(const spar_tensor *tensor)
{
    __int128 span = tensor->item_size;
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->extents[i] == 0)
            return 0;
        span += (__int128)(tensor->extents[i] - 1) * tensor->strides[i] * tensor->item_size;
    }
    return span;
}

static void check_plan(const fuzz_request *a, const spar_plan *plan)
{
    __int128 pulled = 0, output = 0;
    EXPECT(plan->world == a->world && plan->rank == a->rank);
    EXPECT(plan->ntensors == a->count && plan->footprint > 0);
    for (int peer = 0; peer < plan->world; peer++) {
        const spar_range *push = &plan->push[peer], *pull = &plan->pull[peer];
        __int128 bytes = 0;
        for (int64_t i = push->first; i < push->first + push->count; i++) {
            const spar_block *block = &plan->blocks[i];
            EXPECT(block->tensor >= 0 && block->tensor < plan->ntensors);
            bytes += check_block(plan, block, span_of(&a->tensors[block->tensor]),
                                 plan->tensors[block->tensor].rank_bytes[peer]);
        }
        EXPECT(bytes == push->bytes);
        bytes = 0;
        for (int64_t i = pull->first; i < pull->first + pull->count; i++) {
            const spar_block *block = &plan->blocks[i];
            EXPECT(block->src == bytes); /* packed bytes are contiguous */
            bytes += check_block(plan, block, pull->bytes, plan->tensors[block->tensor].out_bytes);
        }
        EXPECT(bytes == pull->bytes);
        pulled += bytes;
    }
    for (int t = 0; t < plan->ntensors; t++) {
        const spar_plan_tensor *shape = &plan->tensors[t];
        __int128 bytes = shape->item_size;
        for (int i = 0; i < shape->ndim; i++) {
            EXPECT(shape->out[i] >= 0 && shape->out[i] <= shape->global[i]);
            bytes *= shape->out[i];
        }
        EXPECT(bytes == shape->out_bytes && bytes == shape->rank_bytes[plan->rank]);
        output += bytes;
    }
    EXPECT(pulled == output);
}

/* Into a buffer of any size, the description fits, and is a prefix of the full one. */
static void check_description(const spar_plan *plan, size_t size)
{
    char whole[1 << 12], *text = malloc(size + 1);
    spar_plan_describe(plan, whole, sizeof whole);
    text[0] = 1;
    spar_plan_describe(plan, text, size);
    EXPECT(size == 0 ? text[0] == 1 : strlen(text) < size && !strncmp(text, whole, strlen(text)));
    free(text);
}

/* ---- all ranks' plans ---- */

/* Whether no rank's tensors come near 2^63 bytes. */
static int is_small(const fuzz_request *a, const spar_plan *plan)
{
    for (int t = 0; t < a->count; t++)
        for (int i = 0; i < a->tensors[t].ndim; i++)
            if (plan->tensors[t].global[i] > SMALL || a->strides[t][i] > SMALL)
                return 0;
    return 1;
}

/* Counts the writes to each byte; a block writes none twice. */
static void count_writes(const spar_plan *plan, const spar_block *block, int dim, int64_t at, uint8_t *writes)
{
    const spar_dim *d = plan->dims + block->dims + dim;
    if (dim == block->ndim) {
        for (int64_t i = 0; i < block->run; i++)
            EXPECT(++writes[at + i] == 1);
        return;
    }
    for (int64_t i = 0; i < d->extent; i++)
        count_writes(plan, block, dim + 1, at + i * d->dst, writes);
}

static void check_outputs(spar_plan *const *plans, int receiver)
{
    const spar_plan *own = plans[receiver];
    for (int t = 0; t < own->ntensors; t++) {
        int64_t bytes = own->tensors[t].out_bytes;
        if (bytes > SMALL)
            continue;
        uint8_t *writes = calloc(1, (size_t)bytes + 1);
        for (int sender = 0; sender < own->world; sender++) {
            const spar_range *range = &plans[sender]->push[receiver];
            for (int64_t i = range->first; i < range->first + range->count; i++)
                if (plans[sender]->blocks[i].tensor == t)
                    count_writes(plans[sender], &plans[sender]->blocks[i], 0, plans[sender]->blocks[i].dst,
                                 writes);
        }
        for (int64_t i = 0; i < bytes; i++)
            EXPECT(writes[i] == 1);
        free(writes);
    }
}

/* The other ranks request the same exchange, each with the local shape that the plan gives it. */
static void check_world(const fuzz_request *a, const spar_plan *plan)
{
    static fuzz_request other;
    spar_plan *plans[RANKS] = {NULL};
    char own_text[256], other_text[256];
    int built = 1, small = is_small(a, plan);
    spar_gathered_size gathered = spar_plan_gathered(plan, "text"), other_gathered;
    spar_plan_describe(plan, own_text, sizeof own_text);
    for (int rank = 0; rank < plan->world; rank++) {
        other = *a;
        other.rank = rank;
        for (int t = 0; t < a->count; t++) {
            const spar_plan_tensor *shape = &plan->tensors[t];
            other.tensors[t].extents = other.extents[t];
            memcpy(other.extents[t], shape->global, sizeof other.extents[t]);
            if (shape->in_dim >= 0)
                other.extents[t][shape->in_dim] = shape->in_sizes[rank];
        }
        spar_request request = request_of(&other);
        spar_status status = spar_plan_build(&request, &plans[rank]);
        if (status != SPAR_OK) { /* what it reads or receives may overflow */
            EXPECT(status == SPAR_INVALID && !small);
            built = 0;
            continue;
        }
        check_plan(&other, plans[rank]);
        spar_plan_describe(plans[rank], other_text, sizeof other_text);
        EXPECT(spar_plan_signature(plans[rank], "text") == spar_plan_signature(plan, "text"));
        EXPECT(!strcmp(own_text, other_text));
        other_gathered = spar_plan_gathered(plans[rank], "text");
        EXPECT(memcmp(&gathered, &other_gathered, sizeof gathered) == 0);
    }
    for (int p = 0; built && p < plan->world; p++) {
        for (int q = 0; q < plan->world; q++)
            EXPECT(plans[p]->push[q].bytes == plans[q]->pull[p].bytes);
        if (small)
            check_outputs(plans, p);
    }
    for (int rank = 0; rank < plan->world; rank++)
        if (plans[rank])
            spar_plan_release(plans[rank]);
}

/* ---- a valid call, executed ---- */

typedef struct {
    buffer in[TENSORS], out[TENSORS];
    const void *inputs[TENSORS], *read[TENSORS]; /* read: with rows */
    void *outputs[TENSORS], *moved[TENSORS];
    int64_t index[TENSORS][EXTENT];
    spar_rows listed[TENSORS], *rows; /* rows: NULL, or listed */
    spar_plan *plan;
} member;

/* Whether the plan may read the tensor by an index of rows: contiguous, in blocks without loops. */
static int can_list(const spar_plan *plan, int tensor, const part *p, const buffer *in)
{
    int can = in->bytes > 0 && !p->gap && !p->turn;
    for (const spar_range *range = plan->push; range < plan->push + plan->world; range++)
        for (int64_t i = range->first; i < range->first + range->count; i++)
            can = can && (plan->blocks[i].tensor != tensor || plan->blocks[i].ndim == 0);
    return can;
}

/* Lists the rows of some inputs, in another order and with gaps between them. */
static void list_rows(member *m, int count, const part *parts)
{
    m->rows = NULL;
    for (int t = 0; t < count; t++) {
        int drawn = next_byte(&input);
        int64_t n = m->in[t].extents[0], bytes = n ? m->in[t].bytes / n : 0, stride = bytes + drawn % 8 / 2;
        m->read[t] = m->inputs[t];
        m->moved[t] = NULL;
        m->listed[t] = (spar_rows){0};
        if (drawn % 2 == 0 || !can_list(m->plan, t, &parts[t], &m->in[t]))
            continue;
        m->read[t] = m->moved[t] = malloc((size_t)((n - 1) * stride + bytes));
        for (int64_t i = 0; i < n; i++) {
            m->index[t][i] = (67 * i + drawn) % n; /* a prime above EXTENT: no two are equal */
            memcpy((char *)m->moved[t] + m->index[t][i] * stride, m->in[t].data + i * bytes, (size_t)bytes);
        }
        m->listed[t] = (spar_rows){m->index[t], bytes, stride};
        m->rows = m->listed;
    }
}

static void check_received(member *members, int world, int count, const part *parts)
{
    for (int rank = 0; rank < world; rank++)
        for (int t = 0; t < count; t++) {
            buffer *out = &members[rank].out[t];
            visit(&parts[t], &members[rank].in[t], 1);
            visit(&parts[t], out, 1);
            EXPECT(out->data[out->bytes] == NOT_WRITTEN);
            memset(out->data, NOT_WRITTEN, (size_t)out->bytes + 1);
        }
}

static void run_valid_call(int world, int count, const part *parts)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    member members[WORLD];
    void *const *outputs[WORLD];
    for (int rank = 0; rank < world; rank++) {
        member *m = &members[rank];
        spar_tensor tensors[TENSORS];
        for (int t = 0; t < count; t++) {
            const part *p = &parts[t];
            m->in[t] = make_buffer(p, rank, &p->in, p->gap, p->turn);
            m->out[t] = make_buffer(p, rank, &p->out, 0, 0);
            visit(p, &m->in[t], 0);
            m->inputs[t] = m->in[t].data;
            m->outputs[t] = m->out[t].data;
            tensors[t] = tensor_of(p, &m->in[t]);
        }
        spar_request request = {world, rank, SPAR_SIDE_PULL, count, tensors};
        EXPECT(!spar_plan_get(&request, &m->plan));
        list_rows(m, count, parts);
        outputs[rank] = m->outputs;
    }
    for (member *m = members; m < members + world; m++)
        spar_push(m->plan, m->read, m->rows, outputs, &unscaled);
    check_received(members, world, count, parts);
    for (int from = 0; from < world; from++)
        for (int to = 0; to < world; to++) {
            const member *a = &members[from], *b = &members[to];
            char *wire = malloc((size_t)a->plan->push[to].bytes); /* exact: sanitizers catch an overrun */
            spar_pack(a->plan, to, a->read, a->rows, wire);
            if (from == to)
                spar_copy_own(a->plan, a->inputs, a->outputs, &unscaled);
            else
                spar_unpack(b->plan, from, wire, b->outputs, &unscaled);
            free(wire);
        }
    check_received(members, world, count, parts);
    for (member *m = members; m < members + world; m++) {
        for (int t = 0; t < count; t++) {
            free(m->in[t].data);
            free(m->moved[t]);
            free(m->out[t].data);
        }
        spar_plan_release(m->plan);
    }
}

/* ---- one input ---- */

static void fill_request(fuzz_request *a, int world, int count, const part *parts)
{
    memset(a, 0, sizeof *a);
    a->world = world;
    a->rank = (int)(next_byte(&input) % (unsigned)world);
    a->count = count;
    for (int t = 0; t < count; t++) {
        const part *p = &parts[t];
        buffer b = make_buffer(p, a->rank, &p->in, p->gap, p->turn);
        memcpy(a->extents[t], b.extents, sizeof b.extents);
        memcpy(a->strides[t], b.strides, sizeof b.strides);
        memcpy(a->args[t], p->args, sizeof p->args);
        a->tensors[t] = (spar_tensor){p->item, p->ndim, a->extents[t], a->strides[t], p->nargs, a->args[t]};
        free(b.data);
    }
}

/* Changes one number, or all strides of a tensor. Counts stay within the arrays, or beyond the planner's
 * limits. */
static void change(fuzz_request *a)
{
    unsigned what = next_byte(&input) % 9, t = next_byte(&input) % TENSORS;
    unsigned which = next_byte(&input);
    int64_t value = next_number(&input);
    spar_tensor *tensor = &a->tensors[t];
    int64_t *const lists[] = {a->extents[t], a->strides[t], a->args[t]};
    if (what < 6) {
        lists[what / 2][what % 2 ? which % 4 : which % ROOM] = value;
    } else if (what == 6) {
        tensor->item_size = value;
    } else if (what == 7) {
        if (which % 2)
            tensor->ndim = (int)value;
        else
            tensor->nargs = (int)value;
    } else if (which % 4 == 0) {
        a->world = (int)value > RANKS && (int)value <= MOST_RANKS ? RANKS : (int)value;
    } else if (which % 4 == 1) {
        a->rank = (int)value;
    } else if (which % 4 == 2) {
        a->count = (int)value > TENSORS ? TENSORS : (int)value;
    } else {
        for (int i = 0; i < a->tensors[t].ndim && i < ROOM; i++)
            a->strides[t][i] = value;
    }
    if (tensor->nargs > ROOM && tensor->nargs <= MOST_ARGS)
        tensor->nargs = ROOM;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static fuzz_request a;
    part parts[TENSORS];
    spar_plan *plan, *cached, *again;
    int count;
    input = (source){data, data + size};
    spar_plan_cache_limit(1 + next_byte(&input) % 8);
    int world = 1 + (int)(next_byte(&input) % WORLD), changes = (int)(next_byte(&input) % 6);
    draw_call(0, world, &count, parts);
    for (int t = count; t < TENSORS; t++)
        parts[t] = parts[0]; /* a change may raise the count */
    if (changes == 0) {
        run_valid_call(world, count, parts);
        return 0;
    }
    fill_request(&a, world, TENSORS, parts);
    a.count = count;
    while (changes--)
        change(&a);
    spar_request request = request_of(&a);
    spar_status status = spar_plan_build(&request, &plan);
    EXPECT(status == SPAR_OK || (status == SPAR_INVALID && *spar_last_error()));
    EXPECT(spar_plan_get(&request, &cached) == status);
    if (status != SPAR_OK)
        return 0;
    EXPECT(cached->signature == plan->signature);
    EXPECT(!spar_plan_get(&request, &again) && again == cached);
    spar_plan_release(again);
    spar_plan_release(cached);
    check_plan(&a, plan);
    check_description(plan, next_byte(&input) * 4);
    check_world(&a, plan);
    spar_plan_release(plan);
    return 0;
}
