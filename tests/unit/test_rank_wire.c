/* Frames: every type survives a round trip, the layout is the documented one byte for byte, every truncation and every
 * count that lies is refused, and no frame grows past the limit. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "rank_wire.h"

static const int32_t ids[] = {1, 0, 49151, -1, INT32_MIN};
static const uint64_t trace[] = {1, UINT64_MAX, 3, 4, 5, 6, 7, 8, 9, 0x0123456789abcdef};
static const char *const stops[] = {"\n\n", "END", "\xc3\xa9"};

static struct wire_frame sample(enum wire_type type)
{
    struct wire_frame f = {.type = type};
    switch (type) {
    case WIRE_HELLO:
        f.u.hello = (struct wire_hello){WIRE_VERSION, 1, 2, 8192, 0x1122334455667788, 32768, 90000000, 4096, 1234567,
                                        "version=1\nmodel=abc\n"};
        break;
    case WIRE_SUBMIT:
        f.u.submit = (struct engine_request){.id = 7, .prompt = ids, .prompt_tokens = 5, .max_tokens = 64, .stop = stops,
            .n_stop = 3, .ignore_end = true, .cold = true, .branch_tokens = 99, .key = {1, 2, 3, [31] = 255},
            .sampling = {0.5f, 0.9f, 0.05f, 40, -2.0f, 2.0f, 1.25f, UINT64_MAX - 1}};
        break;
    case WIRE_CANCEL: f.u.cancel = UINT64_MAX; break;
    case WIRE_SHUTDOWN: break;
    case WIRE_TOKEN: f.u.token = (struct wire_token){1, 2, 3}; break;
    case WIRE_DONE:
        f.u.done = (struct wire_done){.id = 9, .finish = FINISH_LENGTH, .prompt_tokens = 100,
            .timing = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, .text = "caf\xc3\xa9\0x", .text_len = 7, .tokens = ids, .n_tokens = 5,
            .trace = trace};
        break;
    case WIRE_FAILED: f.u.text = (struct wire_text){11, 0, "non_finite_logits", "a logit is NaN"}; break;
    case WIRE_STATS: f.u.stats = (struct engine_stats){1, 2, 3, 4, 5, 6, 7, 8, 9}; break;
    case WIRE_ERROR: f.u.text = (struct wire_text){0, EXIT_LOCKSTEP, "lockstep", "field=tokens"}; break;
    case WIRE_STARTED: f.u.started = 12; break;
    case WIRE_SAVED: f.u.saved = (struct wire_saved){13, 0xfedcba98}; break;
    case WIRE_STOP:
    case WIRE_STOPPED: break;
    }
    return f;
}

static void encode(enum wire_type type, struct buf *out)
{
    struct wire_frame f = sample(type);
    assert_true(wire_encode(&f, out));
}

static void assert_same_request(const struct engine_request *a, const struct engine_request *b)
{
    assert_int_equal(a->id, b->id);
    assert_int_equal(a->max_tokens, b->max_tokens);
    assert_int_equal(a->ignore_end, b->ignore_end);
    assert_int_equal(a->resume, b->resume);
    assert_int_equal(a->branch_tokens, b->branch_tokens);
    assert_int_equal(a->cold, b->cold);
    assert_memory_equal(a->key, b->key, sizeof a->key);
    assert_int_equal(a->prompt_tokens, b->prompt_tokens);
    assert_memory_equal(a->prompt, b->prompt, a->prompt_tokens * 4);
    assert_memory_equal(&a->sampling, &b->sampling, sizeof a->sampling);
    assert_int_equal(a->n_stop, b->n_stop);
    for (int i = 0; i < a->n_stop; i++) assert_string_equal(a->stop[i], b->stop[i]);
}

static void assert_same_done(const struct wire_done *a, const struct wire_done *b)
{
    assert_int_equal(a->id, b->id);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->prompt_tokens, b->prompt_tokens);
    assert_memory_equal(&a->timing, &b->timing, sizeof a->timing);
    assert_int_equal(a->text_len, b->text_len);
    assert_memory_equal(a->text, b->text, a->text_len);
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_memory_equal(a->tokens, b->tokens, a->n_tokens * 4);
    assert_memory_equal(a->trace, b->trace, a->n_tokens * 16);
}

static void assert_same(const struct wire_frame *a, const struct wire_frame *b)
{
    assert_int_equal(a->type, b->type);
    switch (a->type) {
    case WIRE_HELLO:
        assert_memory_equal(&a->u.hello, &b->u.hello, offsetof(struct wire_hello, identity));
        assert_string_equal(a->u.hello.identity, b->u.hello.identity);
        break;
    case WIRE_SUBMIT: assert_same_request(&a->u.submit, &b->u.submit); break;
    case WIRE_CANCEL: assert_int_equal(a->u.cancel, b->u.cancel); break;
    case WIRE_SHUTDOWN: break;
    case WIRE_STARTED: assert_int_equal(a->u.started, b->u.started); break;
    case WIRE_SAVED:
        assert_int_equal(a->u.saved.id, b->u.saved.id);
        assert_int_equal(a->u.saved.position, b->u.saved.position);
        break;
    case WIRE_STOP:
    case WIRE_STOPPED: break;
    case WIRE_TOKEN: assert_memory_equal(&a->u.token, &b->u.token, sizeof a->u.token); break;
    case WIRE_DONE: assert_same_done(&a->u.done, &b->u.done); break;
    case WIRE_FAILED:
    case WIRE_ERROR:
        assert_int_equal(a->u.text.id, b->u.text.id);
        assert_int_equal(a->u.text.exit_status, b->u.text.exit_status);
        assert_string_equal(a->u.text.code, b->u.text.code);
        assert_string_equal(a->u.text.text, b->u.text.text);
        break;
    case WIRE_STATS:
        assert_int_equal(a->u.stats.steps, b->u.stats.steps);
        assert_int_equal(a->u.stats.prefill_rows, b->u.stats.prefill_rows);
        assert_int_equal(a->u.stats.decode_rows, b->u.stats.decode_rows);
        assert_int_equal(a->u.stats.preemptions, b->u.stats.preemptions);
        assert_int_equal(a->u.stats.tokens, b->u.stats.tokens);
        assert_int_equal(a->u.stats.drafted, b->u.stats.drafted);
        assert_int_equal(a->u.stats.accepted, b->u.stats.accepted);
        assert_int_equal(a->u.stats.restored_rows, b->u.stats.restored_rows);
        assert_int_equal(a->u.stats.max_sequences_in_step, b->u.stats.max_sequences_in_step);
        break;
    }
}

/* All frames in one stream, decoded one after another. */
static void round_trip(void **state)
{
    (void)state;
    struct buf stream = {0};
    for (int t = WIRE_HELLO; t <= WIRE_STOPPED; t++) encode((enum wire_type)t, &stream);
    size_t at = 0;
    for (int t = WIRE_HELLO; t <= WIRE_STOPPED; t++) {
        struct wire_frame f, expected = sample((enum wire_type)t);
        size_t used = 0;
        assert_int_equal(wire_decode(stream.data + at, stream.len - at, &f, &used, NULL), RC_OK);
        assert_same(&f, &expected);
        at += used;
        wire_frame_free(&f);
    }
    assert_int_equal(at, stream.len);
    buf_free(&stream);
}

