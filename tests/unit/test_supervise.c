/* A group of real rank processes around a fake engine: start, answers, what a rank inherits, every way to fail and come
 * back, giving up, and that nothing is left behind. This program is its own rank. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/wait.h>

#include "fake_engine.h"
#include "rank_args.h"
#include "supervise.h"

static struct options options_for(const char *model, int ranks)
{
    return (struct options){.model = model, .backend = "auto", .isa = "auto", .ranks = ranks, .groups = 1, .threads = 1,
                            .active = 4, .bounds = {500000, 1000000, 2500000}, .restarts = 3};
}

/* ---- driving a group ---- */

static struct group *open_group(const struct options *o)
{
    struct group *g = NULL;
    struct err e = {0};
    assert_int_equal(group_open(o, 0, FAKE_IDENTITY, &g, &e), RC_OK);
    assert_non_null(g);
    return g;
}

/* Next event, TOKEN frames skipped; fails the test after 20 s. */
static void next_event(struct group *g, struct group_event *v)
{
    int64_t until = clock_now_us() + 20000000;
    while (clock_now_us() < until) {
        while (group_next_event(g, v))
            if (v->kind != GROUP_EVENT_FRAME || v->frame->type != WIRE_TOKEN) return;
        struct pollfd fds[MAX_RANKS];
        int timeout_ms = 1000;
        int n = group_poll_fds(g, fds, &timeout_ms);
        poll(fds, (nfds_t)n, timeout_ms);
        group_pump(g);
    }
    fail_msg("no event within 20 s");
}

static void expect(struct group *g, enum group_event_kind kind, struct group_event *v)
{
    next_event(g, v);
    if (v->kind != kind) fail_msg("event %d (%s) instead of %d", (int)v->kind, v->text ? v->text : "", (int)kind);
}

static void submit(struct group *g, uint64_t id, int32_t first, int32_t second)
{
    int32_t prompt[2] = {first, second};
    struct engine_request r = {.id = id, .prompt = prompt, .prompt_tokens = 2, .max_tokens = 1};
    struct err e = {0};
    assert_int_equal(group_submit(g, &r, &e), RC_OK);
}

static void expect_answer(struct group *g, uint64_t id, int64_t sum)
{
    struct group_event v;
    char text[64];
    expect(g, GROUP_EVENT_FRAME, &v);
    assert_int_equal(v.frame->type, WIRE_DONE);
    int n = snprintf(text, sizeof text, "%llu:%lld", (unsigned long long)id, (long long)sum);
    assert_int_equal(v.frame->u.done.id, id);
    assert_int_equal(v.frame->u.done.text_len, n);
    assert_memory_equal(v.frame->u.done.text, text, (size_t)n);
}

/* No child is left, and no descriptor of this process is a segment. */
static void assert_nothing_left(void)
{
    errno = 0;
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    for (struct dirent *x = readdir(d); x; x = readdir(d)) {
        char target[256];
        ssize_t n = readlinkat(dirfd(d), x->d_name, target, sizeof target - 1);
        if (n <= 0) continue;
        target[n] = '\0';
        assert_null(strstr(target, "tandem-segment"));
        assert_null(strstr(target, "socket:"));
    }
    closedir(d);
}

/* ---- tests ---- */

