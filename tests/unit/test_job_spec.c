/* Job lines: what is the file's mistake, what is the job's own, and what a good one means. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "job_spec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":"
#define HEAD_COMPLETION "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":"
#define HELLO "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"

/* --- the envelope ------------------------------------------------------------------------------------------------- */

static void expect_bad_bytes(const char *line, size_t len, const char *code, int64_t column)
{
    struct job_spec s;
    struct err e = {0};
    memset(&s, 0xA5, sizeof s);
    assert_int_equal(job_spec_parse(line, len, "jobs.jsonl", 7, 1000, &s, &e), RC_BAD_INPUT);
    if (strcmp(e.code, code)) fail_msg("%.60s: %s, not %s", line, e.code, code);
    if (e.column != column) fail_msg("%.60s: column %lld, not %lld", line, (long long)e.column, (long long)column);
    assert_string_equal(e.source, "jobs.jsonl");
    assert_int_equal(e.line, 7);
    assert_int_equal(e.exit_status, EXIT_JOB_FILE);
    assert_true(e.byte >= 1000 && e.byte <= 1000 + (int64_t)len);
    assert_null(s.custom_id);
    assert_null(s.canonical_body);
    assert_int_equal(s.n_messages, 0);
    assert_int_equal(job_spec_parse(line, len, NULL, 0, 0, &s, NULL), RC_BAD_INPUT);
}

static void expect_bad(const char *line, const char *code, int64_t column)
{
    expect_bad_bytes(line, strlen(line), code, column);
}

static void test_syntax(void **state)
{
    (void)state;
    expect_bad("", "invalid_json", 1);
    expect_bad("{", "invalid_json", 1);
    expect_bad("not json", "invalid_json", 3); /* the word read before it could be told */
    expect_bad("{\"a\":1}}", "invalid_json", 8);
    expect_bad("{\"a\":1} {\"b\":2}", "invalid_json", 9);
    expect_bad("{\"a\":1,\"a\":2}", "invalid_json", 10);
    expect_bad("{\"a\":1,\"\\u0061\":2}", "invalid_json", 15);
    expect_bad("{\"a\":NaN}", "invalid_json", 8);
    expect_bad("{\"a\":1e400}", "invalid_json", 10);
    expect_bad("{\"a\":\"\\ud83d\"}", "invalid_json", 13);
    expect_bad("{\"a\\u0000\":1}", "invalid_json", 10);
    expect_bad("{\"\xC3\xA4\xE2\x82\xAC\":x}", "invalid_json", 7); /* columns are characters */
    expect_bad("{\"a\":'b'}", "invalid_json", 6);
    expect_bad("{\"a\":1,}", "invalid_json", 8);
    expect_bad("\xEF\xBB\xBF{}", "invalid_json", 1);
}

static void test_hostile_bytes(void **state)
{
    (void)state;
    static const char nul_inside[] = "{\"a\":\"x\0y\"}", nul_after[] = "{\"a\":1}\0";
    struct job_spec s;
    struct err e = {0};
    assert_int_equal(job_spec_parse(nul_inside, sizeof nul_inside - 1, NULL, 1, 0, &s, &e), RC_BAD_INPUT);
    assert_string_equal(e.code, "invalid_json");
    e = (struct err){0};
    assert_int_equal(job_spec_parse(nul_after, sizeof nul_after - 1, NULL, 1, 0, &s, &e), RC_BAD_INPUT);
    assert_string_equal(e.code, "invalid_json");
    static const char *const broken[] = {"{\"a\":\"\xFF\"}", "{\"a\":\"\xC0\x80\"}", "{\"a\":\"\xED\xA0\x80\"}",
                                         "{\"a\":\"\xF4\x90\x80\x80\"}", "{\"a\":\"\xE2\x82"};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        e = (struct err){0};
        assert_int_equal(job_spec_parse(broken[i], strlen(broken[i]), NULL, 1, 0, &s, &e), RC_BAD_INPUT);
        assert_string_equal(e.code, "invalid_json");
        assert_string_equal(e.text, "not valid UTF-8");
    }
    enum { DEEP = 100000 };
    char *deep = malloc(DEEP);
    assert_non_null(deep);
    memset(deep, '[', DEEP);
    e = (struct err){0};
    assert_int_equal(job_spec_parse(deep, DEEP, NULL, 1, 0, &s, &e), RC_BAD_INPUT);
    assert_string_equal(e.text, "nested too deeply");
    free(deep);
}

/* Error texts go to logs: they must not quote what the line says. */
static void test_errors_quote_nothing(void **state)
{
    (void)state;
    static const char *const lines[] = {"{\"custom_id\":\"a\",\"secret\" \"word\"}", "{\"custom_id\": secret}",
                                        "{\"secret\":1,\"secret\":2}",
                                        "{\"custom_id\":\"secret\",\"method\":\"secret\"}",
                                        "{\"custom_id\":\"secret\",\"method\":\"POST\",\"url\":\"secret\"}"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        struct job_spec s;
        struct err e = {0};
        assert_int_equal(job_spec_parse(lines[i], strlen(lines[i]), NULL, 1, 0, &s, &e), RC_BAD_INPUT);
        assert_null(strstr(e.text, "secret"));
    }
}

