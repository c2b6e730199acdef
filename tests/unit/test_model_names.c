/* model_names: every role's spelling, use and shape, written out here once more and compared; and miniatures of the
 * quantized releases, with their names and their mixtures of formats, through config.json, container and roles. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "gguf_build.h"
#include "model_file_private.h"
#include "model_names.h"
#include "safetensors_build.h"

/* The miniature: 8 layers, of which 3 and 7 attend, and MTP. */
enum { LAYERS = 8, HIDDEN = 64, FFN = 160, VOCAB = 96, Q = 6 * 64, KV = 2 * 64, V = 6 * 32, CHANNELS = 2 * 2 * 32 + V };

static const char config_text[] =
    "{\"architectures\":[\"Qwen3_5ForConditionalGeneration\"],\"model_type\":\"qwen3_5\",\"text_config\":{"
    "\"model_type\":\"qwen3_5_text\",\"hidden_size\":64,\"intermediate_size\":160,\"vocab_size\":96,"
    "\"num_hidden_layers\":8,\"full_attention_interval\":4,\"num_attention_heads\":6,\"num_key_value_heads\":2,"
    "\"head_dim\":64,\"linear_num_key_heads\":2,\"linear_num_value_heads\":6,\"linear_key_head_dim\":32,"
    "\"linear_value_head_dim\":32,\"linear_conv_kernel_dim\":4,\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-06,"
    "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":10000000,\"partial_rotary_factor\":0.25},"
    "\"max_position_embeddings\":512,\"tie_word_embeddings\":false,\"mtp_num_hidden_layers\":1}}";

/* What of a model is quantized alike. */
enum kind { PLAIN, MLP, ATTENTION, GDN, HEAD, FC };

static const struct part {
    enum model_role role;
    const char *hf;
    const char *gguf;
    uint64_t rows, cols;
    enum kind kind;
} parts[] = {
    {ROLE_MIX_NORM, "input_layernorm.weight", "attn_norm.weight", 1, HIDDEN, PLAIN},
    {ROLE_FFN_NORM, "post_attention_layernorm.weight", "post_attention_norm.weight", 1, HIDDEN, PLAIN},
    {ROLE_GATE, "mlp.gate_proj.weight", "ffn_gate.weight", FFN, HIDDEN, MLP},
    {ROLE_UP, "mlp.up_proj.weight", "ffn_up.weight", FFN, HIDDEN, MLP},
    {ROLE_DOWN, "mlp.down_proj.weight", "ffn_down.weight", HIDDEN, FFN, MLP},
    {ROLE_Q, "self_attn.q_proj.weight", "attn_q.weight", 2 * Q, HIDDEN, ATTENTION},
    {ROLE_K, "self_attn.k_proj.weight", "attn_k.weight", KV, HIDDEN, ATTENTION},
    {ROLE_V, "self_attn.v_proj.weight", "attn_v.weight", KV, HIDDEN, ATTENTION},
    {ROLE_O, "self_attn.o_proj.weight", "attn_output.weight", HIDDEN, Q, ATTENTION},
    {ROLE_Q_NORM, "self_attn.q_norm.weight", "attn_q_norm.weight", 1, 64, PLAIN},
    {ROLE_K_NORM, "self_attn.k_norm.weight", "attn_k_norm.weight", 1, 64, PLAIN},
    {ROLE_GDN_QKV, "linear_attn.in_proj_qkv.weight", "attn_qkv.weight", CHANNELS, HIDDEN, GDN},
    {ROLE_GDN_Z, "linear_attn.in_proj_z.weight", "attn_gate.weight", V, HIDDEN, GDN},
    {ROLE_GDN_B, "linear_attn.in_proj_b.weight", "ssm_beta.weight", 6, HIDDEN, PLAIN},
    {ROLE_GDN_A, "linear_attn.in_proj_a.weight", "ssm_alpha.weight", 6, HIDDEN, PLAIN},
    {ROLE_GDN_CONV, "linear_attn.conv1d.weight", "ssm_conv1d.weight", CHANNELS, 4, PLAIN},
    {ROLE_GDN_A_LOG, "linear_attn.A_log", "ssm_a", 1, 6, PLAIN},
    {ROLE_GDN_DT, "linear_attn.dt_bias", "ssm_dt.bias", 1, 6, PLAIN},
    {ROLE_GDN_NORM, "linear_attn.norm.weight", "ssm_norm.weight", 1, 32, PLAIN},
    {ROLE_GDN_OUT, "linear_attn.out_proj.weight", "ssm_out.weight", HIDDEN, V, GDN},
    {ROLE_MTP_FC, "fc.weight", "nextn.eh_proj.weight", HIDDEN, 2 * HIDDEN, FC},
    {ROLE_MTP_EMBEDDING_NORM, "pre_fc_norm_embedding.weight", "nextn.enorm.weight", 1, HIDDEN, PLAIN},
    {ROLE_MTP_HIDDEN_NORM, "pre_fc_norm_hidden.weight", "nextn.hnorm.weight", 1, HIDDEN, PLAIN},
    {ROLE_MTP_NORM, "norm.weight", "nextn.shared_head_norm.weight", 1, HIDDEN, PLAIN},
    {ROLE_EMBEDDING, "embed_tokens.weight", "token_embd.weight", VOCAB, HIDDEN, PLAIN},
    {ROLE_OUT_NORM, "norm.weight", "output_norm.weight", 1, HIDDEN, PLAIN},
    {ROLE_HEAD, "lm_head.weight", "output.weight", VOCAB, HIDDEN, HEAD},
};
enum { PARTS = sizeof parts / sizeof *parts };

