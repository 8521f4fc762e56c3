/* SPDX-License-Identifier: Apache-2.0 */
#include "control/links.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char MAGIC[8] = {'s', 'p', 'a', 'r', ' ', 'b', 'o', 'x'};
/* Twice the wake-up latency: with less, two ranks may keep sleeping alternately. */
static const int64_t SPIN_NS = 200000;

/* ---- a call ---- */

spar_status spar_group_begin(spar_group *g, const spar_deadline *deadline, uint32_t *call)
{
    uint32_t broken_call;
    g->parcels = NULL;
    g->waits_ns = 0;
    if (g->links) { /* a far rank may have broken the group */
        spar_links_forget_bytes(g);
        SPAR_TRY(spar_group_pump(g, 0));
    }
    spar_status status = spar_group_check(g, g->call + 1, &broken_call);
    if (status == SPAR_PEER_LOST &&
        (broken_call == g->call + 1 || (g->unsettled && broken_call == g->call))) {
        g->unsettled = 0;
        g->call++; /* peers found the death in this call, or in the one before, which this rank has ended */
        return status;
    }
    if (status != SPAR_OK)
        return spar_fail_ranks(SPAR_BROKEN, spar_last_error_ranks(), "%s", spar_last_error());
    if (g->unsettled) { /* peers may still be reading what this rank published */
        g->unsettled = 0;
        SPAR_TRY(spar_group_await(g, SPAR_DONE, g->call, deadline));
        if (g->links) /* a rank that fails calls does not run ahead of far ranks either */
            SPAR_TRY(spar_group_await_far(g, SPAR_PUBLISHED, g->call, deadline));
    }
    if (g->links)
        SPAR_TRY(spar_group_await_far(g, SPAR_SENT, g->call, deadline));
    g->mismatched = 0;
    g->record = 0;
    *call = ++g->call;
    return SPAR_OK;
}

/* Compares all headers, with the same result on all ranks; on a mismatch collects all descriptions. */
static spar_status compare_headers(spar_group *g, spar_describe describe, const void *call,
                                   spar_call_header *all, const spar_deadline *deadline)
{
    int differs = 0;
    int64_t forward = 0;
    for (int rank = 0; rank < g->world; rank++) {
        if (all[rank].status == SPAR_OK) {
            differs |= all[rank].signature != all[0].signature;
            differs |= spar_forward_differs(all[rank].forward, forward);
            forward = spar_forward_merged(forward, all[rank].forward);
            continue;
        }
        char text[SPAR_GROUP_TEXT];
        memcpy(text, g->boxes[rank]->description.text, sizeof text);
        text[sizeof text - 1] = 0;
        return spar_fail_rank(all[rank].status == SPAR_NO_MEMORY ? SPAR_NO_MEMORY : SPAR_MISMATCH, rank,
                              "rank %d failed: %s", rank, text);
    }
    if (!differs)
        return SPAR_OK;
    spar_description *own = &g->own->description;
    describe(call, own->text, sizeof own->text, &own->gathered);
    spar_mailbox_publish(g->own, &g->own->described, g->call);
    if (g->links)
        spar_links_describe(g);
    SPAR_TRY(spar_group_await(g, SPAR_DESCRIBED, g->call, deadline));
    for (int rank = 0; rank < g->world; rank++) {
        g->descriptions[rank] = g->boxes[rank]->description;
        g->descriptions[rank].text[SPAR_GROUP_TEXT - 1] = 0;
    }
    g->mismatched = 1;
    return spar_fail(SPAR_MISMATCH, "calls differ between ranks");
}

