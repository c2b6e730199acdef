/* model_config over GGUF: a good header of each architecture, then one change at a time: defaults, limits, refusals. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gguf_build.h"
#include "model_config.h"

/* One key of the header. */
struct entry {
    const char *key;
    enum { ABSENT, NUMBER, REAL, TEXT, TRUTH, NUMBERS, TEXTS, TRUTHS } kind;
    double value; /* NUMBERS (all 3) and TEXTS: how many */
    const char *text; /* TRUTHS: a digit each */
};

/* What differs from the good header: up to four keys, and the tensors. */
struct change {
    struct entry entries[4];
    int rows;             /* of token_embd.weight; 0: 64, -1: no such tensor */
    int cols;             /* 0: 48 */
    const char *tensor;   /* one more */
    const char *expected; /* a part of the error, NULL: accepted */
};

static const struct entry good_llama[] = {
    {"general.architecture", TEXT, 0, "llama"},
    {"llama.block_count", NUMBER, 2, NULL},
    {"llama.context_length", NUMBER, 8192, NULL},
    {"llama.embedding_length", NUMBER, 48, NULL},
    {"llama.feed_forward_length", NUMBER, 96, NULL},
    {"llama.attention.head_count", NUMBER, 3, NULL},
    {"llama.attention.head_count_kv", NUMBER, 1, NULL},
    {"llama.attention.layer_norm_rms_epsilon", REAL, 1e-5, NULL},
    {"llama.rope.freq_base", REAL, 100000, NULL},
    {"llama.rope.dimension_count", NUMBER, 16, NULL},
    {"llama.vocab_size", NUMBER, 64, NULL},
    {"tokenizer.ggml.tokens", TEXTS, 64, NULL},
};

static const struct entry good_qwen35[] = {
    {"general.architecture", TEXT, 0, "qwen35"},
    {"qwen35.block_count", NUMBER, 9, NULL}, /* eight layers and MTP */
    {"qwen35.nextn_predict_layers", NUMBER, 1, NULL},
    {"qwen35.context_length", NUMBER, 8192, NULL},
    {"qwen35.embedding_length", NUMBER, 48, NULL},
    {"qwen35.feed_forward_length", NUMBER, 96, NULL},
    {"qwen35.attention.head_count", NUMBER, 6, NULL},
    {"qwen35.attention.head_count_kv", NUMBER, 2, NULL},
    {"qwen35.attention.key_length", NUMBER, 64, NULL},
    {"qwen35.attention.value_length", NUMBER, 64, NULL},
    {"qwen35.attention.layer_norm_rms_epsilon", REAL, 1e-6, NULL},
    {"qwen35.rope.freq_base", REAL, 1e7, NULL},
    {"qwen35.rope.dimension_count", NUMBER, 16, NULL},
    {"qwen35.rope.dimension_sections", NUMBERS, 4, NULL},
    {"qwen35.full_attention_interval", NUMBER, 4, NULL},
    {"qwen35.ssm.conv_kernel", NUMBER, 4, NULL},
    {"qwen35.ssm.state_size", NUMBER, 32, NULL},
    {"qwen35.ssm.group_count", NUMBER, 2, NULL},
    {"qwen35.ssm.time_step_rank", NUMBER, 6, NULL},
    {"qwen35.ssm.inner_size", NUMBER, 96, NULL},
};

/* A header to change. */
struct header {
    const struct entry *entries;
    size_t n;
};
static const struct header llama = {good_llama, sizeof good_llama / sizeof *good_llama};
static const struct header qwen35 = {good_qwen35, sizeof good_qwen35 / sizeof *good_qwen35};

