/* A group's set-up: one rank, whose peers are sockets on which anything may come.
 *
 * Facts and verdicts are what a rank is handed of the others as bytes; hellos come over the socket, with whatever
 * descriptors. While the rank waits, the input lets the strangers call, answer, say something else or hang up. Each
 * step ends in time, in success or in an error, in success where all were honest; an arena that is taken for a
 * peer's can be touched from end to end; and at the end no memory, mapping or descriptor is left. */
#include "../csrc/hello.c" /* the words of a hello are known to it alone, */
#include "../csrc/peers.c" /* and the table to it */

#include "../csrc/spar.h"
#include "fuzz.h"

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

extern const spar_transport spar_transport_shm;

enum {
    RANKS = 4,
    LINES = 8,
    LENGTH = 1 << 14,
    WHOLE = LENGTH + SPAR_ARENA_TAIL,
    HELD = 16,
    MAY_SHRINK = 1
};

/* Some other process; of half of them this one is the lower, and calls. */
typedef struct {
    spar_endpoint endpoint;
    int listener, arena, called;
} stranger;

static source input;
static spar_endpoint own;
static stranger strangers[RANKS];
static int odd[5]; /* descriptors that are no arenas of LENGTH bytes */
static struct {
    int world, rank, honest, waits, next;
    int lines[LINES]; /* ends of connections; -1: free */
    spar_peer *held[HELD];
    int holds;
} now;

static void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

/* ---- the strangers ---- */

static void hang_up(int line)
{
    if (now.lines[line] >= 0)
        close(now.lines[line]);
    now.lines[line] = -1;
}

/* A free one; else one that must hang up for it. */
static int new_line(int fd)
{
    int line = 0;
    while (line < LINES && now.lines[line] >= 0)
        line++;
    if (line == LINES) {
        line = now.next++ % LINES;
        now.honest = 0;
    }
    hang_up(line);
    now.lines[line] = fd;
    return line;
}

static void send_words(int line, const void *words, size_t size, const int *fds, int count)
{
    char control[CMSG_SPACE(sizeof(int) * 6)] = {0};
    struct iovec part = {(void *)(uintptr_t)words, size};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count)};
    if (count) {
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * (size_t)count);
    } else {
        message.msg_control = NULL;
        message.msg_controllen = 0;
    }
    if (now.lines[line] >= 0 && sendmsg(now.lines[line], &message, MSG_NOSIGNAL) < 0)
        hang_up(line);
}

static hello hello_of(const stranger *s)
{
    hello words = {.from = s->endpoint, .to = own, .length = LENGTH};
    memcpy(words.magic, MAGIC, sizeof MAGIC);
    return words;
}

