/* SPDX-License-Identifier: Apache-2.0 */
/* Strided copies in host memory. */
#include "devices/execute.h"
#include "devices/cpu/nontemporal.h"
#include "devices/cpu/threads.h"

#include <string.h>

enum {
    LONG_RUN = 1 << 16, /* bytes of a run that threads share */
    PAGE = 4096,        /* bytes of its parts */
    TILE = 2048,        /* bytes that go to several outputs from the L1 cache */
    FEW = 8,            /* outputs that are written at a time */
    AHEAD = 2048,       /* bytes that are read ahead of short strided runs */
    ROWS_AHEAD = 4,     /* the same of rows: of those with gaps between them each may begin on another page */
    SHORT_RUN = 2048,   /* bytes: of longer runs the processor reads most ahead by itself */
    TURN = 1024,        /* bytes that are read before the first target has its next turn */
    LARGE = 1 << 17, /* bytes for a target, from which on an input is read from memory rather than a cache */
};

/* A constant size lets the compiler copy an item with one load and one store. */
#define COPY_ITEMS(size)                                                                                     \
    case size:                                                                                               \
        for (int64_t i = 0; i < n; i++)                                                                      \
            memcpy(d + i * ds, s + i * ss, size);                                                            \
        break;

/* One pass over the source. */
typedef struct {
    const spar_block *blocks;
    const spar_dim *dims;
    const spar_range *ranges; /* [targets]; unless in_turn, all are as the first one */
    int targets;
    const void *const *from; /* [tensor] */
    const void *wire;        /* instead of `from`: the tensors, concatenated */
    void *const *const *to;  /* [target][tensor] */
    const spar_scale *scale;
    int64_t bytes;
    int in_turn;     /* the targets receive different blocks with equal loops */
    int nontemporal; /* use non-temporal stores */
} copy;

/* Whether non-temporal stores gain for runs at `d` and each `ds` behind. Whole lines gain however few they
 * are: nothing of them is read. */
static int gains_nontemporal(const copy *c, const char *d, int64_t ds, int64_t run)
{
    int64_t bits = (intptr_t)d | ds | run;
    return c->nontemporal && (run >= SPAR_NONTEMPORAL_RUN || (bits & (SPAR_CACHE_LINE - 1)) == 0);
}

/* Copies n runs with non-temporal stores. */
static void stream_runs(char *d, const char *s, int64_t n, int64_t ds, int64_t ss, int64_t run)
{
    int64_t ahead = n == 1 || ss == run || run > SHORT_RUN ? n : (AHEAD + run - 1) / run;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t line = 0; line < run && i + ahead < n; line += SPAR_CACHE_LINE)
            __builtin_prefetch(s + (i + ahead) * ss + line);
        spar_nontemporal_copy(d + i * ds, s + i * ss, run);
    }
}

#define FILL_LINE(size)                                                                                      \
    case size:                                                                                               \
        for (int at = 0; at < SPAR_CACHE_LINE; at += size)                                                   \
            memcpy(line + at, s, size);                                                                      \
        break;

/* Writes an item of an expanded input n times; returns 0 where that gains nothing. */
static int repeat(const copy *c, char *d, const char *s, int64_t n, int64_t item)
{
    _Alignas(SPAR_CACHE_LINE) char line[SPAR_CACHE_LINE];
    int64_t head = -(intptr_t)d & (SPAR_CACHE_LINE - 1), tail = (n * item - head) & (SPAR_CACHE_LINE - 1);
    if (n * item < 2 * SPAR_CACHE_LINE || (intptr_t)d & (item - 1)) /* lines would differ */
        return 0;
    switch (item) {
        FILL_LINE(1)
        FILL_LINE(2)
        FILL_LINE(4)
        FILL_LINE(8)
        FILL_LINE(16)
        FILL_LINE(32)
    default:
        return 0;
    }
    char *end = d + n * item - tail;
    memcpy(d, line, (size_t)head);
    for (char *to = d + head; to < end; to += SPAR_CACHE_LINE)
        if (c->nontemporal)
            spar_nontemporal_line(to, line);
        else
            memcpy(to, line, SPAR_CACHE_LINE);
    memcpy(end, line, (size_t)tail);
    return 1;
}