static bool of_model(enum model_role r) { return r <= ROLE_HEAD; }
static bool of_attention(enum model_role r) { return r >= ROLE_Q && r <= ROLE_K_NORM; }
static bool of_gdn(enum model_role r) { return r >= ROLE_GDN_QKV && r <= ROLE_GDN_OUT; }
static bool of_mtp(enum model_role r) { return r >= ROLE_MTP_FC; }

/* Whether this layer of the miniature has this part; layer LAYERS is MTP, -1 the model itself. */
static bool has_part(const struct part *p, int layer)
{
    if (layer < 0 || of_model(p->role)) return layer < 0 && of_model(p->role);
    if (of_mtp(p->role)) return layer == LAYERS;
    bool attends = layer % 4 == 3 || layer == LAYERS;
    return of_attention(p->role) ? attends : of_gdn(p->role) ? !attends : true;
}

static void name_hf(const struct part *p, int layer, const char *text, const char *mtp, char out[128])
{
    if (p->role == ROLE_HEAD)
        snprintf(out, 128, "%s", p->hf);
    else if (layer < 0)
        snprintf(out, 128, "%s%s", text, p->hf);
    else if (of_mtp(p->role))
        snprintf(out, 128, "%s%s", mtp, p->hf);
    else if (layer == LAYERS)
        snprintf(out, 128, "%slayers.0.%s", mtp, p->hf);
    else
        snprintf(out, 128, "%slayers.%d.%s", text, layer, p->hf);
}

enum storage { BF16, FP8_BLOCK, FP8_TENSOR, FP8_CHANNEL, NVFP4_MULTIPLIED, NVFP4_DIVIDED };

