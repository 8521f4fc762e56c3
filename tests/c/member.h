/* SPDX-License-Identifier: Apache-2.0 */
/* A rank of a group whose ranks share no memory, in a thread of a test, and its calls with checked bytes. */
#ifndef MEMBER_H
#define MEMBER_H

#include "control/control.h"
#include "ipc/tcp.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__FILE__, __LINE__, #condition))

enum { MOST = 3, EAGER_BYTES = 32768, LARGE = 3000000, GUARD = 64 };

static const int64_t LONG_NS = 30000000000;

static inline _Noreturn void wrong(const char *file, int line, const char *condition)
{
    fprintf(stderr, "%s:%d: %s; last error: %s\n", file, line, condition, spar_last_error());
    abort();
}

static inline spar_deadline after(int64_t ns)
{
    return (spar_deadline){.at_ns = spar_now_ns() + ns};
}

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

static inline void open_member(member *m, int world, int rank)
{
    *m = (member){.world = world, .rank = rank};
    EXPECT(!spar_arena_open(1 << 24, 1));
    EXPECT(!spar_group_open(world, rank, 0, &m->group, &m->offset));
}

static inline void far_of(const member *m, unsigned char *far)
{
    for (int rank = 0; rank < m->world; rank++)
        far[rank] = rank != m->rank;
}

/* The group owns the sockets from now on. */
static inline void link_member(member *m)
{
    unsigned char far[MOST];
    int64_t pids[MOST] = {101, 102, 103}, offsets[MOST] = {0};
    spar_peer *peers[MOST] = {NULL};
    far_of(m, far);
    EXPECT(!spar_group_link(m->group, far, pids, m->sockets));
    EXPECT(!spar_group_attach(m->group, peers, offsets));
}

static inline void connect_member(member *m, const spar_tcp_endpoint *endpoints)
{
    unsigned char far[MOST];
    spar_deadline deadline = after(LONG_NS);
    far_of(m, far);
    EXPECT(!spar_tcp_connect(m->setup, far, endpoints, &deadline, m->sockets));
    spar_tcp_end(m->setup);
    link_member(m);
}

static inline void fill(unsigned char *bytes, int64_t size, int from, int to, uint32_t call)
{
    enum { PERIOD = 251 * 256 }; /* then the bytes repeat */
    for (int64_t i = 0; i < size && i < PERIOD; i++)
        bytes[i] = (unsigned char)(i * 7 + i / 251 + from * 31 + to * 17 + call * 3);
    for (int64_t i = PERIOD; i < size; i += PERIOD)
        memcpy(bytes + i, bytes, (size_t)(size - i < PERIOD ? size - i : PERIOD));
}

static inline unsigned char *with_guards(int64_t size)
{
    unsigned char *bytes = malloc((size_t)size + 2 * GUARD);
    EXPECT(bytes != NULL);
    memset(bytes, 0xee, (size_t)size + 2 * GUARD);
    return bytes + GUARD;
}

static inline void free_with_guards(const void *address, int64_t size)
{
    const unsigned char *bytes = address;
    for (int i = 0; i < GUARD; i++)
        EXPECT(bytes[-1 - i] == 0xee && bytes[size + i] == 0xee);
    free((void *)(uintptr_t)(bytes - GUARD));
}

static inline void take_parcel(void *context, int rank)
{
    member *m = context;
    m->arrived[rank]++;
}

static inline void describe(const void *call, char *text, size_t size, spar_gathered_size *gathered)
{
    memset(gathered, 0, sizeof *gathered);
    snprintf(text, size, "%s", (const char *)call);
}

static inline spar_status move_bytes(member *m, int64_t bytes, uint64_t signature,
                                     const spar_deadline *deadline)
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
static inline spar_status call_for(member *m, int64_t bytes, uint64_t signature, int64_t limit_ns)
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

static inline spar_status call(member *m, int64_t bytes)
{
    return call_for(m, bytes, 1, LONG_NS);
}

static inline void send_all(int fd, const void *bytes, size_t size)
{
    const char *next = bytes;
    for (ssize_t n; size; next += n, size -= (size_t)n)
        if ((n = send(fd, next, size, MSG_NOSIGNAL)) <= 0)
            return; /* the peer has closed it */
}

#endif
