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
    int64_t gathered[3]; /* the fields of spar_gathered */
} entry;

/* Each rank writes its own log, in its arena. */
typedef struct {
    _Alignas(64) uint64_t newest, ended; /* calls */
    uint32_t abort_status;               /* the status with which the rank aborted; 0: it did not */
    char reason[SPAR_GROUP_TEXT];
    spar_ranks ranks; /* that caused it */
    _Alignas(64) entry entries[ENTRIES];
} call_log;

typedef struct {
    uint64_t signature; /* 0: the rank could not make the call */
    int64_t forward;
    char text[TEXT];
    spar_gathered gathered;
} description;

struct spar_ring {
    int world, rank;
    spar_group *group;
    int aborted;
    int64_t polled_ns;
    description cache[CACHED]; /* by signature */
    int64_t gone_ns[];         /* [world] when a rank was found dead; 0: it is not */
};

static call_log *log_of(const spar_ring *r, int rank)
{
    return spar_group_room(r->group, rank);
}

static uint64_t newest_of(const spar_ring *r, int rank)
{
    return __atomic_load_n(&log_of(r, rank)->newest, __ATOMIC_ACQUIRE);
}

int64_t spar_ring_room(void)
{
    return sizeof(call_log);
}

spar_status spar_ring_open(spar_group *group, spar_ring **result)
{
    spar_ring *r = calloc(1, sizeof *r + (size_t)group->world * sizeof *r->gone_ns);
    if (!r)
        return spar_fail(SPAR_NO_MEMORY, "no memory for %d ranks", group->world);
    r->world = group->world;
    r->rank = group->rank;
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
    call_log *own = log_of(r, r->rank);
    entry *e = &own->entries[n % ENTRIES];
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
    __atomic_store_n(&own->newest, n, __ATOMIC_SEQ_CST);
}

/* Whether the log holds a rank's call n, complete and not overwritten. `whole` 0: not its
 * description. */
