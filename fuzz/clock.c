/* The system as the library sees it under a fuzzer: see fuzz.h. */
#include "fuzz.h"

#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>
#undef syscall

long syscall(long number, ...);

int64_t fuzz_now_ns = 1000000000;
void (*fuzz_waits)(void);

static void pass(int64_t ns)
{
    fuzz_now_ns += ns;
    if (fuzz_waits)
        fuzz_waits();
}

int fuzz_clock_gettime(clockid_t which, struct timespec *now)
{
    (void)which;
    fuzz_now_ns += 1000; /* else who looks until it is later would look for ever */
    *now = (struct timespec){fuzz_now_ns / 1000000000, fuzz_now_ns % 1000000000};
    return 0;
}

int fuzz_nanosleep(const struct timespec *time, struct timespec *left)
{
    (void)left;
    pass(time->tv_sec * 1000000000LL + time->tv_nsec);
    return 0;
}

int fuzz_sched_yield(void)
{
    pass(1000);
    return 0;
}

/* Futexes; memfd_create and pidfd_open, which have two arguments, are the system's own. */
long fuzz_syscall(long number, ...)
{
    va_list args;
    va_start(args, number);
    long first = va_arg(args, long), second = va_arg(args, long);
    if (number == SYS_futex && second == FUTEX_WAIT) {
        uint32_t seen = va_arg(args, uint32_t);
        const struct timespec *limit = va_arg(args, const struct timespec *);
        if (*(const uint32_t *)first == seen)
            pass(limit->tv_sec * 1000000000LL + limit->tv_nsec);
    }
    va_end(args);
    return number == SYS_futex ? 0 : syscall(number, first, second);
}