static void add_entry_of(struct gguf_build *g, const struct entry *entry)
{
    int64_t n = entry->kind == REAL ? 0 : (int64_t)entry->value;
    switch (entry->kind) {
    case ABSENT: break;
    case NUMBER: put_u64(add_key(g, entry->key, GGUF_I64), (uint64_t)n); break;
    case REAL: add_f32(g, entry->key, (float)entry->value); break;
    case TEXT: add_text(g, entry->key, entry->text); break;
    case TRUTH: add_bool(g, entry->key, n != 0); break;
    case NUMBERS:
        add_array(g, entry->key, GGUF_U32, (uint64_t)n);
        for (int64_t i = 0; i < n; i++) put_u32(&g->keys, 3);
        break;
    case TRUTHS:
        add_array(g, entry->key, GGUF_BOOL, strlen(entry->text));
        for (const char *p = entry->text; *p; p++) buf_append(&g->keys, &(char){(char)(*p - '0')}, 1);
        break;
    case TEXTS:
        add_array(g, entry->key, GGUF_STRING, (uint64_t)n);
        for (int64_t i = 0; i < n; i++) put_text(&g->keys, "t");
        break;
    }
}

static enum rc read_of(struct header good, const struct change *change, struct model_config *out, struct err *e)
{
    struct gguf_build g = {0};
    struct buf file = {0};
    bool used[4] = {false};
    for (size_t i = 0; i < good.n; i++) {
        const struct entry *entry = &good.entries[i];
        for (int k = 0; k < 4; k++)
            if (change->entries[k].key && !strcmp(change->entries[k].key, entry->key)) {
                entry = &change->entries[k];
                used[k] = true;
            }
        add_entry_of(&g, entry);
    }
    for (int k = 0; k < 4; k++)
        if (change->entries[k].key && !used[k]) add_entry_of(&g, &change->entries[k]);
    uint64_t rows = change->rows ? (uint64_t)change->rows : 64, cols = change->cols ? (uint64_t)change->cols : 48;
    if (change->rows >= 0) add_matrix(&g, "token_embd.weight", cols, rows, 0);
    if (change->tensor) add_matrix(&g, change->tensor, 48, 64, 0);
    build_file(&g, &file);
    struct model_file *m;
    assert_int_equal(model_file_open_bytes(file.data, file.len, "m.gguf", &m, NULL), RC_OK);
    enum rc rc = model_config_read(m, out, e);
    model_file_close(m);
    buf_free(&file);
    return rc;
}

static enum rc read_changed(const struct change *change, struct model_config *out, struct err *e)
{
    return read_of(llama, change, out, e);
}

static void reads_a_good_header(void **state)
{
    (void)state;
    struct model_config c = {0};
    assert_int_equal(read_changed(&(struct change){0}, &c, NULL), RC_OK);
    assert_int_equal(c.arch, MODEL_ARCH_LLAMA);
    assert_string_equal(model_arch_name(c.arch), "llama");
    assert_int_equal(c.n_layers, 2);
    assert_int_equal(c.hidden, 48);
    assert_int_equal(c.ffn, 96);
    assert_int_equal(c.n_heads, 3);
    assert_int_equal(c.n_kv_heads, 1);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.rope_dim, 16);
    assert_true(c.rope_adjacent);
    assert_true(c.rope_theta == 100000.0);
    assert_true(c.rms_eps == 1e-5f);
    assert_int_equal(c.vocab, 64);
    assert_int_equal(c.context, 8192);
    assert_true(c.tied);
    assert_int_equal(c.layout, MODEL_LAYOUT_GGUF);
    assert_false(c.qkv_bias || c.qk_norm || c.attn_gate || c.mtp || c.gdn[0]);
    assert_int_equal(c.gdn_v_heads, 0);
}

/* The keys of llama's header under another architecture's name. */
static void knows_qwen2_and_qwen3(void **state)
{
    (void)state;
    for (int version = 2; version <= 3; version++) {
        struct entry entries[sizeof good_llama / sizeof *good_llama];
        char keys[sizeof good_llama / sizeof *good_llama][96], arch[24];
        struct model_config c = {0};
        memcpy(entries, good_llama, sizeof entries);
        snprintf(arch, sizeof arch, "qwen%d", version);
        entries[0].text = arch;
        for (size_t i = 1; i < llama.n; i++) {
            if (strncmp(entries[i].key, "llama.", 6)) continue;
            snprintf(keys[i], sizeof keys[i], "%s.%s", arch, entries[i].key + 6);
            entries[i].key = keys[i];
        }
        assert_int_equal(read_of((struct header){entries, llama.n}, &(struct change){0}, &c, NULL), RC_OK);
        assert_string_equal(model_arch_name(c.arch), arch);
        assert_false(c.rope_adjacent);
        assert_int_equal(c.qkv_bias, version == 2);
        assert_int_equal(c.qk_norm, version == 3);
        assert_false(c.attn_gate || c.mtp || c.gdn[0]);
        assert_int_equal(c.head_dim, 16);
    }
}

