/* job_set: every line leaves one entry or one problem; ids across files; pins; lines that change under the run. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "job_set.h"

enum { MAX_SEEN = 64 };

struct place {
    char base[64];
    char a[96], b[96], doc[96], state[96];
    size_t n_seen;
    struct err seen[MAX_SEEN];
};

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static int setup(void **ctx)
{
    struct place *p = calloc(1, sizeof *p);
    snprintf(p->base, sizeof p->base, "/tmp/test_job_set.XXXXXX");
    if (!mkdtemp(p->base)) return -1;
    snprintf(p->a, sizeof p->a, "%s/a.jsonl", p->base);
    snprintf(p->b, sizeof p->b, "%s/b.jsonl", p->base);
    snprintf(p->doc, sizeof p->doc, "%s/doc.txt", p->base);
    snprintf(p->state, sizeof p->state, "%s/state", p->base);
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

static void write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void remember(void *ctx, const struct err *problem)
{
    struct place *p = ctx;
    assert_true(p->n_seen < MAX_SEEN);
    p->seen[p->n_seen++] = *problem;
}

static enum rc load(struct place *p, bool skip, bool both, struct job_set *set, struct err *e)
{
    struct options o = {.files = {p->a, p->b}, .n_files = both ? 2 : 1, .skip_bad_lines = skip};
    p->n_seen = 0;
    *e = (struct err){0};
    return job_set_load(&o, NULL, remember, p, set, e);
}

static void expect_seen(const struct place *p, size_t i, const char *file, int line, int column, const char *code)
{
    if (i >= p->n_seen) fail_msg("only %zu problems", p->n_seen);
    const struct err *e = &p->seen[i];
    if (strcmp(e->source, file) || e->line != line || e->column != column || strcmp(e->code, code))
        fail_msg("%zu: %s:%d:%d: %s: %s", i, e->source, (int)e->line, (int)e->column, e->code, e->text);
}

#define CHAT(id, content)                                                                                              \
    "{\"custom_id\":\"" id                                                                                             \
    "\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":"                       \
    "\"user\",\"content\":" content "}]}}\n"

static void test_good_files(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set;
    struct err e;
    write_file(p->a, CHAT("j1", "\"x\"") "\n\r\n" CHAT("j2", "\"y\""));
    write_file(p->b, CHAT("j3", "\"z\""));
    assert_int_equal(load(p, false, true, &set, &e), RC_OK);
    assert_int_equal(p->n_seen, 0);
    assert_int_equal(set.n_entries, 3);
    assert_int_equal(set.n_sources, 2);
    assert_string_equal(set.entries[1].custom_id, "j2");
    assert_int_equal(set.entries[1].line, 4);
    assert_int_equal(set.entries[2].source, 1);
    for (size_t i = 0; i < 3; i++) {
        struct job_spec spec;
        struct job_fault fault = {0};
        assert_true(job_set_spec(&set, i, &spec, &fault));
        assert_string_equal(spec.custom_id, set.entries[i].custom_id);
        job_spec_free(&spec);
    }
    assert_memory_not_equal(set.entries[0].line_digest, set.entries[1].line_digest, 32);
    job_set_free(&set);
}

static void test_problems_have_places(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set;
    struct err e;
    write_file(p->a, CHAT("j1", "\"x\"") "{\"custom_id\":\"j2\"\n"
                                         "[1]\n" CHAT("j1", "\"other\""));
    write_file(p->b,
               "{\"method\":\"POST\",\"custom_id\":\"j1\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"x\"}}\n");
    assert_int_equal(load(p, false, true, &set, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_JOB_FILE);
    assert_int_equal(set.problems, 4);
    assert_int_equal(p->n_seen, 4);
    expect_seen(p, 0, p->a, 2, (int)p->seen[0].column, "invalid_json");
    assert_true(p->seen[0].column > 1);
    expect_seen(p, 1, p->a, 3, 1, "wrong_type");
    expect_seen(p, 2, p->a, 4, 2, "duplicate_custom_id");
    expect_seen(p, 3, p->b, 1, 18, "duplicate_custom_id");
    char first[128];
    snprintf(first, sizeof first, "%s:1", p->a);
    assert_non_null(strstr(p->seen[3].text, first)); /* both places */
    job_set_free(&set);
}