/* name ends in "weight". */
static void store(struct safetensors_build *s, const char *name, uint64_t rows, uint64_t cols, enum storage how)
{
    char base[128], beside[160];
    snprintf(base, sizeof base, "%.*s", (int)(strlen(name) - 7), name);
#define BESIDE(suffix) (snprintf(beside, sizeof beside, "%s" suffix, base), beside)
    switch (how) {
    case BF16: add_2d(s, name, "BF16", rows, cols); break;
    case FP8_BLOCK:
        add_2d(s, name, "F8_E4M3", rows, cols);
        add_2d(s, BESIDE(".weight_scale_inv"), "BF16", (rows + 127) / 128, (cols + 127) / 128);
        break;
    case FP8_TENSOR:
        add_2d(s, name, "F8_E4M3", rows, cols);
        add_number(s, BESIDE(".weight_scale"), 0, 0.5f);
        add_number(s, BESIDE(".input_scale"), 0, 0.25f);
        break;
    case FP8_CHANNEL:
        add_2d(s, name, "F8_E4M3", rows, cols);
        add_2d(s, BESIDE(".weight_scale"), "BF16", rows, 1);
        break;
    case NVFP4_MULTIPLIED:
        add_2d(s, name, "U8", rows, cols / 2);
        add_2d(s, BESIDE(".weight_scale"), "F8_E4M3", rows, cols / 16);
        add_number(s, BESIDE(".weight_scale_2"), 0, 0.125f);
        add_number(s, BESIDE(".input_scale"), 0, 0.25f);
        break;
    case NVFP4_DIVIDED:
        add_2d(s, BESIDE(".weight_packed"), "U8", rows, cols / 2);
        add_2d(s, BESIDE(".weight_scale"), "F8_E4M3", rows, cols / 16);
        add_number(s, BESIDE(".weight_global_scale"), 1, 8);
        add_number(s, BESIDE(".input_global_scale"), 1, 4);
        break;
    }
#undef BESIDE
}

/* Block FP8 of all linears but GDN's b and a, the head and fc. */
static enum storage block_fp8(enum kind kind, int layer)
{
    (void)layer;
    return kind == MLP || kind == ATTENTION || kind == GDN ? FP8_BLOCK : BF16;
}

/* FP8 per tensor for attention and GDN, NVFP4 (multiplied) for MLPs and the head, MTP as it was. */
static enum storage mixed_modelopt(enum kind kind, int layer)
{
    if (layer == LAYERS || kind == PLAIN) return BF16;
    return kind == MLP || kind == HEAD ? NVFP4_MULTIPLIED : FP8_TENSOR;
}

/* FP8 per channel for attention, GDN, the head and the MLPs of the last layers, NVFP4 (divided) for the other MLPs. */
static enum storage mixed_compressed(enum kind kind, int layer)
{
    if (layer == LAYERS || kind == PLAIN) return BF16;
    return kind == MLP && layer < LAYERS - 2 ? NVFP4_DIVIDED : FP8_CHANNEL;
}

static enum storage plain(enum kind kind, int layer)
{
    (void)kind, (void)layer;
    return BF16;
}

/* Writes the miniature, vision tower and KV scales included, under these prefixes; returns how many tensors it has. */
static size_t build_release(enum storage (*format)(enum kind, int), const char *text, const char *mtp, struct buf *out)
{
    struct safetensors_build s = {0};
    char name[128];
    size_t count = 0;
    for (int layer = -1; layer <= LAYERS; layer++)
        for (const struct part *p = parts; p < parts + PARTS; p++) {
            if (!has_part(p, layer)) continue;
            name_hf(p, layer, text, mtp, name);
            if (p->role == ROLE_GDN_CONV)
                add_stored(&s, name, "BF16", 3, (uint64_t[]){p->rows, 1, p->cols}, NULL);
            else if (p->rows == 1)
                add_1d(&s, name, "BF16", p->cols);
            else
                store(&s, name, p->rows, p->cols, format(p->kind, layer));
            count++;
        }
    add_stored(&s, "model.visual.patch_embed.proj.weight", "BF16", 5, (uint64_t[]){8, 3, 2, 4, 4}, NULL);
    add_2d(&s, "model.visual.blocks.0.attn.qkv.weight", "BF16", 24, 8);
    snprintf(name, sizeof name, "%slayers.3.self_attn.k_proj.k_scale", text);
    add_number(&s, name, 0, 1);
    build_safetensors(&s, out);
    return count;
}