spar_status spar_group_publish(spar_group *g, const spar_call_header *own, spar_describe describe,
                               const void *call, spar_call_header *all, const spar_deadline *deadline)
{
    g->own->signature = own->signature;
    g->own->forward = own->forward;
    g->own->status = SPAR_OK;
    memcpy(g->own->offsets, own->offsets, sizeof own->offsets);
    spar_mailbox_publish(g->own, &g->own->published, g->call);
    if (g->links)
        spar_links_publish(g, own->op);
    SPAR_TRY(spar_group_await(g, SPAR_PUBLISHED, g->call, deadline));
    for (int rank = 0; rank < g->world; rank++) {
        const mailbox *box = g->boxes[rank];
        all[rank].signature = box->signature;
        all[rank].forward = box->forward;
        all[rank].status = (spar_status)box->status;
        memcpy(all[rank].offsets, box->offsets, sizeof box->offsets);
    }
    spar_status status = compare_headers(g, describe, call, all, deadline);
    if (status != SPAR_MISMATCH && status != SPAR_NO_MEMORY)
        return status;
    spar_status end = spar_group_finish(g, deadline);
    if (end == SPAR_OK && g->links) { /* the caller gets its memory back */
        end = spar_group_await_far(g, SPAR_SENT, g->call, deadline);
        spar_links_skip_bytes(g);
    }
    return end == SPAR_OK ? status : end;
}

void spar_group_carry(spar_group *g, const spar_parcel *parcels)
{
    g->parcels = parcels;
}

spar_status spar_group_transfer(spar_group *g, void (*arrived)(void *context, int rank), void *context,
                                const spar_deadline *deadline)
{
    if (!g->links)
        return SPAR_OK;
    spar_links_begin_bytes(g);
    for (int done = 0; !done;) {
        done = spar_links_reached(g, SPAR_ARRIVED);
        for (int rank; (rank = spar_links_take(g)) >= 0;)
            arrived(context, rank);
        if (!done)
            SPAR_TRY(spar_group_await_far(g, SPAR_ARRIVED, g->call, deadline));
    }
    return SPAR_OK;
}

spar_status spar_group_finish(spar_group *g, const spar_deadline *deadline)
{
    spar_mailbox_publish(g->own, &g->own->done, g->call);
    return spar_group_await(g, SPAR_DONE, g->call, deadline);
}

void spar_group_go_on(spar_group *g, uint32_t record)
{
    g->record = record;
}

void spar_group_end(spar_group *g)
{
    spar_last_call_end(g->record, 0);
    spar_mailbox_publish(g->own, &g->own->done, g->call);
    if (g->links)
        spar_links_end(g);
    g->unsettled = 1;
}

void spar_group_fail(spar_group *g, spar_status status, const char *text)
{
    snprintf(g->own->description.text, sizeof g->own->description.text, "%s", text);
    g->own->status = (uint32_t)status;
    spar_mailbox_publish(g->own, &g->own->published, g->call);
    if (g->links)
        spar_links_publish(g, NULL);
    spar_group_end(g);
}

/* ---- life ---- */

/* The length of a mailbox, without the extra bytes. */
static int64_t own_length(int world)
{
    return ((int64_t)sizeof(mailbox) + world + 63) / 64 * 64;
}

static void free_group(spar_group *g)
{
    if (g) {
        free(g->peers);
        free(g->boxes);
        free(g->polls);
        free(g->descriptions);
        free(g->expected);
        free(g->unmapped);
    }
    free(g);
}

spar_status spar_group_open(int world, int rank, int64_t room, spar_group **result, int64_t *offset)
{
    spar_group *g = calloc(1, sizeof *g);
    if (g) {
        g->peers = calloc((size_t)world, sizeof *g->peers);
        g->boxes = calloc((size_t)world, sizeof *g->boxes);
        g->polls = calloc((size_t)world, sizeof *g->polls);
        g->descriptions = calloc((size_t)world, sizeof *g->descriptions);
        g->expected = calloc((size_t)world, sizeof *g->expected);
        g->unmapped = calloc((size_t)world, sizeof *g->unmapped);
    }
    spar_status status = SPAR_NO_MEMORY;
    if (!g || !g->peers || !g->boxes || !g->polls || !g->descriptions || !g->expected || !g->unmapped)
        spar_fail(status, "no memory for a group of %d ranks", world);
    else
        status = spar_arena_take(own_length(world) + room, &g->memory);
    if (status != SPAR_OK) {
        free_group(g);
        return status;
    }
    pthread_mutex_init(&g->lock, NULL);
    pthread_mutex_init(&g->closing, NULL);
    g->world = world;
    g->rank = rank;
    g->room = room;
    g->refs = 2;
    g->uses = 1;
    spar_group_spin(g, SPIN_NS);
    g->own = spar_memory_address(g->memory);
    memset(g->own, 0, (size_t)(own_length(world) + room));
    g->own->world = world;
    g->own->rank = rank;
    memcpy(g->own->magic, MAGIC, sizeof MAGIC);
    g->boxes[rank] = g->own;
    *offset = spar_memory_offset(g->memory);
    *result = g;
    return SPAR_OK;
}

