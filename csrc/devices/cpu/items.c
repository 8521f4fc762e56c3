/* SPDX-License-Identifier: Apache-2.0 */
#include "devices/cpu/items.h"

#include "devices/cpu/nontemporal.h"
#include "devices/cpu/vectors.h"

#include <string.h>

enum { VECTOR = 16 }; /* bytes that every 64-bit processor loads at once */

#define FILL_LINE(size)                                                                                      \
    case size:                                                                                               \
        for (int at = 0; at < SPAR_CACHE_LINE; at += size)                                                   \
            memcpy(line + at, s, size);                                                                      \
        break;

int spar_repeat_item(char *d, const char *s, int64_t n, int64_t item, int nontemporal)
{
    _Alignas(SPAR_CACHE_LINE) char line[SPAR_CACHE_LINE];
    int64_t head = -(intptr_t)d & (SPAR_CACHE_LINE - 1), tail = (n * item - head) & (SPAR_CACHE_LINE - 1);
    if (n * item < 2 * SPAR_CACHE_LINE || (intptr_t)d & (item - 1)) /* lines would differ */
        return 0;
    switch (item) {
        FILL_LINE(1)
        FILL_LINE(2)
        FILL_LINE(4)
        FILL_LINE(8)
        FILL_LINE(16)
        FILL_LINE(32)
    default:
        return 0;
    }
    char *end = d + n * item - tail;
    memcpy(d, line, (size_t)head);
    for (char *to = d + head; to < end; to += SPAR_CACHE_LINE)
        if (nontemporal)
            spar_nontemporal_line(to, line);
        else
            memcpy(to, line, SPAR_CACHE_LINE);
    memcpy(end, line, (size_t)tail);
    return 1;
}

typedef uint8_t vector1 __attribute__((vector_size(VECTOR)));
typedef uint16_t vector2 __attribute__((vector_size(VECTOR)));
typedef uint32_t vector4 __attribute__((vector_size(VECTOR)));
typedef uint64_t vector8 __attribute__((vector_size(VECTOR)));

/* Half of two vectors, from item i on, interleaved: one instruction. */
#define ZIP8(a, b, i) a[i], b[i]
#define ZIP4(a, b, i) ZIP8(a, b, i), ZIP8(a, b, (i) + 1)
#define ZIP2(a, b, i) ZIP4(a, b, i), ZIP4(a, b, (i) + 2)
#define ZIP1(a, b, i) ZIP2(a, b, i), ZIP2(a, b, (i) + 4)

/* Transposes a square of as many rows as a vector has items, and stores its first `rows`. Interleaving its
 * first half with its second one rotates the bits of an item's index (row, column) by one place; after as
 * many rounds as a row's number has bits, they have changed places. */
