/* SPDX-License-Identifier: Apache-2.0 */
/* Connections between processes: the peer table under many threads, and handshakes that fail for lack of
 * descriptors, or are put off.
 *
 * test_peers groups WORLD THREADS ROUNDS: on several threads at once, each process sets up a group with the
 * threads of the same number in the other processes, makes a call on it, and closes it. test_peers refused:
 * of two processes, first one, then the other has no descriptor left. test_peers hang_up: the answerer hangs
 * up on the dialer before its first message. test_peers all WORLD: each process connects to all others; an
 * answerer holds fewer callers than dial it. */
#include "control/control.h"
#include "ipc/handshake.h"
#include "processes.h"
#include "spar.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { MOST = 4, THREADS = 8 };

extern const spar_transport spar_transport_shm;

/* What the ranks of one group exchange without spar. */
typedef struct {
    pthread_barrier_t barrier;
    spar_peer_info info[MOST];
    spar_setup_result opened[MOST], connected[MOST];
} rendezvous;

typedef struct {
    int world, threads, rounds;
    pthread_barrier_t barrier; /* one thread of each process */
    rendezvous groups[THREADS];
    spar_peer_info info[MOST_RANKS]; /* without groups */
} shared_state;

typedef struct {
    shared_state *all;
    int process, thread;
} place;

static _Noreturn void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

static spar_deadline soon(void)
{
    return (spar_deadline){.at_ns = spar_now_ns() + 20000000000};
}

/* ---- groups ---- */

static void describe_call(const void *call, char *text, size_t size, spar_gathered_size *gathered)
{
    (void)call;
    (void)gathered;
    snprintf(text, size, "a call");
}

static void one_call(spar_group *group, int world, int rank, int round)
{
    const spar_deadline deadline = soon();
    spar_call_header own = {.signature = (uint64_t)round + 1, .offsets = {rank, round}}, all[MOST];
    uint32_t call;
    EXPECT(!spar_group_begin(group, &deadline, &call) && call == 1);
    EXPECT(!spar_group_publish(group, &own, describe_call, NULL, all, &deadline));
    for (int p = 0; p < world; p++)
        EXPECT(all[p].offsets[0] == p && all[p].offsets[1] == round);
    EXPECT(!spar_group_finish(group, &deadline));
}

/* Rank 0 aborts without a reason. */
static void abort_without_reason(spar_group *group, rendezvous *m, int rank)
{
    const spar_deadline deadline = soon();
    uint32_t call;
    if (rank == 0)
        spar_group_break(group, "");
    pthread_barrier_wait(&m->barrier);
    EXPECT(spar_group_begin(group, &deadline, &call) == SPAR_BROKEN);
    EXPECT(strcmp(spar_last_error(), "rank 0 aborted") == 0);
}

static void *run_thread(void *argument)
{
    const place *at = argument;
    rendezvous *m = &at->all->groups[at->thread];
    for (int round = 0; round < at->all->rounds; round++) {
        const spar_deadline deadline = soon();
        spar_comm *comm;
        spar_peer_info_read(&m->info[at->process]);
        pthread_barrier_wait(&m->barrier);
        EXPECT(!spar_comm_open(&spar_transport_shm, m->info, at->all->world, at->process, at->all->world,
                               NULL, &comm, &m->opened[at->process]));
        pthread_barrier_wait(&m->barrier);
        EXPECT(!spar_comm_connect(comm, m->opened, &deadline, &m->connected[at->process]));
        pthread_barrier_wait(&m->barrier);
        for (int p = 0; p < at->all->world; p++)
            EXPECT(!m->connected[p].failed);
        one_call(comm->group, at->all->world, at->process, round);
        if (round % 8 == 7)
            abort_without_reason(comm->group, m, at->process);
        spar_comm_close(comm);
    }
    return NULL;
}

