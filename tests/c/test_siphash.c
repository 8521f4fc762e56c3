/* SPDX-License-Identifier: Apache-2.0 */
/* SipHash-2-4-128 against the published vectors: key 00 01 .. 0f, messages 00 01 .. of each length. */
#include "base/siphash.h"

#include <stdio.h>

static const struct {
    size_t size;
    const char *code;
} vectors[] = {
    {0, "a3817f04ba25a8e66df67214c7550293"}, {1, "da87c1d86b99af44347659119b22fc45"},
    {2, "8177228da4a45dc7fca38bdef60affe4"}, {3, "9c70b60c5267a94e5f33b6b02985ed51"},
    {4, "f88164c12d9c8faf7d0f6e7c7bcd5579"}, {5, "1368875980776f8854527a07690e9627"},
    {6, "14eeca338b208613485ea0308fd7a15e"}, {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
    {8, "3b62a9ba6258f5610f83e264f31497b4"}, {15, "5493e99933b0a8117e08ec0f97cfc3d9"},
};

int test_siphash(int argc, char **argv)
{
    spar_key key;
    unsigned char message[16];
    (void)argc;
    (void)argv;
    for (unsigned char i = 0; i < 16; i++)
        key.bytes[i] = message[i] = i;
    for (size_t v = 0; v < sizeof vectors / sizeof *vectors; v++) {
        spar_key code = spar_siphash(&key, message, vectors[v].size), expected;
        for (int i = 0; i < 16; i++)
            sscanf(vectors[v].code + 2 * i, "%2hhx", &expected.bytes[i]);
        if (!spar_key_same(&code, &expected)) {
            fprintf(stderr, "the code of %zu bytes differs from the vector\n", vectors[v].size);
            return 1;
        }
        expected.bytes[v % 16] ^= 1;
        if (spar_key_same(&code, &expected))
            return 1;
    }
    return 0;
}
