/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/tcp.h"

#include "ipc/peer_table.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static const int64_t LONGEST_NS = 30000000000, STRANGER_NS = 5000000000, PROBE_NS = 500000000;
/* STRANGERS: callers that may be unauthenticated beside the group's. REFUSALS: in a row, after which a rank
 * that does not dial is given up. */
enum { STRANGERS = 16, REFUSALS = 3, SLICE_MS = 50 };

typedef struct {
    char magic[8];
    int32_t from, to, channel, step;
    spar_key challenge, proof; /* the sender's; the proof is over all before it and both challenges */
} greeting;

_Static_assert(sizeof(greeting) == 56, "greetings have no padding");

enum { HELLO = 1, ANSWER, PROOF };

static const char MAGIC[8] = "spartcp";

/* A connection that is being set up. */
typedef struct {
    int fd;   /* -1: there is none */
    int step; /* the greeting that this side awaits; 0: the dialer's connect is under way */
    int from, to, channel;
    int64_t since_ns;
    size_t got;
    greeting in;
    spar_key challenges[2]; /* the dialer's, the answerer's */
} call;

struct spar_tcp_setup {
    int world, rank, listener;
    uint32_t scope; /* of the own address: an interface has another number on each host */
    spar_key secret;
    int ncalls, room;
    call *calls;
    const spar_tcp_endpoint *all; /* of this stage, as what follows */
    const unsigned char *far;
    int (*sockets)[SPAR_TCP_CHANNELS];
};

/* ---- addresses ---- */

static socklen_t to_sockaddr(const spar_tcp_endpoint *from, struct sockaddr_storage *to)
{
    memset(to, 0, sizeof *to);
    if (from->family == AF_INET) {
        struct sockaddr_in *four = (void *)to;
        four->sin_family = AF_INET;
        four->sin_port = from->port;
        memcpy(&four->sin_addr, from->address, sizeof four->sin_addr);
        return sizeof *four;
    }
    struct sockaddr_in6 *six = (void *)to;
    six->sin6_family = AF_INET6;
    six->sin6_port = from->port;
    six->sin6_scope_id = from->scope;
    memcpy(&six->sin6_addr, from->address, sizeof six->sin6_addr);
    return sizeof *six;
}

