#include "devices/cpu/threads.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

enum { MOST = 64 };

static struct {
    pthread_mutex_t turn; /* held by the thread whose copy it is */
    pthread_mutex_t lock;
    pthread_cond_t begins, ends;
    pid_t owner;           /* a forked child has none of its parent's threads */
    int64_t worth;         /* bytes */
    int size, threads;     /* wanted, with the caller; made, without */
    int parts, next, left; /* of the copy: all, the next to be taken, not yet done */
    void (*work)(void *context, int part, int parts);
    void *context;
} team = {.turn = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .begins = PTHREAD_COND_INITIALIZER,
          .ends = PTHREAD_COND_INITIALIZER,
          .size = 1,
          .worth = 1 << 20};

void spar_team_size(int threads)
{
    int size = threads < 1 ? 1 : threads > MOST ? MOST : threads;
    __atomic_store_n(&team.size, size, __ATOMIC_RELAXED);
}

int spar_team_share(int64_t bytes)
{
    int64_t size = __atomic_load_n(&team.size, __ATOMIC_RELAXED);
    int64_t worth = bytes / __atomic_load_n(&team.worth, __ATOMIC_RELAXED);
    return worth < 1 ? 1 : (int)(worth < size ? worth : size);
}

void spar_team_worth(int64_t bytes)
{
    __atomic_store_n(&team.worth, bytes, __ATOMIC_RELAXED);
}

/* Takes parts as long as there are some. With the lock held. */
static void take_parts(void)
{
    while (team.next < team.parts) {
        int part = team.next++, parts = team.parts;
        pthread_mutex_unlock(&team.lock);
        team.work(team.context, part, parts);
        pthread_mutex_lock(&team.lock);
        if (--team.left == 0)
            pthread_cond_signal(&team.ends);
    }
}

static void *serve(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&team.lock);
    for (;;) {
        take_parts();
        pthread_cond_wait(&team.begins, &team.lock);
    }
    return NULL;
}

/* As many as are wanted, or can be had: who is missing only leaves more to the others. With the turn held. */
static void hire(int wanted)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's own threads' */
    for (pthread_t thread; team.threads < wanted; team.threads++) {
        if (pthread_create(&thread, NULL, serve, NULL) != 0)
            break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Whether this is the process that has, or shall have, the threads. With the turn held. */
static int is_own(void)
{
    if (!team.owner)
        team.owner = getpid();
    return team.owner == getpid();
}

void spar_team_run(void (*work)(void *context, int part, int parts), void *context, int parts)
{
    int taken = parts > 1 && pthread_mutex_trylock(&team.turn) == 0;
    if (!taken || !is_own()) {
        for (int part = 0; part < parts; part++)
            work(context, part, parts);
        if (taken)
            pthread_mutex_unlock(&team.turn);
        return;
    }
    hire(parts - 1);
    pthread_mutex_lock(&team.lock);
    team.work = work;
    team.context = context;
    team.next = 0;
    team.parts = team.left = parts;
    pthread_cond_broadcast(&team.begins);
    take_parts();
    while (team.left)
        pthread_cond_wait(&team.ends, &team.lock);
    pthread_mutex_unlock(&team.lock);
    pthread_mutex_unlock(&team.turn);
}