static void test_envelope(void **state)
{
    (void)state;
    expect_bad("[1]", "wrong_type", 1);
    expect_bad("{}", "missing_field", 1);
    expect_bad("{\"custom_id\":1}", "wrong_type", 2);
    expect_bad("{ \"custom_id\":null}", "wrong_type", 3);
    expect_bad("{\"x\":\"custom_id\",\"y\":{\"custom_id\":2},\"custom_id\":1}", "wrong_type", 38);
    expect_bad("{\"\xC3\xA4\\\"\\\\\":1,\"custom_id\" : 1}", "wrong_type", 12);
    expect_bad("{\"\\u0063ustom_id\":1}", "wrong_type", 0); /* found, but not its place */
    expect_bad("{\"custom_id\":\"\"}", "empty_custom_id", 2);
    expect_bad("{\"custom_id\":\"a\\u0000b\"}", "invalid_custom_id", 2);
    expect_bad("{\"custom_id\":\"a\"}", "missing_field", 1);
    expect_bad("{\"custom_id\":\"a\",\"method\":true}", "wrong_type", 18);
    expect_bad("{\"custom_id\":\"a\",\"method\":\"GET\"}", "unknown_method", 18);
    expect_bad("{\"custom_id\":\"a\",\"method\":\"post\"}", "unknown_method", 18);
    expect_bad("{\"custom_id\":\"a\",\"method\":\"POST\"}", "missing_field", 1);
    expect_bad("{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/embeddings\"}", "unknown_url", 34);
    expect_bad("{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\\u0000\"}", "unknown_url", 34);
    expect_bad("{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\"}", "missing_field", 1);
    expect_bad(HEAD "[]}", "wrong_type", 63);
    expect_bad(HEAD "null}", "wrong_type", 63);
}

static void test_custom_id_length(void **state)
{
    (void)state;
    for (size_t n = 511; n <= 513; n++) {
        struct buf line = {0};
        struct job_spec s;
        struct err e = {0};
        buf_append_str(&line,
                       "{\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{\"prompt\":\"p\"},\"custom_id\":\"");
        for (size_t i = 0; i < n; i++) buf_append_str(&line, "i");
        buf_append_str(&line, "\"}");
        enum rc rc = job_spec_parse(line.data, line.len, NULL, 1, 0, &s, &e);
        assert_int_equal(rc, n <= 512 ? RC_OK : RC_BAD_INPUT);
        if (rc == RC_OK) assert_int_equal(strlen(s.custom_id), n);
        if (rc != RC_OK) assert_string_equal(e.code, "custom_id_too_long");
        job_spec_free(&s);
        buf_free(&line);
    }
}

/* --- a body that is fine ------------------------------------------------------------------------------------------ */

static void parse(const char *line, struct job_spec *s)
{
    struct err e = {0};
    if (job_spec_parse(line, strlen(line), "j", 1, 0, s, &e) != RC_OK) fail_msg("%s: %s %s", line, e.code, e.text);
}

static void expect_fine(const char *line, struct job_spec *s)
{
    parse(line, s);
    if (s->fault.status) fail_msg("%s: %s %s", line, s->fault.code, s->fault.message);
}

static void test_defaults(void **state)
{
    (void)state;
    struct job_spec s;
    expect_fine(HEAD "{" HELLO "}}", &s);
    assert_string_equal(s.custom_id, "a");
    assert_int_equal(s.endpoint, JOB_CHAT);
    assert_null(s.model);
    assert_int_equal(s.n_messages, 1);
    assert_string_equal(s.messages[0].role, "user");
    assert_int_equal(s.messages[0].n_parts, 1);
    assert_string_equal(s.messages[0].parts[0].text, "hi");
    assert_int_equal(s.messages[0].parts[0].text_len, 2);
    assert_null(s.messages[0].parts[0].document_path);
    assert_int_equal(s.max_tokens, 0);
    assert_true(s.sampling.temperature == 1.0f && s.sampling.top_p == 1.0f && s.sampling.min_p == 0.0f);
    assert_true(s.sampling.presence_penalty == 0.0f && s.sampling.frequency_penalty == 0.0f);
    assert_true(s.sampling.repetition_penalty == 1.0f);
    assert_int_equal(s.sampling.top_k, 0);
    assert_false(s.has_seed);
    assert_int_equal(s.n_stop, 0);
    job_spec_free(&s);
    assert_null(s.custom_id);
}

