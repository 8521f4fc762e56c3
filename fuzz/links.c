/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes the messages between hosts: one real rank, and a far rank whose messages the input makes.
 *
 * Whenever the rank waits, the input lets the far rank act on either connection: send a correct message, one
 * with a corrupt field, any bytes, or a part of them; or close a connection. The far rank's memory is not
 * shared, so all that the rank may change is the memory of its call, which lies between guards. Each call
 * ends in time, with success or an error; with success if the far rank was honest. */
#include "control/link.h"

#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { CALLS = 4, GUARD = 64, MOST = 1 << 17 };
static const int64_t LIMIT_NS = 2000000000, SLICE_NS = 50000000;

_Static_assert(sizeof(control_message) >= 255 * 5, "a part of a control message is drawn");

static source input;

static struct {
    spar_group *group;
    int sockets[SPAR_TCP_CHANNELS]; /* the far rank's ends */
    int honest, interrupted, waits;
    uint32_t sent;   /* the newest call whose header the far rank has sent */
    uint32_t moving; /* the call in which this rank moves bytes: it did not fail it */
    int64_t bytes;   /* of the running call; both ranks send as many */
    int64_t to_send; /* of them, those that the far rank has still to send */
    uint64_t signature;
} now;

static _Noreturn void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

/* ---- the far rank ---- */

static unsigned char pattern(int64_t at, uint32_t call)
{
    return (unsigned char)(at * 7 + call);
}

