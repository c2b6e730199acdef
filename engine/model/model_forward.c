/* model_forward: pre-norm transformer, two sums a layer.
 *
 *   x += sum over ranks of out_proj(mix(in_proj(norm(x))));  x += sum over ranks of down(silu(gate) * up)(norm(x))
 *
 * where mix is attention or Gated DeltaNet. Decode rows lie before prefill rows in every buffer; an operation whose bits
 * depend on provenance is called once for each of the two parts, the others once for all rows. The head is always computed
 * as a decode row: a picked row's logits do not depend on how its prompt was cut. A rank without a share of a layer's heads
 * contributes zeros to its first sum, so that every rank adds the same number of terms.
 *
 * Memory of sequences is of two kinds. Keys and values of attention layers lie in pages, which the caller hands out; what
 * Gated DeltaNet remembers lies in slots (recurrent_state). Layers of either kind are counted apart. */
#include "model_forward.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "exact_math.h"
#include "model_forward_impl.h"

/* ---- open and close ---- */

enum rc forward_alloc_bytes(struct model_forward *f, size_t n_bytes, void **out_dev, struct err *e)
{
    *out_dev = NULL;
    return n_bytes ? f->o.kern->buffer_alloc(f->o.kern, n_bytes, out_dev, e) : RC_OK;
}

enum rc forward_alloc_host(struct model_forward *f, size_t n_bytes, void **out, struct err *e)
{
    *out = NULL;
    return n_bytes ? f->o.kern->host_alloc(f->o.kern, n_bytes, out, e) : RC_OK;
}

enum rc forward_alloc(struct model_forward *f, size_t rows, size_t width, float **out_dev, struct err *e)
{
    size_t n;
    if (!size_mul(rows, width, &n) || !size_mul(n, sizeof(float), &n))
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "too_large", "a work buffer of %zu x %zu floats is too large", rows, width);
    void *dev = NULL;
    enum rc rc = n ? f->o.kern->buffer_alloc(f->o.kern, n, &dev, e) : RC_OK;
    *out_dev = dev;
    return rc;
}

/* cos and sin of position * theta^(-2i / rope_dim), computed by exact_math so that the table is the same everywhere. */
static enum rc make_rope_table(struct model_forward *f, struct err *e)
{
    const struct model_config *c = f->o.config;
    size_t half = (size_t)c->rope_dim / 2, n = (size_t)f->o.context * half * 2;
    enum rc rc = forward_alloc(f, n, 1, &f->cos_sin_dev, e);
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

static int gdn_layers(const struct model_config *c)
{
    int n = 0;
    for (int l = 0; l < c->n_layers; l++) n += c->gdn[l];
    return n;
}

static void make_shapes(struct model_forward *f)
{
    const struct model_config *c = f->o.config;
    f->part = f->o.partition->part[f->o.comm->rank];
    f->attn = (struct kern_attn_shape){
        .n_heads = f->part.q_heads.count,
        .n_kv_heads = f->part.kv_heads.count,
        .head_dim = c->head_dim,
        .rope_dim = c->rope_dim,
        .rope_adjacent = c->rope_adjacent,
        .kv = f->o.kv,
        .gated = c->attn_gate,
    };
    f->gdn = (struct kern_gdn_shape){
        .k_heads = f->part.gdn_k_heads.count,
        .v_heads = f->part.gdn_v_heads.count,
        .k_dim = c->gdn_k_dim,
        .v_dim = c->gdn_v_dim,
        .conv_width = c->conv_width,
        .norm_eps = c->rms_eps,
    };
    f->qkv_width = ((c->attn_gate ? 2 : 1) * f->attn.n_heads + 2 * f->attn.n_kv_heads) * c->head_dim;
    f->gdn_width = kern_gdn_width(&f->gdn);
    f->n_kv = c->n_layers - gdn_layers(c) + f->o.mtp;
    for (int r = 0; r < f->o.partition->ranks; r++) {
        f->vocab_of_rank[r] = f->o.partition->part[r].vocab;
        f->best_of_rank[r] = (struct range){2 * r, 2};
    }
}

/* One buffer for all layers: a backend can give a large one better pages than many small ones. */
static enum rc alloc_kv(struct model_forward *f, struct err *e)
{
    if (!f->attn.n_heads || !f->n_kv) return RC_OK;
    f->page_bytes = f->o.kern->kv_page_bytes(&f->attn);
    size_t n;
    void *dev = NULL;
    if (!size_mul(f->page_bytes, (size_t)f->o.kv_pages, &f->kv_layer_bytes) || !size_mul(f->kv_layer_bytes, (size_t)f->n_kv, &n))
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "kv_too_large", "%d KV pages are too many", f->o.kv_pages);
    enum rc rc = f->o.kern->buffer_alloc(f->o.kern, n, &dev, e);
    f->kv_dev = dev;
    return rc;
}

