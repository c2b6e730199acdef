/* checkpoint_fixture: what the tests of checkpoint_store share: a folder of their own, a disk that fails and a process that dies at a
 * given call, and pages and points whose every byte follows from what they are of, so that a byte of anything else is noticed. Tests
 * that include it are linked with pwrite, fdatasync, fsync and ftruncate wrapped. */
#ifndef TANDEM_CHECKPOINT_FIXTURE_H
#define TANDEM_CHECKPOINT_FIXTURE_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "checkpoint_store.h"

enum { PAGE_BYTES = 150, MOST_REST = 4096 };

struct place {
    char base[64];   /* temporary folder */
    char folder[96]; /* base/checkpoints */
};

/* ---- a disk that fails, and a process that dies ---- */

enum mishap { NONE, FAILS, DIES, SHORT, INTERRUPTED, HELD };
static struct {
    enum mishap mishap;
    atomic_int calls_left; /* it strikes at the call that finds 0; SHORT and INTERRUPTED at every call; HELD: waits for it to be 0 */
    int error;
} disk;

ssize_t __real_pwrite(int fd, const void *bytes, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *bytes, size_t n, off_t at);
int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_ftruncate(int fd, off_t bytes);
int __wrap_ftruncate(int fd, off_t bytes);

/* True: this call has to fail, errno says why. */
static inline bool strikes(void)
{
    /* Relaxed: holding must not order what is to be found unordered. */
    while (disk.mishap == HELD && atomic_load_explicit(&disk.calls_left, memory_order_relaxed)) usleep(100);
    if (disk.mishap != FAILS && disk.mishap != DIES) return false;
    if (atomic_fetch_sub(&disk.calls_left, 1) > 0) return false;
    if (disk.mishap == DIES) raise(SIGKILL);
    errno = disk.error;
    return true;
}

ssize_t __wrap_pwrite(int fd, const void *bytes, size_t n, off_t at)
{
    static atomic_int turn;
    const bool some = disk.mishap == DIES || disk.mishap == FAILS;
    if (some && atomic_load(&disk.calls_left) <= 0) __real_pwrite(fd, bytes, n / 2, at); /* half of it got there */
    if (strikes()) return -1;
    if (disk.mishap == INTERRUPTED && atomic_fetch_add(&turn, 1) % 2) {
        errno = EINTR;
        return -1;
    }
    return __real_pwrite(fd, bytes, disk.mishap == SHORT && n > 1 ? n / 2 : n, at);
}

int __wrap_fdatasync(int fd) { return strikes() ? -1 : __real_fdatasync(fd); }
int __wrap_fsync(int fd) { return strikes() ? -1 : __real_fsync(fd); }
int __wrap_ftruncate(int fd, off_t bytes) { return strikes() ? -1 : __real_ftruncate(fd, bytes); }

static inline void disk_is(enum mishap mishap, int calls, int error)
{
    disk.mishap = mishap;
    disk.error = error;
    atomic_store(&disk.calls_left, calls);
}

/* ---- places ---- */

static inline int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static inline int setup(void **ctx)
{
    struct place *p = calloc(1, sizeof *p);
    if (!p) return -1;
    /* In memory where that can be: thousands of saves. */
    snprintf(p->base, sizeof p->base, "/dev/shm/test_checkpoint.XXXXXX");
    if (!mkdtemp(p->base)) {
        snprintf(p->base, sizeof p->base, "/tmp/test_checkpoint.XXXXXX");
        if (!mkdtemp(p->base)) return -1;
    }
    snprintf(p->folder, sizeof p->folder, "%s/checkpoints", p->base);
    disk_is(NONE, 0, 0);
    *ctx = p;
    return 0;
}