static void no_stops_no_trace(void **state)
{
    (void)state;
    struct wire_frame f = sample(WIRE_SUBMIT), g = sample(WIRE_DONE), back;
    struct buf b = {0};
    size_t used;
    f.u.submit.n_stop = 0;
    g.u.done.trace = NULL;
    g.u.done.n_tokens = 0;
    g.u.done.text_len = 0;
    assert_true(wire_encode(&f, &b));
    assert_int_equal(wire_decode(b.data, b.len, &back, &used, NULL), RC_OK);
    assert_int_equal(back.u.submit.n_stop, 0);
    assert_null(back.u.submit.stop);
    wire_frame_free(&back);
    buf_clear(&b);
    assert_true(wire_encode(&g, &b));
    assert_int_equal(wire_decode(b.data, b.len, &back, &used, NULL), RC_OK);
    assert_null(back.u.done.trace);
    assert_int_equal(back.u.done.n_tokens, 0);
    wire_frame_free(&back);
    buf_free(&b);
}

/* The documented layout, written out by hand. */
static void known_bytes(void **state)
{
    (void)state;
    static const unsigned char cancel[] = {10, 0, 0, 0, 3, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    static const unsigned char failed[] = {22, 0, 0, 0, 7, 0, 2, 1, 0, 0, 0, 0, 0, 0, 90, 0, 0, 0,
                                           0, 0, 0, 0, 0, 0, 0, 0};
    struct buf b = {0};
    encode(WIRE_CANCEL, &b);
    assert_int_equal(b.len, sizeof cancel);
    assert_memory_equal(b.data, cancel, sizeof cancel);
    buf_clear(&b);
    struct wire_frame f = {.type = WIRE_FAILED, .u.text = {.id = 258, .exit_status = 90}};
    assert_true(wire_encode(&f, &b));
    assert_int_equal(b.len, sizeof failed);
    assert_memory_equal(b.data, failed, sizeof failed);
    buf_clear(&b);
    f = sample(WIRE_SUBMIT);
    f.u.submit.prompt_tokens = 2;
    f.u.submit.n_stop = 1;
    assert_true(wire_encode(&f, &b));
    static const unsigned char tail[] = {2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, '\n', '\n'};
    assert_int_equal(b.len, 6 + 8 + 4 + 32 + 8 + 3 + 7 * 4 + 8 + sizeof tail);
    assert_memory_equal(b.data + b.len - sizeof tail, tail, sizeof tail);
    assert_memory_equal(b.data + 6 + 8 + 4 + 40, "\1\0\1", 3); /* ignore_end, not resume, cold */
    assert_memory_equal(b.data + 6 + 8 + 4 + 40 + 3, "\x00\x00\x00\x3f", 4); /* 0.5f */
    buf_free(&b);
}

/* A prefix asks for more; a frame whose length word is made to agree with the cut is broken. The bytes lie at the end of
 * their own allocation so that a sanitizer sees every read past them. */
static void truncated_at_every_byte(void **state)
{
    (void)state;
    for (int t = WIRE_HELLO; t <= WIRE_STOPPED; t++) {
        struct buf b = {0};
        encode((enum wire_type)t, &b);
        for (size_t n = 0; n < b.len; n++) {
            struct wire_frame f;
            size_t used = 99;
            unsigned char *cut = malloc(n ? n : 1);
            assert_non_null(cut);
            memcpy(cut, b.data, n);
            assert_int_equal(wire_decode(cut, n, &f, &used, NULL), RC_RETRY);
            assert_int_equal(used, 0);
            if (n >= 6) {
                struct err e = {0};
                cut[0] = (unsigned char)(n - 4);
                cut[1] = (unsigned char)((n - 4) >> 8);
                assert_int_equal(wire_decode(cut, n, &f, &used, &e), RC_BAD_INPUT);
                assert_string_equal(e.code, "bad_frame");
                assert_null(f.store.data);
            }
            free(cut);
        }
        buf_free(&b);
    }
}

static void bytes_left_over(void **state)
{
    (void)state;
    for (int t = WIRE_HELLO; t <= WIRE_STOPPED; t++) {
        struct buf b = {0};
        struct wire_frame f;
        size_t used;
        encode((enum wire_type)t, &b);
        buf_append(&b, "", 1);
        size_t length = b.len - 4;
        b.data[0] = (char)(unsigned char)length;
        b.data[1] = (char)(unsigned char)(length >> 8);
        assert_int_equal(wire_decode(b.data, b.len, &f, &used, NULL), RC_BAD_INPUT);
        assert_null(f.store.data);
        buf_free(&b);
    }
}

static void decode_patched(enum wire_type type, size_t at, const void *patch, size_t n, enum rc expected)
{
    struct buf b = {0};
    struct wire_frame f;
    size_t used;
    encode(type, &b);
    memcpy(b.data + at, patch, n);
    assert_int_equal(wire_decode(b.data, b.len, &f, &used, NULL), expected);
    wire_frame_free(&f);
    buf_free(&b);
}

static void lies(void **state)
{
    (void)state;
    const size_t prompt_count = 6 + 8 + 4 + 40 + 3 + 28 + 8;
    decode_patched(WIRE_CANCEL, 0, "\x01\x00\x00\x00", 4, RC_BAD_INPUT);            /* no room for the type */
    decode_patched(WIRE_CANCEL, 0, "\xfd\xff\xff\x03", 4, RC_BAD_INPUT);            /* one byte over the limit */
    decode_patched(WIRE_CANCEL, 0, "\xfc\xff\xff\x03", 4, RC_RETRY);                /* the limit itself */
    decode_patched(WIRE_CANCEL, 4, "\x00\x00", 2, RC_BAD_INPUT);
    decode_patched(WIRE_CANCEL, 4, "\x0e\x00", 2, RC_BAD_INPUT);
    decode_patched(WIRE_CANCEL, 4, "\x03\x01", 2, RC_BAD_INPUT);                    /* high byte of the type */
    decode_patched(WIRE_SUBMIT, prompt_count, "\xff\xff\xff\x3f", 4, RC_BAD_INPUT); /* times 4 wraps 32 bits */
    decode_patched(WIRE_SUBMIT, prompt_count, "\xff\xff\xff\xff", 4, RC_BAD_INPUT);
    decode_patched(WIRE_SUBMIT, prompt_count + 4 + 20, "\x11\x00\x00\x00", 4, RC_BAD_INPUT); /* 17 stop strings */
    decode_patched(WIRE_SUBMIT, prompt_count + 4 + 20 + 8, "\x00", 1, RC_BAD_INPUT);         /* NUL in a stop string */
    decode_patched(WIRE_SUBMIT, 6 + 8 + 4 + 40, "\x02", 1, RC_BAD_INPUT);                    /* a flag that is no flag */
    decode_patched(WIRE_DONE, 6 + 8, "\x02\x00\x00\x00", 4, RC_BAD_INPUT);                   /* finish reason */
    const size_t trace_count = 6 + 8 + 4 + 8 + 96 + 4 + 7 + 4 + 20;
    decode_patched(WIRE_DONE, trace_count, "\x04\x00\x00\x00", 4, RC_BAD_INPUT);             /* traces are not tokens */
}

static void long_texts(void **state)
{
    (void)state;
    struct buf b = {0};
    struct wire_frame f = {.type = WIRE_ERROR}, back;
    size_t used;
    memset(f.u.text.text, 'x', sizeof f.u.text.text - 1);
    memset(f.u.text.code, 'y', sizeof f.u.text.code - 1);
    assert_true(wire_encode(&f, &b));
    assert_int_equal(wire_decode(b.data, b.len, &back, &used, NULL), RC_OK);
    assert_same(&back, &f);
    wire_frame_free(&back);
    /* One byte more than the field holds. */
    struct buf longer = {0};
    size_t code_at = 6 + 8 + 4;
    buf_append(&longer, b.data, code_at);
    buf_append(&longer, "\x28\x00\x00\x00z", 5);
    buf_append(&longer, b.data + code_at + 4, b.len - code_at - 4);
    longer.data[0] = (char)(unsigned char)(longer.len - 4);
    longer.data[1] = (char)(unsigned char)((longer.len - 4) >> 8);
    assert_int_equal(wire_decode(longer.data, longer.len, &back, &used, NULL), RC_BAD_INPUT);
    buf_free(&longer);
    buf_free(&b);
}

static void too_large_is_not_written(void **state)
{
    (void)state;
    size_t n = (WIRE_MAX_FRAME_BYTES - 4) / 4;
    int32_t *many = calloc(n, sizeof *many);
    assert_non_null(many);
    struct buf b = {0};
    encode(WIRE_CANCEL, &b);
    size_t before = b.len;
    struct wire_frame f = {.type = WIRE_SUBMIT,
                           .u.submit = {.id = 1, .prompt = many, .prompt_tokens = n, .max_tokens = 1}};
    assert_false(wire_encode(&f, &b));
    assert_int_equal(b.len, before);
    f.u.submit.prompt_tokens = n - 64;
    assert_true(wire_encode(&f, &b));
    struct wire_frame back;
    size_t used;
    assert_int_equal(wire_decode(b.data + before, b.len - before, &back, &used, NULL), RC_OK);
    assert_int_equal(back.u.submit.prompt_tokens, n - 64);
    wire_frame_free(&back);
    free(many);
    buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(no_stops_no_trace),
        cmocka_unit_test(known_bytes),
        cmocka_unit_test(truncated_at_every_byte),
        cmocka_unit_test(bytes_left_over),
        cmocka_unit_test(lies),
        cmocka_unit_test(long_texts),
        cmocka_unit_test(too_large_is_not_written),
    };
    return cmocka_run_group_tests_name("rank_wire", tests, NULL, NULL);
}
