/* progress: a bar on a terminal, one line at the end elsewhere.
 *
 * All state is in the caller's struct. The rate is counted over windows of two seconds, so that it follows the load;
 * the time left comes from jobs a second since the start, because jobs, not tokens, are what remains. Every draw is
 * one write. Another process that writes to the same terminal (a rank) starts its line with its own prefix; the bar
 * is drawn again below it. */
#define _GNU_SOURCE
#include "progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { DRAW_US = 200000, WINDOW_US = 2000000, BAR_CELLS = 24 };

static size_t finished(const struct progress *p) { return p->done + p->failed; }

void progress_duration_text(double seconds, char *out, size_t out_bytes)
{
    int64_t s = (int64_t)(seconds + 0.5);
    if (s >= 3600)
        snprintf(out, out_bytes, "%" PRId64 "h%02" PRId64 "m", s / 3600, s / 60 % 60);
    else if (s >= 60)
        snprintf(out, out_bytes, "%" PRId64 "m%02" PRId64 "s", s / 60, s % 60);
    else
        snprintf(out, out_bytes, "%" PRId64 "s", s);
}

static void left_text(const struct progress *p, int64_t now_us, char *out, size_t out_bytes)
{
    size_t now_done = finished(p) - p->already;
    snprintf(out, out_bytes, "-");
    if (!now_done || finished(p) > p->total || now_us <= p->start_us) return;
    double per_job_s = (double)(now_us - p->start_us) / 1e6 / (double)now_done;
    progress_duration_text(per_job_s * (double)(p->total - finished(p)), out, out_bytes);
}

void progress_text(const struct progress *p, int64_t now_us, char *out, size_t out_bytes)
{
    char bar[BAR_CELLS + 1], left[32];
    size_t cells = p->total ? finished(p) * BAR_CELLS / p->total : BAR_CELLS;
    if (cells > BAR_CELLS) cells = BAR_CELLS;
    memset(bar, '.', BAR_CELLS);
    memset(bar, '#', cells);
    bar[BAR_CELLS] = '\0';
    left_text(p, now_us, left, sizeof left);
    snprintf(out, out_bytes, "[%s] %zu/%zu  %zu failed  %.1f tok/s  %s left", bar, finished(p), p->total, p->failed,
             p->tokens_per_s, left);
    if (p->columns > 1 && strlen(out) >= (size_t)p->columns) out[p->columns - 1] = '\0';
}

void progress_status_text(const struct progress *p, int64_t now_us, size_t in_flight, char *out, size_t out_bytes)
{
    char took[32], left[32];
    double seconds = (double)(now_us - p->start_us) / 1e6;
    progress_duration_text(seconds, took, sizeof took);
    left_text(p, now_us, left, sizeof left);
    size_t pending = p->total > finished(p) ? p->total - finished(p) : 0;
    snprintf(out, out_bytes, "%zu job%s: %zu done, %zu failed, %zu pending, %zu of them in flight; %s, %.1f tok/s, %s left", p->total,
             p->total == 1 ? "" : "s", p->done, p->failed, pending, in_flight, took, seconds > 0 ? (double)p->tokens / seconds : 0.0, left);
}

static int terminal_columns(void)
{
    struct winsize size;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col : 80;
}

static void draw(struct progress *p, int64_t now_us)
{
    char text[200], line[220];
    p->columns = terminal_columns();
    progress_text(p, now_us, text, sizeof text);
    int n = snprintf(line, sizeof line, "\r%s\x1b[K", text);
    fd_write_all(STDERR_FILENO, line, (size_t)n);
    p->drawn = true;
}

void progress_start(struct progress *p, size_t total, size_t already_done, bool quiet)
{
    int64_t now = clock_now_us();
    *p = (struct progress){.terminal = isatty(STDERR_FILENO) == 1,
                           .quiet = quiet,
                           .total = total,
                           .already = already_done,
                           .done = already_done,
                           .start_us = now,
                           .last_us = now,
                           .rate_us = now};
    if (already_done && already_done < total && p->terminal && !quiet)
        log_line(LOG_INFO, "%zu of %zu jobs are done already", already_done, total);
}

static void rate_update(struct progress *p, int64_t now)
{
    int64_t span = now - p->rate_us;
    /* Until the first window is full, the mean since the start. */
    if (span < WINDOW_US && p->rate_us != p->start_us) return;
    if (span > 0) p->tokens_per_s = (double)(p->tokens - p->rate_tokens) * 1e6 / (double)span;
    if (span < WINDOW_US) return;
    p->rate_us = now;
    p->rate_tokens = p->tokens;
}

void progress_update(struct progress *p, size_t done, size_t failed, uint64_t tokens)
{
    int64_t now = clock_now_us();
    p->done = done;
    p->failed = failed;
    p->tokens = tokens;
    rate_update(p, now);
    if (p->quiet || !p->terminal || now - p->last_us < DRAW_US) return;
    p->last_us = now;
    draw(p, now);
}

void progress_hide(struct progress *p)
{
    if (!p->drawn) return;
    fd_write_all(STDERR_FILENO, "\r\x1b[K", 4);
    p->drawn = false;
    p->last_us = 0; /* the next update draws at once */
}

void progress_finish(struct progress *p, const char *note, const char *out_path)
{
    progress_hide(p);
    if (p->quiet) return;
    char took[32];
    double seconds = (double)(clock_now_us() - p->start_us) / 1e6;
    progress_duration_text(seconds, took, sizeof took);
    size_t pending = p->total > finished(p) ? p->total - finished(p) : 0;
    char cached[96] = "";
    if (p->cached_tokens)
        snprintf(cached, sizeof cached, "%" PRIu64 " of %" PRIu64 " prompt tokens from the cache; ", p->cached_tokens,
                 p->prompt_tokens);
    log_line(LOG_INFO, "%s%s%zu job%s: %zu done, %zu failed, %zu pending; %" PRIu64 " tokens in %s (%.1f tok/s); %s%s", note,
             *note ? ": " : "", p->total, p->total == 1 ? "" : "s", p->done, p->failed, pending, p->tokens, took,
             seconds > 0 ? (double)p->tokens / seconds : 0.0, cached, out_path);
}
