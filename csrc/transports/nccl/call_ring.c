#include "transports/nccl/call_ring.h"

#include "transports/rendezvous.h"
#include "base/shared_text.h"
#include "ipc/last_call.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENTRIES = 1024, WORDS = 30, TEXT = WORDS * sizeof(uint64_t), KNOWN = 16 };
static const int64_t LOOK_NS = 50000000, GRACE_NS = 1000000000;

typedef struct {
    uint64_t call;      /* written last, and first set to 0 */
    uint64_t signature; /* 0: it could not be made */
    uint64_t text[WORDS];
} entry;

/* Each rank writes its own, in its arena. */
typedef struct {
    _Alignas(64) uint64_t newest, over; /* calls */
    uint32_t trouble;                   /* it gave up: the status with which */
    char reason[SPAR_GROUP_TEXT];
    _Alignas(64) entry entries[ENTRIES];
} book;

struct spar_ledger {
    int world, rank;
    int stranded; /* this rank could not connect; others may have */
    spar_group *group;
    int gave_up;
    int64_t looked_ns;
    int64_t *gone_ns; /* [world] since when a rank is seen to be gone; 0: it is not */
    struct {
        uint64_t signature;
        char text[TEXT];
    } known[KNOWN]; /* texts by signature: putting a call in words takes longer than all the rest */
};

static book *book_of(const spar_ledger *l, int rank)
{
    return spar_group_room(l->group, rank);
}

static uint64_t newest_of(const spar_ledger *l, int rank)
{
    return __atomic_load_n(&book_of(l, rank)->newest, __ATOMIC_ACQUIRE);
}

/* ---- set-up ---- */

spar_status spar_ledger_open(const spar_comm *comm, const spar_facts *facts, spar_ledger **result,
                             int64_t *offset)
{
    spar_ledger *l = calloc(1, sizeof *l);
    int64_t *gone = calloc((size_t)comm->world, sizeof *gone);
    spar_status status =
        l && gone ? SPAR_OK : spar_fail(SPAR_NO_MEMORY, "no memory for %d ranks", comm->world);
    if (status == SPAR_OK)
        status = spar_meeting_begin(comm, facts, sizeof(book), &l->group, offset);
    if (status != SPAR_OK) {
        free(gone);
        free(l);
        return status;
    }
    l->world = comm->world;
    l->rank = comm->rank;
    l->gone_ns = gone;
    *result = l;
    return SPAR_OK;
}

spar_status spar_ledger_connect(spar_ledger *l, const spar_comm *comm, const spar_verdict *verdicts,
                                const spar_patience *patience)
{
    spar_status status = spar_meeting_end(comm, l->group, verdicts, patience);
    l->stranded = status != SPAR_OK;
    return status;
}

void spar_ledger_close(spar_ledger *l)
{
    if (!l)
        return;
    if (!l->stranded && spar_arena_is_own()) /* else its mailbox stays, for the others' looks */
        spar_group_close(l->group);
    free(l->gone_ns);
    free(l);
}

/* ---- a call ---- */

/* A call in words, kept for the next of its like. */
static const char *describe(spar_ledger *l, const spar_call *call, uint64_t signature)
{
    char *known = l->known[signature % KNOWN].text;
    if (l->known[signature % KNOWN].signature != signature || !*known) {
        size_t room = TEXT - 80; /* of what else there is to tell, this much is always shown */
        spar_plan_describe(call->plan, known, room);
        size_t used = strlen(known);
        snprintf(known + used, TEXT - used, "%s%s", used + 1 == room ? "..." : "", call->text);
        l->known[signature % KNOWN].signature = signature;
    }
    return known;
}

static void write_down(spar_ledger *l, uint64_t n, const spar_call *call)
{
    book *own = book_of(l, l->rank);
    entry *e = &own->entries[n % ENTRIES];
    char failure[TEXT];
    const char *text = failure;
    uint64_t signature = 0;
    if (call->failed != SPAR_OK) {
        snprintf(failure, sizeof failure, "failed: %s", call->why);
    } else {
        signature = spar_plan_signature(call->plan, call->text) | 1;
        text = describe(l, call, signature);
    }
    __atomic_store_n(&e->call, 0, __ATOMIC_RELAXED); /* who reads what follows sees it */
    __atomic_store_n(&e->signature, signature, __ATOMIC_RELEASE);
    spar_text_write(e->text, WORDS, text);
    /* seq_cst: of two ranks that write and then read, one at least sees the other's */
    __atomic_store_n(&e->call, n, __ATOMIC_SEQ_CST);
    __atomic_store_n(&own->newest, n, __ATOMIC_SEQ_CST);
}

/* Whether a rank's call n is written there, still and whole; then its signature and, unless NULL,
 * its text [TEXT]. */
static int read_entry(const spar_ledger *l, int rank, uint64_t n, uint64_t *signature, char *text)
{
    const entry *e = &book_of(l, rank)->entries[n % ENTRIES];
    if (__atomic_load_n(&e->call, __ATOMIC_SEQ_CST) != n)
        return 0;
    *signature = __atomic_load_n(&e->signature, __ATOMIC_ACQUIRE);
    if (text)
        spar_text_read(e->text, WORDS, text);
    return __atomic_load_n(&e->call, __ATOMIC_RELAXED) == n;
}

