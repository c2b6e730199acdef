/* Archives: what goes in comes out, the same bytes every time, whole or not at all; and hostile ones stay outside. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "archive.h"

#include <lib_archive.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <nettle/sha2.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *const outputs[] = {"o.tar.zst", "o.tar.gz", "o.tar.xz", "o.tar", "o.zip", "o"};
enum { N_OUTPUTS = sizeof outputs / sizeof *outputs, BIG = 300000, LIMIT = 1 << 20 };

static char folder[] = "/tmp/tandem-archive-XXXXXX";
static char big[BIG];

static int setup(void **state)
{
    (void)state;
    strcpy(folder + strlen(folder) - 6, "XXXXXX");
    uint32_t x = 1;
    for (size_t i = 0; i < BIG; i++) { /* half of it hard to compress */
        x = x * 1664525u + 1013904223u;
        big[i] = i % 2 ? (char)(x >> 24) : 'b';
    }
    return mkdtemp(folder) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    char command[100];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

static const char *at(const char *name)
{
    static char paths[4][200];
    static int turn;
    char *path = paths[turn++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static int count_entries(const char *path)
{
    DIR *d = opendir(path);
    assert_non_null(d);
    int n = 0;
    for (struct dirent *entry; (entry = readdir(d));) n += entry->d_name[0] != '.';
    closedir(d);
    return n;
}

static void put_file(const char *path, const void *bytes, size_t len)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_true(fd_write_all(fd, bytes, len));
    close(fd);
}

static void expect_file(const char *path, const char *want)
{
    struct buf b = {0};
    assert_int_equal(file_read(path, 1 << 20, &b, NULL), RC_OK);
    assert_int_equal(b.len, strlen(want));
    assert_memory_equal(b.data, want, b.len);
    buf_free(&b);
}

/* output.jsonl (in odd pieces), error.jsonl (empty), manifest.json */
static enum rc write_sample(const char *path, const char *manifest, struct err *e)
{
    struct archive_writer *w;
    enum rc rc = archive_create(path, &w, e);
    if (rc != RC_OK) return rc;
    rc = archive_member(w, "output.jsonl", BIG, e);
    for (size_t done = 0, piece = 1; rc == RC_OK && done < BIG; done += piece) {
        piece = piece * 3 % 65537;
        if (piece > BIG - done) piece = BIG - done;
        rc = archive_write(w, big + done, piece, e);
    }
    if (rc == RC_OK) rc = archive_member(w, "error.jsonl", 0, e);
    if (rc == RC_OK) rc = archive_member(w, "manifest.json", strlen(manifest), e);
    if (rc == RC_OK) rc = archive_write(w, manifest, strlen(manifest), e);
    enum rc end = archive_publish(w, e);
    if (rc != RC_OK) assert_int_not_equal(end, RC_OK);
    return end;
}

static void write_fine(const char *path, const char *manifest)
{
    struct err e = {0};
    if (write_sample(path, manifest, &e) != RC_OK) fail_msg("%s: %s: %s", path, e.code, e.text);
}

static void expect_member(const char *path, const char *name, const void *want, size_t len)
{
    struct buf out = {0};
    struct err e = {0};
    if (archive_read_member(path, name, LIMIT, &out, &e) != RC_OK) fail_msg("%s: %s: %s", path, e.code, e.text);
    assert_int_equal(out.len, len);
    if (len) assert_memory_equal(out.data, want, len);
    buf_free(&out);
    unsigned char digest[32], want_digest[32];
    uint64_t n_bytes;
    struct sha256_ctx sha;
    sha256_init(&sha);
    sha256_update(&sha, len, want);
    sha256_digest(&sha, 32, want_digest);
    assert_int_equal(archive_digest_member(path, name, len, digest, &n_bytes, NULL), RC_OK);
    assert_int_equal(n_bytes, len);
    assert_memory_equal(digest, want_digest, 32);
    if (len) assert_int_equal(archive_digest_member(path, name, len - 1, digest, &n_bytes, NULL), RC_BAD_INPUT);
}

static void expect_unreadable(const char *path, const char *name, size_t max_bytes, const char *code)
{
    struct buf out = {0};
    struct err e = {0};
    enum rc rc = archive_read_member(path, name, max_bytes, &out, &e);
    if (rc != RC_BAD_INPUT) fail_msg("%s: rc %d", path, (int)rc);
    if (strcmp(e.code, code)) fail_msg("%s: %s, not %s", path, e.code, code);
    assert_int_equal(out.len, 0);
    buf_free(&out);
}

static void test_kinds(void **state)
{
    (void)state;
    static const enum archive_kind kinds[] = {ARCHIVE_TAR_ZST, ARCHIVE_TAR_GZ, ARCHIVE_TAR_XZ,
                                              ARCHIVE_TAR,     ARCHIVE_ZIP,    ARCHIVE_FOLDER};
    for (int i = 0; i < N_OUTPUTS; i++) assert_int_equal(archive_kind_of(outputs[i]), kinds[i]);
    assert_int_equal(archive_kind_of("a.tar/b"), ARCHIVE_FOLDER);
    assert_int_equal(archive_kind_of("a.zst"), ARCHIVE_FOLDER);
    assert_int_equal(archive_kind_of(".zip"), ARCHIVE_FOLDER);
    assert_int_equal(archive_kind_of("dir/.zip.zip"), ARCHIVE_ZIP);
}

static void test_round_trip(void **state)
{
    (void)state;
    for (int i = 0; i < N_OUTPUTS; i++) {
        const char *path = at(outputs[i]);
        struct buf out = {0};
        struct stat st;
        assert_int_equal(archive_read_member(path, "manifest.json", LIMIT, &out, NULL), RC_RETRY);
        write_fine(path, "{\"v\":1}");
        expect_member(path, "output.jsonl", big, BIG);
        expect_member(path, "error.jsonl", "", 0);
        expect_member(path, "manifest.json", "{\"v\":1}", 7);
        assert_int_equal(archive_read_member(path, "timing.jsonl", LIMIT, &out, NULL), RC_RETRY);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_mode & 0777, i == ARCHIVE_FOLDER ? 0700 : 0600);
        assert_int_equal(count_entries(folder), 1); /* no temporary left */
        expect_unreadable(path, "output.jsonl", BIG - 1, "member_too_large");
        buf_free(&out);
        write_fine(path, "{\"v\":2}"); /* over the old one */
        expect_member(path, "manifest.json", "{\"v\":2}", 7);
        assert_int_equal(count_entries(folder), 1);
        char command[300];
        snprintf(command, sizeof command, "rm -rf '%s'", path);
        assert_int_equal(system(command), 0);
    }
}