static void reads_a_hybrid(void **state)
{
    (void)state;
    struct model_config c = {0};
    struct change mtp = {.tensor = "blk.8.nextn.eh_proj.weight"};
    assert_int_equal(read_of(qwen35, &mtp, &c, NULL), RC_OK);
    assert_int_equal(c.arch, MODEL_ARCH_QWEN35);
    assert_int_equal(c.n_layers, 8);
    assert_int_equal(c.n_heads, 6);
    assert_int_equal(c.n_kv_heads, 2);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.rope_dim, 16);
    assert_false(c.rope_adjacent);
    assert_true(c.rope_theta == 1e7);
    assert_true(c.qk_norm && c.attn_gate && c.mtp);
    assert_false(c.qkv_bias);
    for (int i = 0; i < 8; i++) assert_int_equal(c.gdn[i], i != 3 && i != 7);
    assert_int_equal(c.gdn_k_heads, 2);
    assert_int_equal(c.gdn_v_heads, 6);
    assert_int_equal(c.gdn_k_dim, 32);
    assert_int_equal(c.gdn_v_dim, 16);
    assert_int_equal(c.conv_width, 4);
    assert_int_equal(read_of(qwen35, &(struct change){0}, &c, NULL), RC_OK);
    assert_int_equal(c.n_layers, 8);
    assert_false(c.mtp); /* announced, but its tensors were left out */
    struct change without = {.entries = {{.key = "qwen35.nextn_predict_layers"},
                                         {.key = "qwen35.full_attention_interval"},
                                         {"qwen35.block_count", NUMBER, 8, NULL}},
                             .tensor = "blk.8.nextn.eh_proj.weight"};
    assert_int_equal(read_of(qwen35, &without, &c, NULL), RC_OK);
    assert_int_equal(c.n_layers, 8);
    assert_false(c.mtp); /* not announced */
    assert_true(c.gdn[2] && !c.gdn[3]);
    static const char *const kinds[] = {"10110101", "101101010"}; /* with and without a word on MTP */
    for (int k = 0; k < 2; k++) {
        struct change named = {.entries = {{"qwen35.attention.recurrent_layers", TRUTHS, 0, kinds[k]}}};
        assert_int_equal(read_of(qwen35, &named, &c, NULL), RC_OK);
        for (int i = 0; i < 8; i++) assert_int_equal(c.gdn[i], kinds[k][i] == '1');
    }
}

static void fills_in_defaults(void **state)
{
    (void)state;
    struct model_config c = {0};
    struct change heads = {.entries = {{.key = "llama.attention.head_count_kv"}, {.key = "llama.rope.freq_base"}}};
    assert_int_equal(read_changed(&heads, &c, NULL), RC_OK);
    assert_int_equal(c.n_kv_heads, 3);
    assert_true(c.rope_theta == 10000.0);
    struct change dims = {.entries = {{.key = "llama.rope.dimension_count"},
                                      {"llama.attention.key_length", NUMBER, 32, NULL},
                                      {.key = "llama.vocab_size"}}};
    assert_int_equal(read_changed(&dims, &c, NULL), RC_OK);
    assert_int_equal(c.head_dim, 32);
    assert_int_equal(c.rope_dim, 32);
    assert_int_equal(c.vocab, 64);
    struct change partial = {
        .entries = {{"llama.rope.dimension_count", NUMBER, 8, NULL}, {.key = "tokenizer.ggml.tokens"}},
        .tensor = "output.weight"};
    assert_int_equal(read_changed(&partial, &c, NULL), RC_OK);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.rope_dim, 8);
    assert_false(c.tied);
}

#define ONE(...) .entries = {{__VA_ARGS__}}

