/* model_config_gguf: the configuration from GGUF's metadata, keys "ARCH.name".
 *
 * The same keys serve all architectures; what differs is small: llama's converter permutes the rows of q and k so that
 * rotated pairs are adjacent, qwen2 has biases, qwen3 and qwen35 norm every head, and qwen35 adds the ssm keys of Gated
 * DeltaNet. Its block_count counts the MTP layer where nextn_predict_layers says that there is one. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model_config_private.h"

struct gguf_reader {
    const struct config_reader *r;
    const char *arch; /* prefix of the keys */
};

struct key {
    char text[96];
};

static struct key key_of(const struct gguf_reader *g, const char *name)
{
    struct key key;
    snprintf(key.text, sizeof key.text, "%s.%s", g->arch, name);
    return key;
}

static enum rc read_int(const struct gguf_reader *g, const char *name, struct config_limits limits, int *out)
{
    const struct config_reader *r = g->r;
    struct key key = key_of(g, name);
    uint64_t value;
    if (!model_file_u64(r->file, key.text, &value)) {
        if (model_file_int_array(r->file, key.text))
            return config_refuse(r, "model_unsupported", "%s differs by layer, which is not supported", key.text);
        if (model_file_has(r->file, key.text))
            return config_refuse(r, "model_bad_key", "%s is no whole number from 0 up", key.text);
        if (limits.fallback < 0) return config_refuse(r, "model_missing_key", "%s is missing", key.text);
        value = (uint64_t)limits.fallback;
    }
    return config_check_int(r, key.text, value, limits, out);
}

static enum rc read_real(const struct gguf_reader *g, const char *name, double fallback, double *out)
{
    const struct config_reader *r = g->r;
    struct key key = key_of(g, name);
    if (!model_file_f64(r->file, key.text, out)) {
        if (model_file_has(r->file, key.text))
            return config_refuse(r, "model_bad_key", "%s is no floating-point number", key.text);
        if (fallback <= 0) return config_refuse(r, "model_missing_key", "%s is missing", key.text);
        *out = fallback;
    }
    return config_check_real(r, key.text, *out);
}

static enum rc read_arch(struct gguf_reader *g, struct model_config *c)
{
    static const enum model_arch known[] = {MODEL_ARCH_LLAMA, MODEL_ARCH_QWEN2, MODEL_ARCH_QWEN3, MODEL_ARCH_QWEN35};
    struct model_text arch;
    char word[CONFIG_WORD];
    if (!model_file_text(g->r->file, "general.architecture", &arch))
        return config_refuse(g->r, "model_missing_key", "general.architecture is missing or no string");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *name = model_arch_name(known[i]);
        if (arch.len != strlen(name) || memcmp(arch.bytes, name, arch.len)) continue;
        c->arch = known[i];
        g->arch = name;
        return RC_OK;
    }
    return config_refuse(g->r, "model_unsupported",
                         "the architecture \"%s\" is not supported, only llama, qwen2, qwen3 and qwen35 are",
                         config_word(arch.bytes, arch.len, word));
}

/* Rotary scaling is fine where it says that there is none. */
static bool is_no_scaling(const struct gguf_reader *g, const char *key)
{
    struct key type = key_of(g, "rope.scaling.type"), factor = key_of(g, "rope.scaling.factor");
    struct model_text text;
    double value;
    if (!strcmp(key, factor.text)) return model_file_f64(g->r->file, key, &value) && value == 1;
    if (strcmp(key, type.text) || !model_file_text(g->r->file, key, &text)) return false;
    if (text.len == 4 && !memcmp(text.bytes, "none", 4)) return true;
    bool linear = text.len == 6 && !memcmp(text.bytes, "linear", 6);
    return linear && model_file_f64(g->r->file, factor.text, &value) && value == 1;
}