static int call_in(void)
{
    struct sockaddr_un address;
    socklen_t length = address_of(&own, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    EXPECT(fd >= 0 && connect(fd, (struct sockaddr *)&address, length) == 0);
    return new_line(fd);
}

static int take_in(const stranger *s)
{
    int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    return fd < 0 ? -1 : new_line(fd);
}

/* What a right process does: it calls if it is the lower, and answers if it is not. */
static void behave(stranger *s)
{
    hello words = hello_of(s);
    int line = s->listener >= 0 ? take_in(s) : s->called ? -1 : call_in();
    s->called = 1;
    if (line >= 0)
        send_words(line, &words, sizeof words, &s->arena, 1);
}

static void lie(int line)
{
    hello words = hello_of(&strangers[next_byte(&input) % RANKS]);
    unsigned what = next_byte(&input), count = next_byte(&input);
    int fds[6];
    size_t size = sizeof words;
    if (what & 1)
        words.magic[next_byte(&input) % sizeof words.magic] = (char)next_byte(&input);
    if (what & 2)
        words.from = (spar_endpoint){next_number(&input), next_word(&input)};
    if (what & 4)
        words.to = (spar_endpoint){next_number(&input), next_word(&input)};
    if (what & 8)
        words.length = next_number(&input);
    if (what & 16)
        memset(words.refusal, (int)next_byte(&input), sizeof words.refusal);
    if (what & 32)
        size = next_byte(&input) % (sizeof words + 1);
    for (int i = 0; i < 6; i++) {
        unsigned which = next_byte(&input) % 10;
        fds[i] = which < 5 ? odd[which] : strangers[which % RANKS].arena;
    }
    send_words(line, &words, size, fds, (int)(count < 128 ? 1 : count % 7));
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
    for (int i = 0; i < table.count; i++)
        if (table.peers[i]->state == CONNECTED)
            touch(table.peers[i]);
    switch (what % 8) {
    case 0:
        for (int i = 0; i < RANKS; i++)
            behave(&strangers[i]);
        return;
    case 1:
        behave(&strangers[who]);
        return;
    case 2: /* somebody calls, and says nothing yet */
        call_in();
        return;
    case 3: /* somebody is called, and says nothing yet */
        if (strangers[who].listener >= 0)
            take_in(&strangers[who]);
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

/* Calls and meetings as they may come when several groups are set up at once. */
static void meet_somebody(void)
{
    const stranger *s = &strangers[next_byte(&input) % RANKS];
    unsigned what = next_byte(&input);
    if (what % 4 == 0) {
        EXPECT(spar_peers_dial(&s->endpoint) == SPAR_OK || *spar_last_error());
    } else if (what % 4 == 1 && now.holds) {
        spar_peers_leave(now.held[--now.holds]);
    } else if (now.holds < HELD) {
        spar_peer *peer;
        spar_status status = spar_peers_meet(&s->endpoint, &peer);
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
    spar_facts facts[RANKS];
    spar_verdict verdicts[RANKS], verdict;
    spar_choice choice;
    spar_comm *comm;
    spar_facts_read(&facts[0]);
    EXPECT(!facts[0].error[0] && !facts[0].no_shm[0]);
    for (int rank = 0; rank < RANKS; rank++) {
        int32_t place[2] = {now.world, rank};
        facts[rank] = facts[0];
        memset(&verdicts[rank], 0, sizeof *verdicts);
        verdicts[rank].offset = 64 * rank;
        EXPECT(pwrite(strangers[rank].arena, &box, sizeof box, 64 * rank) == sizeof box &&
               pwrite(strangers[rank].arena, place, sizeof place, 64 * rank + 8) == sizeof place);
        if (rank != now.rank)
            facts[rank].endpoint = strangers[rank].endpoint;
    }
    facts[now.rank].endpoint = own;
    spoil(facts, sizeof *facts * (size_t)now.world, (size_t)now.rank, sizeof *facts);
    spar_status status = spar_choose(facts, now.world, "cpu", NULL, &choice);
    EXPECT(status == SPAR_OK || (!now.honest && *spar_last_error()));
    if (status != SPAR_OK)
        return;
    check_choice(&choice);
    EXPECT(choice.transport == &spar_transport_shm || !now.honest);
    if (choice.transport != &spar_transport_shm)
        return;
    static const spar_native none;
    EXPECT(!spar_comm_open(choice.transport, facts, now.world, now.rank, now.world, &none, &comm,
                           &verdicts[now.rank]));
    EXPECT(!verdicts[now.rank].failed || !now.honest);
    spoil(verdicts, sizeof *verdicts * (size_t)now.world, (size_t)now.rank, sizeof *verdicts);
    const spar_patience patience = {.deadline_ns = fuzz_now_ns + 1000000000};
    status = spar_comm_connect(comm, verdicts, &patience, &verdict);
    EXPECT(status == SPAR_OK || (status == SPAR_TIMEOUT && !now.honest));
    EXPECT(!verdict.failed || (!now.honest && verdict.reason[0]));
    EXPECT(memchr(verdict.reason, 0, sizeof verdict.reason));
    spar_comm_close(comm);
}

/* ---- an input ---- */

static int make_memory(int64_t length, int seals)
{
    int fd = memfd_create("stranger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT(fd >= 0 && ftruncate(fd, length) == 0 && fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void begin(void)
{
    if (!own.pid) {
        int ends[2];
        EXPECT(!spar_arena_open(1 << 20, 1) && !spar_peers_listen(&own) && pipe(ends) == 0);
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
        now.lines[line] = -1;
    for (int i = 0; i < RANKS; i++) {
        struct sockaddr_un address;
        stranger *s = &strangers[i];
        uint64_t nonce = i % 2 ? own.nonce + 1 + (uint64_t)i : own.nonce - 1 - (uint64_t)i;
        s->endpoint = (spar_endpoint){own.pid, nonce};
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
        close_fd(&strangers[i].listener);
    while (now.holds)
        spar_peers_leave(now.held[--now.holds]);
    for (int i = 0; i < table.count; i++) {
        close_fd(&table.peers[i]->socket);
        close_fd(&table.peers[i]->pidfd);
        table.peers[i]->endpoint.pid = INT32_MAX;
    }
    for (int looks = 0; looks < 2; looks++)
        spar_arena_trim();
    while (table.count) {
        EXPECT(table.peers[0]->groups == 0);
        drop(table.peers[0]);
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
    begin();
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
