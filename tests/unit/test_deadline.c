/* deadline: dates against known instants, texts that are none, days on which summer time begins and ends, windows over
 * midnight, and which of several deadlines counts. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "deadline.h"

/* Zones as POSIX writes them, so that no database of zones is needed. */
static const char berlin[] = "CET-1CEST,M3.5.0,M10.5.0/3";
static const char lord_howe[] = "<+1030>-10:30<+11>-11,M10.1.0,M4.1.0"; /* half an hour of summer time */
static const char leap_at_midnight[] = "<-03>3<-02>,M10.3.0/0,M2.3.0/0";

static void zone(const char *tz)
{
    setenv("TZ", tz, 1);
    tzset();
}

static int64_t at(const char *text)
{
    int64_t t;
    if (!deadline_parse_time(text, &t)) fail_msg("refused: %s", text);
    return t;
}

static void test_times(void **ctx)
{
    (void)ctx;
    assert_int_equal(at("1970-01-01T00:00:00Z"), 0);
    assert_int_equal(at("1969-12-31T23:59:59Z"), -1);
    assert_int_equal(at("2026-01-02T06:00:00Z"), 1767333600);
    assert_int_equal(at("2026-01-02t06:00:00z"), 1767333600);
    assert_int_equal(at("2026-01-02 06:00:00.999Z"), 1767333600);
    assert_int_equal(at("2026-01-02T07:00:00+01:00"), 1767333600);
    assert_int_equal(at("2026-01-02T00:30:00-05:30"), 1767333600);
    assert_int_equal(at("2026-01-01T23:30:00-06:30"), 1767333600);
    assert_int_equal(at("2026-01-02T06:00:00-00:00"), 1767333600);
    assert_int_equal(at("2000-02-29T12:00:00Z"), 951825600);
    assert_int_equal(at("2028-02-29T23:59:59Z") + 1, at("2028-03-01T00:00:00Z"));
    assert_int_equal(at("2027-02-28T23:59:59Z") + 1, at("2027-03-01T00:00:00Z"));
    assert_int_equal(at("2100-02-28T23:59:59Z") + 1, at("2100-03-01T00:00:00Z"));
    assert_int_equal(at("2016-12-31T23:59:60Z"), at("2017-01-01T00:00:00Z"));
    assert_int_equal(at("9999-12-31T23:59:59-23:59"), 253402300799 + 86340);
    assert_int_equal(at("0000-01-01T00:00:00Z"), -62167219200);
}

static void test_every_day_is_one_day_later(void **ctx)
{
    (void)ctx;
    for (int64_t day = -30000; day < 60000; day++) {
        time_t t = (time_t)(day * 86400);
        struct tm tm;
        char text[40];
        gmtime_r(&t, &tm);
        strftime(text, sizeof text, "%Y-%m-%dT00:00:00Z", &tm);
        assert_int_equal(at(text), day * 86400);
    }
}

static void test_no_times(void **ctx)
{
    (void)ctx;
    static const char *const texts[] = {
        "", "Z", "2026", "2026-01-02", "2026-01-02T06:00Z", "2026-01-02T06:00:00", "2026-01-02T06:00:00z ", " 2026-01-02T06:00:00Z",
        "2026-1-2T06:00:00Z", "26-01-02T06:00:00Z", "02026-01-02T06:00:00Z", "-026-01-02T06:00:00Z", "+026-01-02T06:00:00Z",
        "2026-00-02T06:00:00Z", "2026-13-02T06:00:00Z", "2026-01-00T06:00:00Z", "2026-01-32T06:00:00Z", "2026-04-31T06:00:00Z",
        "2026-02-29T06:00:00Z", "2100-02-29T06:00:00Z", "2026-01-02T24:00:00Z", "2026-01-02T06:60:00Z", "2026-01-02T06:00:61Z",
        "2026-01-02T06:00:00.Z", "2026-01-02T06:00:00,5Z", "2026-01-02T06:00:00+1:00", "2026-01-02T06:00:00+24:00",
        "2026-01-02T06:00:00+01:60", "2026-01-02T06:00:00+0100", "2026-01-02T06:00:00+01", "2026-01-02T06:00:00Z+01:00",
        "2026-01-02T06:00:00UTC", "2026-01-02X06:00:00Z", "2026/01/02T06:00:00Z", "2026-01-02T-6:00:00Z", "0x26-01-02T06:00:00Z",
        "\xD9\xA2\xD9\xA0\xD9\xA2\xD9\xA6-01-02T06:00:00Z", "9223372036854775807", "2026-01-02T06:00:00\n"};
    int64_t t;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (deadline_parse_time(texts[i], &t)) fail_msg("accepted: %s", texts[i]);
}