static void send_on(int channel, const void *bytes, size_t size)
{
    if (now.sockets[channel] >= 0)
        (void)!send(now.sockets[channel], bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* What the rank has sent must not fill the sockets. */
static void drain(void)
{
    char bytes[1 << 14];
    for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++)
        while (now.sockets[channel] >= 0 && recv(now.sockets[channel], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
            ;
}

static void end(int channel)
{
    if (now.sockets[channel] >= 0)
        close(now.sockets[channel]);
    now.sockets[channel] = -1;
}

static void send_bytes(int64_t count)
{
    static unsigned char bytes[MOST];
    int64_t from = now.bytes - now.to_send;
    for (int64_t i = 0; i < count; i++)
        bytes[i] = pattern(from + i, now.sent);
    send_on(SPAR_TCP_DATA, bytes, (size_t)count);
    now.to_send -= count;
}

/* Writes any value into a field of a message. */
static void corrupt(call_message *message)
{
    unsigned which = next_byte(&input);
    int64_t value = next_number(&input);
    switch (which % 8) {
    case 0:
        message->call += (uint32_t)value;
        break;
    case 1:
        message->status = which & 8 ? (uint32_t)value : SPAR_NO_MEMORY;
        break;
    case 2:
        message->signature = (uint64_t)value;
        break;
    case 3:
        message->forward = value;
        break;
    case 4:
        message->bytes = value;
        break;
    case 5:
        message->following = value;
        break;
    case 6:
        memset(message->op, (int)value, sizeof message->op);
        break;
    default:
        message->status = SPAR_MISMATCH;
        message->following = value % 2000;
    }
}

/* Sends the header of a call, with its few bytes, as the protocol has it, or with corrupt fields. */
static void send_header(int corruptions)
{
    if (now.sent == now.group->call)
        return;
    now.sent = now.group->call;
    int64_t following = now.bytes <= EAGER_BYTES ? now.bytes : 0;
    call_message message = {now.sent, SPAR_OK, now.signature, 0, now.bytes, following, "gather"};
    for (int i = 0; i < corruptions; i++)
        corrupt(&message);
    now.to_send = now.bytes;
    send_on(SPAR_TCP_DATA, &message, sizeof message);
    if (following)
        send_bytes(following);
}

static void send_control_message(void)
{
    control_message message;
    unsigned which = next_byte(&input);
    int64_t value = next_number(&input);
    memset(&message, (int)value, sizeof message);
    message.kind = which % 8 < 5 ? which % 8 : (uint32_t)value;
    message.call = now.group->call + (which & 32 ? (uint32_t)next_number(&input) : 0);
    message.status = which & 64 ? (uint32_t)value : message.status;
    send_on(SPAR_TCP_CONTROL, &message, which & 16 ? sizeof message : next_byte(&input) * 5u);
}

static void send_anything(int channel)
{
    unsigned char bytes[256];
    unsigned size = next_byte(&input);
    for (unsigned i = 0; i < size; i++)
        bytes[i] = (unsigned char)next_byte(&input);
    send_on(channel, bytes, size);
}

/* Follows the protocol: the header, then the bytes once the rank has it. */
static void follow_protocol(void)
{
    if (now.sent != now.group->call)
        send_header(0);
    else if (now.to_send && now.sent == now.moving && now.group->boxes[1]->published == now.sent)
        send_bytes(now.to_send);
}

/* One step of the far rank. After the input's end, it follows the protocol. */
static void step(void)
{
    unsigned what = next_byte(&input);
    if (what % 8 < 2) {
        follow_protocol();
        return;
    }
    now.honest = 0;
    if (what % 8 == 2)
        send_header(1 + (what >> 3) % 3);
    else if (what % 8 == 3)
        send_control_message();
    else if (what % 8 == 4)
        send_anything((what >> 3) % SPAR_TCP_CHANNELS);
    else if (what % 8 == 5)
        send_bytes(what >> 3 < now.to_send ? what >> 3 : now.to_send);
    else if (what % 8 == 6 && what & 8)
        end((what >> 4) % SPAR_TCP_CHANNELS);
    else if (what % 8 == 6)
        now.interrupted |= what & 16;
    else
        fuzz_now_ns += (what >> 3) % 4 * SLICE_NS;
}

/* Runs before the library polls. */
static void act(void)
{
    drain();
    step();
    EXPECT(++now.waits < 10000);
}

/* ---- a call ---- */

static int is_interrupted(void *context)
{
    (void)context;
    return now.interrupted;
}

static void describe(const void *call, char *text, size_t size, spar_gathered_size *gathered)
{
    memset(gathered, 0, sizeof *gathered);
    snprintf(text, size, "%s", (const char *)call);
}

static void count_arrival(void *context, int rank)
{
    EXPECT(rank == 1 && ++*(int *)context == 1);
}

static spar_status move_bytes(const spar_parcel *parcels, int *arrived, const spar_deadline *deadline)
{
    spar_call_header header = {.signature = now.signature, .op = "gather"}, all[2];
    spar_group_carry(now.group, parcels);
    SPAR_TRY(spar_group_publish(now.group, &header, describe, "a gather", all, deadline));
    SPAR_TRY(spar_group_transfer(now.group, count_arrival, arrived, deadline));
    return spar_group_finish(now.group, deadline);
}

static void check_status(spar_status status)
{
    EXPECT(status == SPAR_OK || *spar_last_error());
    EXPECT(status == SPAR_OK || !now.honest);
    for (int rank = 0; rank < 2; rank++) {
        const spar_description *made = spar_group_description(now.group, rank);
        EXPECT(!made || (status != SPAR_OK && strlen(made->text) < SPAR_GROUP_TEXT));
    }
}

static void run_call(void)
{
    static unsigned char out[MOST], in[MOST + 2 * GUARD];
    static const int64_t sizes[] = {0, 1, 100, EAGER_BYTES, EAGER_BYTES + 1, 50000};
    unsigned what = next_byte(&input);
    int arrived = 0, fails = what % 16 == 15;
    uint32_t call = now.moving;
    spar_deadline deadline = {fuzz_now_ns + LIMIT_NS, is_interrupted, NULL};
    now.waits = 0;
    now.bytes = sizes[(what >> 4) % (sizeof sizes / sizeof *sizes)];
    now.to_send = 0;
    now.signature = 1 + what % 2;
    memset(in, 0xee, sizeof in);
    spar_parcel parcels[2] = {{0}, {out, in + GUARD, now.bytes, now.bytes}};
    spar_status status = spar_group_begin(now.group, &deadline, &call);
    now.moving = fails ? now.moving : call;
    if (status == SPAR_OK && fails)
        spar_group_fail(now.group, SPAR_NO_MEMORY, "an injected failure");
    else if (status == SPAR_OK)
        status = move_bytes(parcels, &arrived, &deadline);
    check_status(status);
    EXPECT(fuzz_now_ns < deadline.at_ns + 20 * SLICE_NS);
    for (int i = 0; i < GUARD; i++)
        EXPECT(in[i] == 0xee && in[GUARD + now.bytes + i] == 0xee);
    EXPECT((status == SPAR_OK && !fails) == (arrived == 1) || !now.honest);
    for (int64_t i = 0; status == SPAR_OK && !fails && now.honest && i < now.bytes; i++)
        EXPECT(in[GUARD + i] == pattern(i, call));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const unsigned char far[2] = {0, 1};
    static const int64_t pids[2] = {1, 2}, offsets[2] = {0};
    int sockets[2][SPAR_TCP_CHANNELS] = {{-1, -1}};
    spar_peer *peers[2] = {NULL};
    spar_arena_stats stats;
    int64_t own;
    spar_group *group;
    EXPECT(!spar_arena_open(1 << 20, 1));
    input = (source){data, data + size};
    memset(&now, 0, sizeof now);
    now.honest = 1;
    for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++) {
        int pair[2];
        EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        sockets[1][channel] = pair[0];
        now.sockets[channel] = pair[1];
    }
    EXPECT(!spar_group_open(2, 0, 0, &group, &own));
    spar_group_spin(group, next_byte(&input) % 4 ? 0 : 50000);
    EXPECT(!spar_group_link(group, far, pids, sockets));
    EXPECT(!spar_group_attach(group, peers, offsets));
    if (next_byte(&input) % 4 == 0) /* call numbers near the wrap */
        spar_group_start_at(group, UINT32_MAX - 1);
    now.sent = now.moving = group->call;
    now.group = group;
    fuzz_on_poll = act;
    for (int i = next_byte(&input) % CALLS; i >= 0; i--)
        run_call();
    fuzz_on_poll = NULL;
    spar_group_close(group);
    for (int channel = 0; channel < SPAR_TCP_CHANNELS; channel++)
        end(channel);
    for (int i = 0; i < 2; i++)
        spar_arena_trim();
    spar_arena_read_stats(&stats);
    EXPECT(stats.allocated == 0 && stats.quarantined == 0);
    return 0;
}
