/* tests NAME [ARGUMENTS]: one of the tests in this folder; 0 where it holds. */
#include <stdio.h>
#include <string.h>

int test_arena(int argc, char **argv);
int test_core(int argc, char **argv);
int test_cuda(int argc, char **argv);
int test_ledger(int argc, char **argv);
int test_peers(int argc, char **argv);
int test_scale(int argc, char **argv);
int test_shm(int argc, char **argv);
int test_siphash(int argc, char **argv);
int test_spread(int argc, char **argv);
int test_stream(int argc, char **argv);
int test_wait(int argc, char **argv);

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } tests[] = {{"arena", test_arena},   {"core", test_core},       {"cuda", test_cuda},
                 {"ledger", test_ledger}, {"peers", test_peers},     {"scale", test_scale},
                 {"shm", test_shm},       {"siphash", test_siphash}, {"spread", test_spread},
                 {"stream", test_stream}, {"wait", test_wait}};
    for (int i = 0; i < (int)(sizeof tests / sizeof *tests); i++)
        if (argc > 1 && strcmp(argv[1], tests[i].name) == 0)
            return tests[i].run(argc - 1, argv + 1);
    fprintf(stderr, "%s: no test of this name\n", argc > 1 ? argv[1] : "");
    return 2;
}