static void test_everything_given(void **state)
{
    (void)state;
    struct job_spec s;
    expect_fine(
        "{\"body\":{\"model\":\"m\",\"max_tokens\":9,\"max_completion_tokens\":8.0,\"temperature\":0,\"top_p\":0.5,"
        "\"top_k\":-1,\"min_p\":0.25,\"presence_penalty\":-2,\"frequency_penalty\":2,\"repetition_penalty\":1.5,"
        "\"seed\":9223372036854775807,\"stop\":[\"x\",\"\\n\\n\"],\"n\":1,\"stream\":false,\"logprobs\":null,"
        "\"top_logprobs\":null,\"response_format\":{\"type\":\"text\"},\"user\":\"u\",\"metadata\":{\"k\":\"v\"},"
        "\"store\":true,\"tools\":[],\"logit_bias\":{},\"messages\":[{\"role\":\"developer\",\"content\":\"d\"},"
        "{\"role\":\"system\",\"content\":\"\"},{\"role\":\"assistant\",\"content\":\"b\",\"tool_calls\":null,"
        "\"refusal\":null},{\"content\":[{\"type\":\"text\",\"text\":\"one\"},"
        "{\"path\":\"d/e.txt\",\"type\":\"document\"}],\"role\":\"user\"}]},\"unknown\":{\"top\":1},"
        "\"url\":\"/v1/chat/completions\",\"custom_id\":\"\xC3\xA4\\u00e4\",\"method\":\"POST\"}\r",
        &s);
    assert_string_equal(s.custom_id, "\xC3\xA4\xC3\xA4");
    assert_string_equal(s.model, "m");
    assert_int_equal(s.max_tokens, 8);
    assert_true(s.sampling.temperature == 0.0f && s.sampling.top_p == 0.5f && s.sampling.min_p == 0.25f);
    assert_true(s.sampling.presence_penalty == -2.0f && s.sampling.frequency_penalty == 2.0f);
    assert_true(s.sampling.repetition_penalty == 1.5f);
    assert_int_equal(s.sampling.top_k, 0);
    assert_true(s.has_seed && s.sampling.seed == 9223372036854775807u);
    assert_int_equal(s.n_stop, 2);
    assert_string_equal(s.stop[0], "x");
    assert_string_equal(s.stop[1], "\n\n");
    assert_int_equal(s.n_messages, 4);
    assert_string_equal(s.messages[0].role, "system");
    assert_string_equal(s.messages[1].role, "system");
    assert_int_equal(s.messages[1].parts[0].text_len, 0);
    assert_string_equal(s.messages[2].role, "assistant");
    assert_int_equal(s.messages[3].n_parts, 2);
    assert_string_equal(s.messages[3].parts[0].text, "one");
    assert_null(s.messages[3].parts[1].text);
    assert_string_equal(s.messages[3].parts[1].document_path, "d/e.txt");
    job_spec_free(&s);
}

static void test_completion(void **state)
{
    (void)state;
    struct job_spec s;
    expect_fine(HEAD_COMPLETION "{\"prompt\":\"once\",\"echo\":false,\"top_k\":40,\"stop\":\"end\",\"max_tokens\":5}}",
                &s);
    assert_int_equal(s.endpoint, JOB_COMPLETION);
    assert_int_equal(s.n_messages, 1);
    assert_string_equal(s.messages[0].role, "user");
    assert_string_equal(s.messages[0].parts[0].text, "once");
    assert_int_equal(s.sampling.top_k, 40);
    assert_int_equal(s.n_stop, 1);
    assert_string_equal(s.stop[0], "end");
    assert_int_equal(s.max_tokens, 5);
    job_spec_free(&s);
    expect_fine(HEAD_COMPLETION "{\"prompt\":[\"in a list\"]}}", &s);
    assert_string_equal(s.messages[0].parts[0].text, "in a list");
    job_spec_free(&s);
}

static void test_canonical_body(void **state)
{
    (void)state;
    struct job_spec s;
    expect_fine(HEAD "{ \"top_p\" : 0.5 , \"seed\":1, " HELLO ", \"metadata\":{\"b\":1,\"a\":[1, 2]}}}", &s);
    assert_string_equal(s.canonical_body, "{\"messages\":[{\"content\":\"hi\",\"role\":\"user\"}],"
                                          "\"metadata\":{\"a\":[1,2],\"b\":1},\"seed\":1,\"top_p\":0.5}");
    job_spec_free(&s);
    /* written otherwise, the same job */
    expect_fine(HEAD "{\"metadata\":{\"a\":[1,2],\"b\":1},\"top_p\":5e-1,\"seed\":1,"
                     "\"messages\":[{\"content\":\"\\u0068i\",\"role\":\"user\"}]}}",
                &s);
    assert_string_equal(s.canonical_body, "{\"messages\":[{\"content\":\"hi\",\"role\":\"user\"}],"
                                          "\"metadata\":{\"a\":[1,2],\"b\":1},\"seed\":1,\"top_p\":0.5}");
    job_spec_free(&s);
}

static void test_seed_of_id(void **state)
{
    (void)state;
    /* XXH3-64 of nothing is published as 2d06800538d394c2 */
    assert_true(job_spec_seed("") == 0x2d06800538d394c2u);
    assert_true(job_spec_seed("job-1") != job_spec_seed("job-2"));
    for (int i = 0; i < 200; i++) {
        char id[16];
        snprintf(id, sizeof id, "%d", i);
        assert_true(job_spec_seed(id) <= INT64_MAX);
    }
}

/* --- "tandem" ----------------------------------------------------------------------------------------------------- */

#define TIMEOUT(value) HEAD "{" HELLO "},\"tandem\":{\"timeout_s\":" value "}}"

static void expect_timeout(const char *line, int64_t timeout_us, const char *canonical)
{
    struct job_spec s;
    expect_fine(line, &s);
    assert_int_equal(s.timeout_us, timeout_us);
    if (canonical) assert_string_equal(s.canonical_tandem, canonical);
    else assert_null(s.canonical_tandem);
    job_spec_free(&s);
}

static void test_tandem(void **state)
{
    (void)state;
    expect_timeout(HEAD "{" HELLO "}}", 0, NULL);
    expect_timeout(HEAD "{" HELLO "},\"tandem\":null}", 0, NULL);
    expect_timeout(HEAD "{" HELLO "},\"tandem\":{}}", 0, NULL);
    expect_timeout(TIMEOUT("null"), 0, "{\"timeout_s\":null}");
    expect_timeout(TIMEOUT("30"), 30000000, "{\"timeout_s\":30}");
    expect_timeout(TIMEOUT("0.25"), 250000, "{\"timeout_s\":0.25}");
    expect_timeout(TIMEOUT("0.001"), 1000, "{\"timeout_s\":0.001}");
    expect_timeout(TIMEOUT("31536000"), 31536000000000, "{\"timeout_s\":31536000}");
}

