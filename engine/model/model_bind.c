/* model_bind: the llama names of GGUF (token_embd, blk.N.attn_q, ...) to backend weights.
 *
 * Two passes: check_shapes looks at every tensor first, so that a model that cannot work is refused in milliseconds, not
 * after minutes of loading. q, k and v of a layer are stacked into one weight, as are gate and up: fewer, wider operations.
 * The embedding is never copied: rows are decoded from the file's map. */
#include "model_bind.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct bind {
    const struct model_file *file;
    const struct model_config *config;
    const struct rank_part *part;
    struct model_weights *out;
    struct err *err;
};

struct named_shape {
    const char *suffix; /* of "blk.N.suffix.weight" */
    int cols, rows;
};

static const struct tensor_view *find(struct bind *b, int layer, const char *suffix)
{
    char name[96];
    if (layer < 0) snprintf(name, sizeof name, "%s.weight", suffix);
    else snprintf(name, sizeof name, "blk.%d.%s.weight", layer, suffix);
    const struct tensor_view *t = model_file_tensor(b->file, name);
    if (!t) {
        err_set(b->err, RC_BAD_INPUT, EXIT_UNAVAILABLE, "missing_tensor", "the model has no tensor %s", name);
        err_place(b->err, model_file_path(b->file), 0, 0, 0);
    }
    return t;
}

static enum rc check(struct bind *b, int layer, const char *suffix, int cols, int rows)
{
    const struct tensor_view *t = find(b, layer, suffix);
    if (!t) return RC_BAD_INPUT;
    uint64_t want_cols = (uint64_t)cols, want_rows = (uint64_t)rows;
    if (t->dims[0] == want_cols && t->dims[1] == want_rows && t->dims[2] == 1 && t->dims[3] == 1) return RC_OK;
    enum rc rc = err_set(b->err, RC_BAD_INPUT, EXIT_UNAVAILABLE, "wrong_shape",
                         "tensor %s is [%" PRIu64 ", %" PRIu64 "], expected [%d, %d]", t->name, t->dims[0], t->dims[1],
                         cols, rows);
    err_place(b->err, model_file_path(b->file), 0, 0, 0);
    return rc;
}

/* A tensor that is not used would change the function that the model computes (a bias, say): refused, never ignored. */
static enum rc check_nothing_unused(struct bind *b, const struct named_shape *of_layer, size_t n_of_layer)
{
    for (size_t i = 0; i < model_file_tensor_count(b->file); i++) {
        const char *name = model_file_tensor_at(b->file, i)->name;
        bool used = !strcmp(name, "token_embd.weight") || !strcmp(name, "output_norm.weight") ||
                    !strcmp(name, "output.weight");
        char of_this[96];
        int layer;
        if (!used && sscanf(name, "blk.%d.", &layer) == 1 && layer >= 0 && layer < b->config->n_layers)
            for (size_t k = 0; k < n_of_layer && !used; k++) {
                snprintf(of_this, sizeof of_this, "blk.%d.%s.weight", layer, of_layer[k].suffix);
                used = !strcmp(name, of_this);
            }
        if (used) continue;
        enum rc rc = err_set(b->err, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unknown_tensor",
                             "tensor %s is not part of a llama model as this version knows it", name);
        err_place(b->err, model_file_path(b->file), 0, 0, 0);
        return rc;
    }
    return RC_OK;
}

static enum rc check_shapes(struct bind *b)
{
    const struct model_config *c = b->config;
    int q_rows = c->n_heads * c->head_dim, kv_rows = c->n_kv_heads * c->head_dim;
    const struct named_shape of_layer[] = {
        {"attn_norm", c->hidden, 1},     {"attn_q", c->hidden, q_rows},   {"attn_k", c->hidden, kv_rows},
        {"attn_v", c->hidden, kv_rows},  {"attn_output", q_rows, c->hidden}, {"ffn_norm", c->hidden, 1},
        {"ffn_gate", c->hidden, c->ffn}, {"ffn_up", c->hidden, c->ffn},   {"ffn_down", c->ffn, c->hidden},
    };
    enum rc rc = check(b, -1, "token_embd", c->hidden, c->vocab);
    if (rc == RC_OK) rc = check(b, -1, "output_norm", c->hidden, 1);
    if (rc == RC_OK && !c->tied) rc = check(b, -1, "output", c->hidden, c->vocab);
    const size_t n = sizeof of_layer / sizeof of_layer[0];
    for (int l = 0; l < c->n_layers && rc == RC_OK; l++)
        for (size_t i = 0; i < n && rc == RC_OK; i++)
            rc = check(b, l, of_layer[i].suffix, of_layer[i].cols, of_layer[i].rows);
    return rc == RC_OK ? check_nothing_unused(b, of_layer, n) : rc;
}

