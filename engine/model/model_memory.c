/* model_memory: sums over the roles of a model. Which share of a tensor a rank holds follows from its role alone. */
#include "model_memory.h"

/* Of a role's rows or columns a rank holds count / whole. */
struct share {
    uint64_t count, whole;
};

static struct share share_of(struct range part, int whole) { return (struct share){(uint64_t)part.count, (uint64_t)whole}; }

static struct share role_share(const struct model_config *c, const struct rank_part *part, enum model_role role)
{
    switch (role) {
    case ROLE_EMBEDDING: return c->tied ? share_of(part->vocab, c->vocab) : (struct share){0, 1};
    case ROLE_HEAD: return share_of(part->vocab, c->vocab);
    case ROLE_MTP_FC: return share_of(part->mtp_rows, c->hidden);
    case ROLE_GATE:
    case ROLE_UP:
    case ROLE_DOWN: return share_of(part->ffn, c->ffn);
    case ROLE_Q:
    case ROLE_O:
    case ROLE_Q_BIAS: return share_of(part->q_heads, c->n_heads);
    case ROLE_K:
    case ROLE_V:
    case ROLE_K_BIAS:
    case ROLE_V_BIAS: return share_of(part->kv_heads, c->n_kv_heads);
    case ROLE_GDN_QKV:
    case ROLE_GDN_Z:
    case ROLE_GDN_B:
    case ROLE_GDN_A:
    case ROLE_GDN_CONV:
    case ROLE_GDN_A_LOG:
    case ROLE_GDN_DT:
    case ROLE_GDN_OUT: return share_of(part->gdn_v_heads, c->gdn_v_heads);
    default: return (struct share){1, 1};
    }
}

/* Vectors become float32; W8 stores a byte a value and a float32 scale for a group. */
static uint64_t loaded_bytes(const struct tensor_view *t, enum kern_weights how)
{
    const uint64_t values = t->matrix.rows * t->matrix.cols;
    if (t->matrix.rows == 1) return values * sizeof(float);
    return how == KERN_WEIGHTS_W8 ? values + values / QUANT_W8_GROUP * sizeof(float) : t->n_bytes;
}

static uint64_t weight_bytes(const struct model_file *m, const struct model_config *c, const struct rank_part *part,
                             const struct model_memory_options *o)
{
    uint64_t sum = 0;
    const int layers = c->n_layers + (o->mtp && c->mtp);
    for (int role = 0; role < MODEL_ROLES; role++) {
        const bool of_layer = role >= ROLE_MIX_NORM;
        for (int l = 0; l < (of_layer ? layers : 1); l++) {
            const struct tensor_view *t = model_role_find(m, c, (enum model_role)role, l);
            if (!t) continue;
            const struct share s = role_share(c, part, (enum model_role)role);
            const uint64_t bytes = loaded_bytes(t, o->weights);
            sum += bytes / s.whole * s.count + bytes % s.whole * s.count / s.whole;
        }
    }
    return sum;
}

static uint64_t work_bytes(const struct model_config *c, const struct rank_part *part, const struct model_memory_options *o)
{
    const uint64_t rows = (uint64_t)o->rows, picks = (uint64_t)o->picks, hidden = (uint64_t)c->hidden;
    const uint64_t heads = (uint64_t)part->q_heads.count * (c->attn_gate ? 2 : 1) + 2 * (uint64_t)part->kv_heads.count;
    const uint64_t values = (uint64_t)part->gdn_v_heads.count * (uint64_t)c->gdn_v_dim;
    const uint64_t keys = 2 * (uint64_t)part->gdn_k_heads.count * (uint64_t)c->gdn_k_dim;
    const uint64_t gdn = keys + 2 * values + 2 * (uint64_t)part->gdn_v_heads.count;
    uint64_t mixer = heads * (uint64_t)c->head_dim, out = (uint64_t)part->q_heads.count * (uint64_t)c->head_dim;
    if (gdn > mixer) mixer = gdn;
    if (values > out) out = values;
    const uint64_t row = 4 * hidden + mixer + out + 3 * (uint64_t)part->ffn.count;
    const uint64_t pick = 2 * hidden + (uint64_t)part->vocab.count + (uint64_t)c->vocab;
    return (rows * row + picks * pick) * sizeof(float);
}

struct rank_memory model_memory_of_rank(const struct model_file *m, const struct model_config *c, const struct rank_part *part,
                                        const struct model_memory_options *o)
{
    int attention_layers = o->mtp && c->mtp, gdn_layers = 0;
    for (int l = 0; l < c->n_layers; l++) c->gdn[l] ? gdn_layers++ : attention_layers++;
    const uint64_t values = (uint64_t)part->gdn_v_heads.count * (uint64_t)c->gdn_v_dim;
    const uint64_t channels = 2 * (uint64_t)part->gdn_k_heads.count * (uint64_t)c->gdn_k_dim + values;
    const uint64_t history = c->conv_width ? (uint64_t)(c->conv_width - 1) * channels : 0;
    return (struct rank_memory){
        .weight_bytes = weight_bytes(m, c, part, o),
        .kv_token_bytes =
            2 * (uint64_t)attention_layers * (uint64_t)part->kv_heads.count * kv_format_bytes(o->kv, c->head_dim),
        .state_bytes = (uint64_t)gdn_layers * (values * (uint64_t)c->gdn_k_dim + history) * sizeof(float),
        .work_bytes = work_bytes(c, part, o),
    };
}

int64_t model_memory_context(const struct rank_memory *r, int active, uint64_t n_bytes)
{
    const uint64_t fixed = r->weight_bytes + r->work_bytes + r->state_bytes * (uint64_t)active;
    if (n_bytes <= fixed) return 0;
    if (!r->kv_token_bytes) return INT64_MAX;
    const uint64_t tokens = (n_bytes - fixed) / r->kv_token_bytes / (uint64_t)active;
    return (int64_t)(tokens / KV_PAGE_TOKENS * KV_PAGE_TOKENS);
}
