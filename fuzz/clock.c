/* SPDX-License-Identifier: Apache-2.0 */
/* System calls as the library sees them under a fuzzer: see fuzz.h. */
#include "fuzz.h"

#include <linux/futex.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>
#undef syscall
#undef poll

long syscall(long number, ...);
int poll(struct pollfd *polled, nfds_t count, int wait_ms);

int64_t fuzz_now_ns = 1000000000;
void (*fuzz_on_wait)(void);
void (*fuzz_on_poll)(void);

static void advance(int64_t ns)
{
    fuzz_now_ns += ns;
    if (fuzz_on_wait)
        fuzz_on_wait();
}

int fuzz_clock_gettime(clockid_t clock, struct timespec *now)
{
    (void)clock;
    fuzz_now_ns += 1000; /* else a loop that polls the clock would never end */
    *now = (struct timespec){fuzz_now_ns / 1000000000, fuzz_now_ns % 1000000000};
    return 0;
}

int fuzz_nanosleep(const struct timespec *time, struct timespec *left)
{
    (void)left;
    advance(time->tv_sec * 1000000000LL + time->tv_nsec);
    return 0;
}

int fuzz_sched_yield(void)
{
    advance(1000);
    return 0;
}

/* The fuzzed rank stays on one core. */
int fuzz_sched_getcpu(void)
{
    return 0;
}

int fuzz_poll(struct pollfd *polled, nfds_t count, int wait_ms)
{
    if (!fuzz_on_poll)
        return poll(polled, count, wait_ms);
    fuzz_on_poll();
    int ready = poll(polled, count, 0);
    if (ready == 0 && wait_ms > 0)
        fuzz_now_ns += wait_ms * 1000000LL;
    return ready;
}

/* Emulates futexes. memfd_create and pidfd_open, which take two arguments, go to the kernel. */
long fuzz_syscall(long number, ...)
{
    va_list args;
    va_start(args, number);
    long first = va_arg(args, long), second = va_arg(args, long);
    if (number == SYS_futex && second == FUTEX_WAIT) {
        uint32_t seen = va_arg(args, uint32_t);
        const struct timespec *limit = va_arg(args, const struct timespec *);
        if (*(const uint32_t *)first == seen)
            advance(limit->tv_sec * 1000000000LL + limit->tv_nsec);
    }
    va_end(args);
    return number == SYS_futex ? 0 : syscall(number, first, second);
}