static void args_round_trip(void **state)
{
    (void)state;
    struct options o = options_for("models/a b.gguf", 3);
    o.context = 8192;
    o.kv_tokens = INT64_MAX;
    o.prefill_rows = 256;
    o.trace = true;
    o.chat_format = "chatml";
    o.fault = (struct fault){FAULT_STATE, 1, 17};
    struct rank_args a = rank_args_make(&o, 2, 1), b;
    struct rank_argv v;
    struct err e = {0};
    assert_int_equal(rank_args_write(&a, &v, &e), RC_OK);
    int argc = 0;
    while (v.argv[argc]) argc++;
    assert_string_equal(v.argv[1], "rank");
    assert_int_equal(rank_args_read(argc, v.argv, &b, &e), RC_OK);
    assert_int_equal(b.rank, 1);
    assert_int_equal(b.group, 2);
    assert_int_equal(b.runner_pid, getpid());
    assert_string_equal(b.options.model, o.model);
    assert_string_equal(b.options.chat_format, "chatml");
    assert_int_equal(b.options.ranks, 3);
    assert_int_equal(b.options.threads, 1);
    assert_int_equal(b.options.context, 8192);
    assert_int_equal(b.options.kv_tokens, INT64_MAX);
    assert_int_equal(b.options.prefill_rows, 256);
    assert_true(b.options.trace);
    assert_int_equal(b.options.fault.kind, FAULT_STATE);
    assert_int_equal(b.options.fault.rank, 1);
    assert_int_equal(b.options.fault.step, 17);
    char extra[] = "--ranks", bad[] = "3x";
    char *wrong[] = {v.argv[0], v.argv[1], extra, bad, NULL};
    assert_int_equal(rank_args_read(4, wrong, &b, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_USAGE);
    assert_int_equal(rank_args_read(3, wrong, &b, NULL), RC_BAD_INPUT);
    assert_int_equal(rank_args_read(2, wrong, &b, NULL), RC_BAD_INPUT);
    rank_argv_free(&v);
}

static void answers_in_order(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        struct options o = options_for("fake", ranks);
        struct group *g = open_group(&o);
        struct group_event v;
        assert_int_equal(group_state_of(g), GROUP_STARTING);
        int32_t one = 1;
        struct engine_request early = {.id = 1, .prompt = &one, .prompt_tokens = 1, .max_tokens = 1};
        assert_int_equal(group_submit(g, &early, NULL), RC_RETRY);
        expect(g, GROUP_EVENT_READY, &v);
        assert_int_equal(group_hello(g)->context, 1000);
        assert_int_equal(group_hello(g)->partition_digest, 33);
        for (uint64_t id = 1; id <= 20; id++) submit(g, id, (int32_t)id, 1000);
        for (uint64_t id = 1; id <= 20; id++) expect_answer(g, id, (int64_t)id + 1000);
        assert_int_equal(group_restarts(g), 0);
        int64_t start = clock_now_us();
        group_close(g, 10000000);
        assert_true(clock_now_us() - start < 5000000); /* asked to leave, they leave */
        assert_nothing_left();
    }
}

static int count_fds(pid_t pid, bool *segment)
{
    char path[64], target[256];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    assert_non_null(d);
    int n = 0;
    for (struct dirent *x = readdir(d); x; x = readdir(d)) {
        if (x->d_name[0] == '.') continue;
        ssize_t len = readlinkat(dirfd(d), x->d_name, target, sizeof target - 1);
        if (len <= 0) continue;
        target[len] = '\0';
        if (strstr(target, "tandem-segment")) *segment = true;
        n++;
    }
    closedir(d);
    return n;
}

static void ranks_inherit_nothing_else(void **state)
{
    (void)state;
    int careless = open("/dev/null", O_RDONLY); /* not close-on-exec, on purpose */
    int high = fcntl(careless, F_DUPFD, 200);
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigaddset(&term, SIGUSR1);
    sigprocmask(SIG_BLOCK, &term, NULL);
    struct options o = options_for("fake", 2);
    struct group *g = open_group(&o);
    struct group_event v;
    expect(g, GROUP_EVENT_READY, &v);
    for (int r = 0; r < 2; r++) {
        pid_t pid = group_rank_pid(g, r);
        bool segment = false;
        assert_int_equal(getpgid(pid), pid);
        assert_int_equal(count_fds(pid, &segment), 4); /* 0, 1, 2 and the socket; the segment is mapped and closed */
        assert_false(segment);
        assert_int_equal(kill(pid, SIGTERM), 0);
        assert_int_equal(kill(pid, SIGINT), 0);
        assert_int_equal(kill(pid, SIGHUP), 0);
    }
    submit(g, 1, 5, 6);
    expect_answer(g, 1, 11);
    group_close(g, 5000000);
    sigprocmask(SIG_UNBLOCK, &term, NULL);
    close(careless);
    close(high);
    assert_nothing_left();
}

/* A fault on one rank; what was in flight is submitted again and answered by the next life. */
static void fail_and_return(int fault, int rank, const char *reason, int64_t most_us)
{
    struct options o = options_for("fake", 2);
    struct group *g = open_group(&o);
    struct group_event v;
    expect(g, GROUP_EVENT_READY, &v);
    pid_t old[2] = {group_rank_pid(g, 0), group_rank_pid(g, 1)};
    submit(g, 1, 3, 4);
    submit(g, 2, fault, rank);
    expect_answer(g, 1, 7);
    int64_t start = clock_now_us();
    expect(g, GROUP_EVENT_LOST, &v);
    assert_true(clock_now_us() - start < most_us);
    if (!strstr(v.text, reason)) fail_msg("\"%s\" does not say \"%s\"", v.text, reason);
    for (int r = 0; r < 2; r++) assert_int_equal(kill(old[r], 0), -1);
    expect(g, GROUP_EVENT_READY, &v);
    assert_int_equal(group_restarts(g), 1);
    submit(g, 2, 30, 40);
    expect_answer(g, 2, 70);
    group_close(g, 5000000);
    assert_nothing_left();
}

