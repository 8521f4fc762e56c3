/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/handshake.h"

#include "ipc/arena.h"
#include "ipc/packets.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

enum { CALL = 1, CHALLENGE, ARENA, REFUSAL, LATER };

typedef struct {
    char magic[8];
    uint64_t kind;
    spar_endpoint from, to;
    spar_key challenge; /* the sender's, in CALL and CHALLENGE */
    int64_t length;     /* the length of the sender's arena, in ARENA */
    char refusal[80];   /* the reason, in REFUSAL */
    spar_key proof;     /* last: over what precedes it; not in CALL and LATER */
} message;

_Static_assert(sizeof(message) == 168, "messages have no padding");

static const char MAGIC[8] = "spar 2";

/* ---- proofs ---- */

spar_key spar_handshake_key(const spar_endpoint *a, const spar_key *secret_a, const spar_endpoint *b,
                            const spar_key *secret_b)
{
    int ordered = a->pid < b->pid || (a->pid == b->pid && a->nonce < b->nonce);
    const spar_endpoint pair[2] = {ordered ? *a : *b, ordered ? *b : *a};
    return spar_siphash_pair(secret_a, secret_b, pair, sizeof pair);
}

static spar_key prove(const spar_handshake *h, const message *m)
{
    struct {
        spar_key challenges[2];
        char text[offsetof(message, proof)];
    } whole;
    memcpy(whole.challenges, h->challenges, sizeof whole.challenges);
    memcpy(whole.text, m, sizeof whole.text);
    return spar_siphash(&h->key, &whole, sizeof whole);
}

static int is_proven(const spar_handshake *h, const spar_endpoint *own, const message *m)
{
    spar_key proof = prove(h, m);
    return spar_endpoint_same(&m->from, &h->other) && spar_endpoint_same(&m->to, own) &&
           spar_key_same(&proof, &m->proof);
}

/* ---- messages ---- */

static message begin(const spar_handshake *h, const spar_endpoint *own, uint64_t kind)
{
    message m = {.kind = kind, .from = *own, .to = h->other};
    memcpy(m.magic, MAGIC, sizeof MAGIC);
    return m;
}

/* Whether it was sent; else errno is set. Avoids sendmsg, which a sandbox may forbid: only descriptors need
 * it. */
static int send_plain(const spar_handshake *h, const message *m)
{
    return send(h->socket, m, sizeof *m, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof *m;
}

static int send_arena(const spar_handshake *h, const spar_endpoint *own)
{
    message m = begin(h, own, ARENA);
    m.length = spar_arena_length();
    m.proof = prove(h, &m);
    errno = spar_packet_send(h->socket, &m, sizeof m, spar_arena_fd());
    return errno == 0;
}

/* Fails as spar_last_error states, and reports that to the peer, which is authenticated. */
static spar_handshake_state refuse(const spar_handshake *h, const spar_endpoint *own)
{
    message m = begin(h, own, REFUSAL);
    snprintf(m.refusal, sizeof m.refusal, "%s", spar_last_error());
    m.proof = prove(h, &m);
    /* If this fails, the peer sees the connection end. */
    send_plain(h, &m);
    return SPAR_HANDSHAKE_REFUSED;
}

/* Peeks at the next message, so that no descriptor is received yet. 1: there is one; 0: not yet; -1: hang-up,
 * or not a valid message. */
static int peek(const spar_handshake *h, message *m)
{
    const int how = MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT;
    ssize_t got = recv(h->socket, m, sizeof *m, how);
    /* Linux may report an end before what the other sent last, a LATER perhaps: as ECONNRESET; and as 0 if
     * that message and the hang-up arrive while this recv, which found no message, returns. */
    for (int again = 0; again < 2 && (got == 0 || (got < 0 && errno == ECONNRESET)); again++)
        got = recv(h->socket, m, sizeof *m, how);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (got != sizeof *m || memcmp(m->magic, MAGIC, sizeof MAGIC) != 0)
        return -1;
    m->refusal[sizeof m->refusal - 1] = 0;
    return 1;
}

/* Receives the peeked message without its descriptors, which the kernel closes. */
static void take(const spar_handshake *h)
{
    char byte;
    if (recv(h->socket, &byte, 1, MSG_DONTWAIT) < 0)
        return; /* it was peeked; if it failed, the next peek fails too */
}

/* ---- arenas ---- */

/* Maps the descriptor if it is an arena that is sealed against shrinking. */
static spar_status map_arena(spar_peer *peer, int fd, int64_t length)
{
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &status) != 0 || length <= 0 ||
        length > INT64_MAX - SPAR_ARENA_TAIL || length % SPAR_ARENA_TAIL ||
        status.st_size != length + SPAR_ARENA_TAIL)
        return spar_fail(SPAR_TRANSPORT, "process %lld sent no sealed arena of %lld bytes",
                         (long long)peer->endpoint.pid, (long long)length);
    size_t whole = (size_t)length + SPAR_ARENA_TAIL;
    void *base = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED)
        return spar_fail(SPAR_TRANSPORT, "mapping %zu bytes: %s", whole, strerror(errno));
    madvise(base, whole, MADV_DONTDUMP);
    peer->base = base;
    peer->length = length;
    return SPAR_OK;
}

