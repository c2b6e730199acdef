/* metrics: what is told, when, and what happens where it cannot be written. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "metrics.h"

struct place {
    char folder[64], file[96], temp[128];
};

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static int setup(void **ctx)
{
    struct place *p = calloc(1, sizeof *p);
    snprintf(p->folder, sizeof p->folder, "/tmp/test_metrics.XXXXXX");
    if (!mkdtemp(p->folder)) return -1;
    snprintf(p->file, sizeof p->file, "%s/tandem.prom", p->folder);
    snprintf(p->temp, sizeof p->temp, "%s.tmp", p->file);
    umask(077);
    *ctx = p;
    return 0;
}

static int teardown(void **ctx)
{
    struct place *p = *ctx;
    nftw(p->folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(p);
    return 0;
}

static struct run_report some_report(void)
{
    return (struct run_report){.jobs = 10, .done = 5, .failed = 2, .in_flight = 3, .tokens = 1234, .cached_tokens = 56,
                               .rank_restarts = 1, .started_s = 1000, .deadline_s = 3000, .archive = "o.tar"};
}

static bool has(const struct buf *text, const char *line)
{
    const char *at = strstr(text->data, line);
    return at && (at == text->data || at[-1] == '\n') && at[strlen(line)] == '\n';
}

static void test_text(void **ctx)
{
    (void)ctx;
    struct run_report r = some_report();
    struct buf text = {0};
    assert_true(metrics_text(&r, 2000, &text));
    static const char *const lines[] = {
        "# TYPE tandem_jobs gauge", "tandem_jobs{out=\"o.tar\",state=\"done\"} 5", "tandem_jobs{out=\"o.tar\",state=\"failed\"} 2",
        "tandem_jobs{out=\"o.tar\",state=\"pending\"} 3", "tandem_jobs_in_flight{out=\"o.tar\"} 3",
        "# TYPE tandem_tokens_total counter", "tandem_tokens_total{out=\"o.tar\"} 1234",
        "tandem_cached_tokens_total{out=\"o.tar\"} 56", "tandem_rank_restarts_total{out=\"o.tar\"} 1",
        "tandem_start_timestamp_seconds{out=\"o.tar\"} 1000", "tandem_last_update_timestamp_seconds{out=\"o.tar\"} 2000",
        "tandem_deadline_timestamp_seconds{out=\"o.tar\"} 3000", "tandem_finished{out=\"o.tar\"} 0",
        "tandem_exit_status{out=\"o.tar\"} 0"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (!has(&text, lines[i])) fail_msg("no line %s in\n%s", lines[i], text.data);
    r.end = "stopped";
    r.exit_status = EXIT_RESUMABLE;
    buf_clear(&text);
    assert_true(metrics_text(&r, 2000, &text));
    assert_true(has(&text, "tandem_finished{out=\"o.tar\"} 1") && has(&text, "tandem_exit_status{out=\"o.tar\"} 75"));
    buf_free(&text);
}

static void test_names_are_escaped(void **ctx)
{
    (void)ctx;
    struct run_report r = some_report();
    struct buf text = {0};
    r.archive = "a\"b\\c\nd\xff";
    assert_true(metrics_text(&r, 2000, &text));
    assert_true(has(&text, "tandem_finished{out=\"a\\\"b\\\\c\\nd\xEF\xBF\xBD\"} 0"));
    buf_free(&text);
}

static void test_file(void **ctx)
{
    struct place *p = *ctx;
    struct metrics m = {.path = p->file};
    struct run_report r = some_report();
    struct err e = {0};
    struct stat st;
    struct buf text = {0};
    assert_int_equal(symlink("elsewhere", p->temp), 0); /* what lies where the temporary file goes is not written through */
    if (metrics_write(&m, &r, &e) != RC_OK) fail_msg("%s", e.text);
    assert_int_equal(lstat(p->file, &st), 0);
    assert_true(S_ISREG(st.st_mode));
    assert_int_equal(st.st_mode & 0777, 0644);
    assert_int_not_equal(lstat(p->temp, &st), 0);
    assert_int_equal(file_read(p->file, 1 << 20, &text, &e), RC_OK);
    assert_true(text.len > 0 && text.data[text.len - 1] == '\n');
    buf_free(&text);
}

static void test_when(void **ctx)
{
    struct place *p = *ctx;
    struct metrics m = {.path = p->file};
    struct run_report r = some_report();
    struct { int64_t ago_us; bool changed, expected; } const times[] = {
        {1900000, false, false}, {1900000, true, false}, {2100000, false, false}, {2100000, true, true},
        {14900000, false, false}, {15100000, false, true}};
    assert_int_equal(metrics_turn(&m, &r, NULL), RC_OK); /* the first comes at once */
    assert_int_equal(access(p->file, F_OK), 0);
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        int64_t before = m.written_us = clock_now_us() - times[i].ago_us;
        m.done = times[i].changed ? r.done - 1 : r.done;
        r.tokens++; /* moves all the time, and is no change */
        assert_int_equal(metrics_turn(&m, &r, NULL), RC_OK);
        assert_int_equal(m.written_us != before, times[i].expected);
    }
}

static void test_failures_leave_nothing(void **ctx)
{
    struct place *p = *ctx;
    char missing[128], folder[128];
    struct run_report r = some_report();
    struct err e = {0};
    snprintf(missing, sizeof missing, "%s/missing/tandem.prom", p->folder);
    struct metrics m = {.path = missing};
    assert_int_equal(metrics_write(&m, &r, &e), RC_FAILED);
    assert_string_equal(e.code, "metrics_not_written");
    int64_t before = m.written_us;
    assert_int_equal(metrics_turn(&m, &r, NULL), RC_OK); /* tried again when it is time, not at every turn */
    assert_int_equal(m.written_us, before);
    snprintf(folder, sizeof folder, "%s/folder", p->folder);
    assert_int_equal(mkdir(folder, 0700), 0);
    m = (struct metrics){.path = folder};
    assert_int_equal(metrics_write(&m, &r, NULL), RC_FAILED);
    assert_int_equal(rmdir(folder), 0);
    assert_int_equal(rmdir(p->folder), 0); /* no temporary file is left */
    assert_int_equal(mkdir(p->folder, 0700), 0);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_names_are_escaped),
        cmocka_unit_test_setup_teardown(test_file, setup, teardown),
        cmocka_unit_test_setup_teardown(test_when, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failures_leave_nothing, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
