/* SPDX-License-Identifier: Apache-2.0 */
/* Groups whose ranks share no memory: calls over TCP between threads of one process, a far rank that does not
 * keep to the protocol, and strangers that connect during the set-up.
 *
 * test_links calls WORLD | hostile | full | strangers */
#include "base/siphash.h"
#include "control/control.h"
#include "ipc/tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { MOST = 3, EAGER_BYTES = 32768, LARGE = 3000000, GUARD = 64 };

static const int64_t LONG_NS = 30000000000, SHORT_NS = 500000000;

static _Noreturn void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

static spar_deadline after(int64_t ns)
{
    return (spar_deadline){.at_ns = spar_now_ns() + ns};
}

static int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- a rank ---- */

typedef struct {
    int world, rank;
    uint32_t call; /* the number of the last one that began */
    spar_group *group;
    int64_t offset;
    spar_tcp_setup *setup;
    int sockets[MOST][SPAR_TCP_CHANNELS];
    spar_parcel parcels[MOST];
    int arrived[MOST]; /* how often each rank's bytes were announced in the call */
} member;

static void open_member(member *m, int world, int rank)
{
    *m = (member){.world = world, .rank = rank};
    EXPECT(!spar_arena_open(1 << 24, 1));
    EXPECT(!spar_group_open(world, rank, 0, &m->group, &m->offset));
}

static void far_of(const member *m, unsigned char *far)
{
    for (int rank = 0; rank < m->world; rank++)
        far[rank] = rank != m->rank;
}

/* The group owns the sockets from now on. */
static void link_member(member *m)
{
    unsigned char far[MOST];
    int64_t pids[MOST] = {101, 102, 103}, offsets[MOST] = {0};
    spar_peer *peers[MOST] = {NULL};
    far_of(m, far);
    EXPECT(!spar_group_link(m->group, far, pids, m->sockets));
    EXPECT(!spar_group_attach(m->group, peers, offsets));
}

static void connect_member(member *m, const spar_tcp_endpoint *endpoints)
{
    unsigned char far[MOST];
    spar_deadline deadline = after(LONG_NS);
    far_of(m, far);
    EXPECT(!spar_tcp_connect(m->setup, far, endpoints, &deadline, m->sockets));
    spar_tcp_end(m->setup);
    link_member(m);
}

static void fill(unsigned char *bytes, int64_t size, int from, int to, uint32_t call)
{
    for (int64_t i = 0; i < size; i++)
        bytes[i] = (unsigned char)(i * 7 + i / 251 + from * 31 + to * 17 + call * 3);
}

static unsigned char *with_guards(int64_t size)
{
    unsigned char *bytes = malloc((size_t)size + 2 * GUARD);
    EXPECT(bytes != NULL);
    memset(bytes, 0xee, (size_t)size + 2 * GUARD);
    return bytes + GUARD;
}

static void free_with_guards(const void *address, int64_t size)
{
    const unsigned char *bytes = address;
    for (int i = 0; i < GUARD; i++)
        EXPECT(bytes[-1 - i] == 0xee && bytes[size + i] == 0xee);
    free((void *)(uintptr_t)(bytes - GUARD));
}

static void take_parcel(void *context, int rank)
{
    member *m = context;
    m->arrived[rank]++;
}

static void describe(const void *call, char *text, size_t size, spar_gathered *gathered)
{
    memset(gathered, 0, sizeof *gathered);
    snprintf(text, size, "%s", (const char *)call);
}

static spar_status move_bytes(member *m, int64_t bytes, uint64_t signature, const spar_deadline *deadline)
{
    spar_call_header header = {.signature = signature, .op = "gather"}, all[MOST];
    char text[64];
    snprintf(text, sizeof text, "rank %d moves %lld bytes", m->rank, (long long)bytes);
    spar_group_carry(m->group, m->parcels);
    SPAR_TRY(spar_group_publish(m->group, &header, describe, text, all, deadline));
    SPAR_TRY(spar_group_transfer(m->group, take_parcel, m, deadline));
    return spar_group_finish(m->group, deadline);
}