static void write_all_in(const char *zone, struct buf out[ARCHIVE_FOLDER])
{
    setenv("TZ", zone, 1);
    tzset();
    for (int i = 0; i < ARCHIVE_FOLDER; i++) {
        write_fine(at(outputs[i]), "{}");
        assert_int_equal(file_read(at(outputs[i]), 2 << 20, &out[i], NULL), RC_OK);
    }
    unsetenv("TZ");
    tzset();
}

static void test_same_bytes(void **state)
{
    (void)state;
    struct buf first[ARCHIVE_FOLDER] = {0}, second[ARCHIVE_FOLDER] = {0};
    write_all_in("Asia/Tokyo", first);
    sleep_us(2100000); /* a stamp would show, in seconds or in zip's pairs of them */
    write_all_in("America/New_York", second);
    for (int i = 0; i < ARCHIVE_FOLDER; i++) {
        assert_int_equal(first[i].len, second[i].len);
        assert_memory_equal(first[i].data, second[i].data, first[i].len);
        if (i != ARCHIVE_TAR) assert_true(first[i].len < BIG);
        buf_free(&first[i]);
        buf_free(&second[i]);
    }
}

/* What other programs see: plain files in order, mode 0644, nobody's, no time. */
static void test_headers(void **state)
{
    (void)state;
    write_fine(at("o.tar"), "{}");
    struct archive *a = archive_read_new();
    struct archive_entry *entry;
    archive_read_support_format_tar(a);
    assert_int_equal(archive_read_open_filename(a, at("o.tar"), 10240), ARCHIVE_OK);
    static const char *const names[] = {"output.jsonl", "error.jsonl", "manifest.json"};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(archive_read_next_header(a, &entry), ARCHIVE_OK);
        assert_string_equal(archive_entry_pathname(entry), names[i]);
        assert_int_equal(archive_entry_mode(entry), S_IFREG | 0644);
        assert_int_equal(archive_entry_mtime(entry), 0);
        assert_int_equal(archive_entry_uid(entry) + archive_entry_gid(entry), 0);
    }
    assert_int_equal(archive_read_next_header(a, &entry), ARCHIVE_EOF);
    archive_read_free(a);
}

