/* SPDX-License-Identifier: Apache-2.0 */
/* Text in memory that ranks share; a peer may read it while it changes.
 *
 * It is stored word by word with release order: a reader that sees a new word also sees what the writer
 * stored before it, and so can detect an incomplete text. */
#ifndef SPAR_SHARED_TEXT_H
#define SPAR_SHARED_TEXT_H

#include <stdint.h>
#include <string.h>

/* Stores the text, cut to fit `count` words with its terminator, and zeros after it. */
static inline void spar_shared_text_write(uint64_t *target, int count, const char *text)
{
    size_t left = strnlen(text, (size_t)count * sizeof *target - 1);
    for (int i = 0; i < count; i++) {
        uint64_t word = 0;
        if (left >= sizeof word) { /* a copy of fixed size takes one instruction */
            memcpy(&word, text, sizeof word);
            text += sizeof word;
            left -= sizeof word;
        } else if (left) {
            memcpy(&word, text, left);
            left = 0;
        }
        __atomic_store_n(&target[i], word, __ATOMIC_RELEASE);
    }
}

/* Reads all `count` words, whatever they hold, and terminates `text` [count * 8]. */
static inline void spar_shared_text_read(const uint64_t *source, int count, char *text)
{
    for (int i = 0; i < count; i++) {
        uint64_t word = __atomic_load_n(&source[i], __ATOMIC_ACQUIRE);
        memcpy(text + (size_t)i * sizeof word, &word, sizeof word);
    }
    text[(size_t)count * sizeof *source - 1] = 0;
}

#endif
