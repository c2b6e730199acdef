/* export: what members hold, that one state gives the same bytes, and that nothing foreign is replaced. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <ftw.h>
#include <jansson.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "archive.h"
#include "export.h"
#include "state.h"

struct place {
    char base[64];
    struct state *state;
    char path[160]; /* scratch of in() */
};

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static const struct export_options plain = {0}, final = {.final = true};

static const char *in(struct place *p, const char *name)
{
    snprintf(p->path, sizeof p->path, "%s/%s", p->base, name);
    return p->path;
}

static void put(struct state *s, int i, enum state_result_kind kind, const char *record, const char *timing)
{
    unsigned char key[32] = {(unsigned char)i, 9};
    struct state_result r = {
        .kind = kind, .record = record, .record_len = strlen(record), .timing = timing, .timing_len = strlen(timing)};
    struct err e = {0};
    if (state_put_result(s, key, &r, &e) != RC_OK) fail_msg("%s", e.text);
}

static void job_at(const void *ctx, size_t i, struct state_job *out)
{
    static const char *const ids[] = {"j0", "j1", "j2", "j3", "j4", "gone"};
    (void)ctx;
    *out = (struct state_job){.key = {i < 5 ? (unsigned char)i : 77, 9}, .custom_id = ids[i], .source = "a.jsonl", .line = (int64_t)i + 1};
}

static void register_jobs(struct state *s, size_t n)
{
    const struct state_job_list jobs = {n, job_at, NULL};
    const unsigned char digest[32] = {0xAB, 0x01};
    struct err e = {0};
    if (state_register(s, &jobs, digest, &e) != RC_OK) fail_msg("%s", e.text);
}

/* Five jobs: 0 and 3 answered, 1 failed, 2 pending, 4 answered; and one result that no present file asks for. */
static void fill(struct state *s)
{
    struct err e = {0};
    if (state_bind_identity(s, "version=1\nmodel=abc\n", &e) != RC_OK) fail_msg("%s", e.text);
    register_jobs(s, 6);
    put(s, 4, STATE_OUTPUT, "{\"o\":4}", "{\"t\":4}");
    put(s, 0, STATE_OUTPUT, "{\"o\":0}", "{\"t\":0}");
    put(s, 3, STATE_OUTPUT, "{\"o\":\"\xE4\xBD\xA0\"}", "{\"t\":3}");
    put(s, 1, STATE_ERROR, "{\"e\":1}", "{\"t\":1}");
    put(s, 77, STATE_OUTPUT, "{\"o\":77}", "{\"t\":77}");
    register_jobs(s, 5);
}

static int setup(void **ctx)
{
    struct place *p = calloc(1, sizeof *p);
    struct err e = {0};
    snprintf(p->base, sizeof p->base, "/tmp/test_export.XXXXXX");
    if (!mkdtemp(p->base)) return -1;
    if (state_open(in(p, "state"), STATE_WRITE, &p->state, &e) != RC_OK) return -1;
    fill(p->state);
    *ctx = p;
    return 0;
}

