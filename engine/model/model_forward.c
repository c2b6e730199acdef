/* model_forward: pre-norm transformer, two sums a layer.
 *
 *   x += sum over ranks of o(attention(rope(qkv(norm(x)))));  x += sum over ranks of down(silu(gate) * up)(norm(x))
 *
 * Decode rows lie before prefill rows in every buffer; an operation whose bits depend on provenance is called once for each
 * of the two parts, the others once for all rows. The head is always computed as a decode row: a picked row's logits do not
 * depend on how its prompt was cut. A rank without attention heads contributes zeros to the first sum, so that every rank
 * adds the same number of terms. */
#include "model_forward.h"

#include <stdlib.h>
#include <xxhash.h>

#include "exact_math.h"

struct model_forward {
    struct model_forward_options o;
    struct rank_part part;
    struct kern_attn_shape shape; /* of this rank; n_heads 0: none */
    struct range vocab_of_rank[MAX_RANKS];
    int qkv_width, o_width;
    size_t page_bytes; /* one layer */
    float *cos_sin_dev;
    float *x_dev, *h_dev, *qkv_dev, *o_dev, *gate_up_dev, *act_dev, *partial_dev;
    float *pick_x_dev, *pick_h_dev, *pick_logits_dev;
    float *logits;        /* host [max_picks][vocab] */
    float *pick_logits;   /* host [max_picks][vocab part] */
    uint64_t *row_hashes; /* [max_rows] */
    uint64_t *hidden_hashes, *logits_hashes; /* [max_picks] */
    void **kv_dev;        /* [n_layers] */
};

static enum rc alloc_floats(struct model_forward *f, size_t rows, size_t width, float **out, struct err *e)
{
    size_t n;
    if (!size_mul(rows, width, &n) || !size_mul(n, sizeof(float), &n))
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "too_large", "a work buffer of %zu x %zu floats is too large", rows, width);
    void *dev = NULL;
    enum rc rc = n ? f->o.kern->buffer_alloc(f->o.kern, n, &dev, e) : RC_OK;
    *out = dev;
    return rc;
}

/* cos and sin of position * theta^(-2i / rope_dim), computed by exact_math so that the table is the same everywhere. */
static enum rc make_rope_table(struct model_forward *f, struct err *e)
{
    const struct model_config *c = f->o.config;
    size_t half = (size_t)c->rope_dim / 2, n = (size_t)f->o.context * half * 2;
    enum rc rc = alloc_floats(f, n, 1, &f->cos_sin_dev, e);
    float *host = rc == RC_OK ? malloc(n * sizeof *host) : NULL;
    if (!host) return rc == RC_OK ? err_no_memory(e) : rc;
    double log_theta = exact_log(c->rope_theta);
    for (size_t i = 0; i < half; i++) {
        double frequency = exact_exp(-2.0 * (double)i / (double)c->rope_dim * log_theta);
        for (size_t p = 0; p < (size_t)f->o.context; p++) {
            double sine, cosine;
            exact_sincos((double)p * frequency, &sine, &cosine);
            host[(p * half + i) * 2] = (float)cosine;
            host[(p * half + i) * 2 + 1] = (float)sine;
        }
    }
    f->o.kern->to_dev(f->o.kern, f->cos_sin_dev, host, n * sizeof *host);
    free(host);
    return RC_OK;
}

static enum rc alloc_kv(struct model_forward *f, struct err *e)
{
    f->kv_dev = calloc((size_t)f->o.config->n_layers, sizeof *f->kv_dev);
    if (!f->kv_dev) return err_no_memory(e);
    if (!f->shape.n_heads) return RC_OK;
    f->page_bytes = f->o.kern->kv_page_bytes(&f->shape);
    size_t n;
    if (!size_mul(f->page_bytes, (size_t)f->o.kv_pages, &n))
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "kv_too_large", "%d KV pages are too many", f->o.kv_pages);
    enum rc rc = RC_OK;
    for (int l = 0; l < f->o.config->n_layers && rc == RC_OK; l++)
        rc = f->o.kern->buffer_alloc(f->o.kern, n, &f->kv_dev[l], e);
    return rc;
}