/* Copies n runs with strides `ds` and `ss`. */
static void copy_runs(const copy *c, char *d, const char *s, int64_t n, int64_t ds, int64_t ss, int64_t run)
{
    const spar_scale *scale = c->scale;
    if (scale->dtype != SPAR_UNSCALED) {
        int64_t item = spar_scale_types[scale->dtype].bytes;
        if (run == item)
            spar_scale_items(scale, d, s, n, ds, ss);
        else if (gains_nontemporal(c, d, ds, run))
            for (int64_t i = 0; i < n; i++) {
                char *to = d + i * ds;
                spar_scale_nontemporal(scale, &to, 1, s + i * ss, run);
            }
        else
            for (int64_t i = 0; i < n; i++)
                spar_scale_items(scale, d + i * ds, s + i * ss, run / item, item, item);
        return;
    }
    if (ss == 0 && ds == run && repeat(c, d, s, n, run))
        return;
    switch (run) {
        COPY_ITEMS(1)
        COPY_ITEMS(2)
        COPY_ITEMS(4)
        COPY_ITEMS(8)
        COPY_ITEMS(16)
        COPY_ITEMS(32)
    default:
        if (gains_nontemporal(c, d, ds, run))
            stream_runs(d, s, n, ds, ss, run);
        else
            for (int64_t i = 0; i < n; i++)
                memcpy(d + i * ds, s + i * ss, (size_t)run);
    }
}

/* Copies a run to several outputs with non-temporal stores; reads and scales it once. */
static void scale_to_all(const copy *c, int tensor, int64_t dst, const char *s, int64_t run)
{
    char *to[FEW];
    for (int first = 0; first < c->targets; first += FEW) {
        int targets = c->targets - first < FEW ? c->targets - first : FEW;
        for (int i = 0; i < targets; i++)
            to[i] = (char *)c->to[first + i][tensor] + dst;
        spar_scale_nontemporal(c->scale, to, targets, s, run);
    }
}

static void copy_to_all(const copy *c, int tensor, int64_t dst, const char *s, int64_t run)
{
    int64_t n;
    for (int64_t at = 0; at < run; at += n) {
        /* Only whole lines are written then. */
        n = TILE - ((dst + at) & (SPAR_CACHE_LINE - 1));
        n = n < run - at ? n : run - at;
        for (int64_t line = 0; line < TILE; line += SPAR_CACHE_LINE) /* overlap reading with the stores */
            __builtin_prefetch(s + at + n + line);
        for (int target = 0; target < c->targets; target++)
            spar_nontemporal_copy((char *)c->to[target][tensor] + dst + at, s + at, n);
    }
}

/* Runs the innermost loop of a block. */
static void copy_inner(const copy *c, int tensor, int64_t dst, const char *s, int64_t n, int64_t ds,
                       int64_t ss, int64_t run)
{
    if (c->targets > 1 && gains_nontemporal(c, (char *)c->to[0][tensor] + dst, ds, run))
        for (int64_t i = 0; i < n; i++)
            if (c->scale->dtype == SPAR_UNSCALED)
                copy_to_all(c, tensor, dst + i * ds, s + i * ss, run);
            else
                scale_to_all(c, tensor, dst + i * ds, s + i * ss, run);
    else
        for (int target = 0; target < c->targets; target++)
            copy_runs(c, (char *)c->to[target][tensor] + dst, s, n, ds, ss, run);
}

/* Copies bytes low to high of runs first to first + count of a block, in loop order. */
static void copy_block(const copy *c, const spar_block *block, int64_t first, int64_t count, int64_t low,
                       int64_t high)
{
    int64_t at[SPAR_MAX_DIMS] = {0}, dst = block->dst + low;
    const char *s = (const char *)(c->wire ? c->wire : c->from[block->tensor]) + block->src + low;
    const spar_dim *dims = c->dims + block->dims;
    int outer = block->ndim - 1; /* loops around the innermost one */
    const spar_dim once = {1, 0, 0};
    const spar_dim *inner = outer >= 0 ? &dims[outer] : &once;
    int64_t begin = first % inner->extent;
    for (int64_t i = outer - 1, rest = first / inner->extent; rest; i--) {
        at[i] = rest % dims[i].extent;
        rest /= dims[i].extent;
        dst += at[i] * dims[i].dst;
        s += at[i] * dims[i].src;
    }
    for (;;) {
        int64_t n = inner->extent - begin < count ? inner->extent - begin : count;
        copy_inner(c, block->tensor, dst + begin * inner->dst, s + begin * inner->src, n, inner->dst,
                   inner->src, high - low);
        if ((count -= n) == 0)
            return;
        begin = 0;
        for (int i = outer - 1; i >= 0; i--) {
            dst += dims[i].dst;
            s += dims[i].src;
            if (++at[i] < dims[i].extent)
                break;
            dst -= dims[i].dst * dims[i].extent;
            s -= dims[i].src * dims[i].extent;
            at[i] = 0;
        }
    }
}

static const spar_block *block_of(const copy *c, int target, int64_t i)
{
    return &c->blocks[c->ranges[target].first + i];
}

