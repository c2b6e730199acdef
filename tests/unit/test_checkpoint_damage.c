/* checkpoint_store against what happens to files and processes: every bit and every length of every file, foreign and replaced files,
 * processes that die at every call and at random moments. The bytes that were saved or none, never a crash. */
#define _GNU_SOURCE
#include "checkpoint_fixture.h"

#include <sys/mman.h>
#include <sys/wait.h>

enum { ALL_CALLS = 1 << 20 };

/* ---- damage ---- */

/* Loads both points after something happened to byte `at` of a file: a miss where it belongs to the point, else the right bytes.
 * Sometimes goes on from there. */
static void look_at_damage(const struct place *p, int file, size_t at, bool go_on)
{
    struct checkpoint_store *s = open_usual(p);
    struct checkpoint *c = of_key(s, 1);
    const bool older = load_right(c, 1, OLDER), newer = load_right(c, 1, NEWER);
    const bool older_hit = file == 0 || (file == 2 && at < (size_t)NEWER_PAGE * PAGE_BYTES), newer_hit = file != 0;
    if (older == older_hit || newer == newer_hit) fail_msg("%s damaged at %zu: points %d %d", suffixes[file], at, older, newer);
    if (go_on) {
        const int best = load_best(c, 1);
        assert_int_equal(wrong_bytes, 0);
        assert_int_equal(checkpoint_resume(c, best, NULL), RC_OK);
        save(s, c, 1, 400);
        assert_true(load_right(c, 1, 400));
    }
    checkpoint_close(c);
    checkpoint_store_close(s);
}

static void test_every_bit(void **ctx)
{
    const struct place *p = *ctx;
    saved_only(p);
    for (int file = 0; file < 3; file++) {
        struct buf whole = {0};
        char path[256];
        path_of(p, 1, 1, suffixes[file], path);
        read_file(path, &whole);
        assert_true(whole.len > 200);
        for (size_t bit = 0; bit < 8 * whole.len; bit++) {
            const bool go_on = bit % 211 == 0;
            whole.data[bit / 8] ^= (char)(1 << bit % 8);
            write_file(path, whole.data, whole.len);
            look_at_damage(p, file, bit / 8, go_on);
            whole.data[bit / 8] ^= (char)(1 << bit % 8);
            if (go_on) saved_only(p);
        }
        write_file(path, whole.data, whole.len);
        buf_free(&whole);
    }
}

static void test_every_length(void **ctx)
{
    const struct place *p = *ctx;
    saved_only(p);
    for (int file = 0; file < 3; file++) {
        struct buf whole = {0};
        char path[256];
        path_of(p, 1, 1, suffixes[file], path);
        read_file(path, &whole);
        for (size_t n = 0; n < whole.len; n++) {
            const bool go_on = n % 53 == 0;
            write_file(path, whole.data, n);
            look_at_damage(p, file, n, go_on);
            if (go_on) saved_only(p);
        }
        write_file(path, whole.data, whole.len);
        if (file != 2) { /* pages may have been added after the last point */
            assert_int_equal(truncate(path, (off_t)whole.len + 1), 0);
            look_at_damage(p, file, whole.len, false);
            write_file(path, whole.data, whole.len);
        }
        buf_free(&whole);
    }
}

static void look_for_nothing(const struct checkpoint_store_options *o, int key)
{
    struct checkpoint_store *s = open_good(o);
    struct checkpoint *c = of_key(s, key);
    assert_positions(c, 0, 0);
    assert_false(load_right(c, 1, OLDER));
    assert_false(load_right(c, 1, NEWER));
    checkpoint_close(c);
    checkpoint_store_close(s);
}

static void rename_all(const struct place *p, int key, int rank, int to_key, int to_rank)
{
    for (int file = 0; file < 3; file++) {
        char from[256], to[256];
        path_of(p, key, rank, suffixes[file], from);
        path_of(p, to_key, to_rank, suffixes[file], to);
        assert_int_equal(rename(from, to), 0);
    }
}

/* Whole files of another key, rank, model or size, and pages of another request. */
static void test_foreign(void **ctx)
{
    const struct place *p = *ctx;
    struct checkpoint_store_options o = options_of(p);
    saved_only(p);
    rename_all(p, 1, 1, 2, 1);
    look_for_nothing(&o, 2);
    rename_all(p, 2, 1, 1, 0);
    o.rank = 0;
    look_for_nothing(&o, 1);
    rename_all(p, 1, 0, 1, 1);
    o = options_of(p);
    o.fingerprint.bytes[15] ^= 1;
    look_for_nothing(&o, 1);
    o = options_of(p);
    o.page_bytes *= 2;
    look_for_nothing(&o, 1);
    o.page_bytes = 0;
    look_for_nothing(&o, 1);

    struct checkpoint_store *s = open_usual(p);
    struct checkpoint *c = of_key(s, 2);
    char from[256], to[256];
    save(s, c, 2, NEWER);
    checkpoint_close(c);
    checkpoint_store_close(s);
    path_of(p, 2, 1, "pages", from);
    path_of(p, 1, 1, "pages", to);
    assert_int_equal(rename(from, to), 0);
    s = open_usual(p);
    c = of_key(s, 1);
    assert_positions(c, OLDER, NEWER);
    assert_false(load_right(c, 1, NEWER));
    assert_false(load_right(c, 1, OLDER));
    checkpoint_close(c);
    checkpoint_store_close(s);
}