static void test_clocks_and_windows(void **ctx)
{
    (void)ctx;
    static const char *const no_clocks[] = {"", "6:00", "06", "06:0", "06:000", "24:00", "06:60", "-6:00", " 06:00", "06:00 ", "06.00",
                                            "06:00Z", "6am"};
    static const char *const no_windows[] = {"", "22:00", "22:00-", "-06:00", "22:00-6:00", "22:00--06:00", "22:00-06:00-",
                                             "22:00-22:00", "22:00-24:00", "22:00 - 06:00", "22:00-06:00 "};
    struct deadline_window w;
    int minute;
    assert_true(deadline_parse_clock("00:00", &minute) && minute == 0);
    assert_true(deadline_parse_clock("23:59", &minute) && minute == 1439);
    assert_true(deadline_parse_window("22:00-06:30", &w) && w.from_min == 1320 && w.to_min == 390);
    for (size_t i = 0; i < sizeof no_clocks / sizeof *no_clocks; i++)
        if (deadline_parse_clock(no_clocks[i], &minute)) fail_msg("accepted: %s", no_clocks[i]);
    for (size_t i = 0; i < sizeof no_windows / sizeof *no_windows; i++)
        if (deadline_parse_window(no_windows[i], &w)) fail_msg("accepted: %s", no_windows[i]);
}

static void next_is(const char *now, const char *clock, const char *expected)
{
    int minute;
    assert_true(deadline_parse_clock(clock, &minute));
    int64_t got = deadline_next_local(at(now), minute);
    if (got != at(expected)) fail_msg("%s, next %s: %+lld s from %s", now, clock, (long long)(got - at(expected)), expected);
}

static void test_next_local_time(void **ctx)
{
    (void)ctx;
    zone("UTC0");
    next_is("2026-01-01T22:00:00Z", "06:00", "2026-01-02T06:00:00Z");
    next_is("2026-01-02T05:59:59Z", "06:00", "2026-01-02T06:00:00Z");
    next_is("2026-01-02T06:00:00Z", "06:00", "2026-01-03T06:00:00Z"); /* the next one, not this one */
    next_is("2026-12-31T23:00:00Z", "00:00", "2027-01-01T00:00:00Z");
    next_is("2028-02-28T12:00:00Z", "06:00", "2028-02-29T06:00:00Z");
    zone(berlin);
    next_is("2026-01-01T21:00:00Z", "06:00", "2026-01-02T06:00:00+01:00");
    next_is("2026-07-01T21:00:00Z", "06:00", "2026-07-02T06:00:00+02:00");
}

static void test_summer_time(void **ctx)
{
    (void)ctx;
    zone(berlin);
    /* Begins 2026-03-29 at 02:00 CET, which is 03:00 CEST: a night of seven hours; 02:30 is leapt over. */
    next_is("2026-03-28T22:00:00+01:00", "06:00", "2026-03-29T06:00:00+02:00");
    next_is("2026-03-28T22:00:00+01:00", "02:30", "2026-03-29T03:00:00+02:00");
    next_is("2026-03-29T01:59:59+01:00", "02:00", "2026-03-29T03:00:00+02:00");
    next_is("2026-03-29T03:00:00+02:00", "02:30", "2026-03-30T02:30:00+02:00");
    /* Ends 2026-10-25 at 03:00 CEST, which is 02:00 CET: nine hours; 02:30 comes twice, and each is the next one once. */
    next_is("2026-10-24T22:00:00+02:00", "06:00", "2026-10-25T06:00:00+01:00");
    next_is("2026-10-24T22:00:00+02:00", "02:30", "2026-10-25T02:30:00+02:00");
    next_is("2026-10-25T02:30:00+02:00", "02:30", "2026-10-25T02:30:00+01:00");
    next_is("2026-10-25T02:30:00+01:00", "02:30", "2026-10-26T02:30:00+01:00");
    zone(lord_howe);
    next_is("2026-10-03T22:00:00+10:30", "02:15", "2026-10-04T02:30:00+11:00");
    next_is("2026-04-04T22:00:00+11:00", "01:45", "2026-04-05T01:45:00+11:00");
    next_is("2026-04-05T01:45:00+11:00", "01:45", "2026-04-05T01:45:00+10:30");
    zone(leap_at_midnight);
    next_is("2026-10-17T20:00:00-03:00", "00:00", "2026-10-18T01:00:00-02:00");
    zone("Nowhere/At_All");
    next_is("2026-01-01T22:00:00Z", "06:00", "2026-01-02T06:00:00Z");
}