#define PRIORITY(value) HEAD "{" HELLO "},\"tandem\":{\"priority\":" value "}}"

/* When a job starts is no part of what it is. */
static void test_priority(void **state)
{
    (void)state;
    static const struct {
        const char *line;
        int priority;
        const char *canonical;
    } good[] = {
        {HEAD "{" HELLO "},\"tandem\":{\"timeout_s\":30}}", 0, "{\"timeout_s\":30}"},
        {HEAD "{" HELLO "},\"tandem\":{\"timeout_s\":30,\"priority\":7}}", 7, "{\"timeout_s\":30}"},
        {PRIORITY("null"), 0, NULL},
        {PRIORITY("0"), 0, NULL},
        {PRIORITY("-1000"), -1000, NULL},
        {PRIORITY("1000"), 1000, NULL},
        {PRIORITY("5.0"), 5, NULL},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        struct job_spec s;
        expect_fine(good[i].line, &s);
        assert_int_equal(s.priority, good[i].priority);
        if (good[i].canonical) assert_string_equal(s.canonical_tandem, good[i].canonical);
        else assert_null(s.canonical_tandem);
        job_spec_free(&s);
    }
}

/* --- a body that is not ------------------------------------------------------------------------------------------- */

static void expect_fault(const char *line, const char *code, const char *param)
{
    struct job_spec s;
    parse(line, &s);
    if (s.fault.status != 400) fail_msg("%s: status %d", line, s.fault.status);
    if (strcmp(s.fault.code, code)) fail_msg("%s: %s, not %s", line, s.fault.code, code);
    if (strcmp(s.fault.param, param)) fail_msg("%s: %s, not %s", line, s.fault.param, param);
    assert_string_equal(s.fault.type, "invalid_request_error");
    assert_true(strlen(s.fault.message) > 10);
    assert_string_equal(s.custom_id, "a");
    assert_non_null(s.canonical_body);
    job_spec_free(&s);
}

static void test_bad_tandem(void **state)
{
    (void)state;
    static const char *const outside[] = {"0", "-1", "0.0009", "31536000.1", "1e300", "-1e300", "99999999999999999999"};
    static const char *const others[] = {"\"30\"", "true", "[30]", "{}"};
    static const char *const no_objects[] = {"30", "[]", "\"timeout_s\"", "true"};
    char line[600];
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        snprintf(line, sizeof line, TIMEOUT("%s"), outside[i]);
        expect_fault(line, "invalid_value", "tandem.timeout_s");
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        snprintf(line, sizeof line, TIMEOUT("%s"), others[i]);
        expect_fault(line, "invalid_type", "tandem.timeout_s");
    }
    for (size_t i = 0; i < sizeof no_objects / sizeof *no_objects; i++) {
        snprintf(line, sizeof line, HEAD "{" HELLO "},\"tandem\":%s}", no_objects[i]);
        expect_fault(line, "invalid_type", "tandem");
    }
    static const char *const no_priorities[] = {"1001", "-1001", "1e300", "99999999999999999999"};
    static const char *const no_integers[] = {"\"5\"", "true", "[5]", "{}", "0.5"};
    for (size_t i = 0; i < sizeof no_priorities / sizeof *no_priorities; i++) {
        snprintf(line, sizeof line, PRIORITY("%s"), no_priorities[i]);
        expect_fault(line, "invalid_value", "tandem.priority");
    }
    for (size_t i = 0; i < sizeof no_integers / sizeof *no_integers; i++) {
        snprintf(line, sizeof line, PRIORITY("%s"), no_integers[i]);
        expect_fault(line, "invalid_type", "tandem.priority");
    }
    /* A wrong one is part of what the job is, so that putting it right makes another job of it. */
    struct job_spec s;
    parse(PRIORITY("1001"), &s);
    assert_string_equal(s.canonical_tandem, "{\"priority\":1001}");
    job_spec_free(&s);
    expect_fault(HEAD "{" HELLO "},\"tandem\":{\"timeout\":30}}", "unknown_parameter", "tandem.timeout");
    expect_fault(HEAD "{" HELLO ",\"tandem\":{}}}", "unknown_parameter", "tandem"); /* inside body it is nobody's */
    expect_fault(HEAD "{" HELLO ",\"n\":2},\"tandem\":1}", "invalid_value", "n"); /* body comes first */
}

static void expect_field(const char *field, const char *code, const char *param)
{
    char line[600];
    snprintf(line, sizeof line, HEAD "{" HELLO ",%s}}", field);
    expect_fault(line, code, param);
}

static void expect_good_field(const char *field)
{
    char line[600];
    struct job_spec s;
    snprintf(line, sizeof line, HEAD "{" HELLO ",%s}}", field);
    expect_fine(line, &s);
    job_spec_free(&s);
}