static enum rc alloc_work(struct model_forward *f, struct err *e)
{
    const struct model_config *c = f->o.config;
    size_t rows = (size_t)f->o.max_rows, picks = (size_t)f->o.max_picks, hidden = (size_t)c->hidden;
    const struct { size_t rows, width; float **out; } buffers[] = {
        {rows, hidden, &f->x_dev},
        {rows, hidden, &f->h_dev},
        {rows, (size_t)f->qkv_width, &f->qkv_dev},
        {rows, (size_t)f->o_width, &f->o_dev},
        {rows, 2 * (size_t)f->part.ffn.count, &f->gate_up_dev},
        {rows, (size_t)f->part.ffn.count, &f->act_dev},
        {rows, hidden, &f->partial_dev},
        {picks, hidden, &f->pick_x_dev},
        {picks, hidden, &f->pick_h_dev},
        {picks, (size_t)f->part.vocab.count, &f->pick_logits_dev},
    };
    enum rc rc = RC_OK;
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0] && rc == RC_OK; i++)
        rc = alloc_floats(f, buffers[i].rows, buffers[i].width, buffers[i].out, e);
    if (rc != RC_OK) return rc;
    f->logits = malloc(picks * (size_t)c->vocab * sizeof *f->logits);
    f->pick_logits = malloc(picks * (size_t)f->part.vocab.count * sizeof *f->pick_logits);
    f->row_hashes = malloc(rows * sizeof *f->row_hashes);
    f->hidden_hashes = malloc(picks * sizeof *f->hidden_hashes);
    f->logits_hashes = malloc(picks * sizeof *f->logits_hashes);
    bool ok = f->logits && f->pick_logits && f->row_hashes && f->hidden_hashes && f->logits_hashes;
    return ok ? RC_OK : err_no_memory(e);
}

enum rc model_forward_open(const struct model_forward_options *o, struct model_forward **out, struct err *e)
{
    const struct model_config *c = o->config;
    struct model_forward *f = calloc(1, sizeof *f);
    if (!f) return err_no_memory(e);
    f->o = *o;
    f->part = o->partition->part[o->comm->rank];
    f->shape = (struct kern_attn_shape){
        .n_heads = f->part.q_heads.count,
        .n_kv_heads = f->part.kv_heads.count,
        .head_dim = c->head_dim,
        .rope_dim = c->rope_dim,
        .rope_adjacent = c->rope_adjacent,
        .kv = o->kv,
    };
    f->o_width = f->shape.n_heads * c->head_dim;
    f->qkv_width = (f->shape.n_heads + 2 * f->shape.n_kv_heads) * c->head_dim;
    for (int r = 0; r < o->partition->ranks; r++) f->vocab_of_rank[r] = o->partition->part[r].vocab;
    enum rc rc = make_rope_table(f, e);
    if (rc == RC_OK) rc = alloc_kv(f, e);
    if (rc == RC_OK) rc = alloc_work(f, e);
    if (rc == RC_OK) *out = f;
    else model_forward_close(f);
    return rc;
}

void model_forward_close(struct model_forward *f)
{
    if (!f) return;
    struct kern *k = f->o.kern;
    void *const buffers[] = {f->cos_sin_dev, f->x_dev,       f->h_dev,      f->qkv_dev,    f->o_dev,          f->gate_up_dev,
                             f->act_dev,     f->partial_dev, f->pick_x_dev, f->pick_h_dev, f->pick_logits_dev};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) k->buffer_free(k, buffers[i]);
    for (int l = 0; f->kv_dev && l < f->o.config->n_layers; l++) k->buffer_free(k, f->kv_dev[l]);
    free(f->kv_dev);
    free(f->logits);
    free(f->pick_logits);
    free(f->row_hashes);
    free(f->hidden_hashes);
    free(f->logits_hashes);
    free(f);
}

/* y = x W^T over all rows of the batch, each part by its provenance. */
static void linear(struct model_forward *f, const struct forward_batch *b, const struct kern_weight *w, const float *x,
                   int x_width, float *y, int y_width)
{
    struct kern *k = f->o.kern;
    size_t d = (size_t)b->decode_rows;
    if (b->decode_rows) k->linear(k, w, KERN_DECODE, x, b->decode_rows, y);
    if (b->rows > b->decode_rows)
        k->linear(k, w, KERN_PREFILL, x + d * (size_t)x_width, b->rows - b->decode_rows, y + d * (size_t)y_width);
}

static void attention(struct model_forward *f, const struct forward_batch *b, struct kern_kv_layer kv)
{
    struct kern *k = f->o.kern;
    int n_decode = b->n_decode_segments, n_prefill = b->n_segments - n_decode;
    k->rope_kv_append(k, &f->shape, b->segments, b->n_segments, f->cos_sin_dev, f->qkv_dev, kv);
    if (n_decode) k->attention(k, &f->shape, KERN_DECODE, b->segments, n_decode, f->qkv_dev, kv, f->o_dev);
    if (n_prefill)
        k->attention(k, &f->shape, KERN_PREFILL, b->segments + n_decode, n_prefill, f->qkv_dev, kv, f->o_dev);
}

static enum rc layer_step(struct model_forward *f, const struct forward_batch *b, int layer, struct err *e)
{
    const struct model_layer *l = &f->o.weights->layers[layer];
    struct kern *k = f->o.kern;
    struct comm *c = f->o.comm;
    int hidden = f->o.config->hidden, ffn = f->part.ffn.count;
    float eps = f->o.config->rms_eps;
    size_t n = (size_t)b->rows * (size_t)hidden;

