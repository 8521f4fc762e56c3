/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/balance.h"

#include "base/util.h"

#include <stdlib.h>
#include <string.h>

/* By which sums of shares may be off. */
static const double ROUNDING = 1e-9;

/* A rank's part of a document. */
typedef struct {
    int64_t document, size;
    int rank;
} part;

/* How much of a document a rank has room for: 1 is all of it. */
typedef struct {
    double share;
    int rank;
} room;

typedef struct {
    const int64_t *lengths;
    const int64_t *order; /* the documents, longest first */
    int64_t documents;
    int world;
    double tokens, work; /* the mean of the ranks */
} problem;

/* One assignment of all documents. */
typedef struct {
    part *parts; /* those of a document one behind the other */
    int64_t count, capacity;
    double *tokens, *work; /* [world] */
    double worst;          /* the greatest tokens or work, in means */
    double moved;          /* tokens that ranks need of documents which they hold a part of */
} trial;

static double squared(int64_t length)
{
    return (double)length * (double)length;
}

static spar_status put(trial *t, int64_t document, int64_t length, int rank, int64_t size)
{
    SPAR_TRY(spar_reserve((void **)&t->parts, &t->capacity, t->count + 1, sizeof *t->parts, "parts"));
    t->parts[t->count++] = (part){document, size, rank};
    t->tokens[rank] += (double)size;
    t->work[rank] += (double)size * (double)length;
    return SPAR_OK;
}