/* Sets groups up on all threads at once; afterwards all mailboxes are freed. */
static void run_process(void *context, int process)
{
    shared_state *all = context;
    pthread_t threads[THREADS];
    place places[THREADS];
    spar_arena_stats stats;
    for (int t = 0; t < all->threads; t++) {
        places[t] = (place){all, process, t};
        EXPECT(pthread_create(&threads[t], NULL, run_thread, &places[t]) == 0);
    }
    for (int t = 0; t < all->threads; t++)
        EXPECT(pthread_join(threads[t], NULL) == 0);
    pthread_barrier_wait(&all->barrier); /* all groups are closed */
    spar_arena_trim();
    spar_arena_read_stats(&stats);
    EXPECT(stats.allocated == 0 && stats.quarantined == 0);
    pthread_barrier_wait(&all->barrier);
}

/* ---- refused ---- */

/* Polls until the peer is connected, or failed. */
static spar_status poll_peer(const spar_endpoint *other, spar_peer **peer)
{
    const struct timespec moment = {0, 500000};
    for (int64_t until = spar_now_ns() + 10000000000; spar_now_ns() < until;) {
        spar_status status = spar_peers_poll(other, peer);
        if (status != SPAR_OK || *peer)
            return status;
        nanosleep(&moment, NULL);
    }
    return spar_fail(SPAR_TIMEOUT, "the peer did not connect");
}

static void release(spar_peer *peer)
{
    spar_peers_unmap(peer);
    spar_peers_release(peer);
}

/* Publishes this process's endpoint and waits for those of the others. */
static spar_endpoint listen_with_all(shared_state *all, int process)
{
    spar_peer_info *own = &all->info[process];
    EXPECT(!spar_arena_open(1 << 20, all->world) && !spar_peers_listen(&own->endpoint, &own->secret));
    pthread_barrier_wait(&all->barrier);
    return own->endpoint;
}

static void run_refused(void *context, int process)
{
    shared_state *all = context;
    const spar_peer_info *other_info = &all->info[!process];
    const spar_endpoint *other = &other_info->endpoint;
    spar_peer *peer, *again;
    int dials = listen_with_all(all, process).pid < other->pid;

    /* the answerer cannot accept, and the dialer does not poll: the next set-up dials again */
    EXPECT(!spar_peers_expect(other, &other_info->secret));
    pthread_barrier_wait(&all->barrier);
    if (!dials) {
        struct rlimit was = no_more_descriptors();
        EXPECT(spar_peers_poll(other, &peer) == SPAR_TRANSPORT);
        EXPECT(strstr(spar_last_error(), "accepting a connection: Too many open files"));
        EXPECT(setrlimit(RLIMIT_NOFILE, &was) == 0);
    }
    pthread_barrier_wait(&all->barrier);
    spar_peers_end(other);

    /* the answerer accepts, but the dialer cannot receive the arena; the answerer believes that it is
     * connected */
    EXPECT(!spar_peers_expect(other, &other_info->secret));
    pthread_barrier_wait(&all->barrier);
    if (dials) {
        struct rlimit was = no_more_descriptors();
        EXPECT(poll_peer(other, &peer) == SPAR_TRANSPORT);
        EXPECT(strstr(spar_last_error(), "could not be received: too many open files"));
        EXPECT(setrlimit(RLIMIT_NOFILE, &was) == 0);
    } else {
        spar_status status = poll_peer(other, &peer); /* fails if it already noticed the hang-up */
        EXPECT(status == SPAR_OK ||
               (status == SPAR_TRANSPORT && strstr(spar_last_error(), "the process hung up")));
    }
    pthread_barrier_wait(&all->barrier);
    spar_peers_end(other);

    /* a third set-up succeeds, although the answerer's group still holds the stale peer */
    EXPECT(!spar_peers_expect(other, &other_info->secret));
    EXPECT(!poll_peer(other, &again) && spar_endpoint_same(&again->endpoint, other));
    EXPECT(!peer || (spar_peer_hung_up(peer) && !spar_peer_is_dead(peer)));
    EXPECT(!spar_peer_hung_up(again));
    pthread_barrier_wait(&all->barrier);
    spar_peers_end(other);
    release(again);
    if (peer)
        release(peer);
    pthread_barrier_wait(&all->barrier);
}

/* ---- put off ---- */

static struct {
    int hang_ups;
    pthread_barrier_t *barrier;
} before_call; /* what the answerer does between the dialer's connect and its first message */

