/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank sends to the far ranks. */
#include "control/link.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

pthread_mutex_t spar_links_lock = PTHREAD_MUTEX_INITIALIZER;
spar_links *spar_links_all;

void spar_link_end_data(spar_link *l)
{
    spar_close_fd(&l->sockets[SPAR_TCP_DATA]);
    l->heard_ns = spar_now_ns();
    memset(l->parts, 0, sizeof l->parts);
    l->left = 0;
}

int spar_link_send(spar_link *l)
{
    struct msghdr message = {.msg_iov = l->parts, .msg_iovlen = 2};
    if (spar_link_is_sent(l) || l->sockets[SPAR_TCP_DATA] < 0)
        return 0;
    ssize_t n = sendmsg(l->sockets[SPAR_TCP_DATA], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) { /* what the peer sent before it hung up can still be read */
        if (errno != EAGAIN && errno != EINTR)
            memset(l->parts, 0, sizeof l->parts);
        return 0;
    }
    for (int i = 0; i < 2; i++) {
        size_t part = (size_t)n < l->parts[i].iov_len ? (size_t)n : l->parts[i].iov_len;
        l->parts[i].iov_base = (char *)l->parts[i].iov_base + part;
        l->parts[i].iov_len -= part;
        n -= (ssize_t)part;
    }
    return 1;
}

void spar_links_publish(spar_group *g, const char *op)
{
    const mailbox *own = g->own;
    spar_last_call newest = {0};
    if (!op)
        newest = spar_last_call_read(spar_arena_base(), spar_arena_length());
    op = op ? op : newest.op;
    for (int rank = 0; rank < g->world; rank++) {
        spar_link *l = &g->links->links[rank];
        if (!l->far)
            continue;
        const spar_parcel *parcel = g->parcels && own->status == SPAR_OK ? &g->parcels[rank] : NULL;
        int64_t bytes = parcel ? parcel->out_bytes : 0, following = bytes <= EAGER_BYTES ? bytes : 0;
        l->parts[1] = (struct iovec){parcel ? (void *)(uintptr_t)parcel->out : NULL, (size_t)following};
        if (own->status != SPAR_OK) {
            following = (int64_t)strnlen(own->description.text, SPAR_GROUP_TEXT - 1);
            l->parts[1] = (struct iovec){(void *)(uintptr_t)own->description.text, (size_t)following};
        }
        l->out = (call_message){g->call, own->status, own->signature, own->forward, bytes, following, ""};
        snprintf(l->out.op, sizeof l->out.op, "%s", op);
        l->parts[0] = (struct iovec){&l->out, sizeof l->out};
        spar_link_send(l);
    }
}

/* Sends to all far ranks, with the lock. What a call needs always fits: a rank is at most one call ahead of
 * its peers, which read it in each call. WAITS is sent only where nothing is under way: a peer that makes no
 * call reads nothing. */
static void send_locked(spar_links *links, const control_message *message)
{
    for (int rank = 0; rank < links->world; rank++) {
        spar_link *l = &links->links[rank];
        int fd = l->sockets[SPAR_TCP_CONTROL], under_way = 0;
        if (!l->far || fd < 0 ||
            (message->kind == WAITS && (ioctl(fd, SIOCOUTQ, &under_way) != 0 || under_way)))
            continue;
        if (send(fd, message, sizeof *message, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof *message)
            shutdown(fd, SHUT_RDWR); /* its reader closes it */
    }
}

static void send_control(const spar_group *g, const control_message *message)
{
    pthread_mutex_lock(&spar_links_lock);
    send_locked(g->links, message);
    pthread_mutex_unlock(&spar_links_lock);
}

void spar_links_wait(void)
{
    control_message message = {.kind = WAITS};
    if (!spar_arena_is_own())
        return;
    message.waits = spar_last_call_read(spar_arena_base(), spar_arena_length());
    pthread_mutex_lock(&spar_links_lock);
    for (spar_links *each = spar_links_all; each; each = each->next)
        send_locked(each, &message);
    pthread_mutex_unlock(&spar_links_lock);
}

void spar_links_describe(const spar_group *g)
{
    control_message message = {.kind = DESCRIBES, .call = g->call, .gathered = g->own->description.gathered};
    memcpy(message.text, g->own->description.text, sizeof message.text);
    send_control(g, &message);
}

void spar_links_end(const spar_group *g)
{
    control_message message = {.kind = ENDS, .call = g->call, .status = g->own->status};
    if (message.status != SPAR_OK) /* also where the data connection is full, and takes no message now */
        memcpy(message.text, g->own->description.text, sizeof message.text);
    send_control(g, &message);
}

void spar_links_break(const spar_group *g)
{
    control_message message = {
        .kind = BREAKS, .call = g->own->broken_call, .status = g->own->broken, .ranks = g->own->ranks};
    memcpy(message.text, g->own->reason, sizeof message.text);
    send_control(g, &message);
    for (int rank = 0; rank < g->world; rank++) { /* the caller's memory is its own again */
        memset(g->links->links[rank].parts, 0, sizeof g->links->links[rank].parts);
        g->links->links[rank].left = 0;
    }
}