static enum rc alloc_slots(struct model_forward *f, struct err *e)
{
    const struct recurrent_options o = {
        .kern = f->o.kern,
        .shape = f->gdn,
        .n_layers = gdn_layers(f->o.config),
        .slots = f->o.slots,
        .hidden = f->o.mtp ? f->o.config->hidden : 0,
        .replay = f->o.max_drafts > 0,
    };
    f->gdn_layers = calloc((size_t)o.n_layers + 1, sizeof *f->gdn_layers);
    if (!f->gdn_layers) return err_no_memory(e);
    for (int l = 0, n = 0; l < f->o.config->n_layers; l++) {
        const struct model_layer *m = &f->o.weights->layers[l];
        if (f->o.config->gdn[l]) f->gdn_layers[n++] = (struct kern_gdn_weights){m->conv_dev, m->a_dev, m->dt_dev, m->gdn_norm_dev};
    }
    return recurrent_state_open(&o, &f->slots, e);
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* Rows. */
static enum rc alloc_rows(struct model_forward *f, struct err *e)
{
    size_t rows = (size_t)f->o.max_rows, picks = (size_t)f->o.max_picks, hidden = (size_t)f->o.config->hidden;
    const struct { size_t rows, width; float **out; } buffers[] = {
        {rows, hidden, &f->x_dev},
        {rows, larger((size_t)f->qkv_width, (size_t)f->gdn_width), &f->in_dev},
        {picks, hidden, &f->pick_x_dev},
        {picks, hidden, &f->pick_h_dev},
        {picks, (size_t)f->part.vocab.count, &f->pick_logits_dev},
    };
    enum rc rc = RC_OK;
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0] && rc == RC_OK; i++)
        rc = forward_alloc(f, buffers[i].rows, buffers[i].width, buffers[i].out, e);
    return rc;
}

static enum rc load_allowed(struct model_forward *f, size_t words, struct err *e)
{
    uint32_t *all = malloc(words * sizeof *all + 1);
    if (!all) return err_no_memory(e);
    memset(all, 0xff, words * sizeof *all);
    f->o.kern->to_dev(f->o.kern, f->allowed_dev, f->o.allowed ? f->o.allowed : all, words * sizeof *all);
    free(all);
    f->o.allowed = NULL;
    return RC_OK;
}

/* What has the backend's own form, and hashes. */
static enum rc alloc_acts(struct model_forward *f, struct err *e)
{
    const struct kern *k = f->o.kern;
    int rows = f->o.max_rows, picks = f->o.max_picks, hidden = f->o.config->hidden, ffn = f->part.ffn.count;
    size_t heads = k->act_bytes(rows, f->attn.n_heads * f->attn.head_dim);
    size_t values = k->act_bytes(rows, f->gdn.v_heads * f->gdn.v_dim);
    size_t words = ((size_t)f->o.config->vocab + 31) / 32;
    void *allowed = NULL, *best = NULL;
    const struct { size_t n_bytes; void **out; } buffers[] = {
        {k->act_bytes(rows, hidden), &f->h_act},
        {larger(heads, values), &f->mix_act},
        {k->act_bytes(rows, ffn), &f->ffn_act},
        {k->swiglu_scratch_bytes(rows, ffn), &f->swiglu_dev},
        {k->partial_bytes(rows, hidden), &f->partial_dev},
        {k->act_bytes(picks, hidden), &f->pick_act},
        {words * sizeof(uint32_t), &allowed},
        {(size_t)picks * sizeof(struct kern_best), &best},
    };
    enum rc rc = RC_OK;
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0] && rc == RC_OK; i++)
        rc = forward_alloc_bytes(f, buffers[i].n_bytes, buffers[i].out, e);
    f->allowed_dev = allowed;
    f->best_dev = best;
    return rc == RC_OK ? load_allowed(f, words, e) : rc;
}