static void test_numbers(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"\"temperature\":-0.1", "temperature"},
        {"\"temperature\":2.1", "temperature"},
        {"\"top_p\":0", "top_p"},
        {"\"top_p\":1e-60", "top_p"},
        {"\"top_p\":1.01", "top_p"},
        {"\"min_p\":-0.5", "min_p"},
        {"\"min_p\":1.5", "min_p"},
        {"\"presence_penalty\":2.5", "presence_penalty"},
        {"\"frequency_penalty\":-3", "frequency_penalty"},
        {"\"repetition_penalty\":0", "repetition_penalty"},
        {"\"repetition_penalty\":2.5", "repetition_penalty"},
        {"\"top_k\":-2", "top_k"},
        {"\"top_k\":2147483648", "top_k"},
        {"\"seed\":-1", "seed"},
        {"\"max_tokens\":0", "max_tokens"},
        {"\"max_tokens\":-5", "max_tokens"},
        {"\"max_completion_tokens\":0", "max_completion_tokens"},
        {"\"n\":2", "n"},
        {"\"n\":0", "n"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) expect_field(bad[i][0], "invalid_value", bad[i][1]);
    static const char *const mistyped[][2] = {
        {"\"temperature\":\"1\"", "temperature"},
        {"\"top_p\":true", "top_p"},
        {"\"max_tokens\":8.5", "max_tokens"},
        {"\"max_tokens\":\"8\"", "max_tokens"},
        {"\"seed\":[]", "seed"},
        {"\"n\":{}", "n"},
        {"\"top_k\":false", "top_k"},
    };
    for (size_t i = 0; i < sizeof mistyped / sizeof *mistyped; i++)
        expect_field(mistyped[i][0], "invalid_type", mistyped[i][1]);
    static const char *const good[] = {"\"temperature\":2",
                                       "\"temperature\":null",
                                       "\"top_p\":1",
                                       "\"min_p\":1",
                                       "\"top_k\":0",
                                       "\"top_k\":2147483647",
                                       "\"seed\":0",
                                       "\"seed\":null",
                                       "\"n\":1.0",
                                       "\"n\":null",
                                       "\"max_tokens\":1",
                                       "\"max_tokens\":2147483647",
                                       "\"repetition_penalty\":2",
                                       "\"max_tokens\":64e0"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) expect_good_field(good[i]);
}

/* Integers beyond 64 bits are the job's mistake where they matter and nobody's where they do not. */
static void test_huge_integers(void **state)
{
    (void)state;
    struct job_spec s;
    expect_field("\"seed\":9223372036854775808", "invalid_value", "seed");
    expect_field("\"seed\":18446744073709551615", "invalid_value", "seed");
    expect_field("\"max_tokens\":99999999999999999999", "invalid_value", "max_tokens");
    expect_fine(HEAD "{" HELLO ",\"seed\":5},\"other\":99999999999999999999}", &s);
    assert_int_equal(s.sampling.seed, 5);
    job_spec_free(&s);
    /* such a line is read with reals: a seed that they cannot hold exactly is refused, not rounded */
    expect_fault(HEAD "{" HELLO ",\"seed\":9007199254740993123},\"other\":99999999999999999999}", "invalid_value",
                 "seed");
    /* without it the same seed is fine */
    expect_fine(HEAD "{" HELLO ",\"seed\":9007199254740993123}}", &s);
    assert_true(s.sampling.seed == 9007199254740993123u);
    job_spec_free(&s);
}

static void test_stop(void **state)
{
    (void)state;
    expect_field("\"stop\":5", "invalid_type", "stop");
    expect_field("\"stop\":{}", "invalid_type", "stop");
    expect_field("\"stop\":\"\"", "invalid_value", "stop");
    expect_field("\"stop\":[\"a\",\"\"]", "invalid_value", "stop[1]");
    expect_field("\"stop\":[\"a\",1]", "invalid_type", "stop[1]");
    expect_field("\"stop\":[\"a\\u0000\"]", "invalid_value", "stop[0]");
    expect_good_field("\"stop\":null");
    expect_good_field("\"stop\":[]");
    for (int n = 16; n <= 17; n++) {
        char list[200] = "\"stop\":[\"s\"";
        for (int i = 1; i < n; i++) strcat(list, ",\"s\"");
        strcat(list, "]");
        if (n == 16)
            expect_good_field(list);
        else
            expect_field(list, "invalid_value", "stop");
    }
    for (size_t n = 1024; n <= 1025; n++) {
        char line[1400] = HEAD "{" HELLO ",\"stop\":\"";
        memset(line + strlen(line), 'x', n); /* the rest of line is zero */
        strcat(line, "\"}}");
        struct job_spec s;
        if (n == 1025) {
            expect_fault(line, "invalid_value", "stop");
            continue;
        }
        expect_fine(line, &s);
        job_spec_free(&s);
    }
}

static void test_fields_not_served(void **state)
{
    (void)state;
    expect_field("\"stream\":true", "unsupported_parameter", "stream");
    expect_field("\"stream\":0", "unsupported_parameter", "stream");
    expect_field("\"logprobs\":true", "unsupported_parameter", "logprobs");
    expect_field("\"top_logprobs\":3", "unsupported_parameter", "top_logprobs");
    expect_field("\"tools\":[{}]", "unsupported_parameter", "tools");
    expect_field("\"tool_choice\":\"none\"", "unsupported_parameter", "tool_choice");
    expect_field("\"logit_bias\":{\"5\":1}", "unsupported_parameter", "logit_bias");
    expect_field("\"skip_special_tokens\":false", "unsupported_parameter", "skip_special_tokens");
    expect_field("\"guided_json\":\"x\"", "unsupported_parameter", "guided_json");
    expect_field("\"response_format\":{\"type\":\"json_object\"}", "unsupported_value", "response_format.type");
    expect_field("\"response_format\":{}", "unsupported_value", "response_format.type");
    expect_field("\"response_format\":\"text\"", "invalid_type", "response_format");
    expect_field("\"response_format\":{\"type\":\"text\",\"x\":1}", "unknown_parameter", "response_format.x");
    expect_field("\"max_toknes\":5", "unknown_parameter", "max_toknes");
    expect_field("\"frobnicate\":null", "unknown_parameter", "frobnicate");
    expect_field("\"prompt\":\"x\"", "unknown_parameter", "prompt");
    expect_field("\"best_of\":1", "unknown_parameter", "best_of");
    expect_field("\"model\":5", "invalid_type", "model");
    expect_fault(HEAD_COMPLETION "{\"prompt\":\"p\",\"best_of\":2}}", "unsupported_parameter", "best_of");
    expect_fault(HEAD_COMPLETION "{\"prompt\":\"p\",\"echo\":true}}", "unsupported_parameter", "echo");
    expect_fault(HEAD_COMPLETION "{\"prompt\":\"p\"," HELLO "}}", "unknown_parameter", "messages");
    expect_fault(HEAD_COMPLETION "{\"prompt\":\"p\",\"tools\":[1]}}", "unknown_parameter", "tools");
}

