/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes a group's set-up: one real rank, and simulated processes that the input controls.
 *
 * The input changes bytes of the peer info and the setup results. It sends handshake messages with any
 * contents and descriptors; some are wrong but have a valid proof, as a corrupt rank could send them. While
 * the rank waits, the processes dial, answer, send something else or hang up.
 *
 * Each step ends in time, with success or an error; with success if all processes were honest. Every byte of
 * an arena that was accepted can be accessed. At the end no memory, mapping or descriptor is left. */
#include "../csrc/ipc/handshake.c"   /* for its messages and proofs */
#include "../csrc/ipc/connections.c" /* for its unproven connections */
#include "../csrc/ipc/peers.c"       /* for its peers */

#include "../csrc/spar.h"
#include "fuzz.h"

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

extern const spar_transport spar_transport_shm;

enum {
    RANKS = 4,
    CONNECTIONS = 8,
    LENGTH = 1 << 14,
    WHOLE = LENGTH + SPAR_ARENA_TAIL,
    HELD = 16,
    MAY_SHRINK = 1
};

/* A simulated process. The rank under test dials half of them; the others dial it. */
typedef struct {
    spar_endpoint endpoint;
    spar_key secret;
    int listener, arena, dialed;
} fake_process;

static source input;
static spar_endpoint own;
static spar_key secret;
static fake_process fakes[RANKS];
static int bad_fds[5]; /* descriptors that are not arenas of LENGTH bytes */
static struct {
    int world, rank, honest, waits, next;
    spar_handshake connections[CONNECTIONS]; /* the fakes' connections; socket -1: free */
    int owner[CONNECTIONS];                  /* the fake of each connection */
    spar_peer *held[HELD];
    int holds, expects[RANKS];
} now;

static void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

/* ---- the simulated processes ---- */

static void hang_up(int slot)
{
    if (now.connections[slot].socket >= 0)
        close(now.connections[slot].socket);
    now.connections[slot].socket = -1;
}

/* Takes a free slot, or closes a connection to get one. */
static int new_connection(int fd, int fake, int step)
{
    int slot = 0;
    while (slot < CONNECTIONS && now.connections[slot].socket >= 0)
        slot++;
    if (slot == CONNECTIONS) {
        slot = now.next++ % CONNECTIONS;
        now.honest = 0;
    }
    hang_up(slot);
    now.connections[slot] = (spar_handshake){.socket = fd, .step = step, .other = own};
    now.connections[slot].key = spar_handshake_key(&own, &secret, &fakes[fake].endpoint, &fakes[fake].secret);
    now.owner[slot] = fake;
    return slot;
}

static void send_message(int slot, const void *bytes, size_t size, const int *fds, int count)
{
    char control[CMSG_SPACE(sizeof(int) * 6)] = {0};
    struct iovec part = {(void *)(uintptr_t)bytes, size};
    struct msghdr envelope = {.msg_iov = &part,
                              .msg_iovlen = 1,
                              .msg_control = control,
                              .msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count)};
    if (count) {
        struct cmsghdr *header = CMSG_FIRSTHDR(&envelope);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * (size_t)count);
    } else {
        envelope.msg_control = NULL;
        envelope.msg_controllen = 0;
    }
    if (now.connections[slot].socket >= 0 &&
        sendmsg(now.connections[slot].socket, &envelope, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        hang_up(slot); /* the rank hung up: an honest process dials again */
        fakes[now.owner[slot]].dialed = 0;
    }
}

static int dial_rank(int fake)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    EXPECT(fd >= 0 && connect_to(fd, &own) == 0);
    return new_connection(fd, fake, CONNECTING);
}

