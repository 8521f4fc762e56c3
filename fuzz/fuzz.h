/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the fuzzers: numbers drawn from the input, and a simulated clock that only waits advance.
 *
 * The library is compiled with its clock, sleeps and futexes renamed (see run). A wait returns at once,
 * advances the simulated clock, and lets the simulated peers act. So runs are deterministic, and a timeout of
 * seconds takes microseconds. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const uint8_t *next, *end;
} source;

/* The input's next byte; 0 at its end. */
static inline unsigned next_byte(source *s)
{
    return s->next < s->end ? *s->next++ : 0;
}

static inline uint64_t next_uint64(source *s)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | next_byte(s);
    return value;
}

/* A small number, an edge case, or any number. */
static inline int64_t next_number(source *s)
{
    static const int64_t edge_cases[] = {
        -1,
        INT64_MIN,
        INT64_MAX,
        1ll << 62,
        -(1ll << 62),
        1ll << 61,
        1ll << 60,
        1ll << 31,
        (1ll << 32) + 1,
        (1ll << 32) - 1,
        (1ll << 20) + 1,
        INT32_MIN,
        64,
        65,
        4096,
        4097,
    };
    unsigned byte = next_byte(s);
    if (byte < 128)
        return byte % 16;
    if (byte < 192)
        return byte - 128;
    if (byte < 240)
        return edge_cases[byte % (sizeof edge_cases / sizeof *edge_cases)];
    return (int64_t)next_uint64(s);
}

/* The library's clock, in ns; only waits advance it. */
extern int64_t fuzz_now_ns;

/* Called when a wait has advanced the clock: the simulated peers may act. */
extern void (*fuzz_on_wait)(void);

/* Called before a poll, which then does not wait: the simulated peers may act. NULL: polls wait as usual. */
extern void (*fuzz_on_poll)(void);

#endif