static const struct change changes[] = {
    {ONE(.key = "general.architecture"), .expected = "general.architecture is missing"},
    {ONE("general.architecture", TEXT, 0, "qwen2moe"), .expected = "\"qwen2moe\" is not supported"},
    {ONE("general.architecture", TEXT, 0, "qwen2"), .expected = "qwen2.block_count is missing"},
    {ONE("general.architecture", TEXT, 0, "llama2"), .expected = "\"llama2\""},
    {ONE("general.architecture", TEXT, 0, "lla\x1bma"), .expected = "\"lla?ma\""},
    {ONE("general.architecture", TEXT, 0, ""), .expected = "\"\""},
    {ONE("general.architecture", NUMBER, 1, NULL), .expected = "general.architecture is missing or no string"},
    {ONE(.key = "llama.block_count"), .expected = "llama.block_count is missing"},
    {ONE("llama.block_count", NUMBER, 0, NULL), .expected = "llama.block_count is 0"},
    {ONE("llama.block_count", NUMBER, 512, NULL)},
    {ONE("llama.block_count", NUMBER, 513, NULL), .expected = "llama.block_count is 513"},
    {ONE("llama.block_count", NUMBER, 4294967298, NULL), .expected = "llama.block_count is 4294967298"},
    {ONE("llama.block_count", NUMBER, -1, NULL), .expected = "llama.block_count is no whole number"},
    {ONE("llama.block_count", TEXT, 0, "2"), .expected = "llama.block_count is no whole number"},
    {ONE(.key = "llama.embedding_length"), .expected = "llama.embedding_length is missing"},
    {ONE("llama.embedding_length", NUMBER, 40, NULL), .expected = "llama.embedding_length is 40"},
    {ONE("llama.embedding_length", NUMBER, 65552, NULL), .expected = "llama.embedding_length is 65552"},
    {ONE("llama.embedding_length", NUMBER, 96, NULL), .expected = "no matrix with rows of 96"},
    {ONE(.key = "llama.feed_forward_length"), .expected = "llama.feed_forward_length is missing"},
    {ONE("llama.feed_forward_length", NUMBERS, 2, NULL), .expected = "differs by layer"},
    {ONE("llama.feed_forward_length", NUMBER, 1 << 21, NULL), .expected = "llama.feed_forward_length is 2097152"},
    {ONE(.key = "llama.context_length"), .expected = "llama.context_length is missing"},
    {ONE("llama.context_length", NUMBER, 0, NULL), .expected = "llama.context_length is 0"},
    {ONE("llama.context_length", NUMBER, 1 << 22, NULL)},
    {ONE("llama.context_length", NUMBER, (1 << 22) + 1, NULL), .expected = "llama.context_length is 4194305"},
    {ONE(.key = "llama.attention.head_count"), .expected = "llama.attention.head_count is missing"},
    {ONE("llama.attention.head_count", NUMBERS, 2, NULL), .expected = "llama.attention.head_count differs by layer"},
    {ONE("llama.attention.head_count", NUMBER, 0, NULL), .expected = "llama.attention.head_count is 0"},
    {ONE("llama.attention.head_count", NUMBER, 5, NULL), .expected = "llama.attention.key_length is missing"},
    {ONE("llama.attention.head_count_kv", NUMBER, 2, NULL), .expected = "3 query heads cannot share 2"},
    {ONE("llama.attention.head_count_kv", NUMBER, 4, NULL), .expected = "head_count_kv is 4"},
    {ONE("llama.attention.head_count_kv", TEXT, 0, "x"), .expected = "head_count_kv is no whole number"},
    {ONE("llama.attention.key_length", NUMBER, 24, NULL), .expected = "llama.attention.key_length is 24"},
    {ONE("llama.attention.key_length", NUMBER, 272, NULL), .expected = "llama.attention.key_length is 272"},
    {ONE("llama.attention.value_length", NUMBER, 32, NULL), .expected = "keys of 16 and values of 32"},
    {ONE("llama.rope.dimension_count", NUMBER, 7, NULL), .expected = "llama.rope.dimension_count is 7"},
    {ONE("llama.rope.dimension_count", NUMBER, 18, NULL), .expected = "llama.rope.dimension_count is 18"},
    {ONE("llama.rope.dimension_count", NUMBER, 0, NULL), .expected = "llama.rope.dimension_count is 0"},
    {.entries = {{"llama.attention.head_count", NUMBER, 4096, NULL}, {"llama.attention.key_length", NUMBER, 256, NULL}},
     .expected = "4096 heads of 256"},
    {ONE(.key = "llama.attention.layer_norm_rms_epsilon"), .expected = "epsilon is missing"},
    {ONE("llama.attention.layer_norm_rms_epsilon", REAL, 0, NULL), .expected = "epsilon is 0"},
    {ONE("llama.attention.layer_norm_rms_epsilon", REAL, 1, NULL), .expected = "epsilon of norms is 1"},
    {ONE("llama.attention.layer_norm_rms_epsilon", REAL, -1e-5, NULL), .expected = "epsilon is -1e-05"},
    {ONE("llama.attention.layer_norm_rms_epsilon", NUMBER, 1, NULL), .expected = "epsilon is no floating-point"},
    {ONE("llama.rope.freq_base", REAL, -1, NULL), .expected = "llama.rope.freq_base is -1"},
    {ONE("llama.rope.freq_base", REAL, (double)INFINITY, NULL), .expected = "llama.rope.freq_base is inf"},
    {ONE("llama.rope.freq_base", REAL, (double)NAN, NULL), .expected = "llama.rope.freq_base is "},
    {ONE("llama.rope.freq_base", NUMBER, 10000, NULL), .expected = "llama.rope.freq_base is no floating-point"},
    {ONE("llama.vocab_size", NUMBER, 65, NULL), .expected = "vocab_size is 65, but token_embd.weight has 64 rows"},
    {ONE("tokenizer.ggml.tokens", TEXTS, 63, NULL), .expected = "tokenizer has 63 tokens, token_embd.weight has 64"},
    {ONE("tokenizer.ggml.tokens", NUMBER, 64, NULL), .expected = "tokenizer has 0 tokens"},
    {.rows = 80, .expected = "vocab_size is 64, but token_embd.weight has 80 rows"},
    {.rows = -1, .expected = "token_embd.weight is missing"},
    {.cols = 64, .expected = "no matrix with rows of 48"},
    {.tensor = "rope_freqs.weight", .expected = "rope_freqs.weight: scaled rotary"},
    {ONE("llama.rope.scaling.type", TEXT, 0, "linear"), .expected = "llama.rope.scaling.type: scaled rotary"},
    {ONE("llama.rope.scaling.factor", REAL, 2, NULL), .expected = "llama.rope.scaling.factor: scaled rotary"},
    {ONE("llama.rope.scale_linear", REAL, 2, NULL), .expected = "llama.rope.scale_linear: scaled rotary"},
    {ONE("other.rope.scaling.factor", REAL, 2, NULL)},
    {ONE("llama.rope.scaling.type", TEXT, 0, "none")},
    {ONE("llama.rope.scaling.type", TEXT, 0, "yarn"), .expected = "llama.rope.scaling.type: scaled rotary"},
    {ONE("llama.rope.scaling.factor", REAL, 1, NULL)},
    {.entries = {{"llama.rope.scaling.type", TEXT, 0, "linear"}, {"llama.rope.scaling.factor", REAL, 1, NULL}}},
    {ONE("llama.nextn_predict_layers", NUMBER, 1, NULL)}, /* no key of llama's */
    {ONE("llama.expert_count", NUMBER, 8, NULL), .expected = "llama.expert_count is set"},
    {ONE("llama.expert_count", NUMBER, 0, NULL)},
    {ONE("llama.attention.sliding_window", NUMBER, 4096, NULL), .expected = "sliding_window is set"},
    {ONE("llama.attention.causal", TRUTH, 0, NULL), .expected = "causal is not true"},
    {ONE("llama.attention.causal", TRUTH, 1, NULL)},
};

