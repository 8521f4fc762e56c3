/* SPDX-License-Identifier: Apache-2.0 */
/* Messages that processes pass to each other, over a pair of sockets, whose other end may send anything. */
#include "ipc/packets.h"
#include "ipc/passing.h"
#include "ipc/peer_table.h"
#include "member.h"
#include "processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MINE = 7, OTHERS = 8 };

typedef struct {
    spar_peer a, b; /* b's messages arrive at a, and a's at b */
} pair;

static pair connect_pair(void)
{
    int sockets[2];
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets) == 0);
    return (pair){{.endpoint.pid = 71, .socket = sockets[0], .pidfd = -1},
                  {.endpoint.pid = 72, .socket = sockets[1], .pidfd = -1}};
}

static int open_descriptors(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    EXPECT(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static void pass(pair *p, uint64_t topic, int64_t number, int fd)
{
    int sent = 0;
    EXPECT(!spar_peer_send(&p->b, topic, number, fd, &sent) && sent);
}

/* The oldest number of a topic at a, with whether it had a descriptor; -1: none came. */
static int64_t take(pair *p, uint64_t topic, int *fd)
{
    int64_t number = -1;
    int came;
    *fd = -1;
    EXPECT(!spar_peer_receive(&p->a, topic, &number, fd, &came));
    EXPECT(came == (number != -1));
    return number;
}

static int64_t number_of(pair *p, uint64_t topic)
{
    int fd;
    int64_t number = take(p, topic, &fd);
    EXPECT(fd == -1);
    return number;
}

static void close_pair(pair *p)
{
    while (p->a.kept)
        spar_peers_drop_message(&p->a.kept);
    close(p->a.socket);
    close(p->b.socket);
}

/* Each topic has its own order; what is for another one waits, and is no hang-up. */
static void test_topics(void)
{
    pair p = connect_pair();
    EXPECT(number_of(&p, MINE) == -1);
    pass(&p, OTHERS, 1, -1);
    pass(&p, MINE, 2, -1);
    pass(&p, OTHERS, 3, -1);
    EXPECT(number_of(&p, MINE) == 2 && number_of(&p, MINE) == -1);
    pass(&p, MINE, 4, -1);
    EXPECT(!spar_peer_hung_up(&p.a));
    EXPECT(number_of(&p, OTHERS) == 1 && number_of(&p, OTHERS) == 3 && number_of(&p, MINE) == 4);
    close(p.b.socket);
    p.b.socket = -1;
    EXPECT(spar_peer_hung_up(&p.a));
    close_pair(&p);
}

/* A descriptor arrives as another one of the same file, closed at an exec; one that nobody takes is closed,
 * too. */
static void test_descriptors(void)
{
    pair p = connect_pair();
    struct stat mine, theirs;
    int fd, before = open_descriptors(), null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    EXPECT(null >= 0);
    pass(&p, MINE, 1, null);
    pass(&p, MINE, 2, null);
    pass(&p, OTHERS, 3, null);
    EXPECT(take(&p, MINE, &fd) == 1 && fd >= 0 && fd != null);
    EXPECT(fstat(null, &mine) == 0 && fstat(fd, &theirs) == 0 && mine.st_ino == theirs.st_ino);
    EXPECT(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    close(fd);
    close(null);
    EXPECT(open_descriptors() == before + 2);
    spar_peer_forget(&p.a, MINE);
    EXPECT(open_descriptors() == before + 1 && number_of(&p, MINE) == -1);
    spar_peer_forget(&p.a, OTHERS);
    EXPECT(open_descriptors() == before);
    close_pair(&p);
}

/* A descriptor for which this process has no room is an error of its topic alone. */
static void test_no_room(void)
{
    pair p = connect_pair();
    int64_t number;
    int fd, came, null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    EXPECT(null >= 0);
    pass(&p, OTHERS, 1, null);
    pass(&p, MINE, 2, -1);
    struct rlimit before = no_more_descriptors();
    EXPECT(number_of(&p, MINE) == 2 && number_of(&p, MINE) == -1);
    EXPECT(setrlimit(RLIMIT_NOFILE, &before) == 0);
    pass(&p, OTHERS, 3, null);
    EXPECT(spar_peer_receive(&p.a, OTHERS, &number, &fd, &came) == SPAR_TRANSPORT && fd == -1);
    EXPECT(strcmp(spar_last_error(), "process 71 sent a descriptor: too many open files") == 0);
    EXPECT(take(&p, OTHERS, &fd) == 3 && close(fd) == 0);
    close(null);
    close_pair(&p);
}

static void expect_refused(pair *p, const char *text)
{
    int64_t number;
    int fd, came, before = open_descriptors();
    EXPECT(spar_peer_receive(&p->a, MINE, &number, &fd, &came) == SPAR_TRANSPORT && !came);
    EXPECT(strcmp(spar_last_error(), text) == 0);
    EXPECT(open_descriptors() == before);
    close_pair(p);
}

/* What is no message is an error, and leaves no descriptor. */
static void test_no_messages(void)
{
    char bytes[24] = "no message";
    int fds[2] = {0, 1};
    char control[CMSG_SPACE(sizeof fds)] = {0};
    struct iovec part = {bytes, sizeof bytes};
    struct msghdr envelope = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&envelope);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(header), fds, sizeof fds);

    pair p = connect_pair();
    EXPECT(spar_packet_send(p.b.socket, bytes, sizeof bytes, 0) == 0);
    expect_refused(&p, "process 71 sent an unknown message");
    for (size_t size = 1; size < 40; size += 30) {
        char other[40] = "spar fd";
        p = connect_pair();
        EXPECT(spar_packet_send(p.b.socket, other, size, 0) == 0);
        expect_refused(&p, "a message of another size");
    }
    p = connect_pair();
    EXPECT(sendmsg(p.b.socket, &envelope, 0) == sizeof bytes);
    expect_refused(&p, "more than one descriptor");
    p = connect_pair();
    for (int i = 0; i < 1025; i++) {
        int64_t number;
        int sent, fd, came;
        EXPECT(!spar_peer_send(&p.b, OTHERS, i, -1, &sent) && sent);
        if (i % 100 == 0)
            EXPECT(!spar_peer_receive(&p.a, MINE, &number, &fd, &came) && !came);
    }
    expect_refused(&p, "process 71 sent more than 1024 messages that no group takes");
}

/* A queue that is full takes no message, nor does a peer that hung up: both are no error. */
static void test_full(void)
{
    pair p = connect_pair();
    int sent = 1, count = 0;
    for (; sent; count += sent)
        EXPECT(!spar_peer_send(&p.b, MINE, count, -1, &sent));
    EXPECT(count > 2 && number_of(&p, MINE) == 0);
    EXPECT(!spar_peer_send(&p.b, MINE, 0, -1, &sent) && sent);
    close(p.a.socket);
    EXPECT(!spar_peer_send(&p.b, MINE, 0, -1, &sent) && !sent && spar_peer_hung_up(&p.b));
    int socket = p.b.socket;
    p.b.socket = open("/dev/null", O_RDONLY | O_CLOEXEC);
    EXPECT(spar_peer_send(&p.b, MINE, 0, -1, &sent) == SPAR_TRANSPORT && !sent);
    EXPECT(strncmp(spar_last_error(), "sending to process 72: ", 23) == 0);
    close(p.b.socket);
    p.b.socket = socket;
    p.a.socket = -1;
    close_pair(&p);
}

int test_passing(int argc, char **argv)
{
    (void)argc, (void)argv;
    test_topics();
    test_descriptors();
    test_no_room();
    test_no_messages();
    test_full();
    return 0;
}