static spar_status take_arena(const spar_handshake *h, spar_peer *peer, int64_t length)
{
    message m;
    int fd;
    SPAR_TRY(spar_packet_receive(h->socket, &m, sizeof m, &fd));
    if (fd < 0)
        return spar_fail(SPAR_TRANSPORT, "no descriptor");
    peer->endpoint = h->other;
    spar_status status = map_arena(peer, fd, length);
    close(fd);
    return status;
}

void spar_handshake_unmap(spar_peer *peer)
{
    if (peer->base)
        munmap(peer->base, (size_t)peer->length + SPAR_ARENA_TAIL);
    peer->base = NULL;
}

/* ---- the peer process ---- */

int spar_handshake_same_user(int socket, struct ucred *owner)
{
    socklen_t size = sizeof *owner;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, owner, &size) == 0 && owner->uid == geteuid();
}

int spar_handshake_pidfd(int socket)
{
    struct ucred owner;
    int pidfd;
    socklen_t size = sizeof pidfd;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0)
        return pidfd;
    size = sizeof owner;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &owner, &size) != 0 || owner.pid <= 0)
        return -1;
    return (int)syscall(SYS_pidfd_open, owner.pid, 0);
}

/* ---- the steps ---- */

static int draw(spar_key *challenge)
{
    return getrandom(challenge, sizeof *challenge, 0) == sizeof *challenge;
}

spar_status spar_handshake_call(spar_handshake *h, const spar_endpoint *own)
{
    message m = begin(h, own, CALL);
    if (!draw(&h->challenges[0]))
        return spar_fail(SPAR_TRANSPORT, "getrandom: %s", strerror(errno));
    m.challenge = h->challenges[0];
    if (send_plain(h, &m))
        h->step = CALLED;
    else if (errno != EPIPE && errno != ECONNRESET) /* it hung up: it was full */
        return spar_fail(SPAR_TRANSPORT, "connecting to process %lld: %s", (long long)h->other.pid,
                         strerror(errno));
    return SPAR_OK;
}

spar_handshake_state spar_handshake_read_call(spar_handshake *h, const spar_endpoint *own)
{
    message m;
    int came = peek(h, &m);
    if (came == 0)
        return SPAR_HANDSHAKE_PENDING;
    if (came < 0 || m.kind != CALL || !spar_endpoint_same(&m.to, own))
        return SPAR_HANDSHAKE_DROPPED;
    take(h);
    h->other = m.from;
    h->challenges[0] = m.challenge;
    h->step = CLAIMED;
    return SPAR_HANDSHAKE_PENDING;
}