/* A link, a pipe or a folder where a file should be, on whichever file: read as nothing, and named when it has to be written. What a
 * link points to is not touched. */
static void test_replaced(void **ctx)
{
    const struct place *p = *ctx;
    char outside[128];
    snprintf(outside, sizeof outside, "%s/outside", p->base);
    for (int kind = 0; kind < 3; kind++)
        for (int file = 0; file < 3; file++) {
            char path[256];
            struct buf bytes = {0};
            struct err e = {0};
            saved_only(p);
            path_of(p, 1, 1, suffixes[file], path);
            unlink(outside);
            assert_int_equal(rename(path, outside), 0); /* whole, as a link's target */
            if (kind == 0) assert_int_equal(symlink(outside, path), 0);
            if (kind == 1) assert_int_equal(mkfifo(path, 0600), 0);
            if (kind == 2) assert_int_equal(mkdir(path, 0700), 0);
            struct checkpoint_store *s = open_usual(p);
            struct checkpoint *c = of_key(s, 1);
            assert_int_equal(load_right(c, 1, OLDER), file == 1);
            assert_int_equal(load_right(c, 1, NEWER), file == 0);
            assert_int_equal(checkpoint_resume(c, 0, NULL), RC_OK);
            assert_int_equal(save_err(s, c, 1, 400, &e), RC_FAILED);
            assert_int_equal(e.exit_status, EXIT_IO);
            assert_string_equal(e.code, "checkpoint_io");
            assert_non_null(strstr(e.text, path));
            checkpoint_close(c);
            checkpoint_store_close(s);
            read_file(outside, &bytes);
            assert_true(bytes.len > 100);
            buf_free(&bytes);
            if (kind == 2) assert_int_equal(rmdir(path), 0);
        }
}

/* ---- deaths ---- */

struct child {
    pid_t pid;
    atomic_int *durable;
};

static struct child child_start(const struct place *p, int calls, atomic_int *durable)
{
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (calls < ALL_CALLS) disk_is(DIES, calls, 0);
        enum rc rc = RC_OK;
        do rc = work(p, durable, NULL);
        while (calls == ALL_CALLS && rc == RC_OK);
        _exit(rc != RC_OK);
    }
    return (struct child){pid, durable};
}

static atomic_int *shared_int(void)
{
    void *at = mmap(NULL, sizeof(atomic_int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(at != MAP_FAILED);
    return at;
}

/* A process dies at its n-th call, with half of a write done, for every n: what it knew to be durable is there. */
static void test_dies_at_every_call(void **ctx)
{
    const struct place *p = *ctx;
    atomic_int *durable = shared_int();
    int n = 0, status = 1;
    for (; status; n++) {
        if (n % 3 == 0) saved_only(p), *durable = NEWER; /* else on top of what the one before left */
        const struct child c = child_start(p, n, durable);
        assert_int_equal(waitpid(c.pid, &status, 0), c.pid);
        assert_true(WIFSIGNALED(status) || status == 0);
        assert_whole(p, *durable, n);
    }
    assert_true(n > 30);
    munmap(durable, sizeof *durable);
}

static void test_killed(void **ctx)
{
    const struct place *p = *ctx;
    atomic_int *durable = shared_int();
    unsigned random = 12345;
    for (int i = 0; i < 50; i++) {
        const struct child c = child_start(p, ALL_CALLS, durable);
        int status;
        random = random * 1103515245 + 12345;
        usleep(500 + random / 65536 % 12000);
        kill(c.pid, SIGKILL);
        assert_int_equal(waitpid(c.pid, &status, 0), c.pid);
        assert_true(WIFSIGNALED(status));
        assert_whole(p, *durable, i);
    }
    assert_true(*durable > 5000);
    munmap(durable, sizeof *durable);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_every_bit, setup, teardown),
        cmocka_unit_test_setup_teardown(test_every_length, setup, teardown),
        cmocka_unit_test_setup_teardown(test_foreign, setup, teardown),
        cmocka_unit_test_setup_teardown(test_replaced, setup, teardown),
        cmocka_unit_test_setup_teardown(test_dies_at_every_call, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
