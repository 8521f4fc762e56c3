/* SPDX-License-Identifier: Apache-2.0 */
#include "control/link.h"

#include "base/fork.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static const int64_t SECOND_NS = 1000000000;

/* ---- forks ---- */

/* A forked child must not hold its parent's connections open. */
void spar_links_fork(spar_fork_stage stage)
{
    if (stage == SPAR_FORK_PREPARE) {
        pthread_mutex_lock(&spar_links_lock);
        return;
    }
    for (const spar_links *each = spar_links_all; each && stage == SPAR_FORK_CHILD; each = each->next)
        for (int rank = 0; rank < each->world; rank++)
            for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++)
                spar_close_fd(&each->links[rank].sockets[channel]);
    pthread_mutex_unlock(&spar_links_lock);
}

/* ---- life ---- */

static void free_links(spar_links *links)
{
    if (links) {
        free(links->links);
        free(links->polled);
        free(links->boxes);
    }
    free(links);
}

spar_status spar_links_open(spar_group *g, const unsigned char *far, const int64_t *pids,
                            int (*sockets)[SPAR_TCP_CHANNELS])
{
    size_t world = (size_t)g->world, boxes = world * sizeof(mailbox);
    spar_links *made = calloc(1, sizeof *made);
    if (made) {
        made->links = calloc(world, sizeof *made->links);
        made->polled = calloc(SPAR_TCP_CHANNELS * world, sizeof *made->polled);
        made->boxes = aligned_alloc(_Alignof(mailbox), boxes);
    }
    if (!made || !made->links || !made->polled || !made->boxes) {
        for (int rank = 0; rank < g->world; rank++)
            for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++)
                spar_close_fd(&sockets[rank][channel]);
        free_links(made);
        return spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", g->world);
    }
    memset(made->boxes, 0, boxes);
    made->world = g->world;
    for (int rank = 0; rank < g->world; rank++) {
        memcpy(made->links[rank].sockets, sockets[rank], sizeof sockets[rank]);
        made->links[rank].pid = pids[rank];
        made->links[rank].far = far[rank];
    }
    pthread_mutex_lock(&spar_links_lock);
    made->next = spar_links_all;
    spar_links_all = made;
    pthread_mutex_unlock(&spar_links_lock);
    /* a debug thread that sees a copy sees the links, too */
    __atomic_store_n(&g->links, made, __ATOMIC_RELEASE);
    for (int rank = 0; rank < g->world; rank++)
        if (far[rank])
            __atomic_store_n(&g->boxes[rank], (mailbox *)(made->boxes + (size_t)rank * sizeof(mailbox)),
                             __ATOMIC_RELEASE);
    return SPAR_OK;
}

/* Closes a connection so that the peer reads what was sent before: unread bytes would reset it. */
static void close_softly(int *fd)
{
    char unread[4096];
    if (*fd < 0)
        return;
    shutdown(*fd, SHUT_WR);
    while (recv(*fd, unread, sizeof unread, MSG_DONTWAIT) > 0)
        ;
    spar_close_fd(fd);
}

void spar_links_close(spar_group *g)
{
    spar_links *links = g->links;
    if (!links)
        return;
    g->links = NULL;
    pthread_mutex_lock(&spar_links_lock);
    for (spar_links **each = &spar_links_all; *each; each = &(*each)->next)
        if (*each == links) {
            *each = links->next;
            break;
        }
    pthread_mutex_unlock(&spar_links_lock);
    for (int rank = 0; rank < links->world; rank++) {
        if (!links->links[rank].far)
            continue;
        for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++)
            close_softly(&links->links[rank].sockets[channel]);
        g->boxes[rank] = NULL;
    }
    free_links(links);
}

/* ---- sending and receiving ---- */

spar_status spar_links_pump(spar_group *g, int wait_ms)
{
    spar_links *links = g->links;
    int moved = 0;
    for (int rank = 0; rank < g->world; rank++) {
        spar_link *l = &links->links[rank];
        if (!l->far)
            continue;
        moved |= spar_link_send(l);
        if (spar_link_is_awaited(g, rank))
            SPAR_TRY(spar_link_receive(g, rank, &moved));
    }
    if (moved && wait_ms)
        return SPAR_OK;
    int n = 0;
    for (int rank = 0; rank < g->world; rank++) {
        const spar_link *l = &links->links[rank];
        int events =
            (spar_link_is_sent(l) ? 0 : POLLOUT) | (l->far && spar_link_is_awaited(g, rank) ? POLLIN : 0);
        links->polled[n++] = (struct pollfd){l->far ? l->sockets[SPAR_TCP_CONTROL] : -1, POLLIN, 0};
        links->polled[n++] = (struct pollfd){events ? l->sockets[SPAR_TCP_DATA] : -1, (short)events, 0};
    }
    if (poll(links->polled, (nfds_t)n, wait_ms) <= 0)
        return SPAR_OK;
    for (int rank = 0; rank < g->world; rank++)
        if (links->polled[SPAR_TCP_CHANNELS * rank + SPAR_TCP_CONTROL].revents)
            spar_link_receive_control(g, rank);
    return SPAR_OK;
}

