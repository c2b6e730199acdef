/* tiny_gguf: header, metadata and tensors appended to one buffer. Scales are chosen so that activations stay near 1. */
#define _GNU_SOURCE
#include "tiny_gguf.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { N_BYTES = 256, N_MERGES = 24, N_CONTROL = 3, VOCAB = 288 };
enum { TYPE_U32 = 4, TYPE_I32 = 5, TYPE_F32 = 6, TYPE_STRING = 8, TYPE_ARRAY = 9 };

static void u32(struct buf *b, uint32_t v) { buf_append(b, &v, sizeof v); }
static void u64(struct buf *b, uint64_t v) { buf_append(b, &v, sizeof v); }
static void text(struct buf *b, const char *s)
{
    u64(b, strlen(s));
    buf_append_str(b, s);
}
static void key_u32(struct buf *b, const char *key, int v)
{
    text(b, key);
    u32(b, TYPE_U32);
    u32(b, (uint32_t)v);
}
static void key_f32(struct buf *b, const char *key, float v)
{
    text(b, key);
    u32(b, TYPE_F32);
    buf_append(b, &v, sizeof v);
}
static void key_text(struct buf *b, const char *key, const char *v)
{
    text(b, key);
    u32(b, TYPE_STRING);
    text(b, v);
}
static void key_array(struct buf *b, const char *key, uint32_t type, uint64_t n)
{
    text(b, key);
    u32(b, TYPE_ARRAY);
    u32(b, type);
    u64(b, n);
}

/* GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and on, in order. */
static void byte_token(int byte, char out[8])
{
    int code = byte, extra = 0;
    for (int i = 0; i <= byte; i++) {
        bool plain = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || (i >= 174 && i <= 255);
        if (i == byte) code = plain ? byte : 256 + extra;
        extra += !plain;
    }
    if (code < 128) snprintf(out, 8, "%c", code);
    else snprintf(out, 8, "%c%c", 0xC0 | code >> 6, 0x80 | (code & 63));
}

static void merge_pair(int i, char left[2], char right[2])
{
    left[0] = (char)('a' + i);
    right[0] = (char)('a' + (i + 1) % 26);
    left[1] = right[1] = '\0';
}

static void vocabulary(struct buf *b)
{
    static const char *const control[N_CONTROL] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    char token[16], left[2], right[2];
    key_array(b, "tokenizer.ggml.tokens", TYPE_STRING, VOCAB);
    for (int i = 0; i < VOCAB; i++) {
        if (i < N_CONTROL) snprintf(token, sizeof token, "%s", control[i]);
        else if (i < N_CONTROL + N_BYTES) byte_token(i - N_CONTROL, token);
        else if (i < N_CONTROL + N_BYTES + N_MERGES) {
            merge_pair(i - N_CONTROL - N_BYTES, left, right);
            snprintf(token, sizeof token, "%s%s", left, right);
        } else snprintf(token, sizeof token, "<|spare%d|>", i);
        text(b, token);
    }
    key_array(b, "tokenizer.ggml.token_type", TYPE_I32, VOCAB);
    for (int i = 0; i < VOCAB; i++) u32(b, i < N_CONTROL || i >= N_CONTROL + N_BYTES + N_MERGES ? 3 : 1);
    key_array(b, "tokenizer.ggml.merges", TYPE_STRING, N_MERGES);
    for (int i = 0; i < N_MERGES; i++) {
        merge_pair(i, left, right);
        snprintf(token, sizeof token, "%s %s", left, right);
        text(b, token);
    }
}

struct shape {
    char name[48];
    int cols, rows;
    enum quant_format format;
    bool norm;
};

static uint32_t ggml_type(enum quant_format f)
{
    switch (f) {
    case QUANT_F16: return 1;
    case QUANT_Q4_0: return 2;
    case QUANT_Q4_1: return 3;
    case QUANT_Q8_0: return 8;
    default: return 0;
    }
}

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

static void half(struct buf *b, float v)
{
    uint16_t h = quant_f32_to_f16(v);
    buf_append(b, &h, sizeof h);
}

/* One tensor's bytes; values spread about +-amplitude. */
static void tensor(struct buf *b, const struct shape *s, uint64_t *state)
{
    float amplitude = 1.7f / sqrtf((float)s->cols);
    size_t n = (size_t)s->cols * (size_t)s->rows, group = quant_block_values(s->format);
    for (size_t i = 0; i < n; i += group) {
        float wobble = 0.5f + (float)(next(state) >> 40) * 0x1p-24f;
        uint8_t codes[32];
        for (size_t j = 0; j < 32; j += 8) {
            uint64_t r = next(state);
            memcpy(codes + j, &r, 8);
        }
        float value = s->norm ? 0.75f + 0.5f * wobble : ((float)codes[0] - 127.5f) / 127.5f * amplitude;
        switch (s->format) {
        case QUANT_F16: half(b, value); break;
        case QUANT_Q4_0: half(b, amplitude / 8 * wobble), buf_append(b, codes, 16); break;
        case QUANT_Q4_1:
            half(b, amplitude / 8 * wobble), half(b, -7.5f * amplitude / 8 * wobble), buf_append(b, codes, 16);
            break;
        case QUANT_Q8_0: half(b, amplitude / 127 * wobble), buf_append(b, codes, 32); break;
        default: buf_append(b, &value, sizeof value); break;
        }
    }
}

