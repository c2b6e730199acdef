/* model_bind: what is refused before anything is loaded, per family; what is loaded, per rank; what may be left alone. Values
 * that come out right are the business of tests/rank/test_hybrid_forward.c. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gguf_build.h"
#include "kern_cpu.h"
#include "model_bind.h"

enum { HIDDEN = 32, FFN = 64, VOCAB = 64, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 16, Q = HEADS * HEAD_DIM, KV = KV_HEADS * HEAD_DIM };
enum { K_HEADS = 2, V_HEADS = 6, GDN_DIM = 16, CONV = 4, VALUES = V_HEADS * GDN_DIM, CHANNELS = 2 * K_HEADS * GDN_DIM + VALUES };
enum { MAX_TENSORS = 80 };

struct named {
    char name[64];
    int cols, rows;
    float first; /* the others are 0 */
};

struct family {
    const char *arch;
    struct named tensors[MAX_TENSORS];
    int n;
    bool mtp;
};

static void add(struct family *f, const char *name, int layer, int cols, int rows)
{
    struct named *t = &f->tensors[f->n++];
    assert_true(f->n <= MAX_TENSORS);
    *t = (struct named){.cols = cols, .rows = rows};
    if (layer < 0) snprintf(t->name, sizeof t->name, "%s", name);
    else snprintf(t->name, sizeof t->name, "blk.%d.%s", layer, name);
}

static void add_layer(struct family *f, int layer, bool hybrid)
{
    add(f, "attn_norm.weight", layer, HIDDEN, 1);
    add(f, hybrid ? "post_attention_norm.weight" : "ffn_norm.weight", layer, HIDDEN, 1);
    add(f, "ffn_gate.weight", layer, HIDDEN, FFN);
    add(f, "ffn_up.weight", layer, HIDDEN, FFN);
    add(f, "ffn_down.weight", layer, FFN, HIDDEN);
}

static void add_attention(struct family *f, int layer)
{
    bool hybrid = !strcmp(f->arch, "qwen35");
    add_layer(f, layer, hybrid);
    add(f, "attn_q.weight", layer, HIDDEN, hybrid ? 2 * Q : Q);
    add(f, "attn_k.weight", layer, HIDDEN, KV);
    add(f, "attn_v.weight", layer, HIDDEN, KV);
    add(f, "attn_output.weight", layer, Q, HIDDEN);
    if (!strcmp(f->arch, "qwen2")) {
        add(f, "attn_q.bias", layer, Q, 1);
        add(f, "attn_k.bias", layer, KV, 1);
        add(f, "attn_v.bias", layer, KV, 1);
    }
    if (hybrid || !strcmp(f->arch, "qwen3")) {
        add(f, "attn_q_norm.weight", layer, HEAD_DIM, 1);
        add(f, "attn_k_norm.weight", layer, HEAD_DIM, 1);
    }
}

static void add_gdn(struct family *f, int layer)
{
    add_layer(f, layer, true);
    add(f, "attn_qkv.weight", layer, HIDDEN, CHANNELS);
    add(f, "attn_gate.weight", layer, HIDDEN, VALUES);
    add(f, "ssm_beta.weight", layer, HIDDEN, V_HEADS);
    add(f, "ssm_alpha.weight", layer, HIDDEN, V_HEADS);
    add(f, "ssm_conv1d.weight", layer, CONV, CHANNELS);
    add(f, "ssm_a", layer, V_HEADS, 1);
    add(f, "ssm_dt.bias", layer, V_HEADS, 1);
    add(f, "ssm_norm.weight", layer, GDN_DIM, 1);
    add(f, "ssm_out.weight", layer, VALUES, HIDDEN);
}

/* Two layers; of qwen35 the first is Gated DeltaNet, and the MTP layer comes third. */
static struct family family_of(const char *arch)
{
    struct family f = {.arch = arch, .mtp = !strcmp(arch, "qwen35")};
    add(&f, "token_embd.weight", -1, HIDDEN, VOCAB);
    add(&f, "output_norm.weight", -1, HIDDEN, 1);
    add(&f, "output.weight", -1, HIDDEN, VOCAB);
    if (f.mtp) add_gdn(&f, 0);
    else add_attention(&f, 0);
    add_attention(&f, 1);
    if (!f.mtp) return f;
    add_attention(&f, 2);
    add(&f, "nextn.eh_proj.weight", 2, 2 * HIDDEN, HIDDEN);
    add(&f, "nextn.enorm.weight", 2, HIDDEN, 1);
    add(&f, "nextn.hnorm.weight", 2, HIDDEN, 1);
    add(&f, "nextn.shared_head_norm.weight", 2, HIDDEN, 1);
    return f;
}

static const char *const archs[] = {"llama", "qwen2", "qwen3", "qwen35"};
enum { ARCHS = sizeof archs / sizeof *archs };

static void add_int(struct gguf_build *g, const char *arch, const char *name, uint32_t value)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%s", arch, name);
    add_u32(g, key, value);
}

