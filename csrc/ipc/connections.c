/* SPDX-License-Identifier: Apache-2.0 */
/* Connects processes of this host: the listener, the processes that set-ups expect, and the callers. */
#include "base/fork.h"
#include "ipc/handshake.h"
#include "base/deadline.h"
#include "ipc/peer_table.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/un.h>
#include <unistd.h>

enum { MOST_EXPECTED = 1024, MOST_CALLERS = 8, BACKLOG = 128 };

static const int64_t CALLER_NS = 5000000000, REDIAL_NS = 1000000;

/* An expected process. */
typedef struct {
    spar_endpoint endpoint;
    spar_key key;
    int setups;               /* set-ups that expect it */
    spar_handshake handshake; /* this side's, if it dials */
    char failure[80];         /* why the newest handshake failed; empty: running or not begun */
} expected;

static struct {
    spar_endpoint own;
    spar_key secret;
    int listener;
    int nexpected, ncallers;
    expected *expected[MOST_EXPECTED];
    spar_handshake callers[MOST_CALLERS]; /* accepted, not authenticated */
    int64_t foreign, unproven;
} table = {.listener = -1}; /* under spar_peers_lock */

/* The abstract address of an endpoint; returns its length. */
static socklen_t address_of(const spar_endpoint *endpoint, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "spar-%lld-%016llx",
                     (long long)endpoint->pid, (unsigned long long)endpoint->nonce);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* A forked child must neither hold its parent's connections open nor answer for it. */
static void close_in_child(void)
{
    spar_close_fd(&table.listener);
    spar_peers_close_in_child();
    for (int i = 0; i < table.nexpected; i++)
        spar_close_fd(&table.expected[i]->handshake.socket);
    while (table.ncallers)
        spar_close_fd(&table.callers[--table.ncallers].socket);
}

/* Requires the lock, as all functions below do but those of peers.h. */
static spar_status start_listening(void)
{
    struct sockaddr_un address;
    spar_endpoint own = {.pid = getpid(), .nonce = table.own.nonce};
    if (!own.nonce && (getrandom(&own.nonce, sizeof own.nonce, 0) != sizeof own.nonce ||
                       getrandom(&table.secret, sizeof table.secret, 0) != sizeof table.secret))
        return spar_fail(SPAR_TRANSPORT, "getrandom: %s", strerror(errno));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return spar_fail(SPAR_TRANSPORT, "a socket: %s", strerror(errno));
    socklen_t length = address_of(&own, &address);
    if (bind(fd, (struct sockaddr *)&address, length) != 0 || listen(fd, BACKLOG) != 0) {
        spar_status status = spar_fail(SPAR_TRANSPORT, "a listening socket: %s", strerror(errno));
        close(fd);
        return status;
    }
    table.listener = fd;
    table.own = own;
    return SPAR_OK;
}

spar_status spar_peers_listen(spar_endpoint *own, spar_key *secret)
{
    spar_status status = SPAR_OK;
    pthread_mutex_lock(&spar_peers_lock);
    if (table.own.pid != 0 && table.own.pid != getpid())
        status = spar_fail(SPAR_TRANSPORT, "this is a forked child; exchange in its parent, process %lld",
                           (long long)table.own.pid);
    else if (table.listener < 0)
        status = start_listening();
    *own = status == SPAR_OK ? table.own : (spar_endpoint){0, 0};
    *secret = status == SPAR_OK ? table.secret : (spar_key){{0}};
    pthread_mutex_unlock(&spar_peers_lock);
    return status;
}

/* ---- dialing ---- */

/* Polls a handshake once; adds the peer when it is connected. */
static spar_handshake_state step(spar_handshake *handshake)
{
    spar_peer peer = {.key = handshake->key};
    spar_handshake_state state = spar_handshake_step(handshake, &table.own, &peer);
    if (state != SPAR_HANDSHAKE_CONNECTED)
        return state;
    peer.socket = handshake->socket;
    peer.pidfd = spar_handshake_pidfd(handshake->socket);
    handshake->socket = -1;
    return spar_peers_add(&peer) == SPAR_OK ? SPAR_HANDSHAKE_CONNECTED : SPAR_HANDSHAKE_REFUSED;
}

static expected *find_expected(const spar_endpoint *endpoint)
{
    for (int i = 0; i < table.nexpected; i++)
        if (spar_endpoint_same(&table.expected[i]->endpoint, endpoint))
            return table.expected[i];
    return NULL;
}

/* Connects to the endpoint's listener; 0, or errno. */
static int connect_to(int fd, const spar_endpoint *endpoint)
{
    struct sockaddr_un address;
    socklen_t length = address_of(endpoint, &address);
    return connect(fd, (struct sockaddr *)&address, length) == 0 ? 0 : errno;
}

