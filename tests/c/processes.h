/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the ranks of a test as forked processes that share memory. */
#ifndef PROCESSES_H
#define PROCESSES_H

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_RANKS = 128 };

/* Maps zeroed memory that forks share; NULL on failure. */
static inline void *shared_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Lowers the limit so that no descriptor is left; returns the previous limit, 0 on failure. */
static inline struct rlimit no_more_descriptors(void)
{
    struct rlimit was = {0}, none;
    int next = dup(0);
    if (next < 0 || close(next) != 0 || getrlimit(RLIMIT_NOFILE, &was) != 0)
        return was;
    none = was;
    none.rlim_cur = (rlim_t)next;
    return setrlimit(RLIMIT_NOFILE, &none) == 0 ? was : (struct rlimit){0};
}

/* Initializes a barrier in shared memory. */
static inline void share_barrier(pthread_barrier_t *barrier, int world)
{
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(barrier, &shared, (unsigned)world);
}

/* Runs work(context, rank) in one process per rank. Returns 0 if all succeed; does not return in a child. */
static inline int run_ranks(int world, void (*work)(void *context, int rank), void *context)
{
    pid_t ranks[MOST_RANKS];
    int failed = world > MOST_RANKS, started = 0;
    for (; !failed && started < world; started++) {
        if ((ranks[started] = fork()) == 0) {
            work(context, started);
            exit(0);
        }
        failed = ranks[started] < 0;
    }
    for (int left = started; left; left--) {
        int status;
        if (wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0)
            continue;
        failed = 1;
        for (int rank = 0; rank < started; rank++) /* the others may wait at a barrier */
            if (ranks[rank] > 0)
                kill(ranks[rank], SIGKILL);
    }
    return failed;
}

#endif