static void build(const struct family *f, struct buf *out)
{
    struct gguf_build g = {0};
    add_text(&g, "general.architecture", f->arch);
    add_int(&g, f->arch, "block_count", f->mtp ? 3 : 2);
    add_int(&g, f->arch, "context_length", 128);
    add_int(&g, f->arch, "embedding_length", HIDDEN);
    add_int(&g, f->arch, "feed_forward_length", FFN);
    add_int(&g, f->arch, "attention.head_count", HEADS);
    add_int(&g, f->arch, "attention.head_count_kv", KV_HEADS);
    add_int(&g, f->arch, "attention.key_length", HEAD_DIM);
    add_int(&g, f->arch, "attention.value_length", HEAD_DIM);
    if (f->mtp) {
        add_int(&g, f->arch, "rope.dimension_count", HEAD_DIM / 4);
        add_int(&g, f->arch, "ssm.conv_kernel", CONV);
        add_int(&g, f->arch, "ssm.state_size", GDN_DIM);
        add_int(&g, f->arch, "ssm.group_count", K_HEADS);
        add_int(&g, f->arch, "ssm.time_step_rank", V_HEADS);
        add_int(&g, f->arch, "ssm.inner_size", VALUES);
        add_int(&g, f->arch, "full_attention_interval", 2);
        add_int(&g, f->arch, "nextn_predict_layers", 1);
    }
    char eps[96];
    snprintf(eps, sizeof eps, "%s.attention.layer_norm_rms_epsilon", f->arch);
    add_f32(&g, eps, 1e-6f);
    for (int i = 0; i < f->n; i++) {
        const struct named *t = &f->tensors[i];
        if (t->cols) add_matrix(&g, t->name, (uint64_t)t->cols, (uint64_t)t->rows, t->first);
    }
    build_file(&g, out);
}

static int beats;
static void beat(void *ctx) { (void)ctx, beats++; }

struct bound {
    struct buf bytes;
    struct model_file *file;
    struct model_config config;
    struct partition partition;
    struct kern *kern;
    struct model_weights weights;
};

/* Binds one rank's share of two. */
static enum rc bind(const struct family *f, int rank, bool mtp, enum kern_weights how, struct bound *out, struct err *e)
{
    *out = (struct bound){0};
    build(f, &out->bytes);
    enum rc rc = model_file_open_bytes(out->bytes.data, out->bytes.len, "model", &out->file, e);
    if (rc == RC_OK) rc = model_config_read(out->file, &out->config, e);
    if (rc == RC_OK) rc = partition_make(&out->config, 2, PARTITION_FFN_STEP, &out->partition, e);
    if (rc == RC_OK) rc = kern_cpu_open(NULL, 1, &out->kern, e);
    if (rc != RC_OK) return rc;
    const struct model_bind_options o = {.file = out->file, .config = &out->config, .part = &out->partition.part[rank],
                                         .how = how, .mtp = mtp, .kern = out->kern, .beat = beat};
    return model_bind(&o, &out->weights, e);
}

static void unbind(struct bound *b)
{
    model_bind_free(&b->weights);
    if (b->kern) b->kern->close(b->kern);
    model_file_close(b->file);
    buf_free(&b->bytes);
}

static void refused(const struct family *f, const char *code, const char *word)
{
    struct bound b;
    struct err e = {0};
    if (bind(f, 0, f->mtp, KERN_WEIGHTS_NATIVE, &b, &e) != RC_BAD_INPUT) fail_msg("%s: %s was not refused", f->arch, word);
    assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
    if (code) assert_string_equal(e.code, code);
    assert_string_equal(e.source, "model");
    if (!strstr(e.text, word)) fail_msg("\"%s\" does not name %s", e.text, word);
    assert_null(b.weights.layers);
    unbind(&b);
}

static void binds_every_family(void **state)
{
    (void)state;
    for (int a = 0; a < ARCHS; a++)
        for (int rank = 0; rank < 2; rank++) {
            struct family f = family_of(archs[a]);
            struct bound b;
            struct err e = {0};
            beats = 0;
            if (bind(&f, rank, f.mtp, KERN_WEIGHTS_NATIVE, &b, &e) != RC_OK) fail_msg("%s: %s", f.arch, e.text);
            const struct model_layer *first = &b.weights.layers[0], *second = &b.weights.layers[1];
            assert_int_equal(b.weights.n_layers, 2);
            assert_true(beats >= 3);
            assert_int_equal(first->gdn, f.mtp);
            assert_int_equal(first->conv_dev != NULL, f.mtp);
            assert_false(second->gdn);
            assert_null(second->conv_dev);
            assert_non_null(second->in_proj);
            assert_non_null(second->out_proj);
            assert_int_equal(second->bias_dev != NULL, !strcmp(f.arch, "qwen2"));
            assert_int_equal(second->q_norm_dev != NULL, f.mtp || !strcmp(f.arch, "qwen3"));
            assert_int_equal(b.weights.mtp_fc != NULL, f.mtp);
            assert_true(b.weights.bytes > 0);
            unbind(&b);
        }
}

/* Without a head it is tied, without its first matrix there is no MTP layer. */
static bool is_optional(const char *name) { return !strcmp(name, "output.weight") || strstr(name, "eh_proj"); }

