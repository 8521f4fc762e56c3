/* SPDX-License-Identifier: Apache-2.0 */
/* Non-temporal copies: all alignments and lengths, with each width that this CPU has; nothing else is
 * written. */
#define spar_nontemporal_min min_of_test
#define spar_nontemporal_use_min use_min_of_test
#define spar_nontemporal_copy copy_of_test
#include "../../csrc/devices/cpu/nontemporal.c"

#include <stdio.h>
#include <stdlib.h>

enum { ROOM = 4096, EDGE = 64 };

static void check(const char *name, int64_t to_at, int64_t from_at, int64_t n, const char *to,
                  const char *from)
{
    for (int64_t i = 0; i < ROOM; i++) {
        char expected = i >= to_at && i < to_at + n ? from[from_at + i - to_at] : 'x';
        if (to[i] != expected) {
            fprintf(stderr, "%s of %lld bytes from %lld to %lld: wrong at %lld\n", name, (long long)n,
                    (long long)from_at, (long long)to_at, (long long)i);
            abort();
        }
    }
}

#ifdef __x86_64__
/* Linux lists the sets that the processor has and the system enables. */
static void check_sets(void)
{
    static const struct {
        const char *name;
        int set;
    } rows[] = {{" avx2", SPAR_AVX2}, {" avx512f", SPAR_AVX512F}, {" avx512vl", SPAR_AVX512}};
    char line[8192];
    FILE *file = fopen("/proc/cpuinfo", "re");
    while (file && fgets(line, sizeof line, file))
        for (int i = 0; strncmp(line, "flags", 5) == 0 && i < 3; i++)
            if (spar_processor_has(rows[i].set) != (strstr(line, rows[i].name) != NULL)) {
                fprintf(stderr, "spar_processor_has is wrong about%s\n", rows[i].name);
                abort();
            }
    if (file)
        fclose(file);
}
#endif

int test_nontemporal(int argc, char **argv)
{
    static _Alignas(EDGE) char to[ROOM], from[ROOM];
    unsigned seed = 1;
    (void)argc;
    (void)argv;
#ifdef __x86_64__
    check_sets();
#endif
    for (int i = 0; i < ROOM; i++)
        from[i] = (char)rand_r(&seed);
    for (int round = 0; round < 30000; round++) {
        int64_t to_at = rand_r(&seed) % EDGE, from_at = rand_r(&seed) % EDGE;
        int64_t n = rand_r(&seed) % (round % 2 ? ROOM - EDGE : 200);
        memset(to, 'x', sizeof to);
        copy_of_test(to + to_at, from + from_at, n);
        spar_nontemporal_fence();
        check("a copy", to_at, from_at, n, to, from);
#ifdef SPAR_NONTEMPORAL
        n &= ~(int64_t)(EDGE - 1);
        n = n < ROOM - 2 * EDGE ? n : 0;
        for (int wide = 0; wide <= spar_processor_has(SPAR_AVX512F); wide++) {
            memset(to, 'x', sizeof to);
            (wide ? copy_lines_avx512 : copy_lines_sse2)(to + EDGE, from + from_at, n);
            spar_nontemporal_fence();
            check(wide ? "avx512" : "sse2", EDGE, from_at, n, to, from);
        }
#endif
    }
    int64_t least = min_of_test();
    if (least < INT64_MAX && (least < 4096 || least > 64 << 20))
        return 1;
#ifdef SPAR_NONTEMPORAL
    use_min_of_test(1);
    if (min_of_test() != 1)
        return 1;
    use_min_of_test(0);
#endif
    return min_of_test() != least;
}
