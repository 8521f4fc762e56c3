/* SPDX-License-Identifier: Apache-2.0 */
/* Which stores copies use: learned from a clock of the test's own. */
#include "../../csrc/base/deadline.h"
#include "../../csrc/devices/cpu/nontemporal.h"

static int64_t clock_ns;

#define spar_now_ns() clock_ns
#define spar_nontemporal_min() 1000
#define spar_stores_begin begin_of_test
#define spar_stores_end end_of_test
#define spar_stores_use use_of_test
#include "../../csrc/devices/cpu/stores.c"

#include <stdio.h>

#define CHECK(condition)                                                                                     \
    if (!(condition)) {                                                                                      \
        fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                      \
        return 1;                                                                                            \
    }

/* Makes copies that take so long by ordinary and by non-temporal stores; returns how many were ordinary. */
static int copies(int count, spar_writes writes, int64_t bytes, int64_t ordinary_ns, int64_t nontemporal_ns)
{
    int found = 0;
    for (int i = 0; i < count; i++) {
        spar_stores stores = begin_of_test(writes, bytes);
        clock_ns += stores.kind == SPAR_ORDINARY ? ordinary_ns : nontemporal_ns;
        end_of_test(&stores);
        found += stores.kind == SPAR_ORDINARY;
    }
    return found;
}

int test_stores(int argc, char **argv)
{
    enum { TRIED = TRIES * SPAR_FASTER_STORES, AT_FIRST = 5 /* comparisons in the first PERIOD copies */ };
    const spar_writes one = SPAR_ONE_TARGET, turns = SPAR_IN_TURN, same = SPAR_THE_SAME;
    (void)argc;
    (void)argv;
    CHECK(copies(1000, one, 999, 100, 1) == 1000); /* too short to gain, and so long that all do */
    CHECK(copies(1000, one, LARGE * 1000, 1, 100) == 0);

    CHECK(copies(TRIED, one, 5000, 200, 100) == TRIES); /* both are tried, then the faster is used */
    CHECK(copies(OFTEN - TRIED, one, 5000, 200, 100) == 0);
    CHECK(copies(OFTEN, one, 5000, 100, 200) == OFTEN - TRIES); /* until the next comparison */
    CHECK(copies(PERIOD - 2 * OFTEN, one, 5000, 200, 100) == (AT_FIRST - 2) * TRIES);
    CHECK(copies(PERIOD, one, 5000, 200, 100) == TRIES);
    CHECK(copies(PERIOD, one, 5000, 100, 200) == PERIOD - TRIES);

    CHECK(copies(PERIOD, one, 2000, 1500, 2000) ==
          PERIOD - AT_FIRST * TRIES); /* ordinary ones gain a quarter */
    CHECK(copies(PERIOD, one, 2000, 1505, 2000) == TRIES);
    CHECK(copies(PERIOD, turns, 7000, 0, 0) == PERIOD - AT_FIRST * TRIES);
    CHECK(copies(PERIOD, turns, 2000, INT64_C(100000000000), 1) == AT_FIRST * TRIES);

    copies(PERIOD, same, 3000, 1000, 2000);
    for (int whole = 1; whole < TRIES; whole++) { /* all tries of a kind but one were interrupted */
        for (int i = 0; i < TRIES; i++)
            copies(1, same, 3000, i == whole ? 1000 : 90000, 2000);
        CHECK(copies(TRIES, same, 3000, 1000, 2000) == 0);
        CHECK(copies(PERIOD - TRIED, same, 3000, 1000, 2000) == PERIOD - TRIED);
    }

    use_of_test(SPAR_NONTEMPORAL_STORES);
    CHECK(copies(PERIOD, same, 3000, 1, 2) == 0 && copies(10, same, 999, 1, 2) == 10);
    use_of_test(SPAR_ORDINARY);
    CHECK(copies(PERIOD, same, 3000, 2, 1) == PERIOD);
    return 0;
}