static void refuses_missing_tensors(void **state)
{
    (void)state;
    for (int a = 0; a < ARCHS; a++)
        for (int i = 0; i < family_of(archs[a]).n; i++) {
            struct family f = family_of(archs[a]);
            char name[64];
            if (is_optional(f.tensors[i].name)) continue;
            memcpy(name, f.tensors[i].name, sizeof name);
            f.tensors[i].cols = 0;
            refused(&f, i ? "missing_tensor" : NULL, name); /* the embedding's absence is found before */
        }
}

static void refuses_an_mtp_layer_that_is_not_there(void **state)
{
    (void)state;
    struct family f = family_of("qwen35");
    assert_non_null(strstr(f.tensors[f.n - 4].name, "eh_proj"));
    f.tensors[f.n - 4].cols = 0;
    refused(&f, "no_mtp", "MTP");
}

static void refuses_wrong_shapes(void **state)
{
    (void)state;
    for (int a = 0; a < ARCHS; a++)
        for (int i = 1; i < family_of(archs[a]).n; i++)
            for (int way = 0; way < 2; way++) {
                struct family f = family_of(archs[a]);
                if (way) f.tensors[i].cols += 16;
                else f.tensors[i].rows += 1;
                refused(&f, "wrong_shape", f.tensors[i].name);
            }
}

static void refuses_unknown_tensors(void **state)
{
    (void)state;
    static const struct { int arch; const char *name; } strange[] = {
        {0, "blk.0.attn_q.bias"},          {0, "blk.0.attn_q_norm.weight"}, {0, "blk.2.attn_q.weight"},
        {1, "blk.0.attn_output.bias"},     {1, "blk.1.attn_k_norm.weight"}, {2, "blk.1.attn_v.bias"},
        {3, "blk.0.attn_q.weight"},        {3, "blk.1.ssm_a"},              {3, "blk.1.nextn.eh_proj.weight"},
        {3, "blk.2.nextn.embed_tokens.weight"}, {3, "blk.2.nextn.shared_head_head.weight"}, {3, "blk.3.attn_norm.weight"},
    };
    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++) {
        struct family f = family_of(archs[strange[i].arch]);
        add(&f, strange[i].name, -1, HIDDEN, 16);
        refused(&f, "unknown_tensor", strange[i].name);
    }
}

/* Not wanted: neither loaded nor needed whole, and no stranger. */
static void leaves_an_unwanted_mtp_layer_alone(void **state)
{
    (void)state;
    struct family f = family_of("qwen35");
    struct bound with, without;
    struct err e = {0};
    assert_int_equal(bind(&f, 0, true, KERN_WEIGHTS_NATIVE, &with, &e), RC_OK);
    f.tensors[f.n - 1].cols = 0;
    if (bind(&f, 0, false, KERN_WEIGHTS_NATIVE, &without, &e) != RC_OK) fail_msg("%s", e.text);
    assert_false(without.weights.mtp);
    assert_null(without.weights.mtp_fc);
    assert_null(without.weights.layers[2].in_proj);
    assert_true(without.weights.bytes < with.weights.bytes);
    unbind(&without);
    unbind(&with);
}

static void refuses_growing_states(void **state)
{
    (void)state;
    const float rates[] = {1e-30f, 3, INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        struct family f = family_of("qwen35");
        for (int t = 0; t < f.n; t++)
            if (strstr(f.tensors[t].name, "ssm_a") && !strstr(f.tensors[t].name, "alpha")) f.tensors[t].first = rates[i];
        refused(&f, "bad_value", "layer 0");
    }
}

/* Eight bits in place of 32 for every matrix but GDN's b and a, and the vectors. */
static void loads_8_bit_weights(void **state)
{
    (void)state;
    struct family f = family_of("qwen35");
    struct bound native, w8;
    struct err e = {0};
    assert_int_equal(bind(&f, 0, true, KERN_WEIGHTS_NATIVE, &native, &e), RC_OK);
    if (bind(&f, 0, true, KERN_WEIGHTS_W8, &w8, &e) != RC_OK) fail_msg("%s", e.text);
    assert_true(w8.weights.bytes < native.weights.bytes / 2);
    assert_true(w8.weights.bytes > native.weights.bytes / 4);
    const struct kern_weight *in = w8.weights.layers[0].in_proj, *was = native.weights.layers[0].in_proj;
    size_t b_and_a = 2 * 16 * HIDDEN * sizeof(float); /* two parts, each filled up to 16 rows */
    assert_true(w8.kern->weight_bytes(in) > b_and_a + (native.kern->weight_bytes(was) - b_and_a) / 4);
    unbind(&w8);
    unbind(&native);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(binds_every_family),     cmocka_unit_test(refuses_missing_tensors),
        cmocka_unit_test(refuses_wrong_shapes),   cmocka_unit_test(refuses_unknown_tensors),
        cmocka_unit_test(refuses_growing_states), cmocka_unit_test(leaves_an_unwanted_mtp_layer_alone),
        cmocka_unit_test(loads_8_bit_weights),    cmocka_unit_test(refuses_an_mtp_layer_that_is_not_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