/* Refuses what would be silently wrong. */
static enum rc check_features(const struct gguf_reader *g)
{
    static const char *const must_be_zero[] = {"expert_count", "expert_used_count", "attention.sliding_window"};
    const struct config_reader *r = g->r;
    struct key scaling = key_of(g, "rope.scaling."), linear = key_of(g, "rope.scale_linear");
    for (size_t i = 0; i < model_file_key_count(r->file); i++) {
        const char *key = model_file_key_at(r->file, i);
        bool is_scaling = !strncmp(key, scaling.text, strlen(scaling.text)) || !strcmp(key, linear.text);
        if (is_scaling && !is_no_scaling(g, key))
            return config_refuse(r, "model_unsupported", "%.80s: scaled rotary embeddings are not supported", key);
    }
    if (model_file_tensor(r->file, "rope_freqs.weight"))
        return config_refuse(r, "model_unsupported", "rope_freqs.weight: scaled rotary embeddings are not supported");
    for (size_t i = 0; i < sizeof must_be_zero / sizeof *must_be_zero; i++) {
        struct key key = key_of(g, must_be_zero[i]);
        uint64_t value;
        if (model_file_has(r->file, key.text) && (!model_file_u64(r->file, key.text, &value) || value))
            return config_refuse(r, "model_unsupported", "%s is set, which is not supported", key.text);
    }
    struct key causal = key_of(g, "attention.causal");
    bool is_causal;
    if (model_file_has(r->file, causal.text) && (!model_file_bool(r->file, causal.text, &is_causal) || !is_causal))
        return config_refuse(r, "model_unsupported", "%s is not true: only causal attention is supported", causal.text);
    return RC_OK;
}

static enum rc read_widths(const struct gguf_reader *g, struct model_config *c)
{
    enum rc rc;
    int mtp_layers = 0;
    struct config_limits hidden = {CONFIG_MULTIPLE, CONFIG_MAX_HIDDEN, CONFIG_MULTIPLE, -1};
    struct config_limits ffn = {CONFIG_MULTIPLE, CONFIG_MAX_FFN, CONFIG_MULTIPLE, -1};
    struct config_limits context = {1, CONFIG_MAX_CONTEXT, 1, -1};
    if (c->arch == MODEL_ARCH_QWEN35 &&
        (rc = read_int(g, "nextn_predict_layers", (struct config_limits){0, 1, 1, 0}, &mtp_layers)))
        return rc;
    struct config_limits layers = {1 + mtp_layers, MODEL_MAX_LAYERS + mtp_layers, 1, -1};
    if ((rc = read_int(g, "block_count", layers, &c->n_layers))) return rc;
    c->n_layers -= mtp_layers;
    c->mtp = mtp_layers == 1;
    if ((rc = read_int(g, "embedding_length", hidden, &c->hidden))) return rc;
    if ((rc = read_int(g, "feed_forward_length", ffn, &c->ffn))) return rc;
    return read_int(g, "context_length", context, &c->context);
}

static enum rc read_heads(const struct gguf_reader *g, struct model_config *c)
{
    enum rc rc;
    int value_dim;
    struct config_limits heads = {1, CONFIG_MAX_HEADS, 1, -1};
    if ((rc = read_int(g, "attention.head_count", heads, &c->n_heads))) return rc;
    struct config_limits kv = {1, c->n_heads, 1, c->n_heads};
    if ((rc = read_int(g, "attention.head_count_kv", kv, &c->n_kv_heads))) return rc;
    /* Without its key a head's width is an even share of the hidden width, or the key is required. */
    int64_t share = c->hidden % c->n_heads ? -1 : c->hidden / c->n_heads;
    struct config_limits dim = {CONFIG_MULTIPLE, CONFIG_MAX_HEAD_DIM, CONFIG_MULTIPLE, share};
    if ((rc = read_int(g, "attention.key_length", dim, &c->head_dim))) return rc;
    dim.fallback = c->head_dim;
    if ((rc = read_int(g, "attention.value_length", dim, &value_dim))) return rc;
    if (value_dim != c->head_dim)
        return config_refuse(g->r, "model_unsupported",
                             "keys of %d and values of %d a head: different widths are not supported", c->head_dim,
                             value_dim);
    struct config_limits rope = {2, c->head_dim, 2, c->head_dim};
    return read_int(g, "rope.dimension_count", rope, &c->rope_dim);
}

