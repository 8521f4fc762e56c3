/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank waits before it blocks, by the cores on which it and its peers run. */
#define spar_group_check check_of_test
#define spar_group_await await_of_test
#define spar_group_await_far await_far_of_test
#define spar_group_abort abort_of_test
#define spar_group_break break_of_test
#define spar_group_pump pump_of_test
#define spar_group_list list_of_test
#define spar_group_poll poll_of_test
#define spar_mailbox_publish publish_of_test
#define sched_yield yield_of_test
#define sched_getcpu core_of_test
#define clock_gettime wait_clock_of_test
#include "../../csrc/control/mailbox.c"

#include <stdlib.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

enum { WORLD = 3, SPIN_NS = 200000 };

static mailbox *boxes[WORLD]; /* of rank 0, which waits, and its peers */
static spar_peer near;
static spar_peer *peers[WORLD] = {NULL, &near, &near};
static spar_group group = {.world = WORLD, .spin_ns = SPIN_NS, .boxes = boxes, .peers = peers};
static struct {
    int core;
    int64_t ns, yield_ns; /* yield_ns: the time that a yield takes */
    int yields, polls;    /* since the wait began; polls: reads of the clock */
    int ready_after;      /* the number of yields or polls after which rank 1's word is set */
    int move_after;       /* the number of polls after which this rank migrates to core 1 */
} now = {.ns = 1000000, .yield_ns = 2000};

static _Noreturn void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; %d yields, %d polls\n", line, condition, now.yields, now.polls);
    abort();
}

static void advance(int64_t ns)
{
    now.ns += ns;
    if (now.yields + now.polls == now.ready_after)
        boxes[1]->published = 1;
    if (now.polls == now.move_after)
        now.core = 1;
}

int yield_of_test(void)
{
    now.yields++;
    advance(now.yield_ns);
    return 0;
}

int core_of_test(void)
{
    return now.core;
}

int wait_clock_of_test(clockid_t clock, struct timespec *time)
{
    (void)clock;
    now.polls++;
    advance(1000);
    *time = (struct timespec){now.ns / 1000000000, now.ns % 1000000000};
    return 0;
}

/* Waits on core 0 for ranks 1 and 2, which are on these cores; returns the rank to block for, or -1. */
static int wait_beside(int first, int second)
{
    boxes[1]->core = (uint32_t)first + 1;
    boxes[2]->core = (uint32_t)second + 1;
    now.core = now.yields = now.polls = 0;
    return spin(&group, SPAR_PUBLISHED, 1);
}

static void check_published_core(void)
{
    now.core = 7;
    publish_of_test(group.own, &group.own->published, 1);
    EXPECT(group.own->core == 8);
    now.core = -1; /* the system does not report it */
    publish_of_test(group.own, &group.own->done, 1);
    EXPECT(group.own->core == 0);
}

int test_wait(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    for (int rank = 0; rank < WORLD; rank++) {
        boxes[rank] = calloc(1, sizeof(mailbox) + WORLD);
        EXPECT(boxes[rank] != NULL);
    }
    group.own = boxes[0];
    check_published_core();

    EXPECT(wait_beside(1, 1) == 1); /* both elsewhere: poll for the whole spin time, without a yield */
    EXPECT(now.yields == 0 && now.polls == SPIN_NS / 1000 + 1);
    EXPECT(wait_beside(0, 1) == 1); /* one is here: yield a few times, then block for it */
    EXPECT(now.yields == YIELDS && now.polls == YIELDS + 1);
    EXPECT(wait_beside(1, 0) == 2); /* also if another is awaited before it */
    EXPECT(now.yields == YIELDS && group.own->core == 1);
    now.move_after = 10; /* migrates to a peer's core while it polls, and publishes that */
    EXPECT(wait_beside(1, 2) == 1 && now.yields == YIELDS && now.polls == 10 + YIELDS);
    EXPECT(group.own->core == 2);
    now.move_after = 0;
    EXPECT(wait_beside(-1, -1) == 1 && now.yields == 0); /* cores that are not known */

    peers[2] = NULL; /* on another host: it needs no core of this one */
    EXPECT(wait_beside(1, 0) == 1 && now.yields == 0);
    peers[2] = &near;
    boxes[2]->published = 1; /* has arrived: its core does not matter */
    EXPECT(wait_beside(1, 0) == 1 && now.yields == 0);
    now.ready_after = 3;
    EXPECT(wait_beside(1, 0) == -1 && now.polls == 3);
    boxes[1]->published = 0;
    EXPECT(wait_beside(0, 0) == -1 && now.yields == 1);
    EXPECT(wait_beside(0, 0) == -1 && now.yields == 0 && now.polls == 0); /* all have: no system call */

    boxes[1]->published = 0;
    now.ready_after = 0;
    now.yield_ns = 2 * LONG_YIELD_NS; /* a yield went to another process: no further one for a time */
    group.spin_ns = 10 * LONG_YIELD_NS;
    EXPECT(wait_beside(0, 0) == 1 && now.yields == 1);
    EXPECT(wait_beside(0, 0) == 1 && now.yields == 0);
    now.ns += 2 * YIELD_PAUSE * now.yield_ns;
    now.yield_ns = 2000;
    EXPECT(wait_beside(0, 0) == 1 && now.yields == YIELDS);

    group.spin_ns = 0; /* block at once, wherever the peers are */
    EXPECT(wait_beside(0, 0) == 1 && now.yields == 0);
    EXPECT(wait_beside(1, 1) == 1 && now.polls == 1);
    for (int rank = 0; rank < WORLD; rank++)
        free(boxes[rank]);
    return 0;
}