static enum rc alloc_results(struct model_forward *f, struct err *e)
{
    size_t rows = (size_t)f->o.max_rows, picks = (size_t)f->o.max_picks;
    void *logits = NULL, *row_hashes = NULL, *hidden_hashes = NULL, *best = NULL;
    enum rc rc = forward_alloc_host(f, picks * (size_t)f->o.config->vocab * sizeof *f->logits, &logits, e);
    if (rc == RC_OK) rc = forward_alloc_host(f, picks * (size_t)f->o.partition->ranks * sizeof *f->best, &best, e);
    if (rc == RC_OK) rc = forward_alloc_host(f, rows * sizeof *f->row_hashes, &row_hashes, e);
    if (rc == RC_OK) rc = forward_alloc_host(f, picks * sizeof *f->hidden_hashes, &hidden_hashes, e);
    f->logits = logits;
    f->best = best;
    f->row_hashes = row_hashes;
    f->hidden_hashes = hidden_hashes;
    f->logits_hashes = malloc((picks + 1) * sizeof *f->logits_hashes);
    return rc == RC_OK && !f->logits_hashes ? err_no_memory(e) : rc;
}

static enum rc alloc_work(struct model_forward *f, struct err *e)
{
    enum rc rc = alloc_rows(f, e);
    if (rc == RC_OK) rc = alloc_acts(f, e);
    return rc == RC_OK ? alloc_results(f, e) : rc;
}

static enum rc check_options(const struct model_forward_options *o, struct err *e)
{
    const char *wrong = NULL;
    if (o->mtp && !o->weights->mtp) wrong = "no MTP layer was loaded";
    else if (o->max_drafts < 0 || o->max_drafts > KERN_MAX_DRAFTS) wrong = "drafts of a round are out of range";
    else if ((o->mtp || o->config->gdn_v_heads) && o->slots < 1) wrong = "a hybrid model needs a slot for each sequence";
    return wrong ? err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "bad_option", "%s", wrong) : RC_OK;
}

enum rc model_forward_open(const struct model_forward_options *o, struct model_forward **out, struct err *e)
{
    enum rc rc = check_options(o, e);
    if (rc != RC_OK) return rc;
    struct model_forward *f = calloc(1, sizeof *f);
    if (!f) return err_no_memory(e);
    f->o = *o;
    make_shapes(f);
    rc = o->kern->supports(o->kern, o->config->hidden, f->attn.n_heads ? &f->attn : NULL, f->gdn.k_heads ? &f->gdn : NULL, e);
    if (rc == RC_OK) rc = make_rope_table(f, e);
    if (rc == RC_OK) rc = alloc_kv(f, e);
    if (rc == RC_OK) rc = alloc_slots(f, e);
    if (rc == RC_OK) rc = alloc_work(f, e);
    if (rc == RC_OK && o->mtp) rc = model_mtp_open(f, e);
    if (rc == RC_OK) *out = f;
    else model_forward_close(f);
    return rc;
}

void model_forward_close(struct model_forward *f)
{
    if (!f) return;
    struct kern *k = f->o.kern;
    void *const buffers[] = {f->cos_sin_dev, f->x_dev,      f->in_dev,          f->pick_x_dev, f->pick_h_dev,     f->pick_logits_dev,
                             f->h_act,       f->mix_act,    f->ffn_act,         f->swiglu_dev, f->partial_dev,    f->pick_act,
                             f->kv_dev,      f->allowed_dev, f->best_dev};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) k->buffer_free(k, buffers[i]);
    model_mtp_close(f);
    recurrent_state_close(&f->slots);
    free(f->gdn_layers);
    k->host_free(k, f->logits);
    k->host_free(k, f->best);
    k->host_free(k, f->row_hashes);
    k->host_free(k, f->hidden_hashes);
    free(f->logits_hashes);
    free(f);
}

/* ---- a step ---- */

/* Batches of decode rows alone are recorded. Rows of segments differ from step to step and are the backend's to look up; what
 * is picked shapes the copies of an MTP pass and so belongs to the key. */
static bool is_recorded(const struct model_forward *f, const struct forward_batch *b)
{
    return f->o.kern->record && !b->unrecorded && !b->batch.rows.prefill && b->batch.rows.decode;
}

static uint64_t recording_key(const struct forward_batch *b, uint64_t pass)
{
    const uint64_t shape[] = {pass, (uint64_t)b->batch.rows.decode, (uint64_t)b->batch.n_segments};
    return XXH3_64bits_withSeed(b->picks, (size_t)b->n_picks * sizeof *b->picks, XXH3_64bits(shape, sizeof shape));
}