static void test_discard(void **state)
{
    (void)state;
    for (int i = 0; i < N_OUTPUTS; i++) {
        struct archive_writer *w;
        write_fine(at(outputs[i]), "{\"v\":1}");
        int before = count_entries(folder);
        assert_int_equal(archive_create(at(outputs[i]), &w, NULL), RC_OK);
        assert_int_equal(archive_member(w, "a", BIG, NULL), RC_OK);
        assert_int_equal(archive_write(w, big, BIG / 2, NULL), RC_OK);
        assert_int_equal(count_entries(folder), before + 1);
        archive_discard(w);
        assert_int_equal(count_entries(folder), before);
        expect_member(at(outputs[i]), "manifest.json", "{\"v\":1}", 7);
    }
    archive_discard(NULL);
}

/* --- mistakes of the caller --------------------------------------------------------------------------------------- */

enum mistake { SHORT_END, SHORT_NEXT, LONG, NO_MEMBER, TWICE, BAD_NAME, N_MISTAKES };

static enum rc make_mistake(struct archive_writer *w, enum mistake m, struct err *e)
{
    static const char *const bad_names[] = {"", ".", "..", "a/b", "/a", "../a", "a\n", ".hidden", "\xC3\xA4"};
    enum rc rc = m == NO_MEMBER ? RC_OK : archive_member(w, "a", 10, e);
    assert_int_equal(rc, RC_OK);
    switch (m) {
    case SHORT_END: return archive_write(w, "123", 3, e);
    case SHORT_NEXT: return archive_member(w, "b", 1, e);
    case LONG: return archive_write(w, "12345678901", 11, e);
    case NO_MEMBER: return archive_write(w, "1", 1, e);
    case TWICE: archive_write(w, "1234567890", 10, e); return archive_member(w, "a", 0, e);
    default:
        archive_write(w, "1234567890", 10, e);
        for (size_t i = 0; i < sizeof bad_names / sizeof *bad_names; i++) {
            rc = archive_member(w, bad_names[i], 0, NULL);
            assert_int_not_equal(rc, RC_OK);
        }
        return archive_member(w, "b", 0, e);
    }
}

static void test_misuse(void **state)
{
    (void)state;
    for (int i = 0; i < N_OUTPUTS; i++)
        for (enum mistake m = 0; m < N_MISTAKES; m++) {
            struct archive_writer *w;
            struct err e = {0};
            write_fine(at(outputs[i]), "{\"v\":1}");
            int before = count_entries(folder);
            assert_int_equal(archive_create(at(outputs[i]), &w, &e), RC_OK);
            enum rc rc = make_mistake(w, m, &e);
            if (m != SHORT_END) assert_int_not_equal(rc, RC_OK);
            assert_int_not_equal(archive_publish(w, &e), RC_OK);
            if (m != BAD_NAME) assert_string_equal(e.code, "archive_misuse");
            assert_int_equal(count_entries(folder), before);
            expect_member(at(outputs[i]), "manifest.json", "{\"v\":1}", 7);
        }
}

/* --- full disks --------------------------------------------------------------------------------------------------- */