static void every_fault_on_every_rank(void **state)
{
    (void)state;
    for (int r = 0; r < 2; r++) {
        char killed[64], left[64];
        snprintf(killed, sizeof killed, "rank %d was killed by signal 9", r);
        snprintf(left, sizeof left, "rank %d left with status 5", r);
        fail_and_return(FAKE_KILL, r, killed, 2000000);
        fail_and_return(FAKE_EXIT, r, left, 2000000);
        fail_and_return(FAKE_STOP, r, "rank", 5000000);
        fail_and_return(FAKE_HANG, r, "rank", 5000000);
        fail_and_return(FAKE_DIFFER, r, "token_hash", 2000000);
    }
}

/* One rank alone has no peer that notices: the runner's own watchdog must. */
static void watchdog(void **state)
{
    (void)state;
    struct options o = options_for("fake", 1);
    struct group *g = open_group(&o);
    struct group_event v;
    expect(g, GROUP_EVENT_READY, &v);
    submit(g, 1, FAKE_STOP, 0);
    int64_t start = clock_now_us();
    expect(g, GROUP_EVENT_LOST, &v);
    assert_true(clock_now_us() - start >= o.bounds.watchdog_us - 500000);
    assert_string_equal(v.text, "rank 0 has not moved for 2.5 s");
    group_close(g, 0);
    assert_nothing_left();
}

static void watchdog_while_loading(void **state)
{
    (void)state;
    struct options o = options_for("fake-hang-load", 2);
    o.restarts = 0;
    struct group *g = open_group(&o);
    struct group_event v;
    expect(g, GROUP_EVENT_LOST, &v);
    assert_string_equal(v.text, "rank 1 has not moved for 2.5 s");
    expect(g, GROUP_EVENT_GAVE_UP, &v);
    assert_int_equal(v.exit_status, EXIT_UNAVAILABLE);
    assert_int_equal(group_state_of(g), GROUP_GAVE_UP);
    group_close(g, 1000000);
    assert_nothing_left();
}

static void gives_up_without_progress(void **state)
{
    (void)state;
    struct options o = options_for("fake-die-load", 2);
    struct group *g = open_group(&o);
    struct group_event v;
    int64_t start = clock_now_us();
    for (int i = 0; i <= o.restarts; i++) {
        expect(g, GROUP_EVENT_LOST, &v);
        assert_non_null(strstr(v.text, "left with status 7"));
    }
    expect(g, GROUP_EVENT_GAVE_UP, &v);
    assert_true(clock_now_us() - start >= 200000 + 400000 + 800000); /* the backoff doubles */
    assert_int_equal(v.exit_status, EXIT_UNAVAILABLE);
    assert_int_equal(group_restarts(g), o.restarts);
    assert_false(group_next_event(g, &v));
    group_close(g, 0);
    assert_nothing_left();
}

static void progress_resets_the_count(void **state)
{
    (void)state;
    struct options o = options_for("fake", 2);
    o.restarts = 1;
    struct group *g = open_group(&o);
    struct group_event v;
    for (int i = 0; i < 4; i++) {
        expect(g, GROUP_EVENT_READY, &v);
        submit(g, 1, FAKE_KILL, 1);
        expect(g, GROUP_EVENT_LOST, &v);
        group_progress(g); /* in time although the ranks are gone already */
    }
    expect(g, GROUP_EVENT_READY, &v);
    submit(g, 1, FAKE_KILL, 0);
    expect(g, GROUP_EVENT_LOST, &v);
    expect(g, GROUP_EVENT_GAVE_UP, &v); /* the one restart was spent on the life that just ended */
    group_close(g, 0);
    assert_nothing_left();
}

