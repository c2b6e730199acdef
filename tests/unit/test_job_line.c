/* Lines of a job file: numbers, offsets, line ends, limits. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "job_line.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file in memory with these bytes; its path goes to path. */
static int file_of(const char *bytes, size_t len, char path[64])
{
    int fd = memfd_create("lines", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_true(fd_write_all(fd, bytes, len));
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

struct want {
    const char *bytes;
    int64_t number, byte;
    bool too_long;
};

static void expect_lines(const char *bytes, size_t len, size_t limit, const struct want *want, size_t n)
{
    char path[64];
    int fd = file_of(bytes, len, path);
    struct job_reader *r = NULL;
    struct job_line line;
    struct err e = {0};
    assert_int_equal(job_reader_open(path, limit, &r, &e), RC_OK);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(job_reader_next(r, &line, &e), RC_OK);
        assert_int_equal(line.len, strlen(want[i].bytes));
        assert_memory_equal(line.bytes, want[i].bytes, line.len);
        assert_int_equal(line.number, want[i].number);
        assert_int_equal(line.byte, want[i].byte);
        assert_int_equal(line.too_long, want[i].too_long);
    }
    for (int again = 0; again < 2; again++) {
        assert_int_equal(job_reader_next(r, &line, &e), RC_RETRY);
        assert_int_equal(line.len, 0);
    }
    assert_int_equal(e.rc, RC_OK);
    job_reader_close(r);
    close(fd);
}

#define EXPECT_LINES(text, limit, ...)                                                                                 \
    do {                                                                                                               \
        const struct want want[] = {__VA_ARGS__};                                                                      \
        expect_lines(text, sizeof(text) - 1, limit, want, sizeof want / sizeof *want);                                 \
    } while (0)

static void test_plain(void **state)
{
    (void)state;
    EXPECT_LINES("a\nbc\nd", 100, {"a", 1, 0, false}, {"bc", 2, 2, false}, {"d", 3, 5, false});
    EXPECT_LINES("a\n", 100, {"a", 1, 0, false});
    expect_lines("", 0, 100, NULL, 0);
    expect_lines("\n\n \t\r\n", 6, 100, NULL, 0);
}

static void test_line_ends(void **state)
{
    (void)state;
    EXPECT_LINES("a\r\n\r\n  \nb\r\nc\r", 100, {"a", 1, 0, false}, {"b", 4, 8, false}, {"c", 5, 11, false});
    /* a carriage return inside is not a line end */
    EXPECT_LINES("a\rb\n", 100, {"a\rb", 1, 0, false});
    EXPECT_LINES("a\r\r\n", 100, {"a\r", 1, 0, false});
}

static void test_mark(void **state)
{
    (void)state;
    EXPECT_LINES("\xEF\xBB\xBFx\n\xEF\xBB\xBFy\n", 100, {"x", 1, 3, false}, {"\xEF\xBB\xBFy", 2, 5, false});
    expect_lines("\xEF\xBB\xBF", 3, 100, NULL, 0);
    EXPECT_LINES("\xEF\xBB", 100, {"\xEF\xBB", 1, 0, false});
    EXPECT_LINES("\xEF\xBB\xBF\xEF\xBB\xBFz", 100, {"\xEF\xBB\xBFz", 1, 3, false});
}

static void test_limit(void **state)
{
    (void)state;
    EXPECT_LINES("1234\n12345\n1234\r\n12345\r\n12\n", 4, {"1234", 1, 0, false}, {"", 2, 5, true},
                 {"1234", 3, 11, false}, {"", 4, 17, true}, {"12", 5, 24, false});
    EXPECT_LINES("12345", 4, {"", 1, 0, true});
    EXPECT_LINES("1234\r", 4, {"1234", 1, 0, false});
    EXPECT_LINES("1234", 4, {"1234", 1, 0, false});
}

/* Lines around the size of the first buffer and far beyond, each filled with its own letter. */
static void test_long_lines(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 65535, 65536, 65537, 131072, 3000000, 2, 700000, 1};
    enum { N = sizeof sizes / sizeof *sizes };
    const size_t limit = 1000000;
    struct buf text = {0};
    for (size_t i = 0; i < N; i++) {
        assert_true(buf_reserve(&text, sizes[i] + 1));
        memset(text.data + text.len, 'a' + (int)i, sizes[i]);
        text.len += sizes[i];
        buf_append(&text, i % 2 ? "\r\n" : "\n", i % 2 ? 2 : 1);
    }
    char path[64];
    int fd = file_of(text.data, text.len, path);
    struct job_reader *r;
    struct job_line line;
    assert_int_equal(job_reader_open(path, limit, &r, NULL), RC_OK);
    int64_t byte = 0;
    for (size_t i = 0; i < N; i++) {
        assert_int_equal(job_reader_next(r, &line, NULL), RC_OK);
        assert_int_equal(line.number, i + 1);
        assert_int_equal(line.byte, byte);
        assert_int_equal(line.too_long, sizes[i] > limit);
        assert_int_equal(line.len, line.too_long ? 0 : sizes[i]);
        for (size_t j = 0; j < line.len; j++) assert_int_equal(line.bytes[j], 'a' + (int)i);
        byte += (int64_t)sizes[i] + (i % 2 ? 2 : 1);
    }
    assert_int_equal(job_reader_next(r, &line, NULL), RC_RETRY);
    job_reader_close(r);
    close(fd);
    buf_free(&text);
}

static void test_nul_is_kept(void **state)
{
    (void)state;
    char path[64];
    int fd = file_of("a\0b\nc\n", 6, path);
    struct job_reader *r;
    struct job_line line;
    assert_int_equal(job_reader_open(path, 100, &r, NULL), RC_OK);
    assert_int_equal(job_reader_next(r, &line, NULL), RC_OK);
    assert_int_equal(line.len, 3);
    assert_memory_equal(line.bytes, "a\0b", 3);
    assert_int_equal(job_reader_next(r, &line, NULL), RC_OK);
    assert_int_equal(line.number, 2);
    job_reader_close(r);
    close(fd);
}

static void expect_refused(const char *path, const char *code)
{
    struct job_reader *r = (struct job_reader *)(uintptr_t)1;
    struct err e = {0};
    assert_int_equal(job_reader_open(path, 100, &r, &e), RC_BAD_INPUT);
    assert_null(r);
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    assert_string_equal(e.code, code);
    assert_string_equal(e.source, path);
    assert_int_equal(job_reader_open(path, 100, &r, NULL), RC_BAD_INPUT);
}

static void test_not_a_file(void **state)
{
    (void)state;
    char folder[] = "/tmp/tandem-lines-XXXXXX", fifo[64];
    assert_non_null(mkdtemp(folder));
    snprintf(fifo, sizeof fifo, "%s/fifo", folder);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    expect_refused(fifo, "not_a_file"); /* and does not wait for a writer */
    expect_refused(folder, "not_a_file");
    expect_refused("/dev/null", "not_a_file");
    unlink(fifo);
    expect_refused(fifo, "cannot_open");
    expect_refused("-", "cannot_open");
    rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),      cmocka_unit_test(test_line_ends),  cmocka_unit_test(test_mark),
        cmocka_unit_test(test_limit),      cmocka_unit_test(test_long_lines), cmocka_unit_test(test_nul_is_kept),
        cmocka_unit_test(test_not_a_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
