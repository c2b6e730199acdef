/* powercut_sample: a program small enough to know by reading whether it survives a power cut; powercut_selftest.py tries
 * powercut on it. It appends four results to a journal, says "done N" after each, then publishes all of them as one file
 * and says "published". Started again, it keeps the valid beginning of the journal and goes on.
 *
 *   powercut_sample FOLDER good|early|lazy_file|lazy_folder|in_place
 *
 * good keeps the discipline; early says "done" before the journal is synced; lazy_file renames a file whose data was not
 * synced; lazy_folder never syncs the folder; in_place writes the published file under its final name. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RESULTS = 4, RESULT_BYTES = 9001 };

static bool put(int fd, const void *data, size_t n) { return write(fd, data, n) == (ssize_t)n; }

static void say(const char *word, int number)
{
    char line[40];
    int n = snprintf(line, sizeof line, "%s %d\n", word, number);
    if (!put(1, line, (size_t)n)) _exit(74);
}

static void result_make(int number, char out[RESULT_BYTES])
{
    memset(out, 'a' + number, RESULT_BYTES - 1);
    out[RESULT_BYTES - 1] = '\n';
}

/* Opens the journal and leaves its descriptor behind the last whole result. */
static int journal_open(int folder, bool sync_folder, int *n_results)
{
    int fd = openat(folder, "journal", O_RDWR | O_CREAT, 0600);
    if (fd < 0 || (sync_folder && fsync(folder))) return -1;
    char got[RESULT_BYTES], want[RESULT_BYTES];
    for (*n_results = 0; *n_results < RESULTS; ++*n_results) {
        result_make(*n_results, want);
        off_t at = (off_t)*n_results * RESULT_BYTES;
        if (pread(fd, got, sizeof got, at) != RESULT_BYTES || memcmp(got, want, sizeof got)) break;
    }
    off_t end = (off_t)*n_results * RESULT_BYTES;
    return ftruncate(fd, end) || lseek(fd, end, SEEK_SET) != end ? -1 : fd;
}

static bool publish(int folder, const char *mode)
{
    bool in_place = !strcmp(mode, "in_place");
    const char *name = in_place ? "out" : "out.part";
    int fd = openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0) return false;
    for (int i = 0; i < RESULTS; i++) {
        char result[RESULT_BYTES];
        result_make(i, result);
        if (!put(fd, result, sizeof result)) return false;
    }
    if (strcmp(mode, "lazy_file") && fsync(fd)) return false;
    close(fd);
    if (!in_place && renameat(folder, name, folder, "out")) return false;
    return !strcmp(mode, "lazy_folder") || !fsync(folder);
}

int main(int argc, char **argv)
{
    if (argc != 3) return 64;
    const char *mode = argv[2];
    int folder = open(argv[1], O_RDONLY | O_DIRECTORY), n_results;
    int journal = folder < 0 ? -1 : journal_open(folder, strcmp(mode, "lazy_folder"), &n_results);
    if (journal < 0) return 74;
    for (; n_results < RESULTS; n_results++) {
        char result[RESULT_BYTES];
        result_make(n_results, result);
        if (!put(journal, result, sizeof result)) return 74;
        if (!strcmp(mode, "early")) say("done", n_results);
        if (fdatasync(journal)) return 74;
        if (strcmp(mode, "early")) say("done", n_results);
    }
    struct stat st;
    if (fstatat(folder, "out", &st, 0) && !publish(folder, mode)) return 74;
    say("published", 0);
    return 0;
}