/* Makes a call that moves `bytes` bytes between each pair of ranks. If it succeeds, they must have arrived;
 * if it fails, the memory belongs to the caller again. */
static spar_status call_for(member *m, int64_t bytes, uint64_t signature, int64_t limit_ns)
{
    spar_deadline deadline = after(limit_ns);
    pthread_mutex_lock(spar_group_lock(m->group));
    spar_status status = spar_group_begin(m->group, &deadline, &m->call);
    if (status == SPAR_OK) {
        for (int rank = 0; rank < m->world; rank++) {
            unsigned char *out = with_guards(bytes);
            m->arrived[rank] = 0;
            fill(out, bytes, m->rank, rank, m->call);
            m->parcels[rank] = (spar_parcel){out, with_guards(bytes), bytes, bytes};
        }
        status = move_bytes(m, bytes, signature, &deadline);
        unsigned char *expected = malloc((size_t)bytes + 1);
        for (int rank = 0; rank < m->world; rank++) {
            fill(expected, bytes, rank, m->rank, m->call);
            int is_far = rank != m->rank;
            EXPECT(status != SPAR_OK || m->arrived[rank] == is_far);
            EXPECT(status != SPAR_OK || !is_far || memcmp(m->parcels[rank].in, expected, (size_t)bytes) == 0);
            free_with_guards(m->parcels[rank].out, bytes);
            free_with_guards(m->parcels[rank].in, bytes);
        }
        free(expected);
    }
    pthread_mutex_unlock(spar_group_lock(m->group));
    return status;
}

static spar_status call(member *m, int64_t bytes)
{
    return call_for(m, bytes, 1, LONG_NS);
}

/* ---- ranks that keep to the protocol ---- */

typedef struct {
    pthread_barrier_t barrier;
    int world;
    spar_tcp_endpoint endpoints[MOST];
    member members[MOST];
} world;

static void join(world *w, int rank)
{
    member *m = &w->members[rank];
    open_member(m, w->world, rank);
    EXPECT(!spar_tcp_listen(w->world, rank, &w->endpoints[rank], &m->setup));
    pthread_barrier_wait(&w->barrier);
    connect_member(m, w->endpoints);
}

static void call_all_sizes(member *m)
{
    static const int64_t sizes[] = {0, 100, EAGER_BYTES, EAGER_BYTES + 1, LARGE};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    for (int i = 0; i < 4 * SIZES; i++) {
        if (i % 7 == m->rank) /* a rank that is late */
            nanosleep(&(struct timespec){0, 2000000}, NULL);
        EXPECT(!call(m, sizes[i % SIZES]));
    }
}

/* Rank 0 makes another call: all raise it, with each rank's description, and make further calls. */
static void call_differently(member *m)
{
    static const int64_t sizes[] = {100, LARGE};
    for (int i = 0; i < 4; i++) {
        int64_t bytes = sizes[i % 2];
        EXPECT(call_for(m, m->rank ? bytes : bytes + 5, m->rank ? 2 : 3, LONG_NS) == SPAR_MISMATCH);
        for (int rank = 0; rank < m->world; rank++) {
            char expected[64];
            const spar_description *made = spar_group_description(m->group, rank);
            snprintf(expected, sizeof expected, "rank %d moves %lld bytes", rank,
                     (long long)(rank ? bytes : bytes + 5));
            EXPECT(made && strcmp(made->text, expected) == 0);
        }
        EXPECT(!call(m, bytes));
    }
}

static void fail_call(member *m)
{
    spar_deadline deadline = after(LONG_NS);
    pthread_mutex_lock(spar_group_lock(m->group));
    EXPECT(!spar_group_begin(m->group, &deadline, &m->call));
    spar_group_fail(m->group, SPAR_NO_MEMORY, "an injected failure");
    pthread_mutex_unlock(spar_group_lock(m->group));
}