static void another_identity_is_final(void **state)
{
    (void)state;
    struct options o = options_for("fake", 2);
    struct group *g = NULL;
    struct group_event v;
    assert_int_equal(group_open(&o, 0, "version=1\nmodel=other\nranks=any\n", &g, NULL), RC_OK);
    expect(g, GROUP_EVENT_LOST, &v);
    expect(g, GROUP_EVENT_GAVE_UP, &v);
    assert_non_null(strstr(v.text, "model=fake instead of model=other"));
    assert_int_equal(v.exit_status, EXIT_UNAVAILABLE);
    assert_int_equal(group_restarts(g), 0);
    group_close(g, 0);
    assert_nothing_left();
}

static void impossible_setting_is_final(void **state)
{
    (void)state;
    struct options o = options_for("fake-config", 2);
    o.context = 123456;
    struct group *g = open_group(&o);
    struct group_event v;
    expect(g, GROUP_EVENT_LOST, &v);
    expect(g, GROUP_EVENT_GAVE_UP, &v);
    assert_non_null(strstr(v.text, "context 123456 is too long"));
    assert_int_equal(v.exit_status, EXIT_CONFIG);
    assert_int_equal(group_restarts(g), 0);
    group_close(g, 0);
    assert_nothing_left();
}

/* At the start and in the middle of work, on any rank: no restart, 74, and the last words say where. */
static void a_full_disk_is_final(void **state)
{
    (void)state;
    struct options o = options_for("fake-disk", 2);
    struct group_event v;
    for (int r = -1; r < 2; r++) {
        struct group *g = open_group(&o);
        if (r >= 0) {
            expect(g, GROUP_EVENT_READY, &v);
            submit(g, 1, FAKE_DISK, r);
        }
        expect(g, GROUP_EVENT_LOST, &v);
        assert_int_equal(v.exit_status, EXIT_IO);
        expect(g, GROUP_EVENT_GAVE_UP, &v);
        assert_non_null(strstr(v.text, r < 0 ? "store_disk_full: the cache" : "store_disk_full: /cache/rank: the cache"));
        assert_int_equal(v.exit_status, EXIT_IO);
        assert_int_equal(group_restarts(g), 0);
        group_close(g, 0);
        assert_nothing_left();
        o.model = "fake";
    }
}

static void a_request_fails_alone(void **state)
{
    (void)state;
    struct options o = options_for("fake", 2);
    struct group *g = open_group(&o);
    struct group_event v;
    expect(g, GROUP_EVENT_READY, &v);
    submit(g, 1, FAKE_REFUSE, 0);
    submit(g, 2, FAKE_FAIL, 0);
    submit(g, 3, 1, 1);
    expect(g, GROUP_EVENT_FRAME, &v);
    assert_int_equal(v.frame->type, WIRE_FAILED);
    assert_int_equal(v.frame->u.text.id, 1);
    assert_string_equal(v.frame->u.text.code, "refused");
    expect(g, GROUP_EVENT_FRAME, &v);
    assert_int_equal(v.frame->type, WIRE_FAILED);
    assert_int_equal(v.frame->u.text.id, 2);
    expect_answer(g, 3, 2);
    group_close(g, 5000000);
    assert_nothing_left();
}

/* Only what takes more than a step says that it started; what is cancelled says nothing more, and the others are answered. */
static void cancelling(void **state)
{
    (void)state;
    struct options o = options_for("fake", 2);
    struct group *g = open_group(&o);
    struct group_event v;
    expect(g, GROUP_EVENT_READY, &v);
    submit(g, 1, FAKE_ENDLESS, 0);
    submit(g, 2, 3, 4);
    submit(g, 3, FAKE_ENDLESS, 0);
    submit(g, 4, FAKE_ENDLESS, 0);
    submit(g, 5, 5, 6);
    expect(g, GROUP_EVENT_FRAME, &v);
    assert_int_equal(v.frame->type, WIRE_STARTED);
    assert_int_equal(v.frame->u.started, 1);
    group_cancel(g, 77); /* nobody's */
    group_cancel(g, 4);  /* still in the queue */
    group_cancel(g, 1);
    expect_answer(g, 2, 7);
    expect(g, GROUP_EVENT_FRAME, &v);
    assert_int_equal(v.frame->type, WIRE_STARTED);
    assert_int_equal(v.frame->u.started, 3);
    group_cancel(g, 3);
    expect_answer(g, 5, 11);
    group_close(g, 5000000);
    assert_nothing_left();
}