static struct kern_weight_part part_of(const struct tensor_view *t, struct range rows, struct range cols)
{
    return (struct kern_weight_part){
        .format = t->format,
        .bytes = t->bytes,
        .tensor_cols = t->dims[0],
        .row_first = (uint64_t)rows.first,
        .rows = (uint64_t)rows.count,
        .col_first = (uint64_t)cols.first,
        .cols = (uint64_t)cols.count,
    };
}

static enum rc load(struct bind *b, const struct kern_weight_part *parts, int n, struct kern_weight **out)
{
    struct kern *k = b->out->kern;
    enum rc rc = k->weight_load(k, parts, n, out, b->err);
    if (rc == RC_OK) b->out->bytes += k->weight_bytes(*out);
    return rc;
}

/* A norm's weights as float32, whatever the file stores. */
static enum rc load_norm(struct bind *b, int layer, const char *suffix, float **out_dev)
{
    const struct tensor_view *t = find(b, layer, suffix);
    size_t n = (size_t)b->config->hidden;
    float *host = t ? malloc(n * sizeof *host) : NULL;
    if (!host) return t ? err_no_memory(b->err) : RC_BAD_INPUT;
    quant_decode(t->format, t->bytes, n, host);
    struct kern *k = b->out->kern;
    void *dev = NULL;
    enum rc rc = k->buffer_alloc(k, n * sizeof *host, &dev, b->err);
    if (rc == RC_OK) k->to_dev(k, dev, host, n * sizeof *host);
    *out_dev = dev;
    free(host);
    return rc;
}

static struct range scaled(struct range heads, int head_dim)
{
    return (struct range){heads.first * head_dim, heads.count * head_dim};
}

static enum rc load_layer(struct bind *b, int layer)
{
    const struct model_config *c = b->config;
    struct model_layer *l = &b->out->layers[layer];
    struct range all = {0, c->hidden}, ffn = b->part->ffn;
    struct range q = scaled(b->part->q_heads, c->head_dim), kv = scaled(b->part->kv_heads, c->head_dim);
    enum rc rc = load_norm(b, layer, "attn_norm", &l->attn_norm_dev);
    if (rc == RC_OK) rc = load_norm(b, layer, "ffn_norm", &l->ffn_norm_dev);
    if (rc == RC_OK && q.count) {
        struct kern_weight_part qkv[] = {part_of(find(b, layer, "attn_q"), q, all),
                                         part_of(find(b, layer, "attn_k"), kv, all),
                                         part_of(find(b, layer, "attn_v"), kv, all)};
        struct kern_weight_part o = part_of(find(b, layer, "attn_output"), all, q);
        rc = load(b, qkv, 3, &l->qkv);
        if (rc == RC_OK) rc = load(b, &o, 1, &l->o);
    }
    if (rc == RC_OK) {
        struct kern_weight_part gate_up[] = {part_of(find(b, layer, "ffn_gate"), ffn, all),
                                             part_of(find(b, layer, "ffn_up"), ffn, all)};
        struct kern_weight_part down = part_of(find(b, layer, "ffn_down"), all, ffn);
        rc = load(b, gate_up, 2, &l->gate_up);
        if (rc == RC_OK) rc = load(b, &down, 1, &l->down);
    }
    return rc;
}

enum rc model_bind(const struct model_file *m, const struct model_config *c, const struct rank_part *part,
                   struct kern *kern, void (*beat)(void *), void *beat_ctx, struct model_weights *out, struct err *e)
{
    *out = (struct model_weights){.kern = kern};
    struct bind b = {m, c, part, out, e};
    enum rc rc = check_shapes(&b);
    if (rc != RC_OK) return rc;
    out->layers = calloc((size_t)c->n_layers, sizeof *out->layers);
    if (!out->layers) return err_no_memory(e);
    out->n_layers = c->n_layers;
    struct range all = {0, c->hidden}, rows = {0, c->vocab};
    out->embedding = part_of(find(&b, -1, "token_embd"), rows, all);
    for (int l = 0; l < c->n_layers && rc == RC_OK; l++) {
        rc = load_layer(&b, l);
        beat(beat_ctx);
    }
    if (rc == RC_OK) rc = load_norm(&b, -1, "output_norm", &out->out_norm_dev);
    if (rc == RC_OK) {
        struct kern_weight_part head = part_of(find(&b, -1, c->tied ? "token_embd" : "output"), part->vocab, all);
        rc = load(&b, &head, 1, &out->head);
    }
    if (rc != RC_OK) model_bind_free(out);
    return rc;
}

void model_bind_free(struct model_weights *w)
{
    struct kern *k = w->kern;
    if (!k) return;
    for (int i = 0; i < w->n_layers; i++) {
        struct model_layer *l = &w->layers[i];
        k->buffer_free(k, l->attn_norm_dev);
        k->buffer_free(k, l->ffn_norm_dev);
        k->weight_free(k, l->qkv);
        k->weight_free(k, l->o);
        k->weight_free(k, l->gate_up);
        k->weight_free(k, l->down);
    }
    k->buffer_free(k, w->out_norm_dev);
    k->weight_free(k, w->head);
    free(w->layers);
    *w = (struct model_weights){0};
}