static void has_storage(const struct tensor_view *t, const struct part *p, enum storage how)
{
    const struct quant_scales *g = &t->matrix.scales;
    assert_int_equal(t->matrix.rows, p->rows);
    assert_int_equal(t->matrix.cols, p->cols);
    assert_true(t->matrix.divide == (how == NVFP4_DIVIDED));
    assert_true(t->matrix.global == (how == NVFP4_DIVIDED ? 8 : how == NVFP4_MULTIPLIED ? 0.125f : 1));
    if (how == BF16) {
        assert_int_equal(t->format, QUANT_BF16);
        assert_null(g->bytes);
        return;
    }
    bool fp4 = how == NVFP4_DIVIDED || how == NVFP4_MULTIPLIED;
    bool one = how == FP8_TENSOR || (how == FP8_BLOCK && p->rows <= 128 && p->cols <= 128);
    assert_int_equal(t->format, fp4 ? QUANT_FP4_PAIRS : QUANT_FP8);
    assert_int_equal(g->format, fp4 ? QUANT_FP8 : how == FP8_TENSOR ? QUANT_F32 : QUANT_BF16);
    assert_int_equal(g->row_block, one ? p->rows : how == FP8_BLOCK ? 128 : 1);
    assert_int_equal(g->col_block, fp4 ? 16 : how == FP8_BLOCK && !one ? 128 : p->cols);
    assert_int_equal(g->per_row, fp4 ? p->cols / 16 : how == FP8_BLOCK ? (p->cols + 127) / 128 : 1);
}

static void check_release(enum storage (*format)(enum kind, int), const char *text, const char *mtp)
{
    struct buf weights = {0};
    struct model_file *m;
    struct model_config c;
    struct err e = {0};
    char name[128], shown[1100];
    size_t count = build_release(format, text, mtp, &weights), ignored = 0;
    const struct model_blob blobs[] = {{"config.json", config_text, sizeof config_text - 1},
                                       {"model.safetensors", weights.data, weights.len}};
    if (model_file_open_blobs(blobs, 2, "m", &m, &e) != RC_OK || model_config_read(m, &c, &e) != RC_OK)
        fail_msg("%s", err_format(&e, shown, sizeof shown));
    assert_true(c.mtp && !c.tied);
    for (int layer = -1; layer <= LAYERS; layer++)
        for (const struct part *p = parts; p < parts + PARTS; p++) {
            if (!has_part(p, layer)) continue;
            const struct tensor_view *t = model_role_find(m, &c, p->role, layer);
            name_hf(p, layer, text, mtp, name);
            if (!t || strcmp(t->name, name)) fail_msg("%s: found %s", name, t ? t->name : "nothing");
            has_storage(t, p, p->kind == PLAIN ? BF16 : format(p->kind, layer));
        }
    for (size_t i = 0; i < model_file_tensor_count(m); i++)
        ignored += !strncmp(model_file_tensor_at(m, i)->name, "model.visual.", 13);
    assert_int_equal(model_file_tensor_count(m), count + ignored);
    assert_int_equal(ignored, 2);
    model_file_close(m);
    buf_free(&weights);
}

static void knows_the_releases(void **state)
{
    (void)state;
    check_release(plain, "model.language_model.", "mtp.");
    check_release(plain, "model.", "model.mtp.");
    check_release(plain, "language_model.model.", "mtp.");
    check_release(block_fp8, "model.language_model.", "mtp.");
    check_release(mixed_modelopt, "model.language_model.", "mtp.");
    check_release(mixed_compressed, "model.language_model.", "mtp.");
}

static struct model_config miniature(enum model_layout layout)
{
    struct model_config c = {.arch = MODEL_ARCH_QWEN35, .layout = layout, .n_layers = LAYERS, .hidden = HIDDEN};
    c.ffn = FFN, c.n_heads = 6, c.n_kv_heads = 2, c.head_dim = 64, c.vocab = VOCAB,
    c.qk_norm = c.attn_gate = c.mtp = true;
    c.gdn_k_heads = 2, c.gdn_v_heads = 6, c.gdn_k_dim = c.gdn_v_dim = 32, c.conv_width = 4;
    for (int i = 0; i < LAYERS; i++) c.gdn[i] = i % 4 != 3;
    return c;
}