int spar_link_has_reached(spar_group *g, int rank, enum spar_progress which)
{
    const spar_link *l = &g->links->links[rank];
    mailbox *box = g->boxes[rank];
    if (which == SPAR_SENT)
        return spar_link_is_sent(l);
    if (which == SPAR_PUBLISHED)
        spar_link_publish_failure(g, rank);
    if (which != SPAR_ARRIVED)
        return spar_has_reached(which == SPAR_PUBLISHED   ? &box->published
                                : which == SPAR_DESCRIBED ? &box->described
                                                          : &box->done,
                                g->call);
    if (l->arrived != g->call || !spar_link_is_sent(l))
        return 0;
    spar_link_set(&box->done, g->call);
    return 1;
}

int spar_links_reached(spar_group *g, enum spar_progress which)
{
    int all_have = 1; /* each is asked, since it may exit once it has */
    for (int rank = 0; rank < g->world; rank++)
        if (g->links->links[rank].far && !spar_link_has_reached(g, rank, which))
            all_have = 0;
    return all_have;
}

void spar_links_begin_bytes(spar_group *g)
{
    for (int rank = 0; rank < g->world; rank++) {
        spar_link *l = &g->links->links[rank];
        const spar_parcel *parcel = &g->parcels[rank];
        if (!l->far || l->sockets[SPAR_TCP_DATA] < 0)
            continue;
        if (parcel->out_bytes >
            EAGER_BYTES) /* behind the message, which a full connection may not have taken yet */
            l->parts[1] = (struct iovec){(void *)(uintptr_t)parcel->out, (size_t)parcel->out_bytes};
        if (parcel->in_bytes > EAGER_BYTES) {
            l->to = parcel->in;
            l->left = parcel->in_bytes;
        }
    }
}

void spar_links_skip_bytes(spar_group *g)
{
    for (int rank = 0; rank < g->world; rank++)
        if (g->links->links[rank].far)
            spar_link_set(&g->boxes[rank]->done, g->call);
}

int spar_links_arrived(const spar_group *g)
{
    for (int rank = 0; rank < g->world; rank++) {
        const spar_link *l = &g->links->links[rank];
        if (l->far && l->arrived == g->call && !l->taken)
            return 1;
    }
    return 0;
}

int spar_links_take(const spar_group *g)
{
    for (int rank = 0; rank < g->world; rank++) {
        spar_link *l = &g->links->links[rank];
        if (l->far && l->arrived == g->call && !l->taken) {
            l->taken = 1;
            return rank;
        }
    }
    return -1;
}

int spar_link_ended(const spar_group *g, int rank)
{
    const spar_link *l = &g->links->links[rank];
    if (spar_group_has_aborted(g, rank) && (int32_t)(g->call - g->boxes[rank]->broken_call) >= 0)
        return 0;
    int data = l->sockets[SPAR_TCP_DATA], control = l->sockets[SPAR_TCP_CONTROL];
    char next;
    if (data >= 0 && control >= 0)
        return 0;
    /* of a process that has ended, the last bytes may be on their way; else control tells why, or ends */
    ssize_t more = data < 0 ? 0 : recv(data, &next, 1, MSG_PEEK | MSG_DONTWAIT);
    if (control < 0 && (more == 0 || (more < 0 && errno != EAGAIN && errno != EINTR)))
        return 1;
    return spar_now_ns() - l->heard_ns > SECOND_NS;
}

int64_t spar_link_pid(const spar_group *g, int rank)
{
    return g->links->links[rank].pid;
}

void spar_links_forget_bytes(spar_group *g)
{
    for (int rank = 0; rank < g->world; rank++)
        g->links->links[rank].to = NULL;
}

spar_last_call spar_link_last_call(const spar_group *g, int rank)
{
    return g->links->links[rank].newest;
}