/* Copies iterations first to first + count of the loops that the targets' i-th blocks have in common. Their
 * runs are neighbours in the source, and the targets have their turns so often that it is read from end to
 * end. */
static void copy_in_turn(const copy *c, int64_t i, int64_t first, int64_t count)
{
    const spar_block *lead = block_of(c, 0, i);
    const spar_dim *loops = c->dims + lead->dims;
    int64_t at[SPAR_MAX_DIMS];
    int last = lead->ndim - 1;
    int64_t most = lead->run < SPAR_CACHE_LINE && loops[last].src < TURN ? TURN / loops[last].src : 1;
    for (int dim = last; dim >= 0; dim--) {
        at[dim] = first % loops[dim].extent;
        first /= loops[dim].extent;
    }
    for (int64_t n; count > 0; count -= n) {
        n = loops[last].extent - at[last];
        n = most < n ? most : n;
        n = count < n ? count : n;
        for (int target = 0; target < c->targets; target++) {
            const spar_block *block = block_of(c, target, i);
            const spar_dim *dims = c->dims + block->dims;
            int64_t src = block->src, dst = block->dst;
            for (int dim = 0; dim <= last; dim++) {
                src += at[dim] * dims[dim].src;
                dst += at[dim] * dims[dim].dst;
            }
            char *d = (char *)c->to[target][block->tensor] + dst;
            const char *from = (const char *)c->from[block->tensor] + src;
            if (n == 1 && block->run <= SHORT_RUN)
                for (int64_t line = 0; line < block->run; line += SPAR_CACHE_LINE)
                    __builtin_prefetch(from + ROWS_AHEAD * dims[last].src + line);
            if (n == 1) /* as constants they save a short run half its time */
                copy_runs(c, d, from, 1, 0, 0, block->run);
            else
                copy_runs(c, d, from, n, dims[last].dst, dims[last].src, block->run);
        }
        at[last] += n;
        for (int dim = last; dim > 0 && at[dim] == loops[dim].extent; dim--) {
            at[dim] = 0;
            at[dim - 1]++;
        }
    }
}

static int64_t runs_of(const copy *c, const spar_block *block)
{
    return spar_block_bytes(1, block->ndim, c->dims + block->dims);
}

/* Rounds the begin of a part up to whole `unit`s: a unit belongs to the part in which it begins. */
static int64_t cut(int64_t at, int64_t unit, int64_t end)
{
    int64_t next = at <= 0 ? 0 : (at + unit - 1) / unit * unit;
    return next < end ? next : end;
}

/* Copies bytes low to high of all blocks, split at runs, and long runs at pages. */
static void copy_range(const copy *c, int64_t low, int64_t high)
{
    int64_t at = 0;
    for (int64_t i = 0; i < c->ranges->count && at < high; i++) {
        const spar_block *block = block_of(c, 0, i);
        int64_t run = block->run;
        for (int target = 1; target < c->targets && c->in_turn; target++)
            run += block_of(c, target, i)->run;
        int64_t bytes = runs_of(c, block) * run;
        int64_t first = cut(low - at, run, bytes) / run, last = cut(high - at, run, bytes) / run;
        if (c->in_turn) {
            copy_in_turn(c, i, first, last - first);
        } else if (run < LONG_RUN) {
            if (first < last)
                copy_block(c, block, first, last - first, 0, run);
        } else if (low < at + bytes) {
            for (int64_t which = low > at ? (low - at) / run : 0; which < last; which++) {
                int64_t begin = cut(low - at - which * run, PAGE, run);
                int64_t end = cut(high - at - which * run, PAGE, run);
                if (begin < end)
                    copy_block(c, block, which, 1, begin, end);
            }
        }
        at += bytes;
    }
    if (c->nontemporal)
        spar_nontemporal_fence();
}

/* Copies one of `parts` equal shares. */
static void copy_part(void *context, int part, int parts)
{
    const copy *c = context;
    int64_t share = c->bytes / parts, low = share * part;
    copy_range(c, low, part + 1 < parts ? low + share : c->bytes);
}

/* Copies c->bytes: `each` bytes for each target. */
static void copy_all(copy *c, int64_t each)
{
    int parts = spar_threads_share(c->bytes);
    c->nontemporal = each >= spar_nontemporal_min();
    if (parts > 1) {
        spar_threads_run(copy_part, c, parts);
    } else if (c->in_turn) {
        copy_range(c, 0, c->bytes);
    } else {
        for (int64_t i = 0; i < c->ranges->count; i++) {
            const spar_block *block = block_of(c, 0, i);
            copy_block(c, block, 0, runs_of(c, block), 0, block->run);
        }
        if (c->nontemporal)
            spar_nontemporal_fence();
    }
}