/* Connects a new handshake's socket; the step stays CONNECTING if the process is to be dialed again. */
static spar_status start_handshake(expected *e)
{
    spar_handshake *h = &e->handshake;
    struct ucred owner = {0};
    int why = connect_to(h->socket, &e->endpoint);
    if (why == EAGAIN)
        return SPAR_OK;
    if (why)
        return spar_fail(SPAR_TRANSPORT, "process %lld cannot be reached on this host: %s",
                         (long long)e->endpoint.pid, strerror(why));
    if (!spar_handshake_same_user(h->socket, &owner))
        return spar_fail(SPAR_TRANSPORT, "process %d belongs to user %d, this one to user %d", (int)owner.pid,
                         (int)owner.uid, (int)geteuid());
    return spar_handshake_call(h, &table.own);
}

static spar_status dial(expected *e)
{
    spar_close_fd(&e->handshake.socket);
    e->handshake =
        (spar_handshake){.other = e->endpoint, .key = e->key, .step = CONNECTING, .since_ns = spar_now_ns()};
    e->handshake.socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (e->handshake.socket < 0)
        return spar_fail(SPAR_TRANSPORT, "a socket: %s", strerror(errno));
    spar_status status = start_handshake(e);
    if (status != SPAR_OK)
        spar_close_fd(&e->handshake.socket);
    return status;
}

/* Records that the newest handshake failed, as spar_last_error states. */
static void note_failure(expected *e)
{
    snprintf(e->failure, sizeof e->failure, "%s", spar_last_error());
    spar_close_fd(&e->handshake.socket);
}

static void step_expected(expected *e)
{
    int waited = spar_now_ns() - e->handshake.since_ns >= REDIAL_NS;
    spar_handshake_state state = e->handshake.step == CONNECTING ? SPAR_HANDSHAKE_LATER : step(&e->handshake);
    if (state == SPAR_HANDSHAKE_LATER && waited && dial(e) != SPAR_OK)
        state = SPAR_HANDSHAKE_REFUSED;
    if (state == SPAR_HANDSHAKE_REFUSED)
        note_failure(e);
}

static expected *add_expected(const spar_endpoint *endpoint, const spar_key *key)
{
    expected *e = table.nexpected < MOST_EXPECTED ? calloc(1, sizeof *e) : NULL;
    if (!e)
        return NULL;
    e->endpoint = *endpoint;
    e->key = *key;
    e->handshake.socket = -1;
    table.expected[table.nexpected++] = e;
    return e;
}

/* ---- callers ---- */

/* Drops a caller, which may dial again. */
static void postpone(int i)
{
    spar_handshake_postpone(&table.callers[i], &table.own);
    table.callers[i] = table.callers[--table.ncallers];
}

static void end_expected(expected *e)
{
    if (--e->setups)
        return;
    for (int i = 0; i < table.nexpected; i++)
        if (table.expected[i] == e)
            table.expected[i] = table.expected[--table.nexpected];
    spar_close_fd(&e->handshake.socket);
    free(e);
    while (table.nexpected == 0 && table.ncallers)
        postpone(0);
}

static spar_handshake_state step_caller(spar_handshake *caller)
{
    spar_handshake_state state = SPAR_HANDSHAKE_PENDING;
    if (caller->step == ACCEPTED)
        state = spar_handshake_read_call(caller, &table.own);
    expected *e = caller->step == ACCEPTED ? NULL : find_expected(&caller->other);
    if (e && caller->step == CLAIMED)
        return spar_handshake_challenge(caller, &table.own, &e->key);
    if (!e || caller->step != CHALLENGED)
        return state;
    if (spar_peers_find(&caller->other))
        return SPAR_HANDSHAKE_DROPPED; /* one connection serves all groups */
    state = step(caller);
    if (state ==
        SPAR_HANDSHAKE_CONNECTED) /* the failure to report if the connection ends before it is used */
        snprintf(e->failure, sizeof e->failure, "the process hung up");
    if (state == SPAR_HANDSHAKE_REFUSED)
        note_failure(e);
    return state;
}

/* Polls a caller once; may drop it and move the last one into its place. */
static void poll_caller(int i)
{
    spar_handshake *caller = &table.callers[i];
    spar_handshake_state state = step_caller(caller);
    table.unproven += state == SPAR_HANDSHAKE_DROPPED;
    if (state != SPAR_HANDSHAKE_PENDING) {
        spar_close_fd(&caller->socket);
        *caller = table.callers[--table.ncallers];
    } else if (spar_now_ns() - caller->since_ns > CALLER_NS) {
        table.unproven++;
        postpone(i);
    }
}