static void knows_use_names_and_shapes(void **state)
{
    (void)state;
    for (int layout = MODEL_LAYOUT_GGUF; layout <= MODEL_LAYOUT_HF; layout++) {
        struct model_config c = miniature((enum model_layout)layout);
        for (int layer = 0; layer <= LAYERS; layer++)
            for (const struct part *p = parts; p < parts + PARTS; p++) {
                uint64_t rows, cols;
                char expected[128], name[128];
                assert_int_equal(model_role_used(&c, p->role, layer), of_model(p->role) || has_part(p, layer));
                model_role_shape(&c, p->role, &rows, &cols);
                assert_int_equal(rows, p->rows);
                assert_int_equal(cols, p->cols);
                if (!of_model(p->role) && !has_part(p, layer)) continue;
                if (layout == MODEL_LAYOUT_HF)
                    name_hf(p, of_model(p->role) ? -1 : layer, "model.", "mtp.", expected);
                else if (of_model(p->role))
                    snprintf(expected, sizeof expected, "%s", p->gguf);
                else
                    snprintf(expected, sizeof expected, "blk.%d.%s", layer, p->gguf);
                assert_string_equal(model_role_name(&c, p->role, layer, name, sizeof name), expected);
                bool norm = p->role == ROLE_OUT_NORM || p->role == ROLE_MIX_NORM || p->role == ROLE_FFN_NORM ||
                            p->role == ROLE_Q_NORM || p->role == ROLE_K_NORM || p->role > ROLE_MTP_FC;
                assert_int_equal(model_role_is_offset_norm(&c, p->role), layout == MODEL_LAYOUT_HF && norm);
            }
        assert_false(model_role_used(&c, ROLE_GATE, LAYERS + 1) || model_role_used(&c, ROLE_GATE, -1));
        c.mtp = false;
        assert_false(model_role_used(&c, ROLE_GATE, LAYERS) || model_role_used(&c, ROLE_MTP_FC, LAYERS));
        assert_true(model_role_used(&c, ROLE_HEAD, 0));
        c.tied = true;
        assert_false(model_role_used(&c, ROLE_HEAD, 0));
    }
}

/* Where the older architectures differ. */
static void knows_the_other_architectures(void **state)
{
    (void)state;
    struct model_config c = miniature(MODEL_LAYOUT_GGUF);
    char name[128];
    uint64_t rows, cols;
    memset(c.gdn, 0, sizeof c.gdn);
    c.attn_gate = c.mtp = c.qk_norm = false;
    c.arch = MODEL_ARCH_LLAMA;
    assert_string_equal(model_role_name(&c, ROLE_FFN_NORM, 7, name, sizeof name), "blk.7.ffn_norm.weight");
    model_role_shape(&c, ROLE_Q, &rows, &cols);
    assert_int_equal(rows, Q);
    assert_true(model_role_used(&c, ROLE_Q, 0) && !model_role_used(&c, ROLE_Q_NORM, 0));
    assert_false(model_role_used(&c, ROLE_GDN_QKV, 0) || model_role_used(&c, ROLE_Q_BIAS, 0));
    static const struct {
        enum model_role role;
        const char *gguf, *hf;
        uint64_t cols;
    } biases[] = {{ROLE_Q_BIAS, "blk.2.attn_q.bias", "model.layers.2.self_attn.q_proj.bias", Q},
                  {ROLE_K_BIAS, "blk.2.attn_k.bias", "model.layers.2.self_attn.k_proj.bias", KV},
                  {ROLE_V_BIAS, "blk.2.attn_v.bias", "model.layers.2.self_attn.v_proj.bias", KV}};
    c.arch = MODEL_ARCH_QWEN2;
    c.qkv_bias = true;
    for (int i = 0; i < 3; i++) {
        c.layout = MODEL_LAYOUT_GGUF;
        assert_string_equal(model_role_name(&c, biases[i].role, 2, name, sizeof name), biases[i].gguf);
        c.layout = MODEL_LAYOUT_HF;
        assert_string_equal(model_role_name(&c, biases[i].role, 2, name, sizeof name), biases[i].hf);
        assert_true(model_role_used(&c, biases[i].role, 2));
        model_role_shape(&c, biases[i].role, &rows, &cols);
        assert_int_equal(rows, 1);
        assert_int_equal(cols, biases[i].cols);
    }
    assert_false(model_role_is_offset_norm(&c, ROLE_MIX_NORM)); /* plain weights */
}

