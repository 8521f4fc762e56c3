/* What the fuzzers share: bytes as numbers, and a world whose clock stands still while nobody waits.
 *
 * The library is compiled for them with its clock, its sleeps and its futexes renamed (see run): a wait ends at
 * once, costs time of this clock alone, and lets the other ranks, who are the fuzzer's, act. So nothing here
 * depends on the machine, and a limit of seconds takes microseconds. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const uint8_t *next, *end;
} source;

/* The input's next byte; 0 when it is used up. */
static inline unsigned next_byte(source *s)
{
    return s->next < s->end ? *s->next++ : 0;
}

static inline uint64_t next_word(source *s)
{
    uint64_t word = 0;
    for (int i = 0; i < 8; i++)
        word = word << 8 | next_byte(s);
    return word;
}

/* Small, remarkable, or any. */
static inline int64_t next_number(source *s)
{
    static const int64_t remarkable[] = {
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
        return remarkable[byte % (sizeof remarkable / sizeof *remarkable)];
    return (int64_t)next_word(s);
}

/* The library's clock, in ns; only waits move it. */
extern int64_t fuzz_now_ns;

/* Called while the library waits: time has passed, and the others may have acted. */
extern void (*fuzz_waits)(void);

#endif
