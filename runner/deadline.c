/* deadline: dates by arithmetic, times of day by mktime.
 *
 * A time of day may come twice in a day or not at all where summer time begins or ends. mktime decides such cases as the
 * library likes, so both readings of tm_isdst are tried here, and only what localtime shows as the wanted time counts. */
#define _GNU_SOURCE
#include "deadline.h"

#include <ctype.h>
#include <string.h>
#include <time.h>

enum { HOUR_MIN = 60, DAY_MIN = 24 * HOUR_MIN, DAY_S = 60 * DAY_MIN };

/* ---- texts ---- */

/* Exactly n digits at *at, as a number from low to high. */
static bool take_digits(const char **at, int n, int low, int high, int *out)
{
    int value = 0;
    for (int i = 0; i < n; i++) {
        if (!isdigit((unsigned char)(*at)[i])) return false;
        value = 10 * value + ((*at)[i] - '0');
    }
    *at += n;
    *out = value;
    return value >= low && value <= high;
}

static bool take_char(const char **at, const char *any_of)
{
    if (!**at || !strchr(any_of, **at)) return false;
    ++*at;
    return true;
}

/* "06:00" as minutes. */
static bool take_clock(const char **at, int *out_min)
{
    int hour, minute;
    if (!take_digits(at, 2, 0, 23, &hour) || !take_char(at, ":") || !take_digits(at, 2, 0, 59, &minute)) return false;
    *out_min = hour * HOUR_MIN + minute;
    return true;
}

static bool is_leap(int year) { return year % 4 == 0 && (year % 100 != 0 || year % 400 == 0); }

static int days_in_month(int year, int month)
{
    static const int days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    return days[month - 1] + (month == 2 && is_leap(year));
}

/* Days from 1970-01-01 in the Gregorian calendar. The year is counted from March, so that its leap day is its last. */
static int64_t days_since_epoch(int year, int month, int day)
{
    int64_t y = month > 2 ? year : year - 1, m = month > 2 ? month - 3 : month + 9;
    int64_t y400 = y + 400; /* year 0 has a January too */
    return y * 365 + (y400 / 4 - y400 / 100 + y400 / 400 - 97) + (153 * m + 2) / 5 + day - 1 - 719468;
}

bool deadline_parse_time(const char *text, int64_t *out_s)
{
    const char *at = text;
    int year, month, day, clock_min, second, offset_min = 0;
    if (!take_digits(&at, 4, 0, 9999, &year) || !take_char(&at, "-") || !take_digits(&at, 2, 1, 12, &month) ||
        !take_char(&at, "-") || !take_digits(&at, 2, 1, days_in_month(year, month), &day) || !take_char(&at, "Tt ") ||
        !take_clock(&at, &clock_min) || !take_char(&at, ":") || !take_digits(&at, 2, 0, 60, &second))
        return false;
    if (take_char(&at, ".")) {
        if (!isdigit((unsigned char)*at)) return false;
        while (isdigit((unsigned char)*at)) at++;
    }
    if (!take_char(&at, "Zz")) {
        bool west = *at == '-';
        if (!take_char(&at, "+-") || !take_clock(&at, &offset_min)) return false;
        if (west) offset_min = -offset_min;
    }
    if (*at) return false;
    *out_s = days_since_epoch(year, month, day) * DAY_S + (int64_t)(clock_min - offset_min) * 60 + second;
    return true;
}

bool deadline_parse_clock(const char *text, int *out_min) { return take_clock(&text, out_min) && !*text; }

bool deadline_parse_window(const char *text, struct deadline_window *out)
{
    const char *at = text;
    return take_clock(&at, &out->from_min) && take_char(&at, "-") && take_clock(&at, &out->to_min) && !*at &&
           out->from_min != out->to_min;
}

/* ---- local times ---- */

