/* checkpoint_store: what was saved comes back. Points by turns, several requests in a batch, going on, a caller that goes on while a
 * batch is being written, disks that fail at every call, and care. Damage and death are test_checkpoint_damage's. */
#define _GNU_SOURCE
#include "checkpoint_fixture.h"

/* ---- going well ---- */

static void test_round_trip(void **ctx)
{
    const struct place *p = *ctx;
    static const int positions[] = {1, 63, 64, 65, 70 * 64 + 3};
    for (int pages = 1; pages >= 0; pages--)
        for (size_t i = 0; i < sizeof positions / sizeof *positions; i++) {
            struct checkpoint_store_options o = options_of(p);
            unsigned char key[CHECKPOINT_KEY_BYTES];
            page_bytes_now = o.page_bytes = pages ? PAGE_BYTES : 0;
            key_make(1, key);
            struct checkpoint_store *s = open_good(&o);
            struct checkpoint *c = of_key(s, 1);
            assert_positions(c, 0, 0);
            assert_false(load_right(c, 1, positions[i]));
            assert_int_equal(checkpoint_store_status(s, NULL), RC_OK);
            save(s, c, 1, positions[i]);
            assert_true(checkpoint_store_write_us(s) > 0);
            assert_true(load_right(c, 1, positions[i]));
            checkpoint_close(c);
            checkpoint_store_close(s);

            s = open_good(&o);
            c = of_key(s, 1);
            assert_positions(c, positions[i], 0);
            assert_true(load_right(c, 1, positions[i]));
            assert_false(load_right(c, 1, positions[i] + 1));
            assert_false(load_right(c, 1, 0));
            assert_false(load_right(c, 1, -1));
            struct buf rest = {0};
            const struct checkpoint_sink sink = {&(uint64_t){1}, sink_page};
            assert_false(checkpoint_load(c, positions[i], &sink, rest_bytes_of(positions[i]) - 1, &rest));
            buf_free(&rest);
            checkpoint_close(c);
            checkpoint_store_close(s);
            checkpoint_remove(p->folder, key);
        }
    page_bytes_now = PAGE_BYTES;
}

/* Pages over several batches before there is a point; three requests in one batch; a batch far larger than those before. */
static void test_batches(void **ctx)
{
    const struct place *p = *ctx;
    struct checkpoint_store *s = open_usual(p);
    struct checkpoint *c[3];
    for (int i = 0; i < 3; i++) c[i] = of_key(s, i);
    for (int pages = 5; pages <= 20; pages += 5) {
        assert_int_equal(add_pages(c[0], 0, pages, NULL), RC_OK);
        assert_int_equal(checkpoint_pages(c[0]), pages);
        checkpoint_store_write(s);
        assert_int_equal(wait_for_disk(s, NULL), RC_OK);
        assert_positions(c[0], 0, 0);
    }
    for (int round = 1; round <= 3; round++) {
        for (int i = 0; i < 3; i++) assert_int_equal(add_point(c[i], (uint64_t)i, round * (2000 + 300 * i), NULL), RC_OK);
        if (round == 3) assert_int_equal(add_pages(c[2], 2, 20000, NULL), RC_OK);
        checkpoint_store_write(s);
        assert_int_equal(wait_for_disk(s, NULL), RC_OK);
    }
    for (int i = 0; i < 3; i++) checkpoint_close(c[i]);
    checkpoint_store_close(s);
    s = open_usual(p);
    for (int i = 0; i < 3; i++) {
        c[i] = of_key(s, i);
        assert_positions(c[i], 2 * (2000 + 300 * i), 3 * (2000 + 300 * i));
        assert_true(load_right(c[i], (uint64_t)i, 2 * (2000 + 300 * i)));
        assert_true(load_right(c[i], (uint64_t)i, 3 * (2000 + 300 * i)));
        checkpoint_close(c[i]);
    }
    checkpoint_store_close(s);
}

/* A caller goes on from a point; what was beyond it is written again, and the other point is forgotten also on the disk. */
static void test_resume(void **ctx)
{
    const struct place *p = *ctx;
    static const int from[] = {0, 200, 300};
    for (int i = 0; i < 3; i++) {
        saved_only(p);
        struct checkpoint_store *s = open_usual(p);
        struct checkpoint *c = of_key(s, 1);
        assert_positions(c, 200, 300);
        assert_true(load_right(c, 1, 300));
        if (from[i] == 200) assert_true(load_right(c, 1, 200));
        assert_int_equal(checkpoint_resume(c, from[i], NULL), RC_OK);
        assert_positions(c, from[i], 0);
        assert_int_equal(checkpoint_pages(c), from[i] / 64);
        struct checkpoint *other = of_key(s, 1);
        assert_positions(other, from[i], 0);
        checkpoint_close(other);
        if (from[i] < 250) save(s, c, 1, 250);
        save(s, c, 1, 400);
        checkpoint_close(c);
        checkpoint_store_close(s);
        s = open_usual(p);
        c = of_key(s, 1);
        assert_positions(c, from[i] < 250 ? 250 : 300, 400);
        assert_true(load_right(c, 1, 400));
        assert_true(load_right(c, 1, from[i] < 250 ? 250 : 300));
        checkpoint_close(c);
        checkpoint_store_close(s);
    }
}

