/* state against what happens to its files while nobody has them open: flipped bits and cuts at every kind of place. Nobody dies by a
 * signal; what is opened is what was written, and stays so when it is written on; else it is refused with 74, and what can
 * be read is salvaged, and right.
 *
 * With an argument: every byte instead of a choice of them. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "state.h"
#include "state_salvage.h"

enum { JOBS = 60, ANSWERED = 50, IN_BETWEEN = 20, AFTERWARDS = 3, MOST_LOST = 20 };
static const char identity[] = "version=1\nmodel=abc\n";
static const char *const state_files[] = {"data.mdb", "lock.mdb", "id", "lock"};
enum { STATE_FILES = sizeof state_files / sizeof *state_files };
static bool every_byte;

struct place {
    char base[64], folder[96];
    long cut; /* data.mdb ends here; -1: it does not */
    struct buf good[STATE_FILES];
};

/* ---- what is in it ---- */

static void key_of(int i, unsigned char key[32])
{
    memset(key, 0, 32);
    for (int k = 0; k < 8; k++) key[k] = (unsigned char)(0x9E3779B97F4A7C15u * (uint64_t)(i + 1) >> 8 * k);
}

static enum state_result_kind kind_of(int i) { return i % 7 == 3 ? STATE_ERROR : STATE_OUTPUT; }

/* Some fit into a page, some do not. */
static void record_of(int i, struct buf *out)
{
    buf_clear(out);
    buf_printf(out, "{\"custom_id\":\"job-%d\",\"text\":\"", i);
    for (int k = 0; k < (i % 5 == 2 ? 700 : 20 + i); k++) buf_printf(out, "%d ", i * 1000 + k);
    buf_append_str(out, "\"}");
}

static void timing_of(int i, char out[64]) { snprintf(out, 64, "{\"custom_id\":\"job-%d\"}", i); }

static enum rc put(struct state *s, int i, struct err *e)
{
    unsigned char key[32];
    char timing[64];
    struct buf record = {0};
    key_of(i, key);
    record_of(i, &record);
    timing_of(i, timing);
    const struct state_result r = {.kind = kind_of(i), .record = record.data, .record_len = record.len, .timing = timing,
                                   .timing_len = strlen(timing), .prompt_tokens = i};
    const enum rc rc = state_put_result(s, key, &r, e);
    buf_free(&record);
    return rc;
}

static void job_at(const void *ctx, size_t i, struct state_job *out)
{
    char *id = (char *)(uintptr_t)ctx;
    snprintf(id, 16, "job-%d", (int)i);
    *out = (struct state_job){.custom_id = id, .source = "jobs.jsonl", .line = (int64_t)i + 1, .line_digest = {(unsigned char)i}};
    key_of((int)i, out->key);
}

static enum rc register_jobs(struct state *s, int n, struct err *e)
{
    char id[16];
    const struct state_job_list jobs = {(size_t)n, job_at, id};
    const unsigned char digest[32] = {1, 2, (unsigned char)n};
    return state_register(s, &jobs, digest, e);
}

static void make_state(const char *folder)
{
    struct err e = {0};
    struct state *s;
    struct state_attempts a = {.attempts = 1, .running = true};
    assert_int_equal(state_open(folder, STATE_WRITE, &s, &e), RC_OK);
    enum rc rc = state_bind_identity(s, identity, &e);
    if (rc == RC_OK) rc = register_jobs(s, JOBS - 10, &e);
    for (int i = 0; i < ANSWERED && rc == RC_OK; i++) {
        unsigned char key[32];
        key_of(i, key);
        rc = state_put_attempts(s, key, &a, &e);
        if (rc == RC_OK && i == IN_BETWEEN) rc = register_jobs(s, JOBS, &e);
        if (rc == RC_OK) rc = put(s, i, &e);
    }
    if (rc != RC_OK) fail_msg("%s", e.text);
    state_close(s);
}

/* In children, where cmocka cannot report. */
static void must(bool condition, int line)
{
    if (condition) return;
    fprintf(stderr, "child: line %d\n", line);
    _exit(2);
}
#define MUST(condition) must(condition, __LINE__)

static bool has_result(struct state *s, const unsigned char key[32], struct buf *scratch)
{
    struct state_result r;
    const enum rc rc = state_get_result(s, key, scratch, &r, NULL);
    MUST(rc == RC_OK || rc == RC_RETRY);
    return rc == RC_OK;
}

static void result_right(struct state *s, int i, struct buf *scratch, struct buf *record)
{
    unsigned char key[32];
    char timing[64];
    struct state_result r;
    key_of(i, key);
    record_of(i, record);
    timing_of(i, timing);
    MUST(state_get_result(s, key, scratch, &r, NULL) == RC_OK);
    MUST(r.prompt_tokens == i && r.kind == kind_of(i) && r.record_len == record->len && !memcmp(r.record, record->data, record->len));
    MUST(r.timing_len == strlen(timing) && !memcmp(r.timing, timing, r.timing_len));
}

