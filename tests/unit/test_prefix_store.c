/* prefix_store: what is put comes back, positions, room, marks, the future, care, and failures of a disk. Damage, death and
 * company are test_prefix_damage's. */
#define _GNU_SOURCE
#include "prefix_fixture.h"

#include <sys/statvfs.h>

/* A disk that fails: 0 never, n: the n-th write from now and all after it. The linker puts these before the real ones. */
static int writes_left, write_errno;
static uint64_t pretended_free; /* 0: the truth */
static bool sync_fails;

bool __real_fd_write_all(int fd, const void *bytes, size_t n_bytes);
bool __wrap_fd_write_all(int fd, const void *bytes, size_t n_bytes);
int __real_fstatvfs(int fd, struct statvfs *out);
int __wrap_fstatvfs(int fd, struct statvfs *out);

int __real_fsync(int fd);
int __wrap_fsync(int fd);

int __wrap_fsync(int fd)
{
    if (!sync_fails) return __real_fsync(fd);
    errno = EIO;
    return -1;
}

bool __wrap_fd_write_all(int fd, const void *bytes, size_t n_bytes)
{
    if (writes_left && --writes_left == 0) {
        writes_left = 1;
        errno = write_errno;
        return false;
    }
    return __real_fd_write_all(fd, bytes, n_bytes);
}

int __wrap_fstatvfs(int fd, struct statvfs *out)
{
    int failed = __real_fstatvfs(fd, out);
    if (!failed && pretended_free) out->f_frsize = 1, out->f_bavail = pretended_free;
    return failed;
}

static void test_round_trip(void **ctx)
{
    struct place *p = *ctx;
    struct prefix_store *s = open_good(p, NULL);
    struct prompt_ids a = ids_make(1, 10 * 64 + 5);
    uint64_t servable[PREFIX_WORDS(5000)];
    assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), 0);
    assert_int_equal(prefix_greatest(servable, a.n), 0);
    assert_false(load_right(s, &a, 0, 64));
    assert_int_equal(put(s, &a, 10 * 64), RC_OK);
    assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), 640);
    assert_int_equal(prefix_greatest(servable, a.n), 640);
    assert_true(load_right(s, &a, 0, 640));
    assert_true(load_right(s, &a, 320, 640));
    /* Without a state there is nothing to serve, however many blocks are there. */
    assert_false(load_right(s, &a, 0, 576));
    /* A shorter prompt finds none, a prompt that ends at the position neither: its last token is to be computed. */
    assert_int_equal(prefix_store_lookup(s, a.ids, 640, servable), 576);
    assert_int_equal(prefix_greatest(servable, 640), 0);
    assert_int_equal(prefix_store_lookup(s, a.ids, 0, servable), 0);
    assert_int_equal(prefix_store_lookup(s, a.ids, 1, servable), 0);
    prefix_store_close(s);

    s = open_good(p, NULL);
    assert_int_equal(put(s, &a, 5 * 64), RC_OK);
    assert_int_equal(asked_blocks, 0); /* all there */
    assert_int_equal(asked_states, 1);
    assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), 640);
    assert_int_equal(servable[0], UINT64_C(1) << 9 | 1 << 4);
    assert_true(load_right(s, &a, 0, 320));
    assert_true(load_right(s, &a, 0, 640));
    prefix_store_close(s);
    assert_int_equal(files_in(p), 3); /* ten blocks in one, two states */
}

static void test_long_prompt(void **ctx)
{
    struct place *p = *ctx;
    struct prefix_store *s = open_good(p, NULL);
    enum { BLOCKS = 150 };
    struct prompt_ids a = ids_make(1, BLOCKS * 64 + 1);
    uint64_t servable[PREFIX_WORDS(BLOCKS * 64 + 1)], other[PREFIX_WORDS(BLOCKS * 64 + 1)];
    assert_int_equal(put(s, &a, BLOCKS * 64), RC_OK);
    assert_int_equal(put(s, &a, 70 * 64), RC_OK);
    assert_int_equal(files_in(p), 5 + 2);
    assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), BLOCKS * 64);
    assert_int_equal(prefix_greatest(servable, a.n), BLOCKS * 64);
    /* Agreeing with a rank that has less. */
    memset(other, 0xff, sizeof other);
    other[2] = 0;
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) other[i] &= servable[i];
    assert_int_equal(prefix_greatest(other, a.n), 70 * 64);
    other[69 / 64] &= ~(UINT64_C(1) << 69 % 64);
    assert_int_equal(prefix_greatest(other, a.n), 0);
    assert_true(load_right(s, &a, 0, BLOCKS * 64));
    assert_true(load_right(s, &a, 33 * 64, 70 * 64));
    prefix_store_close(s);
}