static enum rc read_numbers(const struct gguf_reader *g, struct model_config *c)
{
    enum rc rc;
    double eps;
    if ((rc = read_real(g, "rope.freq_base", 10000.0, &c->rope_theta))) return rc;
    if ((rc = read_real(g, "attention.layer_norm_rms_epsilon", 0, &eps))) return rc;
    c->rms_eps = (float)eps;
    struct config_limits vocab = {1, CONFIG_MAX_VOCAB, 1, -1};
    return model_file_has(g->r->file, key_of(g, "vocab_size").text) ? read_int(g, "vocab_size", vocab, &c->vocab)
                                                                    : RC_OK;
}

/* Which layers are Gated DeltaNet: by name of each, or all but every n-th. */
static enum rc read_layer_kinds(const struct gguf_reader *g, struct model_config *c)
{
    struct key key = key_of(g, "attention.recurrent_layers");
    int interval;
    size_t n = model_file_int_array(g->r->file, key.text);
    if (model_file_has(g->r->file, key.text)) {
        if (n != (size_t)c->n_layers && n != (size_t)c->n_layers + c->mtp)
            return config_refuse(g->r, "model_bad_key", "%s is no array of truth values for %d layers", key.text,
                                 c->n_layers);
        for (int i = 0; i < c->n_layers; i++) {
            int64_t value;
            if (!model_file_int_at(g->r->file, key.text, (size_t)i, &value) || value < 0 || value > 1)
                return config_refuse(g->r, "model_bad_key", "%s holds what is no truth value", key.text);
            c->gdn[i] = value == 1;
        }
        return RC_OK;
    }
    enum rc rc = read_int(g, "full_attention_interval", (struct config_limits){1, MODEL_MAX_LAYERS, 1, 4}, &interval);
    for (int i = 0; i < c->n_layers && rc == RC_OK; i++) c->gdn[i] = (i + 1) % interval != 0;
    return rc;
}

static enum rc read_gdn(const struct gguf_reader *g, struct model_config *c)
{
    enum rc rc;
    int inner;
    struct config_limits heads = {1, CONFIG_MAX_HEADS, 1, -1}, inner_limits = {1, CONFIG_MAX_WIDTH, 1, -1};
    struct config_limits dim = {CONFIG_MULTIPLE, CONFIG_MAX_HEAD_DIM, CONFIG_MULTIPLE, -1};
    struct config_limits conv = {CONFIG_MIN_CONV, CONFIG_MAX_CONV, 1, -1};
    if ((rc = read_layer_kinds(g, c))) return rc;
    if ((rc = read_int(g, "ssm.group_count", heads, &c->gdn_k_heads))) return rc;
    if ((rc = read_int(g, "ssm.time_step_rank", heads, &c->gdn_v_heads))) return rc;
    if ((rc = read_int(g, "ssm.state_size", dim, &c->gdn_k_dim))) return rc;
    if ((rc = read_int(g, "ssm.conv_kernel", conv, &c->conv_width))) return rc;
    if ((rc = read_int(g, "ssm.inner_size", inner_limits, &inner))) return rc;
    if (inner % c->gdn_v_heads)
        return config_refuse(g->r, "model_limits", "qwen35.ssm.inner_size is %d, no multiple of the %d value heads",
                             inner, c->gdn_v_heads);
    return config_check_int(g->r, "the width of a value head (ssm.inner_size / ssm.time_step_rank)",
                            (uint64_t)(inner / c->gdn_v_heads), dim, &c->gdn_v_dim);
}

enum rc config_read_gguf(struct config_reader *r, struct model_config *c)
{
    struct gguf_reader g = {.r = r};
    enum rc rc;
    if ((rc = read_arch(&g, c)) || (rc = check_features(&g)) || (rc = read_widths(&g, c)) || (rc = read_heads(&g, c)) ||
        (rc = read_numbers(&g, c)))
        return rc;
    c->rope_adjacent = c->arch == MODEL_ARCH_LLAMA;
    c->qkv_bias = c->arch == MODEL_ARCH_QWEN2;
    c->qk_norm = c->arch == MODEL_ARCH_QWEN3 || c->arch == MODEL_ARCH_QWEN35;
    c->attn_gate = c->arch == MODEL_ARCH_QWEN35;
    return c->arch == MODEL_ARCH_QWEN35 ? read_gdn(&g, c) : RC_OK;
}
