/* write_tiny_gguf PATH: the tiny model as a file, for tests that run the whole program without a downloaded model. */
#define _GNU_SOURCE
#include <stdio.h>

#include "tiny_gguf.h"

int main(int argc, char **argv)
{
    struct tiny_gguf t = tiny_gguf_default();
    if (argc != 2) return fputs("usage: write_tiny_gguf PATH\n", stderr), 64;
    if (!tiny_gguf_write(&t, argv[1])) return perror(argv[1]), 73;
    return 0;
}
