/* SPDX-License-Identifier: Apache-2.0 */
/* tests NAME [ARGUMENTS]: runs one of the tests in this folder; exit status 0 if it passes. */
#include <stdio.h>
#include <string.h>

int test_arena(int argc, char **argv);
int test_core(int argc, char **argv);
int test_cuda(int argc, char **argv);
int test_items(int argc, char **argv);
int test_links(int argc, char **argv);
int test_messages(int argc, char **argv);
int test_ring(int argc, char **argv);
int test_passing(int argc, char **argv);
int test_peers(int argc, char **argv);
int test_push(int argc, char **argv);
int test_scale(int argc, char **argv);
int test_shm(int argc, char **argv);
int test_siphash(int argc, char **argv);
int test_slots(int argc, char **argv);
int test_strangers(int argc, char **argv);
int test_sum(int argc, char **argv);
int test_nontemporal(int argc, char **argv);
int test_wait(int argc, char **argv);

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } tests[] = {{"arena", test_arena},         {"core", test_core},
                 {"cuda", test_cuda},           {"ring", test_ring},
                 {"peers", test_peers},         {"push", test_push},
                 {"scale", test_scale},         {"shm", test_shm},
                 {"siphash", test_siphash},     {"nontemporal", test_nontemporal},
                 {"wait", test_wait},           {"sum", test_sum},
                 {"links", test_links},         {"messages", test_messages},
                 {"strangers", test_strangers}, {"slots", test_slots},
                 {"passing", test_passing},     {"items", test_items}};
    for (int i = 0; i < (int)(sizeof tests / sizeof *tests); i++)
        if (argc > 1 && strcmp(argv[1], tests[i].name) == 0)
            return tests[i].run(argc - 1, argv + 1);
    fprintf(stderr, "%s: no test of this name\n", argc > 1 ? argv[1] : "");
    return 2;
}
