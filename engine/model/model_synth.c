/* model_synth: a table of shapes, the tensors that follow from it, and the counter-based values that fill them.
 *
 * Matrices are uniform with a variance of gain / in_features, so that activations keep their size through any depth; matrices
 * that write to the residual stream have the gain of the model's table entry. The embedding has variance 1, the head gain 3:
 * logits differ enough that greedy answers are no single repeated token. Small parameters (norms, decay, time step) lie in the
 * ranges that trained models have. */
#define _GNU_SOURCE
#include "model_synth.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <xxhash.h>

#include "mapped_file.h"

/* Raised when the same name and seed come to mean other values. */
enum { SYNTH_VERSION = 1 };

enum synth_storage {
    STORE_F32,
    STORE_BF16,
    STORE_Q4_1,        /* matrices Q4_1, embedding Q8_0 */
    STORE_NVFP4_MIXED  /* NVFP4 in the MLP of all but the last eight layers, FP8 per channel elsewhere; BF16: embedding, MTP, a, b */
};

struct synth_shape {
    const char *name;
    const char *model_type; /* of config.json */
    enum synth_storage storage;
    int layers, hidden, ffn, heads, kv_heads, head_dim, rope_dim;
    int k_heads, v_heads, gdn_dim, conv; /* 0: no GDN; every fourth layer is attention */
    int vocab, vocab_used, context;
    double theta, eps;
    bool tied, mtp, qkv_bias;
    float mixer_gain;       /* of what attention, GDN and MLP add to the residual stream */
    bool pass_embedding;    /* the MTP layer's fc hands its embedding half on, and last norms are near 1: drafts are often right */
};

