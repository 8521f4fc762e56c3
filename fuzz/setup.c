/* A group's set-up: one rank, whose peers are sockets on which anything may come.
 *
 * Facts and verdicts are what a rank is handed of the others as bytes; handshakes go over sockets, with whatever
 * descriptors; some messages are wrong but bear a right proof, as a corrupt rank could send them. While the rank waits, the input lets the strangers call, answer, say something else or hang up. Each
 * step ends in time, in success or in an error, in success where all were honest; an arena that is taken for a
 * peer's can be touched from end to end; and at the end no memory, mapping or descriptor is left. */
#include "../csrc/ipc/handshake.c"   /* messages and proofs are known to it alone, */
#include "../csrc/ipc/connections.c" /* callers to it, */
#include "../csrc/ipc/peers.c"       /* and peers to it */

#include "../csrc/spar.h"
#include "fuzz.h"

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

extern const spar_transport spar_transport_shm;

enum { RANKS = 4, LINES = 8, LENGTH = 1 << 14, WHOLE = LENGTH + SPAR_ARENA_TAIL, HELD = 16, MAY_SHRINK = 1 };

/* Some other process; of half of them this one is the lower, and calls. */
typedef struct {
    spar_endpoint endpoint;
    spar_key secret;
    int listener, arena, called;
} stranger;

static source input;
static spar_endpoint own;
static spar_key secret;
static stranger strangers[RANKS];
static int odd[5]; /* descriptors that are no arenas of LENGTH bytes */
static struct {
    int world, rank, honest, waits, next;
    spar_handshake lines[LINES]; /* ends of connections; socket -1: free */
    int who[LINES];              /* each one's stranger */
    spar_peer *held[HELD];
    int holds, expects[RANKS];
} now;

static void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

/* ---- the strangers ---- */

static void hang_up(int line)
{
    if (now.lines[line].socket >= 0)
        close(now.lines[line].socket);
    now.lines[line].socket = -1;
}

/* A free one; else one that must hang up for it. */
static int new_line(int fd, int who, int step)
{
    int line = 0;
    while (line < LINES && now.lines[line].socket >= 0)
        line++;
    if (line == LINES) {
        line = now.next++ % LINES;
        now.honest = 0;
    }
    hang_up(line);
    now.lines[line] = (spar_handshake){.socket = fd, .step = step, .other = own};
    now.lines[line].key = spar_handshake_key(&own, &secret, &strangers[who].endpoint, &strangers[who].secret);
    now.who[line] = who;
    return line;
}

static void send_words(int line, const void *words, size_t size, const int *fds, int count)
{
    char control[CMSG_SPACE(sizeof(int) * 6)] = {0};
    struct iovec part = {(void *)(uintptr_t)words, size};
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
    if (now.lines[line].socket >= 0 &&
        sendmsg(now.lines[line].socket, &envelope, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        hang_up(line); /* the rank hung up: a right process calls again */
        strangers[now.who[line]].called = 0;
    }
}

static int call_in(int who)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    EXPECT(fd >= 0 && connect_to(fd, &own) == 0);
    return new_line(fd, who, CONNECTING);
}