static void all_right(struct state *s, int answered)
{
    struct buf scratch = {0}, record = {0}, text = {0};
    struct state_counts c;
    struct state_attempts a;
    unsigned char digest[32];
    MUST(state_count(s, &c, NULL) == RC_OK && c.jobs == JOBS && c.pending == (size_t)(JOBS - answered));
    MUST(state_identity(s, &text, NULL) == RC_OK && !strcmp(text.data, identity));
    MUST(state_input_digest(s, digest, NULL) == RC_OK && digest[2] == JOBS);
    for (int i = 0; i < JOBS; i++) {
        char id[16];
        unsigned char key[32];
        struct state_job j;
        snprintf(id, sizeof id, "job-%d", i);
        key_of(i, key);
        MUST(state_job_at(s, (size_t)i, &scratch, &j, NULL) == RC_OK);
        MUST(!strcmp(j.custom_id, id) && j.line == i + 1 && !memcmp(j.key, key, sizeof key));
        MUST(has_result(s, key, &scratch) == (i < answered));
        if (i < answered) result_right(s, i, &scratch, &record);
        MUST(state_get_attempts(s, key, &a, NULL) == RC_OK && a.attempts == (i < ANSWERED) && !a.running);
    }
    buf_free(&scratch);
    buf_free(&record);
    buf_free(&text);
}

/* ---- damage ---- */

static void path_of(const struct place *p, int file, char out[128]) { snprintf(out, 128, "%s/%s", p->folder, state_files[file]); }

static void restore(const struct place *p)
{
    char path[128];
    for (int f = 0; f < STATE_FILES; f++) {
        path_of(p, f, path);
        const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        assert_true(fd >= 0 && fd_write_all(fd, p->good[f].data, p->good[f].len));
        close(fd);
    }
}

static void flip(const struct place *p, int file, size_t at, int bit)
{
    char path[128];
    path_of(p, file, path);
    const unsigned char byte = (unsigned char)(p->good[file].data[at] ^ 1 << bit);
    const int fd = open(path, O_WRONLY);
    assert_true(fd >= 0 && pwrite(fd, &byte, 1, (off_t)at) == 1);
    close(fd);
}

static void cut(const struct place *p, int file, size_t at)
{
    char path[128];
    path_of(p, file, path);
    assert_int_equal(truncate(path, (off_t)at), 0);
}

enum { REFUSED = 10 };

static void refused(const struct err *e)
{
    MUST(e->exit_status == EXIT_IO && e->text[0]);
    _exit(REFUSED);
}

/* Reads, writes on, reads again. */
static void use(const struct place *p)
{
    struct err e = {0}, peeked = {0};
    struct state *s;
    struct state_counts c;
    char id[33];
    if (state_peek(p->folder, STATE_READ, &c, id, &peeked) == RC_OK)
        MUST(c.jobs == JOBS && c.pending == JOBS - ANSWERED && c.prompt_tokens == ANSWERED * (ANSWERED - 1) / 2);
    else
        MUST(peeked.exit_status == EXIT_IO && peeked.text[0]);
    if (state_open(p->folder, STATE_READ, &s, &e) != RC_OK) refused(&e);
    all_right(s, ANSWERED);
    state_close(s);
    if (state_open(p->folder, STATE_WRITE, &s, &e) != RC_OK) refused(&e);
    all_right(s, ANSWERED);
    for (int i = 0; i < AFTERWARDS; i++) MUST(put(s, ANSWERED + i, &e) == RC_OK);
    MUST(register_jobs(s, JOBS - 1, &e) == RC_OK && register_jobs(s, JOBS, &e) == RC_OK);
    state_close(s);
    MUST(state_open(p->folder, STATE_READ, &s, &e) == RC_OK);
    all_right(s, ANSWERED + AFTERWARDS);
    state_close(s);
    _exit(0);
}