static void test_skipped_lines_become_entries(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set;
    struct err e;
    char id[128];
    write_file(p->a, CHAT("j1", "\"x\"") "{\"custom_id\":\"j2\"}\n"
                                         "nonsense\n" CHAT("j1", "\"other\"") CHAT("j9", "\"x\""));
    assert_int_equal(load(p, true, false, &set, &e), RC_OK);
    assert_int_equal(set.n_entries, 5);
    assert_int_equal(set.problems, 3);
    assert_int_equal(set.faults, 0);
    assert_string_equal(set.entries[1].custom_id, "j2");
    assert_true(set.entries[1].bad_line);
    assert_int_equal(set.entries[1].fault->status, 400);
    assert_string_equal(set.entries[1].fault->code, "missing_field");
    snprintf(id, sizeof id, "line-3@%s", p->a);
    assert_string_equal(set.entries[2].custom_id, id);
    snprintf(id, sizeof id, "line-4@%s", p->a);
    assert_string_equal(set.entries[3].custom_id, id);
    assert_string_equal(set.entries[3].fault->code, "duplicate_custom_id");
    assert_null(set.entries[4].fault);
    struct job_spec spec;
    struct job_fault fault = {0};
    assert_false(job_set_spec(&set, 2, &spec, &fault));
    assert_string_equal(fault.code, "invalid_json");
    job_set_free(&set);
}

static void test_faults_are_the_jobs_own(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set;
    struct err e;
    write_file(
        p->a,
        CHAT("j1",
             "[{\"type\":\"document\",\"path\":\"none.txt\"}]") "{\"custom_id\":\"j\xC3\xA4\",\"method\":\"POST\","
                                                                "\"url\":\"/v1/"
                                                                "completions\",\"body\":{\"prompt\":\"\\\"wibble\\\":"
                                                                "\",\"wibble\":1}}\n"
        "{\"custom_id\":\"j3\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"x\"},\"tandem\":{\"timeout\":1}}\n");
    assert_int_equal(load(p, false, false, &set, &e), RC_OK);
    assert_int_equal(set.n_entries, 3);
    assert_int_equal(set.faults, 3);
    assert_int_equal(set.problems, 0);
    expect_seen(p, 0, p->a, 1, 72, "document_not_found");
    expect_seen(p, 1, p->a, 2, 90, "unknown_parameter");
    expect_seen(p, 2, p->a, 3, 81, "unknown_parameter");
    assert_int_equal(p->seen[0].exit_status, 0);
    assert_int_equal(set.entries[0].fault->status, 422);
    struct err place;
    job_set_fault_place(&set, 1, set.entries[1].fault, &place);
    assert_int_equal(place.line, 2);
    assert_int_equal(place.column, 90);
    job_set_free(&set);
}

static void test_many_ids(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set;
    struct err e;
    FILE *f = fopen(p->a, "w");
    for (int i = 0; i < 3000; i++) fprintf(f, CHAT("id-%d", "\"x\""), i);
    fprintf(f, CHAT("id-%d", "\"x\""), 1234);
    fclose(f);
    assert_int_equal(load(p, true, false, &set, &e), RC_OK);
    assert_int_equal(set.n_entries, 3001);
    assert_int_equal(p->n_seen, 1);
    expect_seen(p, 0, p->a, 3001, 2, "duplicate_custom_id");
    assert_non_null(strstr(p->seen[0].text, "a.jsonl:1235"));
    job_set_free(&set);
}

static void test_missing_file(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set;
    struct err e;
    write_file(p->a, CHAT("j1", "\"x\""));
    assert_int_not_equal(load(p, false, true, &set, &e), RC_OK);
    assert_int_equal(e.exit_status, EXIT_NO_INPUT);
    assert_non_null(strstr(e.text, p->b));
    job_set_free(&set);
}

static void test_changed_line(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set;
    struct err e;
    struct job_spec spec;
    struct job_fault fault = {0};
    write_file(p->a, CHAT("j1", "\"x\"") CHAT("j2", "\"y\""));
    assert_int_equal(load(p, false, false, &set, &e), RC_OK);
    FILE *f = fopen(p->a, "r+");
    assert_int_equal(fseek(f, set.entries[1].byte + (long)set.entries[1].len - 6, SEEK_SET), 0);
    fputc('z', f);
    fclose(f);
    assert_true(job_set_spec(&set, 0, &spec, &fault));
    job_spec_free(&spec);
    assert_false(job_set_spec(&set, 1, &spec, &fault));
    assert_int_equal(fault.status, 422);
    assert_string_equal(fault.code, "line_changed");
    assert_int_equal(truncate(p->a, 10), 0);
    fault = (struct job_fault){0};
    assert_false(job_set_spec(&set, 0, &spec, &fault));
    assert_string_equal(fault.code, "line_changed");
    job_set_free(&set);
    /* Replaced by rename: the run goes on with what it opened. */
    write_file(p->a, CHAT("j1", "\"x\""));
    assert_int_equal(load(p, false, false, &set, &e), RC_OK);
    write_file(p->b, "gone\n");
    assert_int_equal(rename(p->b, p->a), 0);
    fault = (struct job_fault){0};
    assert_true(job_set_spec(&set, 0, &spec, &fault));
    job_spec_free(&spec);
    job_set_free(&set);
}

