/* SPDX-License-Identifier: Apache-2.0 */
#include "transports/push/memory.h"

#include "base/env.h"
#include "devices/cuda/driver.h"
#include "devices/cuda/mapping.h"
#include "ipc/passing.h"
#include "transports/push/push.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { SHARE = 16 }; /* of the device's memory, which a slot may have unless SPAR_PUSH_SLOT is set */

static const int64_t MOST_BYTES = (int64_t)32 << 30; /* places in a slot are 32-bit numbers */
static const int64_t LIMIT_NS = 20000000000;         /* of mapping slots in the set-up */

struct spar_push_memory {
    int world, rank;
    int64_t limit, granularity;
    spar_group *group;
    spar_ring *ring;
    uint64_t topics[SPAR_KERNEL_RANKS]; /* of each rank's messages */
    char *slots[SPAR_KERNEL_RANKS];     /* where each begins */
    spar_mapping maps[SPAR_KERNEL_RANKS];
};

spar_status spar_push_terms_read(int ordinal, spar_push_terms *terms)
{
    spar_env_value slot;
    size_t free_bytes, total;
    SPAR_TRY(spar_env_field("push_slot", &slot));
    SPAR_TRY_CU(MemGetInfo, &free_bytes, &total);
    SPAR_TRY(spar_mapping_granularity(ordinal, &terms->granularity));
    terms->limit = slot.count ? slot.count : (int64_t)total / SHARE;
    terms->limit = terms->limit < MOST_BYTES ? terms->limit : MOST_BYTES;
    if (getrandom(&terms->topic, sizeof terms->topic, 0) != sizeof terms->topic)
        return spar_fail(SPAR_TRANSPORT, "getrandom: %s", strerror(errno));
    return SPAR_OK;
}

/* ---- messages between all ranks ---- */

/* One message to each peer and from each. */
typedef struct {
    spar_push_memory *memory;
    spar_watchdog *watchdog; /* of the call in which the ranks are; NULL: in the set-up */
    const char *what;        /* for the message of a timeout */
    spar_deadline deadline;
    int64_t numbers[SPAR_KERNEL_RANKS];
    int fds[SPAR_KERNEL_RANKS]; /* -1: none */
    unsigned char sent[SPAR_KERNEL_RANKS], came[SPAR_KERNEL_RANKS];
} turn;

static turn begin_turn(spar_push_memory *m, spar_watchdog *watchdog, const char *what, int64_t number, int fd,
                       const spar_deadline *deadline)
{
    turn t = {.memory = m, .watchdog = watchdog, .what = what, .deadline = *deadline};
    for (int rank = 0; rank < m->world; rank++)
        t.fds[rank] = -1;
    t.numbers[m->rank] = number;
    t.fds[m->rank] = fd; /* the caller's, until the turn is over */
    t.sent[m->rank] = t.came[m->rank] = 1;
    return t;
}

/* Sends and receives what can be; *left: the ranks whose messages have not come. */
static spar_status step(turn *t, spar_ranks *left, int *unsent)
{
    spar_push_memory *m = t->memory;
    *left = (spar_ranks){0};
    *unsent = 0;
    for (int rank = 0; rank < m->world; rank++) {
        spar_peer *peer = spar_group_peer(m->group, rank);
        int done = t->sent[rank];
        if (!done)
            SPAR_TRY(spar_peer_send(peer, m->topics[m->rank], t->numbers[m->rank], t->fds[m->rank], &done));
        t->sent[rank] = (unsigned char)done;
        *unsent += !done;
        done = t->came[rank];
        if (!done)
            SPAR_TRY(spar_peer_receive(peer, m->topics[rank], &t->numbers[rank], &t->fds[rank], &done));
        t->came[rank] = (unsigned char)done;
        if (!done)
            spar_ranks_add(left, rank);
    }
    return SPAR_OK;
}

/* Whether the peers can still send their messages. During a call the watchdog asks the ring. In the set-up a
 * failure is one after which all ranks compare how theirs ended. */
static spar_status check_peers(const turn *t)
{
    const char *why = t->watchdog ? spar_watchdog_broken(t->watchdog) : NULL;
    if (why)
        return spar_fail(SPAR_BROKEN, "%s", why);
    if (t->watchdog || spar_ring_poll(t->memory->ring, 1) == SPAR_OK)
        return SPAR_OK;
    return spar_fail_ranks(SPAR_TRANSPORT, spar_last_error_ranks(), "%s", spar_last_error());
}

