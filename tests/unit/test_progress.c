/* progress: what is written, and when nothing is. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "progress.h"

/* Redirects standard error to a file or a pseudo-terminal while a test looks at it. */
struct capture {
    int saved, read_fd;
};

static struct capture capture_start(bool terminal)
{
    struct capture c;
    int write_fd;
    if (terminal) {
        c.read_fd = posix_openpt(O_RDWR | O_NOCTTY);
        assert_true(c.read_fd >= 0 && grantpt(c.read_fd) == 0 && unlockpt(c.read_fd) == 0);
        write_fd = open(ptsname(c.read_fd), O_RDWR | O_NOCTTY);
        fcntl(c.read_fd, F_SETFL, O_NONBLOCK);
    } else {
        int fds[2];
        assert_int_equal(pipe2(fds, O_NONBLOCK), 0);
        c.read_fd = fds[0];
        write_fd = fds[1];
    }
    assert_true(write_fd >= 0);
    c.saved = dup(STDERR_FILENO);
    dup2(write_fd, STDERR_FILENO);
    close(write_fd);
    return c;
}

static void capture_end(struct capture *c, char *out, size_t out_bytes)
{
    /* A pseudo-terminal hands on what was written a little later. */
    struct pollfd wait = {.fd = c->read_fd, .events = POLLIN};
    size_t len = 0;
    while (len < out_bytes - 1 && poll(&wait, 1, 100) == 1) {
        ssize_t n = read(c->read_fd, out + len, out_bytes - 1 - len);
        if (n <= 0) break;
        len += (size_t)n;
    }
    out[len] = '\0';
    dup2(c->saved, STDERR_FILENO);
    close(c->saved);
    close(c->read_fd);
}

static void test_text(void **ctx)
{
    (void)ctx;
    char text[200];
    struct progress p = {
        .total = 10, .already = 2, .done = 5, .failed = 1, .tokens_per_s = 123.45, .start_us = 1000000};
    /* 4 jobs in 8 s: 2 s a job, 4 jobs left */
    progress_text(&p, 9000000, text, sizeof text);
    assert_string_equal(text, "[##############..........] 6/10  1 failed  123.5 tok/s  8s left");
    p.done = 2, p.failed = 0;
    progress_text(&p, 9000000, text, sizeof text);
    assert_string_equal(text, "[####....................] 2/10  0 failed  123.5 tok/s  - left");
    p.done = 10;
    progress_text(&p, 9000000, text, sizeof text);
    assert_string_equal(text, "[########################] 10/10  0 failed  123.5 tok/s  0s left");
    p.total = 1000, p.done = 3;
    progress_text(&p, 9000000, text, sizeof text);
    assert_non_null(strstr(text, "2h12m left")); /* 997 jobs of 8 s */
    p.columns = 20;
    progress_text(&p, 9000000, text, sizeof text);
    assert_int_equal(strlen(text), 19);
    p = (struct progress){0};
    progress_text(&p, 5, text, sizeof text);
    assert_non_null(strstr(text, "0/0"));
}

static void test_elsewhere_only_the_final_line(void **ctx)
{
    (void)ctx;
    char text[1000];
    struct progress p;
    struct capture c = capture_start(false);
    progress_start(&p, 10, 3, false);
    for (size_t i = 3; i < 10; i++) {
        p.last_us -= 3600000000; /* an hour passes */
        progress_update(&p, i + 1, 0, i * 10);
    }
    p.prompt_tokens = 700;
    p.cached_tokens = 448;
    progress_finish(&p, "", "out.tar");
    capture_end(&c, text, sizeof text);
    assert_int_equal(strncmp(text, "tandem: 10 jobs: 10 done, 0 failed, 0 pending; 90 tokens in 0s", 62), 0);
    assert_non_null(strstr(text, "; 448 of 700 prompt tokens from the cache; out.tar\n"));
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
}

static void test_quiet_is_silent(void **ctx)
{
    (void)ctx;
    for (int terminal = 0; terminal < 2; terminal++) {
        char text[1000];
        struct progress p;
        struct capture c = capture_start(terminal);
        progress_start(&p, 10, 3, true);
        p.last_us -= 60000000;
        progress_update(&p, 4, 1, 100);
        progress_finish(&p, "stopped", "out.tar");
        capture_end(&c, text, sizeof text);
        assert_string_equal(text, "");
    }
}

static void test_bar_is_drawn_and_cleared(void **ctx)
{
    (void)ctx;
    char text[2000];
    struct progress p;
    struct capture c = capture_start(true);
    progress_start(&p, 4, 1, false);
    assert_true(p.terminal);
    p.last_us -= 200001;
    progress_update(&p, 2, 0, 7);
    p.last_us += 60000000;
    progress_update(&p, 3, 0, 9); /* too soon to draw */
    progress_hide(&p);
    progress_hide(&p);
    progress_finish(&p, "stopped by a signal", "out.tar");
    capture_end(&c, text, sizeof text);
    assert_non_null(strstr(text, "1 of 4 jobs are done already"));
    char *bar = strstr(text, "\r[############............] 2/4");
    assert_non_null(bar);
    assert_null(strstr(text, "3/4"));
    char *cleared = strstr(bar + 1, "\r\x1b[K");
    assert_non_null(cleared);
    assert_null(strstr(cleared + 1, "\r\x1b[K"));
    assert_non_null(strstr(cleared, "tandem: stopped by a signal: 4 jobs: 3 done, 0 failed, 1 pending; 9 tokens"));
}

static void test_rate_follows_the_load(void **ctx)
{
    (void)ctx;
    struct progress p;
    progress_start(&p, 10, 0, true);
    p.start_us -= 10000000, p.rate_us -= 10000000;
    progress_update(&p, 1, 0, 1000);
    assert_true(p.tokens_per_s > 99 && p.tokens_per_s < 101);
    p.rate_us -= 2000000;
    progress_update(&p, 1, 0, 1400);
    assert_true(p.tokens_per_s > 195 && p.tokens_per_s < 205);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_elsewhere_only_the_final_line),
        cmocka_unit_test(test_quiet_is_silent),
        cmocka_unit_test(test_bar_is_drawn_and_cleared),
        cmocka_unit_test(test_rate_follows_the_load),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
