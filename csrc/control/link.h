/* SPDX-License-Identifier: Apache-2.0 */
/* Private to links.c, link_send.c and link_receive.c: one link, and its messages. */
#ifndef SPAR_LINK_H
#define SPAR_LINK_H

#include "control/links.h"
#include "ipc/peer_table.h"

#include <pthread.h>
#include <sys/uio.h>

/* The most bytes that follow at once; MPI calls such messages eager. Sockets take as many although nobody
 * reads, so that a call that does not happen leaves no sender waiting. Only the end of a larger call may be
 * in the way. */
enum { EAGER_BYTES = 32768 };

/* A rank's call. */
typedef struct {
    uint32_t call, status; /* status: other than SPAR_OK: it failed; why, in `following` bytes */
    uint64_t signature;
    int64_t forward;
    int64_t bytes, following; /* of the call, for the receiver; and of them, those that follow at once */
    char op[64];
} call_message;

enum { DESCRIBES = 1, ENDS, WAITS, BREAKS };

/* What does not wait for bytes. */
typedef struct {
    uint32_t kind, call, status, unused; /* status: of BREAKS; of ENDS, with which the rank failed the call */
    union {
        spar_ranks ranks;            /* BREAKS: that caused it */
        spar_gathered_size gathered; /* DESCRIBES has it */
        spar_last_call waits;        /* WAITS: on any group */
    };
    char text[SPAR_GROUP_TEXT];
} control_message;

typedef struct {
    int far;
    int sockets[SPAR_TCP_CHANNELS]; /* -1: it has ended */
    int64_t pid;
    int64_t heard_ns; /* when bytes last came, or a connection ended */
    uint32_t arrived; /* the call whose bytes are all here */
    int taken;        /* and the caller knows */
    call_message in;
    size_t in_got;
    char *to; /* where the next bytes go; NULL: nobody wants them */
    int64_t left;
    control_message control;
    size_t control_got;
    control_message failure; /* the newest ENDS with a status */
    spar_last_call newest;   /* of the rank, as far as it is known here */
    call_message out;
    struct iovec parts[2]; /* still to be sent: a message, and bytes */
} spar_link;

struct spar_links {
    int world;
    spar_link *links; /* [world] */
    char *boxes;      /* [world] the copies of far ranks' mailboxes, each sizeof(mailbox) long */
    struct pollfd *polled;
    spar_links *next;
};

/* Guards the list of all links, and sending and closing control connections. */
extern pthread_mutex_t spar_links_lock;
extern spar_links *spar_links_all;

/* Whether all messages are on their way. */
static inline int spar_link_is_sent(const spar_link *l)
{
    return !l->parts[0].iov_len && !l->parts[1].iov_len;
}

/* Stores a word of a far rank's copy; any thread may read it. */
static inline void spar_link_set(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* Sends what the data connection takes; returns whether it took any. */
int spar_link_send(spar_link *l);

/* Ends the data connection. */
void spar_link_end_data(spar_link *l);

/* Whether a far rank's call is still to come, or bytes of it. */
int spar_link_is_awaited(const spar_group *group, int rank);

/* Receives once from the data connection; sets *got if something came. */
spar_status spar_link_receive(spar_group *group, int rank, int *got);

/* Publishes, as this rank's copy of it has it, that a far rank failed the current call, if it has said so. */
void spar_link_publish_failure(spar_group *group, int rank);

/* Receives all that has come on the control connection. */
void spar_link_receive_control(spar_group *group, int rank);

#endif