static spar_status exchange(turn *t)
{
    spar_ranks left;
    int unsent;
    for (int pauses = 0;;) {
        SPAR_TRY(step(t, &left, &unsent));
        if (!left.count && !unsent)
            return SPAR_OK;
        if (pauses % 500 == 0)
            SPAR_TRY(check_peers(t));
        if (spar_deadline_passed(&t->deadline))
            return spar_fail_ranks(t->watchdog ? SPAR_TIMEOUT : SPAR_TRANSPORT, &left,
                                   "rank %d did not %s in time", left.count ? left.rank[0] : t->memory->rank,
                                   t->what);
        SPAR_TRY(spar_deadline_pause(&t->deadline, &pauses, "while slots of push were mapped"));
    }
}

/* Closes the descriptors that came. */
static void end_turn(const turn *t)
{
    for (int rank = 0; rank < t->memory->world; rank++)
        if (rank != t->memory->rank && t->fds[rank] >= 0)
            close(t->fds[rank]);
}

static int64_t largest(const turn *t)
{
    int64_t most = t->numbers[0];
    for (int rank = 1; rank < t->memory->world; rank++)
        most = t->numbers[rank] > most ? t->numbers[rank] : most;
    return most;
}

spar_status spar_push_memory_most(spar_push_memory *m, spar_watchdog *watchdog, int64_t number, int64_t *most,
                                  const spar_deadline *deadline)
{
    turn t = begin_turn(m, watchdog, "compare the outputs that lacked room", number, -1, deadline);
    spar_status status = exchange(&t);
    end_turn(&t);
    *most = largest(&t);
    return status;
}

/* ---- growth ---- */

/* Maps the memory that the peers have sent. */
static spar_status import_all(spar_push_memory *m, const turn *t, int64_t bytes)
{
    for (int rank = 0; rank < m->world; rank++)
        if (rank != m->rank)
            SPAR_TRY(spar_mapping_import(&m->maps[rank], bytes, t->fds[rank]));
    return SPAR_OK;
}

/* Unmaps what is longer than `bytes`. */
static void shrink_all(spar_push_memory *m, int64_t bytes)
{
    for (int rank = 0; rank < m->world; rank++)
        while (m->maps[rank].mapped > bytes)
            spar_mapping_shrink(&m->maps[rank]);
}

/* Passes this rank's new piece on and maps the peers', unless a rank has `failed` before. Returns this rank's
 * own failure; all learn of the others': *culprit is 1 + the first rank that failed, or 0. */
static spar_status add_pieces(spar_push_memory *m, spar_watchdog *watchdog, int64_t bytes, int own,
                              spar_status failed, const spar_deadline *deadline, int *culprit)
{
    spar_failure failure;
    spar_failure_keep(&failure, failed);
    turn pieces = begin_turn(m, watchdog, "pass its slot on", failed, own, deadline);
    spar_status status = exchange(&pieces);
    if (status == SPAR_OK && largest(&pieces) == SPAR_OK) {
        failed = import_all(m, &pieces, bytes);
        spar_failure_keep(&failure, failed);
    }
    end_turn(&pieces);
    SPAR_TRY(status);
    turn results = begin_turn(m, watchdog, "map its peers' slots", failed, -1, deadline);
    status = exchange(&results);
    end_turn(&results);
    SPAR_TRY(status);
    for (int rank = m->world - 1; rank >= 0; rank--)
        *culprit = results.numbers[rank] != SPAR_OK ? 1 + rank : *culprit;
    return spar_failure_raise(&failure);
}

/* Lets all slots grow; if that fails on a rank, on none of them, and *culprit is 1 + its number. Returns this
 * rank's own failure. */