static struct deadline_rules rules_of(const char *time, const char *clock, const char *window)
{
    struct deadline_rules r = DEADLINE_RULES_NONE;
    if (time) r.at_s = at(time);
    if (clock) assert_true(deadline_parse_clock(clock, &r.until_min));
    if (window) assert_true(deadline_parse_window(window, &r.window));
    return r;
}

static void found(struct deadline_rules r, const char *scheduler, const char *now, const char *expected, const char *source)
{
    struct deadline d;
    struct err e = {0};
    if (deadline_find(&r, scheduler, at(now), &d, &e) != RC_OK) fail_msg("%s", e.text);
    assert_int_equal(d.at_s, at(expected));
    assert_string_equal(d.source, source);
}

static void outside(const char *window, const char *now)
{
    struct deadline_rules r = rules_of(NULL, NULL, window);
    struct deadline d;
    struct err e = {0};
    assert_int_equal(deadline_find(&r, NULL, at(now), &d, &e), RC_RETRY);
    assert_int_equal(e.exit_status, EXIT_RESUMABLE);
    assert_non_null(strstr(e.text, window));
}

static void test_windows(void **ctx)
{
    (void)ctx;
    zone(berlin);
    struct deadline_rules night = rules_of(NULL, NULL, "22:00-06:00"), noon = rules_of(NULL, NULL, "12:00-13:30");
    found(night, NULL, "2026-01-01T22:00:00+01:00", "2026-01-02T06:00:00+01:00", "--window");
    found(night, NULL, "2026-01-02T00:00:00+01:00", "2026-01-02T06:00:00+01:00", "--window");
    found(night, NULL, "2026-01-02T05:59:59+01:00", "2026-01-02T06:00:00+01:00", "--window");
    found(noon, NULL, "2026-01-02T12:00:00+01:00", "2026-01-02T13:30:00+01:00", "--window");
    outside("22:00-06:00", "2026-01-02T06:00:00+01:00");
    outside("22:00-06:00", "2026-01-02T21:59:59+01:00");
    outside("12:00-13:30", "2026-01-02T11:59:59+01:00");
    outside("12:00-13:30", "2026-01-02T13:30:00+01:00");
    outside("22:00-02:30", "2026-03-29T03:00:00+02:00");
}

static void test_the_earliest_counts(void **ctx)
{
    (void)ctx;
    static const char now[] = "2026-01-01T23:00:00Z", six[] = "2026-01-02T06:00:00Z", five[] = "2026-01-02T05:00:00Z";
    zone("UTC0");
    struct deadline_rules none = DEADLINE_RULES_NONE;
    struct deadline d;
    assert_int_equal(deadline_find(&none, NULL, at(now), &d, NULL), RC_OK);
    assert_null(d.source);
    assert_true(d.at_s == INT64_MAX);
    found(none, "1767333600", now, six, "SLURM_JOB_END_TIME");
    found(rules_of(five, "06:00", "22:00-07:00"), "1767333600", now, five, "--deadline");
    found(rules_of(six, "05:00", "22:00-07:00"), "1767333600", now, five, "--until");
    found(rules_of(six, "06:00", "22:00-05:00"), "1767333600", now, five, "--window");
    found(rules_of(six, "06:00", "22:00-07:00"), "1767330000", now, five, "SLURM_JOB_END_TIME");
    found(rules_of("2020-01-01T00:00:00Z", "06:00", NULL), NULL, now, "2020-01-01T00:00:00Z", "--deadline");
}

static void test_hostile_environment(void **ctx)
{
    (void)ctx;
    static const char *const texts[] = {"", " ", "-1", "+1", "1e9", "0x10", "1767333600 ", "1767333600s", "1000000000000000",
                                        "1767333600000", "Unknown"};
    struct deadline_rules none = DEADLINE_RULES_NONE;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct deadline d;
        struct err e = {0};
        assert_int_equal(deadline_find(&none, texts[i], 0, &d, &e), RC_BAD_INPUT);
        assert_int_equal(e.exit_status, EXIT_CONFIG);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_times),
        cmocka_unit_test(test_every_day_is_one_day_later),
        cmocka_unit_test(test_no_times),
        cmocka_unit_test(test_clocks_and_windows),
        cmocka_unit_test(test_next_local_time),
        cmocka_unit_test(test_summer_time),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_the_earliest_counts),
        cmocka_unit_test(test_hostile_environment),
    };
    return cmocka_run_group_tests_name("deadline", tests, NULL, NULL);
}