/* As CHAT, in another order and with something more. */
#define OTHERWISE(id, more)                                                                                             \
    "{\"body\": {\"messages\":[{\"content\":\"x\", \"role\":\"user\"}]}, \"url\":\"/v1/chat/completions\","             \
    "\"method\":\"POST\", \"custom_id\":\"" id "\", " more "}\n"

static void test_keys(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set;
    struct err e;
    unsigned char keys[4][32];
    write_file(p->a, CHAT("j1", "\"x\"") CHAT("j2", "\"x\"") CHAT("j3", "\"y\""));
    write_file(p->b, OTHERWISE("j4", "\"note\":1") OTHERWISE("j5", "\"tandem\":{\"timeout_s\":5}")
               OTHERWISE("j6", "\"tandem\":{ \"timeout_s\" : 5}") OTHERWISE("j7", "\"tandem\":{\"timeout_s\":6}"));
    assert_int_equal(load(p, false, true, &set, &e), RC_OK);
    for (size_t i = 0; i < 3; i++) job_set_key(&set.entries[i], "id", keys[i]);
    assert_memory_not_equal(keys[0], keys[1], 32);
    job_set_key(&set.entries[0], "other", keys[3]);
    assert_memory_not_equal(keys[0], keys[3], 32);
    assert_memory_equal(set.entries[0].body_digest, set.entries[1].body_digest, 32);
    assert_memory_equal(set.entries[0].body_digest, set.entries[3].body_digest, 32); /* order and spaces do not count */
    assert_memory_not_equal(set.entries[0].body_digest, set.entries[2].body_digest, 32);
    /* Another limit is another job: a time-out is answered by a longer one. */
    assert_memory_not_equal(set.entries[0].body_digest, set.entries[4].body_digest, 32);
    assert_memory_equal(set.entries[4].body_digest, set.entries[5].body_digest, 32);
    assert_memory_not_equal(set.entries[4].body_digest, set.entries[6].body_digest, 32);
    job_set_free(&set);
}

static void test_pinned_documents(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set;
    struct err e;
    struct state *s = NULL;
    unsigned char key[32], pinned[32];
    write_file(p->a, CHAT("j1", "[{\"type\":\"document\",\"path\":\"doc.txt\"}]"));
    assert_int_equal(state_open(p->state, STATE_WRITE, &s, &e), RC_OK);

    /* Missing at first: nothing is pinned, and a document put there later makes another key. */
    assert_int_equal(load(p, false, false, &set, &e), RC_OK);
    assert_int_equal(set.faults, 1);
    assert_int_equal(job_set_register(&set, s, "identity", &e), RC_OK);
    memcpy(key, set.entries[0].key, 32);
    job_set_free(&set);

    write_file(p->doc, "first text");
    assert_int_equal(load(p, false, false, &set, &e), RC_OK);
    assert_int_equal(set.entries[0].document_digests_bytes, 32);
    assert_int_equal(job_set_register(&set, s, "identity", &e), RC_OK);
    assert_memory_not_equal(key, set.entries[0].key, 32);
    memcpy(key, set.entries[0].key, 32);
    memcpy(pinned, set.entries[0].document_digests, 32);
    job_set_free(&set);

    /* Changed later: the pin and the key stay. */
    write_file(p->doc, "second text");
    assert_int_equal(load(p, false, false, &set, &e), RC_OK);
    assert_memory_not_equal(pinned, set.entries[0].document_digests, 32);
    assert_int_equal(job_set_register(&set, s, "identity", &e), RC_OK);
    assert_memory_equal(pinned, set.entries[0].document_digests, 32);
    assert_memory_equal(key, set.entries[0].key, 32);
    job_set_free(&set);

    /* Another line with the same id is another job. */
    write_file(p->a, CHAT("j1", "[{\"type\":\"document\",\"path\":\"doc.txt\"},{\"type\":\"text\",\"text\":\"?\"}]"));
    assert_int_equal(load(p, false, false, &set, &e), RC_OK);
    assert_int_equal(job_set_register(&set, s, "identity", &e), RC_OK);
    assert_memory_not_equal(pinned, set.entries[0].document_digests, 32);
    job_set_free(&set);

    struct state_job job;
    assert_int_equal(state_job_count(s), 1);
    struct buf scratch = {0};
    assert_int_equal(state_job_at(s, 0, &scratch, &job, &e), RC_OK);
    assert_string_equal(job.custom_id, "j1");
    assert_string_equal(job.source, p->a);
    buf_free(&scratch);
    state_close(s);
}