static inline int teardown(void **ctx)
{
    struct place *p = *ctx;
    nftw(p->base, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(p);
    return 0;
}

static inline struct checkpoint_store_options options_of(const struct place *p)
{
    return (struct checkpoint_store_options){.folder = p->folder, .rank = 1, .fingerprint = {{1, 2, 3}}, .page_bytes = PAGE_BYTES};
}

static inline struct checkpoint_store *open_good(const struct checkpoint_store_options *o)
{
    struct checkpoint_store *s = NULL;
    struct err e = {0};
    if (checkpoint_store_open(o, &s, &e) != RC_OK) fail_msg("%s: %s", e.code, e.text);
    return s;
}

static inline struct checkpoint_store *open_usual(const struct place *p)
{
    const struct checkpoint_store_options o = options_of(p);
    return open_good(&o);
}

static inline void key_make(int n, unsigned char key[CHECKPOINT_KEY_BYTES])
{
    for (int i = 0; i < CHECKPOINT_KEY_BYTES; i++) key[i] = (unsigned char)(n * 16 + i);
}

static inline void path_of(const struct place *p, int n, int rank, const char *suffix, char out[256])
{
    unsigned char key[CHECKPOINT_KEY_BYTES];
    key_make(n, key);
    int at = snprintf(out, 256, "%s/", p->folder);
    for (int i = 0; i < CHECKPOINT_KEY_BYTES; i++) at += snprintf(out + at, 256 - (size_t)at, "%02x", key[i]);
    snprintf(out + at, 256 - (size_t)at, ".r%d.%s", rank, suffix);
}

static inline struct checkpoint *of_key(struct checkpoint_store *s, int n)
{
    unsigned char key[CHECKPOINT_KEY_BYTES];
    struct checkpoint *c = NULL;
    key_make(n, key);
    assert_int_equal(checkpoint_open(s, key, &c, NULL), RC_OK);
    return c;
}

/* ---- what is saved ---- */

/* Every byte follows from what it is of, so that a byte of anything else is noticed. */
static inline void bytes_of(uint64_t what, int n, unsigned char *out, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) out[i] = (unsigned char)XXH3_64bits_withSeed(&i, sizeof i, what * 1000 + (uint64_t)n);
}
static size_t rest_bytes_of(int position) { return 100 + (size_t)position % 64; }

static int wrong_bytes, taken;
static size_t page_bytes_now = PAGE_BYTES;

static inline void sink_page(void *ctx, int page, const void *bytes)
{
    unsigned char right[1 << 16];
    bytes_of(*(const uint64_t *)ctx, page, right, page_bytes_now);
    wrong_bytes += page != taken++ || memcmp(right, bytes, page_bytes_now) != 0;
}

/* Whether the point is there; what comes of one that is there must be right. */
static inline bool load(struct checkpoint *c, uint64_t what, int position)
{
    const struct checkpoint_sink sink = {&what, sink_page};
    unsigned char right[256];
    struct buf rest = {0};
    wrong_bytes = taken = 0;
    bool there = checkpoint_load(c, position, &sink, MOST_REST, &rest);
    if (there) {
        bytes_of(what + 500, position, right, rest_bytes_of(position));
        if (rest.len != rest_bytes_of(position) || memcmp(rest.data, right, rest.len)) wrong_bytes++;
        if (taken != (page_bytes_now ? position / 64 : 0)) wrong_bytes++;
    }
    buf_free(&rest);
    return there;
}

static inline bool load_right(struct checkpoint *c, uint64_t what, int position)
{
    const bool there = load(c, what, position);
    assert_int_equal(wrong_bytes, 0);
    return there;
}

/* The greatest point that can be loaded; 0: none. */
static inline int load_best(struct checkpoint *c, uint64_t what)
{
    int at[CHECKPOINT_POINTS], best = 0;
    checkpoint_positions(c, at);
    const int greater = at[0] > at[1] ? 0 : 1;
    for (int i = 0; i < 2 && !best; i++) {
        const int position = at[i ? !greater : greater];
        if (position && load(c, what, position)) best = position;
    }
    return best;
}

static inline enum rc add_pages(struct checkpoint *c, uint64_t what, int pages, struct err *e)
{
    void *out;
    enum rc rc = RC_OK;
    for (int i = checkpoint_pages(c); page_bytes_now && i < pages && rc == RC_OK; i++) {
        rc = checkpoint_add_page(c, &out, e);
        if (rc == RC_OK) bytes_of(what, i, out, page_bytes_now);
    }
    return rc;
}