static int accept_rank(int fake)
{
    int fd = accept4(fakes[fake].listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    return fd < 0 ? -1 : new_connection(fd, fake, ACCEPTED);
}

static void send_own_arena(int slot)
{
    spar_handshake *h = &now.connections[slot];
    const fake_process *s = &fakes[now.owner[slot]];
    message m = begin(h, &s->endpoint, ARENA);
    m.length = LENGTH;
    m.proof = prove(h, &m);
    send_message(slot, &m, sizeof m, &s->arena, 1);
}

/* Takes an honest process's next step on a connection. */
static void advance(int slot)
{
    spar_handshake *h = &now.connections[slot];
    const fake_process *s = &fakes[now.owner[slot]];
    message m;
    if (h->step == CONNECTING)
        spar_handshake_call(h, &s->endpoint);
    if (h->step == ACCEPTED && spar_handshake_read_call(h, &s->endpoint) == SPAR_HANDSHAKE_DROPPED)
        hang_up(slot);
    if (h->step == CLAIMED)
        spar_handshake_challenge(h, &s->endpoint, &h->key);
    int received = h->socket >= 0 && h->step != ACCEPTED ? peek(h, &m) : 0;
    if (received < 0 || (received && m.kind == LATER)) {
        hang_up(slot);
        fakes[now.owner[slot]].dialed = 0;
    } else if (received && (h->step == CALLED || h->step == CHALLENGED)) {
        take(h);
        if (h->step == CALLED)
            h->challenges[1] = m.challenge;
        h->step = OFFERED;
        send_own_arena(slot);
    }
}

/* Lets a process follow the protocol: the lower endpoint dials, the other one answers. */
static void follow_protocol(int fake)
{
    fake_process *s = &fakes[fake];
    if (s->listener >= 0)
        accept_rank(fake);
    else if (!s->dialed)
        dial_rank(fake);
    s->dialed = 1;
    for (int slot = 0; slot < CONNECTIONS; slot++)
        if (now.connections[slot].socket >= 0 && now.owner[slot] == fake)
            advance(slot);
}

/* Sends an arbitrary message, with a valid proof if `what` says so. */
static void send_corrupt(int slot)
{
    spar_handshake *h = &now.connections[slot];
    unsigned what = next_byte(&input), count = next_byte(&input);
    message m = begin(h, &fakes[next_byte(&input) % RANKS].endpoint, next_byte(&input) % 8);
    int fds[6];
    size_t size = sizeof m;
    m.length = LENGTH;
    if (what & 1)
        m.magic[next_byte(&input) % sizeof m.magic] = (char)next_byte(&input);
    if (what & 2)
        m.from = (spar_endpoint){next_number(&input), next_uint64(&input)};
    if (what & 4)
        m.to = (spar_endpoint){next_number(&input), next_uint64(&input)};
    if (what & 8)
        m.length = next_number(&input);
    if (what & 16)
        memset(m.refusal, (int)next_byte(&input), sizeof m.refusal);
    if (what & 32)
        size = next_byte(&input) % (sizeof m + 1);
    if (what & 64) { /* with the challenge that was received, if any */
        message seen;
        if (h->socket >= 0 && peek(h, &seen) > 0)
            h->challenges[h->step >= ACCEPTED ? 0 : 1] = seen.challenge;
        m.challenge = h->challenges[h->step >= ACCEPTED ? 1 : 0];
        m.proof = prove(h, &m);
    }
    if (what & 128 && h->socket >= 0)
        take(h);
    for (int i = 0; i < 6; i++) {
        unsigned which = next_byte(&input) % 10;
        fds[i] = which < 5 ? bad_fds[which] : fakes[which % RANKS].arena;
    }
    send_message(slot, &m, size, fds, (int)(count < 128 ? 1 : count % 7));
}

/* Accesses both ends of an accepted arena. */
static void touch(const spar_peer *peer)
{
    volatile char *first = peer->base, *last = peer->base + peer->length - 1;
    EXPECT(peer->length > 0);
    *first = *first;
    *last = *last;
}

/* One step of the processes, while the rank waits. After the input's end, all follow the protocol. */
static void act(void)
{
    unsigned what = next_byte(&input);
    int slot = (int)(what >> 3) % CONNECTIONS, fake = (int)(what >> 3) % RANKS;
    EXPECT(++now.waits < 20000);
    EXPECT(table.ncallers <= MOST_CALLERS);
    for (int i = 0; i < connected.count; i++)
        if (connected.peers[i]->base)
            touch(connected.peers[i]);
    switch (what % 8) {
    case 0:
        for (int i = 0; i < RANKS; i++)
            follow_protocol(i);
        return;
    case 1:
        follow_protocol(fake);
        return;
    case 2: /* a process dials, and sends nothing yet */
        dial_rank(fake);
        return;
    case 3: /* a process accepts, and sends nothing yet */
        if (fakes[fake].listener >= 0)
            accept_rank(fake);
        break;
    case 4:
    case 5:
        send_corrupt(slot);
        break;
    case 6:
        hang_up(slot);
        break;
    default:
        fuzz_now_ns += (int64_t)(what >> 3) * 200000000;
        EXPECT(ftruncate(bad_fds[MAY_SHRINK], 0) == 0); /* an access faults if it was accepted as an arena */
    }
    now.honest = 0;
}

/* ---- the rank ---- */

static void release(spar_peer *peer)
{
    spar_peers_unmap(peer);
    spar_peers_release(peer);
}

/* One random step of the set-ups of other groups at the same time. */
static void step_other_set_up(void)
{
    unsigned fake = next_byte(&input) % RANKS, what = next_byte(&input);
    const fake_process *s = &fakes[fake];
    if (what % 4 == 0) {
        spar_status status = spar_peers_expect(&s->endpoint, &s->secret);
        EXPECT(status == SPAR_OK || *spar_last_error());
        now.expects[fake] += status == SPAR_OK;
    } else if (what % 8 == 2 && now.expects[fake]) {
        now.expects[fake]--;
        spar_peers_end(&s->endpoint);
    } else if (what % 4 == 1 && now.holds) {
        release(now.held[--now.holds]);
    } else if (now.holds < HELD) {
        spar_peer *peer;
        spar_status status = spar_peers_poll(&s->endpoint, &peer);
        EXPECT(status == SPAR_OK || (status == SPAR_TRANSPORT && !peer && *spar_last_error()));
        if (peer) {
            EXPECT(spar_endpoint_same(&peer->endpoint, &s->endpoint));
            now.held[now.holds++] = peer;
        }
    }
    act();
}

static void check_choice(const spar_choice *choice)
{
    EXPECT(strlen(choice->reason) < sizeof choice->reason);
    for (int i = 0; i < choice->rejected; i++)
        EXPECT(strlen(choice->rejected_reasons[i]) < sizeof choice->rejected_reasons[i]);
}

/* Changes a few of the bytes that peers sent. */
static void corrupt(void *bytes, size_t size, size_t own_part, size_t part)
{
    for (unsigned n = next_byte(&input) % 8; n; n--) {
        size_t at = (next_byte(&input) << 8 | next_byte(&input)) % size;
        unsigned length = next_byte(&input) % 64, value = next_byte(&input);
        for (; length && at < size; length--, at++)
            if (at / part != own_part)
                ((char *)bytes)[at] = (char)value;
        now.honest = 0;
    }
}

/* Runs the stages of a set-up on this rank. */
static void set_up(void)
{
    static const struct {
        char magic[8];
        int32_t place[2];
    } box = {"spar box", {0, 0}}; /* the head of a mailbox */
    spar_peer_info info[RANKS];
    spar_setup_result results[RANKS], result;
    spar_choice choice;
    spar_comm *comm;
    spar_peer_info_read(&info[0]);
    EXPECT(!info[0].error[0] && !info[0].no_shm[0]);
    for (int rank = 0; rank < RANKS; rank++) {
        int32_t place[2] = {now.world, rank};
        info[rank] = info[0];
        memset(&results[rank], 0, sizeof *results);
        results[rank].offset = 64 * rank;
        EXPECT(pwrite(fakes[rank].arena, &box, sizeof box, 64 * rank) == sizeof box &&
               pwrite(fakes[rank].arena, place, sizeof place, 64 * rank + 8) == sizeof place);
        if (rank != now.rank)
            info[rank].endpoint = fakes[rank].endpoint, info[rank].secret = fakes[rank].secret;
    }
    info[now.rank].endpoint = own;
    info[now.rank].secret = secret;
    corrupt(info, sizeof *info * (size_t)now.world, (size_t)now.rank, sizeof *info);
    spar_status status = spar_choose(info, now.world, 0, "cpu", NULL, &choice);
    EXPECT(status == SPAR_OK || (!now.honest && *spar_last_error()));
    if (status != SPAR_OK)
        return;
    check_choice(&choice);
    EXPECT(choice.transport == &spar_transport_shm || !now.honest);
    if (choice.transport != &spar_transport_shm)
        return;
    static const spar_native none;
    EXPECT(!spar_comm_open(choice.transport, info, now.world, now.rank, now.world, &none, &comm,
                           &results[now.rank]));
    EXPECT(!results[now.rank].failed || !now.honest);
    corrupt(results, sizeof *results * (size_t)now.world, (size_t)now.rank, sizeof *results);
    const spar_deadline deadline = {.at_ns = fuzz_now_ns + 1000000000};
    status = spar_comm_connect(comm, results, &deadline, &result);
    EXPECT(status == SPAR_OK || (status == SPAR_TIMEOUT && !now.honest));
    EXPECT(!result.failed || (!now.honest && result.reason[0]));
    EXPECT(memchr(result.reason, 0, sizeof result.reason));
    spar_comm_close(comm);
}

/* ---- one input ---- */

static int make_memory(int64_t length, int seals)
{
    int fd = memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT(fd >= 0 && ftruncate(fd, length) == 0 && fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void begin_input(void)
{
    if (!own.pid) {
        int ends[2];
        EXPECT(!spar_arena_open(1 << 20, 1) && !spar_peers_listen(&own, &secret) && pipe(ends) == 0);
        bad_fds[0] = ends[0];
        bad_fds[MAY_SHRINK] = make_memory(WHOLE, 0);
        bad_fds[2] = make_memory(WHOLE, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
        bad_fds[3] = make_memory(5000, F_SEAL_SHRINK | F_SEAL_GROW);
        bad_fds[4] = make_memory(0, F_SEAL_SHRINK);
        for (int i = 0; i < RANKS; i++)
            fakes[i].arena = make_memory(WHOLE, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    }
    EXPECT(ftruncate(bad_fds[MAY_SHRINK], WHOLE) == 0);
    now.honest = 1;
    for (int slot = 0; slot < CONNECTIONS; slot++)
        now.connections[slot].socket = -1;
    for (int i = 0; i < RANKS; i++) {
        struct sockaddr_un address;
        fake_process *s = &fakes[i];
        uint64_t nonce = i % 2 ? own.nonce + 1 + (uint64_t)i : own.nonce - 1 - (uint64_t)i;
        s->endpoint = (spar_endpoint){own.pid, nonce};
        memset(&s->secret, 1 + i, sizeof s->secret);
        s->listener = -1;
        s->dialed = 0;
        if (nonce < own.nonce)
            continue;
        socklen_t length = address_of(&s->endpoint, &address);
        s->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        EXPECT(s->listener >= 0 && bind(s->listener, (struct sockaddr *)&address, length) == 0 &&
               listen(s->listener, 64) == 0);
    }
}

/* Kills all peers; expects that nothing is left. */
static void end(void)
{
    spar_arena_stats stats;
    for (int slot = 0; slot < CONNECTIONS; slot++)
        hang_up(slot);
    for (int i = 0; i < RANKS; i++)
        spar_close_fd(&fakes[i].listener);
    while (now.holds)
        release(now.held[--now.holds]);
    for (int i = 0; i < RANKS; i++)
        for (; now.expects[i]; now.expects[i]--)
            spar_peers_end(&fakes[i].endpoint);
    EXPECT(table.nexpected == 0 && table.ncallers == 0);
    for (int i = 0; i < connected.count; i++) {
        spar_close_fd(&connected.peers[i]->socket);
        spar_close_fd(&connected.peers[i]->pidfd);
        connected.peers[i]->endpoint.pid = INT32_MAX;
    }
    for (int i = 0; i < 2; i++)
        spar_arena_trim();
    while (connected.count) {
        EXPECT(connected.peers[0]->groups == 0 && connected.peers[0]->readers == 0);
        drop(connected.peers[0]);
    }
    for (int fd; (fd = accept4(table.listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;)
        close(fd);
    spar_arena_read_stats(&stats);
    EXPECT(stats.allocated == 0 && stats.quarantined == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input = (source){data, data + size};
    memset(&now, 0, sizeof now);
    begin_input();
    int before = dup(bad_fds[0]), after;
    now.world = 2 + (int)(next_byte(&input) % (RANKS - 1));
    now.rank = (int)(next_byte(&input) % (unsigned)now.world);
    for (int steps = next_byte(&input) % 16; steps; steps--)
        step_other_set_up();
    fuzz_on_wait = act;
    set_up();
    fuzz_on_wait = NULL;
    close(before);
    end();
    /* the lowest free descriptor is not above the one before: no descriptor leaked */
    after = dup(bad_fds[0]);
    EXPECT(after <= before);
    close(after);
    return 0;
}