spar_status spar_tcp_listen(int world, int rank, spar_tcp_endpoint *own, spar_tcp_setup **setup)
{
    struct sockaddr_storage address;
    memset(own, 0, sizeof *own);
    SPAR_TRY(spar_tcp_own_address(own));
    if (getrandom(&own->secret, sizeof own->secret, 0) != sizeof own->secret)
        return spar_fail(SPAR_TRANSPORT, "getrandom: %s", strerror(errno));
    socklen_t size = to_sockaddr(own, &address);
    int fd = socket(own->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int listens = fd >= 0 && bind(fd, (struct sockaddr *)&address, size) == 0 && listen(fd, SOMAXCONN) == 0 &&
                  getsockname(fd, (struct sockaddr *)&address, &size) == 0;
    spar_tcp_setup *made = listens ? calloc(1, sizeof *made) : NULL;
    if (!made) {
        spar_status status = listens ? spar_fail(SPAR_NO_MEMORY, "no memory for a group of %d ranks", world)
                                     : spar_fail(SPAR_TRANSPORT, "a TCP socket: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return status;
    }
    /* the same place in both families */
    own->port = ((const struct sockaddr_in *)(const void *)&address)->sin_port;
    *made = (spar_tcp_setup){
        .world = world, .rank = rank, .listener = fd, .scope = own->scope, .secret = own->secret};
    *setup = made;
    return SPAR_OK;
}

static socklen_t address_of(const spar_tcp_setup *s, int rank, struct sockaddr_storage *to)
{
    spar_tcp_endpoint endpoint = s->all[rank];
    endpoint.scope = endpoint.scope ? s->scope : 0;
    return to_sockaddr(&endpoint, to);
}

/* ---- greetings ---- */

static spar_key pair_key(const spar_tcp_setup *s, const call *c)
{
    const int32_t pair[2] = {c->from, c->to};
    return spar_siphash_pair(&s->all[c->from].secret, &s->all[c->to].secret, pair, sizeof pair);
}

static spar_key prove(const spar_tcp_setup *s, const call *c, const greeting *g)
{
    struct {
        spar_key challenges[2];
        char text[offsetof(greeting, proof)];
    } whole;
    memcpy(whole.challenges, c->challenges, sizeof whole.challenges);
    memcpy(whole.text, g, sizeof whole.text);
    spar_key key = pair_key(s, c);
    return spar_siphash(&key, &whole, sizeof whole);
}

/* Whether it was sent: to a new connection, whose buffer has room. By sendmsg, as calls are: where a sandbox
 * refuses that, the set-up fails, rather than the first call. */
static int greet(const spar_tcp_setup *s, const call *c, int step)
{
    greeting out = {.from = c->from, .to = c->to, .channel = c->channel, .step = step};
    memcpy(out.magic, MAGIC, sizeof MAGIC);
    if (step != PROOF)
        out.challenge = c->challenges[step == ANSWER];
    if (step != HELLO)
        out.proof = prove(s, c, &out);
    struct msghdr message = {.msg_iov = &(struct iovec){&out, sizeof out}, .msg_iovlen = 1};
    return sendmsg(c->fd, &message, MSG_NOSIGNAL) == sizeof out;
}

/* Whether a greeting is the awaited one of this connection; a dialer's first claims who it is. */
static int is_valid(const spar_tcp_setup *s, call *c)
{
    const greeting *in = &c->in;
    if (memcmp(in->magic, MAGIC, sizeof MAGIC) != 0 || in->step != c->step)
        return 0;
    if (c->step == HELLO) {
        if (in->to != s->rank || in->from < 0 || in->from >= s->rank || !s->far[in->from] ||
            in->channel < 0 || in->channel >= SPAR_TCP_CHANNELS)
            return 0;
        c->from = in->from;
        c->to = in->to;
        c->channel = in->channel;
        c->challenges[0] = in->challenge;
        return getrandom(&c->challenges[1], sizeof c->challenges[1], 0) == sizeof c->challenges[1];
    }
    if (in->from != c->from || in->to != c->to || in->channel != c->channel)
        return 0;
    if (c->step == ANSWER)
        c->challenges[1] = in->challenge;
    spar_key proof = prove(s, c, in);
    return spar_key_same(&proof, &in->proof);
}

/* ---- connections that are being set up ---- */

static void drop(call *c)
{
    spar_close_fd(&c->fd);
}

/* The connection is authenticated: it is the pair's. */
static int settle(spar_tcp_setup *s, call *c)
{
    int *slot = &s->sockets[c->from == s->rank ? c->to : c->from][c->channel], on = 1;
    if (*slot >= 0)
        return 0;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    *slot = c->fd;
    c->fd = -1;
    return 1;
}

/* Reads what has come; 0: the connection is over, or invalid. */
static int advance(spar_tcp_setup *s, call *c)
{
    ssize_t n = recv(c->fd, (char *)&c->in + c->got, sizeof c->in - c->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 1;
    if (n <= 0)
        return 0;
    c->got += (size_t)n;
    if (c->got < sizeof c->in)
        return 1;
    c->got = 0;
    if (!is_valid(s, c))
        return 0;
    if (c->step == HELLO) {
        c->step = PROOF;
        return greet(s, c, ANSWER);
    }
    return c->step == ANSWER ? greet(s, c, PROOF) && settle(s, c) : settle(s, c);
}

static spar_status dial(spar_tcp_setup *s, int rank, int channel)
{
    struct sockaddr_storage address;
    socklen_t size = address_of(s, rank, &address);
    call *c = &s->calls[s->ncalls++];
    *c = (call){.from = s->rank, .to = rank, .channel = channel, .since_ns = spar_now_ns()};
    c->fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->fd < 0 || getrandom(&c->challenges[0], sizeof c->challenges[0], 0) != sizeof c->challenges[0])
        return spar_fail(SPAR_TRANSPORT, "a TCP socket: %s", strerror(errno));
    if (connect(c->fd, (struct sockaddr *)&address, size) != 0 && errno != EINPROGRESS)
        return spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d cannot be reached by TCP: %s", rank,
                              strerror(errno));
    return SPAR_OK;
}

/* The dialer's connect has ended. */
static spar_status connected(const spar_tcp_setup *s, call *c)
{
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    c->step = ANSWER;
    if (!error && greet(s, c, HELLO))
        return SPAR_OK;
    return spar_fail_rank(SPAR_TRANSPORT, c->to, "rank %d cannot be reached by TCP: %s", c->to,
                          strerror(error ? error : errno));
}

static spar_status accept_calls(spar_tcp_setup *s)
{
    while (s->ncalls < s->room) {
        int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
            return spar_fail(SPAR_TRANSPORT, "accepting a connection: %s", strerror(errno));
        if (fd < 0) /* the others concern the caller */
            return SPAR_OK;
        s->calls[s->ncalls++] = (call){.fd = fd, .step = HELLO, .since_ns = spar_now_ns()};
    }
    return SPAR_OK;
}

/* Moves each call on; drops those that are over. The dialer's own are to succeed. */
static spar_status step_calls(spar_tcp_setup *s, const struct pollfd *polled, int npolled)
{
    spar_status status = SPAR_OK;
    for (int i = 0; i < s->ncalls && status == SPAR_OK; i++) {
        call *c = &s->calls[i];
        int own = c->step == 0 || c->step == ANSWER; /* this rank dialed */
        int ready = i < npolled && polled[i].revents;
        int lives = c->fd >= 0;
        if (lives && ready && own && c->step == 0)
            status = connected(s, c);
        else if (lives && ready)
            lives = advance(s, c);
        if (status == SPAR_OK && !lives && own && c->fd >= 0)
            status = spar_fail_rank(SPAR_TRANSPORT, c->to, "rank %d refused a TCP connection", c->to);
        if (!lives || (!own && spar_now_ns() - c->since_ns > STRANGER_NS))
            drop(c);
    }
    int kept = 0;
    for (int i = 0; i < s->ncalls; i++)
        if (s->calls[i].fd >= 0)
            s->calls[kept++] = s->calls[i];
    s->ncalls = kept;
    return status;
}

/* A far rank that has not both connections, or -1. */
static int missing(const spar_tcp_setup *s)
{
    for (int rank = 0; rank < s->world; rank++)
        for (int channel = 0; s->far[rank] && channel < SPAR_TCP_CHANNELS; channel++)
            if (s->sockets[rank][channel] < 0)
                return rank;
    return -1;
}

/* Whether a rank that has not dialed does not listen any more, or cannot be reached: why, or 0. */
static int probe(const spar_tcp_setup *s, int rank)
{
    struct sockaddr_storage address;
    socklen_t size = address_of(s, rank, &address), length = sizeof(int);
    int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0;
    if (fd < 0)
        return 0;
    if (connect(fd, (struct sockaddr *)&address, size) != 0)
        error = errno;
    if (error == EINPROGRESS) {
        error = 0;
        if (poll(&(struct pollfd){fd, POLLOUT, 0}, 1, SLICE_MS) > 0)
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    }
    close(fd);
    return error;
}

/* Ends the wait for a rank that failed, or cannot reach this one: it does not dial. One refusal may only mean
 * that its last greeting is on its way. */
static spar_status probe_missing(const spar_tcp_setup *s, int rank, int *refusals)
{
    int error = rank < s->rank ? probe(s, rank) : 0;
    *refusals = error ? *refusals + 1 : 0;
    if (*refusals < REFUSALS)
        return SPAR_OK;
    return spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d cannot be reached by TCP: %s", rank,
                          strerror(error));
}

