/* model_names: what a role is called in a container. GGUF and Hugging Face name the same tensors differently; this table is
 * the only place that knows how. */
#ifndef TANDEM_MODEL_NAMES_H
#define TANDEM_MODEL_NAMES_H

#include "model_config.h"
#include "model_file.h"

enum model_role {
    ROLE_EMBEDDING,  /* [vocab, hidden] */
    ROLE_OUT_NORM,   /* [hidden] */
    ROLE_HEAD,       /* [vocab, hidden]; absent where tied */
    /* of a layer */
    ROLE_MIX_NORM,   /* [hidden] before attention or GDN */
    ROLE_FFN_NORM,   /* [hidden] */
    ROLE_GATE,       /* [ffn, hidden] */
    ROLE_UP,
    ROLE_DOWN,       /* [hidden, ffn] */
    /* of an attention layer */
    ROLE_Q,          /* [heads head_dim, hidden], doubled where gated */
    ROLE_K,          /* [kv_heads head_dim, hidden] */
    ROLE_V,
    ROLE_O,          /* [hidden, heads head_dim] */
    ROLE_Q_BIAS,     /* [heads head_dim] */
    ROLE_K_BIAS,
    ROLE_V_BIAS,
    ROLE_Q_NORM,     /* [head_dim] */
    ROLE_K_NORM,
    /* of a GDN layer; channels = 2 k_heads k_dim + v_heads v_dim */
    ROLE_GDN_QKV,    /* [channels, hidden] */
    ROLE_GDN_Z,      /* [v_heads v_dim, hidden] */
    ROLE_GDN_B,      /* [v_heads, hidden] */
    ROLE_GDN_A,      /* [v_heads, hidden] */
    ROLE_GDN_CONV,   /* [channels, conv_width] */
    ROLE_GDN_A_LOG,  /* [v_heads]; GGUF: -exp(A_log) */
    ROLE_GDN_DT,     /* [v_heads] */
    ROLE_GDN_NORM,   /* [v_dim] */
    ROLE_GDN_OUT,    /* [hidden, v_heads v_dim] */
    /* of the MTP layer, besides those of an attention layer */
    ROLE_MTP_FC,     /* [hidden, 2 hidden]: embedding half first */
    ROLE_MTP_EMBEDDING_NORM, /* [hidden] */
    ROLE_MTP_HIDDEN_NORM,    /* [hidden] */
    ROLE_MTP_NORM,   /* [hidden] */
    MODEL_ROLES
};

/* The role's tensor in this model, NULL where there is none. layer: 0 .. n_layers - 1, n_layers for the MTP layer, ignored for
 * roles of the whole model. Tries every spelling in use (a "language_model." prefix, "model.mtp."). */
const struct tensor_view *model_role_find(const struct model_file *m, const struct model_config *c, enum model_role role,
                                          int layer);
/* The main spelling, for messages. Returns out. */
const char *model_role_name(const struct model_config *c, enum model_role role, int layer, char *out, size_t out_bytes);
/* Whether the model has this role in this layer at all (config, not file). */
bool model_role_used(const struct model_config *c, enum model_role role, int layer);
/* Expected shape, rows and columns (columns only: rows 1). */
void model_role_shape(const struct model_config *c, enum model_role role, uint64_t *rows, uint64_t *cols);
/* True when a tensor of this name may be left out of a text model if no role takes it: vision towers, KV scales, rotary
 * tables, an MTP layer or a second copy of a tied head. */
bool model_name_ignored(const char *name);
/* True when the value of a norm is w of (1 + w), to be added while loading. */
bool model_role_is_offset_norm(const struct model_config *c, enum model_role role);

#endif