spar_status spar_group_expect(spar_group *g, int rank, const spar_endpoint *endpoint, const spar_key *secret)
{
    SPAR_TRY(spar_peers_expect(endpoint, secret));
    g->expected[rank] = *endpoint;
    return SPAR_OK;
}

void spar_group_end_set_up(spar_group *g)
{
    for (int rank = 0; rank < g->world; rank++) {
        if (g->expected[rank].pid)
            spar_peers_end(&g->expected[rank]);
        g->expected[rank].pid = 0;
    }
}

spar_status spar_group_attach(spar_group *g, spar_peer **peers, const int64_t *offsets)
{
    memcpy(g->peers, peers, (size_t)g->world * sizeof *peers);
    for (int rank = 0; rank < g->world; rank++) {
        if (!peers[rank])
            continue;
        int64_t most = peers[rank]->length - own_length(g->world) - g->room;
        if (offsets[rank] < 0 || offsets[rank] > most || offsets[rank] % _Alignof(mailbox))
            return spar_fail_rank(SPAR_TRANSPORT, rank,
                                  "rank %d published a mailbox outside its arena: at %lld, length %lld", rank,
                                  (long long)offsets[rank], (long long)peers[rank]->length);
        mailbox *box = (mailbox *)(peers[rank]->base + offsets[rank]);
        if (memcmp(box->magic, MAGIC, sizeof MAGIC) != 0 || box->world != g->world || box->rank != rank)
            return spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d has no mailbox at %lld", rank,
                                  (long long)offsets[rank]);
        g->boxes[rank] = box;
    }
    return SPAR_OK;
}

spar_status spar_group_link(spar_group *g, const unsigned char *far, const int64_t *pids,
                            int (*sockets)[SPAR_TCP_CHANNELS])
{
    return spar_links_open(g, far, pids, sockets);
}

const spar_description *spar_group_description(const spar_group *g, int rank)
{
    return g->mismatched ? &g->descriptions[rank] : NULL;
}

void *spar_group_room(const spar_group *g, int rank)
{
    return (char *)g->boxes[rank] + own_length(g->world);
}

spar_peer *spar_group_peer(const spar_group *g, int rank)
{
    return g->peers[rank];
}

char *spar_group_arena(const spar_group *g, int rank, int64_t *length)
{
    *length = g->peers[rank] ? g->peers[rank]->length : spar_arena_length();
    return g->peers[rank] ? g->peers[rank]->base : spar_arena_base();
}

spar_last_call spar_group_last_call(const spar_group *g, int rank)
{
    int64_t length;
    if (rank != g->rank && !g->peers[rank])
        return spar_link_last_call(g, rank);
    const char *base = spar_group_arena(g, rank, &length);
    return spar_last_call_read(base, length);
}

int spar_group_words(const spar_group *g, int rank, spar_words *words)
{
    const mailbox *box = __atomic_load_n(&g->boxes[rank], __ATOMIC_ACQUIRE);
    if (!box)
        return 0;
    words->ended =
        g->peers[rank] ? spar_peer_is_dead(g->peers[rank]) : rank != g->rank && spar_link_ended(g, rank);
    words->published = __atomic_load_n(&box->published, __ATOMIC_ACQUIRE);
    words->done = __atomic_load_n(&box->done, __ATOMIC_RELAXED);
    words->broken = __atomic_load_n(&box->broken, __ATOMIC_RELAXED);
    words->status = __atomic_load_n(&box->status, __ATOMIC_RELAXED);
    return 1;
}

void spar_group_spin(spar_group *g, int64_t spin_ns)
{
    g->spin_ns = spin_ns;
}

pthread_mutex_t *spar_group_lock(spar_group *g)
{
    return &g->lock;
}

void spar_group_start_at(spar_group *g, uint32_t call)
{
    g->call = call;
    for (int rank = 0; rank < g->world; rank++)
        if (!g->peers[rank]) { /* this one, and the copies of far ranks' mailboxes */
            mailbox *box = g->boxes[rank];
            box->published = box->done = box->described = call;
        }
}