enum rc forward_run(struct model_forward *f, const struct forward_batch *b, uint64_t pass,
                    enum rc (*operations)(struct model_forward *, const struct forward_batch *, struct err *), struct err *e)
{
    struct kern *k = f->o.kern;
    struct kern_batch batch = b->batch;
    batch.tokens_dev = f->drafts_dev;
    k->begin(k, &batch);
    if (!is_recorded(f, b)) return operations(f, b, e);
    if (k->record(k, recording_key(b, pass))) return RC_OK;
    enum rc rc = operations(f, b, e);
    return k->record_end(k) ? rc : operations(f, b, e);
}

void forward_gather(struct model_forward *f, float *to, const float *from, const int *source, int n)
{
    struct kern *k = f->o.kern;
    size_t hidden = (size_t)f->o.config->hidden;
    for (int i = 0, run; i < n; i += run) {
        for (run = 1; i + run < n && source[i + run] == source[i] + run;) run++;
        k->copy(k, to + (size_t)i * hidden, from + (size_t)source[i] * hidden, (size_t)run * hidden * sizeof *to);
    }
}

/* in_dev to mix_act. */
static void attention(struct model_forward *f, const struct model_layer *l, int index)
{
    struct kern *k = f->o.kern;
    const struct kern_kv_layer kv = {f->kv_dev + (size_t)index * f->kv_layer_bytes, f->page_bytes};
    const struct kern_attn_weights w = {l->bias_dev, l->q_norm_dev, l->k_norm_dev, f->o.config->rms_eps};
    k->rope_kv_append(k, &f->attn, &w, f->cos_sin_dev, f->in_dev, kv);
    k->attention(k, &f->attn, f->in_dev, kv, f->mix_act);
}

void forward_norm(struct model_forward *f, const struct forward_batch *b, const float *norm_dev)
{
    struct kern *k = f->o.kern;
    int hidden = f->o.config->hidden;
    k->rms_norm(k, f->x_dev, norm_dev, b->batch.rows, hidden, f->o.config->rms_eps, NULL, f->h_act);
}

/* x_dev += the ranks' partials; h_act = its norm, unless there is no norm_dev. */
static enum rc sum_and_norm(struct model_forward *f, const struct forward_batch *b, const void *partial, const float *norm_dev,
                            struct err *e)
{
    struct comm *c = f->o.comm;
    const struct kern_split rows = b->batch.rows;
    int hidden = f->o.config->hidden;
    if (norm_dev && c->all_reduce_add_norm &&
        c->all_reduce_add_norm(c, partial, rows, hidden, f->x_dev, norm_dev, f->o.config->rms_eps, f->h_act))
        return RC_OK;
    enum rc rc = c->all_reduce_add(c, partial, rows, hidden, f->x_dev, e);
    if (rc == RC_OK && norm_dev) forward_norm(f, b, norm_dev);
    return rc;
}

enum rc forward_layer(struct model_forward *f, const struct forward_batch *b, int layer, int index, const float *next_norm_dev,
                      struct err *e)
{
    const struct model_layer *l = &f->o.weights->layers[layer];
    const struct kern_split rows = b->batch.rows;
    struct kern *k = f->o.kern;

    const void *partial = NULL;
    if (l->in_proj) {
        k->linear(k, l->in_proj, rows, f->h_act, f->in_dev);
        if (l->gdn) {
            k->gdn(k, &f->gdn, &f->gdn_layers[index], recurrent_memory(&f->slots, index), f->in_dev, f->mix_act);
        } else {
            attention(f, l, index);
        }
        k->linear_partial(k, l->out_proj, rows, f->mix_act, f->partial_dev);
        partial = f->partial_dev;
    }
    enum rc rc = sum_and_norm(f, b, partial, l->ffn_norm_dev, e);
    if (rc != RC_OK) return rc;
    f->o.on_layer(f->o.on_layer_ctx, layer, f->x_dev, kern_rows(rows));

    k->linear_swiglu(k, l->gate_up, rows, f->h_act, f->swiglu_dev, f->ffn_act);
    k->linear_partial(k, l->down, rows, f->ffn_act, f->partial_dev);
    return sum_and_norm(f, b, f->partial_dev, next_norm_dev, e);
}