static const struct synth_shape shapes[] = {
    {"qwen3.8-27b", "qwen3_5_text", STORE_NVFP4_MIXED, 64, 5120, 17408, 24, 4, 256, 64, 16, 48, 128, 4, 248320, 248077, 262144, 1e7,
     1e-6, false, true, false, 0.03f, true},
    {"qwen3.5-27b-bf16", "qwen3_5_text", STORE_BF16, 64, 5120, 17408, 24, 4, 256, 64, 16, 48, 128, 4, 248320, 248077, 262144, 1e7,
     1e-6, false, true, false, 0.03f, true},
    {"qwen2.5-0.5b", "qwen2", STORE_BF16, 24, 896, 4864, 14, 2, 64, 64, 0, 0, 0, 0, 151936, 151665, 32768, 1e6, 1e-6, true, false,
     true, 0.5f, false},
    {"smollm2-135m", "llama", STORE_Q4_1, 30, 576, 1536, 9, 3, 64, 64, 0, 0, 0, 0, 49152, 49152, 8192, 1e5, 1e-5, true, false, false,
     0.5f, false},
    {"tiny-hybrid", "qwen3_5_text", STORE_F32, 4, 64, 96, 6, 2, 64, 16, 2, 6, 32, 4, 320, 300, 4096, 1e7, 1e-6, false, true, false,
     0.7f, false},
    /* What the target says next hangs mostly on the last token, and the MTP layer is handed that token: they agree often. Twelve
     * layers, so that drafts are cheap enough to be made. */
    {"tiny-hybrid-agree", "qwen3_5_text", STORE_F32, 12, 64, 96, 6, 2, 64, 16, 2, 6, 32, 4, 320, 300, 4096, 1e7, 1e-6, false, true,
     false, 0.06f, true},
    {"tiny-hybrid-mixed", "qwen3_5_text", STORE_NVFP4_MIXED, 12, 128, 256, 6, 2, 64, 16, 2, 6, 32, 4, 320, 300, 4096, 1e7, 1e-6,
     false, true, false, 0.5f, true},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

enum synth_values {
    VALUES_UNIFORM, /* mean 0, the given deviation */
    VALUES_NEAR,    /* the given mean, plus or minus 0.2 */
    VALUES_A_LOG,   /* log of a decay between 0.02 and 4 */
    VALUES_PASS     /* [n, 2 n]: the left half is the identity, the right half small */
};

struct synth_tensor {
    enum synth_values values;
    float parameter; /* deviation or mean */
    uint64_t seed;
    size_t n_bytes;  /* codes and scales, from bytes on */
    bool filled;
};

/* ---- random numbers ---- */

static uint64_t random_at(uint64_t seed, uint64_t i)
{
    uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Uniform in [-1, 1): 16 bits of the counter's word. */
static float uniform_at(uint64_t seed, uint64_t i)
{
    return (float)(int16_t)(uint16_t)(random_at(seed, i / 4) >> i % 4 * 16) * 0x1p-15f;
}

static float value_at(const struct synth_tensor *s, uint64_t cols, uint64_t row, uint64_t col)
{
    const float u = uniform_at(s->seed, row * cols + col);
    switch (s->values) {
    case VALUES_NEAR: return s->parameter + 0.2f * u;
    case VALUES_A_LOG: return -1.25f + 2.6f * u;
    case VALUES_PASS: return col == row ? 1.0f : col < cols / 2 ? 0 : s->parameter * u;
    default: return s->parameter * 1.7320508f * u;
    }
}

/* ---- filling ---- */

static uint16_t to_bf16(float f)
{
    union {
        float f;
        uint32_t u;
    } v = {f};
    return (uint16_t)((v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}

static void fill_plain(const struct synth_tensor *s, const struct quant_matrix *m, uint64_t row, unsigned char *to)
{
    for (uint64_t c = 0; c < m->cols; c++) {
        const float f = value_at(s, m->cols, row, c);
        const uint16_t half = to_bf16(f);
        if (m->format == QUANT_F32)
            memcpy(to + c * sizeof f, &f, sizeof f);
        else
            memcpy(to + c * sizeof half, &half, sizeof half);
    }
}

static void fill_bytes(uint64_t seed, uint64_t first, size_t n, unsigned char *to)
{
    for (size_t i = 0; i < n; i += 8) {
        const uint64_t word = random_at(seed, first / 8 + i / 8);
        memcpy(to + i, &word, n - i < 8 ? n - i : 8);
    }
}

/* Root of the mean square of codes drawn evenly: E4M3 without its NaN, E2M1, 4 bits less 7.5, 8 bits. */
static const float RMS_E4M3 = 107.24f, RMS_E2M1 = 2.926f, RMS_4 = 4.61f, RMS_8 = 73.9f;

static void fill_fp8_row(const struct synth_tensor *s, const struct quant_matrix *m, uint64_t row, unsigned char *to)
{
    fill_bytes(s->seed, row * ((m->cols + 7) / 8 * 8), (size_t)m->cols, to);
    for (uint64_t c = 0; c < m->cols; c++) to[c] = (unsigned char)(to[c] ^ ((to[c] & 0x7f) == 0x7f));
    const float scale = s->parameter / RMS_E4M3 * (1 + 0.25f * uniform_at(~s->seed, row));
    memcpy((unsigned char *)(uintptr_t)m->scales.bytes + row * sizeof scale, &scale, sizeof scale);
}

static void fill_fp4_row(const struct synth_tensor *s, const struct quant_matrix *m, uint64_t row, unsigned char *to)
{
    const size_t n = (size_t)m->cols / 2, n_scales = (size_t)m->scales.per_row;
    fill_bytes(s->seed, row * ((n + 7) / 8 * 8), n, to);
    unsigned char *scales = (unsigned char *)(uintptr_t)m->scales.bytes + row * n_scales;
    fill_bytes(~s->seed, row * ((n_scales + 7) / 8 * 8), n_scales, scales);
    for (size_t i = 0; i < n_scales; i++) scales[i] = (unsigned char)(0x38 | (scales[i] & 7)); /* 1 to 1.875 */
}

static void fill_blocks_row(const struct synth_tensor *s, const struct quant_matrix *m, uint64_t row, unsigned char *to)
{
    const size_t block = quant_block_bytes(m->format), n = (size_t)m->cols / quant_block_values(m->format);
    fill_bytes(s->seed, row * ((n * block + 7) / 8 * 8), n * block, to);
    const float scale = s->parameter / (m->format == QUANT_Q4_1 ? RMS_4 : RMS_8);
    const uint16_t d = quant_f32_to_f16(scale), min = quant_f32_to_f16(-7.5f * scale);
    for (size_t b = 0; b < n; b++) {
        memcpy(to + b * block, &d, sizeof d);
        if (m->format == QUANT_Q4_1) memcpy(to + b * block + 2, &min, sizeof min);
    }
}

void model_synth_fill(const struct model_synth *s, const struct tensor_view *t)
{
    struct synth_tensor *how = &s->made[t - s->tensors.views];
    if (how->filled) return;
    const struct quant_matrix *m = &t->matrix;
    unsigned char *to = (unsigned char *)(uintptr_t)m->bytes;
    size_t row_bytes = 0;
    quant_row_bytes(m->format, m->cols, &row_bytes);
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) if (m->rows > 64)
#endif
    for (uint64_t r = 0; r < m->rows; r++) {
        unsigned char *row = to + r * row_bytes;
        switch (m->format) {
        case QUANT_F32:
        case QUANT_BF16: fill_plain(how, m, r, row); break;
        case QUANT_FP8: fill_fp8_row(how, m, r, row); break;
        case QUANT_FP4_PAIRS: fill_fp4_row(how, m, r, row); break;
        default: fill_blocks_row(how, m, r, row); break;
        }
    }
    how->filled = true;
}

void model_synth_drop(const struct model_synth *s, const struct tensor_view *t)
{
    struct synth_tensor *how = &s->made[t - s->tensors.views];
    if (!how->filled) return;
    madvise((void *)(uintptr_t)t->bytes, how->n_bytes, MADV_DONTNEED);
    how->filled = false;
}

/* ---- tensors ---- */

struct builder {
    struct model_synth *s;
    const struct synth_shape *shape;
    uint64_t seed;
    size_t cap;
    bool failed; /* out of memory */
};

enum { PAGE = 4096 };

/* Adds a tensor; memory is placed later. */
static void add(struct builder *b, const char *name, enum quant_format format, uint64_t rows, uint64_t cols,
                enum synth_values values, float parameter)
{
    struct model_synth *s = b->s;
    char *copy = b->failed ? NULL : strdup(name);
    struct tensor_view *t = copy ? tensor_index_add(&s->tensors, copy) : NULL;
    if (t && s->tensors.n > b->cap) {
        b->cap = 2 * s->tensors.n;
        struct synth_tensor *grown = realloc(s->made, b->cap * sizeof *grown);
        if (grown) s->made = grown;
        else t = NULL;
    }
    if (!t) {
        b->failed = true;
        return;
    }
    size_t row_bytes = 0;
    quant_row_bytes(format, cols, &row_bytes);
    t->format = format;
    t->n_dims = rows == 1 ? 1 : 2;
    t->dims[0] = cols;
    t->dims[1] = rows;
    t->dims[2] = t->dims[3] = 1;
    t->n_bytes = (size_t)rows * row_bytes;
    t->matrix = (struct quant_matrix){.format = format, .rows = rows, .cols = cols, .global = 1};
    size_t scale_bytes = 0;
    if (format == QUANT_FP8) {
        t->matrix.scales = (struct quant_scales){.format = QUANT_F32, .row_block = 1, .col_block = cols, .per_row = 1};
        scale_bytes = (size_t)rows * sizeof(float);
    } else if (format == QUANT_FP4_PAIRS) {
        t->matrix.scales = (struct quant_scales){.format = QUANT_FP8, .row_block = 1, .col_block = 16, .per_row = cols / 16};
        t->matrix.global = parameter / (RMS_E2M1 * 1.4375f); /* the mean of the scales */
        scale_bytes = (size_t)(rows * (cols / 16));
    }
    s->made[s->tensors.n - 1] = (struct synth_tensor){
        .values = values,
        .parameter = parameter,
        .seed = XXH3_64bits_withSeed(name, strlen(name), b->seed),
        .n_bytes = t->n_bytes + scale_bytes,
    };
    t->n_bytes += scale_bytes;
}

struct name {
    char text[96];
};

static struct name in_layer(int layer, const char *suffix)
{
    struct name n;
    if (layer < 0) snprintf(n.text, sizeof n.text, "mtp.layers.0.%s", suffix);
    else snprintf(n.text, sizeof n.text, "model.layers.%d.%s", layer, suffix);
    return n;
}

/* How a matrix of a layer is stored; layer -1: of the MTP layer. */
static enum quant_format format_of(const struct synth_shape *c, int layer, bool mlp)
{
    switch (c->storage) {
    case STORE_F32: return QUANT_F32;
    case STORE_BF16: return QUANT_BF16;
    case STORE_Q4_1: return QUANT_Q4_1;
    case STORE_NVFP4_MIXED: break;
    }
    if (layer < 0) return QUANT_BF16;
    return mlp && layer < c->layers - 8 ? QUANT_FP4_PAIRS : QUANT_FP8;
}

static enum quant_format plain_format(const struct synth_shape *c)
{
    return c->storage == STORE_F32 || c->storage == STORE_Q4_1 ? QUANT_F32 : QUANT_BF16;
}

static void add_matrix(struct builder *b, int layer, const char *suffix, enum quant_format f, int rows, int cols, float gain)
{
    add(b, in_layer(layer, suffix).text, f, (uint64_t)rows, (uint64_t)cols, VALUES_UNIFORM, gain / sqrtf((float)cols));
}

/* A vector near a mean: 0 for norms that are used as 1 + w. */
static void add_vector(struct builder *b, int layer, const char *suffix, int n, float mean)
{
    add(b, in_layer(layer, suffix).text, plain_format(b->shape), 1, (uint64_t)n, VALUES_NEAR, mean);
}

static bool has_gdn(const struct synth_shape *c) { return c->k_heads > 0; }

static void add_attention(struct builder *b, int layer, float out_gain)
{
    const struct synth_shape *c = b->shape;
    const enum quant_format f = format_of(c, layer, false);
    const int q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    add_matrix(b, layer, "self_attn.q_proj.weight", f, has_gdn(c) ? 2 * q : q, c->hidden, 1);
    add_matrix(b, layer, "self_attn.k_proj.weight", f, kv, c->hidden, 1);
    add_matrix(b, layer, "self_attn.v_proj.weight", f, kv, c->hidden, 1);
    add_matrix(b, layer, "self_attn.o_proj.weight", f, c->hidden, q, out_gain);
    if (c->qkv_bias) {
        add_vector(b, layer, "self_attn.q_proj.bias", q, 0);
        add_vector(b, layer, "self_attn.k_proj.bias", kv, 0);
        add_vector(b, layer, "self_attn.v_proj.bias", kv, 0);
    }
    if (has_gdn(c)) {
        add_vector(b, layer, "self_attn.q_norm.weight", c->head_dim, 0);
        add_vector(b, layer, "self_attn.k_norm.weight", c->head_dim, 0);
    }
}

static void add_gdn(struct builder *b, int layer, float out_gain)
{
    const struct synth_shape *c = b->shape;
    const enum quant_format f = format_of(c, layer, false), plain = plain_format(c);
    const int keys = c->k_heads * c->gdn_dim, values = c->v_heads * c->gdn_dim;
    add_matrix(b, layer, "linear_attn.in_proj_qkv.weight", f, 2 * keys + values, c->hidden, 1);
    add_matrix(b, layer, "linear_attn.in_proj_z.weight", f, values, c->hidden, 1);
    add_matrix(b, layer, "linear_attn.in_proj_b.weight", plain, c->v_heads, c->hidden, 1);
    add_matrix(b, layer, "linear_attn.in_proj_a.weight", plain, c->v_heads, c->hidden, 1);
    add_matrix(b, layer, "linear_attn.conv1d.weight", plain, 2 * keys + values, c->conv, 1);
    add(b, in_layer(layer, "linear_attn.A_log").text, plain, 1, (uint64_t)c->v_heads, VALUES_A_LOG, 0);
    add_vector(b, layer, "linear_attn.dt_bias", c->v_heads, 0);
    add_vector(b, layer, "linear_attn.norm.weight", c->gdn_dim, 1);
    add_matrix(b, layer, "linear_attn.out_proj.weight", f, c->hidden, values, out_gain);
}

static void add_layer(struct builder *b, int layer)
{
    const struct synth_shape *c = b->shape;
    const enum quant_format f = format_of(c, layer, true);
    const float norm = has_gdn(c) ? 0 : 1;
    add_vector(b, layer, "input_layernorm.weight", c->hidden, norm);
    add_vector(b, layer, "post_attention_layernorm.weight", c->hidden, norm);
    if (has_gdn(c) && layer >= 0 && (layer + 1) % 4)
        add_gdn(b, layer, c->mixer_gain);
    else
        add_attention(b, layer, c->mixer_gain);
    add_matrix(b, layer, "mlp.gate_proj.weight", f, c->ffn, c->hidden, 1);
    add_matrix(b, layer, "mlp.up_proj.weight", f, c->ffn, c->hidden, 1);
    add_matrix(b, layer, "mlp.down_proj.weight", f, c->hidden, c->ffn, c->mixer_gain);
}

/* The norms between embedding and head. Where drafts are to agree with the target these must. */
static void add_last_norm(struct builder *b, const char *name)
{
    const struct synth_shape *c = b->shape;
    const uint64_t n = (uint64_t)c->hidden;
    if (c->pass_embedding) add(b, name, plain_format(c), 1, n, VALUES_UNIFORM, 0.02f);
    else add(b, name, plain_format(c), 1, n, VALUES_NEAR, has_gdn(c) ? 0 : 1);
}

static void add_mtp(struct builder *b)
{
    const struct synth_shape *c = b->shape;
    const enum quant_format f = format_of(c, -1, false);
    const uint64_t n = (uint64_t)c->hidden;
    add(b, "mtp.fc.weight", f, n, 2 * n, c->pass_embedding ? VALUES_PASS : VALUES_UNIFORM,
        (c->pass_embedding ? 0.1f : 1) / sqrtf(2 * (float)c->hidden));
    static const char *const norms[] = {"mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"};
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++) add_last_norm(b, norms[i]);
    add_layer(b, -1);
}

static void add_all(struct builder *b)
{
    const struct synth_shape *c = b->shape;
    const uint64_t n = (uint64_t)c->hidden, vocab = (uint64_t)c->vocab;
    const enum quant_format table = c->storage == STORE_Q4_1 ? QUANT_Q8_0 : plain_format(c);
    /* A tied table is also the head: its variance is then the head's. */
    add(b, "model.embed_tokens.weight", table, vocab, n, VALUES_UNIFORM, c->tied ? 3 / sqrtf((float)c->hidden) : 1);
    add_last_norm(b, "model.norm.weight");
    if (!c->tied)
        add(b, "lm_head.weight", format_of(c, 0, false), vocab, n, VALUES_UNIFORM, 3 / sqrtf((float)c->hidden));
    for (int l = 0; l < c->layers; l++) add_layer(b, l);
    if (c->mtp) add_mtp(b);
}

/* Reserves memory for all tensors and points them into it. */
static enum rc place(struct model_synth *s, struct err *e)
{
    for (size_t i = 0; i < s->tensors.n; i++) s->n_bytes += (s->made[i].n_bytes + PAGE - 1) / PAGE * PAGE;
    void *memory = mmap(NULL, s->n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "no_memory", "cannot reserve %zu bytes for synth:%s", s->n_bytes, s->name);
    s->memory = memory;
    unsigned char *at = s->memory;
    for (size_t i = 0; i < s->tensors.n; i++) {
        struct tensor_view *t = &s->tensors.views[i];
        size_t row_bytes = 0;
        quant_row_bytes(t->format, t->matrix.cols, &row_bytes);
        t->bytes = t->matrix.bytes = at;
        if (t->matrix.scales.per_row) t->matrix.scales.bytes = at + t->matrix.rows * row_bytes;
        at += (s->made[i].n_bytes + PAGE - 1) / PAGE * PAGE;
    }
    return RC_OK;
}

/* ---- texts ---- */

static void write_config(const struct synth_shape *c, struct buf *out)
{
    buf_printf(out,
               "{\"model_type\": \"%s\", \"hidden_size\": %d, \"intermediate_size\": %d, \"vocab_size\": %d, "
               "\"num_hidden_layers\": %d, \"num_attention_heads\": %d, \"num_key_value_heads\": %d, \"head_dim\": %d, "
               "\"hidden_act\": \"silu\", \"rms_norm_eps\": %g, \"max_position_embeddings\": %d, \"tie_word_embeddings\": %s",
               c->model_type, c->hidden, c->ffn, c->vocab, c->layers, c->heads, c->kv_heads, c->head_dim, c->eps, c->context,
               c->tied ? "true" : "false");
    if (has_gdn(c))
        buf_printf(out,
                   ", \"full_attention_interval\": 4, \"linear_num_key_heads\": %d, \"linear_num_value_heads\": %d, "
                   "\"linear_key_head_dim\": %d, \"linear_value_head_dim\": %d, \"linear_conv_kernel_dim\": %d, "
                   "\"attn_output_gate\": true, \"output_gate_type\": \"swish\", \"mamba_ssm_dtype\": \"float32\", "
                   "\"mtp_num_hidden_layers\": %d, \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": %.1f, "
                   "\"partial_rotary_factor\": %g}}",
                   c->k_heads, c->v_heads, c->gdn_dim, c->gdn_dim, c->conv, c->mtp, c->theta, (double)c->rope_dim / c->head_dim);
    else
        buf_printf(out, ", \"rope_theta\": %.1f}", c->theta);
}

/* The character that byte-level vocabularies write for a byte, as UTF-8 inside JSON. */
static void write_byte_character(int byte, struct buf *out)
{
    int shifted = 0;
    for (int i = 0; i < byte; i++) shifted += i <= 32 || (i >= 127 && i <= 160) || i == 173;
    const bool plain = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    buf_printf(out, "\\u%04x", plain ? byte : 256 + shifted);
}

enum { FIRST_WORD = 256, SPECIALS = 3 };
static const char *const specials[SPECIALS] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

/* The 256 bytes, the one merge there is, made-up words, then three control tokens at the end of what is addressable. */
static void write_tokenizer(const struct synth_shape *c, struct buf *out)
{
    static const char split[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?[\\\\p{L}\\\\p{M}]+|\\\\p{N}| "
                                "?[^\\\\s\\\\p{L}\\\\p{M}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+";
    const int words = c->vocab_used - SPECIALS;
    buf_printf(out, "{\"version\": \"1.0\", \"added_tokens\": [");
    for (int i = 0; i < SPECIALS; i++)
        buf_printf(out,
                   "%s{\"id\": %d, \"content\": \"%s\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                   "\"normalized\": false, \"special\": true}",
                   i ? ", " : "", words + i, specials[i]);
    buf_printf(out,
               "], \"normalizer\": {\"type\": \"NFC\"}, \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": "
               "\"Split\", \"pattern\": {\"Regex\": \"%s\"}, \"behavior\": \"Isolated\", \"invert\": false}, {\"type\": "
               "\"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": false}]}, \"decoder\": "
               "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": false}, "
               "\"model\": {\"type\": \"BPE\", \"merges\": [\"\\u0120 w\"], \"vocab\": {",
               split);
    for (int i = 0; i < words; i++) {
        buf_append_str(out, i ? ", \"" : "\"");
        if (i < FIRST_WORD) write_byte_character(i, out);
        else if (i == FIRST_WORD) buf_append_str(out, "\\u0120w");
        else buf_printf(out, "\\u0120w%d", i);
        buf_printf(out, "\": %d", i);
    }
    buf_printf(out, "}}}");
}