/* What the new state has is right, and what a damaged page or two can hold is the most that is missing. */
static void salvage(const struct place *p)
{
    char to[128];
    struct err e = {0};
    struct state_salvaged got;
    struct state *s;
    struct buf scratch = {0}, record = {0};
    bool seen[JOBS] = {false};
    size_t results = 0;
    snprintf(to, sizeof to, "%s/salvaged", p->base);
    if (state_salvage(p->folder, to, &got, &e) != RC_OK) {
        MUST(e.exit_status == EXIT_IO && e.text[0] && access(to, F_OK));
        MUST(p->cut >= 0 && p->cut < (long)p->good[0].len);
        _exit(0);
    }
    MUST(state_open(to, STATE_READ, &s, &e) == RC_OK);
    MUST(got.jobs == state_job_count(s));
    for (size_t k = 0; k < got.jobs; k++) {
        struct state_job j;
        unsigned char key[32];
        MUST(state_job_at(s, k, &scratch, &j, &e) == RC_OK && !strncmp(j.custom_id, "job-", 4));
        const int i = atoi(j.custom_id + 4);
        MUST(i >= 0 && i < JOBS && !seen[i]);
        key_of(i, key);
        MUST(!memcmp(key, j.key, sizeof key));
        seen[i] = true;
        if (!has_result(s, key, &scratch)) continue;
        MUST(i < ANSWERED);
        result_right(s, i, &scratch, &record);
        results++;
    }
    MUST(results == got.results);
    MUST(p->cut >= 0 || (results + MOST_LOST >= ANSWERED && got.jobs + MOST_LOST >= JOBS));
    buf_free(&scratch);
    buf_free(&record);
    state_close(s);
    _exit(0);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

/* True: refused. */
static bool child(const struct place *p, void (*fn)(const struct place *p), const char *what, int file, size_t at)
{
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(60);
        fn(p);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || (WEXITSTATUS(status) && WEXITSTATUS(status) != REFUSED))
        fail_msg("%s: %s at %zu: status %x", state_files[file], what, at, (unsigned)status);
    return WEXITSTATUS(status) == REFUSED;
}