/* Interposes libc's function. */
ssize_t send(int socket, const void *bytes, size_t size, int flags)
{
    for (; before_call.hang_ups; before_call.hang_ups--) {
        pthread_barrier_wait(before_call.barrier); /* the answerer has a caller, */
        pthread_barrier_wait(before_call.barrier); /* and hung up */
    }
    return sendto(socket, bytes, size, flags, NULL, 0);
}

/* The end of the last expectation hangs up on all callers, as the arrival of too many does on the oldest. */
static void run_hang_up(void *context, int process)
{
    shared_state *all = context;
    spar_peer_info *other = &all->info[!process];
    const spar_endpoint absent = {1, 1}; /* a lower one, which is to dial */
    const spar_key secret = {{0}};
    spar_peer *peer;
    before_call.barrier = &all->barrier;
    if (listen_with_all(all, process).pid < other->endpoint.pid) {
        before_call.hang_ups = 1;
        EXPECT(!spar_peers_expect(&other->endpoint, &other->secret) && !before_call.hang_ups);
    } else {
        pthread_barrier_wait(&all->barrier);
        EXPECT(!spar_peers_expect(&absent, &secret));
        EXPECT(!spar_peers_poll(&absent, &peer) && spar_peers_count().pending == 1);
        spar_peers_end(&absent);
        EXPECT(spar_peers_count().pending == 0);
        pthread_barrier_wait(&all->barrier);
        EXPECT(!spar_peers_expect(&other->endpoint, &other->secret));
    }
    EXPECT(!poll_peer(&other->endpoint, &peer));
    spar_peers_end(&other->endpoint);
    pthread_barrier_wait(&all->barrier);
    release(peer);
}

static int early_ends; /* of peeks that find a message, how many are told of an end before */

/* Interposes libc's function: Linux may report a hang-up before the message that was sent before it. */
ssize_t recv(int socket, void *bytes, size_t size, int flags)
{
    ssize_t got = recvfrom(socket, bytes, size, flags, NULL, NULL);
    if (!(flags & MSG_PEEK) || got <= 0 || !early_ends)
        return got;
    early_ends--;
    return 0;
}

static void run_all(void *context, int process)
{
    shared_state *all = context;
    spar_peer *peers[MOST_RANKS];
    listen_with_all(all, process);
    early_ends = 1;
    for (int p = 0; p < all->world; p++)
        EXPECT(p == process || !spar_peers_expect(&all->info[p].endpoint, &all->info[p].secret));
    pthread_barrier_wait(&all->barrier); /* as in a set-up: all dial before any answers */
    for (int p = 0; p < all->world; p++)
        EXPECT(p == process || !poll_peer(&all->info[p].endpoint, &peers[p]));
    for (int p = 0; p < all->world; p++)
        if (p != process)
            spar_peers_end(&all->info[p].endpoint);
    pthread_barrier_wait(&all->barrier);
    for (int p = 0; p < all->world; p++)
        if (p != process)
            release(peers[p]);
}

int test_peers(int argc, char **argv)
{
    static const struct {
        const char *name;
        int arguments;
        void (*run)(void *context, int process);
    } modes[] = {{"groups", 3, run_process},
                 {"refused", 0, run_refused},
                 {"hang_up", 0, run_hang_up},
                 {"all", 1, run_all}};
    shared_state *all = shared_memory(sizeof *all);
    EXPECT(all);
    all->world = argc > 2 ? atoi(argv[2]) : 2;
    all->threads = argc > 4 ? atoi(argv[3]) : 0;
    all->rounds = argc > 4 ? atoi(argv[4]) : 0;
    EXPECT(all->world >= 2 && all->world <= (all->threads ? MOST : MOST_RANKS) && all->threads <= THREADS);
    share_barrier(&all->barrier, all->world);
    for (int t = 0; t < all->threads; t++)
        share_barrier(&all->groups[t].barrier, all->world);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (argc == 2 + modes[i].arguments && strcmp(argv[1], modes[i].name) == 0)
            return run_ranks(all->world, modes[i].run, all);
    return 2;
}
