/* SPDX-License-Identifier: Apache-2.0 */
/* The arena: which block is allocated, which is quarantined, and which pages return to the system. */
#include "ipc/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))
#define MIB ((int64_t)1 << 20)

static void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; last error: %s\n", line, condition, spar_last_error());
    abort();
}

static spar_memory *allocate(int64_t bytes)
{
    spar_memory *block;
    EXPECT(!spar_arena_take(bytes, &block));
    memset(spar_memory_address(block), 1, (size_t)bytes);
    return block;
}

static spar_arena_stats stats(void)
{
    spar_arena_stats now;
    spar_arena_read_stats(&now);
    return now;
}

static void test_open(void)
{
    EXPECT(spar_arena_trim() == 0);
    EXPECT(spar_arena_open(1000, 1) == SPAR_TRANSPORT);
    EXPECT(strstr(spar_last_error(), "1000 bytes; expected at least 262144"));
    EXPECT(!spar_arena_open(256 * MIB, 1));
    EXPECT(!spar_arena_open(7 * MIB, 1)); /* once per process */
    EXPECT(spar_arena_length() == 256 * MIB && stats().cap == 256 * MIB);
}

static void test_lowest_first(void)
{
    spar_memory *a = allocate(1), *b = allocate(129), *c = allocate(MIB), *d = allocate(0);
    EXPECT(spar_memory_offset(a) == 0 && spar_memory_offset(b) == 128);
    EXPECT(spar_memory_offset(c) == 384 && spar_memory_offset(d) == 384 + MIB);
    spar_memory_free(a);
    spar_memory_free(b); /* merges with a's: a free block of 384 bytes */
    b = allocate(384);
    EXPECT(spar_memory_offset(b) == 0);
    spar_memory_free(c);
    a = allocate(200);
    EXPECT(spar_memory_offset(a) == 384);
    spar_memory_free(d);
    spar_memory_free(a);
    spar_memory_free(b);
    EXPECT(stats().allocated == 0 && stats().peak >= MIB);
}

static void test_block_of_an_address(void)
{
    spar_memory *a = allocate(1000), *b = allocate(1000);
    char *at = spar_memory_address(b);
    EXPECT(spar_memory_at(at, 1000) == b && spar_memory_at(at + 999, 1) == b);
    EXPECT(spar_memory_at(at - 1, 1) == a && !spar_memory_at(at - 1, 2));
    EXPECT(!spar_memory_at(at, 0) && !spar_memory_at(at, INT64_MAX) && !spar_memory_at(&a, 1));
    spar_memory_free(b);
    EXPECT(!spar_memory_at(at, 1));
    spar_memory_free(a);
}

static void test_cap(void)
{
    spar_memory *all = allocate(255 * MIB), *more = NULL;
    EXPECT(spar_arena_take(2 * MIB, &more) == SPAR_NO_MEMORY && !more);
    EXPECT(strstr(spar_last_error(), "no 2097152 bytes left of 268435456: 267386880 in use"));
    EXPECT(spar_arena_take(257 * MIB, &more) == SPAR_NO_MEMORY);
    EXPECT(strstr(spar_last_error(), "SPAR_ARENA_MAX"));
    EXPECT(spar_arena_take(INT64_MAX, &more) == SPAR_NO_MEMORY && !more);
    spar_memory_free(all);
}

static int is_settled, forgotten;

static int settled(void *group, uint32_t call)
{
    EXPECT(group == &is_settled && call == 9);
    return is_settled;
}

static void forget(void *group)
{
    EXPECT(group == &is_settled);
    forgotten++;
}

static void test_quarantine(void)
{
    const spar_quarantine rules = {settled, forget};
    spar_memory *slow = allocate(100), *own = allocate(100), *next;
    spar_memory_publish(slow, &rules, &is_settled, 9);
    spar_memory_free(slow);
    EXPECT(stats().quarantined == 128 && stats().allocated == 128);
    next = allocate(100);
    EXPECT(spar_memory_offset(next) == 256 && !forgotten); /* a peer may still write to 0 */
    spar_memory_free(next);
    is_settled = 1;
    next = allocate(100);
    EXPECT(spar_memory_offset(next) == 0 && forgotten == 1 && stats().quarantined == 0);
    is_settled = 0; /* the new block was not published: the peers are not asked */
    spar_memory_free(next);
    spar_memory_free(own);
    EXPECT(forgotten == 1 && stats().allocated == 0);
}

/* While calls go on, idle pages return to the system, at most 64 MiB at a time. */
static void test_idle(void)
{
    const struct timespec second = {1, 50000000};
    int64_t before = stats().returned, after = before;
    EXPECT(stats().reserved >= 255 * MIB);
    spar_memory_free(allocate(200 * MIB));
    spar_arena_idle(1);
    for (int i = 0; i < 6; i++) {
        nanosleep(&second, NULL);
        int64_t last = after;
        spar_memory *block = allocate(1000);
        EXPECT(((char *)spar_memory_address(block))[999] == 1);
        spar_memory_free(block);
        after = stats().returned;
        EXPECT(after - last <= 64 * MIB);
    }
    EXPECT(after - before >= 254 * MIB && stats().reserved <= 2 * MIB);
    EXPECT(stats().reserved + after - before >= 255 * MIB);
    spar_memory *block = allocate(100 * MIB); /* needs new pages */
    spar_memory_free(block);
    EXPECT(spar_arena_trim() >= 99 * MIB && stats().reserved <= MIB);
}

/* A child keeps the parent's outputs and cannot free them. */
static void test_fork(void)
{
    spar_memory *block = allocate(100);
    int status;
    pid_t child = fork();
    if (child == 0) {
        spar_memory_free(block);
        _exit(spar_arena_is_own() || spar_arena_fd() != -1 || spar_arena_trim() != 0 ||
              spar_arena_open(0, 1) != SPAR_TRANSPORT);
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    EXPECT(stats().allocated == 128 && spar_arena_is_own());
    spar_memory_free(block);
}

int test_arena(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    test_open();
    test_lowest_first();
    test_block_of_an_address();
    test_cap();
    test_quarantine();
    test_fork();
    test_idle();
    return 0;
}
