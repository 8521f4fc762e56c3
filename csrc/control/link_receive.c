/* SPDX-License-Identifier: Apache-2.0 */
/* What far ranks send: each message is checked before it is used. */
#include "control/link.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

/* Takes what a far rank publishes of the current call. 0: no call of these ranks is like it. */
static int take_call(spar_group *g, int rank)
{
    spar_link *l = &g->links->links[rank];
    mailbox *box = g->boxes[rank];
    const call_message *in = &l->in;
    const spar_parcel *parcel = g->parcels ? &g->parcels[rank] : NULL;
    int like = in->status == SPAR_OK && g->own->status == SPAR_OK && in->signature == g->own->signature;
    box->signature = in->signature;
    box->forward = in->forward;
    box->status = in->status;
    l->newest = (spar_last_call){.state = SPAR_CALL_ARRIVED, .call = in->call};
    memcpy(l->newest.op, in->op, sizeof l->newest.op - 1);
    l->arrived = in->call - 1;
    l->taken = 0;
    l->to = NULL;
    l->left = in->following;
    if (in->status != SPAR_OK) {
        if (in->status > SPAR_INTERNAL || in->following >= SPAR_GROUP_TEXT)
            return 0;
        memset(box->description.text, 0, sizeof box->description.text);
        l->to = box->description.text;
    } else if (like && parcel) {
        if (in->bytes != parcel->in_bytes || in->following != (in->bytes <= EAGER_BYTES ? in->bytes : 0))
            return 0;
        l->to = parcel->in;
    }
    return in->following >= 0 && in->following <= EAGER_BYTES;
}

/* The bytes that were awaited are here: those of a message, or the call's. */
static void end_bytes(spar_group *g, int rank)
{
    spar_link *l = &g->links->links[rank];
    mailbox *box = g->boxes[rank];
    /* They may be those of an earlier call, which this rank did not make. */
    if (l->in.call != g->call)
        return;
    int published = spar_has_reached(&box->published, g->call);
    if (g->parcels && l->in.status == SPAR_OK && (published || l->in.following == l->in.bytes))
        l->arrived = g->call;
    if (!published)
        spar_link_set(&box->published, g->call);
}

int spar_link_is_awaited(const spar_group *g, int rank)
{
    const spar_link *l = &g->links->links[rank];
    return l->sockets[SPAR_TCP_DATA] >= 0 && !g->own->broken &&
           (l->left || !spar_has_reached(&g->boxes[rank]->published, g->call));
}

/* A peer that does not keep to the protocol: nothing more is read from it. */
static spar_status malformed(spar_group *g, int rank)
{
    spar_link_end_data(&g->links->links[rank]);
    return spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d sent a message that belongs to no call", rank);
}

spar_status spar_link_receive(spar_group *g, int rank, int *got)
{
    char unwanted[4096];
    spar_link *l = &g->links->links[rank];
    char *to = l->left ? l->to : (char *)&l->in + l->in_got;
    int64_t most = l->left ? l->left : (int64_t)(sizeof l->in - l->in_got);
    if (!to) {
        to = unwanted;
        most = most < (int64_t)sizeof unwanted ? most : (int64_t)sizeof unwanted;
    }
    ssize_t n = recv(l->sockets[SPAR_TCP_DATA], to, (size_t)most, MSG_DONTWAIT);
    if (n <= 0) {
        if (n == 0 || (errno != EAGAIN && errno != EINTR))
            spar_link_end_data(l);
        return SPAR_OK;
    }
    *got = 1;
    l->heard_ns = spar_now_ns();
    if (l->left) {
        l->left -= n;
        l->to = l->to ? l->to + n : NULL;
    } else {
        l->in_got += (size_t)n;
        if (l->in_got < sizeof l->in)
            return SPAR_OK;
        l->in_got = 0;
        l->to = NULL;
        l->left = l->in.following;
        int ahead = (int32_t)(l->in.call - g->call);
        if (ahead > 0 || l->left < 0 || l->left > EAGER_BYTES || (ahead == 0 && !take_call(g, rank)))
            return malformed(g, rank);
    }
    if (!l->left)
        end_bytes(g, rank);
    return SPAR_OK;
}

void spar_link_publish_failure(spar_group *g, int rank)
{
    const control_message *failure = &g->links->links[rank].failure;
    mailbox *box = g->boxes[rank];
    if (failure->status == SPAR_OK || failure->call != g->call || spar_has_reached(&box->published, g->call))
        return;
    box->status = failure->status <= SPAR_INTERNAL ? failure->status : SPAR_INVALID;
    memcpy(box->description.text, failure->text, sizeof failure->text);
    spar_link_set(&box->published, g->call);
}

static void end_control(spar_group *g, int rank)
{
    pthread_mutex_lock(&spar_links_lock);
    spar_close_fd(&g->links->links[rank].sockets[SPAR_TCP_CONTROL]);
    pthread_mutex_unlock(&spar_links_lock);
    g->links->links[rank].heard_ns = spar_now_ns();
    g->news = 1;
}

static void take_control(spar_group *g, int rank)
{
    spar_link *l = &g->links->links[rank];
    mailbox *box = g->boxes[rank];
    control_message *message = &l->control;
    l->control_got = 0;
    if (message->kind == DESCRIBES) {
        memcpy(box->description.text, message->text, sizeof message->text);
        box->description.gathered = message->gathered;
        spar_link_set(&box->described, message->call);
    } else if (message->kind == ENDS && message->status != SPAR_OK) {
        l->failure = *message; /* perhaps of a call that this rank has not begun */
    } else if (message->kind == ENDS) {
        spar_link_set(&box->done, message->call);
    } else if (message->kind == WAITS) {
        l->newest = message->waits;
        l->newest.state = SPAR_CALL_ARRIVED;
        l->newest.op[sizeof l->newest.op - 1] = l->newest.group[sizeof l->newest.group - 1] = 0;
    } else if (message->kind == BREAKS) {
        memcpy(box->reason, message->text, sizeof message->text);
        box->ranks = message->ranks;
        box->broken_call = message->call;
        uint32_t known = message->status > SPAR_OK && message->status <= SPAR_INTERNAL;
        spar_link_set(&box->broken, known ? message->status : SPAR_BROKEN);
        g->news = 1;
    } else {
        end_control(g, rank);
    }
}

void spar_link_receive_control(spar_group *g, int rank)
{
    spar_link *l = &g->links->links[rank];
    while (l->sockets[SPAR_TCP_CONTROL] >= 0) {
        ssize_t n = recv(l->sockets[SPAR_TCP_CONTROL], (char *)&l->control + l->control_got,
                         sizeof l->control - l->control_got, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            end_control(g, rank);
            return;
        }
        l->control_got += (size_t)n;
        if (l->control_got == sizeof l->control)
            take_control(g, rank);
    }
}