/* Ranks fail twice in a row, each in its turn. */
static void fail_in_turn(member *m)
{
    static const int64_t sizes[] = {100, LARGE};
    for (int i = 0; i < 2 * m->world; i++) {
        if (i / 2 == m->rank) {
            fail_call(m);
        } else {
            EXPECT(call(m, sizes[i % 2]) == SPAR_NO_MEMORY);
            EXPECT(strstr(spar_last_error(), "failed: an injected failure"));
            EXPECT(spar_last_error_ranks()->count == 1 && spar_last_error_ranks()->rank[0] == i / 2);
        }
        if (i % 2)
            EXPECT(!call(m, sizes[i % 2]));
    }
}

static void leave(world *w, int rank)
{
    pthread_barrier_wait(&w->barrier);
    spar_group_close(w->members[rank].group);
    pthread_barrier_wait(&w->barrier);
}

/* The last rank breaks the group: the others raise why, in this call and in later ones. */
static void break_group(member *m)
{
    spar_deadline deadline = after(LONG_NS);
    if (m->rank == m->world - 1) {
        EXPECT(!spar_group_begin(m->group, &deadline, &m->call));
        spar_group_break(m->group, "an injected reason");
    }
    for (int i = 0; i < 2; i++) {
        EXPECT(call(m, LARGE) == SPAR_BROKEN);
        EXPECT(strstr(spar_last_error(), "an injected reason"));
    }
}

/* The last rank makes no call: the others raise that at the deadline, and it raises that they did. */
static void miss_deadline(world *w, member *m)
{
    int is_absent = m->rank == m->world - 1;
    if (!is_absent) {
        spar_status status = call_for(m, m->world == 2 ? LARGE : 100, 1, SHORT_NS);
        EXPECT(status == SPAR_TIMEOUT);
        EXPECT(strstr(spar_last_error(), "(process 10"));
    }
    pthread_barrier_wait(&w->barrier);
    spar_status status = call(m, 100);
    EXPECT(status == SPAR_TIMEOUT || status == SPAR_BROKEN);
    EXPECT(call(m, 100) == SPAR_BROKEN);
}

/* The last rank closes the group: others raise that. */
static void close_group(world *w, member *m)
{
    int closes = m->rank == m->world - 1;
    if (closes)
        spar_group_close(m->group);
    else
        EXPECT(call(m, EAGER_BYTES) == SPAR_BROKEN && strstr(spar_last_error(), "closed the group"));
    pthread_barrier_wait(&w->barrier);
    if (!closes)
        spar_group_close(m->group);
    pthread_barrier_wait(&w->barrier);
}

typedef struct {
    world *world;
    int rank;
} place;

static void *run_rank(void *argument)
{
    const place *here = argument;
    world *w = here->world;
    member *m = &w->members[here->rank];
    for (int i = 0; i < 4; i++) {
        join(w, here->rank);
        if (i % 2)
            spar_group_start_at(m->group, UINT32_MAX - 2);
        call_all_sizes(m);
        if (i == 0) {
            call_differently(m);
            fail_in_turn(m);
            break_group(m);
        } else if (i == 1) {
            fail_in_turn(m);
        } else if (i == 2) {
            miss_deadline(w, m);
        } else {
            close_group(w, m);
            continue;
        }
        leave(w, here->rank);
    }
    return NULL;
}

static void run_world(int size)
{
    static world w;
    pthread_t threads[MOST];
    place places[MOST];
    w.world = size;
    pthread_barrier_init(&w.barrier, NULL, (unsigned)size);
    for (int rank = 0; rank < size; rank++) {
        places[rank] = (place){&w, rank};
        EXPECT(pthread_create(&threads[rank], NULL, run_rank, &places[rank]) == 0);
    }
    for (int rank = 0; rank < size; rank++)
        pthread_join(threads[rank], NULL);
    pthread_barrier_destroy(&w.barrier);
}

/* ---- a far rank that does not ---- */