/* Points by turns: of three, the last two are there. */
static void test_turns(void **ctx)
{
    const struct place *p = *ctx;
    struct checkpoint_store *s = open_usual(p);
    struct checkpoint *c = of_key(s, 1);
    for (int position = 100; position <= 1000; position += 100) {
        save(s, c, 1, position);
        assert_positions(c, position, position - 100);
        struct checkpoint *other = of_key(s, 1);
        assert_true(load_right(other, 1, position));
        if (position > 100) assert_true(load_right(other, 1, position - 100));
        checkpoint_close(other);
    }
    checkpoint_close(c);
    checkpoint_store_close(s);
}

/* Closed when its batch is full, handed over and half written: written all the same, while others are opened and read. */
static void test_goes_on_while_writing(void **ctx)
{
    const struct place *p = *ctx;
    struct checkpoint_store *s = open_usual(p);
    struct checkpoint *before = of_key(s, 7);
    save(s, before, 7, 500);
    checkpoint_close(before);
    for (int way = 0; way < 2; way++) {
        struct checkpoint *c[4];
        for (int i = 0; i < 4; i++) {
            c[i] = of_key(s, i);
            assert_int_equal(add_point(c[i], (uint64_t)i, 300 + 100 * way, NULL), RC_OK);
        }
        for (int i = 0; i < 4 && way == 0; i++) checkpoint_close(c[i]);
        assert_int_equal(checkpoint_store_status(s, NULL), RC_OK);
        disk_is(HELD, 1, 0);
        checkpoint_store_write(s);
        for (int i = 0; i < 4 && way == 1; i++) checkpoint_close(c[i]);
        for (int i = 0; i < 3; i++) {
            struct checkpoint *other = of_key(s, 7), *none = of_key(s, 9);
            assert_int_equal(checkpoint_store_status(s, NULL), RC_RETRY);
            assert_true(load_right(other, 7, 500));
            assert_positions(none, 0, 0);
            checkpoint_close(other);
            checkpoint_close(none);
        }
        atomic_store_explicit(&disk.calls_left, 0, memory_order_relaxed);
        if (way == 0) assert_int_equal(wait_for_disk(s, NULL), RC_OK);
    }
    checkpoint_store_close(s); /* while it writes */
    disk_is(NONE, 0, 0);
    s = open_usual(p);
    for (int i = 0; i < 4; i++) {
        struct checkpoint *c = of_key(s, i);
        assert_true(load_right(c, (uint64_t)i, 400));
        checkpoint_close(c);
    }
    checkpoint_store_close(s);
}

/* ---- disks ---- */

/* Every call that changes the disk fails once, for want of room and otherwise: 74, the path, and the points before are whole. */
static void test_every_call_fails(void **ctx)
{
    const struct place *p = *ctx;
    static const int errors[] = {ENOSPC, EDQUOT, EIO};
    int calls = 0;
    for (int kind = 0; kind < 3; kind++) {
        enum rc rc = RC_FAILED;
        for (int n = 0; rc != RC_OK; n++) {
            atomic_int durable = 0;
            struct err e = {0};
            if (n % 5 == 0) saved_only(p);
            disk_is(FAILS, n, errors[kind]);
            rc = work(p, &durable, &e);
            disk_is(NONE, 0, 0);
            assert_whole(p, durable, n);
            calls = n;
            if (rc == RC_OK) break;
            assert_int_equal(rc, RC_FAILED);
            assert_int_equal(e.exit_status, EXIT_IO);
            assert_non_null(strstr(e.text, p->folder));
            if (kind == 2) assert_string_equal(e.code, "checkpoint_io");
            else assert_string_equal(e.code, "checkpoint_disk_full");
        }
    }
    assert_true(calls > 30);
}

static void test_short_writes(void **ctx)
{
    const struct place *p = *ctx;
    for (enum mishap mishap = SHORT; mishap <= INTERRUPTED; mishap++) {
        disk_is(mishap, 0, 0);
        saved_only(p);
        disk_is(NONE, 0, 0);
        assert_whole(p, NEWER, 0);
    }
}

/* ---- care ---- */

static bool keep_first(void *ctx, const unsigned char key[CHECKPOINT_KEY_BYTES])
{
    unsigned char first[CHECKPOINT_KEY_BYTES];
    key_make(1, first);
    ++*(int *)ctx;
    return !memcmp(first, key, sizeof first);
}

static bool keep_none(void *ctx, const unsigned char key[CHECKPOINT_KEY_BYTES])
{
    (void)ctx, (void)key;
    return false;
}

