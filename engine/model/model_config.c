/* model_config: metadata to numbers, and the limits that later code relies on.
 *
 * A value that is there but wrong is an error, never replaced by its default. What would change the arithmetic and is
 * not implemented (scaled rotary embeddings, experts, sliding windows, non-causal attention, per-layer head counts) is
 * refused by name: running such a model without it would give wrong text, not an error.
 *
 * The limits keep every product that later code forms (heads times width, rows times columns, twice that in bytes)
 * inside an int or, for whole matrices, inside 2^40. That the tensors exist and have these shapes is checked where they
 * are bound. */
#include "model_config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_HIDDEN = 65536,
    MAX_FFN = 1 << 20,
    MAX_HEADS = 4096,
    MAX_HEAD_DIM = 256,
    MAX_ATTENTION = 1 << 18, /* heads times head_dim */
    MAX_VOCAB = 1 << 20,
    MAX_CONTEXT = 1 << 22,
    MULTIPLE = 16 /* of widths: what kernels step by */
};

struct reader {
    const struct model_file *file;
    const char *arch; /* prefix of the keys */
    struct err *e;
};

static enum rc refuse(const struct reader *r, const char *code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static enum rc refuse(const struct reader *r, const char *code, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    enum rc rc = err_set(r->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s", text);
    err_place(r->e, model_file_path(r->file), 0, 0, 0);
    return rc;
}

struct key {
    char text[96];
};

static struct key key_of(const struct reader *r, const char *name)
{
    struct key key;
    snprintf(key.text, sizeof key.text, "%s.%s", r->arch, name);
    return key;
}

struct limits {
    int min;
    int max;
    int multiple;
    int64_t fallback; /* for an absent key; -1: the key is required */
};

static enum rc check_int(const struct reader *r, const char *what, uint64_t value, struct limits limits, int *out)
{
    bool inside = value >= (uint64_t)limits.min && value <= (uint64_t)limits.max;
    if (limits.min == limits.max && !inside)
        return refuse(r, "model_limits", "%s is %" PRIu64 ", not %d", what, value, limits.min);
    if (!inside || value % (uint64_t)limits.multiple)
        return refuse(r, "model_limits", "%s is %" PRIu64 ", not a multiple of %d from %d to %d", what, value,
                      limits.multiple, limits.min, limits.max);
    *out = (int)value;
    return RC_OK;
}

static enum rc read_int(const struct reader *r, const char *name, struct limits limits, int *out)
{
    struct key key = key_of(r, name);
    uint64_t value;
    if (!model_file_u64(r->file, key.text, &value)) {
        if (model_file_int_array(r->file, key.text))
            return refuse(r, "model_unsupported", "%s differs by layer, which is not supported", key.text);
        if (model_file_has(r->file, key.text))
            return refuse(r, "model_bad_key", "%s is no whole number from 0 up", key.text);
        if (limits.fallback < 0) return refuse(r, "model_missing_key", "%s is missing", key.text);
        value = (uint64_t)limits.fallback;
    }
    return check_int(r, key.text, value, limits, out);
}

static enum rc read_float(const struct reader *r, const char *name, double fallback, double *out)
{
    struct key key = key_of(r, name);
    if (!model_file_f64(r->file, key.text, out)) {
        if (model_file_has(r->file, key.text))
            return refuse(r, "model_bad_key", "%s is no floating-point number", key.text);
        if (fallback <= 0) return refuse(r, "model_missing_key", "%s is missing", key.text);
        *out = fallback;
    }
    if (!isfinite(*out) || *out <= 0) return refuse(r, "model_limits", "%s is %g, not above 0", key.text, *out);
    return RC_OK;
}

static enum rc read_arch(struct reader *r, struct model_config *c)
{
    struct model_text arch;
    if (!model_file_text(r->file, "general.architecture", &arch))
        return refuse(r, "model_missing_key", "general.architecture is missing or no string");
    c->arch = MODEL_ARCH_LLAMA;
    r->arch = model_arch_name(c->arch);
    if (arch.len == strlen(r->arch) && !memcmp(arch.bytes, r->arch, arch.len)) return RC_OK;
    char name[41];
    size_t len = arch.len < sizeof name - 1 ? arch.len : sizeof name - 1;
    for (size_t i = 0; i < len; i++) {
        char byte = arch.bytes[i];
        name[i] = byte > ' ' && byte < 127 ? byte : '?';
    }
    name[len] = '\0';
    return refuse(r, "model_unsupported", "the architecture \"%s\" is not supported, only \"%s\" is", name, r->arch);
}

/* Refuses what would be silently wrong. */
static enum rc check_features(const struct reader *r)
{
    static const char *const must_be_zero[] = {"expert_count", "expert_used_count", "attention.sliding_window"};
    struct key scaling = key_of(r, "rope.scaling."), linear = key_of(r, "rope.scale_linear");
    for (size_t i = 0; i < model_file_key_count(r->file); i++) {
        const char *key = model_file_key_at(r->file, i);
        if (!strncmp(key, scaling.text, strlen(scaling.text)) || !strcmp(key, linear.text))
            return refuse(r, "model_unsupported", "%.80s: scaled rotary embeddings are not supported", key);
    }
    if (model_file_tensor(r->file, "rope_freqs.weight"))
        return refuse(r, "model_unsupported", "rope_freqs.weight: scaled rotary embeddings are not supported");
    for (size_t i = 0; i < sizeof must_be_zero / sizeof *must_be_zero; i++) {
        struct key key = key_of(r, must_be_zero[i]);
        uint64_t value;
        if (model_file_has(r->file, key.text) && (!model_file_u64(r->file, key.text, &value) || value))
            return refuse(r, "model_unsupported", "%s is set, which is not supported", key.text);
    }
    struct key causal = key_of(r, "attention.causal");
    bool is_causal;
    if (model_file_has(r->file, causal.text) && (!model_file_bool(r->file, causal.text, &is_causal) || !is_causal))
        return refuse(r, "model_unsupported", "%s is not true: only causal attention is supported", causal.text);
    return RC_OK;
}

static enum rc read_widths(const struct reader *r, struct model_config *c)
{
    enum rc rc;
    struct limits layers = {1, MODEL_MAX_LAYERS, 1, -1}, hidden = {MULTIPLE, MAX_HIDDEN, MULTIPLE, -1};
    struct limits ffn = {MULTIPLE, MAX_FFN, MULTIPLE, -1}, context = {1, MAX_CONTEXT, 1, -1};
    if ((rc = read_int(r, "block_count", layers, &c->n_layers))) return rc;
    if ((rc = read_int(r, "embedding_length", hidden, &c->hidden))) return rc;
    if ((rc = read_int(r, "feed_forward_length", ffn, &c->ffn))) return rc;
    return read_int(r, "context_length", context, &c->context);
}

static enum rc read_heads(const struct reader *r, struct model_config *c)
{
    enum rc rc;
    int value_dim;
    if ((rc = read_int(r, "attention.head_count", (struct limits){1, MAX_HEADS, 1, -1}, &c->n_heads))) return rc;
    struct limits kv = {1, c->n_heads, 1, c->n_heads};
    if ((rc = read_int(r, "attention.head_count_kv", kv, &c->n_kv_heads))) return rc;
    if (c->n_heads % c->n_kv_heads)
        return refuse(r, "model_limits", "%d query heads cannot share %d key-value heads evenly", c->n_heads,
                      c->n_kv_heads);
    /* Without its key a head's width is an even share of the hidden width, or the key is required. */
    int64_t share = c->hidden % c->n_heads ? -1 : c->hidden / c->n_heads;
    struct limits dim = {MULTIPLE, MAX_HEAD_DIM, MULTIPLE, share};
    if ((rc = read_int(r, "attention.key_length", dim, &c->head_dim))) return rc;
    dim.fallback = c->head_dim;
    if ((rc = read_int(r, "attention.value_length", dim, &value_dim))) return rc;
    if (value_dim != c->head_dim)
        return refuse(r, "model_unsupported", "keys of %d and values of %d a head: different widths are not supported",
                      c->head_dim, value_dim);
    if (c->n_heads * c->head_dim > MAX_ATTENTION)
        return refuse(r, "model_limits", "%d heads of %d are wider than %d", c->n_heads, c->head_dim, MAX_ATTENTION);
    struct limits rope = {2, c->head_dim, 2, c->head_dim};
    return read_int(r, "rope.dimension_count", rope, &c->rope_dim);
}

static enum rc read_numbers(const struct reader *r, struct model_config *c)
{
    enum rc rc;
    double eps;
    if ((rc = read_float(r, "rope.freq_base", 10000.0, &c->rope_theta))) return rc;
    if ((rc = read_float(r, "attention.layer_norm_rms_epsilon", 0, &eps))) return rc;
    if (eps >= 1 || (float)eps <= 0)
        return refuse(r, "model_limits", "%s.attention.layer_norm_rms_epsilon is %g, not between 0 and 1", r->arch,
                      eps);
    c->rms_eps = (float)eps;
    return RC_OK;
}

/* The embedding decides; whatever else names the size of the vocabulary must agree. */
static enum rc read_vocab(const struct reader *r, struct model_config *c)
{
    enum rc rc;
    const struct tensor_view *embedding = model_file_tensor(r->file, "token_embd.weight");
    if (!embedding) return refuse(r, "model_missing_tensor", "the tensor token_embd.weight is missing");
    if (embedding->n_dims != 2 || embedding->dims[0] != (uint64_t)c->hidden)
        return refuse(r, "model_bad_shape", "token_embd.weight is no matrix with rows of %d", c->hidden);
    struct limits limits = {1, MAX_VOCAB, 1, -1};
    if ((rc = check_int(r, "the number of rows of token_embd.weight", embedding->dims[1], limits, &c->vocab)))
        return rc;
    struct limits same = {c->vocab, c->vocab, 1, c->vocab};
    int vocab_size;
    if ((rc = read_int(r, "vocab_size", same, &vocab_size))) return rc;
    size_t tokens = model_file_text_array(r->file, "tokenizer.ggml.tokens");
    if (tokens != (size_t)c->vocab && model_file_has(r->file, "tokenizer.ggml.tokens"))
        return refuse(r, "model_limits", "the tokenizer has %zu tokens, token_embd.weight has %d rows", tokens,
                      c->vocab);
    c->tied = !model_file_tensor(r->file, "output.weight");
    return RC_OK;
}

enum rc model_config_read(const struct model_file *m, struct model_config *out, struct err *e)
{
    struct reader r = {.file = m, .e = e};
    struct model_config c = {.rope_adjacent = true}; /* converters permute the rows of q and k into adjacent pairs */
    enum rc rc;
    if ((rc = read_arch(&r, &c)) || (rc = check_features(&r)) || (rc = read_widths(&r, &c)) ||
        (rc = read_heads(&r, &c)) || (rc = read_numbers(&r, &c)) || (rc = read_vocab(&r, &c)))
        return rc;
    *out = c;
    return RC_OK;
}

const char *model_arch_name(enum model_arch a)
{
    switch (a) {
    case MODEL_ARCH_LLAMA: return "llama";
    }
    return "unknown";
}
