/* run_status: what is said, how much of it, and that names of jobs cannot steer a terminal. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "run_status.h"

static const char *name_of(const void *ctx, size_t job) { return ((const char *const *)ctx)[job]; }

static struct progress some_progress(void)
{
    return (struct progress){.total = 10, .done = 4, .failed = 1, .already = 1, .tokens = 500,
                             .start_us = clock_now_us() - 100000000};
}

static void test_what_is_said(void **ctx)
{
    (void)ctx;
    static const char *const names[] = {"minutes", "letter"};
    static const struct dispatch_group_view groups[] = {{GROUP_READY, 2, 2}, {GROUP_BACKOFF, 1, 0}};
    struct dispatch_view v = {.groups = groups, .n_groups = 2, .in_flight = 2, .n_jobs = 2,
                              .jobs = {{.job = 1, .group = 0, .running_us = 65000000}, {.job = 0, .group = 0, .running_us = -1}}};
    struct progress p = some_progress();
    struct buf out = {0};
    run_status_text(&p, &v, name_of, names, &out);
    /* four jobs took 100 s: 25 s for each of five */
    assert_string_equal(out.data, "tandem: 10 jobs: 4 done, 1 failed, 5 pending, 2 of them in flight; 1m40s, 5.0 tok/s, 2m05s left\n"
                                  "tandem: group 0: ready, 2 restarts, 2 in flight\n"
                                  "tandem: group 1: restarting, 1 restarts, 0 in flight\n"
                                  "tandem: letter: runs in group 0 for 1m05s\n"
                                  "tandem: minutes: waits in group 0\n");
    buf_free(&out);
}

static void test_names_are_harmless(void **ctx)
{
    (void)ctx;
    char lengthy[200];
    memset(lengthy, 'a', sizeof lengthy);
    memcpy(lengthy + 79, "\xE2\x82\xAC", 3); /* a character across the border */
    lengthy[199] = '\0';
    const char *const names[] = {"\x1b[2J\n\r\x7f", "\xC2\x9B" "1m \xC3\xA9 \xC2\xA0", lengthy};
    struct dispatch_view v = {.in_flight = 3, .n_jobs = 3, .jobs = {{0, 0, -1}, {1, 0, -1}, {2, 0, -1}}};
    struct progress p = some_progress();
    struct buf out = {0};
    run_status_text(&p, &v, name_of, names, &out);
    assert_non_null(strstr(out.data, "\ntandem: ?[2J???: waits"));
    assert_non_null(strstr(out.data, "\ntandem: ?1m \xC3\xA9 \xC2\xA0: waits"));
    assert_non_null(strstr(out.data, "aaa...: waits"));
    assert_null(strstr(out.data, "\xE2"));
    assert_null(strchr(out.data, '\x1b'));
    buf_free(&out);
}

static void test_many_jobs_are_few_lines(void **ctx)
{
    (void)ctx;
    static const char *const names[] = {"one"};
    struct dispatch_view v = {.in_flight = 500, .n_jobs = DISPATCH_VIEW_JOBS};
    struct progress p = some_progress();
    struct buf out = {0};
    run_status_text(&p, &v, name_of, names, &out);
    int lines = 0;
    for (size_t i = 0; i < out.len; i++) lines += out.data[i] == '\n';
    assert_int_equal(lines, 1 + RUN_STATUS_JOBS + 1);
    assert_non_null(strstr(out.data, "\ntandem: and 484 more\n"));
    buf_free(&out);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_said),
        cmocka_unit_test(test_names_are_harmless),
        cmocka_unit_test(test_many_jobs_are_few_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