spar_handshake_state spar_handshake_challenge(spar_handshake *h, const spar_endpoint *own,
                                              const spar_key *key)
{
    message m = begin(h, own, CHALLENGE);
    h->key = *key;
    if (!draw(&h->challenges[1]))
        return SPAR_HANDSHAKE_DROPPED;
    m.challenge = h->challenges[1];
    m.proof = prove(h, &m);
    if (!send_plain(h, &m))
        return SPAR_HANDSHAKE_DROPPED;
    h->step = CHALLENGED;
    return SPAR_HANDSHAKE_PENDING;
}

void spar_handshake_postpone(spar_handshake *h, const spar_endpoint *own)
{
    message m = begin(h, own, LATER);
    if (h->step == ACCEPTED)
        m.from = m.to = (spar_endpoint){0, 0};
    /* If this fails, the peer sees the connection end. */
    send_plain(h, &m);
    close(h->socket);
    h->socket = -1;
}

/* The dialer has read a CHALLENGE. */
static spar_handshake_state offer(spar_handshake *h, const spar_endpoint *own)
{
    take(h);
    h->step = OFFERED;
    if (send_arena(h, own) || errno == EPIPE || errno == ECONNRESET)
        return SPAR_HANDSHAKE_PENDING; /* an answerer that hung up may have sent a LATER or REFUSAL before */
    spar_fail(SPAR_TRANSPORT, "the arena's descriptor could not be sent: %s", strerror(errno));
    return refuse(h, own);
}

static spar_handshake_state step_dialer(spar_handshake *h, const spar_endpoint *own, spar_peer *peer)
{
    message m;
    int came = peek(h, &m);
    if (came == 0)
        return SPAR_HANDSHAKE_PENDING;
    if (came > 0 && m.kind == LATER)
        return SPAR_HANDSHAKE_LATER;
    if (came > 0 && h->step == CALLED)
        h->challenges[1] = m.challenge;
    if (came < 0)
        spar_fail(SPAR_TRANSPORT, "%s", "the process hung up");
    else if (!is_proven(h, own, &m))
        spar_fail(SPAR_TRANSPORT, "authentication failed: it is not part of this job");
    else if (m.kind == CHALLENGE && h->step == CALLED)
        return offer(h, own);
    else if (m.kind == ARENA && h->step == OFFERED)
        return take_arena(h, peer, m.length) == SPAR_OK ? SPAR_HANDSHAKE_CONNECTED : SPAR_HANDSHAKE_REFUSED;
    else
        spar_fail(SPAR_TRANSPORT, "%s", m.kind == REFUSAL ? m.refusal : "an unknown message");
    return SPAR_HANDSHAKE_REFUSED;
}

static spar_handshake_state step_answerer(spar_handshake *h, const spar_endpoint *own, spar_peer *peer)
{
    message m;
    int came = peek(h, &m);
    if (came == 0)
        return SPAR_HANDSHAKE_PENDING;
    if (came < 0 || !is_proven(h, own, &m) || (m.kind != ARENA && m.kind != REFUSAL))
        return SPAR_HANDSHAKE_DROPPED;
    if (m.kind == REFUSAL) {
        spar_fail(SPAR_TRANSPORT, "%s", m.refusal);
        return SPAR_HANDSHAKE_REFUSED;
    }
    if (take_arena(h, peer, m.length) != SPAR_OK)
        return refuse(h, own);
    if (send_arena(h, own))
        return SPAR_HANDSHAKE_CONNECTED;
    spar_fail(SPAR_TRANSPORT, "the arena's descriptor could not be sent: %s", strerror(errno));
    spar_handshake_unmap(peer);
    return refuse(h, own);
}

spar_handshake_state spar_handshake_step(spar_handshake *h, const spar_endpoint *own, spar_peer *peer)
{
    return h->step == CHALLENGED ? step_answerer(h, own, peer) : step_dialer(h, own, peer);
}