static void with_file_limit(rlim_t bytes, const char *path, enum rc *rc, struct err *e)
{
    struct rlimit old, low;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    low = (struct rlimit){bytes, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    *rc = write_sample(path, "{\"v\":2}", e);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
}

/* A write that fails early, in the middle, and with the very last bytes. */
static void test_no_space(void **state)
{
    (void)state;
    signal(SIGXFSZ, SIG_IGN);
    for (int i = 0; i < N_OUTPUTS; i++) {
        struct stat st;
        char path[200];
        snprintf(path, sizeof path, "%s", at(outputs[i]));
        write_fine(path, "{\"v\":1}");
        assert_int_equal(stat(path, &st), 0);
        rlim_t full = i == ARCHIVE_FOLDER ? BIG : (rlim_t)st.st_size;
        const rlim_t limits[] = {0, 1, full / 2, full - 1, full};
        int before = count_entries(folder);
        for (int j = 0; j < 5; j++) {
            struct err e = {0};
            enum rc rc;
            with_file_limit(limits[j], path, &rc, &e);
            bool fits = j == 4;
            if ((rc == RC_OK) != fits) fail_msg("%s, limit %d: %s", path, j, e.text);
            if (!fits) assert_int_equal(e.exit_status, EXIT_IO);
            assert_int_equal(count_entries(folder), before);
            expect_member(path, "manifest.json", fits ? "{\"v\":2}" : "{\"v\":1}", 7);
        }
    }
    signal(SIGXFSZ, SIG_DFL);
}

/* --- targets ------------------------------------------------------------------------------------------------------ */

static void expect_no_output(const char *path, const char *code)
{
    struct archive_writer *w = (struct archive_writer *)(uintptr_t)1;
    struct err e = {0};
    enum rc rc = archive_create(path, &w, &e);
    if (rc != RC_BAD_INPUT) fail_msg("%s: rc %d", path, (int)rc);
    assert_null(w);
    assert_int_equal(e.exit_status, EXIT_NO_OUTPUT);
    assert_string_equal(e.code, code);
}

static void test_targets(void **state)
{
    (void)state;
    expect_no_output("", "cannot_create");
    expect_no_output("/", "cannot_create");
    expect_no_output(".", "cannot_create");
    expect_no_output(at(".."), "cannot_create");
    expect_no_output(at("none/o.tar"), "cannot_create");
    put_file(at("file"), "x", 1);
    expect_no_output(at("file/o.tar"), "cannot_create");
    expect_no_output(at("file"), "cannot_replace");
    expect_file(at("file"), "x");
    assert_int_equal(mkdir(at("d.tar"), 0700), 0);
    expect_no_output(at("d.tar"), "cannot_replace");
    assert_int_equal(mkfifo(at("f.zip"), 0600), 0);
    expect_no_output(at("f.zip"), "cannot_replace");
    assert_int_equal(symlink(at("file"), at("l.tar")), 0);
    expect_no_output(at("l.tar"), "cannot_replace");
    expect_no_output("/dev/full", "cannot_replace");
    /* a folder that holds folders was never ours */
    assert_int_equal(mkdir(at("deep"), 0700), 0);
    assert_int_equal(mkdir(at("deep/er"), 0700), 0);
    expect_no_output(at("deep"), "cannot_replace");
    char name[400];
    snprintf(name, sizeof name, "%s/%0250d.zip", folder, 0); /* fits, but its temporary's name does not */
    expect_no_output(name, "cannot_create");
}

static void test_relative_and_slashes(void **state)
{
    (void)state;
    char old[400];
    assert_non_null(getcwd(old, sizeof old));
    assert_int_equal(chdir(folder), 0);
    write_fine("here.tar", "{\"a\":1}");
    write_fine("out//", "{\"a\":1}");
    write_fine("out/", "{\"a\":2}");
    expect_member("here.tar", "manifest.json", "{\"a\":1}", 7);
    expect_member("out", "manifest.json", "{\"a\":2}", 7);
    assert_int_equal(count_entries("."), 2);
    assert_int_equal(chdir(old), 0);
}

/* --- leftovers ---------------------------------------------------------------------------------------------------- */

static pid_t dead_process(void)
{
    pid_t pid = fork();
    if (pid == 0) _exit(0);
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    return pid;
}

static bool exists(const char *path)
{
    struct stat st;
    return !lstat(path, &st);
}

static void test_leftovers(void **state)
{
    (void)state;
    char gone[64], gone_folder[64], locked[64], living[64], own[64], other[64];
    long pid = dead_process();
    snprintf(gone, sizeof gone, "o.zip.tmp.%ld", pid);
    snprintf(living, sizeof living, "o.zip.tmp.%ld", (long)getppid());
    snprintf(own, sizeof own, "o.zip.tmp.%ld", (long)getpid());
    snprintf(other, sizeof other, "oo.zip.tmp.%ld", pid);
    snprintf(gone_folder, sizeof gone_folder, "o.zip.tmp.%ld", (long)dead_process());
    snprintf(locked, sizeof locked, "o.zip.tmp.%ld", (long)dead_process());
    const char *const files[] = {gone, living, own, other, locked, "o.zip.tmp.12x", "o.zip.tmp.", "o.zip.tmp.0"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) put_file(at(files[i]), "x", 1);
    if (strcmp(gone, gone_folder)) {
        assert_int_equal(mkdir(at(gone_folder), 0700), 0);
        char inner[100];
        snprintf(inner, sizeof inner, "%s/file", gone_folder);
        put_file(at(inner), "x", 1);
    }
    int fd = open(at(locked), O_RDONLY);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    write_fine(at("o.zip"), "{}");
    assert_false(exists(at(gone)));
    assert_false(exists(at(gone_folder)));
    assert_false(exists(at(own))); /* a number that came round again */
    assert_true(exists(at(locked)));
    assert_true(exists(at(living)));
    assert_true(exists(at(other)));
    assert_true(exists(at("o.zip.tmp.12x")));
    assert_true(exists(at("o.zip.tmp.")));
    assert_true(exists(at("o.zip.tmp.0")));
    close(fd);
    write_fine(at("o.zip"), "{}");
    assert_false(exists(at(locked)));
}

/* Two writers of one path in one process: the second must not take the first one's temporary away. */
static void test_second_writer(void **state)
{
    (void)state;
    struct archive_writer *first, *second;
    struct err e = {0};
    assert_int_equal(archive_create(at("o.tar"), &first, NULL), RC_OK);
    assert_int_equal(archive_create(at("o.tar"), &second, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_NO_OUTPUT);
    assert_int_equal(archive_member(first, "a", 1, NULL), RC_OK);
    assert_int_equal(archive_write(first, "x", 1, NULL), RC_OK);
    assert_int_equal(archive_publish(first, NULL), RC_OK);
    expect_member(at("o.tar"), "a", "x", 1);
}

/* --- hostile archives --------------------------------------------------------------------------------------------- */

/* One entry of a handmade archive. */
struct entry {
    const char *name;
    unsigned type;
    const char *data;
};

static void write_by_hand(const char *path, int format, const struct entry *entries, size_t n)
{
    struct archive *a = archive_write_new();
    assert_int_equal(archive_write_set_format(a, format), ARCHIVE_OK);
    assert_int_equal(archive_write_open_filename(a, path), ARCHIVE_OK);
    for (size_t i = 0; i < n; i++) {
        struct archive_entry *entry = archive_entry_new();
        archive_entry_set_pathname(entry, entries[i].name);
        archive_entry_set_filetype(entry, entries[i].type);
        archive_entry_set_perm(entry, 0644);
        archive_entry_set_size(entry, (la_int64_t)strlen(entries[i].data));
        if (entries[i].type == AE_IFLNK) archive_entry_set_symlink(entry, "/etc/passwd");
        assert_true(archive_write_header(a, entry) >= ARCHIVE_WARN);
        archive_write_data(a, entries[i].data, strlen(entries[i].data));
        archive_entry_free(entry);
    }
    assert_int_equal(archive_write_close(a), ARCHIVE_OK);
    archive_write_free(a);
}

static void test_hostile_members(void **state)
{
    (void)state;
    static const struct entry twice[] = {{"m", AE_IFREG, "one"}, {"x", AE_IFREG, ""}, {"m", AE_IFREG, "two"}};
    static const struct entry linked[] = {{"m", AE_IFLNK, ""}};
    static const struct entry among[] = {
        {"d/", AE_IFDIR, ""}, {"../m", AE_IFREG, "no"}, {"l", AE_IFLNK, ""}, {"m", AE_IFREG, "yes"}};
    static const int formats[] = {ARCHIVE_FORMAT_TAR_PAX_RESTRICTED, ARCHIVE_FORMAT_TAR_USTAR, ARCHIVE_FORMAT_ZIP};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        write_by_hand(at("twice"), formats[i], twice, 3);
        expect_unreadable(at("twice"), "m", LIMIT, "archive_damaged");
        expect_member(at("twice"), "x", "", 0);
        write_by_hand(at("linked"), formats[i], linked, 1);
        expect_unreadable(at("linked"), "m", LIMIT, "archive_damaged");
        write_by_hand(at("among"), formats[i], among, 4);
        expect_member(at("among"), "m", "yes", 3);
    }
    write_by_hand(at("cpio"), ARCHIVE_FORMAT_CPIO_POSIX, among + 3, 1);
    expect_unreadable(at("cpio"), "m", LIMIT, "archive_damaged");
    write_by_hand(at("7z"), ARCHIVE_FORMAT_7ZIP, among + 3, 1);
    expect_unreadable(at("7z"), "m", LIMIT, "archive_damaged");
}

static void test_not_an_archive(void **state)
{
    (void)state;
    put_file(at("empty"), "", 0);
    expect_unreadable(at("empty"), "m", LIMIT, "archive_damaged");
    static const char zeros[1024];
    put_file(at("memberless.tar"), zeros, sizeof zeros); /* well-formed, but never ours */
    expect_unreadable(at("memberless.tar"), "m", LIMIT, "archive_damaged");
    put_file(at("text"), "hello, this is no archive\n", 26);
    expect_unreadable(at("text"), "m", LIMIT, "archive_damaged");
    put_file(at("noise"), big, BIG);
    expect_unreadable(at("noise"), "m", LIMIT, "archive_damaged");
    assert_int_equal(mkfifo(at("fifo"), 0600), 0);
    expect_unreadable(at("fifo"), "m", LIMIT, "archive_damaged");
    /* a folder whose member is something else */
    assert_int_equal(mkdir(at("dir"), 0700), 0);
    assert_int_equal(mkfifo(at("dir/fifo"), 0600), 0);
    assert_int_equal(symlink("/etc/passwd", at("dir/link")), 0);
    expect_unreadable(at("dir"), "fifo", LIMIT, "archive_damaged");
    expect_unreadable(at("dir"), "link", LIMIT, "cannot_read");
    expect_unreadable(at("dir"), "../text", LIMIT, "archive_misuse");
}

/* Cut anywhere: an error, or (a plain tar without its last zeros) still the right bytes; never others. */
static void test_truncated(void **state)
{
    (void)state;
    for (int i = 0; i < ARCHIVE_FOLDER; i++) {
        struct archive_writer *w;
        struct buf whole = {0}, out = {0};
        assert_int_equal(archive_create(at(outputs[i]), &w, NULL), RC_OK);
        assert_int_equal(archive_member(w, "m", 700, NULL), RC_OK);
        assert_int_equal(archive_write(w, big, 700, NULL), RC_OK);
        assert_int_equal(archive_publish(w, NULL), RC_OK);
        assert_int_equal(file_read(at(outputs[i]), LIMIT, &whole, NULL), RC_OK);
        for (size_t cut = 0; cut < whole.len; cut += 1 + cut / 20) {
            put_file(at("cut"), whole.data, cut);
            enum rc rc = archive_read_member(at("cut"), "m", LIMIT, &out, NULL);
            if (i == ARCHIVE_TAR && cut >= 512 + 700 && rc == RC_OK) {
                assert_int_equal(out.len, 700);
                assert_memory_equal(out.data, big, 700);
            } else if (rc != RC_BAD_INPUT) {
                fail_msg("%s cut to %zu of %zu: rc %d", outputs[i], cut, whole.len, (int)rc);
            }
        }
        buf_free(&whole);
        buf_free(&out);
    }
}

/* Any damage is survived; where the format has checksums, wrong bytes never come back as right ones. */
static void test_flipped(void **state)
{
    (void)state;
    for (int i = 0; i < ARCHIVE_FOLDER; i++) {
        struct archive_writer *w;
        struct buf whole = {0}, out = {0};
        assert_int_equal(archive_create(at(outputs[i]), &w, NULL), RC_OK);
        assert_int_equal(archive_member(w, "m", 200, NULL), RC_OK);
        assert_int_equal(archive_write(w, big, 200, NULL), RC_OK);
        assert_int_equal(archive_publish(w, NULL), RC_OK);
        assert_int_equal(file_read(at(outputs[i]), LIMIT, &whole, NULL), RC_OK);
        bool sums = i == ARCHIVE_TAR_XZ || i == ARCHIVE_ZIP; /* libarchive does not check gzip's */
        for (size_t at_byte = 0; at_byte < whole.len; at_byte++) {
            whole.data[at_byte] ^= 0x10;
            put_file(at("flipped"), whole.data, whole.len);
            whole.data[at_byte] ^= 0x10;
            enum rc rc = archive_read_member(at("flipped"), "m", LIMIT, &out, NULL);
            if (rc == RC_OK && sums && !(out.len == 200 && !memcmp(out.data, big, 200)))
                fail_msg("%s: byte %zu of %zu flipped, and wrong bytes came back", outputs[i], at_byte, whole.len);
        }
        buf_free(&whole);
        buf_free(&out);
    }
}

static void test_bomb(void **state)
{
    (void)state;
    enum { MEGABYTES = 256 };
    struct archive_writer *w;
    char *zeros = calloc(1, 1 << 20);
    assert_non_null(zeros);
    assert_int_equal(archive_create(at("bomb.tar.zst"), &w, NULL), RC_OK);
    assert_int_equal(archive_member(w, "zeros", (uint64_t)MEGABYTES << 20, NULL), RC_OK);
    for (int i = 0; i < MEGABYTES; i++) assert_int_equal(archive_write(w, zeros, 1 << 20, NULL), RC_OK);
    assert_int_equal(archive_member(w, "m", 1, NULL), RC_OK);
    assert_int_equal(archive_write(w, "x", 1, NULL), RC_OK);
    assert_int_equal(archive_publish(w, NULL), RC_OK);
    free(zeros);
    expect_unreadable(at("bomb.tar.zst"), "m", LIMIT, "archive_damaged");
    expect_unreadable(at("bomb.tar.zst"), "zeros", LIMIT, "member_too_large");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),
        cmocka_unit_test_setup_teardown(test_round_trip, setup, teardown),
        cmocka_unit_test_setup_teardown(test_same_bytes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_headers, setup, teardown),
        cmocka_unit_test_setup_teardown(test_discard, setup, teardown),
        cmocka_unit_test_setup_teardown(test_misuse, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_space, setup, teardown),
        cmocka_unit_test_setup_teardown(test_targets, setup, teardown),
        cmocka_unit_test_setup_teardown(test_relative_and_slashes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_leftovers, setup, teardown),
        cmocka_unit_test_setup_teardown(test_second_writer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_hostile_members, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_an_archive, setup, teardown),
        cmocka_unit_test_setup_teardown(test_truncated, setup, teardown),
        cmocka_unit_test_setup_teardown(test_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bomb, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