/* Whether no peer will write to our memory in this call any more. */
static int call_settled(void *group, uint32_t call)
{
    spar_group *g = group;
    int settled = 1;
    pthread_mutex_lock(&g->closing);
    for (int rank = 0; settled && rank < g->world; rank++)
        if (g->peers[rank] && !g->unmapped[rank])
            settled = spar_has_reached(&g->boxes[rank]->done, call) || spar_group_has_aborted(g, rank) ||
                      spar_peer_is_dead(g->peers[rank]);
    pthread_mutex_unlock(&g->closing);
    return settled;
}

/* Whether no peer will access our mailbox any more. */
static int mailbox_settled(void *group, uint32_t unused)
{
    spar_group *g = group;
    (void)unused;
    if (__atomic_load_n(&g->uses, __ATOMIC_ACQUIRE))
        return 0;
    for (int rank = 0; rank < g->world; rank++)
        if (g->peers[rank] && !__atomic_load_n(&g->own->detached[rank], __ATOMIC_ACQUIRE) &&
            !spar_peer_is_dead(g->peers[rank]))
            return 0;
    return 1;
}

static void forget(void *group)
{
    spar_group *g = group;
    if (__atomic_sub_fetch(&g->refs, 1, __ATOMIC_ACQ_REL))
        return;
    for (int rank = 0; rank < g->world; rank++)
        if (g->peers[rank]) {
            if (!g->unmapped[rank])
                spar_peers_unmap(g->peers[rank]);
            spar_peers_release(g->peers[rank]);
        }
    pthread_mutex_destroy(&g->lock);
    pthread_mutex_destroy(&g->closing);
    free_group(g);
}

/* The last use of the peers' mailboxes sets `detached` there: no later access. */
static void leave(void *group)
{
    spar_group *g = group;
    if (__atomic_sub_fetch(&g->uses, 1, __ATOMIC_ACQ_REL) == 0) {
        pthread_mutex_lock(&g->closing);
        for (int rank = 0; rank < g->world; rank++)
            if (g->peers[rank] && g->boxes[rank] && !g->unmapped[rank])
                __atomic_store_n(&g->boxes[rank]->detached[g->rank], 1, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&g->closing);
    }
    forget(group);
}

static const spar_quarantine call_quarantine = {call_settled, leave};
static const spar_quarantine mailbox_quarantine = {mailbox_settled, forget};

void spar_group_quarantine(spar_group *g, spar_memory *block, uint32_t call)
{
    if (call_settled(g, call))
        return;
    __atomic_add_fetch(&g->refs, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&g->uses, 1, __ATOMIC_RELAXED);
    spar_memory_publish(block, &call_quarantine, g, call);
}

/* Unmaps the arenas of dead ranks: our blocks may hold the group for as long as other peers live. */
static void unmap_dead(spar_group *g)
{
    for (int rank = 0; rank < g->world; rank++) {
        if (!g->peers[rank] || !spar_peer_died(g->peers[rank]))
            continue;
        pthread_mutex_lock(&g->closing);
        g->unmapped[rank] = 1;
        pthread_mutex_unlock(&g->closing);
        spar_peers_unmap(g->peers[rank]);
    }
}

void spar_group_end_calls(spar_group *g)
{
    uint32_t next = __atomic_load_n(&g->own->published, __ATOMIC_RELAXED) + 1;
    char reason[64];
    snprintf(reason, sizeof reason, "rank %d closed the group before call %u", g->rank, (unsigned)next);
    spar_group_abort(g, SPAR_BROKEN, next, &(spar_ranks){1, {g->rank}}, reason);
}

void spar_group_close(spar_group *g)
{
    if (!g || !spar_arena_is_own())
        return;
    spar_group_end_set_up(g);
    spar_group_end_calls(g);
    spar_memory_publish(g->memory, &mailbox_quarantine, g, 0);
    spar_memory *memory = g->memory;
    spar_links_close(g);
    unmap_dead(g);
    leave(g); /* the mailbox still holds the group */
    spar_memory_free(memory);
    spar_arena_release();
    spar_peers_sweep();
}