static enum rc load_known(struct place *p, struct state *known, struct job_set *set, struct err *e)
{
    struct options o = {.files = {p->a}, .n_files = 1};
    p->n_seen = 0;
    *e = (struct err){0};
    return job_set_load(&o, known, remember, p, set, e);
}

static void answer(struct state *s, const struct job_entry *entry, enum state_result_kind kind)
{
    const struct state_result r = {.kind = kind, .record = "{}", .record_len = 2, .timing = "{}", .timing_len = 2};
    struct err e = {0};
    if (state_put_result(s, entry->key, &r, &e) != RC_OK) fail_msg("%s", e.text);
}

/* Lines with an answer are taken over, whole, and only where they are the same line in the same place. */
static void test_settled_lines(void **ctx)
{
    struct place *p = *ctx;
    struct job_set set, again;
    struct err e;
    struct state *s = NULL;
    write_file(p->doc, "text");
    static const char lines[] = CHAT("j1", "[{\"type\":\"document\",\"path\":\"doc.txt\"}]") CHAT("j2", "\"x\"") CHAT("j3", "\"y\"");
    write_file(p->a, lines);
    assert_int_equal(state_open(p->state, STATE_WRITE, &s, &e), RC_OK);
    assert_int_equal(load_known(p, s, &set, &e), RC_OK);
    assert_int_equal(job_set_register(&set, s, "identity", &e), RC_OK);
    answer(s, &set.entries[0], STATE_OUTPUT);
    answer(s, &set.entries[1], STATE_ERROR);

    assert_int_equal(load_known(p, s, &again, &e), RC_OK);
    assert_true(again.entries[0].settled && !again.entries[1].settled && !again.entries[2].settled);
    assert_int_equal(job_set_register(&again, s, "identity", &e), RC_OK);
    assert_memory_equal(again.input_digest, set.input_digest, 32);
    for (size_t i = 0; i < 3; i++) {
        const struct job_entry *a = &set.entries[i], *b = &again.entries[i];
        assert_memory_equal(a->key, b->key, 32);
        assert_memory_equal(a->line_digest, b->line_digest, 32);
        assert_string_equal(a->custom_id, b->custom_id);
        assert_true(a->line == b->line && a->byte == b->byte && a->len == b->len && a->n_documents == b->n_documents);
        assert_int_equal(a->document_digests_bytes, b->document_digests_bytes);
    }
    assert_memory_equal(again.entries[0].document_digests, set.entries[0].document_digests, 32);
    job_set_free(&again);

    /* Doubled, and moved. */
    char text[sizeof lines + 200];
    snprintf(text, sizeof text, "%s%s", lines, CHAT("j1", "\"x\""));
    write_file(p->a, text);
    assert_int_equal(load_known(p, s, &again, &e), RC_BAD_INPUT);
    assert_int_equal(p->n_seen, 1);
    assert_string_equal(p->seen[0].code, "duplicate_custom_id");
    job_set_free(&again);
    snprintf(text, sizeof text, "%s%s", CHAT("j0", "\"x\""), lines);
    write_file(p->a, text);
    assert_int_equal(load_known(p, s, &again, &e), RC_OK);
    for (size_t i = 0; i < 4; i++) assert_false(again.entries[i].settled);
    job_set_free(&again);

    /* In its place, after another of its name. */
    answer(s, &set.entries[1], STATE_OUTPUT);
    write_file(p->a, CHAT("j2", "\"z\"") CHAT("j2", "\"x\"") CHAT("j3", "\"y\""));
    assert_int_equal(load_known(p, s, &again, &e), RC_BAD_INPUT);
    assert_int_equal(p->n_seen, 1);
    expect_seen(p, 0, p->a, 2, 2, "duplicate_custom_id");
    job_set_free(&again);
    job_set_free(&set);
    state_close(s);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_good_files, setup, teardown),
        cmocka_unit_test_setup_teardown(test_problems_have_places, setup, teardown),
        cmocka_unit_test_setup_teardown(test_skipped_lines_become_entries, setup, teardown),
        cmocka_unit_test_setup_teardown(test_faults_are_the_jobs_own, setup, teardown),
        cmocka_unit_test_setup_teardown(test_many_ids, setup, teardown),
        cmocka_unit_test_setup_teardown(test_missing_file, setup, teardown),
        cmocka_unit_test_setup_teardown(test_changed_line, setup, teardown),
        cmocka_unit_test_setup_teardown(test_keys, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pinned_documents, setup, teardown),
        cmocka_unit_test_setup_teardown(test_settled_lines, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
