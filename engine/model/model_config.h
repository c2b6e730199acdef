/* model_config: the numbers of one model, read from its metadata (GGUF keys, or config.json) and checked against each other
 * and the tensors. */
#ifndef TANDEM_MODEL_CONFIG_H
#define TANDEM_MODEL_CONFIG_H

#include "base.h"
#include "model_file.h"

enum model_arch { MODEL_ARCH_LLAMA, MODEL_ARCH_QWEN2, MODEL_ARCH_QWEN3, MODEL_ARCH_QWEN35 };

enum { MODEL_MAX_LAYERS = 512 };

struct model_config {
    enum model_arch arch;
    int n_layers;
    int hidden;         /* width of the residual stream */
    int ffn;            /* width of the MLP */
    int n_heads;        /* query heads */
    int n_kv_heads;     /* divides n_heads */
    int head_dim;
    int rope_dim;       /* rotated dimensions of a head, even */
    bool rope_adjacent; /* true: pairs (2i, 2i+1), GGUF llama order; false: (i, i + rope_dim / 2) */
    double rope_theta;
    float rms_eps;
    int vocab;          /* rows of the embedding and of the head */
    int context;        /* trained context, tokens */
    bool tied;          /* the head is the embedding */
    bool qkv_bias;      /* qwen2 */
    bool qk_norm;       /* RMSNorm of every query and key head: qwen3, qwen35 */
    bool attn_gate;     /* a query head is [query | gate]: qwen35 */

    /* Hybrid models. gdn_v_heads 0: no layer is Gated DeltaNet. */
    bool gdn[MODEL_MAX_LAYERS]; /* this layer is Gated DeltaNet, not attention */
    int gdn_k_heads, gdn_v_heads; /* the former divides the latter */
    int gdn_k_dim, gdn_v_dim;
    int conv_width;
    bool mtp;           /* one multi-token-prediction layer follows; it counts as layer n_layers where layers are named */

    /* What the container's values mean (model_file_layout): HF norms hold w of (1 + w), GGUF's hold 1 + w; GGUF tiles GDN value
     * heads and stores -exp(A_log). */
    enum model_layout layout;
};

/* Reads and checks. Every limit (layers, heads, widths, products) is checked here so that later code need not. */
enum rc model_config_read(const struct model_file *m, struct model_config *out, struct err *e);
const char *model_arch_name(enum model_arch a);

#endif
