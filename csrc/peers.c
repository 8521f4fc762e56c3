#include "hello.h"

#include "arena.h"
#include "patience.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

enum { MOST_PEERS = 1024 };

static struct {
    pthread_mutex_t lock;
    spar_endpoint own;
    int listener;
    int count;
    spar_peer *peers[MOST_PEERS];
} table = {.lock = PTHREAD_MUTEX_INITIALIZER, .listener = -1};

/* The abstract address of an endpoint; returns its length. */
static socklen_t address_of(const spar_endpoint *endpoint, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "spar-%lld-%016llx",
                     (long long)endpoint->pid, (unsigned long long)endpoint->nonce);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* A forked child must not hold its parent's connections open, nor speak for it. */
static void close_in_child(void)
{
    close_fd(&table.listener);
    for (int i = 0; i < table.count; i++) {
        close_fd(&table.peers[i]->socket);
        close_fd(&table.peers[i]->pidfd);
    }
}

/* With the lock held. */
static spar_status start_listening(void)
{
    struct sockaddr_un address;
    spar_endpoint own = {.pid = getpid(), .nonce = table.own.nonce};
    if (!own.nonce && getrandom(&own.nonce, sizeof own.nonce, 0) != sizeof own.nonce)
        return spar_fail(SPAR_TRANSPORT, "getrandom: %s", strerror(errno));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return spar_fail(SPAR_TRANSPORT, "a socket: %s", strerror(errno));
    socklen_t length = address_of(&own, &address);
    if (bind(fd, (struct sockaddr *)&address, length) != 0 || listen(fd, MOST_PEERS) != 0) {
        spar_status status = spar_fail(SPAR_TRANSPORT, "a listening socket: %s", strerror(errno));
        close(fd);
        return status;
    }
    table.listener = fd;
    table.own = own;
    return SPAR_OK;
}

spar_status spar_peers_listen(spar_endpoint *own)
{
    static int registered;
    spar_status status = SPAR_OK;
    pthread_mutex_lock(&table.lock);
    if (table.own.pid != 0 && table.own.pid != getpid())
        status = spar_fail(SPAR_TRANSPORT,
                           "a forked child cannot exchange: its parent, process %lld, can",
                           (long long)table.own.pid);
    else if (table.listener < 0)
        status = start_listening();
    if (status == SPAR_OK && !registered)
        registered = pthread_atfork(NULL, NULL, close_in_child) == 0;
    *own = status == SPAR_OK ? table.own : (spar_endpoint){0, 0};
    pthread_mutex_unlock(&table.lock);
    return status;
}

static int connection_ended(const spar_peer *peer)
{
    struct pollfd end = {peer->socket, POLLIN, 0};
    return poll(&end, 1, 0) > 0 && end.revents & (POLLHUP | POLLERR);
}

/* Who is known by this endpoint, beside `other`; not by a connection that the living other side gave up, as one
 * that could not map our arena does: groups may hold it for long. With the lock held, as all below. */
static spar_peer *find(const spar_endpoint *endpoint, const spar_peer *other)
{
    for (int i = 0; i < table.count; i++) {
        spar_peer *peer = table.peers[i];
        if (peer == other || peer->state == STRANGER ||
            !spar_endpoint_same(&peer->endpoint, endpoint))
            continue;
        if (peer->state != CONNECTED || !connection_ended(peer) || spar_peer_is_dead(peer))
            return peer;
    }
    return NULL;
}

static spar_peer *add(int socket, int state)
{
    spar_peer *peer = table.count < MOST_PEERS ? calloc(1, sizeof *peer) : NULL;
    if (!peer)
        return NULL;
    peer->socket = socket;
    peer->pidfd = -1;
    peer->state = state;
    peer->since_ns = spar_now_ns();
    table.peers[table.count++] = peer;
    return peer;
}

static void drop(spar_peer *peer)
{
    for (int i = 0; i < table.count; i++)
        if (table.peers[i] == peer)
            table.peers[i] = table.peers[--table.count];
    close_fd(&peer->socket);
    close_fd(&peer->pidfd);
    if (peer->base)
        munmap(peer->base, (size_t)peer->length + SPAR_ARENA_TAIL);
    free(peer);
}

/* A call that came in: served, refused, or not worth an answer. */
static void take_call(spar_peer *peer)
{
    spar_status read = spar_hello_read(peer, &table.own);
    if (read == SPAR_OK && peer->state == STRANGER) {
        if (spar_now_ns() - peer->since_ns > 5000000000LL)
            drop(peer);
        return;
    }
    spar_peer *known = find(&peer->endpoint, peer);
    if (known && known->state == REFUSED) {
        drop(known); /* it tries again */
        known = NULL;
    }
    if (known || peer->endpoint.pid == 0) {
        drop(peer);
    } else if (read != SPAR_OK) {
        spar_hello_refuse(peer->socket, &table.own, peer->reason);
        close_fd(&peer->socket);
        peer->state = REFUSED;
    }
}