/* As in links.c; the honest case shows that they are the same. */
typedef struct {
    uint32_t call, status;
    uint64_t signature;
    int64_t forward, bytes, following;
    char op[64];
} call_message;

typedef struct {
    uint32_t kind, call, status, unused;
    union {
        spar_ranks ranks;
        spar_gathered gathered;
        spar_last_call waits;
    };
    char text[SPAR_GROUP_TEXT];
} control_message;

enum { DESCRIBES = 1, ENDS, WAITS, BREAKS };

/* What a far rank sends, in this order, and what its peer raises. A call of 100,000 bytes has no following
 * ones: its bytes come when both ranks have published. */
typedef struct {
    const char *name;
    call_message header;
    int64_t sent;      /* bytes after the header; -n: n bytes of the header alone */
    int control, kind; /* bytes of a control message, sent first */
    int close_control; /* before the bytes; both connections end after them */
    spar_status expected;
    int64_t bytes; /* of the peer's call; 0: 100 */
} trick;

#define SAME .signature = 1, .op = "gather"

static const trick tricks[] = {
    {"honest", {1, SAME, .bytes = 100, .following = 100}, 100, .expected = SPAR_OK},
    {"honest, exits at once", {1, SAME, .bytes = 100000}, 100000, 0, 0, 1, SPAR_OK, 100000},
    {"later call", {2, SAME, .bytes = 100, .following = 100}, 100, .expected = SPAR_TRANSPORT},
    {"much later call", {1u << 30, SAME, .bytes = 100, .following = 100}, 100, .expected = SPAR_TRANSPORT},
    {"earlier call", {0, SAME, .bytes = 100, .following = 100}, 100, .expected = SPAR_PEER_LOST},
    {"negative following", {1, SAME, .bytes = 100, .following = -1}, 9000, .expected = SPAR_TRANSPORT},
    {"least following", {1, SAME, .bytes = 100, .following = INT64_MIN}, 9000, .expected = SPAR_TRANSPORT},
    {"most following", {1, SAME, .bytes = 100, .following = INT64_MAX}, 9000, .expected = SPAR_TRANSPORT},
    {"too much following",
     {1, SAME, .bytes = EAGER_BYTES + 1, .following = EAGER_BYTES + 1},
     9000,
     .expected = SPAR_TRANSPORT},
    {"negative, of an earlier call", {0, SAME, .following = -4096}, 9000, .expected = SPAR_TRANSPORT},
    {"more bytes", {1, SAME, .bytes = 101, .following = 101}, 101, .expected = SPAR_TRANSPORT},
    {"fewer bytes", {1, SAME, .bytes = 99, .following = 99}, 99, .expected = SPAR_TRANSPORT},
    {"negative bytes", {1, SAME, .bytes = -100, .following = 100}, 100, .expected = SPAR_TRANSPORT},
    {"bytes that follow late", {1, SAME, .bytes = 100}, 100, .expected = SPAR_TRANSPORT},
    {"bytes that follow early",
     {1, SAME, .bytes = 100000, .following = EAGER_BYTES},
     EAGER_BYTES,
     0,
     0,
     0,
     SPAR_TRANSPORT,
     100000},
    {"header cut short", {1, SAME, .bytes = 100, .following = 100}, -50, .expected = SPAR_PEER_LOST},
    {"bytes cut short", {1, SAME, .bytes = 100, .following = 100}, 60, .expected = SPAR_PEER_LOST},
    {"large call cut short", {1, SAME, .bytes = 100000}, 60000, 0, 0, 0, SPAR_PEER_LOST, 100000},
    {"unknown status", {1, 77, SAME, .following = 10}, 10, .expected = SPAR_TRANSPORT},
    {"failure", {1, SPAR_NO_MEMORY, .following = 1023}, 1023, .expected = SPAR_NO_MEMORY},
    {"failure with a long text", {1, SPAR_NO_MEMORY, .following = 1024}, 1024, .expected = SPAR_TRANSPORT},
    {"failure with a text of negative length",
     {1, SPAR_NO_MEMORY, .following = -1},
     1024,
     .expected = SPAR_TRANSPORT},
    {"other call",
     {1, .signature = 2, .bytes = 7, .following = 7},
     7,
     sizeof(control_message),
     DESCRIBES,
     0,
     SPAR_MISMATCH,
     0},
    {"other call without a description",
     {1, .signature = 2, .bytes = 7, .following = 7},
     7,
     .expected = SPAR_PEER_LOST},
    {"break", {.call = 1}, -1, sizeof(control_message), BREAKS, 0, SPAR_BROKEN, 0},
    {"unknown control message", {.call = 1}, -1, sizeof(control_message), 99, 0, SPAR_PEER_LOST, 0},
    {"control message cut short", {.call = 1}, -1, 500, BREAKS, 0, SPAR_PEER_LOST, 0},
    {"waits", {1, SAME, .bytes = 100, .following = 100}, 100, sizeof(control_message), WAITS, 0, SPAR_OK, 0},
    {"ends", {1, SAME, .bytes = 100, .following = 100}, 100, sizeof(control_message), ENDS, 0, SPAR_OK, 0},
    {"fails, as control says", {.call = 1}, -1, sizeof(control_message), ENDS, 0, SPAR_MISMATCH, 0},
};