static const struct change hybrid_changes[] = {
    {ONE("qwen35.nextn_predict_layers", NUMBER, 2, NULL), .expected = "qwen35.nextn_predict_layers is 2"},
    {ONE("qwen35.block_count", NUMBER, 1, NULL), .expected = "qwen35.block_count is 1, not a multiple of 1 from 2"},
    {ONE("qwen35.block_count", NUMBER, 513, NULL)},
    {ONE("qwen35.block_count", NUMBER, 514, NULL), .expected = "qwen35.block_count is 514"},
    {ONE("qwen35.full_attention_interval", NUMBER, 0, NULL), .expected = "full_attention_interval is 0"},
    {ONE("qwen35.attention.recurrent_layers", TRUTHS, 0, "1011"), .expected = "no array of truth values for 8 layers"},
    {ONE("qwen35.attention.recurrent_layers", TEXTS, 8, NULL), .expected = "no array of truth values for 8 layers"},
    {ONE("qwen35.attention.recurrent_layers", NUMBERS, 8, NULL), .expected = "holds what is no truth value"},
    {ONE(.key = "qwen35.ssm.conv_kernel"), .expected = "qwen35.ssm.conv_kernel is missing"},
    {ONE("qwen35.ssm.conv_kernel", NUMBER, 1, NULL), .expected = "qwen35.ssm.conv_kernel is 1"},
    {ONE("qwen35.ssm.conv_kernel", NUMBER, 9, NULL), .expected = "qwen35.ssm.conv_kernel is 9"},
    {ONE(.key = "qwen35.ssm.state_size"), .expected = "qwen35.ssm.state_size is missing"},
    {ONE("qwen35.ssm.state_size", NUMBER, 24, NULL), .expected = "qwen35.ssm.state_size is 24"},
    {ONE(.key = "qwen35.ssm.group_count"), .expected = "qwen35.ssm.group_count is missing"},
    {ONE("qwen35.ssm.group_count", NUMBER, 0, NULL), .expected = "qwen35.ssm.group_count is 0"},
    {ONE("qwen35.ssm.group_count", NUMBER, 4, NULL), .expected = "6 value heads cannot share 4 key heads"},
    {ONE(.key = "qwen35.ssm.time_step_rank"), .expected = "qwen35.ssm.time_step_rank is missing"},
    {ONE("qwen35.ssm.time_step_rank", NUMBER, 5, NULL), .expected = "inner_size is 96, no multiple of the 5 value heads"},
    {ONE("qwen35.ssm.time_step_rank", NUMBER, 4, NULL), .expected = "the width of a value head"},
    {ONE(.key = "qwen35.ssm.inner_size"), .expected = "qwen35.ssm.inner_size is missing"},
    {.entries = {{"qwen35.ssm.group_count", NUMBER, 4096, NULL},
                 {"qwen35.ssm.state_size", NUMBER, 256, NULL},
                 {"qwen35.ssm.time_step_rank", NUMBER, 4096, NULL}},
     .expected = "inner_size is 96"},
    {.entries = {{"qwen35.ssm.group_count", NUMBER, 2048, NULL},
                 {"qwen35.ssm.state_size", NUMBER, 256, NULL},
                 {"qwen35.ssm.time_step_rank", NUMBER, 2048, NULL},
                 {"qwen35.ssm.inner_size", NUMBER, 2048 * 16, NULL}},
     .expected = "2048 key heads of 256"},
};

