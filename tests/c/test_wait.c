/* How long a rank looks for another before it sleeps, where each look lends its core for some time. */
#define spar_group_check check_of_test
#define spar_group_await await_of_test
#define sched_yield yield_of_test
#define clock_gettime wait_clock_of_test
#include "../../csrc/ipc/wait.c"

#include <stdlib.h>

#define EXPECT(condition) ((condition) ? (void)0 : wrong(__LINE__, #condition))

static struct {
    int64_t now_ns, turn_ns; /* for which a yield lends the core */
    int yields, comes;       /* after so many the word has come */
    uint32_t word;
} now;

static _Noreturn void wrong(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s; %d turns of %lld ns\n", line, condition, now.yields,
            (long long)now.turn_ns);
    abort();
}

int yield_of_test(void)
{
    now.now_ns += now.turn_ns;
    now.word = ++now.yields == now.comes;
    return 0;
}

int wait_clock_of_test(clockid_t clock, struct timespec *time)
{
    (void)clock;
    *time = (struct timespec){now.now_ns / 1000000000, now.now_ns % 1000000000};
    return 0;
}

/* Turns until it sleeps; -1: the word came. */
static int turns(spar_group *g, int64_t turn_ns, int comes)
{
    now.turn_ns = turn_ns;
    now.yields = 0;
    now.comes = comes;
    now.word = 0;
    return spin(g, &now.word, 1) ? -1 : now.yields;
}

int test_wait(int argc, char **argv)
{
    spar_group own = {.own_core = 1, .spin_ns = 200000}, shared = {.spin_ns = 200000};
    (void)argc;
    (void)argv;
    for (int64_t turn_ns = 500; turn_ns < 10000000; turn_ns += turn_ns / 8) {
        EXPECT(turns(&own, turn_ns, 0) == (200000 + turn_ns - 1) / turn_ns);
        shared.current_spin_ns = 200000;
        int64_t counts = turn_ns < YIELDED_NS || turn_ns > PREEMPTED_NS ? 200000 : SLICE_NS;
        EXPECT(turns(&shared, turn_ns, 0) == (counts + turn_ns - 1) / turn_ns);
        EXPECT(shared.current_spin_ns == 100000);
        for (int sleeps = 0; sleeps < 10; sleeps++)
            turns(&shared, turn_ns, 0);
        EXPECT(shared.current_spin_ns == 12500);
        EXPECT(turns(&shared, 100, 100) == -1 && shared.current_spin_ns == 50000);
        EXPECT(turns(&shared, 100, 0) == 500);
    }
    shared.spin_ns = shared.current_spin_ns = own.spin_ns = 0; /* both sleep at once */
    EXPECT(turns(&shared, 1, 0) == 0 && turns(&own, 1, 0) == 0);
    return 0;
}
