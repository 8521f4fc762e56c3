/* SPDX-License-Identifier: Apache-2.0 */
#include "control/ring.h"

#include "base/shared_text.h"
#include "base/util.h"
#include "control/mailbox.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENTRIES = 1024, WORDS = 30, TEXT = WORDS * sizeof(uint64_t), CACHED = 16 };
static const int64_t POLL_NS = 50000000, GRACE_NS = 1000000000;

typedef struct {
    uint64_t call;      /* set to 0 first, and written last */
    uint64_t signature; /* 0: the rank could not make the call */
    int64_t forward;    /* as in spar_call_header */
    uint64_t text[WORDS];
    int64_t gathered[3]; /* the fields of spar_gathered_size */
} entry;

typedef struct {
    uint64_t signature; /* 0: the rank could not make the call */
    int64_t forward;
    char text[TEXT];
    spar_gathered_size gathered;
} description;

struct spar_ring {
    spar_group *group;
    uint64_t newest; /* this rank's call */
    int64_t polled_ns;
    description cache[CACHED]; /* by signature */
    int64_t gone_ns[];         /* [world] when a rank was found dead; 0: it is not */
};

/* Each rank writes its own, in its arena. */
static entry *entry_of(const spar_ring *r, int rank, uint64_t n)
{
    return (entry *)spar_group_room(r->group, rank) + n % ENTRIES;
}

static int has_made(const spar_ring *r, int rank, uint64_t n)
{
    return spar_has_reached(&r->group->boxes[rank]->published, (uint32_t)n);
}

int64_t spar_ring_room(void)
{
    return ENTRIES * sizeof(entry);
}

spar_status spar_ring_open(spar_group *group, spar_ring **result)
{
    spar_ring *r = calloc(1, sizeof *r + (size_t)group->world * sizeof *r->gone_ns);
    if (!r)
        return spar_fail(SPAR_NO_MEMORY, "no memory for %d ranks", group->world);
    r->group = group;
    *result = r;
    return SPAR_OK;
}

void spar_ring_close(spar_ring *r)
{
    free(r);
}

/* ---- a call ---- */

/* A call's description, cached by its signature: describing takes longer than all other steps. */
static const description *describe_cached(spar_ring *r, uint64_t signature, spar_describe describe,
                                          const void *call)
{
    description *cached = &r->cache[signature % CACHED];
    if (cached->signature != signature || !*cached->text) {
        describe(call, cached->text, TEXT, &cached->gathered);
        cached->signature = signature;
    }
    return cached;
}

static void record(spar_ring *r, uint64_t n, const spar_call_header *header, spar_describe describe,
                   const void *call)
{
    mailbox *own = r->group->own;
    entry *e = entry_of(r, r->group->rank, n);
    description failure = {0};
    const description *shown = &failure;
    if (header->status != SPAR_OK)
        describe(call, failure.text, TEXT, &failure.gathered);
    else
        shown = describe_cached(r, header->signature | 1, describe, call);
    const int64_t gathered[] = {shown->gathered.rest, shown->gathered.dim, shown->gathered.size};
    __atomic_store_n(&e->call, 0, __ATOMIC_RELAXED); /* readers see it before what follows */
    __atomic_store_n(&e->signature, shown->signature, __ATOMIC_RELEASE);
    __atomic_store_n(&e->forward, header->forward, __ATOMIC_RELEASE);
    spar_shared_text_write(e->text, WORDS, shown->text);
    for (int i = 0; i < 3; i++)
        __atomic_store_n(&e->gathered[i], gathered[i], __ATOMIC_RELAXED);
    /* seq_cst: of two ranks that each write and then read, at least one sees the other's entry */
    __atomic_store_n(&e->call, n, __ATOMIC_SEQ_CST);
    spar_mailbox_publish(own, &own->published, (uint32_t)n);
    __atomic_store_n(&r->newest, n, __ATOMIC_RELAXED);
}

/* Whether the log holds a rank's call n, complete and not overwritten. `whole` 0: not its
 * description. */
static int read_entry(const spar_ring *r, int rank, uint64_t n, description *call, int whole)
{
    const entry *e = entry_of(r, rank, n);
    if (__atomic_load_n(&e->call, __ATOMIC_SEQ_CST) != n)
        return 0;
    call->signature = __atomic_load_n(&e->signature, __ATOMIC_ACQUIRE);
    call->forward = __atomic_load_n(&e->forward, __ATOMIC_ACQUIRE);
    if (whole) {
        spar_shared_text_read(e->text, WORDS, call->text);
        call->gathered.rest = __atomic_load_n(&e->gathered[0], __ATOMIC_ACQUIRE);
        call->gathered.dim = __atomic_load_n(&e->gathered[1], __ATOMIC_ACQUIRE);
        call->gathered.size = __atomic_load_n(&e->gathered[2], __ATOMIC_ACQUIRE);
    }
    return __atomic_load_n(&e->call, __ATOMIC_RELAXED) == n;
}