static void test_shared_beginnings(void **ctx)
{
    struct place *p = *ctx;
    struct prefix_store *s = open_good(p, NULL);
    struct prompt_ids a = ids_make(1, 20 * 64 + 1), b = ids_branch(&a, 7 * 64 + 3, 2), c = ids_branch(&a, 12 * 64, 3);
    uint64_t servable[PREFIX_WORDS(5000)];
    assert_int_equal(put(s, &a, 20 * 64), RC_OK);
    assert_int_equal(prefix_store_lookup(s, b.ids, b.n, servable), 7 * 64);
    assert_int_equal(put(s, &b, 20 * 64), RC_OK);
    assert_int_equal(asked_blocks, 13);
    assert_int_equal(put(s, &c, 20 * 64), RC_OK);
    assert_int_equal(asked_blocks, 8);
    assert_true(load_right(s, &a, 0, 20 * 64));
    assert_true(load_right(s, &b, 0, 20 * 64));
    assert_true(load_right(s, &c, 0, 20 * 64));
    assert_true(load_right(s, &c, 15 * 64, 20 * 64));
    prefix_store_close(s);
}

/* A rank without KV heads, a model without states, and a rank with neither. */
static void test_parts(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, 5 * 64 + 1);
    uint64_t servable[PREFIX_WORDS(5000)];
    struct prefix_store_options o = options_of(p);
    o.block_bytes = 0;
    struct prefix_store *s = open_good(p, &o);
    assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), 320);
    assert_int_equal(prefix_greatest(servable, a.n), 0);
    assert_int_equal(put(s, &a, 320), RC_OK);
    assert_int_equal(asked_blocks, 0);
    assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), 320);
    assert_int_equal(servable[0], 1 << 4);
    assert_true(load_right(s, &a, 0, 320));
    prefix_store_close(s);

    o = options_of(p);
    o.state_bytes = 0;
    o.fingerprint.bytes[3] = 77;
    s = open_good(p, &o);
    assert_int_equal(put(s, &a, 256), RC_OK);
    assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), 256);
    assert_int_equal(servable[0], 0xf);
    assert_true(load_right(s, &a, 0, 192));
    prefix_store_close(s);

    o.block_bytes = 0;
    s = open_good(p, &o);
    assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), 320);
    assert_int_equal(servable[0], 0x1f);
    assert_true(load_right(s, &a, 0, 320));
    assert_int_equal(put(s, &a, 256), RC_OK);
    prefix_store_close(s);
}

static void test_chain(void **ctx)
{
    (void)ctx;
    struct prompt_ids a = ids_make(1, 10 * 64), b = ids_branch(&a, 5 * 64 + 63, 9);
    struct prefix_key seed = {{1}}, other = {{2}}, x[10], y[10];
    prefix_chain(&seed, a.ids, 10 * 64, x);
    prefix_chain(&seed, b.ids, 10 * 64, y);
    assert_memory_equal(x, y, 5 * sizeof *x);
    for (int i = 5; i < 10; i++) assert_memory_not_equal(&x[i], &y[i], sizeof *x);
    prefix_chain(&other, a.ids, 10 * 64, y);
    for (int i = 0; i < 10; i++) assert_memory_not_equal(&x[i], &y[i], sizeof *x);
    /* Names on disk: they must not change while the format's version stays. */
    static const unsigned char known[16] = {0xf6, 0xa8, 0x61, 0xc8, 0xcf, 0xcc, 0x4d, 0xa0,
                                            0x98, 0xf5, 0xb0, 0x7f, 0x66, 0x1c, 0x0c, 0x52};
    assert_memory_equal(x[9].bytes, known, sizeof known);
}

