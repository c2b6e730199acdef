/* model_config_hf: the configuration from config.json as Hugging Face's classes write it.
 *
 * Multimodal models keep the numbers of the text in "text_config"; the model type and what concerns the whole then stand
 * beside it. A member of null is an absent one. Class defaults are taken only where they are the same in every class that
 * is supported and leaving the member out is customary; others are required, since the defaults of one model's class are
 * another model's shape.
 *
 * Members that only name data types, dropout, initial values, caches and the like are not read. Numbers of experts,
 * windows, biases and scaled rotations are, to refuse them. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "json_text.h"
#include "model_config_private.h"
#include "model_file_private.h"

struct hf_reader {
    const struct config_reader *r;
    json_t *root;
    json_t *text; /* text_config, or the root */
    json_t *rope; /* rope_parameters or rope_scaling; NULL: neither */
};

/* NULL: absent, or null. */
static json_t *member(const json_t *object, const char *name)
{
    json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

static enum rc no_type(const struct hf_reader *h, const char *name, const char *type)
{
    return config_refuse(h->r, "model_bad_key", "%s is no %s", name, type);
}

static enum rc read_int(const struct hf_reader *h, const char *name, struct config_limits limits, int *out)
{
    const json_t *value = member(h->text, name);
    uint64_t number;
    if (value && (!json_is_integer(value) || json_integer_value(value) < 0))
        return no_type(h, name, "whole number from 0 up");
    if (!value && limits.fallback < 0) return config_refuse(h->r, "model_missing_key", "%s is missing", name);
    number = (uint64_t)(value ? json_integer_value(value) : limits.fallback);
    return config_check_int(h->r, name, number, limits, out);
}

/* A fallback of 0: it is required. */
static enum rc read_real(const struct hf_reader *h, const json_t *object, const char *name, double fallback,
                         double *out)
{
    const json_t *value = member(object, name);
    if (value && !json_is_number(value)) return no_type(h, name, "number");
    if (!value && fallback <= 0) return config_refuse(h->r, "model_missing_key", "%s is missing", name);
    *out = value ? json_number_value(value) : fallback;
    return config_check_real(h->r, name, *out);
}

static enum rc read_bool(const struct hf_reader *h, const json_t *object, const char *name, bool fallback, bool *out)
{
    const json_t *value = member(object, name);
    if (value && !json_is_boolean(value)) return no_type(h, name, "truth value");
    *out = value ? json_is_true(value) : fallback;
    return RC_OK;
}

/* The member must be absent or one of these words. */
static enum rc check_word(const struct hf_reader *h, const json_t *object, const char *name, const char *const *words,
                          size_t n)
{
    const json_t *value = member(object, name);
    char word[CONFIG_WORD];
    if (!value) return RC_OK;
    if (!json_is_string(value)) return no_type(h, name, "text");
    for (size_t i = 0; i < n; i++)
        if (!strcmp(json_string_value(value), words[i])) return RC_OK;
    return config_refuse(h->r, "model_unsupported", "%s is \"%s\", which is not supported", name,
                         config_word(json_string_value(value), json_string_length(value), word));
}

/* The member must be absent or false. */
static enum rc check_false(const struct hf_reader *h, const char *name)
{
    bool value;
    enum rc rc = read_bool(h, h->text, name, false, &value);
    if (rc == RC_OK && value)
        return config_refuse(h->r, "model_unsupported", "%s is true, which is not supported", name);
    return rc;
}

static const struct class
{
    const char *type; /* model_type of the text */
    const char *name; /* of architectures; NULL: no class of its own */
    enum model_arch arch;
} classes[] = {
    {"llama", "LlamaForCausalLM", MODEL_ARCH_LLAMA},
    {"qwen2", "Qwen2ForCausalLM", MODEL_ARCH_QWEN2},
    {"qwen3", "Qwen3ForCausalLM", MODEL_ARCH_QWEN3},
    {"qwen3_5_text", "Qwen3_5ForCausalLM", MODEL_ARCH_QWEN35},
    {"qwen3_5", "Qwen3_5ForConditionalGeneration", MODEL_ARCH_QWEN35},
};
enum { CLASSES = sizeof classes / sizeof *classes };

static enum rc read_type(const struct hf_reader *h, const json_t *object, enum model_arch *out)
{
    const json_t *type = member(object, "model_type");
    char word[CONFIG_WORD];
    if (!json_is_string(type)) return config_refuse(h->r, "model_missing_key", "model_type is missing or no text");
    for (int i = 0; i < CLASSES; i++)
        if (!strcmp(json_string_value(type), classes[i].type)) {
            *out = classes[i].arch;
            return RC_OK;
        }
    return config_refuse(h->r, "model_unsupported",
                         "the model type \"%s\" is not supported, only llama, qwen2, qwen3 and qwen3_5 are",
                         config_word(json_string_value(type), json_string_length(type), word));
}

/* Every class named must be one of this model type. */
static enum rc check_architectures(const struct hf_reader *h, enum model_arch arch)
{
    const json_t *list = member(h->root, "architectures");
    char word[CONFIG_WORD];
    if (!list) return RC_OK;
    if (!json_is_array(list)) return no_type(h, "architectures", "array");
    for (size_t k = 0; k < json_array_size(list); k++) {
        const json_t *name = json_array_get(list, k);
        bool known = false;
        if (!json_is_string(name)) return no_type(h, "a name in architectures", "text");
        for (int i = 0; i < CLASSES; i++)
            known |= classes[i].arch == arch && !strcmp(json_string_value(name), classes[i].name);
        if (!known)
            return config_refuse(h->r, "model_unsupported",
                                 "the architecture \"%s\" is not supported for this model type",
                                 config_word(json_string_value(name), json_string_length(name), word));
    }
    return RC_OK;
}

static enum rc read_arch(struct hf_reader *h, struct model_config *c)
{
    enum model_arch outer;
    json_t *text = member(h->root, "text_config");
    enum rc rc = read_type(h, h->root, &outer);
    if (rc != RC_OK) return rc;
    h->text = h->root;
    c->arch = outer;
    if (text) {
        if (!json_is_object(text)) return no_type(h, "text_config", "object");
        h->text = text;
        if ((rc = read_type(h, text, &c->arch))) return rc;
        if (outer != MODEL_ARCH_QWEN35 || c->arch != outer)
            return config_refuse(h->r, "model_unsupported", "text_config is of another model type than the whole");
    }
    return check_architectures(h, c->arch);
}

/* Refuses what would be silently wrong. */
static enum rc check_features(const struct hf_reader *h, const struct model_config *c)
{
    static const char *const experts[] = {"num_experts", "num_local_experts", "n_routed_experts",
                                          "num_experts_per_tok"};
    static const char *const silu[] = {"silu"}, *const gates[] = {"silu", "swish"}, *const float32[] = {"float32"};
    enum rc rc;
    for (size_t i = 0; i < sizeof experts / sizeof *experts; i++) {
        const json_t *value = member(h->text, experts[i]);
        if (value && !(json_is_integer(value) && !json_integer_value(value)))
            return config_refuse(h->r, "model_unsupported", "%s is set, which is not supported", experts[i]);
    }
    if ((rc = check_word(h, h->text, "hidden_act", silu, 1))) return rc;
    if ((rc = check_false(h, "use_sliding_window")) || (rc = check_false(h, "mlp_bias"))) return rc;
    if (c->arch == MODEL_ARCH_LLAMA && member(h->text, "sliding_window"))
        return config_refuse(h->r, "model_unsupported", "sliding_window is set, which is not supported");
    /* qwen2 has its biases always, whatever this says */
    if (c->arch != MODEL_ARCH_QWEN2 && (rc = check_false(h, "attention_bias"))) return rc;
    if (c->arch != MODEL_ARCH_QWEN35) return RC_OK;
    bool gated = true;
    if ((rc = read_bool(h, h->text, "attn_output_gate", true, &gated))) return rc;
    if (!gated) return config_refuse(h->r, "model_unsupported", "attn_output_gate is false, which is not supported");
    if ((rc = check_word(h, h->text, "output_gate_type", gates, 2))) return rc;
    if ((rc = check_word(h, h->text, "mamba_ssm_dtype", float32, 1))) return rc;
    return check_false(h, "mtp_use_dedicated_embeddings");
}

static enum rc read_widths(const struct hf_reader *h, struct model_config *c)
{
    enum rc rc;
    struct config_limits hidden = {CONFIG_MULTIPLE, CONFIG_MAX_HIDDEN, CONFIG_MULTIPLE, -1};
    struct config_limits ffn = {CONFIG_MULTIPLE, CONFIG_MAX_FFN, CONFIG_MULTIPLE, -1};
    struct config_limits layers = {1, MODEL_MAX_LAYERS, 1, -1}, context = {1, CONFIG_MAX_CONTEXT, 1, -1};
    double eps = 0;
    if ((rc = read_int(h, "num_hidden_layers", layers, &c->n_layers))) return rc;
    if ((rc = read_int(h, "hidden_size", hidden, &c->hidden))) return rc;
    if ((rc = read_int(h, "intermediate_size", ffn, &c->ffn))) return rc;
    if ((rc = read_int(h, "max_position_embeddings", context, &c->context))) return rc;
    if ((rc = read_real(h, h->text, "rms_norm_eps", 0, &eps))) return rc;
    c->rms_eps = (float)eps;
    if (!member(h->text, "vocab_size")) return RC_OK;
    return read_int(h, "vocab_size", (struct config_limits){1, CONFIG_MAX_VOCAB, 1, -1}, &c->vocab);
}

static enum rc read_heads(const struct hf_reader *h, struct model_config *c)
{
    enum rc rc;
    const bool hybrid = c->arch == MODEL_ARCH_QWEN35;
    if ((rc = read_int(h, "num_attention_heads", (struct config_limits){1, CONFIG_MAX_HEADS, 1, -1}, &c->n_heads)))
        return rc;
    struct config_limits kv = {1, c->n_heads, 1, hybrid ? -1 : c->n_heads};
    if ((rc = read_int(h, "num_key_value_heads", kv, &c->n_kv_heads))) return rc;
    int64_t share = hybrid || c->hidden % c->n_heads ? -1 : c->hidden / c->n_heads;
    struct config_limits dim = {CONFIG_MULTIPLE, CONFIG_MAX_HEAD_DIM, CONFIG_MULTIPLE, share};
    return read_int(h, "head_dim", dim, &c->head_dim);
}

/* Only a rotation by the plain angles is supported: default, or linear scaling by 1. */
static enum rc check_rope(const struct hf_reader *h, const char *name, json_t *rope)
{
    const json_t *type = member(rope, "rope_type") ? member(rope, "rope_type") : member(rope, "type");
    const char *key;
    json_t *value;
    char word[CONFIG_WORD];
    double factor = 0;
    json_object_foreach(rope, key, value)
    {
        if (json_is_object(value))
            return config_refuse(h->r, "model_unsupported", "%s differs by kind of layer, which is not supported",
                                 name);
    }
    if (type && !json_is_string(type)) return no_type(h, "rope_type", "text");
    if (!type || !strcmp(json_string_value(type), "default")) return RC_OK;
    if (strcmp(json_string_value(type), "linear"))
        return config_refuse(h->r, "model_unsupported", "%s: rotary embeddings of type \"%s\" are not supported", name,
                             config_word(json_string_value(type), json_string_length(type), word));
    enum rc rc = read_real(h, rope, "factor", 0, &factor);
    if (rc == RC_OK && factor != 1)
        return config_refuse(h->r, "model_unsupported", "%s: linear scaling by %g is not supported", name, factor);
    return rc;
}

/* rope_parameters of newer files, rope_scaling of older ones. */
static enum rc find_rope(struct hf_reader *h)
{
    static const char *const names[] = {"rope_scaling", "rope_parameters"};
    for (int i = 0; i < 2; i++) {
        json_t *rope = member(h->text, names[i]);
        if (!rope) continue;
        if (!json_is_object(rope)) return no_type(h, names[i], "object");
        enum rc rc = check_rope(h, names[i], rope);
        if (rc != RC_OK) return rc;
        h->rope = rope;
    }
    return RC_OK;
}

/* A member that newer files keep in rope_parameters and older ones beside it. */
static enum rc read_rope_real(const struct hf_reader *h, const char *name, double fallback, double *out)
{
    const json_t *object = h->rope && member(h->rope, name) ? h->rope : h->text;
    return read_real(h, object, name, fallback, out);
}

static enum rc read_rope(struct hf_reader *h, struct model_config *c)
{
    enum rc rc;
    double part;
    const bool hybrid = c->arch == MODEL_ARCH_QWEN35;
    if ((rc = find_rope(h))) return rc;
    if ((rc = read_rope_real(h, "rope_theta", hybrid ? 0 : 10000.0, &c->rope_theta))) return rc;
    if ((rc = read_rope_real(h, "partial_rotary_factor", hybrid ? 0 : 1, &part))) return rc;
    double dims = part * c->head_dim;
    if (part > 1 || dims != floor(dims))
        return config_refuse(h->r, "model_limits", "partial_rotary_factor %g of %d is no number of dimensions", part,
                             c->head_dim);
    return config_check_int(h->r, "the number of rotated dimensions", (uint64_t)dims,
                            (struct config_limits){2, c->head_dim, 2, -1}, &c->rope_dim);
}

/* layer_types names the kind of every layer; without it a hybrid has attention in every n-th. */
static enum rc read_layer_kinds(const struct hf_reader *h, struct model_config *c)
{
    const json_t *types = member(h->text, "layer_types");
    const bool hybrid = c->arch == MODEL_ARCH_QWEN35;
    char word[CONFIG_WORD];
    int interval;
    enum rc rc = RC_OK;
    if (!types) {
        if (hybrid)
            rc = read_int(h, "full_attention_interval", (struct config_limits){1, MODEL_MAX_LAYERS, 1, -1}, &interval);
        for (int i = 0; i < c->n_layers && hybrid && rc == RC_OK; i++) c->gdn[i] = (i + 1) % interval != 0;
        return rc;
    }
    if (!json_is_array(types)) return no_type(h, "layer_types", "array");
    if (json_array_size(types) != (size_t)c->n_layers)
        return config_refuse(h->r, "model_limits", "layer_types names %zu layers, num_hidden_layers is %d",
                             json_array_size(types), c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const json_t *value = json_array_get(types, (size_t)i);
        const char *type = json_string_value(value);
        if (!type) return no_type(h, "a name in layer_types", "text");
        c->gdn[i] = hybrid && !strcmp(type, "linear_attention");
        if (!c->gdn[i] && strcmp(type, "full_attention"))
            return config_refuse(h->r, "model_unsupported", "layer %d is of type \"%s\", which is not supported", i,
                                 config_word(type, json_string_length(value), word));
    }
    return RC_OK;
}

static enum rc read_gdn(const struct hf_reader *h, struct model_config *c)
{
    enum rc rc;
    int mtp_layers;
    struct config_limits heads = {1, CONFIG_MAX_HEADS, 1, -1};
    struct config_limits dim = {CONFIG_MULTIPLE, CONFIG_MAX_HEAD_DIM, CONFIG_MULTIPLE, -1};
    struct config_limits conv = {CONFIG_MIN_CONV, CONFIG_MAX_CONV, 1, -1}, mtp = {0, 1, 1, 0};
    if ((rc = read_int(h, "linear_num_key_heads", heads, &c->gdn_k_heads))) return rc;
    if ((rc = read_int(h, "linear_num_value_heads", heads, &c->gdn_v_heads))) return rc;
    if ((rc = read_int(h, "linear_key_head_dim", dim, &c->gdn_k_dim))) return rc;
    if ((rc = read_int(h, "linear_value_head_dim", dim, &c->gdn_v_dim))) return rc;
    if ((rc = read_int(h, "linear_conv_kernel_dim", conv, &c->conv_width))) return rc;
    if ((rc = read_int(h, "mtp_num_hidden_layers", mtp, &mtp_layers))) return rc;
    c->mtp = mtp_layers == 1;
    return RC_OK;
}

/* Beside the text's numbers where it is given there, else for the whole. */
static enum rc read_tied(const struct hf_reader *h, struct model_config *c)
{
    static const char name[] = "tie_word_embeddings";
    return read_bool(h, member(h->text, name) ? h->text : h->root, name, false, &c->tied);
}

static enum rc read_all(struct hf_reader *h, struct model_config *c)
{
    enum rc rc;
    if ((rc = read_arch(h, c)) || (rc = check_features(h, c)) || (rc = read_widths(h, c)) || (rc = read_heads(h, c)) ||
        (rc = read_rope(h, c)) || (rc = read_layer_kinds(h, c)) || (rc = read_tied(h, c)))
        return rc;
    c->qkv_bias = c->arch == MODEL_ARCH_QWEN2;
    c->qk_norm = c->arch == MODEL_ARCH_QWEN3 || c->arch == MODEL_ARCH_QWEN35;
    c->attn_gate = c->arch == MODEL_ARCH_QWEN35;
    return c->arch == MODEL_ARCH_QWEN35 ? read_gdn(h, c) : RC_OK;
}

enum rc config_read_hf(struct config_reader *r, struct model_config *c)
{
    static const struct json_limits limits = {4 << 20, 1 << 18, 32};
    struct hf_reader h = {.r = r};
    struct model_text text;
    r->source = model_file_json_path(r->file, MODEL_JSON_CONFIG);
    if (!model_file_json(r->file, MODEL_JSON_CONFIG, &text))
        return config_refuse(r, "model_missing_key", "there is no config.json");
    enum rc rc = json_text_parse(text.bytes, text.len, limits, r->source, 0, &h.root, r->e);
    if (rc != RC_OK) return rc;
    rc = read_all(&h, c);
    json_decref(h.root);
    return rc;
}