enum { TRICKS = sizeof tricks / sizeof *tricks };

static void send_all(int fd, const void *bytes, size_t size)
{
    const char *next = bytes;
    for (ssize_t n; size; next += n, size -= (size_t)n)
        if ((n = send(fd, next, size, MSG_NOSIGNAL)) <= 0)
            return; /* the peer has closed it */
}

/* Sends what a trick sends, on the other ends of a member's sockets. */
static void *send_trick(void *argument)
{
    const trick *t = ((void **)argument)[0];
    const int *sockets = ((void **)argument)[1];
    control_message control;
    unsigned char bytes[100000];
    memset(&control, 0xff, sizeof control);
    control.kind = (uint32_t)t->kind;
    if (t->expected == SPAR_OK)
        control.status = SPAR_OK;
    control.call = 1;
    fill(bytes, sizeof bytes, 1, 0, 1);
    if (t->header.status != SPAR_OK)
        memset(bytes, 'x', sizeof bytes);
    send_all(sockets[SPAR_TCP_CONTROL], &control, (size_t)t->control);
    send_all(sockets[SPAR_TCP_DATA], &t->header,
             (size_t)(t->sent < 0 ? min(-t->sent, sizeof t->header) : (int64_t)sizeof t->header));
    if (t->sent > 0)
        send_all(sockets[SPAR_TCP_DATA], bytes, (size_t)t->sent);
    if (t->close_control)
        shutdown(sockets[SPAR_TCP_CONTROL], SHUT_WR);
    if (t->expected == SPAR_TRANSPORT) /* more that is no call: it must not be read */
        for (int i = 0; i < 10; i++)
            send_all(sockets[SPAR_TCP_DATA], bytes, sizeof bytes);
    shutdown(sockets[SPAR_TCP_CONTROL], SHUT_WR);
    shutdown(sockets[SPAR_TCP_DATA], SHUT_WR);
    return NULL;
}

/* The peer's side: its calls must end in time, without an access outside of its memory. */
static void *meet_trick(void *argument)
{
    const trick *t = argument;
    member m;
    int others[SPAR_TCP_CHANNELS];
    pthread_t sender;
    void *arguments[] = {(void *)(uintptr_t)t, others};
    open_member(&m, 2, 0);
    for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++) {
        int pair[2], size = 1 << 20;
        EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        EXPECT(setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0);
        m.sockets[1][channel] = pair[0];
        others[channel] = pair[1];
    }
    link_member(&m);
    EXPECT(pthread_create(&sender, NULL, send_trick, arguments) == 0);
    int64_t begin = spar_now_ns();
    spar_status status = call_for(&m, t->bytes ? t->bytes : 100, 1, LONG_NS);
    if (status != t->expected) {
        fprintf(stderr, "%s: status %d: %s\n", t->name, status, spar_last_error());
        abort();
    }
    EXPECT(status == SPAR_OK || *spar_last_error());
    for (int i = 0; i < 3; i++) /* no later call succeeds or waits */
        EXPECT(call(&m, 100) != SPAR_OK);
    EXPECT(spar_now_ns() - begin < LONG_NS / 2);
    pthread_join(sender, NULL);
    spar_group_close(m.group);
    for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++)
        close(others[channel]);
    return NULL;
}