static int shapes_of(const struct tiny_gguf *t, struct shape *out)
{
    int n = 0, q = t->n_heads * t->head_dim, kv = t->n_kv_heads * t->head_dim, h = t->hidden;
    const struct { const char *name; int cols, rows; bool norm; } layer[] = {
        {"attn_norm", h, 1, true}, {"attn_q", h, q, false},         {"attn_k", h, kv, false},    {"attn_v", h, kv, false},
        {"attn_output", q, h, false}, {"ffn_norm", h, 1, true},     {"ffn_gate", h, t->ffn, false},
        {"ffn_up", h, t->ffn, false}, {"ffn_down", t->ffn, h, false},
    };
    out[n++] = (struct shape){"token_embd.weight", h, VOCAB, t->embedding, false};
    for (int l = 0; l < t->n_layers; l++)
        for (size_t i = 0; i < sizeof layer / sizeof layer[0]; i++) {
            out[n] = (struct shape){"", layer[i].cols, layer[i].rows, layer[i].norm ? QUANT_F32 : t->matrices, layer[i].norm};
            snprintf(out[n++].name, sizeof out[0].name, "blk.%d.%s.weight", l, layer[i].name);
        }
    out[n++] = (struct shape){"output_norm.weight", h, 1, QUANT_F32, true};
    return n;
}

struct tiny_gguf tiny_gguf_default(void)
{
    return (struct tiny_gguf){.n_layers = 3, .hidden = 96, .ffn = 256, .n_heads = 6, .n_kv_heads = 3, .head_dim = 16,
                              .context = 1024, .matrices = QUANT_Q4_1, .embedding = QUANT_Q8_0, .seed = 1};
}

bool tiny_gguf_write(const struct tiny_gguf *t, const char *path)
{
    enum { KEYS = 15, ALIGNMENT = 32, MAX_TENSORS = 2 + 9 * 64 };
    static struct shape shapes[MAX_TENSORS];
    int n = shapes_of(t, shapes);
    struct buf b = {0}, data = {0};
    buf_append(&b, "GGUF", 4);
    u32(&b, 3);
    u64(&b, (uint64_t)n);
    u64(&b, KEYS);
    key_text(&b, "general.architecture", "llama");
    key_text(&b, "general.name", "tiny");
    key_u32(&b, "llama.block_count", t->n_layers);
    key_u32(&b, "llama.context_length", t->context);
    key_u32(&b, "llama.embedding_length", t->hidden);
    key_u32(&b, "llama.feed_forward_length", t->ffn);
    key_u32(&b, "llama.attention.head_count", t->n_heads);
    key_u32(&b, "llama.attention.head_count_kv", t->n_kv_heads);
    key_u32(&b, "llama.attention.key_length", t->head_dim);
    key_u32(&b, "llama.attention.value_length", t->head_dim);
    key_u32(&b, "llama.rope.dimension_count", t->head_dim);
    key_f32(&b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    key_text(&b, "tokenizer.ggml.model", "gpt2");
    key_text(&b, "tokenizer.ggml.pre", "smollm");
    key_u32(&b, "tokenizer.ggml.eos_token_id", 2);
    vocabulary(&b);
    uint64_t keys = KEYS + 3, state = t->seed;
    memcpy(b.data + 16, &keys, sizeof keys);
    for (int i = 0; i < n; i++) {
        text(&b, shapes[i].name);
        u32(&b, shapes[i].rows > 1 ? 2 : 1);
        u64(&b, (uint64_t)shapes[i].cols);
        if (shapes[i].rows > 1) u64(&b, (uint64_t)shapes[i].rows);
        u32(&b, ggml_type(shapes[i].format));
        u64(&b, data.len);
        tensor(&data, &shapes[i], &state);
        while (data.len % ALIGNMENT) buf_append(&data, "", 1);
    }
    while (b.len % ALIGNMENT) buf_append(&b, "", 1);
    buf_append(&b, data.data, data.len);
    int fd = b.failed || data.failed ? -1 : open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && fd_write_all(fd, b.data, b.len);
    if (fd >= 0) close(fd);
    buf_free(&b);
    buf_free(&data);
    return ok;
}