static int read_entry(const spar_ring *r, int rank, uint64_t n, description *call, int whole)
{
    const entry *e = &log_of(r, rank)->entries[n % ENTRIES];
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

/* The status and reason of the first rank that aborted. */
static spar_status check_aborts(const spar_ring *r)
{
    for (int i = 1; i < r->world; i++) {
        int rank = (r->rank + i) % r->world;
        const call_log *theirs = log_of(r, rank);
        uint32_t status = __atomic_load_n(&theirs->abort_status, __ATOMIC_ACQUIRE);
        char reason[SPAR_GROUP_TEXT];
        if (!status)
            continue;
        memcpy(reason, theirs->reason, sizeof reason);
        reason[sizeof reason - 1] = 0;
        int specific = status == SPAR_MISMATCH || status == SPAR_TIMEOUT || status == SPAR_PEER_LOST;
        spar_ranks ranks = spar_group_read_ranks(r->group, &theirs->ranks);
        char who[24] = ""; /* a reason that carries ranks already names them */
        if (!ranks.count) {
            snprintf(who, sizeof who, "rank %d: ", rank);
            spar_ranks_add(&ranks, rank);
        }
        return spar_fail_ranks(specific ? (spar_status)status : SPAR_BROKEN, &ranks, "%s%s", who, reason);
    }
    return SPAR_OK;
}

/* A rank that closed the group before call n will not make it. */
static spar_status check_closed(const spar_ring *r, uint64_t n)
{
    for (int rank = 0; rank < r->world; rank++)
        if (rank != r->rank && spar_group_has_aborted(r->group, rank) && newest_of(r, rank) < n)
            return spar_fail_rank(SPAR_BROKEN, rank, "rank %d closed the group before call %llu", rank,
                                  (unsigned long long)n);
    return SPAR_OK;
}

static int differ(const description *a, const description *b)
{
    return a->signature != b->signature || spar_forward_differs(a->forward, b->forward);
}

static void append_call(char *text, size_t size, int rank, const description *call)
{
    spar_append(text, size, "\n  rank %d: %s", rank, call->text);
    if (call->forward)
        spar_append(text, size, " (gradient of call %lld)", (long long)call->forward);
}

/* Describes call n of all ranks; calls that are equal are described once. */
static spar_status fail_mismatch(const spar_ring *r, uint64_t n, int other)
{
    char text[SPAR_GROUP_TEXT];
    description calls[2] = {0}, call;
    int shown[2] = {r->rank, other};
    snprintf(text, sizeof text, "rank %d's call %llu over the GPU is not rank %d's:", r->rank,
             (unsigned long long)n, other);
    for (int i = 0; i < 2; i++)
        if (read_entry(r, shown[i], n, &calls[i], 1))
            append_call(text, sizeof text, shown[i], &calls[i]);
    for (int rank = 0; rank < r->world; rank++) {
        if (rank == r->rank || rank == other)
            continue;
        if (!read_entry(r, rank, n, &call, 1))
            spar_append(text, sizeof text, "\n  rank %d: not seen there", rank);
        else if (call.signature && (!differ(&call, &calls[0]) || !differ(&call, &calls[1])))
            spar_append(text, sizeof text, "\n  rank %d: as rank %d", rank, shown[differ(&call, &calls[0])]);
        else
            append_call(text, sizeof text, rank, &call);
    }
    return spar_fail_rank(SPAR_MISMATCH, r->rank, "%s", text);
}

spar_status spar_ring_begin(spar_ring *r, uint64_t n, const spar_call_header *header, spar_describe describe,
                            const void *call, int compare)
{
    description own, theirs;
    record(r, n, header, describe, call);
    SPAR_TRY(check_aborts(r));
    if (compare && read_entry(r, r->rank, n, &own, 0))
        for (int rank = 0; rank < r->world; rank++)
            if (rank != r->rank && read_entry(r, rank, n, &theirs, 0) && differ(&own, &theirs))
                return fail_mismatch(r, n, rank);
    return header->status == SPAR_OK ? check_closed(r, n) : SPAR_OK;
}

int spar_ring_gathered(const spar_ring *r, int rank, spar_gathered *gathered)
{
    description call;
    int recorded = read_entry(r, rank, newest_of(r, r->rank), &call, 1);
    if (recorded)
        *gathered = call.gathered;
    return recorded;
}

/* ---- for the watchdog ---- */

void spar_ring_complete(spar_ring *r, uint64_t n)
{
    __atomic_store_n(&log_of(r, r->rank)->ended, n, __ATOMIC_RELEASE);
}

spar_status spar_ring_poll(spar_ring *r, uint64_t n)
{
    SPAR_TRY(check_aborts(r));
    int64_t now = spar_now_ns();
    if (now - r->polled_ns < POLL_NS)
        return SPAR_OK;
    r->polled_ns = now;
    for (int rank = 0; rank < r->world; rank++) {
        spar_peer *peer = r->group->peers[rank];
        if (!peer || !spar_peer_hung_up(peer) ||
            __atomic_load_n(&log_of(r, rank)->ended, __ATOMIC_ACQUIRE) >= n)
            continue;
        if (!r->gone_ns[rank])
            r->gone_ns[rank] = now;
        if (now - r->gone_ns[rank] >= GRACE_NS || newest_of(r, rank) < n)
            return spar_fail_rank(SPAR_PEER_LOST, rank,
                                  "rank %d (process %lld) died before the end of call %llu", rank,
                                  (long long)peer->endpoint.pid, (unsigned long long)n);
    }
    return SPAR_OK;
}

void spar_ring_absent(const spar_ring *r, uint64_t n, spar_ranks *ranks, char *text, size_t size)
{
    *text = 0;
    for (int rank = 0; rank < r->world; rank++)
        if (rank != r->rank && newest_of(r, rank) < n)
            spar_group_list(r->group, rank, ranks, text, size);
}

int spar_ring_words(const spar_ring *r, int rank, spar_words *words)
{
    if (!spar_group_words(r->group, rank, words)) /* `broken`: the rank closed the group */
        return 0;
    uint32_t aborted = __atomic_load_n(&log_of(r, rank)->abort_status, __ATOMIC_ACQUIRE);
    words->published = newest_of(r, rank);
    words->done = __atomic_load_n(&log_of(r, rank)->ended, __ATOMIC_RELAXED);
    words->broken = aborted ? aborted : words->broken;
    return 1;
}

void spar_ring_abort(spar_ring *r, spar_status status, const spar_ranks *ranks, const char *reason)
{
    call_log *own = log_of(r, r->rank);
    if (__atomic_exchange_n(&r->aborted, 1, __ATOMIC_ACQ_REL))
        return;
    own->ranks = *ranks;
    snprintf(own->reason, sizeof own->reason, "%s", reason);
    __atomic_store_n(&own->abort_status, (uint32_t)status, __ATOMIC_RELEASE);
}
