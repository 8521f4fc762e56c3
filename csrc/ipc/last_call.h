/* Where each process is: the newest call that it began, on any group. It is kept behind the process's arena, where
 * peers look when it does not come to theirs. Words for a message: nobody waits for them or trusts them. */
#ifndef SPAR_LAST_CALL_H
#define SPAR_LAST_CALL_H

#include "ipc/arena.h"

/* This process begins a call; does nothing without an arena. Returns what `end` takes. */
uint32_t spar_last_call_begin(const char *group, const char *op, uint32_t call);
void spar_last_call_end(uint32_t begun, int gave_up);

/* Of the process whose arena lies at `base`, `length` bytes long: "gather, call 3 on group 'x'". */
void spar_last_call_read(const char *base, int64_t length, char *text, size_t size);

#endif
