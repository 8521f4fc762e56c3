/* SPDX-License-Identifier: Apache-2.0 */
/* Outputs that are columns of one tensor: rows with gaps, of random calls, of many blocks and many ranks. */
#include "random_rows.h"
#include "devices/cpu/nontemporal.h"

static void test_random(uint64_t *seed)
{
    for (int round = 0; round < 600; round++) {
        part parts[TENSORS];
        int world = 1 + draw(seed, WORLD), count;
        draw_call(*seed = scramble(*seed), world, &count, parts);
        spar_nontemporal_use_min(draw(seed, 2) ? 1 : 0);
        run_in_rows(seed, world, count, parts);
    }
    spar_nontemporal_use_min(0);
}

/* A part [2, tokens, columns] of which each rank has columns, and receives tokens: one run of each of so many
 * sequences. */
static part from_columns(int world, int item, int sequences, int64_t tokens, int64_t columns)
{
    part p = {.item = item, .ndim = 3, .whole = {2, sequences * tokens, columns}};
    const int64_t args[] = {4, 2, SPAR_ZIGZAG, 1, columns, 1, SPAR_PACKED, 1, sequences};
    int64_t at = 0;
    for (size_t i = 0; i < sizeof args / sizeof *args; i++)
        put_number(&p, args[i]);
    p.in.dim = 2;
    for (int i = 0; i < 2 * world; i++)
        assign(&p.in, &at, i < world ? i : 2 * world - 1 - i, rule(columns, 2 * world, i));
    p.out.dim = 1;
    at = 0;
    for (int s = 0; s < sequences; s++) {
        put_number(&p, tokens);
        for (int rank = 0; rank < world; rank++)
            assign(&p.out, &at, rank, rule(tokens, world, rank));
    }
    return p;
}

/* More blocks than are placed at once; and more ranks, some of which have nothing. */
static void test_many(uint64_t *seed)
{
    const int worlds[] = {2, 5, 70}, sequences[] = {28, 8, 1};
    const int64_t tokens[] = {2, 7, 60}, columns[] = {10, 30, 60};
    for (int i = 0; i < 3; i++) {
        part parts[TENSORS];
        for (int t = 0; t < TENSORS; t++)
            parts[t] = from_columns(worlds[i], 4 << t, sequences[i], tokens[i], columns[i]);
        run_in_rows(seed, worlds[i], TENSORS, parts);
    }
}

/* What another process may publish: a pitch that its output cannot have. */
static void test_reach(void)
{
    const spar_plan_tensor rows = {.item_size = 4, .ndim = 3, .global = {2, 6, 5}, .out_dim = 1};
    const int outs[] = {-1, 2};
    EXPECT(spar_row_bytes(&rows) == 20);
    EXPECT(spar_rows_reach(&rows, 120, 0) == 120 && spar_rows_reach(&rows, 0, 1) == 0);
    EXPECT(spar_rows_reach(&rows, 120, 20) == 120 && spar_rows_reach(&rows, 120, 32) == 5 * 32 + 20);
    EXPECT(spar_rows_reach(&rows, 120, 19) == -1 && spar_rows_reach(&rows, 120, -20) == -1);
    EXPECT(spar_rows_reach(&rows, 120, INT64_MAX) == -1 && spar_rows_reach(&rows, 120, INT64_MAX / 5) == -1);
    for (int i = 0; i < 2; i++) {
        spar_plan_tensor other = rows;
        other.out_dim = outs[i];
        EXPECT(spar_row_bytes(&other) == 0 && spar_rows_reach(&other, 120, 32) == -1);
    }
}

int test_rows(int argc, char **argv)
{
    uint64_t seed = 5;
    (void)argc;
    (void)argv;
    test_random(&seed);
    test_many(&seed);
    test_reach();
    return 0;
}