/* Adds an accepted connection; closes it unread if it is another user's. */
static void accept_caller(int fd)
{
    struct ucred owner;
    int oldest = 0;
    if (!spar_handshake_same_user(fd, &owner)) {
        table.foreign++;
        close(fd);
        return;
    }
    for (int i = 1; i < table.ncallers; i++)
        if (table.callers[i].since_ns < table.callers[oldest].since_ns)
            oldest = i;
    if (table.ncallers == MOST_CALLERS)
        postpone(oldest);
    table.callers[table.ncallers++] =
        (spar_handshake){.socket = fd, .step = ACCEPTED, .since_ns = spar_now_ns()};
    poll_caller(table.ncallers - 1);
}

/* Without a free descriptor no connection can be accepted: replacing the listener drops the pending ones. */
static spar_status reset_listener(void)
{
    spar_status status = spar_fail(SPAR_TRANSPORT, "accepting a connection: %s", strerror(errno));
    char reason[128];
    snprintf(reason, sizeof reason, "%s", spar_last_error());
    spar_close_fd(&table.listener);
    /* If this fails, the next set-up tries again. */
    start_listening();
    return spar_fail(status, "%s", reason);
}

/* Accepts pending connections, at most a backlog of them. */
static spar_status accept_callers(void)
{
    /* accept4 alone would fail for lack of a descriptor even if no process connects */
    struct pollfd calls = {table.listener, POLLIN, 0};
    for (int taken = 0; taken <= BACKLOG && poll(&calls, 1, 0) > 0; taken++) {
        int fd = accept4(table.listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            accept_caller(fd);
        else if (errno == EMFILE || errno == ENFILE)
            return reset_listener();
        else
            break;
    }
    return SPAR_OK;
}

/* Polls all handshakes once. */
static spar_status poll_handshakes(void)
{
    for (int i = table.ncallers - 1; i >= 0; i--)
        poll_caller(i);
    for (int i = 0; i < table.nexpected; i++)
        if (table.expected[i]->handshake.socket >= 0)
            step_expected(table.expected[i]);
    return accept_callers();
}

/* ---- for set-ups ---- */

spar_status spar_peers_expect(const spar_endpoint *endpoint, const spar_key *secret)
{
    spar_status status = SPAR_OK;
    pthread_mutex_lock(&spar_peers_lock);
    spar_peers_sweep_locked();
    spar_key key = spar_handshake_key(&table.own, &table.secret, endpoint, secret);
    spar_peer *peer = spar_peers_find(endpoint);
    expected *e = find_expected(endpoint);
    if (!e)
        e = add_expected(endpoint, &key);
    int lower = table.own.pid < endpoint->pid ||
                (table.own.pid == endpoint->pid && table.own.nonce < endpoint->nonce);
    if (e)
        e->setups++;
    if (!e)
        status = spar_fail(SPAR_TRANSPORT, "no room for another process");
    else if (!spar_key_same(&e->key, &key) || (peer && !spar_key_same(&peer->key, &key)))
        status =
            spar_fail(SPAR_TRANSPORT, "process %lld is known with another secret", (long long)endpoint->pid);
    else if (lower && !peer && e->handshake.socket < 0)
        status = dial(e);
    if (e && status == SPAR_OK)
        e->failure[0] = 0;
    else if (e)
        end_expected(e);
    pthread_mutex_unlock(&spar_peers_lock);
    return status;
}

spar_status spar_peers_poll(const spar_endpoint *endpoint, spar_peer **result)
{
    spar_status status = SPAR_OK;
    pthread_mutex_lock(&spar_peers_lock);
    spar_peer *peer = spar_peers_find(endpoint);
    expected *e = find_expected(endpoint);
    if (!e)
        status = spar_fail(SPAR_TRANSPORT, "process %lld is not expected", (long long)endpoint->pid);
    else if (!peer && (status = poll_handshakes()) == SPAR_OK && !(peer = spar_peers_find(endpoint)) &&
             e->failure[0])
        status = spar_fail(SPAR_TRANSPORT, "process %lld: %s", (long long)endpoint->pid, e->failure);
    *result = status == SPAR_OK ? peer : NULL;
    if (*result) {
        peer->groups++;
        peer->readers++;
    }
    pthread_mutex_unlock(&spar_peers_lock);
    return status;
}

void spar_peers_end(const spar_endpoint *endpoint)
{
    pthread_mutex_lock(&spar_peers_lock);
    expected *e = find_expected(endpoint);
    if (e)
        end_expected(e);
    pthread_mutex_unlock(&spar_peers_lock);
}

spar_peers_counts spar_peers_count(void)
{
    pthread_mutex_lock(&spar_peers_lock);
    spar_peers_counts counts = {table.foreign, table.unproven, table.ncallers};
    pthread_mutex_unlock(&spar_peers_lock);
    return counts;
}

void spar_peers_fork(spar_fork_stage stage)
{
    if (stage == SPAR_FORK_PREPARE)
        pthread_mutex_lock(&spar_peers_lock);
    if (stage == SPAR_FORK_CHILD)
        close_in_child();
    if (stage != SPAR_FORK_PREPARE)
        pthread_mutex_unlock(&spar_peers_lock);
}
