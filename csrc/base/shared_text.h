/* Texts in memory that ranks share, which another may read while they change.
 *
 * They go word by word: who sees a new word sees, too, what its writer stored before it, by which it tells that
 * the text is not whole. */
#ifndef SPAR_SHARED_TEXT_H
#define SPAR_SHARED_TEXT_H

#include <stdint.h>
#include <string.h>

/* As much as fits into `count` words with a zero behind it; the rest is zeros. */
static inline void spar_shared_text_write(uint64_t *target, int count, const char *text)
{
    size_t left = strnlen(text, (size_t)count * sizeof *target - 1);
    for (int i = 0; i < count; i++) {
        uint64_t word = 0;
        size_t part = left < sizeof word ? left : sizeof word;
        memcpy(&word, text, part);
        text += part;
        left -= part;
        __atomic_store_n(&target[i], word, __ATOMIC_RELEASE);
    }
}

/* All `count` words, whatever they hold; the last byte of `text` [count * 8] is zero. */
static inline void spar_shared_text_read(const uint64_t *source, int count, char *text)
{
    for (int i = 0; i < count; i++) {
        uint64_t word = __atomic_load_n(&source[i], __ATOMIC_ACQUIRE);
        memcpy(text + (size_t)i * sizeof word, &word, sizeof word);
    }
    text[(size_t)count * sizeof *source - 1] = 0;
}

#endif