static bool is_there(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static void save_both_ranks(const struct place *p, int key)
{
    for (int rank = 0; rank < 2; rank++) {
        struct checkpoint_store_options o = options_of(p);
        o.rank = rank;
        struct checkpoint_store *s = open_good(&o);
        struct checkpoint *c = of_key(s, key);
        save(s, c, (uint64_t)key, OLDER);
        save(s, c, (uint64_t)key, NEWER);
        checkpoint_close(c);
        checkpoint_store_close(s);
    }
}

/* How many of a key's six files are there. */
static int files_of(const struct place *p, int key)
{
    int n = 0;
    for (int i = 0; i < 6; i++) {
        char path[256];
        path_of(p, key, i / 3, suffixes[i % 3], path);
        n += is_there(path);
    }
    return n;
}

/* Names that are nearly a checkpoint's. */
static void foreign_names(const struct place *p, int n, char out[256])
{
    static const char *const of_key_3[] = {"c", "", "a.old", "pages.new", "A"};
    if (n < 5) {
        path_of(p, 3, 0, of_key_3[n], out);
    } else {
        path_of(p, 3, n == 5 ? 4 : n == 6 ? 10 : 0, "a", out);
        if (n == 7) out[strlen(p->folder) + 2] = 'F';
        if (n == 8) out[strlen(p->folder) + 64] = 'g';
        if (n == 9) snprintf(out, 256, "%s/notes.txt", p->folder);
    }
}
enum { FOREIGN_NAMES = 10 };

static void test_sweep_and_remove(void **ctx)
{
    const struct place *p = *ctx;
    unsigned char key[CHECKPOINT_KEY_BYTES];
    char path[256], outside[256];
    int asked = 0;
    checkpoint_sweep(p->folder, keep_none, NULL); /* there is no folder */
    key_make(2, key);
    checkpoint_remove(p->folder, key);
    assert_false(is_there(p->folder));

    for (int n = 1; n <= 3; n++) save_both_ranks(p, n);
    for (int n = 0; n < FOREIGN_NAMES; n++) {
        foreign_names(p, n, path);
        write_file(path, "abc", 3);
    }
    assert_int_equal(files_of(p, 2), 6);
    checkpoint_remove(p->folder, key);
    checkpoint_remove(p->folder, key);
    assert_int_equal(files_of(p, 2), 0);
    assert_int_equal(files_of(p, 1) + files_of(p, 3), 12);

    /* A link to a file, and a folder of a checkpoint's name. */
    snprintf(outside, sizeof outside, "%s/outside", p->base);
    write_file(outside, "abc", 3);
    path_of(p, 3, 2, "a", path);
    assert_int_equal(symlink(outside, path), 0);
    path_of(p, 3, 2, "b", path);
    assert_int_equal(mkdir(path, 0700), 0);
    checkpoint_sweep(p->folder, keep_first, &asked);
    assert_int_equal(asked, 14);
    assert_int_equal(files_of(p, 1), 6);
    assert_int_equal(files_of(p, 3), 0);
    assert_true(is_there(path));
    path_of(p, 3, 2, "a", path);
    assert_false(is_there(path));
    assert_true(is_there(outside));
    for (int n = 0; n < FOREIGN_NAMES; n++) {
        foreign_names(p, n, path);
        if (!is_there(path)) fail_msg("%s is gone", path);
    }

    checkpoint_sweep(p->folder, keep_none, NULL);
    assert_int_equal(files_of(p, 1), 0);
    assert_true(is_there(p->folder)); /* something of somebody else's is in it */
    for (int n = 0; n < FOREIGN_NAMES; n++) {
        foreign_names(p, n, path);
        unlink(path);
    }
    path_of(p, 3, 2, "b", path);
    rmdir(path);
    checkpoint_sweep(p->folder, keep_none, NULL);
    assert_false(is_there(p->folder));
}

static void test_no_folder(void **ctx)
{
    struct place *p = *ctx;
    struct checkpoint_store_options o = options_of(p);
    char below[128];
    snprintf(below, sizeof below, "%s/none/checkpoints", p->base);
    for (int way = 0; way < 2; way++) {
        struct checkpoint_store *s = NULL;
        struct err e = {0};
        if (way == 0) write_file(p->folder, "a file", 6);
        else o.folder = below;
        assert_int_equal(checkpoint_store_open(&o, &s, &e), RC_FAILED);
        assert_int_equal(e.exit_status, EXIT_IO);
        assert_non_null(strstr(e.text, o.folder));
        assert_null(s);
    }
    checkpoint_sweep(p->folder, keep_none, NULL);
    assert_true(is_there(p->folder));
    checkpoint_store_close(NULL);
    checkpoint_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, setup, teardown),
        cmocka_unit_test_setup_teardown(test_batches, setup, teardown),
        cmocka_unit_test_setup_teardown(test_resume, setup, teardown),
        cmocka_unit_test_setup_teardown(test_turns, setup, teardown),
        cmocka_unit_test_setup_teardown(test_goes_on_while_writing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_every_call_fails, setup, teardown),
        cmocka_unit_test_setup_teardown(test_short_writes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_sweep_and_remove, setup, teardown),
        cmocka_unit_test_setup_teardown(test_no_folder, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