static void test_foreign_fingerprint(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, 5 * 64 + 1);
    uint64_t servable[PREFIX_WORDS(5000)];
    struct prefix_store *s = open_good(p, NULL);
    assert_int_equal(put(s, &a, 320), RC_OK);
    prefix_store_close(s);
    struct prefix_store_options o = options_of(p);
    o.fingerprint.bytes[15] ^= 1;
    s = open_good(p, &o);
    assert_int_equal(prefix_store_lookup(s, a.ids, a.n, servable), 0);
    assert_false(load_right(s, &a, 0, 320));
    assert_int_equal(put(s, &a, 320), RC_OK);
    assert_true(load_right(s, &a, 0, 320));
    prefix_store_close(s);
    /* Both live side by side. */
    s = open_good(p, NULL);
    assert_true(load_right(s, &a, 0, 320));
    prefix_store_close(s);
    /* The same fingerprint and other sizes contradict each other: a miss. */
    o = options_of(p);
    o.block_bytes++;
    s = open_good(p, &o);
    assert_false(load_right(s, &a, 0, 320));
    prefix_store_close(s);
}

static void test_impossible_positions(void **ctx)
{
    struct place *p = *ctx;
    struct prefix_store *s = open_good(p, NULL);
    struct prompt_ids a = ids_make(1, 640);
    static const int wrong[] = {0, -64, 1, 63, 65, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct err e = {0};
        const struct prefix_source source = {NULL, source_block, source_state};
        const struct prefix_sink sink = {NULL, sink_block, sink_state};
        assert_int_equal(prefix_store_put(s, a.ids, wrong[i], &source, &e), RC_BAD_INPUT);
        assert_int_equal(prefix_store_mark(s, a.ids, wrong[i], 1, NULL), RC_BAD_INPUT);
        assert_false(prefix_store_load(s, a.ids, 0, wrong[i], &sink));
        assert_false(prefix_store_load(s, a.ids, wrong[i] ? wrong[i] : 64, 64, &sink));
    }
    prefix_store_close(s);
}

/* ---- room ---- */

static uint64_t put_bytes(struct prefix_store *s)
{
    struct prefix_stat stat;
    assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
    return stat.bytes;
}

static bool served(struct prefix_store *s, const struct prompt_ids *a, int position)
{
    uint64_t servable[PREFIX_WORDS(20000)];
    prefix_store_lookup(s, a->ids, a->n, servable);
    int b = position / 64 - 1;
    return servable[b / 64] >> b % 64 & 1;
}

/* Stores of at most n prompts of four blocks; prompts[i] is ids_make(i). */
enum { PROMPTS = 8 };
static struct prefix_store *store_for(struct place *p, int n, struct prompt_ids *prompts)
{
    struct prefix_store *s = open_good(p, NULL);
    for (int i = 0; i < PROMPTS; i++) prompts[i] = ids_make(100 + i, 4 * 64 + 1);
    assert_int_equal(put(s, &prompts[0], 256), RC_OK);
    uint64_t one = put_bytes(s);
    struct prefix_count gone;
    assert_int_equal(prefix_store_prune(s, 0, 0, &gone, NULL), RC_OK);
    prefix_store_close(s);
    struct prefix_store_options o = options_of(p);
    o.quota_bytes = one * (uint64_t)n;
    return open_good(p, &o);
}

static void test_quota_least_recently_used(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a[PROMPTS];
    struct prefix_store *s = store_for(p, 3, a);
    for (int i = 0; i < 3; i++) assert_int_equal(put(s, &a[i], 256), RC_OK);
    for (int i = 0; i < 3; i++) assert_true(served(s, &a[i], 256));
    assert_true(load_right(s, &a[0], 0, 256)); /* now 1 is the oldest */
    assert_int_equal(put(s, &a[3], 256), RC_OK);
    assert_false(served(s, &a[1], 256));
    assert_true(served(s, &a[0], 256));
    assert_true(served(s, &a[2], 256));
    assert_true(served(s, &a[3], 256));
    /* A put of what is there is a use. */
    assert_int_equal(put(s, &a[2], 256), RC_OK);
    assert_int_equal(put(s, &a[4], 256), RC_OK);
    assert_false(served(s, &a[0], 256));
    assert_true(served(s, &a[2], 256));
    assert_int_equal(files_in(p), 6);
    prefix_store_close(s);
    assert_int_equal(files_in(p), 6);
}