#define KWARGS(fields) "\"chat_template_kwargs\":{" fields "}"

static void expect_thinking(const char *fields, enum job_switch enable, enum job_switch preserve, const char *effort,
                            const char *param)
{
    char line[600];
    struct job_spec s;
    snprintf(line, sizeof line, HEAD "{" HELLO ",%s}}", fields);
    expect_fine(line, &s);
    if (s.thinking.enable != enable || s.thinking.preserve != preserve || strcmp(s.thinking.effort, effort))
        fail_msg("%s: %d %d %s", fields, s.thinking.enable, s.thinking.preserve, s.thinking.effort);
    if (param) assert_string_equal(s.thinking.effort_param, param);
    job_spec_free(&s);
}

static void test_thinking(void **state)
{
    (void)state;
    const enum job_switch NO = JOB_SWITCH_DEFAULT, OFF = JOB_SWITCH_OFF, ON = JOB_SWITCH_ON;
    static const char plain[] = "reasoning_effort", inside[] = "chat_template_kwargs.reasoning_effort";
    expect_thinking("\"n\":1", NO, NO, "", NULL);
    expect_thinking(KWARGS("") ",\"reasoning_effort\":null", NO, NO, "", NULL);
    expect_thinking("\"chat_template_kwargs\":null", NO, NO, "", NULL);
    expect_thinking(KWARGS("\"enable_thinking\":null,\"preserve_thinking\":null,\"reasoning_effort\":null"), NO, NO, "", NULL);
    expect_thinking(KWARGS("\"enable_thinking\":true"), ON, NO, "", NULL);
    expect_thinking(KWARGS("\"enable_thinking\":false,\"preserve_thinking\":true"), OFF, ON, "", NULL);
    expect_thinking(KWARGS("\"preserve_thinking\":false,\"reasoning_effort\":\"low\""), NO, OFF, "low", inside);
    expect_thinking("\"reasoning_effort\":\"medium\"", NO, NO, "medium", plain);
    expect_thinking("\"reasoning_effort\":\"xhigh\"," KWARGS("\"reasoning_effort\":\"xhigh\""), NO, NO, "xhigh", plain);
    expect_thinking("\"reasoning_effort\":\"low\"," KWARGS("\"enable_thinking\":false"), OFF, NO, "low", plain);
    expect_thinking("\"reasoning_effort\":\"none\"", OFF, NO, "", NULL);
    expect_thinking("\"reasoning_effort\":\"none\"," KWARGS("\"enable_thinking\":false"), OFF, NO, "", NULL);

    static const char *const bad[][3] = {
        {KWARGS("\"enable_thinking\":1"), "invalid_type", "chat_template_kwargs.enable_thinking"},
        {KWARGS("\"preserve_thinking\":\"yes\""), "invalid_type", "chat_template_kwargs.preserve_thinking"},
        {KWARGS("\"reasoning_effort\":\"high\""), "unsupported_value", inside},
        {KWARGS("\"reasoning_effort\":\"none\""), "unsupported_value", inside},
        {KWARGS("\"reasoning_effort\":2"), "invalid_type", inside},
        {KWARGS("\"thinking\":true"), "unknown_parameter", "chat_template_kwargs.thinking"},
        {KWARGS("\"b\":1,\"a\":1"), "unknown_parameter", "chat_template_kwargs.a"},
        {"\"chat_template_kwargs\":[]", "invalid_type", "chat_template_kwargs"},
        {"\"chat_template_kwargs\":\"x\"", "invalid_type", "chat_template_kwargs"},
        {"\"reasoning_effort\":\"high\"", "unsupported_value", plain},
        {"\"reasoning_effort\":\"minimal\"", "unsupported_value", plain},
        {"\"reasoning_effort\":\"\"", "unsupported_value", plain},
        {"\"reasoning_effort\":\"low\\u0000\"", "invalid_value", plain},
        {"\"reasoning_effort\":5", "invalid_type", plain},
        {"\"reasoning_effort\":\"low\"," KWARGS("\"reasoning_effort\":\"medium\""), "invalid_value", plain},
        {"\"reasoning_effort\":\"none\"," KWARGS("\"reasoning_effort\":\"low\""), "invalid_value", plain},
        {"\"reasoning_effort\":\"none\"," KWARGS("\"enable_thinking\":true"), "invalid_value", plain},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) expect_field(bad[i][0], bad[i][1], bad[i][2]);
    expect_fault(HEAD_COMPLETION "{\"prompt\":\"p\",\"reasoning_effort\":\"low\"}}", "unknown_parameter", plain);
    expect_fault(HEAD_COMPLETION "{\"prompt\":\"p\",\"chat_template_kwargs\":{}}}", "unknown_parameter",
                 "chat_template_kwargs");

    /* part of the result's key, like everything else in a body */
    struct job_spec s;
    expect_fine(HEAD "{" HELLO "," KWARGS("\"enable_thinking\":false") "}}", &s);
    assert_non_null(strstr(s.canonical_body, "\"chat_template_kwargs\":{\"enable_thinking\":false}"));
    job_spec_free(&s);
}