/* True: refused, and salvaged. */
static bool used_or_salvaged(struct place *p, const char *what, int file, size_t at)
{
    char to[128];
    if (!child(p, use, what, file, at)) return false;
    assert_false(child(p, salvage, what, file, at));
    snprintf(to, sizeof to, "%s/salvaged", p->base);
    nftw(to, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return true;
}

static size_t next_byte(size_t at, size_t fine, size_t step) { return every_byte || at % 4096 < fine ? at + 1 : at + step; }

static size_t flip_all(struct place *p, int file, size_t fine, size_t step)
{
    size_t n = 0;
    for (size_t at = 0; at < p->good[file].len; at = next_byte(at, fine, step)) {
        const int bits = at % 4096 < fine ? 8 : 1;
        for (int b = 0; b < bits; b++) {
            restore(p);
            flip(p, file, at, bits == 8 ? b : (int)(at % 8));
            n += used_or_salvaged(p, "a flip", file, at);
        }
    }
    return n;
}

/* Every bit of data.mdb's bytes from .. to - 1. */
static void flip_each(struct place *p, size_t from, size_t to)
{
    for (size_t at = from; at < to; at++)
        for (int b = 0; b < 8; b++) {
            restore(p);
            flip(p, 0, at, b);
            used_or_salvaged(p, "a flip", 0, at);
        }
}

static size_t cut_all(struct place *p, int file, size_t fine, size_t step)
{
    size_t n = 0;
    for (size_t at = 0; at < p->good[file].len; at = next_byte(at, fine, step)) {
        restore(p);
        cut(p, file, at);
        p->cut = file == 0 ? (long)at : -1;
        n += used_or_salvaged(p, "a cut", file, at);
    }
    return n;
}

/* In memory where that can be: thousands of commits. */
static int setup(void **ctx)
{
    struct place *p = calloc(1, sizeof *p);
    if (!p) return -1;
    snprintf(p->base, sizeof p->base, "%s/test_state_damage.XXXXXX", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
    if (!mkdtemp(p->base)) return -1;
    snprintf(p->folder, sizeof p->folder, "%s/state", p->base);
    make_state(p->folder);
    for (int f = 0; f < STATE_FILES; f++) {
        char path[128];
        path_of(p, f, path);
        p->cut = -1;
        if (file_read(path, 1 << 24, &p->good[f], NULL) != RC_OK) return -1;
    }
    *ctx = p;
    return 0;
}

static int teardown(void **ctx)
{
    struct place *p = *ctx;
    nftw(p->base, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    for (int f = 0; f < STATE_FILES; f++) buf_free(&p->good[f]);
    free(p);
    return 0;
}

static void test_undamaged(void **ctx)
{
    struct place *p = *ctx;
    assert_true(p->good[0].len > 20 * 4096);
    assert_false(child(p, use, "nothing", 0, 0));
}

static void test_data_flipped(void **ctx) { assert_true(flip_all(*ctx, 0, 18, 191) > 100); }
static void test_meta_flipped(void **ctx)
{
    /* The two pages that say where everything is, in full. */
    flip_each(*ctx, 0, 160);
    flip_each(*ctx, 4096, 4096 + 160);
}

static uint64_t number_at(const struct place *p, size_t at, size_t n_bytes)
{
    uint64_t v = 0;
    assert_true(at + n_bytes <= p->good[0].len);
    memcpy(&v, p->good[0].data + at, n_bytes);
    return v;
}

/* Sizes, flags and keys of the list of free pages: nothing reads it before something is written. */
static void test_free_list_flipped(void **ctx)
{
    enum { PAGE_BYTES = 4096, ROOT_AT = 80, LOWER_AT = 12, HEADER_BYTES = 16, NODE_AND_KEY_BYTES = 16 };
    struct place *p = *ctx;
    size_t nodes = 0;
    for (size_t meta = 0; meta < 2; meta++) {
        const size_t page = (size_t)number_at(p, meta * PAGE_BYTES + ROOT_AT, 8) * PAGE_BYTES;
        const size_t n = ((size_t)number_at(p, page + LOWER_AT, 2) - HEADER_BYTES) / 2;
        for (size_t i = 0; i < n; i++, nodes++) {
            const size_t node = page + (size_t)number_at(p, page + HEADER_BYTES + 2 * i, 2);
            flip_each(p, node, node + NODE_AND_KEY_BYTES);
        }
    }
    assert_true(nodes > 1);
}

static void put_root(struct place *p, size_t at, uint64_t root)
{
    char path[128];
    path_of(p, 0, path);
    const int fd = open(path, O_WRONLY);
    assert_true(fd >= 0 && pwrite(fd, &root, sizeof root, (off_t)at) == sizeof root);
    close(fd);
}

/* What says where the small table of counts is, in every page that has it: a root of old may still be whole. */
static void test_root_damaged(void **ctx)
{
    enum { NAME_BYTES = 4, TABLE_BYTES = 48, ROOT_AT = 40, PAGE_BYTES = 4096 };
    static const unsigned char node[] = {TABLE_BYTES, 0, 0, 0, 2, 0, NAME_BYTES, 0, 'm', 'e', 't', 'a'};
    struct place *p = *ctx;
    size_t found = 0;
    for (size_t at = 8192; at + sizeof node + TABLE_BYTES <= p->good[0].len; at++) {
        if (memcmp(p->good[0].data + at, node, sizeof node) != 0) continue;
        const size_t table = at + sizeof node;
        found++;
        for (uint64_t page = 0; page < p->good[0].len / PAGE_BYTES; page++) {
            restore(p);
            put_root(p, table + ROOT_AT, page);
            used_or_salvaged(p, "another root", 0, table + ROOT_AT);
        }
        flip_each(p, table, table + TABLE_BYTES);
    }
    assert_true(found > 1);
}

static void test_data_cut(void **ctx) { assert_true(cut_all(*ctx, 0, 1, 1501) > 20); }
static void test_lock_flipped(void **ctx) { assert_int_equal(flip_all(*ctx, 1, 0, 29), 0); }
static void test_lock_cut(void **ctx) { assert_int_equal(cut_all(*ctx, 1, 0, 211), 0); }
static void test_id_flipped(void **ctx)
{
    struct place *p = *ctx;
    assert_int_equal(flip_all(p, 2, 64, 1), 8 * (p->good[2].len - 1)); /* not of its line end */
}
static void test_id_cut(void **ctx)
{
    struct place *p = *ctx;
    assert_int_equal(cut_all(p, 2, 64, 1), p->good[2].len);
}

/* The check finds no damage where a writer goes on as fast as it can. */
static void test_busy_writer(void **ctx)
{
    struct place *p = *ctx;
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct state *s;
        struct err e = {0};
        alarm(120);
        MUST(state_open(p->folder, STATE_WRITE, &s, &e) == RC_OK);
        for (int i = 0;; i++) MUST((i % 50 ? put(s, i % JOBS, &e) : register_jobs(s, i % 100 ? JOBS : JOBS - 1, &e)) == RC_OK);
    }
    for (int i = 0; i < 400; i++) {
        struct state *s;
        struct err e = {0};
        struct state_counts c;
        char id[33];
        if (state_peek(p->folder, STATE_READ, &c, id, &e) != RC_OK) fail_msg("peek %d: %s: %s", i, e.code, e.text);
        if (state_open(p->folder, STATE_READ, &s, &e) != RC_OK) fail_msg("open %d: %s: %s", i, e.code, e.text);
        state_close(s);
    }
    int status;
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    struct state *s;
    assert_int_equal(state_open(p->folder, STATE_WRITE, &s, NULL), RC_OK);
    state_close(s);
}

int main(int argc, char **argv)
{
    (void)argv;
    every_byte = argc > 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_undamaged, setup, teardown),
        cmocka_unit_test_setup_teardown(test_busy_writer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_data_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_meta_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_free_list_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_root_damaged, setup, teardown),
        cmocka_unit_test_setup_teardown(test_data_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lock_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lock_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(test_id_flipped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_id_cut, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
