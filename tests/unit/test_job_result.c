/* Records: exact bytes, written out by hand from the shape of the API. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "job_result.h"

#include <string.h>

static const unsigned char key[32] = {0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0xab, 0xcd, 0xef, 0x77};

static void expect(enum rc rc, struct buf *out, const char *want)
{
    assert_int_equal(rc, RC_OK);
    assert_string_equal(out->data, want);
    assert_int_equal(out->len, strlen(want));
    buf_clear(out);
}

static const struct job_answer answer = {
    .text = "It is \"so\".\n\xE2\x82\xAC",
    .text_len = 15,
    .finish_reason = "stop",
    .prompt_tokens = 21,
    .cached_tokens = 16,
    .completion_tokens = 5,
    .model = "tiny",
    .created = 1700000000,
};

static void test_chat(void **state)
{
    (void)state;
    struct buf out = {0};
    char id[] = "job-\xC3\xA4";
    const struct job_spec s = {.custom_id = id, .endpoint = JOB_CHAT};
    expect(job_result_success(key, &s, &answer, &out, NULL), &out,
           "{\"id\":\"batch_req_000102030405060708abcdef\",\"custom_id\":\"job-\xC3\xA4\",\"response\":{\"status_"
           "code\":200,"
           "\"request_id\":\"req_000102030405060708abcdef\",\"body\":{\"id\":\"chatcmpl-000102030405060708abcdef\","
           "\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"tiny\",\"choices\":[{\"index\":0,"
           "\"message\":{\"role\":\"assistant\",\"content\":\"It is \\\"so\\\".\\n\xE2\x82\xAC\"},"
           "\"finish_reason\":\"stop\",\"logprobs\":null}],\"usage\":{\"prompt_tokens\":21,\"completion_tokens\":5,"
           "\"total_tokens\":26,\"prompt_tokens_details\":{\"cached_tokens\":16}}}},\"error\":null}");
    buf_free(&out);
}

static void test_completion_with_trace(void **state)
{
    (void)state;
    struct buf out = {0};
    char id[] = "c";
    const struct job_spec s = {.custom_id = id, .endpoint = JOB_COMPLETION};
    static const uint64_t trace[] = {0x1, 0xfedcba9876543210u, UINT64_MAX, 0};
    struct job_answer a = answer;
    a.text = "";
    a.text_len = 0;
    a.finish_reason = "length";
    a.trace = trace;
    a.n_trace = 2;
    expect(job_result_success(key, &s, &a, &out, NULL), &out,
           "{\"id\":\"batch_req_000102030405060708abcdef\",\"custom_id\":\"c\",\"response\":{\"status_code\":200,"
           "\"request_id\":\"req_000102030405060708abcdef\",\"body\":{\"id\":\"cmpl-000102030405060708abcdef\","
           "\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"tiny\",\"choices\":[{\"index\":0,"
           "\"text\":\"\",\"finish_reason\":\"length\",\"logprobs\":null}],\"usage\":{\"prompt_tokens\":21,"
           "\"completion_tokens\":5,\"total_tokens\":26,\"prompt_tokens_details\":{\"cached_tokens\":16}},"
           "\"tandem_trace\":[\"0000000000000001:fedcba9876543210\",\"ffffffffffffffff:0000000000000000\"]}},"
           "\"error\":null}");
    buf_free(&out);
}

/* Control characters, line separators and NUL stay inside one line; everything else is written as it is. */
static void test_one_line(void **state)
{
    (void)state;
    struct buf out = {0};
    char id[] = "a\n\x01\"\\/";
    const struct job_spec s = {.custom_id = id, .endpoint = JOB_COMPLETION};
    struct job_answer a = answer;
    a.text = "\r\n\t\0\x1F\x7F";
    a.text_len = 6;
    assert_int_equal(job_result_success(key, &s, &a, &out, NULL), RC_OK);
    assert_int_equal(strlen(out.data), out.len);
    assert_null(strchr(out.data, '\n'));
    assert_null(strchr(out.data, '\r'));
    assert_non_null(strstr(out.data, "\"custom_id\":\"a\\n\\u0001\\\"\\\\/\""));
    assert_non_null(strstr(out.data, "\"text\":\"\\r\\n\\t\\u0000\\u001F\x7F\""));
    buf_free(&out);
}

static void test_appends(void **state)
{
    (void)state;
    struct buf out = {0};
    buf_append_str(&out, "first\n");
    assert_int_equal(job_result_timing("x", 200, &(struct job_timing){0}, &out, NULL), RC_OK);
    assert_memory_equal(out.data, "first\n{\"custom_id\":\"x\"", 22);
    buf_free(&out);
}

