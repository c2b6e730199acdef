/* model_names: one table of roles, with both spellings and where each belongs.
 *
 * A role belongs to the model, to every layer, to attention layers, to Gated DeltaNet layers or to the MTP layer, which is
 * an attention layer with four tensors more. GGUF numbers the MTP layer on after the others; Hugging Face puts it, always
 * as its layer 0, below a prefix of its own.
 *
 * Prefixes of Hugging Face's names differ by class: text models have "model.", multimodal ones "model.language_model.",
 * exports of older ones "language_model.model.". All are tried in that order; a file that has a role in two spellings is
 * refused where tensors are bound, since one of them is then of no role. */
#include "model_names.h"

#include <stdio.h>
#include <string.h>

enum place { OF_MODEL, OF_LAYER, OF_ATTENTION, OF_GDN, OF_MTP };

static const struct role {
    enum place place;
    const char *gguf; /* after "blk.N." where it is not of the model */
    const char *hf;   /* after the prefix */
} roles[MODEL_ROLES] = {
    [ROLE_EMBEDDING] = {OF_MODEL, "token_embd.weight", "embed_tokens.weight"},
    [ROLE_OUT_NORM] = {OF_MODEL, "output_norm.weight", "norm.weight"},
    [ROLE_HEAD] = {OF_MODEL, "output.weight", "lm_head.weight"},
    [ROLE_MIX_NORM] = {OF_LAYER, "attn_norm.weight", "input_layernorm.weight"},
    [ROLE_FFN_NORM] = {OF_LAYER, "ffn_norm.weight", "post_attention_layernorm.weight"}, /* qwen35: see gguf_suffix */
    [ROLE_GATE] = {OF_LAYER, "ffn_gate.weight", "mlp.gate_proj.weight"},
    [ROLE_UP] = {OF_LAYER, "ffn_up.weight", "mlp.up_proj.weight"},
    [ROLE_DOWN] = {OF_LAYER, "ffn_down.weight", "mlp.down_proj.weight"},
    [ROLE_Q] = {OF_ATTENTION, "attn_q.weight", "self_attn.q_proj.weight"},
    [ROLE_K] = {OF_ATTENTION, "attn_k.weight", "self_attn.k_proj.weight"},
    [ROLE_V] = {OF_ATTENTION, "attn_v.weight", "self_attn.v_proj.weight"},
    [ROLE_O] = {OF_ATTENTION, "attn_output.weight", "self_attn.o_proj.weight"},
    [ROLE_Q_BIAS] = {OF_ATTENTION, "attn_q.bias", "self_attn.q_proj.bias"},
    [ROLE_K_BIAS] = {OF_ATTENTION, "attn_k.bias", "self_attn.k_proj.bias"},
    [ROLE_V_BIAS] = {OF_ATTENTION, "attn_v.bias", "self_attn.v_proj.bias"},
    [ROLE_Q_NORM] = {OF_ATTENTION, "attn_q_norm.weight", "self_attn.q_norm.weight"},
    [ROLE_K_NORM] = {OF_ATTENTION, "attn_k_norm.weight", "self_attn.k_norm.weight"},
    [ROLE_GDN_QKV] = {OF_GDN, "attn_qkv.weight", "linear_attn.in_proj_qkv.weight"},
    [ROLE_GDN_Z] = {OF_GDN, "attn_gate.weight", "linear_attn.in_proj_z.weight"},
    [ROLE_GDN_B] = {OF_GDN, "ssm_beta.weight", "linear_attn.in_proj_b.weight"},
    [ROLE_GDN_A] = {OF_GDN, "ssm_alpha.weight", "linear_attn.in_proj_a.weight"},
    [ROLE_GDN_CONV] = {OF_GDN, "ssm_conv1d.weight", "linear_attn.conv1d.weight"},
    [ROLE_GDN_A_LOG] = {OF_GDN, "ssm_a", "linear_attn.A_log"},
    [ROLE_GDN_DT] = {OF_GDN, "ssm_dt.bias", "linear_attn.dt_bias"},
    [ROLE_GDN_NORM] = {OF_GDN, "ssm_norm.weight", "linear_attn.norm.weight"},
    [ROLE_GDN_OUT] = {OF_GDN, "ssm_out.weight", "linear_attn.out_proj.weight"},
    [ROLE_MTP_FC] = {OF_MTP, "nextn.eh_proj.weight", "fc.weight"},
    [ROLE_MTP_EMBEDDING_NORM] = {OF_MTP, "nextn.enorm.weight", "pre_fc_norm_embedding.weight"},
    [ROLE_MTP_HIDDEN_NORM] = {OF_MTP, "nextn.hnorm.weight", "pre_fc_norm_hidden.weight"},
    [ROLE_MTP_NORM] = {OF_MTP, "nextn.shared_head_norm.weight", "norm.weight"},
};