/* More than a socket holds, several times over. */
static void large_requests(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    struct options o = options_for("fake", 2);
    struct group *g = open_group(&o);
    struct group_event v;
    int32_t *prompt = calloc(N, sizeof *prompt);
    assert_non_null(prompt);
    for (int i = 0; i < N; i++) prompt[i] = 1;
    expect(g, GROUP_EVENT_READY, &v);
    for (uint64_t id = 1; id <= 4; id++) {
        struct engine_request r = {.id = id, .prompt = prompt, .prompt_tokens = N, .max_tokens = 1};
        assert_int_equal(group_submit(g, &r, NULL), RC_OK);
    }
    for (uint64_t id = 1; id <= 4; id++) expect_answer(g, id, N);
    struct engine_request r = {.id = 5, .prompt = prompt, .prompt_tokens = (size_t)1 << 25, .max_tokens = 1};
    assert_int_equal(group_submit(g, &r, NULL), RC_BAD_INPUT);
    free(prompt);
    group_close(g, 5000000);
    assert_nothing_left();
}

static void closing_kills_what_does_not_leave(void **state)
{
    (void)state;
    struct options o = options_for("fake", 2);
    struct group *g = open_group(&o);
    struct group_event v;
    expect(g, GROUP_EVENT_READY, &v);
    submit(g, 1, FAKE_STOP, 0);
    sleep_us(100000);
    int64_t start = clock_now_us();
    group_close(g, 300000);
    assert_true(clock_now_us() - start < 2000000);
    assert_nothing_left();
}

/* The runner dies by kill -9: its ranks, even one that hangs in a step and never looks at its socket, must not outlive it. */
static void no_orphans(void **state)
{
    (void)state;
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    pid_t runner = fork();
    assert_true(runner >= 0);
    if (runner == 0) {
        struct options o = options_for("fake", 2);
        struct group *g = NULL;
        struct group_event v = {.kind = GROUP_EVENT_LOST};
        if (group_open(&o, 0, FAKE_IDENTITY, &g, NULL) != RC_OK) _exit(1);
        while (v.kind != GROUP_EVENT_READY) {
            group_pump(g);
            if (!group_next_event(g, &v)) sleep_us(1000);
        }
        pid_t pids[2] = {group_rank_pid(g, 0), group_rank_pid(g, 1)};
        int32_t prompt[2] = {FAKE_HANG, 1};
        struct engine_request r = {.id = 1, .prompt = prompt, .prompt_tokens = 2, .max_tokens = 1};
        if (group_submit(g, &r, NULL) != RC_OK) _exit(1);
        sleep_us(300000);
        if (!fd_write_all(ends[1], pids, sizeof pids)) _exit(1);
        for (;;) pause();
    }
    pid_t pids[2] = {0, 0};
    assert_int_equal(read(ends[0], pids, sizeof pids), sizeof pids);
    kill(runner, SIGKILL);
    waitpid(runner, NULL, 0);
    int64_t until = clock_now_us() + 5000000;
    for (int r = 0; r < 2; r++) {
        char path[64], stat[512] = "";
        snprintf(path, sizeof path, "/proc/%d/stat", (int)pids[r]);
        /* Gone, or a zombie where nobody reaps orphans. */
        for (bool dead = false; !dead;) {
            int fd = open(path, O_RDONLY | O_CLOEXEC);
            ssize_t n = fd >= 0 ? read(fd, stat, sizeof stat - 1) : 0;
            stat[n > 0 ? n : 0] = '\0';
            if (fd >= 0) close(fd);
            dead = n <= 0 || strstr(stat, ") Z");
            assert_true(dead || clock_now_us() < until);
            sleep_us(1000);
        }
    }
    close(ends[0]);
    close(ends[1]);
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "rank")) return rank_main(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(args_round_trip),
        cmocka_unit_test(answers_in_order),
        cmocka_unit_test(ranks_inherit_nothing_else),
        cmocka_unit_test(every_fault_on_every_rank),
        cmocka_unit_test(watchdog),
        cmocka_unit_test(watchdog_while_loading),
        cmocka_unit_test(gives_up_without_progress),
        cmocka_unit_test(progress_resets_the_count),
        cmocka_unit_test(another_identity_is_final),
        cmocka_unit_test(impossible_setting_is_final),
        cmocka_unit_test(a_full_disk_is_final),
        cmocka_unit_test(a_request_fails_alone),
        cmocka_unit_test(cancelling),
        cmocka_unit_test(large_requests),
        cmocka_unit_test(closing_kills_what_does_not_leave),
        cmocka_unit_test(no_orphans),
    };
    return cmocka_run_group_tests_name("supervise", tests, NULL, NULL);
}