static spar_status grow(spar_push_memory *m, spar_watchdog *watchdog, int64_t bytes,
                        const spar_deadline *deadline, int *culprit)
{
    int64_t before = m->maps[m->rank].mapped, granularity = m->granularity;
    int own = -1;
    bytes = (bytes + granularity - 1) / granularity * granularity;
    spar_status status = spar_mapping_grow(&m->maps[m->rank], bytes, &own);
    if (status == SPAR_OK && before == 0) { /* before the peers can write there */
        static const char zeros[SPAR_PUSH_WORDS];
        status = spar_driver_write((CUdeviceptr)(uintptr_t)m->maps[m->rank].base, zeros, SPAR_PUSH_WORDS);
    }
    status = add_pieces(m, watchdog, bytes, own, status, deadline, culprit);
    if (own >= 0)
        close(own);
    if (status != SPAR_OK || *culprit)
        shrink_all(m, before);
    return status;
}

spar_status spar_push_memory_grow(spar_push_memory *m, spar_watchdog *watchdog, int64_t bytes,
                                  const spar_deadline *deadline)
{
    int culprit = 0;
    spar_status status = grow(m, watchdog, bytes, deadline, &culprit);
    return culprit ? SPAR_OK : status; /* all ranks know, and go on with what they have */
}

/* ---- life ---- */

static spar_status read_terms(spar_push_memory *m, const spar_push_terms *terms)
{
    m->limit = terms[0].limit;
    m->granularity = terms[0].granularity;
    for (int rank = 0; rank < m->world; rank++) {
        int64_t granularity = terms[rank].granularity, limit = terms[rank].limit;
        if (granularity <= 0 || granularity & (granularity - 1) || granularity > MOST_BYTES || limit <= 0 ||
            limit > MOST_BYTES)
            return spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d sent malformed terms for its slot", rank);
        m->topics[rank] = terms[rank].topic;
        m->limit = limit < m->limit ? limit : m->limit;
        m->granularity = granularity > m->granularity ? granularity : m->granularity;
    }
    m->limit = m->limit / 512 * 512;
    return SPAR_OK;
}

static spar_status reserve(spar_push_memory *m, int ordinal)
{
    int64_t whole = m->limit + SPAR_PUSH_WORDS + m->granularity - 1;
    whole = whole / m->granularity * m->granularity;
    for (int rank = 0; rank < m->world; rank++) {
        SPAR_TRY(spar_mapping_reserve(&m->maps[rank], ordinal, whole));
        m->slots[rank] = m->maps[rank].base;
    }
    return SPAR_OK;
}

spar_status spar_push_memory_open(const spar_push_terms *terms, int world, int rank, int ordinal,
                                  spar_group *group, spar_ring *ring, const spar_deadline *deadline,
                                  spar_push_memory **memory)
{
    int64_t bytes;
    int culprit = 0;
    spar_push_memory *m = calloc(1, sizeof *m);
    if (!m)
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", world);
    m->world = world;
    m->rank = rank;
    m->group = group;
    m->ring = ring;
    *memory = m;
    SPAR_TRY(read_terms(m, terms));
    SPAR_TRY(reserve(m, ordinal));
    SPAR_TRY(spar_push_first_bytes(world, m->limit, &bytes));
    const spar_deadline until = spar_push_stage(deadline, LIMIT_NS);
    SPAR_TRY(grow(m, NULL, SPAR_PUSH_WORDS + bytes, &until, &culprit));
    return culprit ? spar_fail_rank(SPAR_TRANSPORT, culprit - 1, "rank %d could not map all ranks' slots",
                                    culprit - 1)
                   : SPAR_OK;
}

int64_t spar_push_memory_bytes(const spar_push_memory *m)
{
    int64_t bytes = m->maps[m->rank].mapped - SPAR_PUSH_WORDS;
    return bytes < m->limit ? bytes : m->limit;
}

int64_t spar_push_memory_limit(const spar_push_memory *m)
{
    return m->limit;
}

char *const *spar_push_memory_slots(const spar_push_memory *m)
{
    return m->slots;
}

void spar_push_memory_leave(spar_push_memory *m)
{
    for (int rank = 0; rank < m->world; rank++) {
        spar_peer *peer = spar_group_peer(m->group, rank);
        if (rank != m->rank)
            spar_mapping_free(&m->maps[rank]);
        if (peer)
            spar_peer_forget(peer, m->topics[rank]);
    }
}

void spar_push_memory_free(void *memory)
{
    spar_push_memory *m = memory;
    spar_mapping_free(&m->maps[m->rank]);
    free(m);
}