static int take_one(int who)
{
    int fd = accept4(strangers[who].listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    return fd < 0 ? -1 : new_line(fd, who, ACCEPTED);
}

static void send_own_arena(int line)
{
    spar_handshake *h = &now.lines[line];
    const stranger *s = &strangers[now.who[line]];
    message m = begin(h, &s->endpoint, ARENA);
    m.length = LENGTH;
    m.proof = prove(h, &m);
    send_words(line, &m, sizeof m, &s->arena, 1);
}

/* What a right process does next on a connection. */
static void go_on(int line)
{
    spar_handshake *h = &now.lines[line];
    const stranger *s = &strangers[now.who[line]];
    message m;
    if (h->step == CONNECTING)
        spar_handshake_call(h, &s->endpoint);
    if (h->step == ACCEPTED && spar_handshake_read_call(h, &s->endpoint) == SPAR_HANDSHAKE_DROPPED)
        hang_up(line);
    if (h->step == CLAIMED)
        spar_handshake_challenge(h, &s->endpoint, &h->key);
    int came = h->socket >= 0 && h->step != ACCEPTED ? peek(h, &m) : 0;
    if (came < 0 || (came && m.kind == LATER)) {
        hang_up(line);
        strangers[now.who[line]].called = 0;
    } else if (came && (h->step == CALLED || h->step == CHALLENGED)) {
        take(h);
        if (h->step == CALLED)
            h->challenges[1] = m.challenge;
        h->step = OFFERED;
        send_own_arena(line);
    }
}

/* What a right process does: it calls if it is the lower, and answers if it is not. */
static void behave(int who)
{
    stranger *s = &strangers[who];
    if (s->listener >= 0)
        take_one(who);
    else if (!s->called)
        call_in(who);
    s->called = 1;
    for (int line = 0; line < LINES; line++)
        if (now.lines[line].socket >= 0 && now.who[line] == who)
            go_on(line);
}

/* Anything but what is right: where `what` says so, with a proof that is. */
static void lie(int line)
{
    spar_handshake *h = &now.lines[line];
    unsigned what = next_byte(&input), count = next_byte(&input);
    message m = begin(h, &strangers[next_byte(&input) % RANKS].endpoint, next_byte(&input) % 8);
    int fds[6];
    size_t size = sizeof m;
    m.length = LENGTH;
    if (what & 1)
        m.magic[next_byte(&input) % sizeof m.magic] = (char)next_byte(&input);
    if (what & 2)
        m.from = (spar_endpoint){next_number(&input), next_word(&input)};
    if (what & 4)
        m.to = (spar_endpoint){next_number(&input), next_word(&input)};
    if (what & 8)
        m.length = next_number(&input);
    if (what & 16)
        memset(m.refusal, (int)next_byte(&input), sizeof m.refusal);
    if (what & 32)
        size = next_byte(&input) % (sizeof m + 1);
    if (what & 64) { /* the challenge that is there, if one is */
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
        fds[i] = which < 5 ? odd[which] : strangers[which % RANKS].arena;
    }
    send_words(line, &m, size, fds, (int)(count < 128 ? 1 : count % 7));
}

/* What was taken for a peer's arena is there, from end to end. */
static void touch(const spar_peer *peer)
{
    volatile char *first = peer->base, *last = peer->base + peer->length - 1;
    EXPECT(peer->length > 0);
    *first = *first;
    *last = *last;
}

/* Once while the rank waits. An input that is used up means that all behave. */
static void act(void)
{
    unsigned what = next_byte(&input);
    int line = (int)(what >> 3) % LINES, who = (int)(what >> 3) % RANKS;
    EXPECT(++now.waits < 20000);
    EXPECT(table.ncallers <= MOST_CALLERS);
    for (int i = 0; i < connected.count; i++)
        if (connected.peers[i]->base)
            touch(connected.peers[i]);
    switch (what % 8) {
    case 0:
        for (int i = 0; i < RANKS; i++)
            behave(i);
        return;
    case 1:
        behave(who);
        return;
    case 2: /* somebody calls, and says nothing yet */
        call_in(who);
        return;
    case 3: /* somebody is called, and says nothing yet */
        if (strangers[who].listener >= 0)
            take_one(who);
        break;
    case 4:
    case 5:
        lie(line);
        break;
    case 6:
        hang_up(line);
        break;
    default:
        fuzz_now_ns += (int64_t)(what >> 3) * 200000000;
        EXPECT(ftruncate(odd[MAY_SHRINK], 0) == 0); /* who took it for an arena will see */
    }
    now.honest = 0;
}

/* ---- the rank ---- */

static void leave(spar_peer *peer)
{
    spar_peers_unmap(peer);
    spar_peers_release(peer);
}

/* Calls and meetings as they may come when several groups are set up at once. */
static void meet_somebody(void)
{
    unsigned who = next_byte(&input) % RANKS, what = next_byte(&input);
    const stranger *s = &strangers[who];
    if (what % 4 == 0) {
        spar_status status = spar_peers_expect(&s->endpoint, &s->secret);
        EXPECT(status == SPAR_OK || *spar_last_error());
        now.expects[who] += status == SPAR_OK;
    } else if (what % 8 == 2 && now.expects[who]) {
        now.expects[who]--;
        spar_peers_end(&s->endpoint);
    } else if (what % 4 == 1 && now.holds) {
        leave(now.held[--now.holds]);
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

/* Changes a few of the bytes that the others sent. */
static void spoil(void *bytes, size_t size, size_t own_part, size_t part)
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

/* What all exchange once per group, and what follows from it. */
static void set_up(void)
{
    static const struct {
        char magic[8];
        int32_t place[2];
    } box = {"spar box", {0, 0}}; /* a mailbox begins so */
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
        EXPECT(pwrite(strangers[rank].arena, &box, sizeof box, 64 * rank) == sizeof box &&
               pwrite(strangers[rank].arena, place, sizeof place, 64 * rank + 8) == sizeof place);
        if (rank != now.rank)
            info[rank].endpoint = strangers[rank].endpoint, info[rank].secret = strangers[rank].secret;
    }
    info[now.rank].endpoint = own;
    info[now.rank].secret = secret;
    spoil(info, sizeof *info * (size_t)now.world, (size_t)now.rank, sizeof *info);
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
    spoil(results, sizeof *results * (size_t)now.world, (size_t)now.rank, sizeof *results);
    const spar_deadline deadline = {.at_ns = fuzz_now_ns + 1000000000};
    status = spar_comm_connect(comm, results, &deadline, &result);
    EXPECT(status == SPAR_OK || (status == SPAR_TIMEOUT && !now.honest));
    EXPECT(!result.failed || (!now.honest && result.reason[0]));
    EXPECT(memchr(result.reason, 0, sizeof result.reason));
    spar_comm_close(comm);
}

/* ---- an input ---- */

static int make_memory(int64_t length, int seals)
{
    int fd = memfd_create("stranger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT(fd >= 0 && ftruncate(fd, length) == 0 && fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void begin_input(void)
{
    if (!own.pid) {
        int ends[2];
        EXPECT(!spar_arena_open(1 << 20, 1) && !spar_peers_listen(&own, &secret) && pipe(ends) == 0);
        odd[0] = ends[0];
        odd[MAY_SHRINK] = make_memory(WHOLE, 0);
        odd[2] = make_memory(WHOLE, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
        odd[3] = make_memory(5000, F_SEAL_SHRINK | F_SEAL_GROW);
        odd[4] = make_memory(0, F_SEAL_SHRINK);
        for (int i = 0; i < RANKS; i++)
            strangers[i].arena = make_memory(WHOLE, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    }
    EXPECT(ftruncate(odd[MAY_SHRINK], WHOLE) == 0);
    now.honest = 1;
    for (int line = 0; line < LINES; line++)
        now.lines[line].socket = -1;
    for (int i = 0; i < RANKS; i++) {
        struct sockaddr_un address;
        stranger *s = &strangers[i];
        uint64_t nonce = i % 2 ? own.nonce + 1 + (uint64_t)i : own.nonce - 1 - (uint64_t)i;
        s->endpoint = (spar_endpoint){own.pid, nonce};
        memset(&s->secret, 1 + i, sizeof s->secret);
        s->listener = -1;
        s->called = 0;
        if (nonce < own.nonce)
            continue;
        socklen_t length = address_of(&s->endpoint, &address);
        s->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        EXPECT(s->listener >= 0 && bind(s->listener, (struct sockaddr *)&address, length) == 0 &&
               listen(s->listener, 64) == 0);
    }
}

/* Everybody dies. */
static void end(void)
{
    spar_arena_stats stats;
    for (int line = 0; line < LINES; line++)
        hang_up(line);
    for (int i = 0; i < RANKS; i++)
        spar_close_fd(&strangers[i].listener);
    while (now.holds)
        leave(now.held[--now.holds]);
    for (int i = 0; i < RANKS; i++)
        for (; now.expects[i]; now.expects[i]--)
            spar_peers_end(&strangers[i].endpoint);
    EXPECT(table.nexpected == 0 && table.ncallers == 0);
    for (int i = 0; i < connected.count; i++) {
        spar_close_fd(&connected.peers[i]->socket);
        spar_close_fd(&connected.peers[i]->pidfd);
        connected.peers[i]->endpoint.pid = INT32_MAX;
    }
    for (int looks = 0; looks < 2; looks++)
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
    int before = dup(odd[0]), after;
    now.world = 2 + (int)(next_byte(&input) % (RANKS - 1));
    now.rank = (int)(next_byte(&input) % (unsigned)now.world);
    for (int steps = next_byte(&input) % 16; steps; steps--)
        meet_somebody();
    fuzz_waits = act;
    set_up();
    fuzz_waits = NULL;
    close(before);
    end();
    /* the lowest free descriptor is what it was, or lower by the listeners that are closed */
    after = dup(odd[0]);
    EXPECT(after <= before);
    close(after);
    return 0;
}
