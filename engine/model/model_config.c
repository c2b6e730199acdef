/* model_config: the numbers of one model, checked against each other and against the tensors.
 *
 * Two readers take them from GGUF's metadata or from config.json. Both follow two rules. A value that is there but wrong
 * is an error, never replaced by its default. What would change the arithmetic and is not implemented (scaled rotary
 * embeddings, experts, sliding windows, other activations, per-layer head counts) is refused by name: running such a
 * model without it would give wrong text, not an error.
 *
 * The limits keep every product that later code forms (heads times width, rows times columns, twice that in bytes)
 * inside an int or, for whole matrices, inside 2^40. That the tensors exist and have these shapes is checked where they
 * are bound; the embedding alone is looked at here, since it decides the size of the vocabulary. */
#include "model_config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model_config_private.h"
#include "model_names.h"

enum rc config_refuse(const struct config_reader *r, const char *code, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    enum rc rc = err_set(r->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s", text);
    err_place(r->e, r->source, 0, 0, 0);
    return rc;
}

enum rc config_check_int(const struct config_reader *r, const char *what, uint64_t value, struct config_limits limits,
                         int *out)
{
    bool inside = value >= (uint64_t)limits.min && value <= (uint64_t)limits.max;
    if (limits.min == limits.max && !inside)
        return config_refuse(r, "model_limits", "%s is %" PRIu64 ", not %d", what, value, limits.min);
    if (!inside || value % (uint64_t)limits.multiple)
        return config_refuse(r, "model_limits", "%s is %" PRIu64 ", not a multiple of %d from %d to %d", what, value,
                             limits.multiple, limits.min, limits.max);
    *out = (int)value;
    return RC_OK;
}

enum rc config_check_real(const struct config_reader *r, const char *what, double value)
{
    if (isfinite(value) && value > 0) return RC_OK;
    return config_refuse(r, "model_limits", "%s is %g, not above 0", what, value);
}

const char *config_word(const char *bytes, size_t len, char out[CONFIG_WORD])
{
    size_t n = len < CONFIG_WORD - 8 ? len : CONFIG_WORD - 8;
    for (size_t i = 0; i < n; i++) out[i] = bytes[i] > ' ' && bytes[i] < 127 ? bytes[i] : '?';
    out[n] = '\0';
    return out;
}

/* Widths of Gated DeltaNet. */
static enum rc check_gdn(const struct config_reader *r, const struct model_config *c)
{
    if (!c->gdn_v_heads) return RC_OK;
    if (c->gdn_v_heads % c->gdn_k_heads)
        return config_refuse(r, "model_limits", "%d value heads cannot share %d key heads evenly", c->gdn_v_heads,
                             c->gdn_k_heads);
    if (c->gdn_k_heads * c->gdn_k_dim > CONFIG_MAX_WIDTH || c->gdn_v_heads * c->gdn_v_dim > CONFIG_MAX_WIDTH)
        return config_refuse(r, "model_limits", "%d key heads of %d and %d value heads of %d: wider than %d",
                             c->gdn_k_heads, c->gdn_k_dim, c->gdn_v_heads, c->gdn_v_dim, CONFIG_MAX_WIDTH);
    return RC_OK;
}

static enum rc check_numbers(const struct config_reader *r, const struct model_config *c)
{
    if (c->n_heads % c->n_kv_heads)
        return config_refuse(r, "model_limits", "%d query heads cannot share %d key-value heads evenly", c->n_heads,
                             c->n_kv_heads);
    if (c->n_heads * c->head_dim > CONFIG_MAX_WIDTH)
        return config_refuse(r, "model_limits", "%d heads of %d are wider than %d", c->n_heads, c->head_dim,
                             CONFIG_MAX_WIDTH);
    if (!(c->rms_eps > 0 && c->rms_eps < 1))
        return config_refuse(r, "model_limits", "the epsilon of norms is %g, not between 0 and 1", (double)c->rms_eps);
    return check_gdn(r, c);
}

/* The embedding decides; whatever else names the size of the vocabulary (named, -1: nothing does) must agree. */
static enum rc read_vocab(const struct config_reader *r, struct model_config *c, int named)
{
    char name[128];
    const struct tensor_view *embedding = model_role_find(r->file, c, ROLE_EMBEDDING, 0);
    if (!embedding)
        return config_refuse(r, "model_missing_tensor", "the tensor %s is missing",
                             model_role_name(c, ROLE_EMBEDDING, 0, name, sizeof name));
    if (embedding->n_dims != 2 || embedding->dims[0] != (uint64_t)c->hidden)
        return config_refuse(r, "model_bad_shape", "%.100s is no matrix with rows of %d", embedding->name, c->hidden);
    if (!embedding->dims[1] || embedding->dims[1] > CONFIG_MAX_VOCAB)
        return config_refuse(r, "model_limits", "%.100s has %" PRIu64 " rows, not 1 to %d", embedding->name,
                             embedding->dims[1], CONFIG_MAX_VOCAB);
    c->vocab = (int)embedding->dims[1];
    if (named >= 0 && named != c->vocab)
        return config_refuse(r, "model_limits", "vocab_size is %d, but %.100s has %d rows", named, embedding->name,
                             c->vocab);
    size_t tokens = model_file_text_array(r->file, "tokenizer.ggml.tokens");
    if (tokens != (size_t)c->vocab && model_file_has(r->file, "tokenizer.ggml.tokens"))
        return config_refuse(r, "model_limits", "the tokenizer has %zu tokens, %.100s has %d rows", tokens,
                             embedding->name, c->vocab);
    return RC_OK;
}

enum rc model_config_read(const struct model_file *m, struct model_config *out, struct err *e)
{
    struct config_reader r = {.file = m, .source = model_file_path(m), .e = e};
    struct model_config c = {.layout = model_file_layout(m), .vocab = -1};
    enum rc rc = c.layout == MODEL_LAYOUT_HF ? config_read_hf(&r, &c) : config_read_gguf(&r, &c);
    if (rc == RC_OK) rc = check_numbers(&r, &c);
    if (rc == RC_OK) rc = read_vocab(&r, &c, c.vocab);
    if (rc != RC_OK) return rc;
    if (c.layout == MODEL_LAYOUT_GGUF) c.tied = !model_role_find(m, &c, ROLE_HEAD, 0);
    /* Announced, but exports of the text alone leave its tensors out. */
    c.mtp = c.mtp && model_role_find(m, &c, ROLE_MTP_FC, c.n_layers) != NULL;
    *out = c;
    return RC_OK;
}

const char *model_arch_name(enum model_arch a)
{
    switch (a) {
    case MODEL_ARCH_LLAMA: return "llama";
    case MODEL_ARCH_QWEN2: return "qwen2";
    case MODEL_ARCH_QWEN3: return "qwen3";
    case MODEL_ARCH_QWEN35: return "qwen35";
    }
    return "unknown";
}