static void test_broken_answer(void **state)
{
    (void)state;
    struct buf out = {0};
    char id[] = "a";
    const struct job_spec s = {.custom_id = id, .endpoint = JOB_CHAT};
    struct job_answer a = answer;
    struct err e = {0};
    buf_append_str(&out, "kept");
    a.text = "\xFF";
    a.text_len = 1;
    assert_int_equal(job_result_success(key, &s, &a, &out, &e), RC_FAILED);
    assert_string_equal(e.code, "record_not_written");
    assert_int_equal(e.exit_status, EXIT_INTERNAL);
    assert_string_equal(out.data, "kept");
    assert_int_equal(out.len, 4);
    buf_free(&out);
}

static void test_failure(void **state)
{
    (void)state;
    struct buf out = {0};
    struct job_fault f = {0};
    job_fault_set(&f, 400, "invalid_request_error", "context_length_exceeded", "messages", "%d and %d", 9000, 8192);
    expect(job_result_failure(key, "f", &f, &out, NULL), &out,
           "{\"id\":\"batch_req_000102030405060708abcdef\",\"custom_id\":\"f\",\"response\":{\"status_code\":400,"
           "\"request_id\":\"req_000102030405060708abcdef\",\"body\":{\"error\":{\"message\":\"9000 and 8192\","
           "\"type\":\"invalid_request_error\",\"param\":\"messages\",\"code\":\"context_length_exceeded\"}}},"
           "\"error\":null}");
    f = (struct job_fault){.status = 500, .message = "engine"};
    expect(job_result_failure(key, "f", &f, &out, NULL), &out,
           "{\"id\":\"batch_req_000102030405060708abcdef\",\"custom_id\":\"f\",\"response\":{\"status_code\":500,"
           "\"request_id\":\"req_000102030405060708abcdef\",\"body\":{\"error\":{\"message\":\"engine\","
           "\"type\":\"server_error\",\"param\":null,\"code\":null}}},\"error\":null}");
    buf_free(&out);
}

static void test_never_run(void **state)
{
    (void)state;
    struct buf out = {0};
    const struct job_fault f = {.code = "batch_expired", .message = "too late"}, bare = {.message = "no"};
    expect(job_result_failure(key, "n", &f, &out, NULL), &out,
           "{\"id\":\"batch_req_000102030405060708abcdef\",\"custom_id\":\"n\",\"response\":null,"
           "\"error\":{\"code\":\"batch_expired\",\"message\":\"too late\"}}");
    expect(job_result_failure(key, "n", &bare, &out, NULL), &out,
           "{\"id\":\"batch_req_000102030405060708abcdef\",\"custom_id\":\"n\",\"response\":null,"
           "\"error\":{\"code\":\"batch_failed\",\"message\":\"no\"}}");
    buf_free(&out);
}

/* A record about a broken text must still be written. */
static void test_failure_is_repaired(void **state)
{
    (void)state;
    struct buf out = {0};
    struct job_fault f = {.status = 422, .type = "t", .code = "c"};
    memcpy(f.message, "a\xFF\xE2\x82z", 6);
    memcpy(f.param, "\xC3", 2);
    assert_int_equal(job_result_failure(key, "i\x80", &f, &out, NULL), RC_OK);
    assert_non_null(strstr(out.data, "\"message\":\"a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz\""));
    assert_non_null(strstr(out.data, "\"param\":\"\xEF\xBF\xBD\""));
    assert_non_null(strstr(out.data, "\"custom_id\":\"i\xEF\xBF\xBD\""));
    buf_free(&out);
}

static void test_timing(void **state)
{
    (void)state;
    struct buf out = {0};
    const struct job_timing t = {
        .queue_us = 1,
        .tokenize_us = 2,
        .prefill_us = 3,
        .ttft_us = 4,
        .decode_us = 5,
        .tpot_us = 6,
        .prompt_tokens = 7,
        .cached_tokens = 8,
        .resumed_tokens = 18,
        .completion_tokens = 9,
        .steps = 10,
        .rounds = 15,
        .drafted = 16,
        .accepted = 17,
        .sequences_in_step = 14,
        .preemptions = 11,
        .attempts = 12,
        .rank_restarts = 13,
        .group = 9223372036854775807,
    };
    expect(job_result_timing("t", 404, &t, &out, NULL), &out,
           "{\"custom_id\":\"t\",\"status\":404,\"queue_us\":1,\"tokenize_us\":2,\"prefill_us\":3,\"ttft_us\":4,"
           "\"decode_us\":5,\"tpot_us\":6,\"prompt_tokens\":7,\"cached_tokens\":8,\"resumed_tokens\":18,\"completion_tokens\":9,\"steps\":10,"
           "\"rounds\":15,\"drafted\":16,\"accepted\":17,\"sequences_in_step\":14,\"preemptions\":11,\"attempts\":12,\"rank_restarts\":13,\"group\":9223372036854775807}");
    buf_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat),      cmocka_unit_test(test_completion_with_trace), cmocka_unit_test(test_one_line),
        cmocka_unit_test(test_appends),   cmocka_unit_test(test_broken_answer),         cmocka_unit_test(test_failure),
        cmocka_unit_test(test_never_run), cmocka_unit_test(test_failure_is_repaired),   cmocka_unit_test(test_timing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