/* The end goes before the beginning; a prompt larger than the quota keeps its beginning. */
static void test_quota_end_first(void **ctx)
{
    struct place *p = *ctx;
    struct prefix_store_options o = options_of(p);
    struct prefix_store *s = open_good(p, NULL);
    struct prompt_ids a = ids_make(1, 96 * 64 + 1), b = ids_make(2, 64 + 1);
    assert_int_equal(put(s, &a, 96 * 64), RC_OK);
    uint64_t all = put_bytes(s);
    prefix_store_close(s);
    o.quota_bytes = all;
    s = open_good(p, &o);
    assert_int_equal(put(s, &b, 64), RC_OK);
    assert_true(served(s, &b, 64));
    uint64_t servable[PREFIX_WORDS(96 * 64 + 1)];
    /* a lost its state, which its end could not be served without, then its end; never its beginning. */
    int left = prefix_store_lookup(s, a.ids, a.n, servable);
    assert_true(left >= 64 * 64);
    assert_false(served(s, &a, 96 * 64));
    prefix_store_close(s);

    o.quota_bytes = all / 2;
    s = open_good(p, &o);
    struct err e = {0};
    struct prompt_ids c = ids_make(3, 96 * 64 + 1);
    assert_int_equal(put_err(s, &c, 96 * 64, &e), RC_RETRY);
    assert_string_equal(e.code, "store_full");
    assert_int_equal(prefix_store_lookup(s, c.ids, c.n, servable), 32 * 64);
    assert_true(put_bytes(s) <= o.quota_bytes);
    /* Nothing that is too large evicts anything. */
    prefix_store_close(s);
    o.quota_bytes = 10;
    s = open_good(p, &o);
    struct prompt_ids d = ids_make(4, 64 + 1);
    assert_int_equal(put(s, &d, 64), RC_RETRY);
    assert_int_equal(prefix_store_lookup(s, c.ids, c.n, servable), 32 * 64);
    prefix_store_close(s);
}

static void mark(struct prefix_store *s, const struct prompt_ids *a, int position, int64_t next_use)
{
    assert_int_equal(prefix_store_mark(s, a->ids, position, next_use, NULL), RC_OK);
}

static void test_next_use(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a[PROMPTS];
    struct prefix_store *s = store_for(p, 3, a);
    for (int i = 0; i < 3; i++) assert_int_equal(put(s, &a[i], 256), RC_OK);
    /* The oldest is used soonest, the youngest not at all. */
    mark(s, &a[0], 256, 1);
    mark(s, &a[1], 256, 9);
    assert_int_equal(put(s, &a[3], 256), RC_OK);
    assert_false(served(s, &a[2], 256));
    /* Among marked ones the latest use goes, but not for what nobody needs. */
    mark(s, &a[3], 256, 5);
    struct err e = {0};
    assert_int_equal(put_err(s, &a[4], 256, &e), RC_RETRY);
    assert_true(served(s, &a[0], 256) && served(s, &a[1], 256) && served(s, &a[3], 256));
    mark(s, &a[4], 256, 20); /* later than all */
    assert_int_equal(put(s, &a[4], 256), RC_RETRY);
    mark(s, &a[4], 256, 7);
    assert_int_equal(put(s, &a[4], 256), RC_OK);
    assert_false(served(s, &a[1], 256));
    assert_true(served(s, &a[0], 256) && served(s, &a[3], 256) && served(s, &a[4], 256));
    /* Replaced and forgotten. */
    mark(s, &a[0], 256, PREFIX_NEVER);
    assert_int_equal(put(s, &a[5], 256), RC_OK);
    assert_false(served(s, &a[0], 256));
    assert_true(served(s, &a[5], 256));
    /* Marks are of this opening. */
    prefix_store_close(s);
    s = store_for(p, 3, a);
    assert_int_equal(put(s, &a[6], 256), RC_OK);
    prefix_store_close(s);
}

/* A mark holds what leads to it as well, and what of it is not there yet. */
static void test_next_use_of_beginnings(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a[PROMPTS], long_one = ids_make(100, 40 * 64 + 1);
    struct prefix_store *s = store_for(p, 2, a);
    assert_int_equal(put(s, &a[0], 256), RC_OK);
    mark(s, &long_one, 40 * 64, 1); /* begins with a[0]'s tokens, block 4 to 39 are missing */
    assert_int_equal(put(s, &a[1], 256), RC_OK);
    assert_int_equal(put(s, &a[2], 256), RC_OK);
    assert_int_equal(put(s, &a[3], 256), RC_OK);
    uint64_t servable[PREFIX_WORDS(40 * 64 + 1)];
    assert_int_equal(prefix_store_lookup(s, long_one.ids, long_one.n, servable), 256);
    assert_int_equal(prefix_greatest(servable, long_one.n), 256); /* with the state */
    prefix_store_close(s);
}