/* Whether the targets' i-th blocks have equal loops, of short steps that hold one run of each. */
static int are_neighbours(const copy *c, int64_t i)
{
    const spar_block *lead = block_of(c, 0, i);
    const spar_dim *loops = c->dims + lead->dims;
    int64_t low = lead->src, high = lead->src + lead->run;
    if (lead->ndim == 0 || loops[lead->ndim - 1].src > LONG_RUN)
        return 0;
    for (int target = 1; target < c->targets; target++) {
        const spar_block *block = block_of(c, target, i);
        const spar_dim *dims = c->dims + block->dims;
        if (block->tensor != lead->tensor || block->ndim != lead->ndim)
            return 0;
        for (int dim = 0; dim < lead->ndim; dim++)
            if (dims[dim].extent != loops[dim].extent || dims[dim].src != loops[dim].src)
                return 0;
        low = block->src < low ? block->src : low;
        high = block->src + block->run > high ? block->src + block->run : high;
    }
    return high - low <= loops[lead->ndim - 1].src;
}

/* Whether to copy in turn. One target's runs alone are read with gaps, at half the speed. */
static int gains_in_turn(const copy *c)
{
    for (int target = 0; target < c->targets; target++)
        if (!c->to[target] || c->ranges[target].count != c->ranges->count)
            return 0;
    if (c->targets == 1 || c->bytes < (int64_t)LARGE * c->targets)
        return 0;
    for (int64_t i = 0; i < c->ranges->count; i++)
        if (!are_neighbours(c, i))
            return 0;
    return 1;
}

static int receive_the_same(const spar_plan *plan, void *const *const *outputs)
{
    for (int rank = 0; rank < plan->world; rank++)
        if (!outputs[rank])
            return 0;
    for (int rank = 1; rank < plan->world; rank++)
        if (plan->push[rank].first != plan->push->first || plan->push[rank].count != plan->push->count)
            return 0;
    return plan->world > 1;
}

void spar_push(const spar_plan *plan, const void *const *inputs, void *const *const *outputs,
               const spar_scale *scale)
{
    copy c = {.blocks = plan->blocks,
              .dims = plan->dims,
              .ranges = plan->push,
              .targets = plan->world,
              .from = inputs,
              .to = outputs,
              .scale = scale,
              .bytes = plan->push->bytes};
    if (receive_the_same(plan, outputs)) {
        copy_all(&c, c.bytes);
        return;
    }
    for (int rank = 1; rank < plan->world; rank++)
        c.bytes += plan->push[rank].bytes;
    if (gains_in_turn(&c)) {
        c.in_turn = 1;
        copy_all(&c, c.bytes / c.targets);
        return;
    }
    c.targets = 1;
    for (int i = 0; i < plan->world; i++) {
        int rank = (plan->rank + i) % plan->world; /* ranks start with different peers */
        c.ranges = &plan->push[rank];
        c.to = &outputs[rank];
        c.bytes = c.ranges->bytes;
        if (*c.to)
            copy_all(&c, c.bytes);
    }
}

void spar_copy_own(const spar_plan *plan, const void *const *inputs, void *const *outputs,
                   const spar_scale *scale)
{
    const spar_range *own = &plan->push[plan->rank];
    copy c = {plan->blocks, plan->dims, own, 1, inputs, NULL, &outputs, scale, own->bytes, 0, 0};
    copy_all(&c, c.bytes);
}

void spar_unpack(const spar_plan *plan, int peer, const void *wire, void *const *outputs,
                 const spar_scale *scale)
{
    const spar_range *pull = &plan->pull[peer];
    copy c = {plan->blocks, plan->dims, pull, 1, NULL, wire, &outputs, scale, pull->bytes, 0, 0};
    copy_all(&c, c.bytes);
}

void spar_pack(const spar_plan *plan, int peer, const void *const *inputs, void *wire)
{
    static const spar_scale unscaled = {SPAR_UNSCALED, 0, 1};
    const spar_range *push = &plan->push[peer];
    void *const *to = &wire;
    spar_dim dims[SPAR_MAX_DIMS];
    int64_t at = 0;
    for (int64_t i = 0; i < push->count; i++) {
        spar_block block = plan->blocks[push->first + i];
        const void *const *from = &inputs[block.tensor];
        spar_range range = {0, 1, spar_packed_dims(plan, &block, 0, dims)};
        copy c = {&block, dims, &range, 1, from, NULL, &to, &unscaled, range.bytes, 0, 0};
        block.dst = at;
        block.dims = block.tensor = 0;
        copy_all(&c, c.bytes);
        at += range.bytes;
    }
}