    const float *partial = NULL;
    if (f->shape.n_heads) {
        k->rms_norm(k, f->x_dev, l->attn_norm_dev, b->rows, hidden, eps, f->h_dev);
        linear(f, b, l->qkv, f->h_dev, hidden, f->qkv_dev, f->qkv_width);
        attention(f, b, (struct kern_kv_layer){f->kv_dev[layer], f->page_bytes});
        linear(f, b, l->o, f->o_dev, f->o_width, f->partial_dev, hidden);
        partial = f->partial_dev;
    }
    enum rc rc = c->all_reduce_add(c, partial, f->x_dev, n, e);
    if (rc != RC_OK) return rc;
    f->o.on_layer(f->o.on_layer_ctx, layer, f->x_dev, b->rows);

    k->rms_norm(k, f->x_dev, l->ffn_norm_dev, b->rows, hidden, eps, f->h_dev);
    linear(f, b, l->gate_up, f->h_dev, hidden, f->gate_up_dev, 2 * ffn);
    k->swiglu(k, f->gate_up_dev, b->rows, ffn, f->act_dev);
    linear(f, b, l->down, f->act_dev, ffn, f->partial_dev, hidden);
    return c->all_reduce_add(c, f->partial_dev, f->x_dev, n, e);
}

/* Normed rows, this rank's share of the vocabulary, then everybody's. */
static enum rc head_step(struct model_forward *f, const struct forward_batch *b, struct err *e)
{
    struct kern *k = f->o.kern;
    const struct model_config *c = f->o.config;
    size_t hidden = (size_t)c->hidden;
    for (int i = 0; i < b->n_picks; i++)
        k->copy(k, f->pick_x_dev + (size_t)i * hidden, f->x_dev + (size_t)b->picks[i] * hidden, hidden * sizeof(float));
    k->rms_norm(k, f->pick_x_dev, f->o.weights->out_norm_dev, b->n_picks, c->hidden, c->rms_eps, f->pick_h_dev);
    k->linear(k, f->o.weights->head, KERN_DECODE, f->pick_h_dev, b->n_picks, f->pick_logits_dev);
    if (f->o.trace) k->hash_rows(k, f->pick_h_dev, b->n_picks, c->hidden, f->hidden_hashes);
    k->to_host(k, f->pick_logits, f->pick_logits_dev, (size_t)b->n_picks * (size_t)f->part.vocab.count * sizeof(float));
    enum rc rc = f->o.comm->all_gather_columns(f->o.comm, f->pick_logits, b->n_picks, f->vocab_of_rank, c->vocab,
                                               f->logits, e);
    for (int i = 0; i < b->n_picks && rc == RC_OK && f->o.trace; i++)
        f->logits_hashes[i] = XXH3_64bits(model_forward_logits(f, i), (size_t)c->vocab * sizeof(float));
    return rc;
}

enum rc model_forward_step(struct model_forward *f, const struct forward_batch *b, struct err *e)
{
    struct kern *k = f->o.kern;
    k->embed(k, &f->o.weights->embedding, b->tokens, b->rows, f->x_dev);
    enum rc rc = RC_OK;
    for (int l = 0; l < f->o.config->n_layers && rc == RC_OK; l++) rc = layer_step(f, b, l, e);
    if (rc == RC_OK) k->hash_rows(k, f->x_dev, b->rows, f->o.config->hidden, f->row_hashes);
    if (rc == RC_OK && b->n_picks) rc = head_step(f, b, e);
    return rc;
}

const uint64_t *model_forward_row_hashes(const struct model_forward *f) { return f->row_hashes; }

float *model_forward_logits(struct model_forward *f, int pick)
{
    return f->logits + (size_t)pick * (size_t)f->o.config->vocab;
}

uint64_t model_forward_hidden_hash(const struct model_forward *f, int pick) { return f->hidden_hashes[pick]; }

uint64_t model_forward_logits_hash(const struct model_forward *f, int pick) { return f->logits_hashes[pick]; }

size_t model_forward_page_bytes(const struct model_forward *f)
{
    return f->page_bytes * (size_t)f->o.config->n_layers;
}

void model_forward_save_page(struct model_forward *f, int32_t page, void *host)
{
    for (int l = 0; l < f->o.config->n_layers && f->page_bytes; l++)
        f->o.kern->to_host(f->o.kern, (char *)host + (size_t)l * f->page_bytes,
                           (char *)f->kv_dev[l] + (size_t)page * f->page_bytes, f->page_bytes);
}

void model_forward_load_page(struct model_forward *f, int32_t page, const void *host)
{
    for (int l = 0; l < f->o.config->n_layers && f->page_bytes; l++)
        f->o.kern->to_dev(f->o.kern, (char *)f->kv_dev[l] + (size_t)page * f->page_bytes,
                          (const char *)host + (size_t)l * f->page_bytes, f->page_bytes);
}

size_t model_forward_kv_bytes(const struct model_forward *f)
{
    return model_forward_page_bytes(f) * (size_t)f->o.kv_pages;
}