static void test_free_floor(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, 4 * 64 + 1), b = ids_make(2, 4 * 64 + 1), c = ids_make(3, 4 * 64 + 1);
    struct prefix_store_options o = options_of(p);
    o.free_floor_bytes = 100000;
    o.state_bytes = 0;
    struct prefix_store *s = open_good(p, &o);
    pretended_free = 1000000;
    assert_int_equal(put(s, &a, 256), RC_OK);
    uint64_t one = put_bytes(s);
    assert_int_equal(put(s, &b, 256), RC_OK);
    pretended_free = o.free_floor_bytes + one;
    assert_int_equal(put(s, &c, 256), RC_OK);
    assert_int_equal(put_bytes(s), 3 * one);
    /* Short of room for one file: one has to go. */
    struct prefix_count gone;
    assert_int_equal(prefix_store_prune(s, 2 * one, 0, &gone, NULL), RC_OK);
    assert_false(served(s, &a, 256));
    pretended_free = o.free_floor_bytes + one - 1;
    assert_int_equal(put(s, &a, 256), RC_OK);
    assert_false(served(s, &b, 256));
    assert_true(served(s, &c, 256));
    assert_int_equal(put_bytes(s), 2 * one);
    /* Nothing to go. */
    assert_int_equal(prefix_store_prune(s, 0, 0, &gone, NULL), RC_OK);
    struct err e = {0};
    assert_int_equal(put_err(s, &a, 256, &e), RC_RETRY);
    assert_string_equal(e.code, "store_full");
    pretended_free = 0;
    assert_int_equal(files_in(p), 0);
    prefix_store_close(s);
}

static void test_disk_full(void **ctx)
{
    struct place *p = *ctx;
    struct prompt_ids a = ids_make(1, 4 * 64 + 1), b = ids_make(2, 4 * 64 + 1);
    struct prefix_store *s = open_good(p, NULL);
    assert_int_equal(put(s, &a, 256), RC_OK);
    static const int codes[] = {ENOSPC, EDQUOT, EIO, EFBIG};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        for (int n = 1; n <= 7; n++) {
            struct err e = {0};
            write_errno = codes[i];
            writes_left = n;
            assert_int_equal(put_err(s, &b, 256, &e), RC_FAILED);
            writes_left = 0;
            assert_int_equal(e.exit_status, EXIT_IO);
            assert_string_equal(e.code, i < 2 ? "store_disk_full" : "store_io");
            assert_int_equal(files_in(p), 2);
            assert_int_equal(unfinished_in(p), 0);
            assert_true(load_right(s, &a, 0, 256));
            assert_false(served(s, &b, 256));
        }
    sync_fails = true;
    assert_int_equal(put(s, &b, 256), RC_FAILED);
    sync_fails = false;
    assert_int_equal(files_in(p), 2);
    assert_int_equal(unfinished_in(p), 0);
    /* The blocks may be in when the state fails: seven writes of the first file. */
    write_errno = ENOSPC;
    writes_left = 8;
    assert_int_equal(put(s, &b, 256), RC_FAILED);
    writes_left = 0;
    uint64_t servable[PREFIX_WORDS(5000)];
    assert_int_equal(prefix_store_lookup(s, b.ids, b.n, servable), 256);
    assert_int_equal(put(s, &b, 256), RC_OK);
    assert_int_equal(asked_blocks, 0);
    assert_true(load_right(s, &b, 0, 256));
    prefix_store_close(s);
}

/* ---- care ---- */