static enum rc write_texts(struct model_synth *s, const struct synth_shape *c, struct err *e)
{
    const int words = c->vocab_used - SPECIALS;
    write_config(c, &s->texts[MODEL_JSON_CONFIG]);
    buf_printf(&s->texts[MODEL_JSON_GENERATION], "{\"eos_token_id\": [%d, %d]}", words + 2, words);
    write_tokenizer(c, &s->texts[MODEL_JSON_TOKENIZER]);
    buf_printf(&s->texts[MODEL_JSON_TOKENIZER_CONFIG],
               "{\"eos_token\": \"<|im_end|>\"}");
    for (int i = 0; i < MODEL_JSON_KINDS; i++)
        if (s->texts[i].failed) return err_no_memory(e);
    return RC_OK;
}

/* ---- opening ---- */

static enum rc unknown(const char *name, struct err *e)
{
    char names[200] = "";
    for (int i = 0; i < N_SHAPES; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "", shapes[i].name);
    return err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "unknown_synth", "there is no synthetic model \"%.60s\"; there are %s", name, names);
}

/* NAME[:SEED], the seed a decimal number. */
static const struct synth_shape *parse(const char *name, uint64_t *seed)
{
    const size_t len = strcspn(name, ":");
    *seed = 1;
    if (name[len]) {
        const char *digits = name + len + 1;
        const size_t n = strspn(digits, "0123456789");
        if (!n || n > 18 || digits[n]) return NULL;
        *seed = strtoull(digits, NULL, 10);
    }
    for (int i = 0; i < N_SHAPES; i++)
        if (strlen(shapes[i].name) == len && !memcmp(shapes[i].name, name, len)) return &shapes[i];
    return NULL;
}

