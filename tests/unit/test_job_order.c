/* job_order: which jobs lie together. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "job_order.h"

static const struct job_head *head_of(const void *ctx, size_t index) { return (const struct job_head *)ctx + index; }

static int no_priority(const void *ctx, size_t index)
{
    (void)ctx, (void)index;
    return 0;
}

static struct job_head head_of_text(const char *text)
{
    struct job_part part = {.text = (char *)(uintptr_t)text, .text_len = strlen(text)};
    struct job_message message = {.role = "user", .parts = &part, .n_parts = 1};
    const struct job_spec spec = {.messages = &message, .n_messages = 1};
    struct job_head h;
    job_head_make(&spec, NULL, 0, &h);
    return h;
}

/* Two long texts with three questions each, mixed, and a short one: each text's jobs lie side by side, equals in their order. */
static void test_jobs_that_begin_alike_lie_together(void **state)
{
    (void)state;
    enum { JOBS = 7, LENGTH = 3000 };
    static const char *const questions[] = {" Why?", " When?", " Why?"};
    struct job_head heads[JOBS];
    size_t order[JOBS], at[JOBS];
    for (int i = 0; i < JOBS - 1; i++) {
        char text[LENGTH + 20];
        memset(text, 'a', LENGTH);
        if (i % 2) text[2000] = 'b'; /* they part late */
        snprintf(text + LENGTH, sizeof text - LENGTH, "%s", questions[i / 2]);
        heads[i] = head_of_text(text);
    }
    heads[JOBS - 1] = head_of_text("Short.");
    for (size_t i = 0; i < JOBS; i++) order[i] = i;
    const struct job_order by_head = {no_priority, head_of, heads};
    job_order_sort(&by_head, order, JOBS);
    for (size_t i = 0; i < JOBS; i++) at[order[i]] = i;
    for (size_t i = 0; i < 2; i++) { /* jobs i, i + 2, i + 4 share a text, the first and the last the question as well */
        assert_int_equal(at[i + 4], at[i] + 1);
        assert_true(at[i + 2] + 1 == at[i] || at[i + 2] == at[i + 4] + 1);
    }
}

static int priority_of(const void *ctx, size_t index)
{
    (void)ctx;
    static const int priorities[] = {0, -3, 5, 0, 5, 1000};
    return priorities[index];
}

/* Priorities come before heads, and without heads the input's order stays within one. */
static void test_priorities_come_first(void **state)
{
    (void)state;
    enum { JOBS = 6 };
    static const size_t by_input[JOBS] = {5, 2, 4, 0, 3, 1};
    struct job_head heads[JOBS] = {0};
    size_t order[JOBS];
    struct job_order o = {priority_of, NULL, heads};
    for (size_t i = 0; i < JOBS; i++) order[i] = i;
    job_order_sort(&o, order, JOBS);
    assert_memory_equal(order, by_input, sizeof order);

    heads[2].cut[0] = 9; /* after 4, which is of its priority */
    heads[0].cut[0] = 9;
    static const size_t by_head[JOBS] = {5, 4, 2, 3, 0, 1};
    o.head_of = head_of;
    job_order_sort(&o, order, JOBS);
    assert_memory_equal(order, by_head, sizeof order);
}

/* Hashes agree exactly as far as the bytes do; a document stands for its digest. */
static void test_heads_agree_as_far_as_bytes_do(void **state)
{
    (void)state;
    enum { LENGTH = 1000, PART = 200 };
    char text[LENGTH + 1] = {0}, other[LENGTH + 1] = {0};
    memset(text, 'x', LENGTH);
    memset(other, 'x', LENGTH);
    other[PART] = 'y';
    const struct job_head a = head_of_text(text), b = head_of_text(other);
    for (int i = 0; i < JOB_HEAD_CUTS; i++) /* the role's name and its NUL come first */
        assert_int_equal(a.cut[i] == b.cut[i], (JOB_HEAD_FIRST_BYTES << i) <= PART + (int)sizeof "user");

    const unsigned char digests[2][32] = {{1, 2, 3}, {9, 9}};
    struct job_part parts[] = {{.document_path = (char *)(uintptr_t)"one.txt"}, {.text = (char *)(uintptr_t)"What?", .text_len = 5}};
    struct job_message message = {.role = "user", .parts = parts, .n_parts = 2};
    const struct job_spec spec = {.messages = &message, .n_messages = 1};
    struct job_head one, two, again;
    job_head_make(&spec, digests[0], 32, &one);
    job_head_make(&spec, digests[1], 32, &two);
    parts[0].document_path = (char *)(uintptr_t)"copy.txt";
    job_head_make(&spec, digests[0], 32, &again);
    assert_memory_equal(&one, &again, sizeof one);
    assert_int_not_equal(one.cut[0], two.cut[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_jobs_that_begin_alike_lie_together),
        cmocka_unit_test(test_priorities_come_first),
        cmocka_unit_test(test_heads_agree_as_far_as_bytes_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