static spar_status await_all(spar_tcp_setup *s, struct pollfd *polled, const spar_deadline *deadline)
{
    int64_t begin = spar_now_ns(), asked = begin, probed = begin;
    int refusals = 0;
    for (int rank; (rank = missing(s)) >= 0;) {
        int n = 0;
        for (; n < s->ncalls; n++)
            polled[n] = (struct pollfd){s->calls[n].fd, s->calls[n].step == 0 ? POLLOUT : POLLIN, 0};
        polled[n] = (struct pollfd){s->listener, POLLIN, 0};
        poll(polled, (nfds_t)n + (s->ncalls < s->room), SLICE_MS);
        SPAR_TRY(step_calls(s, polled, n));
        SPAR_TRY(accept_calls(s));
        int64_t now = spar_now_ns();
        if (spar_deadline_passed(deadline))
            return spar_fail_rank(SPAR_TIMEOUT, rank, "rank %d did not answer by TCP", rank);
        if (now - begin > LONGEST_NS) /* every process may be alive: fall back rather than wait longer */
            return spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d did not answer by TCP for 30 s", rank);
        if (now - asked > SLICE_MS * 1000000LL) {
            asked = now;
            SPAR_TRY(spar_deadline_poll(deadline, "while ranks connected by TCP"));
        }
        if (now - probed > PROBE_NS) {
            probed = now;
            SPAR_TRY(probe_missing(s, rank, &refusals));
        }
    }
    return SPAR_OK;
}

spar_status spar_tcp_connect(spar_tcp_setup *s, const unsigned char *far, const spar_tcp_endpoint *all,
                             const spar_deadline *deadline, int (*sockets)[SPAR_TCP_CHANNELS])
{
    int count = 0;
    spar_status status = SPAR_OK;
    for (int rank = 0; rank < s->world; rank++) {
        sockets[rank][SPAR_TCP_CONTROL] = sockets[rank][SPAR_TCP_DATA] = -1;
        count += far[rank];
    }
    s->room = SPAR_TCP_CHANNELS * count + STRANGERS;
    s->calls = calloc((size_t)s->room, sizeof *s->calls);
    struct pollfd *polled = calloc((size_t)s->room + 1, sizeof *polled);
    s->far = far;
    s->all = all;
    s->sockets = sockets;
    if (!s->calls || !polled)
        status = spar_fail(SPAR_NO_MEMORY, "no memory for %d connections", s->room);
    for (int rank = 0; rank < s->world && status == SPAR_OK; rank++) {
        if (!far[rank])
            continue;
        if (all[rank].family != AF_INET && all[rank].family != AF_INET6)
            status = spar_fail_rank(SPAR_TRANSPORT, rank, "rank %d published no TCP address", rank);
        for (int channel = 0; rank > s->rank && channel < SPAR_TCP_CHANNELS && status == SPAR_OK; channel++)
            status = dial(s, rank, channel);
    }
    if (status == SPAR_OK)
        status = await_all(s, polled, deadline);
    for (int rank = 0; rank < s->world && status != SPAR_OK; rank++)
        for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++)
            spar_close_fd(&sockets[rank][channel]);
    free(polled);
    return status;
}

void spar_tcp_end(spar_tcp_setup *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->ncalls; i++)
        drop(&s->calls[i]);
    spar_close_fd(&s->listener);
    free(s->calls);
    free(s);
}