void forward_head(struct model_forward *f, const float *x_dev, const float *norm_dev, int n, float *normed_dev)
{
    struct kern *k = f->o.kern;
    const struct kern_split rows = {n, 0};
    const struct range vocab = f->part.vocab;
    int hidden = f->o.config->hidden;
    k->rms_norm(k, x_dev, norm_dev, rows, hidden, f->o.config->rms_eps, normed_dev, f->pick_act);
    k->linear(k, f->o.weights->head, rows, f->pick_act, f->pick_logits_dev);
    k->best(k, f->pick_logits_dev, n, vocab.count, vocab.first, f->allowed_dev, f->best_dev);
}

size_t model_forward_gather_floats(const struct partition *p, int max_picks)
{
    size_t most = 0;
    for (int r = 0; r < p->ranks; r++) {
        const size_t logits = (size_t)max_picks * (size_t)p->part[r].vocab.count, joined = (size_t)p->part[r].mtp_rows.count;
        most = larger(most, larger(logits, joined));
    }
    return most;
}

enum rc forward_gather_best(struct model_forward *f, int n, struct kern_best *best, struct err *e)
{
    struct comm *c = f->o.comm;
    return c->all_gather_columns(c, (const float *)(const void *)f->best_dev, n, f->best_of_rank, 2 * c->ranks, (float *)(void *)best, e);
}

enum rc forward_gather_logits(struct model_forward *f, int n, float *logits, struct err *e)
{
    struct comm *c = f->o.comm;
    return c->all_gather_columns(c, f->pick_logits_dev, n, f->vocab_of_rank, f->o.config->vocab, logits, e);
}

const float *forward_picked(struct model_forward *f, const int *picks, int n)
{
    int run = 1;
    while (run < n && picks[run] == picks[0] + run) run++;
    if (run == n) return f->x_dev + (size_t)picks[0] * (size_t)f->o.config->hidden;
    forward_gather(f, f->pick_x_dev, f->x_dev, picks, n);
    return f->pick_x_dev;
}

static bool picks_all(const struct forward_batch *b)
{
    for (int i = 0; i < b->n_picks; i++)
        if (b->picks[i] != i) return false;
    return b->n_picks == kern_rows(b->batch.rows);
}

/* Normed rows of the picks (to normed_dev where they are all rows), and their logits. A row's norm has the same bits alone and among
 * all rows. */
static void pick_step(struct model_forward *f, const struct forward_batch *b, bool all)
{
    struct kern *k = f->o.kern;
    float *normed_dev = all ? f->normed_dev : f->pick_h_dev;
    forward_head(f, forward_picked(f, b->picks, b->n_picks), f->o.weights->out_norm_dev, b->n_picks, normed_dev);
    if (f->o.trace) k->hash_rows(k, normed_dev, b->n_picks, f->o.config->hidden, f->hidden_hashes);
}

enum rc forward_check(const struct model_forward *f, const struct forward_batch *b, struct err *e)
{
    bool slots_used = f->o.mtp || f->o.config->gdn_v_heads;
    const struct kern_batch *k = &b->batch;
    int rows = kern_rows(k->rows);
    if (rows <= f->o.max_rows && b->n_picks <= f->o.max_picks && (!slots_used || k->n_segments <= f->o.slots)) return RC_OK;
    return err_set(e, RC_FATAL, EXIT_INTERNAL, "batch_too_large", "a step of %d rows, %d picks and %d segments", rows, b->n_picks,
                   k->n_segments);
}

static enum rc step_operations(struct model_forward *f, const struct forward_batch *b, struct err *e)
{
    struct kern *k = f->o.kern;
    const struct model_config *c = f->o.config;
    enum rc rc = RC_OK;
    const struct model_layer *layers = f->o.weights->layers;
    k->embed(k, f->o.weights->embedding, f->x_dev);
    forward_norm(f, b, layers[0].mix_norm_dev);
    for (int l = 0, n_attention = 0, n_gdn = 0; l < c->n_layers && rc == RC_OK; l++)
        rc = forward_layer(f, b, l, c->gdn[l] ? n_gdn++ : n_attention++, l + 1 < c->n_layers ? layers[l + 1].mix_norm_dev : NULL, e);
    if (rc != RC_OK) return rc;
    k->hash_rows(k, f->x_dev, kern_rows(b->batch.rows), c->hidden, f->row_hashes);
    const bool all_picked = f->o.mtp && picks_all(b);
    if (f->o.mtp && !all_picked)
        k->rms_norm(k, f->x_dev, f->o.weights->out_norm_dev, b->batch.rows, c->hidden, c->rms_eps, f->normed_dev, NULL);
    if (!b->n_picks) return RC_OK;
    pick_step(f, b, all_picked);
    return forward_gather_best(f, b->n_picks, f->best, e);
}

