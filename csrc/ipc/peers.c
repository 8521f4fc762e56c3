/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/peer_table.h"

#include "ipc/arena.h"
#include "ipc/handshake.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST_PEERS = 1024 };

pthread_mutex_t spar_peers_lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
    int count;
    spar_peer *peers[MOST_PEERS];
} connected;

/* ---- with the lock held ---- */

void spar_peers_drop_message(spar_kept_message **link)
{
    spar_kept_message *found = *link;
    *link = found->next;
    spar_close_fd(&found->fd);
    free(found);
}

static void drop_messages(spar_peer *peer)
{
    while (peer->kept)
        spar_peers_drop_message(&peer->kept);
}

void spar_peers_close_in_child(void)
{
    for (int i = 0; i < connected.count; i++) {
        spar_close_fd(&connected.peers[i]->socket);
        spar_close_fd(&connected.peers[i]->pidfd);
        drop_messages(connected.peers[i]);
    }
}

static int connection_ended(const spar_peer *peer)
{
    struct pollfd end = {peer->socket, POLLIN, 0};
    return poll(&end, 1, 0) > 0 && end.revents & (POLLHUP | POLLERR);
}

spar_peer *spar_peers_find(const spar_endpoint *endpoint)
{
    for (int i = 0; i < connected.count; i++) {
        spar_peer *peer = connected.peers[i];
        if (peer->base && spar_endpoint_same(&peer->endpoint, endpoint) &&
            (!connection_ended(peer) || spar_peer_is_dead(peer)))
            return peer;
    }
    return NULL;
}

static void drop(spar_peer *peer)
{
    for (int i = 0; i < connected.count; i++)
        if (connected.peers[i] == peer)
            connected.peers[i] = connected.peers[--connected.count];
    spar_close_fd(&peer->socket);
    spar_close_fd(&peer->pidfd);
    drop_messages(peer);
    spar_handshake_unmap(peer);
    free(peer);
}

void spar_peers_sweep_locked(void)
{
    for (int i = connected.count - 1; i >= 0; i--)
        if (connected.peers[i]->groups == 0 && spar_peer_hung_up(connected.peers[i]))
            drop(connected.peers[i]);
}

spar_status spar_peers_add(const spar_peer *peer)
{
    spar_peer *made = connected.count < MOST_PEERS ? malloc(sizeof *made) : NULL;
    if (made) {
        *made = *peer;
        connected.peers[connected.count++] = made;
        return SPAR_OK;
    }
    spar_peer unused = *peer;
    spar_close_fd(&unused.socket);
    spar_close_fd(&unused.pidfd);
    spar_handshake_unmap(&unused);
    return spar_fail(SPAR_TRANSPORT, "no room for another process");
}

/* ---- for groups ---- */

void spar_peers_unmap(spar_peer *peer)
{
    int dead = spar_peer_is_dead(peer);
    pthread_mutex_lock(&spar_peers_lock);
    if (--peer->readers == 0 && dead)
        spar_handshake_unmap(peer);
    pthread_mutex_unlock(&spar_peers_lock);
}

void spar_peers_release(spar_peer *peer)
{
    int dead = spar_peer_is_dead(peer);
    pthread_mutex_lock(&spar_peers_lock);
    if (--peer->groups == 0 && dead)
        drop(peer);
    pthread_mutex_unlock(&spar_peers_lock);
}

void spar_peers_sweep(void)
{
    if (!spar_arena_is_own())
        return; /* a forked child's connections are closed, though the processes live */
    pthread_mutex_lock(&spar_peers_lock);
    spar_peers_sweep_locked();
    pthread_mutex_unlock(&spar_peers_lock);
}

int spar_peer_hung_up(spar_peer *peer)
{
    struct pollfd ends[2] = {{peer->socket, POLLIN, 0}, {peer->pidfd, POLLIN, 0}};
    if (peer->socket < 0)
        return 1; /* what it sent and nobody has taken yet is no hang-up */
    return poll(ends, 2, 0) > 0 && (ends[0].revents & (POLLHUP | POLLERR) || ends[1].revents);
}

int spar_peer_is_dead(spar_peer *peer)
{
    struct pollfd end = {peer->pidfd, POLLIN, 0};
    if (peer->pidfd >= 0)
        return poll(&end, 1, 0) > 0;
    return spar_peer_hung_up(peer) && kill((pid_t)peer->endpoint.pid, 0) != 0 && errno == ESRCH;
}

int spar_peer_died(spar_peer *peer)
{
    struct pollfd end = {peer->pidfd, POLLIN, 0};
    if (peer->pidfd >= 0 && spar_peer_hung_up(peer))
        return poll(&end, 1, 50) > 0;
    return spar_peer_is_dead(peer);
}