/* Whether clocks show the minute on a day. *next_s is lowered to the first moment after now at which they do. */
static bool clock_shows(const struct tm *today, int days, int minute, int64_t now_s, int64_t *next_s)
{
    bool shown = false;
    for (int dst = 0; dst <= 1; dst++) {
        struct tm tm = {.tm_year = today->tm_year, .tm_mon = today->tm_mon, .tm_mday = today->tm_mday + days,
                        .tm_hour = minute / HOUR_MIN, .tm_min = minute % HOUR_MIN, .tm_isdst = dst};
        time_t t = mktime(&tm);
        if (t == (time_t)-1 || !localtime_r(&t, &tm)) continue;
        if (tm.tm_hour * HOUR_MIN + tm.tm_min != minute % DAY_MIN) continue;
        shown = true;
        if (t > now_s && t < *next_s) *next_s = t;
    }
    return shown;
}

int64_t deadline_next_local(int64_t now_s, int minute)
{
    int64_t next_s = INT64_MAX;
    time_t now = (time_t)now_s;
    struct tm today;
    if (!localtime_r(&now, &today)) return INT64_MAX;
    for (int days = 0; days <= 2 && next_s == INT64_MAX; days++)
        for (int leap = 0; leap < DAY_MIN && !clock_shows(&today, days, minute + leap, now_s, &next_s); leap++) {}
    return next_s;
}

static bool is_inside(const struct deadline_window *w, int minute)
{
    bool after_from = minute >= w->from_min, before_to = minute < w->to_min;
    return w->from_min < w->to_min ? after_from && before_to : after_from || before_to;
}

/* ---- the earliest ---- */

static void lower(struct deadline *d, int64_t at_s, const char *source)
{
    if (at_s < d->at_s) *d = (struct deadline){at_s, source};
}

static enum rc lower_to_local(struct deadline *d, int64_t now_s, int minute, const char *source, struct err *e)
{
    int64_t at_s = deadline_next_local(now_s, minute);
    lower(d, at_s, source);
    return at_s < INT64_MAX ? RC_OK
                            : err_set(e, RC_FAILED, EXIT_INTERNAL, "no_local_time", "%s: local clocks never show this time", source);
}

static enum rc lower_to_scheduler(struct deadline *d, const char *text, struct err *e)
{
    enum { MAX_DIGITS = 12 };
    int64_t at_s = 0;
    size_t digits = strspn(text, "0123456789");
    if (!digits || digits > MAX_DIGITS || text[digits])
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "bad_environment", "SLURM_JOB_END_TIME is not a time in UNIX seconds: %.40s",
                       text);
    for (size_t i = 0; i < digits; i++) at_s = 10 * at_s + (text[i] - '0');
    lower(d, at_s, "SLURM_JOB_END_TIME");
    return RC_OK;
}

static enum rc lower_to_window(struct deadline *d, int64_t now_s, const struct deadline_window *w, struct err *e)
{
    time_t now = (time_t)now_s;
    struct tm local;
    if (!localtime_r(&now, &local))
        return err_set(e, RC_FAILED, EXIT_INTERNAL, "no_local_time", "the clock's time is no date");
    if (is_inside(w, local.tm_hour * HOUR_MIN + local.tm_min)) return lower_to_local(d, now_s, w->to_min, "--window", e);
    return err_set(e, RC_RETRY, EXIT_RESUMABLE, "outside_window",
                   "it is %02d:%02d, outside --window %02d:%02d-%02d:%02d; nothing was done", local.tm_hour, local.tm_min,
                   w->from_min / HOUR_MIN, w->from_min % HOUR_MIN, w->to_min / HOUR_MIN, w->to_min % HOUR_MIN);
}

enum rc deadline_find(const struct deadline_rules *rules, const char *scheduler_end, int64_t now_s, struct deadline *out,
                      struct err *e)
{
    enum rc rc = RC_OK;
    *out = (struct deadline){INT64_MAX, NULL};
    lower(out, rules->at_s, "--deadline");
    if (rules->until_min >= 0) rc = lower_to_local(out, now_s, rules->until_min, "--until", e);
    if (rc == RC_OK && rules->window.from_min >= 0) rc = lower_to_window(out, now_s, &rules->window, e);
    if (rc == RC_OK && scheduler_end) rc = lower_to_scheduler(out, scheduler_end, e);
    return rc;
}