static void finds_gguf_tensors(void **state)
{
    (void)state;
    struct gguf_build g = {0};
    struct buf file = {0};
    struct model_file *m;
    struct model_config c = miniature(MODEL_LAYOUT_GGUF);
    add_matrix(&g, "blk.8.nextn.eh_proj.weight", 128, 64, 0);
    add_matrix(&g, "blk.8.attn_q.weight", 64, 8, 0);
    add_matrix(&g, "blk.1.ssm_a", 6, 1, 0);
    build_file(&g, &file);
    assert_int_equal(model_file_open_bytes(file.data, file.len, "m.gguf", &m, NULL), RC_OK);
    assert_ptr_equal(model_role_find(m, &c, ROLE_MTP_FC, 8), model_file_tensor_at(m, 0));
    assert_ptr_equal(model_role_find(m, &c, ROLE_Q, 8), model_file_tensor_at(m, 1));
    assert_ptr_equal(model_role_find(m, &c, ROLE_GDN_A_LOG, 1), model_file_tensor_at(m, 2));
    assert_null(model_role_find(m, &c, ROLE_GDN_A_LOG, 2));
    assert_null(model_role_find(m, &c, ROLE_HEAD, 0));
    model_file_close(m);
    buf_free(&file);
}

static void knows_what_may_be_left_out(void **state)
{
    (void)state;
    static const char *const ignored[] = {"model.visual.patch_embed.proj.weight",
                                          "visual.merger.norm.bias",
                                          "mtp.layers.1.mlp.up_proj.weight",
                                          "model.mtp.fc.weight",
                                          "model.layers.0.self_attn.k_proj.k_scale",
                                          "model.layers.0.self_attn.v_scale",
                                          "model.layers.0.self_attn.rotary_emb.inv_freq",
                                          "lm_head.weight"};
    static const char *const needed[] = {"rope_freqs.weight",
                                         "model.layers.0.self_attn.q_proj.bias",
                                         "visual",
                                         "model.norm.weight",
                                         "blk.0.ffn_gate.scale",
                                         "output.weight",
                                         ""};
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) assert_true(model_name_ignored(ignored[i]));
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) assert_false(model_name_ignored(needed[i]));
}

/* The trained model that comes with the examples: all of its tensors have a role. */
static void finds_all_of_a_trained_model(void **state)
{
    (void)state;
    struct model_file *m;
    struct model_config c;
    struct err e = {0};
    char text[1100];
    size_t found = 0;
    if (model_file_open(TANDEM_SOURCE_DIR "/jobs/models/hybrid-small", &m, &e) != RC_OK ||
        model_config_read(m, &c, &e) != RC_OK)
        fail_msg("%s", err_format(&e, text, sizeof text));
    assert_int_equal(model_file_tensor_count(m), 123);
    assert_int_equal(c.n_layers, 8);
    assert_int_equal(c.hidden, 256);
    assert_int_equal(c.vocab, 8192);
    assert_int_equal(c.rope_dim, 16);
    assert_true(c.tied && c.mtp && c.attn_gate && c.qk_norm);
    for (int role = 0; role < MODEL_ROLES; role++)
        for (int layer = 0; layer <= c.n_layers; layer++) {
            const struct tensor_view *t = model_role_find(m, &c, (enum model_role)role, layer);
            uint64_t rows, cols;
            if (role <= ROLE_HEAD && layer) continue;
            assert_int_equal(t != NULL, model_role_used(&c, (enum model_role)role, layer));
            if (!t) continue;
            model_role_shape(&c, (enum model_role)role, &rows, &cols);
            assert_int_equal(t->matrix.rows, rows);
            assert_int_equal(t->matrix.cols, cols);
            assert_int_equal(t->format, QUANT_BF16);
            found++;
        }
    assert_int_equal(found, 123);
    model_file_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(knows_the_releases),
        cmocka_unit_test(knows_use_names_and_shapes),
        cmocka_unit_test(knows_the_other_architectures),
        cmocka_unit_test(finds_gguf_tensors),
        cmocka_unit_test(knows_what_may_be_left_out),
        cmocka_unit_test(finds_all_of_a_trained_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