static void test_stat_verify_prune(void **ctx)
{
    struct place *p = *ctx;
    struct prefix_store *s = open_good(p, NULL);
    struct prefix_stat stat;
    assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
    assert_int_equal(stat.files + stat.bytes + stat.oldest_use_us, 0);
    struct prompt_ids a = ids_make(1, 4 * 64 + 1), b = ids_make(2, 40 * 64 + 1);
    assert_int_equal(put(s, &a, 256), RC_OK);
    assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
    uint64_t first_use = stat.newest_use_us, first_bytes = stat.bytes;
    assert_int_equal(put(s, &b, 40 * 64), RC_OK);
    prefix_store_close(s);

    /* Care needs no fingerprint and no sizes. */
    const struct prefix_store_options o = {.folder = p->folder, .must_exist = true};
    s = open_good(p, &o);
    assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
    assert_int_equal(stat.files, 2 + 3);
    assert_int_equal(stat.blocks, 44);
    assert_int_equal(stat.states, 2);
    assert_int_equal(stat.bytes, bytes_in(p));
    assert_true(stat.oldest_use_us <= first_use && stat.newest_use_us > first_use);
    struct prefix_count read, deleted;
    assert_int_equal(prefix_store_verify(s, &read, &deleted, NULL), RC_OK);
    assert_int_equal(read.files, 5);
    assert_int_equal(read.bytes, stat.bytes);
    assert_int_equal(deleted.files, 0);
    assert_int_equal(prefix_store_prune(s, UINT64_MAX, 0, &deleted, NULL), RC_OK);
    assert_int_equal(deleted.files, 0);
    assert_int_equal(prefix_store_prune(s, UINT64_MAX, first_use + 1, &deleted, NULL), RC_OK);
    assert_int_equal(deleted.files, 2);
    assert_int_equal(deleted.bytes, first_bytes);
    assert_int_equal(prefix_store_prune(s, stat.bytes - first_bytes - 1, 0, &deleted, NULL), RC_OK);
    assert_int_equal(deleted.files, 1);
    assert_int_equal(prefix_store_prune(s, 0, 0, &deleted, NULL), RC_OK);
    assert_int_equal(deleted.files, 2);
    assert_int_equal(files_in(p), 0);
    assert_int_equal(prefix_store_stat(s, &stat, NULL), RC_OK);
    assert_int_equal(stat.files + stat.bytes, 0);
    prefix_store_close(s);
}

/* ---- opening ---- */

static struct err open_bad(const struct prefix_store_options *o, enum rc rc)
{
    struct err e = {0};
    struct prefix_store *s = NULL;
    assert_int_equal(prefix_store_open(o, &s, &e), rc);
    assert_null(s);
    return e;
}

static void test_opening(void **ctx)
{
    struct place *p = *ctx;
    struct prefix_store_options o = options_of(p), missing = o;
    missing.must_exist = true;
    struct err e = open_bad(&missing, RC_BAD_INPUT);
    assert_string_equal(e.code, "no_store");
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    assert_int_equal(access(p->folder, F_OK), -1);
    missing = o;
    missing.folder = "/nonexistent/folder/cache";
    assert_int_equal(open_bad(&missing, RC_FAILED).exit_status, EXIT_NO_OUTPUT);

    struct prefix_store *s = open_good(p, NULL), *other_rank;
    struct stat st;
    assert_int_equal(stat(p->folder, &st), 0);
    assert_int_equal(st.st_mode & 077, 0);
    assert_string_equal(open_bad(&o, RC_FAILED).code, "store_open");
    o.rank = 1;
    other_rank = open_good(p, &o);
    prefix_store_close(other_rank);
    prefix_store_close(s);
    prefix_store_close(NULL);
    s = open_good(p, NULL);
    prefix_store_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, setup, teardown),
        cmocka_unit_test_setup_teardown(test_long_prompt, setup, teardown),
        cmocka_unit_test_setup_teardown(test_shared_beginnings, setup, teardown),
        cmocka_unit_test_setup_teardown(test_parts, setup, teardown),
        cmocka_unit_test(test_chain),
        cmocka_unit_test_setup_teardown(test_foreign_fingerprint, setup, teardown),
        cmocka_unit_test_setup_teardown(test_impossible_positions, setup, teardown),
        cmocka_unit_test_setup_teardown(test_quota_least_recently_used, setup, teardown),
        cmocka_unit_test_setup_teardown(test_quota_end_first, setup, teardown),
        cmocka_unit_test_setup_teardown(test_next_use, setup, teardown),
        cmocka_unit_test_setup_teardown(test_next_use_of_beginnings, setup, teardown),
        cmocka_unit_test_setup_teardown(test_free_floor, setup, teardown),
        cmocka_unit_test_setup_teardown(test_disk_full, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stat_verify_prune, setup, teardown),
        cmocka_unit_test_setup_teardown(test_opening, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