static inline enum rc add_point(struct checkpoint *c, uint64_t what, int position, struct err *e)
{
    void *out;
    enum rc rc = add_pages(c, what, position / 64, e);
    if (rc == RC_OK) rc = checkpoint_add_point(c, position, rest_bytes_of(position), &out, e);
    if (rc == RC_OK) bytes_of(what + 500, position, out, rest_bytes_of(position));
    return rc;
}

static inline enum rc wait_for_disk(struct checkpoint_store *s, struct err *e)
{
    enum rc rc;
    while ((rc = checkpoint_store_status(s, e)) == RC_RETRY) usleep(50);
    return rc;
}

static inline enum rc save_err(struct checkpoint_store *s, struct checkpoint *c, uint64_t what, int position, struct err *e)
{
    enum rc rc = add_point(c, what, position, e);
    if (rc != RC_OK) return rc;
    checkpoint_store_write(s);
    return wait_for_disk(s, e);
}

static inline void save(struct checkpoint_store *s, struct checkpoint *c, uint64_t what, int position)
{
    struct err e = {0};
    if (save_err(s, c, what, position, &e) != RC_OK) fail_msg("%s: %s", e.code, e.text);
}

static inline void assert_positions(const struct checkpoint *c, int one, int other)
{
    int at[CHECKPOINT_POINTS];
    checkpoint_positions(c, at);
    if ((at[0] != one || at[1] != other) && (at[1] != one || at[0] != other)) fail_msg("points at %d and %d", at[0], at[1]);
}

/* Key 1 with two points, in a folder without anything else: the older one in file a, and of the pages all but the last. */
enum { OLDER = 200, NEWER = 300, NEWER_PAGE = OLDER / 64 };

static inline void saved_only(const struct place *p)
{
    nftw(p->folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    struct checkpoint_store *s = open_usual(p);
    struct checkpoint *c = of_key(s, 1);
    save(s, c, 1, OLDER);
    save(s, c, 1, NEWER);
    checkpoint_close(c);
    checkpoint_store_close(s);
}

/* ---- files ---- */

static const char *const suffixes[] = {"a", "b", "pages"};

static inline void read_file(const char *path, struct buf *out) { assert_int_equal(file_read(path, 1 << 26, out, NULL), RC_OK); }

static inline void write_file(const char *path, const void *bytes, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0 && fd_write_all(fd, bytes, n));
    close(fd);
}

/* ---- a rank's work ---- */

/* What a rank does: goes on from the best point and saves five more. *durable says how far it has come. */
static inline enum rc work(const struct place *p, atomic_int *durable, struct err *e)
{
    const struct checkpoint_store_options o = options_of(p);
    struct checkpoint_store *s;
    struct checkpoint *c;
    unsigned char key[CHECKPOINT_KEY_BYTES];
    key_make(1, key);
    enum rc rc = checkpoint_store_open(&o, &s, e);
    if (rc != RC_OK) return rc;
    rc = checkpoint_open(s, key, &c, e);
    if (rc == RC_OK) {
        const int best = load_best(c, 1);
        rc = wrong_bytes ? RC_FATAL : checkpoint_resume(c, best, e);
        for (int i = 1; i <= 5 && rc == RC_OK; i++) {
            rc = save_err(s, c, 1, best + 70 * i, e);
            if (rc == RC_OK) *durable = best + 70 * i;
        }
        checkpoint_close(c);
    }
    checkpoint_store_close(s);
    return rc;
}

/* The best point is at least as far as what was durable, and right. */
static inline void assert_whole(const struct place *p, int durable, int n)
{
    struct checkpoint_store *s = open_usual(p);
    struct checkpoint *c = of_key(s, 1);
    const int best = load_best(c, 1);
    assert_int_equal(wrong_bytes, 0);
    if (best < durable) fail_msg("at call %d: %d was durable, the best point is %d", n, durable, best);
    checkpoint_close(c);
    checkpoint_store_close(s);
}

#endif