static void meet_tricks(void)
{
    pthread_t threads[TRICKS];
    EXPECT(!spar_arena_open(1 << 24, 1));
    for (int i = 0; i < TRICKS; i++)
        EXPECT(pthread_create(&threads[i], NULL, meet_trick, (void *)(uintptr_t)&tricks[i]) == 0);
    for (int i = 0; i < TRICKS; i++)
        pthread_join(threads[i], NULL);
}

/* ---- a full connection ---- */

/* Publishes call 1 while the other side can send nothing; then reads what was under way, and its call. */
static void *unblock_late(void *argument)
{
    const struct timespec moment = {0, 200000000};
    const int *sockets = ((void **)argument)[0];
    const size_t *under_way = ((void **)argument)[1];
    call_message theirs, own = {1, SAME, .bytes = LARGE};
    unsigned char *bytes = malloc(LARGE), *expected = malloc(LARGE);
    EXPECT(bytes && expected);
    send_all(sockets[SPAR_TCP_DATA], &own, sizeof own);
    nanosleep(&moment, NULL);
    for (size_t i = 0; i < *under_way; i++)
        EXPECT(recv(sockets[SPAR_TCP_DATA], bytes, 1, MSG_WAITALL) == 1 && *bytes == 'u');
    EXPECT(recv(sockets[SPAR_TCP_DATA], &theirs, sizeof theirs, MSG_WAITALL) == sizeof theirs);
    EXPECT(theirs.call == 1 && theirs.bytes == LARGE && theirs.following == 0);
    EXPECT(recv(sockets[SPAR_TCP_DATA], bytes, LARGE, MSG_WAITALL) == LARGE);
    fill(expected, LARGE, 0, 1, 1);
    EXPECT(memcmp(bytes, expected, LARGE) == 0);
    fill(bytes, LARGE, 1, 0, 1);
    send_all(sockets[SPAR_TCP_DATA], bytes, LARGE);
    free(bytes);
    free(expected);
    return NULL;
}

/* A call's bytes follow its message, also where the connection takes neither when they begin. */
static void fill_connection(void)
{
    member m;
    pthread_t other;
    int others[SPAR_TCP_CHANNELS];
    size_t under_way = 0;
    void *arguments[] = {others, &under_way};
    open_member(&m, 2, 0);
    for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++) {
        int pair[2];
        EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        m.sockets[1][channel] = pair[0];
        others[channel] = pair[1];
    }
    while (send(m.sockets[1][SPAR_TCP_DATA], "u", 1, MSG_DONTWAIT) == 1)
        under_way++;
    link_member(&m);
    EXPECT(pthread_create(&other, NULL, unblock_late, arguments) == 0);
    EXPECT(call_for(&m, LARGE, 1, LONG_NS) == SPAR_OK);
    pthread_join(other, NULL);
    spar_group_close(m.group);
    for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++)
        close(others[channel]);
}

/* ---- strangers ---- */

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

int test_links(int argc, char **argv)
{
    setenv("GLOO_SOCKET_IFNAME", "lo", 1);
    if (argc == 3 && strcmp(argv[1], "calls") == 0)
        run_world(atoi(argv[2]));
    else if (argc == 2 && strcmp(argv[1], "hostile") == 0)
        meet_tricks();
    else if (argc == 2 && strcmp(argv[1], "full") == 0)
        fill_connection();
    else if (argc == 2 && strcmp(argv[1], "strangers") == 0)
        meet_strangers();
    else
        return 2;
    return 0;
}
