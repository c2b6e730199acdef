/* state: durability against kill -9, damage, locks, identity, growth, and readers beside a writer. Real folders, real
 * processes. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <lmdb.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "state.h"
#include "state_codec.h"

struct place {
    char base[64];   /* temporary folder */
    char folder[96]; /* base/state */
};

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static int setup(void **ctx)
{
    struct place *p = calloc(1, sizeof *p);
    snprintf(p->base, sizeof p->base, "/tmp/test_state.XXXXXX");
    if (!p || !mkdtemp(p->base)) return -1;
    snprintf(p->folder, sizeof p->folder, "%s/state", p->base);
    *ctx = p;
    return 0;
}

static int teardown(void **ctx)
{
    struct place *p = *ctx;
    nftw(p->base, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(p);
    return 0;
}

static struct state *open_good(const char *folder, enum state_mode mode)
{
    struct err e = {0};
    struct state *s = NULL;
    if (state_open(folder, mode, &s, &e) != RC_OK) fail_msg("%s: %s", e.code, e.text);
    return s;
}

static struct err open_bad(const char *folder, enum state_mode mode)
{
    struct err e = {0};
    struct state *s = NULL;
    assert_int_not_equal(state_open(folder, mode, &s, &e), RC_OK);
    assert_null(s);
    return e;
}

static void key_of(int i, unsigned char key[32])
{
    memset(key, 0, 32);
    memcpy(key, &i, sizeof i);
    key[31] = 7;
}

static enum rc put_text(struct state *s, int i, enum state_result_kind kind, const char *record, struct err *e)
{
    unsigned char key[32];
    key_of(i, key);
    struct state_result r = {.kind = kind, .record = record, .record_len = strlen(record), .timing = "{\"t\":1}", .timing_len = 7};
    return state_put_result(s, key, &r, e);
}

static void job_at(const void *ctx, size_t i, struct state_job *out)
{
    char *id = (char *)(uintptr_t)ctx;
    snprintf(id, 24, "job-%zu", i);
    *out = (struct state_job){.custom_id = id,
                              .source = "jobs.jsonl",
                              .line = (int64_t)i + 1,
                              .line_digest = {(unsigned char)i},
                              .document_digests = "0123456789abcdef0123456789abcdef",
                              .document_digests_bytes = i % 2 ? 32 : 0};
    key_of((int)i, out->key);
}

static void register_some(struct state *s, int n)
{
    char id[24];
    const struct state_job_list jobs = {(size_t)n, job_at, id};
    unsigned char digest[32] = {1, 2, (unsigned char)n};
    struct err e = {0};
    if (state_register(s, &jobs, digest, &e) != RC_OK) fail_msg("%s", e.text);
}

static void test_forgetting(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    struct state *s = open_good(p->folder, STATE_WRITE);
    unsigned char keys[3 * STATE_KEY_BYTES];
    register_some(s, 4);
    for (int i = 0; i < 4; i++) {
        unsigned char key[32];
        struct state_attempts a = {.attempts = 6, .failures = 6};
        key_of(i, key);
        assert_int_equal(state_put_attempts(s, key, &a, &e), RC_OK);
        if (i != 2) assert_int_equal(put_text(s, i, i == 3 ? STATE_OUTPUT : STATE_ERROR, "{}", &e), RC_OK);
        if (i < 3) memcpy(keys + i * STATE_KEY_BYTES, key, sizeof key);
    }
    if (state_forget(s, keys, 3, &e) != RC_OK) fail_msg("%s", e.text);
    state_close(s);
    s = open_good(p->folder, STATE_READ);
    struct state_counts counts;
    assert_int_equal(state_count(s, &counts, &e), RC_OK);
    assert_true(counts.jobs == 4 && counts.pending == 3 && counts.done == 1 && counts.failed == 0);
    for (int i = 0; i < 4; i++) {
        unsigned char key[32];
        struct state_attempts a;
        key_of(i, key);
        assert_int_equal(state_get_attempts(s, key, &a, &e), RC_OK);
        assert_int_equal(a.attempts, i == 3 ? 6 : 0);
        assert_int_equal(a.failures, 0);
    }
    assert_int_equal(state_forget(s, keys, 3, &e), RC_FAILED); /* open for reading */
    state_close(s);
}

/* What fstatfs says a folder lies on; 0: what is true. */
static long played_filesystem;
int __real_fstatfs(int fd, struct statfs *out);
int __wrap_fstatfs(int fd, struct statfs *out);
int __wrap_fstatfs(int fd, struct statfs *out)
{
    int failed = __real_fstatfs(fd, out);
    if (played_filesystem) out->f_type = played_filesystem;
    return failed;
}

static void test_network_is_refused_unless_allowed(void **ctx)
{
    struct place *p = *ctx;
    static const long network[] = {0x6969, (long)0xFF534D42, (long)0xFE534D42, 0x01021997, 0x00c36400, 0x0BD00BD0, 0x47504653};
    for (size_t i = 0; i < sizeof network / sizeof *network; i++) {
        played_filesystem = network[i];
        struct err e = open_bad(p->folder, STATE_WRITE);
        assert_int_equal(e.exit_status, EXIT_CONFIG);
        assert_string_equal(e.code, "remote_state");
        assert_int_equal(open_bad(p->folder, STATE_READ).exit_status, EXIT_CONFIG);
        assert_int_equal(open_bad(p->folder, STATE_CHANGE).exit_status, EXIT_CONFIG);
    }
    state_close(open_good(p->folder, STATE_WRITE | STATE_ON_NETWORK));
    state_close(open_good(p->folder, STATE_READ | STATE_ON_NETWORK));
    state_close(open_good(p->folder, STATE_CHANGE | STATE_ON_NETWORK));
    played_filesystem = 0;
}

static void test_change_needs_a_state(void **ctx)
{
    struct place *p = *ctx;
    assert_int_equal(open_bad(p->folder, STATE_CHANGE).exit_status, EXIT_NO_INPUT);
    assert_int_not_equal(access(p->folder, F_OK), 0);
    assert_int_equal(mkdir(p->folder, 0700), 0);
    assert_int_equal(open_bad(p->folder, STATE_CHANGE).exit_status, EXIT_NO_INPUT);
    assert_int_equal(rmdir(p->folder), 0); /* nothing was put into it */
    struct state *s = open_good(p->folder, STATE_WRITE);
    assert_int_equal(open_bad(p->folder, STATE_CHANGE).exit_status, EXIT_RESUMABLE);
    state_close(s);
    s = open_good(p->folder, STATE_CHANGE);
    struct err e = {0};
    if (put_text(s, 1, STATE_OUTPUT, "{}", &e) != RC_OK) fail_msg("%s", e.text);
    state_close(s);
}

static void test_round_trip(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    struct state *s = open_good(p->folder, STATE_WRITE);
    register_some(s, 5);
    assert_int_equal(put_text(s, 0, STATE_OUTPUT, "{\"id\":\"a\"}", &e), RC_OK);
    assert_int_equal(put_text(s, 3, STATE_ERROR, "{\"id\":\"b\"}", &e), RC_OK);
    char id[33];
    snprintf(id, sizeof id, "%s", state_id(s));
    assert_int_equal(strlen(id), 32);
    state_close(s);

    s = open_good(p->folder, STATE_READ);
    assert_string_equal(state_id(s), id);
    struct state_counts c;
    assert_int_equal(state_count(s, &c, &e), RC_OK);
    assert_int_equal(c.jobs, 5);
    assert_int_equal(c.done, 1);
    assert_int_equal(c.failed, 1);
    assert_int_equal(c.pending, 3);
    struct state_job j, k;
    struct buf first = {0}, second = {0};
    assert_int_equal(state_job_at(s, 3, &first, &j, &e), RC_OK);
    assert_int_equal(state_job_at(s, 4, &second, &k, &e), RC_OK);
    assert_int_equal(state_job_at(s, 5, &second, &k, NULL), RC_FAILED);
    assert_string_equal(j.custom_id, "job-3");
    assert_string_equal(k.source, "jobs.jsonl");
    assert_int_equal(j.line, 4);
    assert_int_equal(j.document_digests_bytes, 32);
    assert_memory_equal(j.document_digests, "0123456789abcdef0123456789abcdef", 32);
    assert_int_equal(k.document_digests_bytes, 0);
    struct buf scratch = {0};
    struct state_result r;
    assert_int_equal(state_get_result(s, j.key, &scratch, &r, &e), RC_OK);
    assert_int_equal(r.kind, STATE_ERROR);
    assert_int_equal(r.record_len, 10);
    assert_memory_equal(r.record, "{\"id\":\"b\"}", 10);
    assert_memory_equal(r.timing, "{\"t\":1}", 7);
    assert_int_equal(state_get_result(s, k.key, &scratch, &r, &e), RC_RETRY);
    assert_int_equal(put_text(s, 1, STATE_OUTPUT, "x", &e), RC_FAILED);
    buf_free(&first);
    buf_free(&second);
    buf_free(&scratch);
    state_close(s);
}

static void test_modes_are_private(void **ctx)
{
    struct place *p = *ctx;
    char path[128];
    struct stat st;
    mode_t mask = umask(022);
    state_close(open_good(p->folder, STATE_WRITE));
    umask(mask);
    assert_int_equal(stat(p->folder, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    static const char *const names[] = {"data.mdb", "lock.mdb", "lock", "id"};
    for (size_t i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", p->folder, names[i]);
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_mode & 0777, 0600);
    }
}

static void test_read_needs_a_state(void **ctx)
{
    struct place *p = *ctx;
    struct err e = open_bad(p->folder, STATE_READ);
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    e = open_bad(p->base, STATE_READ);
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    assert_string_equal(e.code, "no_state");
}

static void test_parent_missing(void **ctx)
{
    struct place *p = *ctx;
    char deep[160];
    snprintf(deep, sizeof deep, "%s/no/such", p->base);
    assert_int_equal(open_bad(deep, STATE_WRITE).exit_status, EXIT_NO_OUTPUT);
}

static void test_lock(void **ctx)
{
    struct place *p = *ctx;
    struct state *s = open_good(p->folder, STATE_WRITE);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct err e = {0};
        struct state *other = NULL;
        char me[40];
        snprintf(me, sizeof me, "process %ld", (long)getppid());
        enum rc rc = state_open(p->folder, STATE_WRITE, &other, &e);
        _exit(rc == RC_FAILED && e.exit_status == EXIT_RESUMABLE && strstr(e.text, me) ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    /* The refused one must not have erased the holder's text. */
    char path[128], text[64] = "";
    snprintf(path, sizeof path, "%s/lock", p->folder);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_non_null(fgets(text, sizeof text, f));
    fclose(f);
    assert_non_null(strstr(text, "process "));
    state_close(s);
    state_close(open_good(p->folder, STATE_WRITE));
}

static void test_identity(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    struct state *s = open_good(p->folder, STATE_WRITE);
    struct buf text = {0};
    assert_int_equal(state_identity(s, &text, &e), RC_RETRY);
    assert_int_equal(state_bind_identity(s, "model=aa\nranks=2\nkv=f16\n", &e), RC_OK);
    assert_int_equal(state_bind_identity(s, "model=aa\nranks=2\nkv=f16\n", &e), RC_OK);
    assert_int_equal(state_identity(s, &text, &e), RC_OK);
    assert_string_equal(text.data, "model=aa\nranks=2\nkv=f16\n");
    assert_int_equal(state_bind_identity(s, "model=aa\nranks=3\nkv=f16\n", &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_CONFIG);
    assert_non_null(strstr(e.text, "ranks=2"));
    assert_non_null(strstr(e.text, "ranks=3"));
    static const struct {
        const char *given, *shown;
    } others[] = {{"model=aa\nranks=2\n", "kv=f16, this run has kv=nothing"},
                  {"model=aa\nranks=2\nkv=f16\nmore=1\n", "more=nothing, this run has more=1"},
                  {"model=aa\nranks=22\nkv=f16\n", "ranks=2, this run has ranks=22"}};
    for (size_t i = 0; i < 3; i++) {
        struct err other = {0};
        assert_int_equal(state_bind_identity(s, others[i].given, &other), RC_BAD_INPUT);
        if (!strstr(other.text, others[i].shown)) fail_msg("%s", other.text);
    }
    buf_free(&text);
    state_close(s);
}

static void test_attempts_end_with_the_result(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    struct state *s = open_good(p->folder, STATE_WRITE);
    unsigned char key[32];
    key_of(1, key);
    struct state_attempts a;
    assert_int_equal(state_get_attempts(s, key, &a, &e), RC_OK);
    assert_int_equal(a.attempts, 0);
    assert_false(a.running);
    a = (struct state_attempts){3, 2, 1, 77, true};
    assert_int_equal(state_put_attempts(s, key, &a, &e), RC_OK);
    assert_int_equal(put_text(s, 1, STATE_OUTPUT, "{}", &e), RC_OK);
    assert_int_equal(state_get_attempts(s, key, &a, &e), RC_OK);
    assert_false(a.running);
    assert_int_equal(a.attempts, 3);
    assert_int_equal(a.failures, 0);
    assert_int_equal(a.rank_restarts, 1);
    assert_int_equal(a.failed_position, 77);
    key_of(2, key);
    a = (struct state_attempts){6, 6, 6, 0, true};
    assert_int_equal(state_put_attempts(s, key, &a, &e), RC_OK);
    assert_int_equal(put_text(s, 2, STATE_ERROR, "{}", &e), RC_OK);
    assert_int_equal(state_get_attempts(s, key, &a, &e), RC_OK);
    assert_false(a.running);
    assert_int_equal(a.failures, 6);
    state_close(s);
}

static void test_pins(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    struct state *s = open_good(p->folder, STATE_WRITE);
    struct buf digests = {0};
    unsigned char line[32] = {3};
    assert_int_equal(state_pinned(s, "job-3", line, &digests, &e), RC_RETRY);
    register_some(s, 5);
    assert_int_equal(state_pinned(s, "job-3", line, &digests, &e), RC_OK);
    assert_int_equal(digests.len, 32);
    assert_memory_equal(digests.data, "0123456789abcdef0123456789abcdef", 32);
    assert_int_equal(state_pinned(s, "job-2", line, &digests, &e), RC_RETRY);
    line[5] = 1;
    assert_int_equal(state_pinned(s, "job-3", line, &digests, &e), RC_RETRY);
    line[5] = 0;
    register_some(s, 2); /* job-3 is gone: its pin is as well */
    assert_int_equal(state_pinned(s, "job-3", line, &digests, &e), RC_RETRY);
    assert_int_equal(state_job_count(s), 2);
    buf_free(&digests);
    state_close(s);
}

static void file_bytes(const char *folder, const char *name, struct buf *out)
{
    char path[160];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    struct err e = {0};
    if (file_read(path, 1 << 28, out, &e) != RC_OK) fail_msg("%s", e.text);
}

static void test_registering_the_same_writes_nothing(void **ctx)
{
    struct place *p = *ctx;
    struct buf before = {0}, after = {0};
    struct state *s = open_good(p->folder, STATE_WRITE);
    register_some(s, 5);
    state_close(s);
    file_bytes(p->folder, "data.mdb", &before);
    s = open_good(p->folder, STATE_WRITE);
    register_some(s, 5);
    assert_int_equal(state_job_count(s), 5);
    state_close(s);
    file_bytes(p->folder, "data.mdb", &after);
    assert_int_equal(before.len, after.len);
    assert_memory_equal(before.data, after.data, before.len);
    buf_free(&before);
    buf_free(&after);
}

static void test_map_grows(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    struct state *s = NULL;
    assert_int_equal(state_open_sized(p->folder, STATE_WRITE, 256 << 10, &s, &e), RC_OK);
    char *record = malloc(40001);
    memset(record, 'x', 40000);
    record[40000] = '\0';
    for (int i = 0; i < 100; i++)
        if (put_text(s, i, STATE_OUTPUT, record, &e) != RC_OK) fail_msg("put %d: %s", i, e.text);
    struct buf scratch = {0};
    for (int i = 0; i < 100; i++) {
        unsigned char key[32];
        struct state_result r;
        key_of(i, key);
        assert_int_equal(state_get_result(s, key, &scratch, &r, &e), RC_OK);
        assert_int_equal(r.record_len, 40000);
    }
    buf_free(&scratch);
    free(record);
    state_close(s);
    state_close(open_good(p->folder, STATE_WRITE));
}

/* The child says each number after its commit returned; what was said must be there whatever moment the kill hits. */
static void test_kill_in_a_loop_of_puts(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    int confirmed = -1;
    for (int round = 0; round < 6; round++) {
        int fds[2];
        assert_int_equal(pipe(fds), 0);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            struct state *s = NULL;
            if (state_open(p->folder, STATE_WRITE, &s, &e) != RC_OK) _exit(1);
            for (int i = confirmed + 1;; i++) {
                char record[3000];
                memset(record, 'a' + i % 26, sizeof record - 1);
                record[sizeof record - 1] = '\0';
                unsigned char key[32];
                key_of(i, key);
                struct state_attempts a = {1, 0, 0, 0, true};
                if (state_put_attempts(s, key, &a, &e) != RC_OK) _exit(1);
                if (put_text(s, i, STATE_OUTPUT, record, &e) != RC_OK) _exit(1);
                if (write(fds[1], &i, sizeof i) != sizeof i) _exit(1);
            }
        }
        close(fds[1]);
        usleep(40000 + 11000 * (unsigned)round);
        kill(pid, SIGKILL);
        int status, said, before = confirmed;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        while (read(fds[0], &said, sizeof said) == sizeof said) confirmed = said;
        close(fds[0]);
        if (confirmed == before && round > 2) fail_msg("nothing was confirmed");

        struct state *s = open_good(p->folder, STATE_WRITE);
        struct buf scratch = {0};
        for (int i = 0; i <= confirmed; i++) {
            unsigned char key[32];
            struct state_result r;
            struct state_attempts a;
            key_of(i, key);
            if (state_get_result(s, key, &scratch, &r, &e) != RC_OK)
                fail_msg("lost %d of %d: %s", i, confirmed, e.text);
            assert_int_equal(r.record_len, 2999);
            assert_int_equal(r.record[17], 'a' + i % 26);
            assert_int_equal(state_get_attempts(s, key, &a, &e), RC_OK);
            assert_false(a.running);
        }
        buf_free(&scratch);
        state_close(s);
    }
    assert_true(confirmed > 5);
}

static void make_filled(const char *folder)
{
    struct err e = {0};
    struct state *s = open_good(folder, STATE_WRITE);
    register_some(s, 40);
    for (int i = 0; i < 40; i++) {
        char record[2001];
        memset(record, 'r', 2000);
        record[2000] = '\0';
        snprintf(record, 20, "REC%d", i);
        record[strlen(record)] = 'r';
        assert_int_equal(put_text(s, i, STATE_OUTPUT, record, &e), RC_OK);
    }
    state_close(s);
}

static void expect_damaged(const char *folder)
{
    for (int mode = STATE_WRITE; mode <= STATE_READ; mode++) {
        struct err e = open_bad(folder, (enum state_mode)mode);
        if (e.exit_status != EXIT_IO || strcmp(e.code, "state_damaged")) fail_msg("%s: %s", e.code, e.text);
    }
}

static void poke(const char *folder, const char *needle)
{
    char path[160];
    struct buf bytes = {0};
    file_bytes(folder, "data.mdb", &bytes);
    snprintf(path, sizeof path, "%s/data.mdb", folder);
    const char *at = memmem(bytes.data, bytes.len, needle, strlen(needle));
    assert_non_null(at);
    int fd = open(path, O_WRONLY);
    int hits = 0;
    /* Old copies of the page may lie about: change them all. */
    for (; at; at = memmem(at + 1, bytes.len - (size_t)(at + 1 - bytes.data), needle, strlen(needle)), hits++)
        assert_int_equal(pwrite(fd, "!", 1, at - bytes.data + 3), 1);
    assert_true(hits > 0);
    close(fd);
    buf_free(&bytes);
}

static void test_damaged_value(void **ctx)
{
    struct place *p = *ctx;
    make_filled(p->folder);
    poke(p->folder, "REC17r");
    expect_damaged(p->folder);
}

static void test_damaged_registration(void **ctx)
{
    struct place *p = *ctx;
    make_filled(p->folder);
    poke(p->folder, "job-12");
    expect_damaged(p->folder);
}

static void test_truncated(void **ctx)
{
    struct place *p = *ctx;
    char path[128];
    struct stat st;
    make_filled(p->folder);
    snprintf(path, sizeof path, "%s/data.mdb", p->folder);
    assert_int_equal(stat(path, &st), 0);
    static const int eighths[] = {6, 4, 2};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(truncate(path, st.st_size / 8 * eighths[i] / 4096 * 4096), 0);
        expect_damaged(p->folder);
    }
    assert_int_equal(truncate(path, 12288), 0);
    expect_damaged(p->folder);
    assert_int_equal(truncate(path, 1000), 0);
    expect_damaged(p->folder);
    assert_int_equal(truncate(path, 0), 0);
    expect_damaged(p->folder);
    assert_int_equal(unlink(path), 0);
    expect_damaged(p->folder);
}

static void test_random_damage_is_never_a_wrong_answer(void **ctx)
{
    struct place *p = *ctx;
    char path[128];
    struct buf good = {0};
    make_filled(p->folder);
    file_bytes(p->folder, "data.mdb", &good);
    snprintf(path, sizeof path, "%s/data.mdb", p->folder);
    uint64_t random = 88172645463325252u;
    int refused = 0;
    for (int round = 0; round < 60; round++) {
        int fd = open(path, O_WRONLY | O_TRUNC);
        assert_true(fd_write_all(fd, good.data, good.len));
        for (int i = 0; i < 8; i++) {
            random ^= random << 13, random ^= random >> 7, random ^= random << 17;
            unsigned char byte = (unsigned char)(random >> 32);
            assert_int_equal(pwrite(fd, &byte, 1, (off_t)(8192 + random % (good.len - 8192))), 1);
        }
        close(fd);
        struct err e = {0};
        struct state *s = NULL;
        struct state_counts counts;
        char id[STATE_ID_CHARS + 1];
        if (state_peek(p->folder, STATE_READ, &counts, id, &e) == RC_OK)
            assert_true(counts.jobs == 40 && counts.done == 40 && !counts.failed && !counts.pending);
        else
            assert_int_equal(e.exit_status, EXIT_IO);
        e = (struct err){0};
        if (state_open(p->folder, STATE_READ, &s, &e) != RC_OK) {
            assert_int_equal(e.exit_status, EXIT_IO);
            refused++;
            continue;
        }
        /* Only bytes that nothing uses can have changed. */
        struct buf scratch = {0};
        for (int i = 0; i < 40; i++) {
            char start[20];
            unsigned char key[32];
            struct state_result r;
            key_of(i, key);
            assert_int_equal(state_get_result(s, key, &scratch, &r, &e), RC_OK);
            snprintf(start, sizeof start, "REC%dr", i);
            assert_memory_equal(r.record, start, strlen(start));
            for (size_t b = strlen(start); b < r.record_len; b++) assert_int_equal(r.record[b], 'r');
        }
        buf_free(&scratch);
        state_close(s);
    }
    assert_true(refused > 10);
    buf_free(&good);
}

/* Opens a state without its marker, as a new one; true: what was there has been moved aside. */
static bool reopened_aside(const struct place *p)
{
    char path[160];
    snprintf(path, sizeof path, "%s/id", p->folder);
    assert_int_equal(unlink(path), 0);
    struct state *s = open_good(p->folder, STATE_WRITE);
    assert_int_equal(state_job_count(s), 0);
    state_close(s);
    snprintf(path, sizeof path, "%s/data.mdb.incomplete", p->folder);
    return access(path, F_OK) == 0;
}

static void test_interrupted_first_opening(void **ctx)
{
    struct place *p = *ctx;
    char path[160];
    state_close(open_good(p->folder, STATE_WRITE));
    assert_false(reopened_aside(p));
    snprintf(path, sizeof path, "%s/data.mdb", p->folder);
    for (int length = 8192; length >= 0; length -= 2048) {
        assert_int_equal(truncate(path, length), 0);
        assert_false(reopened_aside(p));
    }
}

static void test_lost_marker(void **ctx)
{
    struct place *p = *ctx;
    make_filled(p->folder);
    assert_true(reopened_aside(p));
}

static void test_database_of_another_state(void **ctx)
{
    struct place *p = *ctx;
    char other[128], from[160], to[160];
    snprintf(other, sizeof other, "%s/other", p->base);
    make_filled(p->folder);
    make_filled(other);
    snprintf(from, sizeof from, "%s/data.mdb", other);
    snprintf(to, sizeof to, "%s/data.mdb", p->folder);
    assert_int_equal(rename(from, to), 0);
    expect_damaged(p->folder);
}

static void test_other_schema_version(void **ctx)
{
    struct place *p = *ctx;
    make_filled(p->folder);
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    assert_int_equal(mdb_env_create(&env), 0);
    mdb_env_set_maxdbs(env, 8);
    assert_int_equal(mdb_env_open(env, p->folder, 0, 0600), 0);
    assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
    assert_int_equal(mdb_dbi_open(txn, "meta", 0, &dbi), 0);
    struct buf value = {0};
    char name[] = "schema";
    state_value_start(&value);
    buf_append(&value, "\x09\0\0\0", 4);
    state_value_seal(&value, name, 6);
    MDB_val k = {6, name}, v = {value.len, value.data};
    assert_int_equal(mdb_put(txn, dbi, &k, &v, 0), 0);
    /* Whole, of fields that this version does not know: no damage. */
    unsigned char key[32];
    key_of(3, key);
    assert_int_equal(mdb_dbi_open(txn, "results", 0, &dbi), 0);
    state_value_start(&value);
    buf_append(&value, "other fields", 12);
    state_value_seal(&value, key, sizeof key);
    k = (MDB_val){sizeof key, key}, v = (MDB_val){value.len, value.data};
    assert_int_equal(mdb_put(txn, dbi, &k, &v, 0), 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
    mdb_env_close(env);
    buf_free(&value);
    struct err e = open_bad(p->folder, STATE_WRITE);
    assert_int_equal(e.exit_status, EXIT_CONFIG);
    assert_non_null(strstr(e.text, "version 9"));
    struct state_counts counts;
    char id[STATE_ID_CHARS + 1];
    e = (struct err){0};
    assert_int_not_equal(state_peek(p->folder, STATE_READ, &counts, id, &e), RC_OK);
    assert_string_equal(e.code, "state_version");
}

static void test_reader_beside_writer(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    make_filled(p->folder);
    int to_child[2], to_parent[2];
    assert_int_equal(pipe(to_child), 0);
    assert_int_equal(pipe(to_parent), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct state *s = NULL;
        char c;
        if (state_open(p->folder, STATE_WRITE, &s, &e) != RC_OK) _exit(1);
        if (write(to_parent[1], "o", 1) != 1 || read(to_child[0], &c, 1) != 1) _exit(2);
        register_some(s, 50);
        if (put_text(s, 45, STATE_OUTPUT, "new", &e) != RC_OK) _exit(3);
        state_close(s);
        _exit(0);
    }
    char c;
    assert_int_equal(read(to_parent[0], &c, 1), 1);
    struct state *s = open_good(p->folder, STATE_READ);
    assert_int_equal(state_snapshot(s, &e), RC_OK);
    assert_int_equal(write(to_child[1], "g", 1), 1);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    struct state_counts counts;
    assert_int_equal(state_count(s, &counts, &e), RC_OK);
    assert_int_equal(counts.jobs, 40);
    assert_int_equal(counts.done, 40);
    state_snapshot_end(s);
    assert_int_equal(state_snapshot(s, &e), RC_OK);
    assert_int_equal(state_count(s, &counts, &e), RC_OK);
    assert_int_equal(counts.jobs, 50);
    assert_int_equal(counts.done, 41);
    state_close(s);
    close(to_child[0]), close(to_child[1]), close(to_parent[0]), close(to_parent[1]);
}

static void expect_counts(const struct place *p, struct state *s, struct state_counts want)
{
    struct state_counts open = {0}, peeked = {0};
    char id[STATE_ID_CHARS + 1];
    struct err e = {0};
    assert_int_equal(state_count(s, &open, &e), RC_OK);
    if (state_peek(p->folder, STATE_READ, &peeked, id, &e) != RC_OK) fail_msg("%s", e.text);
    assert_memory_equal(&open, &want, sizeof want);
    assert_memory_equal(&peeked, &want, sizeof want);
    assert_string_equal(id, state_id(s));
}

static void put_counted(struct state *s, int i, enum state_result_kind kind, int64_t prompt, int64_t cached, int64_t completion)
{
    unsigned char key[32];
    struct err e = {0};
    key_of(i, key);
    const struct state_result r = {.kind = kind, .record = "{}", .record_len = 2, .timing = "{}", .timing_len = 2,
                                   .prompt_tokens = prompt, .cached_tokens = cached, .completion_tokens = completion};
    if (state_put_result(s, key, &r, &e) != RC_OK) fail_msg("%s", e.text);
}

/* The counts that every change keeps are those of the registered jobs, whatever happened in which order. */
static void test_counts(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    struct state *s = open_good(p->folder, STATE_WRITE);
    unsigned char key[32];
    uint64_t first, second;
    expect_counts(p, s, (struct state_counts){0});
    register_some(s, 4);
    expect_counts(p, s, (struct state_counts){.jobs = 4, .pending = 4});
    key_of(2, key);
    assert_int_equal(state_put_attempts(s, key, &(struct state_attempts){.attempts = 1, .running = true}, &e), RC_OK);
    assert_int_equal(state_put_attempts(s, key, &(struct state_attempts){.attempts = 3, .rank_restarts = 2, .running = true}, &e), RC_OK);
    put_counted(s, 2, STATE_ERROR, 100, 64, 0);
    put_counted(s, 3, STATE_OUTPUT, 1000, 512, 7);
    expect_counts(p, s, (struct state_counts){4, 1, 1, 2, 1100, 576, 7, 3, 2});
    assert_int_equal(state_result_settled(s, key, &first, &e), RC_OK);
    put_counted(s, 2, STATE_OUTPUT, 100, 0, 20); /* again: its first outcome is none any more */
    expect_counts(p, s, (struct state_counts){4, 2, 0, 2, 1100, 512, 27, 3, 2});
    assert_int_equal(state_result_settled(s, key, &second, &e), RC_OK);
    assert_true(first == 1 && second == 3);
    register_some(s, 3); /* job 3 is gone, and its counts */
    expect_counts(p, s, (struct state_counts){3, 1, 0, 2, 100, 0, 20, 3, 2});
    register_some(s, 5);
    expect_counts(p, s, (struct state_counts){5, 2, 0, 3, 1100, 512, 27, 3, 2});
    put_counted(s, 0, STATE_OUTPUT, 1, 0, 1);
    key_of(0, key);
    assert_int_equal(state_result_settled(s, key, &second, &e), RC_OK);
    assert_int_equal(second, 4);
    key_of(1, key);
    assert_int_equal(state_result_settled(s, key, &second, &e), RC_OK);
    assert_int_equal(second, 0);
    state_close(s);
}

/* Peeking reads little, and what it reads it checks. */
static void test_peek_at_damage(void **ctx)
{
    struct place *p = *ctx;
    struct state_counts c;
    char id[STATE_ID_CHARS + 1];
    struct err e = {0};
    assert_int_equal(state_peek(p->folder, STATE_READ, &c, id, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    make_filled(p->folder);
    assert_int_equal(state_peek(p->folder, STATE_READ, &c, id, NULL), RC_OK);
    poke(p->folder, "totals");
    char path[160];
    snprintf(path, sizeof path, "%s/data.mdb", p->folder);
    for (int damage = 0; damage < 2; damage++) {
        e = (struct err){0};
        assert_int_not_equal(state_peek(p->folder, STATE_READ, &c, id, &e), RC_OK);
        assert_string_equal(e.code, "state_damaged");
        assert_int_equal(e.exit_status, EXIT_IO);
        assert_int_equal(truncate(path, 9000), 0);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_round_trip, setup, teardown),
        cmocka_unit_test_setup_teardown(test_modes_are_private, setup, teardown),
        cmocka_unit_test_setup_teardown(test_read_needs_a_state, setup, teardown),
        cmocka_unit_test_setup_teardown(test_change_needs_a_state, setup, teardown),
        cmocka_unit_test_setup_teardown(test_network_is_refused_unless_allowed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_parent_missing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lock, setup, teardown),
        cmocka_unit_test_setup_teardown(test_identity, setup, teardown),
        cmocka_unit_test_setup_teardown(test_attempts_end_with_the_result, setup, teardown),
        cmocka_unit_test_setup_teardown(test_forgetting, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pins, setup, teardown),
        cmocka_unit_test_setup_teardown(test_registering_the_same_writes_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_map_grows, setup, teardown),
        cmocka_unit_test_setup_teardown(test_kill_in_a_loop_of_puts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damaged_value, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damaged_registration, setup, teardown),
        cmocka_unit_test_setup_teardown(test_truncated, setup, teardown),
        cmocka_unit_test_setup_teardown(test_random_damage_is_never_a_wrong_answer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_interrupted_first_opening, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lost_marker, setup, teardown),
        cmocka_unit_test_setup_teardown(test_database_of_another_state, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_schema_version, setup, teardown),
        cmocka_unit_test_setup_teardown(test_reader_beside_writer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_counts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_peek_at_damage, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
