/* audit: the sample, and that every part of an answer is compared. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "audit.h"

static void key_of(unsigned seed, unsigned char key[STATE_KEY_BYTES])
{
    uint64_t x = seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
    for (int i = 0; i < STATE_KEY_BYTES; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        key[i] = (unsigned char)(x >> 32);
    }
}

static void test_sample(void **ctx)
{
    (void)ctx;
    enum { KEYS = 20000 };
    static const double percents[] = {0, 0.5, 1, 10, 50, 99, 100};
    for (size_t p = 0; p < sizeof percents / sizeof *percents; p++) {
        int n = 0;
        for (unsigned i = 0; i < KEYS; i++) {
            unsigned char key[STATE_KEY_BYTES];
            key_of(i, key);
            bool in = audit_samples(key, percents[p]);
            assert_int_equal(in, audit_samples(key, percents[p]));
            if (in && p + 1 < sizeof percents / sizeof *percents) assert_true(audit_samples(key, percents[p + 1]));
            n += in;
        }
        double expected = KEYS * percents[p] / 100;
        assert_true((double)n >= 0.8 * expected && (double)n <= 1.2 * expected);
    }
    unsigned char least[STATE_KEY_BYTES] = {0}, most[STATE_KEY_BYTES];
    memset(most, 0xFF, sizeof most);
    assert_false(audit_samples(least, 0));
    assert_true(audit_samples(least, 0.001));
    assert_true(audit_samples(most, 100));
    assert_false(audit_samples(most, 99.9));
}

struct answer {
    char text[8];
    int32_t tokens[3];
    uint64_t trace[6];
    struct wire_done done;
};

static struct wire_done *fill(struct answer *a)
{
    *a = (struct answer){.text = "answer", .tokens = {5, 6, 7}, .trace = {1, 2, 3, 4, 5, 6}};
    a->done = (struct wire_done){.id = 1, .finish = FINISH_STOP, .text = a->text, .text_len = 6, .tokens = a->tokens, .n_tokens = 3,
                                 .trace = a->trace};
    return &a->done;
}

static void test_every_part_is_compared(void **ctx)
{
    (void)ctx;
    struct audit a = {0};
    struct answer first, second;
    assert_int_equal(audit_add(&a, 3, fill(&first), NULL), RC_OK);
    const struct audit_item *item = &a.items[0];
    fill(&second)->timing.decode_us = 99; /* not of the answer */
    second.done.id = 7;
    assert_null(audit_compare(&a, item, &second.done));
    assert_true(a.computed == 1 && a.different == 0);
    fill(&second);
    second.text[5] = 'R';
    assert_string_equal(audit_compare(&a, item, &second.done), "the text");
    fill(&second)->text_len = 5;
    assert_string_equal(audit_compare(&a, item, &second.done), "the text");
    fill(&second)->n_tokens = 2;
    assert_string_equal(audit_compare(&a, item, &second.done), "the number of tokens");
    fill(&second);
    second.tokens[2] = 8;
    assert_string_equal(audit_compare(&a, item, &second.done), "the tokens");
    fill(&second)->finish = FINISH_LENGTH;
    assert_string_equal(audit_compare(&a, item, &second.done), "the reason of its end");
    fill(&second);
    second.trace[5] ^= 1;
    assert_string_equal(audit_compare(&a, item, &second.done), "the trace");
    fill(&second)->trace = NULL;
    assert_string_equal(audit_compare(&a, item, &second.done), "the trace");
    assert_string_equal(audit_compare(&a, item, NULL), "the outcome");
    assert_true(a.computed == 9 && a.different == 8);
    audit_free(&a);
}

static void test_lowest_first(void **ctx)
{
    (void)ctx;
    struct audit a = {0};
    struct answer answer;
    audit_sort(&a);
    for (size_t i = 0; i < 300; i++) assert_int_equal(audit_add(&a, i * 7 % 300, fill(&answer), NULL), RC_OK);
    audit_sort(&a);
    assert_int_equal(a.n, 300);
    for (size_t i = 0; i < 300; i++) assert_int_equal(a.items[i].entry, i);
    audit_free(&a);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sample),
        cmocka_unit_test(test_every_part_is_compared),
        cmocka_unit_test(test_lowest_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
