/* SPDX-License-Identifier: Apache-2.0 */
/* How long a rank polls before it blocks, when each yield takes some time. */
#define spar_group_check check_of_test
#define spar_group_await await_of_test
#define spar_group_abort abort_of_test
#define spar_group_list list_of_test
#define spar_group_poll poll_of_test
#define spar_mailbox_publish publish_of_test
#define sched_yield yield_of_test
#define clock_gettime wait_clock_of_test
#include "../../csrc/control/mailbox.c"

#include <stdlib.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

static struct {
    int64_t now_ns, yield_ns; /* the time that a yield takes */
    int yields, ready_after;  /* the number of yields after which the word is set */
    uint32_t word;
} now;

static _Noreturn void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; %d yields of %lld ns\n", line, condition, now.yields,
            (long long)now.yield_ns);
    abort();
}

int yield_of_test(void)
{
    now.now_ns += now.yield_ns;
    now.word = ++now.yields == now.ready_after;
    return 0;
}

int wait_clock_of_test(clockid_t clock, struct timespec *time)
{
    (void)clock;
    *time = (struct timespec){now.now_ns / 1000000000, now.now_ns % 1000000000};
    return 0;
}

/* Returns the number of yields before it blocks; -1: the word was set. */
static int yields_before_block(spar_group *g, int64_t yield_ns, int ready_after)
{
    now.yield_ns = yield_ns;
    now.yields = 0;
    now.ready_after = ready_after;
    now.word = 0;
    return spin(g, &now.word, 1) ? -1 : now.yields;
}

int test_wait(int argc, char **argv)
{
    spar_group own = {.own_core = 1, .spin_ns = 200000}, shared = {.spin_ns = 200000};
    (void)argc;
    (void)argv;
    for (int64_t yield_ns = 500; yield_ns < 10000000; yield_ns += yield_ns / 8) {
        EXPECT(yields_before_block(&own, yield_ns, 0) == (200000 + yield_ns - 1) / yield_ns);
        shared.current_spin_ns = 200000;
        int64_t counts = yield_ns < YIELDED_NS || yield_ns > PREEMPTED_NS ? 200000 : SLICE_NS;
        EXPECT(yields_before_block(&shared, yield_ns, 0) == (counts + yield_ns - 1) / yield_ns);
        EXPECT(shared.current_spin_ns == 100000);
        for (int i = 0; i < 10; i++)
            yields_before_block(&shared, yield_ns, 0);
        EXPECT(shared.current_spin_ns == 12500);
        EXPECT(yields_before_block(&shared, 100, 100) == -1 && shared.current_spin_ns == 50000);
        EXPECT(yields_before_block(&shared, 100, 0) == 500);
    }
    shared.spin_ns = shared.current_spin_ns = own.spin_ns = 0; /* both block at once */
    EXPECT(yields_before_block(&shared, 1, 0) == 0 && yields_before_block(&own, 1, 0) == 0);
    return 0;
}
