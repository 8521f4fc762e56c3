/* SPDX-License-Identifier: Apache-2.0 */
/* Each process's newest call, on any group, stored behind its arena. Peers read it for the message of a call
 * that it did not make; it is informational, and never trusted. */
#ifndef SPAR_LAST_CALL_H
#define SPAR_LAST_CALL_H

#include "ipc/arena.h"

/* Records that this process begins a call, if it has an arena; pass the returned sequence to
 * spar_last_call_end. */
uint32_t spar_last_call_begin(const char *group, const char *op, uint32_t call);
void spar_last_call_end(uint32_t begun, int gave_up);

typedef enum {
    SPAR_CALL_UNKNOWN, /* it changed at each of many reads */
    SPAR_CALL_NONE,    /* the process has begun no call */
    SPAR_CALL_RUNNING,
    SPAR_CALL_ENDED,
    SPAR_CALL_ABORTED,
    SPAR_CALL_ARRIVED, /* of a rank on another host: its newest call of which this one knows */
} spar_call_state;

typedef struct {
    spar_call_state state;
    uint32_t call;
    char op[64], group[64];
} spar_last_call;

/* The last call of the process whose arena is mapped at `base` and is `length` bytes long. */
spar_last_call spar_last_call_read(const char *base, int64_t length);

#endif