static void test_first_fault_ignores_key_order(void **state)
{
    (void)state;
    expect_field("\"zz\":1,\"aa\":1,\"top_p\":9,\"temperature\":9", "invalid_value", "temperature");
    expect_field("\"temperature\":9,\"top_p\":9,\"aa\":1,\"zz\":1", "invalid_value", "temperature");
    expect_field("\"zz\":1,\"aa\":1", "unknown_parameter", "aa");
    expect_field("\"aa\":1,\"zz\":1", "unknown_parameter", "aa");
}

static void expect_messages(const char *messages, const char *code, const char *param)
{
    char line[800];
    snprintf(line, sizeof line, HEAD "{\"messages\":%s}}", messages);
    expect_fault(line, code, param);
}

static void test_messages(void **state)
{
    (void)state;
    expect_fault(HEAD "{}}", "missing_required_parameter", "messages");
    expect_messages("null", "invalid_type", "messages");
    expect_messages("{}", "invalid_type", "messages");
    expect_messages("[]", "invalid_value", "messages");
    expect_messages("[5]", "invalid_type", "messages[0]");
    expect_messages("[{\"role\":\"user\",\"content\":\"a\"},{}]", "missing_required_parameter", "messages[1].role");
    expect_messages("[{\"role\":1,\"content\":\"a\"}]", "invalid_type", "messages[0].role");
    expect_messages("[{\"role\":\"tool\",\"content\":\"a\"}]", "unsupported_value", "messages[0].role");
    expect_messages("[{\"role\":\"User\",\"content\":\"a\"}]", "unsupported_value", "messages[0].role");
    expect_messages("[{\"role\":\"user\\u0000\",\"content\":\"a\"}]", "invalid_value", "messages[0].role");
    expect_messages("[{\"role\":\"user\"}]", "missing_required_parameter", "messages[0].content");
    expect_messages("[{\"role\":\"user\",\"content\":null}]", "invalid_type", "messages[0].content");
    expect_messages("[{\"role\":\"user\",\"content\":[]}]", "invalid_value", "messages[0].content");
    expect_messages("[{\"role\":\"user\",\"content\":\"a\\u0000b\"}]", "invalid_value", "messages[0].content");
    expect_messages("[{\"role\":\"user\",\"content\":\"a\",\"name\":\"bob\"}]", "unsupported_parameter",
                    "messages[0].name");
    expect_messages("[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{}]}]", "unsupported_parameter",
                    "messages[0].tool_calls");
    expect_messages("[{\"role\":\"user\",\"content\":\"a\",\"extra\":1}]", "unknown_parameter", "messages[0].extra");
}

/* fields: of an assistant's message. want NULL: no thoughts are given. */
static void expect_reasoning(const char *fields, const char *want)
{
    char line[600];
    struct job_spec s;
    snprintf(line, sizeof line, HEAD "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\"%s}]}}", fields);
    expect_fine(line, &s);
    assert_true(!s.messages[0].reasoning == !want);
    if (want) {
        assert_string_equal(s.messages[0].reasoning, want);
        assert_int_equal(s.messages[0].reasoning_len, strlen(want));
    }
    job_spec_free(&s);
}

static void test_reasoning(void **state)
{
    (void)state;
    expect_reasoning("", NULL);
    expect_reasoning(",\"reasoning_content\":null,\"reasoning\":null", NULL);
    expect_reasoning(",\"reasoning_content\":\"\"", ""); /* given, and empty */
    expect_reasoning(",\"reasoning_content\":\"why\"", "why");
    expect_reasoning(",\"reasoning\":\"why\"", "why");
    expect_reasoning(",\"reasoning\":\"why\",\"reasoning_content\":\"why\"", "why");
    static const char *const bad[][3] = {
        {"\"assistant\",\"reasoning\":\"a\",\"reasoning_content\":\"b\"", "invalid_value", "messages[0].reasoning"},
        {"\"assistant\",\"reasoning_content\":[]", "invalid_type", "messages[0].reasoning_content"},
        {"\"assistant\",\"reasoning\":{}", "invalid_type", "messages[0].reasoning"},
        {"\"assistant\",\"reasoning\":\"\\u0000\"", "invalid_value", "messages[0].reasoning"},
        {"\"user\",\"reasoning_content\":\"a\"", "invalid_value", "messages[0].reasoning_content"},
        {"\"system\",\"reasoning\":\"\"", "invalid_value", "messages[0].reasoning"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char messages[200];
        snprintf(messages, sizeof messages, "[{\"content\":\"x\",\"role\":%s}]", bad[i][0]);
        expect_messages(messages, bad[i][1], bad[i][2]);
    }
}

static void test_parts(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"\"x\"", "invalid_type", "messages[0].content[0]"},
        {"{}", "missing_required_parameter", "messages[0].content[0].type"},
        {"{\"type\":7}", "unsupported_value", "messages[0].content[0].type"},
        {"{\"type\":\"image_url\",\"image_url\":{\"url\":\"u\"}}", "unsupported_value", "messages[0].content[0].type"},
        {"{\"type\":\"text\"}", "missing_required_parameter", "messages[0].content[0].text"},
        {"{\"type\":\"text\",\"text\":5}", "invalid_type", "messages[0].content[0].text"},
        {"{\"type\":\"text\",\"text\":\"\\u0000\"}", "invalid_value", "messages[0].content[0].text"},
        {"{\"type\":\"text\",\"text\":\"a\",\"path\":\"b\"}", "unknown_parameter", "messages[0].content[0].path"},
        {"{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"document\"}", "missing_required_parameter",
         "messages[0].content[1].path"},
        {"{\"type\":\"document\",\"path\":\"\"}", "invalid_value", "messages[0].content[0].path"},
        {"{\"type\":\"document\",\"path\":null}", "invalid_type", "messages[0].content[0].path"},
        {"{\"type\":\"document\",\"path\":\"a\\u0000b\"}", "invalid_value", "messages[0].content[0].path"},
        {"{\"type\":\"document\",\"path\":\"a\",\"text\":\"b\"}", "unknown_parameter", "messages[0].content[0].text"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char messages[300];
        snprintf(messages, sizeof messages, "[{\"role\":\"user\",\"content\":[%s]}]", cases[i][0]);
        expect_messages(messages, cases[i][1], cases[i][2]);
    }
}

