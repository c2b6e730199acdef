/* What a rank needs, against figures worked out by hand from the shapes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "model_memory.h"

static struct rank_memory memory_of(const char *path, int ranks, int rank, struct model_memory_options o, struct model_config *c)
{
    struct model_file *m = NULL;
    struct partition p;
    struct err e = {0};
    if (model_file_open(path, &m, &e) != RC_OK || model_config_read(m, c, &e) != RC_OK ||
        partition_make(c, ranks, PARTITION_FFN_STEP, &p, &e) != RC_OK)
        fail_msg("%s: %s", path, e.text);
    struct rank_memory r = model_memory_of_rank(m, c, &p.part[rank], &o);
    model_file_close(m);
    return r;
}

static void small_hybrid(void **state)
{
    (void)state;
    struct model_config c;
    const char *path = TANDEM_SOURCE_DIR "/jobs/models/hybrid-small";
    struct model_memory_options o = {.kv = KV_F16, .mtp = true, .rows = 1, .picks = 1};
    struct rank_memory r = memory_of(path, 1, 0, o, &c);
    assert_int_equal(r.kv_token_bytes, (2 + 1) * 2 * 2 * 64 * 2);
    assert_int_equal(r.state_bytes, 6 * (4 * 64 * 64 + 3 * (2 * 2 * 64 + 4 * 64)) * 4);
    /* 9,926,960 parameters of two bytes; vectors become four. The conversion is once more their number at most. */
    assert_in_range(r.weight_bytes, 19853920, 19853920 + 80000);
    o.mtp = false;
    assert_int_equal(memory_of(path, 1, 0, o, &c).kv_token_bytes, 2 * 2 * 2 * 64 * 2);
    o.mtp = true;
    o.kv = KV_INT8; /* one scale for the 64 values of a head */
    struct rank_memory half = memory_of(path, 2, 1, o, &c);
    assert_int_equal(half.kv_token_bytes, 3 * 2 * (64 + 4));
    assert_int_equal(half.state_bytes, r.state_bytes / 2);
    o.weights = KERN_WEIGHTS_W8;
    assert_true(memory_of(path, 2, 1, o, &c).weight_bytes < half.weight_bytes * 6 / 10);
}

/* The figures that plans for the large model start from. */
static void large_hybrid(void **state)
{
    (void)state;
    struct model_config c;
    const struct model_memory_options o = {.kv = KV_BF16, .mtp = true, .rows = 1, .picks = 1};
    struct rank_memory r = memory_of("synth:qwen3.8-27b", 2, 0, o, &c);
    assert_int_equal(r.kv_token_bytes, (32 + 2) * 1024);
    const uint64_t matrices = UINT64_C(72) << 20, history = 48 * 5120 * 3 * 4;
    assert_int_equal(r.state_bytes, matrices + history);
    struct rank_memory bf16 = memory_of("synth:qwen3.5-27b-bf16", 2, 0, o, &c);
    assert_in_range(bf16.weight_bytes, UINT64_C(24) << 30, UINT64_C(27) << 30);
}

static void context_that_fits(void **state)
{
    (void)state;
    const struct rank_memory r = {.weight_bytes = 1000, .kv_token_bytes = 10, .state_bytes = 50, .work_bytes = 100};
    const uint64_t fixed = 1000 + 100 + 2 * 50;
    assert_int_equal(model_memory_context(&r, 2, fixed), 0);
    assert_int_equal(model_memory_context(&r, 2, fixed + 2 * 64 * 10 - 1), 0);
    assert_int_equal(model_memory_context(&r, 2, fixed + 2 * 64 * 10), 64);
    assert_int_equal(model_memory_context(&r, 2, fixed + 2 * 191 * 10), 128);
    const struct rank_memory no_heads = {.weight_bytes = 1000};
    assert_true(model_memory_context(&no_heads, 2, 1001) == INT64_MAX);
    assert_int_equal(model_memory_context(&no_heads, 2, 1000), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_hybrid),
        cmocka_unit_test(large_hybrid),
        cmocka_unit_test(context_that_fits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