static const char *const text_prefixes[] = {"model.", "model.language_model.", "language_model.model."};
static const char *const head_prefixes[] = {"", "language_model."};
static const char *const mtp_prefixes[] = {"mtp.", "model.mtp."};

static const char *gguf_suffix(const struct model_config *c, enum model_role role)
{
    bool renamed = role == ROLE_FFN_NORM && c->arch == MODEL_ARCH_QWEN35;
    return renamed ? "post_attention_norm.weight" : roles[role].gguf;
}

/* The role's name in its i-th spelling, 0 the main one; false: there are no more. */
static bool spell(const struct model_config *c, enum model_role role, int layer, size_t i, char *out, size_t out_bytes)
{
    const struct role *r = &roles[role];
    if (c->layout == MODEL_LAYOUT_GGUF) {
        const char *suffix = gguf_suffix(c, role);
        if (r->place == OF_MODEL)
            snprintf(out, out_bytes, "%s", suffix);
        else
            snprintf(out, out_bytes, "blk.%d.%s", layer, suffix);
        return i == 0;
    }
    if (role == ROLE_HEAD) {
        if (i >= sizeof head_prefixes / sizeof *head_prefixes) return false;
        snprintf(out, out_bytes, "%s%s", head_prefixes[i], r->hf);
        return true;
    }
    const bool mtp = r->place == OF_MTP || (r->place != OF_MODEL && layer == c->n_layers);
    if (i >= (mtp ? sizeof mtp_prefixes / sizeof *mtp_prefixes : sizeof text_prefixes / sizeof *text_prefixes))
        return false;
    if (r->place == OF_MTP)
        snprintf(out, out_bytes, "%s%s", mtp_prefixes[i], r->hf);
    else if (mtp)
        snprintf(out, out_bytes, "%slayers.0.%s", mtp_prefixes[i], r->hf);
    else if (r->place == OF_MODEL)
        snprintf(out, out_bytes, "%s%s", text_prefixes[i], r->hf);
    else
        snprintf(out, out_bytes, "%slayers.%d.%s", text_prefixes[i], layer, r->hf);
    return true;
}

const struct tensor_view *model_role_find(const struct model_file *m, const struct model_config *c,
                                          enum model_role role, int layer)
{
    char name[128];
    if (roles[role].place == OF_MTP && layer != c->n_layers) return NULL;
    for (size_t i = 0; spell(c, role, layer, i, name, sizeof name); i++) {
        const struct tensor_view *t = model_file_tensor(m, name);
        if (t) return t;
    }
    return NULL;
}

const char *model_role_name(const struct model_config *c, enum model_role role, int layer, char *out, size_t out_bytes)
{
    spell(c, role, layer, 0, out, out_bytes);
    return out;
}

bool model_role_used(const struct model_config *c, enum model_role role, int layer)
{
    if (roles[role].place == OF_MODEL) return role != ROLE_HEAD || !c->tied;
    const bool mtp = layer == c->n_layers;
    if (layer < 0 || layer > c->n_layers || (mtp && !c->mtp)) return false;
    const bool gdn = !mtp && c->gdn[layer];
    switch (roles[role].place) {
    case OF_MODEL:
    case OF_LAYER: return true;
    case OF_GDN: return gdn;
    case OF_MTP: return mtp;
    case OF_ATTENTION: break;
    }
    if (role == ROLE_Q_BIAS || role == ROLE_K_BIAS || role == ROLE_V_BIAS) return !gdn && c->qkv_bias;
    if (role == ROLE_Q_NORM || role == ROLE_K_NORM) return !gdn && c->qk_norm;
    return !gdn;
}