static void test_prompts(void **state)
{
    (void)state;
    static const char *const bad[] = {"null", "5", "[]", "[\"a\",\"b\"]", "[1,2,3]", "[[1,2]]", "{}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char line[300];
        snprintf(line, sizeof line, HEAD_COMPLETION "{\"prompt\":%s}}", bad[i]);
        expect_fault(line, "unsupported_value", "prompt");
    }
    expect_fault(HEAD_COMPLETION "{}}", "missing_required_parameter", "prompt");
    expect_fault(HEAD_COMPLETION "{\"prompt\":\"a\\u0000\"}}", "invalid_value", "prompt");
    expect_fault(HEAD_COMPLETION "{\"prompt\":[\"a\\u0000\"]}}", "invalid_value", "prompt[0]");
    /* a document belongs into a chat */
    expect_fault(HEAD_COMPLETION "{\"prompt\":[{\"type\":\"document\",\"path\":\"a\"}]}}", "unsupported_value",
                 "prompt");
}

/* A hostile key is cut between characters, so that the record about it can be written. */
static void test_long_unknown_key(void **state)
{
    (void)state;
    for (int shift = 0; shift < 3; shift++) {
        struct buf line = {0};
        struct job_spec s;
        buf_append_str(&line, HEAD "{" HELLO ",\"");
        for (int i = 0; i < shift; i++) buf_append_str(&line, "k");
        for (int i = 0; i < 400; i++) buf_append_str(&line, "\xE2\x82\xAC");
        buf_append_str(&line, "\":1}}");
        parse(line.data, &s);
        assert_string_equal(s.fault.code, "unknown_parameter");
        size_t len = strlen(s.fault.param);
        assert_true(len >= 70 && len < sizeof s.fault.param);
        assert_int_equal((len - (size_t)shift) % 3, 0);
        job_spec_free(&s);
        buf_free(&line);
    }
}

static void test_check_model(void **state)
{
    (void)state;
    static const char *const names[] = {"tiny.gguf", "tiny", "Tiny Model"};
    static const struct {
        const char *model;
        int status;
    } cases[] = {{"null", 0},           {"\"default\"", 0}, {"\"tiny\"", 0},
                 {"\"Tiny Model\"", 0}, {"\"Tiny\"", 404},  {"\"\"", 404}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[300];
        struct job_spec s;
        snprintf(line, sizeof line, HEAD "{" HELLO ",\"model\":%s}}", cases[i].model);
        expect_fine(line, &s);
        job_spec_check_model(&s, names, 3);
        assert_int_equal(s.fault.status, cases[i].status);
        if (s.fault.status) {
            assert_string_equal(s.fault.code, "model_not_found");
            assert_string_equal(s.fault.param, "model");
        }
        job_spec_free(&s);
    }
}

static void test_fault_first_wins(void **state)
{
    (void)state;
    struct job_fault f = {0};
    job_fault_set(&f, 400, "t", "first", "p", "number %d", 1);
    job_fault_set(&f, 500, "u", "second", "q", "number %d", 2);
    assert_int_equal(f.status, 400);
    assert_string_equal(f.code, "first");
    assert_string_equal(f.message, "number 1");
    char text[1000];
    memset(text, 0, sizeof text);
    for (int i = 0; i < 300; i++) strcat(text, "\xC3\xA4"); /* the field ends inside a character */
    f = (struct job_fault){0};
    job_fault_set(&f, 400, "t", NULL, NULL, "%s", text);
    assert_int_equal(strlen(f.message), 598);
    assert_string_equal(f.code, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_syntax),
        cmocka_unit_test(test_hostile_bytes),
        cmocka_unit_test(test_errors_quote_nothing),
        cmocka_unit_test(test_envelope),
        cmocka_unit_test(test_custom_id_length),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_everything_given),
        cmocka_unit_test(test_completion),
        cmocka_unit_test(test_canonical_body),
        cmocka_unit_test(test_tandem),
        cmocka_unit_test(test_priority),
        cmocka_unit_test(test_bad_tandem),
        cmocka_unit_test(test_seed_of_id),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_huge_integers),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_fields_not_served),
        cmocka_unit_test(test_thinking),
        cmocka_unit_test(test_first_fault_ignores_key_order),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_reasoning),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_long_unknown_key),
        cmocka_unit_test(test_check_model),
        cmocka_unit_test(test_fault_first_wins),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
