/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/passing.h"

#include "ipc/packets.h"
#include "ipc/peer_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { MOST_KEPT = 1024 }; /* messages of a peer */

static const char MAGIC[8] = "spar fd";

spar_status spar_peer_send(spar_peer *peer, uint64_t topic, int64_t number, int fd, int *sent)
{
    spar_message m = {.topic = topic, .number = number};
    memcpy(m.magic, MAGIC, sizeof MAGIC);
    pthread_mutex_lock(&spar_peers_lock);
    int why = peer->socket < 0 ? EPIPE : spar_packet_send(peer->socket, &m, sizeof m, fd);
    pthread_mutex_unlock(&spar_peers_lock);
    *sent = why == 0;
    if (why == 0 || why == EAGAIN || why == EINTR || why == ETOOMANYREFS || why == EPIPE || why == ECONNRESET)
        return SPAR_OK; /* ETOOMANYREFS: too many descriptors are on their way */
    return spar_fail(SPAR_TRANSPORT, "sending to process %lld: %s", (long long)peer->endpoint.pid,
                     strerror(why));
}

/* Receives the packets that have come. Requires the lock. */
static spar_status receive_all(spar_peer *peer)
{
    char byte;
    int count = 0;
    spar_kept_message **end = &peer->kept;
    for (; *end; end = &(*end)->next)
        count++;
    while (peer->socket >= 0 && recv(peer->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0) {
        spar_kept_message *kept = count++ < MOST_KEPT ? calloc(1, sizeof *kept) : NULL;
        if (!kept)
            return spar_fail(SPAR_TRANSPORT, "process %lld sent more than %d messages that no group takes",
                             (long long)peer->endpoint.pid, MOST_KEPT);
        spar_status status = spar_packet_receive(peer->socket, &kept->what, sizeof kept->what, &kept->fd);
        int is_message = memcmp(kept->what.magic, MAGIC, sizeof MAGIC) == 0;
        if (status == SPAR_OK && !is_message)
            status = spar_fail(SPAR_TRANSPORT, "process %lld sent an unknown message",
                               (long long)peer->endpoint.pid);
        if (!is_message) {
            spar_close_fd(&kept->fd);
            free(kept);
            return status;
        }
        kept->lost = status != SPAR_OK; /* a failure of the group that waits for it */
        *end = kept;
        end = &kept->next;
    }
    return SPAR_OK;
}

/* The link to the oldest message of the topic. Requires the lock. */
static spar_kept_message **find(spar_peer *peer, uint64_t topic)
{
    spar_kept_message **link = &peer->kept;
    while (*link && (*link)->what.topic != topic)
        link = &(*link)->next;
    return link;
}

spar_status spar_peer_receive(spar_peer *peer, uint64_t topic, int64_t *number, int *fd, int *came)
{
    pthread_mutex_lock(&spar_peers_lock);
    spar_status status = receive_all(peer);
    spar_kept_message **link = find(peer, topic), *found = *link;
    *came = found != NULL;
    if (found) {
        *link = found->next;
        *number = found->what.number;
        *fd = found->fd;
        /* Another message may be wrong, and is reported when it is due. */
        status = !found->lost
                     ? SPAR_OK
                     : spar_fail(SPAR_TRANSPORT, "process %lld sent a descriptor: too many open files",
                                 (long long)peer->endpoint.pid);
    }
    pthread_mutex_unlock(&spar_peers_lock);
    free(found);
    return status;
}

void spar_peer_forget(spar_peer *peer, uint64_t topic)
{
    spar_kept_message **link;
    pthread_mutex_lock(&spar_peers_lock);
    while (*(link = find(peer, topic)))
        spar_peers_drop_message(link);
    pthread_mutex_unlock(&spar_peers_lock);
}