static int more_room(const void *a, const void *b)
{
    const room *x = a, *y = b;
    if (x->share != y->share)
        return x->share > y->share ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* Cuts a document among as few ranks as have room for it; among all, if they have none.
 *
 * shares: how much of it each rank has room for. rooms [world]: memory. */
static spar_status cut(trial *t, const problem *p, int64_t document, const double *shares, room *rooms)
{
    int64_t length = p->lengths[document], placed = 0;
    double sum = 0, before = 0;
    int ranks = 0, used = 0;
    for (int rank = 0; rank < p->world; rank++)
        rooms[rank] = (room){shares[rank], rank};
    qsort(rooms, (size_t)p->world, sizeof *rooms, more_room);
    while (ranks < p->world && sum < 1 - ROUNDING && rooms[ranks].share > 0)
        sum += rooms[ranks++].share;
    if (sum < 1 - ROUNDING) {
        sum = ranks = p->world;
        for (int i = 0; i < ranks; i++)
            rooms[i].share = 1;
    }
    for (int i = 0; i < ranks; i++) {
        before += rooms[i].share;
        double wanted = (double)length * (before / sum) + 0.5;
        int64_t end = i < ranks - 1 && wanted < (double)length ? (int64_t)wanted : length;
        if (end > placed) {
            SPAR_TRY(put(t, document, length, rooms[i].rank, end - placed));
            placed = end;
            used++;
        }
    }
    t->moved += (double)length * (used - 1);
    return SPAR_OK;
}

/* Finds how much of a document each rank has room for, and returns the rank with the most.
 *
 * most: of tokens and of work, in means. filler: the work of each token by which a rank, once it has this
 * document, is filled up to the mean. A rank needs room for that, too. */
static int find_rooms(const trial *t, const problem *p, double length, double most, double filler,
                      double *shares)
{
    const double *tokens = t->tokens, *work = t->work, mean = p->tokens;
    double most_tokens = p->tokens * most, most_work = p->work * most, more = length - filler;
    double per_token = 1 / length, per_work = per_token / (more > length * 1e-6 ? more : length * 1e-6);
    int best = 0, world = p->world;
    for (int rank = 0; rank < world; rank++) {
        double left = mean > tokens[rank] ? mean - tokens[rank] : 0;
        double by_tokens = (most_tokens - tokens[rank]) * per_token;
        double by_work = (most_work - work[rank] - left * filler) * per_work;
        shares[rank] = by_work < by_tokens ? by_work : by_tokens;
    }
    for (int rank = 1; rank < world; rank++)
        best = shares[rank] > shares[best] ? rank : best;
    return best;
}

/* Assigns all documents, the longest first: each whole to the rank with the most room, or cut.
 *
 * optimism: 1 if the tokens that fill up a rank are taken for ones without work, 0 if for average ones of
 * the documents that are left. most: of a rank's tokens and work, in means; 0: all documents are cut among
 * all ranks. */
static spar_status assign(trial *t, const problem *p, double most, double optimism, double *shares,
                          room *rooms)
{
    double work = p->work * p->world, tokens = p->tokens * p->world;
    t->count = 0;
    t->worst = t->moved = 0;
    memset(t->tokens, 0, (size_t)p->world * sizeof *t->tokens);
    memset(t->work, 0, (size_t)p->world * sizeof *t->work);
    for (int64_t i = 0; i < p->documents && p->lengths[p->order[i]] > 0; i++) {
        int64_t document = p->order[i], length = p->lengths[document];
        work -= squared(length);
        tokens -= (double)length;
        double filler = tokens >= 1 && work > 0 ? (1 - optimism) * work / tokens : 0;
        int best = find_rooms(t, p, (double)length, most, filler, shares);
        if (shares[best] >= 1 - ROUNDING)
            SPAR_TRY(put(t, document, length, best, length));
        else
            SPAR_TRY(cut(t, p, document, shares, rooms));
    }
    for (int rank = 0; rank < p->world; rank++) {
        if (p->tokens > 0 && t->tokens[rank] / p->tokens > t->worst)
            t->worst = t->tokens[rank] / p->tokens;
        if (p->work > 0 && t->work[rank] / p->work > t->worst)
            t->worst = t->work[rank] / p->work;
    }
    return SPAR_OK;
}

/* Whether a trial is better: within the bound, and then with fewer tokens moved, or nearer to it. */
static int is_better(const trial *a, const trial *b, double most)
{
    int fits = a->worst <= most, other = b->worst <= most;
    if (fits != other)
        return fits;
    return fits ? a->moved < b->moved : a->worst < b->worst;
}

static spar_status trial_start(trial *t, int world)
{
    *t = (trial){.tokens = calloc((size_t)world, sizeof *t->tokens),
                 .work = calloc((size_t)world, sizeof *t->work)};
    return t->tokens && t->work ? SPAR_OK : spar_fail(SPAR_NO_MEMORY, "no memory for %d ranks", world);
}

static void trial_free(trial *t)
{
    free(t->parts);
    free(t->tokens);
    free(t->work);
}

/* Makes a trial the best one, unless that is better; swaps them, so that the other one's memory is reused. */
static void keep_better(trial *best, trial *next, double most)
{
    trial kept = *best;
    if (best->count && !is_better(next, best, most))
        return;
    *best = *next;
    *next = kept;
}

/* Finds the best of several assignments. The less work ranks expect of the documents that are left, the
 * fewer they cut, but the less often the bound holds. */
static spar_status find_best(const problem *p, double tolerance, double *shares, room *rooms, trial *best)
{
    enum { STEPS = 5, TRIALS = 2 * STEPS + 1 };
    double most = 1 + tolerance + ROUNDING;
    trial next;
    spar_status status = trial_start(&next, p->world);
    for (int i = 0; status == SPAR_OK && i < TRIALS; i++) {
        /* The last ones are for a bound that could not be held: they leave room for rounding, or cut all. */
        if (best->count && best->worst <= most && (i >= STEPS || best->moved == 0))
            break;
        double own = i < STEPS ? most : i < 2 * STEPS ? 1 + tolerance / 2 : 0;
        status = assign(&next, p, own, 1 - (double)(i % STEPS) / (STEPS - 1), shares, rooms);
        if (status == SPAR_OK)
            keep_better(best, &next, most);
    }
    trial_free(&next);
    return status;
}

/* Appends a run to the numbers; joins it to the one before on the same rank. */
static void add_run(int64_t *runs, int64_t *count, int64_t first, int rank, int64_t size)
{
    if (size == 0)
        return;
    if (*count > first && runs[2 * *count - 2] == rank) {
        runs[2 * *count - 1] += size;
        return;
    }
    runs[2 * *count] = rank;
    runs[2 * (*count)++ + 1] = size;
}

/* Appends the runs of a document, of which each rank holds a part from both ends inwards. */
static void add_document(int64_t *runs, int64_t *count, const part *parts, int64_t ranks)
{
    int64_t first = *count, at = 0;
    for (int64_t i = 0; i < ranks; i++) {
        add_run(runs, count, first, parts[i].rank, (at + parts[i].size) / 2 - at / 2);
        at += parts[i].size;
    }
    for (int64_t i = ranks - 1; i >= 0; i--) {
        int64_t end = at;
        at -= parts[i].size;
        add_run(runs, count, first, parts[i].rank, parts[i].size - (end / 2 - at / 2));
    }
}

/* Writes an assignment as the numbers of a layout. */
static spar_status write_numbers(const problem *p, const trial *t, int64_t **numbers, int64_t *count)
{
    int64_t *first = calloc((size_t)p->documents + 1, sizeof *first), written = 0;
    int64_t *found = calloc((size_t)(1 + p->documents + 4 * t->count + p->world), sizeof *found);
    if (!first || !found) {
        free(first);
        free(found);
        return spar_fail(SPAR_NO_MEMORY, "no memory for %lld documents", (long long)p->documents);
    }
    for (int64_t i = t->count - 1; i >= 0; i--)
        first[t->parts[i].document] = i;
    int64_t *runs = found + 1 + p->documents;
    found[0] = p->documents;
    memcpy(found + 1, p->lengths, (size_t)p->documents * sizeof *found);
    for (int64_t document = 0; document < p->documents; document++) {
        int64_t begin = first[document], end = begin;
        while (end < t->count && t->parts[end].document == document)
            end++;
        add_document(runs, &written, t->parts + begin, end - begin);
    }
    for (int64_t i = 0; i < t->count; i++)
        runs[2 * written + t->parts[i].rank] += t->parts[i].size;
    free(first);
    *numbers = found;
    *count = 1 + p->documents + 2 * written + p->world;
    return SPAR_OK;
}

/* A document and its length, to be sorted. */
typedef struct {
    int64_t length, document;
} entry;

static int longer(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->length != y->length)
        return x->length > y->length ? -1 : 1;
    return (x->document > y->document) - (x->document < y->document);
}