enum rc model_synth_open(const char *name, struct model_synth *out, struct err *e)
{
    *out = (struct model_synth){0};
    uint64_t seed;
    const struct synth_shape *shape = parse(name, &seed);
    if (!shape) return unknown(name, e);
    snprintf(out->name, sizeof out->name, "%s:%" PRIu64, shape->name, seed);
    struct builder b = {.s = out, .shape = shape, .seed = seed};
    const char *twin = NULL;
    add_all(&b);
    if (b.failed || !tensor_index_sort(&out->tensors, &twin)) return err_no_memory(e);
    enum rc rc = place(out, e);
    return rc == RC_OK ? write_texts(out, shape, e) : rc;
}

void model_synth_free(struct model_synth *s)
{
    if (s->memory) munmap(s->memory, s->n_bytes);
    for (int i = 0; i < MODEL_JSON_KINDS; i++) buf_free(&s->texts[i]);
    tensor_index_free(&s->tensors);
    free(s->made);
    *s = (struct model_synth){0};
}

void model_synth_digest(const struct model_synth *s, char out_hex[65])
{
    char text[128];
    const int n = snprintf(text, sizeof text, "synthetic model %d %s", SYNTH_VERSION, s->name);
    mapped_file_digest_bytes(text, (size_t)n, out_hex);
}