#define SQUARE(size, rounds)                                                                                 \
    INLINE void square##size(char *d, const char *s, int64_t ds, int64_t ss, int64_t rows)                   \
    {                                                                                                        \
        enum { SIDE = VECTOR / size };                                                                       \
        vector##size now[SIDE], next[SIDE];                                                                  \
        for (int i = 0; i < SIDE; i++)                                                                       \
            memcpy(&now[i], s + i * ss, VECTOR);                                                             \
        for (int round = 0; round < rounds; round++) {                                                       \
            for (int i = 0; i < SIDE / 2; i++) {                                                             \
                vector##size a = now[i], b = now[i + SIDE / 2];                                              \
                next[2 * i] = (vector##size){ZIP##size(a, b, 0)};                                            \
                next[2 * i + 1] = (vector##size){ZIP##size(a, b, SIDE / 2)};                                 \
            }                                                                                                \
            memcpy(now, next, sizeof now);                                                                   \
        }                                                                                                    \
        for (int64_t i = 0; i < rows; i++)                                                                   \
            memcpy(d + i * ds, &now[i], VECTOR);                                                             \
    }

SQUARE(1, 4)
SQUARE(2, 3)
SQUARE(4, 2)
SQUARE(8, 1)

INLINE void square16(char *d, const char *s, int64_t ds, int64_t ss, int64_t rows)
{
    (void)rows;
    (void)ds;
    (void)ss;
    memcpy(d, s, VECTOR);
}

typedef void square(char *d, const char *s, int64_t ds, int64_t ss, int64_t rows);

/* Transposes to a line in each row of a square, past the caches, by way of lines on the stack. */
INLINE void transpose_lines(square *transpose, int64_t item, char *d, const char *s, int64_t ds, int64_t ss)
{
    _Alignas(SPAR_CACHE_LINE) char lines[VECTOR * SPAR_CACHE_LINE];
    for (int64_t at = 0; at < SPAR_CACHE_LINE; at += VECTOR)
        transpose(lines + at, s + at / item * ss, SPAR_CACHE_LINE, ss, VECTOR / item);
    for (int64_t row = 0; row < VECTOR / item; row++)
        spar_nontemporal_line(d + row * ds, lines + row * SPAR_CACHE_LINE);
}

INLINE int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Fewer rows than a square has: what lies between columns is read, too, but nothing behind the last one. */
INLINE int transpose_few(square *transpose, int64_t item, char *d, const char *s, int64_t rows,
                         int64_t columns, int64_t ds, int64_t ss)
{
    const int64_t side = VECTOR / item;
    int64_t column = 0, unread = (columns - side) * ss + rows * item - VECTOR; /* behind the first square */
    if (rows < side / 4 || columns < side || unread < 0)
        return 0;
    for (; column + side <= columns && column * ss <= unread; column += side)
        transpose(d + column * item, s + column * ss, ds, ss, rows);
    for (; column < columns; column++)
        for (int64_t row = 0; row < rows; row++)
            memcpy(d + row * ds + column * item, s + row * item + column * ss, (size_t)item);
    return 1;
}

/* Squares at the end overlap those before. `transpose` and `item` are constants where this is inlined. */
INLINE int transpose_items(square *transpose, int64_t item, char *d, const char *s, int64_t rows,
                           int64_t columns, int64_t ds, int64_t ss, int nontemporal)
{
    const int64_t side = VECTOR / item, line = SPAR_CACHE_LINE / item;
    int64_t head = (-(intptr_t)d & (SPAR_CACHE_LINE - 1)) / item, end = -1;
    if (rows < side)
        return transpose_few(transpose, item, d, s, rows, columns, ds, ss);
    if (columns < side)
        return 0;
    if (nontemporal && ((intptr_t)d & (item - 1)) == 0 && (ds & (SPAR_CACHE_LINE - 1)) == 0)
        end = columns - line; /* the last column at which a line may begin */
    for (int64_t next = 0; next < rows; next += side) {
        int64_t row = least(next, rows - side);
        char *to = d + row * ds;
        const char *from = s + row * item;
        for (int64_t column = 0; column < columns;) {
            if (column >= head && column <= end) {
                transpose_lines(transpose, item, to + column * item, from + column * ss, ds, ss);
                column += line;
            } else {
                int64_t at = least(column, columns - side);
                transpose(to + at * item, from + at * ss, ds, ss, side);
                column = column < head ? least(column + side, head) : column + side;
            }
        }
    }
    return 1;
}

#define TRANSPOSE(size)                                                                                      \
    case size:                                                                                               \
        return transpose_items(square##size, size, d, s, rows, columns, ds, ss, nontemporal);

int spar_transpose_items(char *d, const char *s, int64_t rows, int64_t columns, int64_t ds, int64_t ss,
                         int64_t item, int nontemporal)
{
    switch (item) {
        TRANSPOSE(1)
        TRANSPOSE(2)
        TRANSPOSE(4)
        TRANSPOSE(8)
        TRANSPOSE(16)
    default:
        return 0;
    }
}