/* Returns the documents, longest first; the caller frees them. NULL: there is no memory. */
static int64_t *sorted(const int64_t *lengths, int64_t documents)
{
    int64_t *order = malloc(((size_t)documents + 1) * sizeof *order);
    entry *entries = malloc(((size_t)documents + 1) * sizeof *entries);
    if (order && entries) {
        for (int64_t i = 0; i < documents; i++)
            entries[i] = (entry){lengths[i], i};
        qsort(entries, (size_t)documents, sizeof *entries, longer);
        for (int64_t i = 0; i < documents; i++)
            order[i] = entries[i].document;
    } else {
        free(order);
        order = NULL;
    }
    free(entries);
    return order;
}

spar_status spar_balance(const int64_t *lengths, int64_t documents, int world, double tolerance,
                         int64_t **numbers, int64_t *count)
{
    problem p = {.lengths = lengths, .documents = documents, .world = world};
    for (int64_t i = 0; i < documents; i++) {
        p.tokens += (double)lengths[i] / world;
        p.work += squared(lengths[i]) / world;
    }
    int64_t *order = sorted(lengths, documents);
    room *rooms = malloc((size_t)world * sizeof *rooms);
    double *shares = malloc((size_t)world * sizeof *shares);
    trial best;
    spar_status status = trial_start(&best, world);
    if (status == SPAR_OK && (!order || !rooms || !shares))
        status = spar_fail(SPAR_NO_MEMORY, "no memory for %lld documents", (long long)documents);
    p.order = order;
    if (status == SPAR_OK)
        status = find_best(&p, tolerance, shares, rooms, &best);
    if (status == SPAR_OK)
        status = write_numbers(&p, &best, numbers, count);
    trial_free(&best);
    free(shares);
    free(rooms);
    free(order);
    return status;
}
