/* What two processes tell each other when they connect: who they are, and the descriptor of their arena. */
#include "hello.h"

#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
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

typedef struct {
    char magic[8];
    spar_endpoint from, to;
    int64_t length;   /* of the sender's arena, whose descriptor comes along */
    char refusal[80]; /* else: why not */
} hello;

static const char MAGIC[8] = "spar 1";

spar_status spar_hello_send(int socket, const spar_endpoint *own, const spar_endpoint *to)
{
    hello words = {.from = *own, .to = *to, .length = spar_arena_length()};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&words, sizeof words};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    int fd = spar_arena_fd();
    memcpy(words.magic, MAGIC, sizeof MAGIC);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (sendmsg(socket, &message, MSG_NOSIGNAL) != sizeof words)
        return spar_fail(SPAR_TRANSPORT, "the arena's descriptor could not be sent: %s",
                         strerror(errno));
    return SPAR_OK;
}

void spar_hello_refuse(int socket, const spar_endpoint *own, const char *reason)
{
    hello words = {.from = *own};
    memcpy(words.magic, MAGIC, sizeof MAGIC);
    snprintf(words.refusal, sizeof words.refusal, "%s", reason);
    if (send(socket, &words, sizeof words, MSG_NOSIGNAL) < 0)
        return; /* then it sees the connection end */
}

/* Maps what the descriptor is of, if it is an arena that cannot shrink under us. */
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

int spar_hello_pidfd(int socket)
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

static spar_status check_owner(spar_peer *peer)
{
    struct ucred owner;
    socklen_t size = sizeof owner;
    if (getsockopt(peer->socket, SOL_SOCKET, SO_PEERCRED, &owner, &size) != 0)
        return spar_fail(SPAR_TRANSPORT, "SO_PEERCRED: %s", strerror(errno));
    if (owner.uid != getuid())
        return spar_fail(SPAR_TRANSPORT, "process %d belongs to user %d, this one to user %d",
                         (int)owner.pid, (int)owner.uid, (int)getuid());
    peer->pidfd = spar_hello_pidfd(peer->socket);
    return SPAR_OK;
}

/* What is wrong with words that came, or NULL. A stranger is told of nobody. */
static const char *find_fault(const spar_peer *peer, const spar_endpoint *own, const hello *words,
                              ssize_t got, int flags, int descriptors)
{
    if (got == 0)
        return "the process hung up";
    if (got < 0)
        return strerror(errno);
    if (got != sizeof *words || memcmp(words->magic, MAGIC, sizeof MAGIC) != 0)
        return "not spar's words";
    if (peer->state == DIALED && words->refusal[0])
        return words->refusal;
    if (!spar_endpoint_same(&words->to, own) ||
        (peer->state == DIALED && !spar_endpoint_same(&words->from, &peer->endpoint)))
        return "words for another process";
    if (descriptors == 1)
        return NULL;
    return flags & MSG_CTRUNC ? "the arena's descriptor could not be received: too many open files"
                              : "no descriptor";
}

spar_status spar_hello_read(spar_peer *peer, const spar_endpoint *own)
{
    hello words = {.magic = ""};
    char control[CMSG_SPACE(sizeof(int) * 4)];
    struct iovec part = {&words, sizeof words};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    ssize_t got = recvmsg(peer->socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return SPAR_OK;
    words.refusal[sizeof words.refusal - 1] = 0;
    int fds[4], count = 0;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); got > 0 && h; h = CMSG_NXTHDR(&message, h))
        if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS)
            for (size_t at = 0; count < 4 && CMSG_LEN(at + sizeof(int)) <= h->cmsg_len;
                 at += sizeof(int))
                memcpy(&fds[count++], CMSG_DATA(h) + at, sizeof(int));
    spar_status status = SPAR_OK;
    int answers = peer->state == STRANGER;
    const char *fault = find_fault(peer, own, &words, got, message.msg_flags, count);
    if (spar_endpoint_same(&words.to, own))
        peer->endpoint = words.from;
    if (fault)
        status = spar_fail(SPAR_TRANSPORT, "%s", fault);
    if (status == SPAR_OK)
        status = check_owner(peer);
    if (status == SPAR_OK)
        status = map_arena(peer, fds[0], words.length);
    if (status == SPAR_OK && answers)
        status = spar_hello_send(peer->socket, own, &peer->endpoint);
    if (status == SPAR_OK)
        peer->state = CONNECTED;
    else
        snprintf(peer->reason, sizeof peer->reason, "%s", spar_last_error());
    while (count)
        close(fds[--count]);
    return status;
}
