/* replay: runs one fuzz target over files and folders, once each, under any compiler.
 *
 * The fuzzer proper needs clang; its findings and seeds have to stay fixed under every build. Each input is copied into
 * memory of exactly its size, so that a sanitizer sees the first byte read past its end. A folder without files is an
 * error: a corpus that got lost must not look like one that passed. */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path, long *count)
{
    FILE *f = fopen(path, "rb");
    if (!f) return perror(path), 1;
    struct stat st;
    uint8_t *data = NULL;
    int failed = fstat(fileno(f), &st);
    size_t size = failed ? 0 : (size_t)st.st_size;
    if (!failed) data = malloc(size ? size : 1);
    if (failed || !data || fread(data, 1, size, f) != size) {
        fprintf(stderr, "%s: cannot be read\n", path);
        failed = 1;
    } else {
        fprintf(stderr, "%s\n", path);
        LLVMFuzzerTestOneInput(data, size);
        ++*count;
    }
    free(data);
    fclose(f);
    return failed != 0;
}

static int not_hidden(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static int replay_folder(const char *path, long *count)
{
    struct dirent **entries;
    int n = scandir(path, &entries, not_hidden, alphasort);
    if (n < 0) return perror(path), 1;
    int failed = 0;
    for (int i = 0; i < n; i++) {
        char name[4096];
        snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name);
        failed |= replay_file(name, count);
        free(entries[i]);
    }
    free(entries);
    return failed;
}

int main(int argc, char **argv)
{
    int failed = 0;
    long count = 0;
    for (int i = 1; i < argc; i++) {
        struct stat st;
        bool folder = !stat(argv[i], &st) && S_ISDIR(st.st_mode);
        failed |= folder ? replay_folder(argv[i], &count) : replay_file(argv[i], &count);
    }
    printf("%ld inputs\n", count);
    return failed || !count;
}