static void set(uint64_t *rows, int r, uint64_t *cols, int c)
{
    *rows = (uint64_t)r;
    *cols = (uint64_t)c;
}

void model_role_shape(const struct model_config *c, enum model_role role, uint64_t *rows, uint64_t *cols)
{
    const int q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
    const int v = c->gdn_v_heads * c->gdn_v_dim, channels = 2 * c->gdn_k_heads * c->gdn_k_dim + v;
    switch (role) {
    case ROLE_EMBEDDING:
    case ROLE_HEAD: set(rows, c->vocab, cols, c->hidden); break;
    case ROLE_GATE:
    case ROLE_UP: set(rows, c->ffn, cols, c->hidden); break;
    case ROLE_DOWN: set(rows, c->hidden, cols, c->ffn); break;
    case ROLE_Q: set(rows, c->attn_gate ? 2 * q : q, cols, c->hidden); break;
    case ROLE_K:
    case ROLE_V: set(rows, kv, cols, c->hidden); break;
    case ROLE_O: set(rows, c->hidden, cols, q); break;
    case ROLE_Q_BIAS: set(rows, 1, cols, q); break;
    case ROLE_K_BIAS:
    case ROLE_V_BIAS: set(rows, 1, cols, kv); break;
    case ROLE_Q_NORM:
    case ROLE_K_NORM: set(rows, 1, cols, c->head_dim); break;
    case ROLE_GDN_QKV: set(rows, channels, cols, c->hidden); break;
    case ROLE_GDN_Z: set(rows, v, cols, c->hidden); break;
    case ROLE_GDN_B:
    case ROLE_GDN_A: set(rows, c->gdn_v_heads, cols, c->hidden); break;
    case ROLE_GDN_CONV: set(rows, channels, cols, c->conv_width); break;
    case ROLE_GDN_A_LOG:
    case ROLE_GDN_DT: set(rows, 1, cols, c->gdn_v_heads); break;
    case ROLE_GDN_NORM: set(rows, 1, cols, c->gdn_v_dim); break;
    case ROLE_GDN_OUT: set(rows, c->hidden, cols, v); break;
    case ROLE_MTP_FC: set(rows, c->hidden, cols, 2 * c->hidden); break;
    case ROLE_OUT_NORM:
    case ROLE_MIX_NORM:
    case ROLE_FFN_NORM:
    case ROLE_MTP_EMBEDDING_NORM:
    case ROLE_MTP_HIDDEN_NORM:
    case ROLE_MTP_NORM:
    case MODEL_ROLES: set(rows, 1, cols, c->hidden); break;
    }
}

static bool begins_with(const char *text, const char *prefix) { return !strncmp(text, prefix, strlen(prefix)); }

static bool ends_with(const char *text, const char *suffix)
{
    size_t n = strlen(text), k = strlen(suffix);
    return n >= k && !strcmp(text + n - k, suffix);
}

bool model_name_ignored(const char *name)
{
    /* Prefixes of the vision tower; of drafts, which never change a text; a tied head that was stored once more. */
    static const char *const prefixes[] = {"model.visual.", "visual.", "mtp.", "model.mtp."};
    static const char *const suffixes[] = {".k_scale", ".v_scale", ".rotary_emb.inv_freq"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (begins_with(name, prefixes[i])) return true;
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++)
        if (ends_with(name, suffixes[i])) return true;
    return !strcmp(name, "lm_head.weight") || !strcmp(name, "language_model.lm_head.weight");
}

bool model_role_is_offset_norm(const struct model_config *c, enum model_role role)
{
    if (c->layout != MODEL_LAYOUT_HF || c->arch != MODEL_ARCH_QWEN35) return false;
    switch (role) {
    case ROLE_OUT_NORM:
    case ROLE_MIX_NORM:
    case ROLE_FFN_NORM:
    case ROLE_Q_NORM:
    case ROLE_K_NORM:
    case ROLE_MTP_EMBEDDING_NORM:
    case ROLE_MTP_HIDDEN_NORM:
    case ROLE_MTP_NORM: return true;
    default: return false;
    }
}
