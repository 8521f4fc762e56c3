/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank makes of the messages of a far rank, whose side the test writes byte by byte: messages against
 * the protocol, and a connection that is full.
 *
 * test_messages hostile | full */
#include "member.h"

#include <time.h>
#include <unistd.h>

static int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- messages against the protocol ---- */

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
        spar_gathered_size gathered;
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

int test_messages(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "hostile") == 0)
        meet_tricks();
    else if (argc == 2 && strcmp(argv[1], "full") == 0)
        fill_connection();
    else
        return 2;
    return 0;
}