enum rc model_forward_step(struct model_forward *f, const struct forward_batch *b, struct err *e)
{
    struct kern *k = f->o.kern;
    size_t vocab = (size_t)f->o.config->vocab;
    enum rc rc = forward_check(f, b, e);
    if (rc != RC_OK) return rc;
    bool logits = b->logits || f->o.trace;
    for (int slot = 0; slot < f->o.slots; slot++) model_mtp_settle(f, slot);
    rc = forward_run(f, b, PASS_STEP, step_operations, e);
    if (rc == RC_OK && b->n_picks && logits) rc = forward_gather_logits(f, b->n_picks, f->logits, e);
    if (rc == RC_OK) rc = k->finish(k, e);
    for (int i = 0; i < b->n_picks && rc == RC_OK && f->o.trace; i++)
        f->logits_hashes[i] = XXH3_64bits(model_forward_logits(f, i), vocab * sizeof(float));
    return rc;
}

const uint64_t *model_forward_row_hashes(const struct model_forward *f) { return f->row_hashes; }

float *model_forward_logits(struct model_forward *f, int pick)
{
    return f->logits + (size_t)pick * (size_t)f->o.config->vocab;
}

int32_t model_forward_best(const struct model_forward *f, int pick)
{
    const int32_t id = kern_best_of(f->best + (size_t)pick * (size_t)f->o.comm->ranks, f->o.comm->ranks).id;
    return id == KERN_NO_ID ? -1 : id;
}

uint64_t model_forward_hidden_hash(const struct model_forward *f, int pick) { return f->hidden_hashes[pick]; }

uint64_t model_forward_logits_hash(const struct model_forward *f, int pick) { return f->logits_hashes[pick]; }

/* ---- slots ---- */

void model_forward_clear_slot(struct model_forward *f, int slot)
{
    if (!f->o.slots) return;
    model_mtp_forget(f, slot);
    recurrent_state_clear(&f->slots, slot);
}

void model_forward_accept(struct model_forward *f, int slot, int accepted)
{
    struct kern *k = f->o.kern;
    if (!accepted || !f->gdn.k_heads) return;
    k->gdn_replay(k, &f->gdn, f->gdn_layers, f->slots.o.n_layers, recurrent_memory(&f->slots, 0), slot, accepted);
}

size_t model_forward_slot_bytes(const struct model_forward *f) { return recurrent_slot_bytes(&f->slots); }

void model_forward_save_slot(struct model_forward *f, int slot, void *host)
{
    model_mtp_settle(f, slot);
    recurrent_state_save(&f->slots, slot, host);
}

void model_forward_load_slot(struct model_forward *f, int slot, const void *host)
{
    model_mtp_forget(f, slot);
    recurrent_state_load(&f->slots, slot, host);
}

size_t model_forward_state_bytes(const struct model_forward *f) { return recurrent_state_bytes(&f->slots); }

/* ---- pages ---- */

size_t model_forward_page_bytes(const struct model_forward *f) { return f->page_bytes * (size_t)f->n_kv; }

void model_forward_save_page(struct model_forward *f, int32_t page, void *host)
{
    for (int i = 0; i < f->n_kv && f->page_bytes; i++)
        f->o.kern->to_host(f->o.kern, (char *)host + (size_t)i * f->page_bytes,
                           f->kv_dev + (size_t)i * f->kv_layer_bytes + (size_t)page * f->page_bytes, f->page_bytes);
}

void model_forward_load_page(struct model_forward *f, int32_t page, const void *host)
{
    for (int i = 0; i < f->n_kv && f->page_bytes; i++)
        f->o.kern->to_dev(f->o.kern, f->kv_dev + (size_t)i * f->kv_layer_bytes + (size_t)page * f->page_bytes,
                          (const char *)host + (size_t)i * f->page_bytes, f->page_bytes);
}

int model_forward_kv_layers(const struct model_forward *f) { return f->kv_dev ? f->n_kv : 0; }

size_t model_forward_kv_bytes(const struct model_forward *f)
{
    return model_forward_page_bytes(f) * (size_t)f->o.kv_pages;
}