/* Forgets those that no group uses and that hung up: they may call again. */
static void sweep(void)
{
    for (int i = table.count - 1; i >= 0; i--) {
        spar_peer *peer = table.peers[i];
        if (peer->state == CONNECTED && peer->groups == 0 && spar_peer_hung_up(peer))
            drop(peer);
    }
}

/* A connection to whoever listens there; -1 and errno. */
static int call(const spar_endpoint *endpoint)
{
    struct sockaddr_un address;
    socklen_t length = address_of(endpoint, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, length) != 0) {
        int why = errno;
        close_fd(&fd);
        errno = why;
    }
    return fd;
}

int spar_peers_watch(const spar_endpoint *endpoint)
{
    int fd = call(endpoint), pidfd = fd >= 0 ? spar_hello_pidfd(fd) : -1;
    close_fd(&fd);
    return pidfd;
}

spar_status spar_peers_dial(const spar_endpoint *endpoint)
{
    spar_status status = SPAR_OK;
    pthread_mutex_lock(&table.lock);
    sweep();
    int lower = table.own.pid < endpoint->pid ||
                (table.own.pid == endpoint->pid && table.own.nonce < endpoint->nonce);
    spar_peer *peer = find(endpoint, NULL);
    if (peer && peer->state == DIALED && connection_ended(peer)) {
        drop(peer); /* a call of an earlier set-up, which the peer could not take */
        peer = NULL;
    }
    if (!lower || peer)
        goto done;
    int fd = call(endpoint);
    if (fd < 0) {
        status = spar_fail(SPAR_TRANSPORT, "process %lld cannot be reached on this host: %s",
                           (long long)endpoint->pid, strerror(errno));
        goto done;
    }
    status = spar_hello_send(fd, &table.own, endpoint);
    if (status == SPAR_OK && !(peer = add(fd, DIALED)))
        status = spar_fail(SPAR_TRANSPORT, "no room for another process");
    if (status == SPAR_OK)
        peer->endpoint = *endpoint;
    else
        close(fd);
done:
    pthread_mutex_unlock(&table.lock);
    return status;
}

/* Without a descriptor for it a call cannot be taken: it ends with the socket that it came to. */
static spar_status refuse_calls(void)
{
    spar_status status = spar_fail(SPAR_TRANSPORT, "taking a call: %s", strerror(errno));
    char reason[128];
    snprintf(reason, sizeof reason, "%s", spar_last_error());
    close_fd(&table.listener);
    start_listening(); /* else at the next set-up */
    return spar_fail(status, "%s", reason);
}

/* Takes calls that came in, and reads the hellos that are there. */
static spar_status look_around(void)
{
    spar_status status = SPAR_OK;
    sweep();
    for (int fd; status == SPAR_OK && table.listener >= 0;) {
        if ((fd = accept4(table.listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
            if (!add(fd, STRANGER))
                close(fd);
        } else if (errno == EMFILE || errno == ENFILE) {
            status = refuse_calls();
        } else {
            break;
        }
    }
    for (int i = table.count - 1; i >= 0; i--) {
        if (table.peers[i]->state == STRANGER)
            take_call(table.peers[i]);
        if (i > table.count) /* two are gone */
            i = table.count;
    }
    return status;
}

spar_status spar_peers_meet(const spar_endpoint *endpoint, spar_peer **result)
{
    *result = NULL;
    pthread_mutex_lock(&table.lock);
    spar_status status = look_around();
    spar_peer *peer = find(endpoint, NULL);
    if (peer && (peer->state == REFUSED ||
                 (peer->state == DIALED && spar_hello_read(peer, &table.own) != SPAR_OK))) {
        status =
            spar_fail(SPAR_TRANSPORT, "process %lld: %s", (long long)endpoint->pid, peer->reason);
        drop(peer);
    } else if (peer && status == SPAR_OK && peer->state == CONNECTED) {
        peer->groups++;
        *result = peer;
    }
    pthread_mutex_unlock(&table.lock);
    return status;
}

void spar_peers_leave(spar_peer *peer)
{
    int dead = spar_peer_is_dead(peer);
    pthread_mutex_lock(&table.lock);
    if (--peer->groups == 0 && dead)
        drop(peer);
    pthread_mutex_unlock(&table.lock);
}

int spar_peer_hung_up(spar_peer *peer)
{
    struct pollfd ends[2] = {{peer->socket, POLLIN, 0}, {peer->pidfd, POLLIN, 0}};
    if (peer->socket < 0)
        return 1;
    return poll(ends, 2, 0) > 0 && (ends[0].revents || ends[1].revents);
}

int spar_peer_is_dead(spar_peer *peer)
{
    struct pollfd end = {peer->pidfd, POLLIN, 0};
    if (peer->pidfd >= 0)
        return poll(&end, 1, 0) > 0;
    return spar_peer_hung_up(peer) && kill((pid_t)peer->endpoint.pid, 0) != 0 && errno == ESRCH;
}