static int differ(const description *a, const description *b)
{
    return a->signature != b->signature || spar_forward_differs(a->forward, b->forward);
}

static void append_call(char *text, size_t size, int rank, const description *call)
{
    spar_append(text, size, "\n  rank %d: %s", rank, call->text);
    if (call->forward) {
        spar_append(text, size, " (");
        spar_forward_describe(call->forward, text, size);
        spar_append(text, size, ")");
    }
}

/* Reads the descriptions of this rank's newest call, without their texts, which the error has. */
static void read_descriptions(const spar_ring *r)
{
    uint64_t n = __atomic_load_n(&r->newest, __ATOMIC_RELAXED);
    description call;
    for (int rank = 0; rank < r->group->world; rank++) {
        int seen = read_entry(r, rank, n, &call, 1);
        r->group->descriptions[rank] =
            (spar_description){.gathered = seen ? call.gathered : (spar_gathered_size){0}};
    }
    r->group->mismatched = 1;
}

/* Whether peers will end call n. */
static spar_status check_peers(const spar_ring *r, uint64_t n)
{
    uint32_t broken_call;
    spar_status status = spar_group_check(r->group, (uint32_t)n, &broken_call);
    if (status == SPAR_MISMATCH)
        read_descriptions(r);
    return status;
}

/* Describes call n of all ranks; calls that are equal are described once. */
static spar_status fail_mismatch(const spar_ring *r, uint64_t n, int other)
{
    char text[SPAR_GROUP_TEXT];
    description calls[2] = {0}, call;
    read_descriptions(r);
    int shown[2] = {r->group->rank, other};
    snprintf(text, sizeof text, "rank %d's call %llu over the GPU is not rank %d's:", r->group->rank,
             (unsigned long long)n, other);
    for (int i = 0; i < 2; i++)
        if (read_entry(r, shown[i], n, &calls[i], 1))
            append_call(text, sizeof text, shown[i], &calls[i]);
    for (int rank = 0; rank < r->group->world; rank++) {
        if (rank == r->group->rank || rank == other)
            continue;
        if (!read_entry(r, rank, n, &call, 1))
            spar_append(text, sizeof text, "\n  rank %d: not seen there", rank);
        else if (call.signature && (!differ(&call, &calls[0]) || !differ(&call, &calls[1])))
            spar_append(text, sizeof text, "\n  rank %d: as rank %d", rank, shown[differ(&call, &calls[0])]);
        else
            append_call(text, sizeof text, rank, &call);
    }
    return spar_fail_rank(SPAR_MISMATCH, r->group->rank, "%s", text);
}

spar_status spar_ring_begin(spar_ring *r, uint64_t n, const spar_call_header *header, spar_describe describe,
                            const void *call, int compare)
{
    description own, theirs;
    record(r, n, header, describe, call);
    r->group->mismatched = 0;
    SPAR_TRY(check_peers(r, n));
    if (compare && read_entry(r, r->group->rank, n, &own, 0))
        for (int rank = 0; rank < r->group->world; rank++)
            if (rank != r->group->rank && read_entry(r, rank, n, &theirs, 0) && differ(&own, &theirs))
                return fail_mismatch(r, n, rank);
    return SPAR_OK;
}

/* ---- for the watchdog ---- */

void spar_ring_complete(spar_ring *r, uint64_t n)
{
    spar_mailbox_publish(r->group->own, &r->group->own->done, (uint32_t)n);
}

spar_status spar_ring_poll(spar_ring *r, uint64_t n)
{
    SPAR_TRY(check_peers(r, n));
    int64_t now = spar_now_ns();
    if (now - r->polled_ns < POLL_NS)
        return SPAR_OK;
    r->polled_ns = now;
    for (int rank = 0; rank < r->group->world; rank++) {
        spar_peer *peer = r->group->peers[rank];
        if (!peer || !spar_peer_hung_up(peer) || spar_has_reached(&r->group->boxes[rank]->done, (uint32_t)n))
            continue;
        if (!r->gone_ns[rank])
            r->gone_ns[rank] = now;
        if (now - r->gone_ns[rank] >= GRACE_NS || !has_made(r, rank, n))
            return spar_fail_rank(SPAR_PEER_LOST, rank,
                                  "rank %d (process %lld) died before the end of call %llu", rank,
                                  (long long)peer->endpoint.pid, (unsigned long long)n);
    }
    return SPAR_OK;
}

void spar_ring_absent(const spar_ring *r, uint64_t n, spar_ranks *ranks, char *text, size_t size)
{
    *text = 0;
    for (int rank = 0; rank < r->group->world; rank++)
        if (rank != r->group->rank && !has_made(r, rank, n))
            spar_group_list(r->group, rank, ranks, text, size);
}

void spar_ring_abort(spar_ring *r, spar_status status, const spar_ranks *ranks, const char *reason)
{
    spar_group_abort(r->group, status, spar_group_open_call(r->group), ranks, reason);
}