static int teardown(void **ctx)
{
    struct place *p = *ctx;
    state_close(p->state);
    nftw(p->base, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(p);
    return 0;
}

static void export_good(struct state *s, const char *path, bool force)
{
    struct err e = {0};
    if (export_archive(s, path, &(struct export_options){.force = force}, &e) != RC_OK) fail_msg("%s: %s", path, e.text);
}

static void expect_member(const char *path, const char *name, const char *text)
{
    struct buf got = {0};
    struct err e = {0};
    if (archive_read_member(path, name, 1 << 20, &got, &e) != RC_OK) fail_msg("%s in %s: %s", name, path, e.text);
    assert_int_equal(got.len, strlen(text));
    assert_memory_equal(got.data ? got.data : "", text, got.len);
    buf_free(&got);
}

static const char output_text[] = "{\"o\":0}\n{\"o\":\"\xE4\xBD\xA0\"}\n{\"o\":4}\n";
static const char error_text[] = "{\"e\":1}\n";
static const char timing_text[] = "{\"t\":0}\n{\"t\":1}\n{\"t\":3}\n{\"t\":4}\n";

static void expect_all(const char *path)
{
    expect_member(path, "output.jsonl", output_text);
    expect_member(path, "error.jsonl", error_text);
    expect_member(path, "timing.jsonl", timing_text);
}

static const char *const suffixes[] = {"a.tar.zst", "a.tar.gz", "a.tar.xz", "a.tar", "a.zip", "a.folder"};
enum { N_SUFFIXES = sizeof suffixes / sizeof *suffixes };

static void test_members(void **ctx)
{
    struct place *p = *ctx;
    for (size_t i = 0; i < N_SUFFIXES; i++) {
        assert_int_equal(export_check(p->state, in(p, suffixes[i]), false, NULL), RC_OK);
        assert_int_not_equal(access(in(p, suffixes[i]), F_OK), 0);
        export_good(p->state, in(p, suffixes[i]), false);
        assert_int_equal(export_check(p->state, in(p, suffixes[i]), false, NULL), RC_OK);
        expect_all(in(p, suffixes[i]));
    }
}

static void sha_hex(const char *text, char hex[65])
{
    struct sha256_ctx sha;
    unsigned char digest[32];
    sha256_init(&sha);
    sha256_update(&sha, strlen(text), (const uint8_t *)text);
    sha256_digest(&sha, 32, digest);
    for (int i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

static void expect_in_manifest(const json_t *members, size_t i, const char *name, const char *text, int lines)
{
    char hex[65];
    const json_t *m = json_array_get(members, i);
    sha_hex(text, hex);
    assert_string_equal(json_string_value(json_object_get(m, "name")), name);
    assert_int_equal(json_integer_value(json_object_get(m, "bytes")), strlen(text));
    assert_int_equal(json_integer_value(json_object_get(m, "lines")), lines);
    assert_string_equal(json_string_value(json_object_get(m, "sha256")), hex);
}

static void test_manifest(void **ctx)
{
    struct place *p = *ctx;
    struct buf text = {0};
    json_error_t je;
    export_good(p->state, in(p, "a.tar.zst"), false);
    assert_int_equal(archive_read_member(in(p, "a.tar.zst"), "manifest.json", 1 << 20, &text, NULL), RC_OK);
    json_t *root = json_loadb(text.data, text.len, 0, &je);
    assert_non_null(root);
    assert_string_equal(json_string_value(json_object_get(root, "tool")), "tandem");
    assert_string_equal(json_string_value(json_object_get(root, "state_id")), state_id(p->state));
    const json_t *identity = json_object_get(root, "identity"), *counts = json_object_get(root, "counts");
    assert_string_equal(json_string_value(json_object_get(identity, "model")), "abc");
    assert_int_equal(json_object_size(identity), 2);
    assert_int_equal(strncmp(json_string_value(json_object_get(root, "input_sha256")), "ab0100", 6), 0);
    assert_int_equal(json_integer_value(json_object_get(counts, "jobs")), 5);
    assert_int_equal(json_integer_value(json_object_get(counts, "done")), 3);
    assert_int_equal(json_integer_value(json_object_get(counts, "failed")), 1);
    assert_int_equal(json_integer_value(json_object_get(counts, "pending")), 1);
    const json_t *members = json_object_get(root, "members");
    assert_int_equal(json_array_size(members), 3);
    expect_in_manifest(members, 0, "output.jsonl", output_text, 3);
    expect_in_manifest(members, 1, "error.jsonl", error_text, 1);
    expect_in_manifest(members, 2, "timing.jsonl", timing_text, 4);
    json_decref(root);
    buf_free(&text);
}

static void read_whole(const char *path, struct buf *out)
{
    struct err e = {0};
    if (file_read(path, 1 << 24, out, &e) != RC_OK) fail_msg("%s", e.text);
}

static void test_same_state_same_bytes(void **ctx)
{
    struct place *p = *ctx;
    static const char *const pairs[][2] = {{"a.tar.zst", "b.tar.zst"},
                                           {"a.tar.gz", "b.tar.gz"},
                                           {"a.tar.xz", "b.tar.xz"},
                                           {"a.tar", "b.tar"},
                                           {"a.zip", "b.zip"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        struct buf a = {0}, b = {0};
        export_good(p->state, in(p, pairs[i][0]), false);
        export_good(p->state, in(p, pairs[i][1]), false);
        read_whole(in(p, pairs[i][0]), &a);
        read_whole(in(p, pairs[i][1]), &b);
        assert_int_equal(a.len, b.len);
        assert_memory_equal(a.data, b.data, a.len);
        buf_free(&a);
        buf_free(&b);
    }
}

static ino_t inode(const char *path)
{
    struct stat st;
    assert_int_equal(lstat(path, &st), 0);
    return st.st_ino;
}

static void test_untouched_when_it_is_the_same(void **ctx)
{
    struct place *p = *ctx;
    for (size_t i = 0; i < N_SUFFIXES; i++) {
        export_good(p->state, in(p, suffixes[i]), false);
        /* A replaced file has another inode while this one is held open. */
        int held = open(in(p, suffixes[i]), O_RDONLY);
        ino_t before = inode(in(p, suffixes[i]));
        export_good(p->state, in(p, suffixes[i]), false);
        assert_true(inode(in(p, suffixes[i])) == before);
        export_good(p->state, in(p, suffixes[i]), true);
        assert_true(inode(in(p, suffixes[i])) == before);
        put(p->state, 2, STATE_OUTPUT, i % 2 ? "{\"x\":1}" : "{\"x\":2}", "{}");
        export_good(p->state, in(p, suffixes[i]), false);
        assert_true(inode(in(p, suffixes[i])) != before);
        close(held);
    }
}

static void expect_refused(struct place *p, const char *name, const char *shown)
{
    struct err e = {0}, early = {0};
    ino_t before = inode(in(p, name));
    assert_int_not_equal(export_check(p->state, in(p, name), false, &early), RC_OK);
    assert_int_equal(early.exit_status, EXIT_NO_OUTPUT);
    assert_int_not_equal(export_archive(p->state, in(p, name), &plain, &e), RC_OK);
    assert_int_equal(e.exit_status, EXIT_NO_OUTPUT);
    if (!strstr(e.text, shown)) fail_msg("%s", e.text);
    assert_true(inode(in(p, name)) == before);
}

static void test_foreign_output(void **ctx)
{
    struct place *p = *ctx;
    static const char *const names[] = {"f.tar.zst", "f.tar", "f.zip"};
    for (size_t i = 0; i < 3; i++) {
        FILE *f = fopen(in(p, names[i]), "w");
        fputs("somebody's data\n", f);
        fclose(f);
        expect_refused(p, names[i], "no whole archive of tandem");
        assert_int_equal(export_check(p->state, in(p, names[i]), true, NULL), RC_OK);
        export_good(p->state, in(p, names[i]), true);
        expect_all(in(p, names[i]));
    }
    assert_int_equal(mkdir(in(p, "dir"), 0700), 0);
    assert_int_equal(mkdir(in(p, "dir/sub"), 0700), 0);
    expect_refused(p, "dir", "no whole archive of tandem");
    assert_int_equal(rmdir(in(p, "dir/sub")), 0);
    export_good(p->state, in(p, "dir"), false); /* an empty folder has nothing to lose */
    expect_all(in(p, "dir"));
}

static void test_output_of_another_state(void **ctx)
{
    struct place *p = *ctx;
    struct state *other = NULL;
    struct err e = {0};
    assert_int_equal(state_open(in(p, "other"), STATE_WRITE, &other, &e), RC_OK);
    fill(other);
    for (size_t i = 0; i < N_SUFFIXES; i++) {
        export_good(other, in(p, suffixes[i]), false);
        expect_refused(p, suffixes[i], state_id(other));
        expect_refused(p, suffixes[i], "deleted and made again");
        export_good(p->state, in(p, suffixes[i]), true);
        export_good(p->state, in(p, suffixes[i]), false);
    }
    state_close(other);
}

static void test_damaged_members_are_replaced(void **ctx)
{
    struct place *p = *ctx;
    export_good(p->state, in(p, "a.folder"), false);
    assert_int_equal(unlink(in(p, "a.folder/output.jsonl")), 0);
    export_good(p->state, in(p, "a.folder"), false);
    expect_all(in(p, "a.folder"));
    FILE *f = fopen(in(p, "a.folder/timing.jsonl"), "r+");
    fputs("X", f);
    fclose(f);
    export_good(p->state, in(p, "a.folder"), false);
    expect_all(in(p, "a.folder"));
}

static void test_nothing_registered(void **ctx)
{
    struct place *p = *ctx;
    struct state *empty = NULL;
    struct err e = {0};
    assert_int_equal(state_open(in(p, "empty"), STATE_WRITE, &empty, &e), RC_OK);
    assert_int_not_equal(export_archive(empty, in(p, "a.tar"), &plain, &e), RC_OK);
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    assert_int_not_equal(access(in(p, "a.tar"), F_OK), 0);
    unsigned char digest[32] = {0};
    assert_int_equal(state_bind_identity(empty, "version=1\n", NULL), RC_OK);
    assert_int_equal(state_register(empty, &(struct state_job_list){0}, digest, NULL), RC_OK);
    export_good(empty, in(p, "a.tar"), false);
    expect_member(in(p, "a.tar"), "output.jsonl", "");
    ino_t before = inode(in(p, "a.tar"));
    export_good(empty, in(p, "a.tar"), false);
    assert_true(inode(in(p, "a.tar")) == before);
    state_close(empty);
}

/* Job 2, which is pending, has a record in a final archive, and nowhere else. */
static void test_final(void **ctx)
{
    struct place *p = *ctx;
    static const char expired[] =
        "{\"e\":1}\n{\"id\":\"batch_req_020900000000000000000000\",\"custom_id\":\"j2\",\"response\":null,\"error\":{\"code\":"
        "\"batch_expired\",\"message\":\"This request could not be executed before the completion window expired.\"}}\n";
    static const char timing[] =
        "{\"t\":0}\n{\"t\":1}\n{\"custom_id\":\"j2\",\"status\":0,\"queue_us\":0,\"tokenize_us\":0,\"prefill_us\":0,\"ttft_us\":0,"
        "\"decode_us\":0,\"tpot_us\":0,\"prompt_tokens\":0,\"cached_tokens\":0,\"resumed_tokens\":0,\"completion_tokens\":0,\"steps\":0,\"rounds\":0,"
        "\"drafted\":0,\"accepted\":0,\"sequences_in_step\":0,\"preemptions\":0,\"attempts\":3,\"rank_restarts\":1,\"group\":0}\n"
        "{\"t\":3}\n{\"t\":4}\n";
    const unsigned char key[32] = {2, 9};
    const struct state_attempts attempts = {.attempts = 3, .rank_restarts = 1};
    assert_int_equal(state_put_attempts(p->state, key, &attempts, NULL), RC_OK);
    for (size_t i = 0; i < N_SUFFIXES; i++) {
        struct state_counts c;
        assert_int_equal(export_archive(p->state, in(p, suffixes[i]), &final, NULL), RC_OK);
        expect_member(in(p, suffixes[i]), "output.jsonl", output_text);
        expect_member(in(p, suffixes[i]), "error.jsonl", expired);
        expect_member(in(p, suffixes[i]), "timing.jsonl", timing);
        ino_t before = inode(in(p, suffixes[i]));
        assert_int_equal(export_archive(p->state, in(p, suffixes[i]), &final, NULL), RC_OK);
        assert_true(inode(in(p, suffixes[i])) == before);
        assert_int_equal(state_count(p->state, &c, NULL), RC_OK);
        assert_int_equal(c.pending, 1);
        export_good(p->state, in(p, suffixes[i]), false);
        expect_all(in(p, suffixes[i]));
    }
}

/* Records as jobs were settled: 4, 0, 3, 1; one that is settled again moves to the end, one without a result comes after all. */
static void test_by_completion(void **ctx)
{
    struct place *p = *ctx;
    const struct export_options by_completion = {.by_completion = true}, both = {.by_completion = true, .final = true};
    for (size_t i = 0; i < N_SUFFIXES; i++) {
        assert_int_equal(export_archive(p->state, in(p, suffixes[i]), &by_completion, NULL), RC_OK);
        expect_member(in(p, suffixes[i]), "output.jsonl", "{\"o\":4}\n{\"o\":0}\n{\"o\":\"\xE4\xBD\xA0\"}\n");
        expect_member(in(p, suffixes[i]), "error.jsonl", error_text);
        expect_member(in(p, suffixes[i]), "timing.jsonl", "{\"t\":4}\n{\"t\":0}\n{\"t\":3}\n{\"t\":1}\n");
        ino_t before = inode(in(p, suffixes[i]));
        assert_int_equal(export_archive(p->state, in(p, suffixes[i]), &by_completion, NULL), RC_OK);
        assert_true(inode(in(p, suffixes[i])) == before);
        export_good(p->state, in(p, suffixes[i]), false); /* the other order of one state may replace it */
        expect_all(in(p, suffixes[i]));
    }
    put(p->state, 4, STATE_OUTPUT, "{\"o\":4}", "{\"t\":4}");
    register_jobs(p->state, 6);
    register_jobs(p->state, 5); /* registering changes no number */
    assert_int_equal(export_archive(p->state, in(p, "a.tar"), &by_completion, NULL), RC_OK);
    expect_member(in(p, "a.tar"), "output.jsonl", "{\"o\":0}\n{\"o\":\"\xE4\xBD\xA0\"}\n{\"o\":4}\n");
    expect_member(in(p, "a.tar"), "timing.jsonl", "{\"t\":0}\n{\"t\":3}\n{\"t\":1}\n{\"t\":4}\n");
    assert_int_equal(export_archive(p->state, in(p, "a.tar"), &both, NULL), RC_OK);
    struct buf timing = {0};
    assert_int_equal(archive_read_member(in(p, "a.tar"), "timing.jsonl", 1 << 20, &timing, NULL), RC_OK);
    assert_non_null(strstr(timing.data, "{\"t\":4}\n{\"custom_id\":\"j2\""));
    buf_free(&timing);
}

static void test_folder_missing(void **ctx)
{
    struct place *p = *ctx;
    struct err e = {0};
    assert_int_not_equal(export_check(p->state, in(p, "no/such/a.tar"), false, NULL), RC_OK);
    assert_int_not_equal(export_archive(p->state, in(p, "no/such/a.tar"), &plain, &e), RC_OK);
    assert_int_equal(e.exit_status, EXIT_NO_OUTPUT);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_members, setup, teardown),
        cmocka_unit_test_setup_teardown(test_manifest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_same_state_same_bytes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_untouched_when_it_is_the_same, setup, teardown),
        cmocka_unit_test_setup_teardown(test_foreign_output, setup, teardown),
        cmocka_unit_test_setup_teardown(test_output_of_another_state, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damaged_members_are_replaced, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nothing_registered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_final, setup, teardown),
        cmocka_unit_test_setup_teardown(test_by_completion, setup, teardown),
        cmocka_unit_test_setup_teardown(test_folder_missing, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