static void check_changes(struct header header, const struct change *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct model_config c = {.hidden = -5};
        struct err e = {0};
        enum rc rc = read_of(header, &list[i], &c, &e);
        const char *key = list[i].entries[0].key ? list[i].entries[0].key : "a tensor";
        if (!list[i].expected) {
            if (rc != RC_OK) fail_msg("change %zu (%s) was refused: %s", i, key, e.text);
            continue;
        }
        if (rc != RC_BAD_INPUT || !strstr(e.text, list[i].expected))
            fail_msg("change %zu (%s): rc %d, \"%s\", not \"%s\"", i, key, rc, e.text, list[i].expected);
        assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
        assert_string_equal(e.source, "m.gguf");
        assert_int_equal(c.hidden, -5); /* untouched */
        assert_int_equal(read_of(header, &list[i], &c, NULL), RC_BAD_INPUT);
    }
}

static void checks_each_key(void **state)
{
    (void)state;
    check_changes(llama, changes, sizeof changes / sizeof *changes);
    check_changes(qwen35, hybrid_changes, sizeof hybrid_changes / sizeof *hybrid_changes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_a_good_header),
        cmocka_unit_test(knows_qwen2_and_qwen3),
        cmocka_unit_test(reads_a_hybrid),
        cmocka_unit_test(fills_in_defaults),
        cmocka_unit_test(checks_each_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