/* The status and reason of the first rank that gave up. */
static spar_status troubles(const spar_ledger *l)
{
    for (int i = 1; i < l->world; i++) {
        int rank = (l->rank + i) % l->world;
        const book *theirs = book_of(l, rank);
        uint32_t status = __atomic_load_n(&theirs->trouble, __ATOMIC_ACQUIRE);
        char reason[SPAR_GROUP_TEXT];
        if (!status)
            continue;
        memcpy(reason, theirs->reason, sizeof reason);
        reason[sizeof reason - 1] = 0;
        int told = status == SPAR_MISMATCH || status == SPAR_TIMEOUT || status == SPAR_PEER_LOST;
        char who[24] = ""; /* a reason that names a rank may come from further away */
        if (strncmp(reason, "rank ", 5) != 0)
            snprintf(who, sizeof who, "rank %d: ", rank);
        return spar_fail(told ? (spar_status)status : SPAR_BROKEN, "%s%s", who, reason);
    }
    return SPAR_OK;
}

/* Who closed the group before call n will not come to it. */
static spar_status leavers(const spar_ledger *l, uint64_t n)
{
    for (int rank = 0; rank < l->world; rank++)
        if (rank != l->rank && spar_group_has_left(l->group, rank) && newest_of(l, rank) < n)
            return spar_fail(SPAR_BROKEN, "rank %d closed the group before call %llu", rank,
                             (unsigned long long)n);
    return SPAR_OK;
}

static void append(char *text, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void append(char *text, size_t size, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, size - used, format, args);
    va_end(args);
}

/* All ranks' calls n, each different one once: there may be many ranks. */
static spar_status differ(const spar_ledger *l, uint64_t n, int other)
{
    char text[SPAR_GROUP_TEXT], call[TEXT];
    uint64_t signatures[2] = {0}, found;
    int shown[2] = {l->rank, other};
    snprintf(text, sizeof text, "rank %d's call %llu over the GPU is not rank %d's:", l->rank,
             (unsigned long long)n, other);
    for (int i = 0; i < 2; i++)
        if (read_entry(l, shown[i], n, &signatures[i], call))
            append(text, sizeof text, "\n  rank %d: %s", shown[i], call);
    for (int rank = 0; rank < l->world; rank++) {
        if (rank == l->rank || rank == other)
            continue;
        if (!read_entry(l, rank, n, &found, call))
            append(text, sizeof text, "\n  rank %d: not seen there", rank);
        else if (found && (found == signatures[0] || found == signatures[1]))
            append(text, sizeof text, "\n  rank %d: as rank %d", rank,
                   shown[found == signatures[1]]);
        else
            append(text, sizeof text, "\n  rank %d: %s", rank, call);
    }
    return spar_fail(SPAR_MISMATCH, "%s", text);
}

spar_status spar_ledger_enter(spar_ledger *l, uint64_t n, const spar_call *call, int compare)
{
    uint64_t own, theirs;
    write_down(l, n, call);
    SPAR_TRY(troubles(l));
    if (compare && read_entry(l, l->rank, n, &own, NULL))
        for (int rank = 0; rank < l->world; rank++)
            if (rank != l->rank && read_entry(l, rank, n, &theirs, NULL) && theirs != own)
                return differ(l, n, rank);
    return call->failed == SPAR_OK ? leavers(l, n) : SPAR_OK;
}

/* ---- watching ---- */

void spar_ledger_over(spar_ledger *l, uint64_t n)
{
    __atomic_store_n(&book_of(l, l->rank)->over, n, __ATOMIC_RELEASE);
}

spar_status spar_ledger_look(spar_ledger *l, uint64_t n)
{
    SPAR_TRY(troubles(l));
    int64_t now = spar_now_ns();
    if (now - l->looked_ns < LOOK_NS)
        return SPAR_OK;
    l->looked_ns = now;
    for (int rank = 0; rank < l->world; rank++) {
        spar_peer *peer = spar_group_peer(l->group, rank);
        if (!peer || !spar_peer_hung_up(peer) ||
            __atomic_load_n(&book_of(l, rank)->over, __ATOMIC_ACQUIRE) >= n)
            continue;
        if (!l->gone_ns[rank])
            l->gone_ns[rank] = now;
        if (now - l->gone_ns[rank] >= GRACE_NS || newest_of(l, rank) < n)
            return spar_fail(SPAR_PEER_LOST,
                             "rank %d (process %lld) died before the end of call %llu", rank,
                             (long long)peer->endpoint.pid, (unsigned long long)n);
    }
    return SPAR_OK;
}

void spar_ledger_absent(const spar_ledger *l, uint64_t n, char *text, size_t size)
{
    *text = 0;
    for (int rank = 0; rank < l->world; rank++) {
        const spar_peer *peer = spar_group_peer(l->group, rank);
        if (peer && newest_of(l, rank) < n)
            append(text, size, "%srank %d (process %lld)", *text ? ", " : "", rank,
                   (long long)peer->endpoint.pid);
    }
}

void spar_ledger_give_up(spar_ledger *l, spar_status status, const char *reason)
{
    book *own = book_of(l, l->rank);
    if (__atomic_exchange_n(&l->gave_up, 1, __ATOMIC_ACQ_REL))
        return;
    snprintf(own->reason, sizeof own->reason, "%s", reason);
    __atomic_store_n(&own->trouble, (uint32_t)status, __ATOMIC_RELEASE);
}

void spar_ledger_where(const spar_ledger *l, int rank, char *text, size_t size)
{
    int64_t length;
    const char *base = spar_group_arena(l->group, rank, &length);
    spar_whereabouts_read(base, length, text, size);
}
