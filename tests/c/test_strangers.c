/* SPDX-License-Identifier: Apache-2.0 */
/* Strangers that connect while ranks of several hosts set up their connections. */
#include "member.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

static int dial(const spar_tcp_endpoint *endpoint)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = endpoint->port};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT(endpoint->family == AF_INET);
    memcpy(&address.sin_addr, endpoint->address, sizeof address.sin_addr);
    EXPECT(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

static int read_all(int fd, char *bytes, size_t size)
{
    return recv(fd, bytes, size, MSG_WAITALL) == (ssize_t)size;
}

enum { GREETING = 56 };

typedef struct {
    int listener;
    spar_tcp_endpoint to;
    char hello[GREETING], proof[GREETING]; /* as the dialer sent them */
    int fds[2];                            /* of the first connection */
} relay;

/* Passes on the greetings of one connection, and keeps what the dialer says. */
static void pass_on(relay *r)
{
    char answer[GREETING];
    r->fds[0] = accept(r->listener, NULL, NULL);
    r->fds[1] = dial(&r->to);
    EXPECT(read_all(r->fds[0], r->hello, GREETING));
    send_all(r->fds[1], r->hello, GREETING);
    EXPECT(read_all(r->fds[1], answer, GREETING));
    send_all(r->fds[0], answer, GREETING);
    EXPECT(read_all(r->fds[0], r->proof, GREETING));
    send_all(r->fds[1], r->proof, GREETING);
}

/* Passes on the bytes of a connection in one direction, until its end. */
static void *pump_bytes(void *argument)
{
    const int *fds = argument;
    char bytes[4096];
    for (ssize_t n; (n = recv(fds[0], bytes, sizeof bytes, 0)) > 0;)
        send_all(fds[1], bytes, (size_t)n);
    shutdown(fds[1], SHUT_WR);
    return NULL;
}

typedef struct {
    member *member;
    const spar_tcp_endpoint *endpoints;
} seat;

static void *connect_rank(void *argument)
{
    const seat *s = argument;
    connect_member(s->member, s->endpoints);
    return NULL;
}

static void *call_in_thread(void *argument)
{
    EXPECT(!call(argument, EAGER_BYTES));
    return NULL;
}

/* Repeats the greetings of a connection that was authenticated: it is refused, since challenges are new. */
static void replay(const relay *r, const spar_tcp_endpoint *to)
{
    char answer[GREETING];
    int fd = dial(to);
    send_all(fd, r->hello, GREETING);
    EXPECT(read_all(fd, answer, GREETING));
    send_all(fd, r->proof, GREETING);
    EXPECT(recv(fd, answer, 1, 0) <= 0);
    close(fd);
}

static void send_garbage(const spar_tcp_endpoint *to)
{
    char bytes[GREETING];
    for (int i = 0; i < 4; i++) {
        int fd = dial(to);
        memset(bytes, i ? 0xff : 0, sizeof bytes);
        if (i > 1)
            memcpy(bytes, "spartcp", 8);
        send_all(fd, bytes, sizeof bytes);
        EXPECT(recv(fd, bytes, 1, 0) <= 0);
        close(fd);
    }
}

/* Both connections between ranks 0 and 1 pass relays, which are transparent once they have the greetings. */
typedef struct {
    relay relays[SPAR_TCP_CHANNELS];
    pthread_t pumps[SPAR_TCP_CHANNELS][2];
    int back[SPAR_TCP_CHANNELS][2];
} relays;

static void relay_greetings(relays *all, int listener, const spar_tcp_endpoint *to)
{
    for (int i = 0; i < SPAR_TCP_CHANNELS; i++) {
        all->relays[i] = (relay){.listener = listener, .to = *to};
        pass_on(&all->relays[i]);
    }
}

static void relay_bytes(relays *all)
{
    for (int i = 0; i < SPAR_TCP_CHANNELS; i++) {
        relay *r = &all->relays[i];
        all->back[i][0] = r->fds[1];
        all->back[i][1] = r->fds[0];
        EXPECT(pthread_create(&all->pumps[i][0], NULL, pump_bytes, r->fds) == 0);
        EXPECT(pthread_create(&all->pumps[i][1], NULL, pump_bytes, all->back[i]) == 0);
    }
}

static void end_relays(const relays *all)
{
    for (int i = 0; i < SPAR_TCP_CHANNELS; i++)
        for (int way = 0; way < 2; way++)
            pthread_join(all->pumps[i][way], NULL);
    for (int i = 0; i < SPAR_TCP_CHANNELS; i++)
        for (int end = 0; end < 2; end++)
            close(all->relays[i].fds[end]);
}

static void run_threads(void *(*work)(void *argument), void **arguments, int count, pthread_t *threads)
{
    for (int i = 0; i < count; i++)
        EXPECT(pthread_create(&threads[i], NULL, work, arguments[i]) == 0);
}

static void join_threads(const pthread_t *threads)
{
    for (int i = 0; i < MOST; i++)
        pthread_join(threads[i], NULL);
}

/* Strangers contact rank 1 of 3 while it waits for rank 2: that say nothing, send garbage, hang up, or replay
 * the greetings of rank 0. */
static void meet_strangers(void)
{
    enum { SILENT = 8 };
    static member members[MOST];
    static relays all;
    spar_tcp_endpoint endpoints[MOST], relayed[MOST];
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof own;
    pthread_t threads[MOST];
    int silent[SILENT], listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    for (int rank = 0; rank < MOST; rank++) {
        open_member(&members[rank], MOST, rank);
        EXPECT(!spar_tcp_listen(MOST, rank, &endpoints[rank], &members[rank].setup));
    }
    EXPECT(bind(listener, (struct sockaddr *)&own, size) == 0 && listen(listener, SPAR_TCP_CHANNELS) == 0);
    EXPECT(getsockname(listener, (struct sockaddr *)&own, &size) == 0);
    memcpy(relayed, endpoints, sizeof endpoints);
    relayed[1].port = own.sin_port; /* as rank 0 sees it; both are loopback addresses */
    for (int i = 0; i < SILENT; i++)
        silent[i] = dial(&endpoints[1]);
    close(dial(&endpoints[1]));
    seat seats[] = {{&members[0], relayed}, {&members[1], endpoints}, {&members[2], endpoints}};
    run_threads(connect_rank, (void *[]){&seats[0], &seats[1]}, 2, threads);
    relay_greetings(&all, listener, &endpoints[1]);
    for (int i = 0; i < SPAR_TCP_CHANNELS; i++)
        replay(&all.relays[i], &endpoints[1]);
    send_garbage(&endpoints[1]);
    run_threads(connect_rank, (void *[]){&seats[2]}, 1, &threads[2]);
    join_threads(threads);
    relay_bytes(&all);
    run_threads(call_in_thread, (void *[]){&members[0], &members[1], &members[2]}, MOST, threads);
    join_threads(threads);
    for (int rank = 0; rank < MOST; rank++)
        spar_group_close(members[rank].group);
    end_relays(&all);
    for (int i = 0; i < SILENT; i++)
        close(silent[i]);
    close(listener);
}

int test_strangers(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    setenv("GLOO_SOCKET_IFNAME", "lo", 1);
    meet_strangers();
    return 0;
}
