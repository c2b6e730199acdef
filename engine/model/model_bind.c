/* model_bind: roles (model_names) to backend weights.
 *
 * Everything is looked at before anything is loaded, so that a model that cannot work is refused in milliseconds, not after
 * minutes. What a layer projects its input with is stacked into one weight (q, k and v; GDN's q, k, v, z, b and a; gate and
 * up): fewer, wider operations. The embedding is never copied: rows are decoded from the file's map.
 *
 * Containers differ in values, and that ends here. A norm that holds w of (1 + w) gets its 1. A decay rate is
 * a = -exp(A_log), which GGUF stores and Hugging Face's files do not. In what order they store heads is undone by the spans
 * of model_slice.
 *
 * A tensor is needed before its bytes are read and done with after: made-up weights exist only in between. The embedding is
 * never done with. */
#include "model_bind.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exact_math.h"
#include "model_names.h"
#include "model_slice.h"

struct bind {
    const struct model_bind_options *o;
    const struct model_config *config;
    struct model_slices slices;
    struct model_weights *out;
    struct err *err;
};

static enum rc refuse(const struct bind *b, const char *code, const char *format, ...) __attribute__((format(printf, 3, 4)));
static enum rc refuse(const struct bind *b, const char *code, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    enum rc rc = err_set(b->err, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s", text);
    err_place(b->err, model_file_path(b->o->file), 0, 0, 0);
    return rc;
}

static const struct tensor_view *find(const struct bind *b, enum model_role role, int layer)
{
    return model_role_find(b->o->file, b->config, role, layer);
}

/* ---- checks ---- */

static bool role_is_of_a_layer(enum model_role role) { return role >= ROLE_MIX_NORM; }

/* Of a model that was cut, what this rank needs must be there. */
static enum rc check_stored(const struct bind *b, enum model_role role, const struct tensor_view *t)
{
    const struct model_slice *s = &b->slices.of[role];
    const struct quant_span none = {0, 0};
    bool stored = true;
    for (int i = 0; i < s->n_rows; i++)
        stored = stored && quant_matrix_holds(&t->matrix, (struct quant_span){s->rows[i].first, s->rows[i].count}, none);
    for (int i = 0; i < s->n_cols; i++)
        stored = stored && quant_matrix_holds(&t->matrix, none, (struct quant_span){s->cols[i].first, s->cols[i].count});
    return stored ? RC_OK : refuse(b, "not_stored", "tensor %.128s was cut, and this rank's part of it is not there", t->name);
}

static enum rc check_role(const struct bind *b, enum model_role role, int layer)
{
    if (!model_role_used(b->config, role, layer)) return RC_OK;
    char name[128];
    const struct tensor_view *t = find(b, role, layer);
    if (!t)
        return refuse(b, "missing_tensor", "the model has no tensor %s",
                      model_role_name(b->config, role, layer, name, sizeof name));
    uint64_t rows, cols;
    model_role_shape(b->config, role, &rows, &cols);
    if (t->matrix.rows == rows && t->matrix.cols == cols) return check_stored(b, role, t);
    return refuse(b, "wrong_shape", "tensor %.128s is %" PRIu64 " rows of %" PRIu64 ", expected %" PRIu64 " of %" PRIu64, t->name,
                  t->matrix.rows, t->matrix.cols, rows, cols);
}

static int by_address(const void *a, const void *b)
{
    const struct tensor_view *const *left = a, *const *right = b;
    return (*left > *right) - (*left < *right);
}

/* All tensors that have a role, the MTP layer's too whether it is wanted or not. */
static size_t collect_used(const struct bind *b, const struct tensor_view **used)
{
    size_t n = 0;
    for (int l = 0; l <= b->config->n_layers; l++)
        for (int role = 0; role < MODEL_ROLES; role++) {
            const struct tensor_view *t = NULL;
            if ((l == 0 || role_is_of_a_layer((enum model_role)role)) && model_role_used(b->config, (enum model_role)role, l))
                t = find(b, (enum model_role)role, l);
            if (t) used[n++] = t;
        }
    return n;
}

/* A tensor that is not used would change the function that the model computes (a bias, say): refused, never ignored. */
static enum rc check_nothing_unused(const struct bind *b)
{
    size_t roles = (size_t)(b->config->n_layers + 1) * MODEL_ROLES;
    const struct tensor_view **used = malloc(roles * sizeof(const struct tensor_view *));
    if (!used) return err_no_memory(b->err);
    size_t n = collect_used(b, used);
    qsort(used, n, sizeof *used, by_address);
    enum rc rc = RC_OK;
    for (size_t i = 0; i < model_file_tensor_count(b->o->file) && rc == RC_OK; i++) {
        const struct tensor_view *t = model_file_tensor_at(b->o->file, i);
        if (bsearch(&t, used, n, sizeof *used, by_address) || model_name_ignored(t->name)) continue;
        rc = refuse(b, "unknown_tensor", "tensor %.128s is not part of a %s model as this version knows it", t->name,
                    model_arch_name(b->config->arch));
    }
    free(used);
    return rc;
}

static enum rc check_tensors(const struct bind *b)
{
    enum rc rc = RC_OK;
    int layers = b->config->n_layers + b->out->mtp;
    for (int l = 0; l < layers && rc == RC_OK; l++)
        for (int role = 0; role < MODEL_ROLES && rc == RC_OK; role++)
            if (l == 0 || role_is_of_a_layer((enum model_role)role)) rc = check_role(b, (enum model_role)role, l);
    return rc == RC_OK ? check_nothing_unused(b) : rc;
}

/* ---- vectors ---- */

static enum rc to_backend(struct bind *b, const float *host, size_t n, float **out_dev)
{
    struct kern *k = b->out->kern;
    void *dev = NULL;
    enum rc rc = k->buffer_alloc(k, n * sizeof *host, &dev, b->err);
    if (rc == RC_OK) k->to_dev(k, dev, host, n * sizeof *host);
    if (rc == RC_OK) b->out->bytes += n * sizeof *host;
    *out_dev = dev;
    return rc;
}

/* This rank's values of stored vectors, one vector after another, as float32, whatever the file has them in. NULL: no memory. */
static float *decoded(const struct bind *b, const enum model_role *roles, int n_roles, int layer, size_t *out_n)
{
    size_t n = 0;
    for (int i = 0; i < n_roles; i++) n += (size_t)model_spans_total(b->slices.of[roles[i]].cols, b->slices.of[roles[i]].n_cols);
    float *host = malloc((n + 1) * sizeof *host), *next = host;
    *out_n = n;
    if (!host) err_no_memory(b->err);
    for (int i = 0; i < n_roles && host; i++) {
        const struct model_slice *s = &b->slices.of[roles[i]];
        const struct tensor_view *t = find(b, roles[i], layer);
        model_file_need(b->o->file, t);
        for (int j = 0; j < s->n_cols; next += s->cols[j++].count)
            quant_matrix_decode(&t->matrix, 0, s->cols[j].first, (size_t)s->cols[j].count, next);
        model_file_done(b->o->file, t);
    }
    return host;
}

static enum rc load_norm(struct bind *b, enum model_role role, int layer, float **out_dev)
{
    size_t n;
    float *host = decoded(b, &role, 1, layer, &n);
    if (!host) return RC_FATAL;
    if (model_role_is_offset_norm(b->config, role))
        for (size_t i = 0; i < n; i++) host[i] += 1.0f;
    enum rc rc = to_backend(b, host, n, out_dev);
    free(host);
    return rc;
}

/* The biases of q, k and v in the order of the stacked rows. */
static enum rc load_bias(struct bind *b, int layer, float **out_dev)
{
    static const enum model_role roles[] = {ROLE_Q_BIAS, ROLE_K_BIAS, ROLE_V_BIAS};
    size_t n;
    float *host = decoded(b, roles, 3, layer, &n);
    enum rc rc = host ? to_backend(b, host, n, out_dev) : RC_FATAL;
    free(host);
    return rc;
}

/* -exp(A_log). A rate that is not finite, or would make the state grow, is a damaged file. */
static enum rc decay_rates(const struct bind *b, int layer, float *values, size_t n)
{
    enum { LARGEST_LOG = 80 }; /* e^80 is still a float32 */
    for (size_t i = 0; i < n; i++) {
        float stored = values[i];
        bool is_log = b->config->layout == MODEL_LAYOUT_HF;
        if (!isfinite(stored) || (is_log ? fabsf(stored) > LARGEST_LOG : stored > 0))
            return refuse(b, "bad_value", "layer %d: the decay rate of head %zu is %g", layer, i, (double)stored);
        if (is_log) values[i] = -(float)exact_exp((double)stored);
    }
    return RC_OK;
}

/* One value a value head. */
static enum rc load_head_values(struct bind *b, enum model_role role, int layer, float **out_dev)
{
    size_t n;
    float *host = decoded(b, &role, 1, layer, &n);
    enum rc rc = host ? RC_OK : RC_FATAL;
    if (rc == RC_OK && role == ROLE_GDN_A_LOG) rc = decay_rates(b, layer, host, n);
    if (rc == RC_OK) rc = to_backend(b, host, n, out_dev);
    free(host);
    return rc;
}

/* Stored [channels][conv_width], wanted [conv_width][channels of this rank]. */
static enum rc load_conv(struct bind *b, int layer, float **out_dev)
{
    const struct tensor_view *t = find(b, ROLE_GDN_CONV, layer);
    const struct model_slice *s = &b->slices.of[ROLE_GDN_CONV];
    size_t width = (size_t)b->config->conv_width, n = (size_t)model_spans_total(s->rows, s->n_rows), at = 0;
    float *host = malloc((n + 1) * width * sizeof *host), *row = host ? host + n * width : NULL;
    if (!host) return err_no_memory(b->err);
    model_file_need(b->o->file, t);
    for (int i = 0; i < s->n_rows; i++)
        for (uint64_t k = 0; k < s->rows[i].count; k++, at++) {
            quant_matrix_decode(&t->matrix, s->rows[i].first + k, 0, width, row);
            for (size_t j = 0; j < width; j++) host[j * n + at] = row[j];
        }
    model_file_done(b->o->file, t);
    enum rc rc = to_backend(b, host, n * width, out_dev);
    free(host);
    return rc;
}

/* ---- matrices ---- */

enum { MAX_PARTS = 4 };

/* This rank's slices of matrices, stacked into one weight. */
static enum rc load(struct bind *b, int layer, const enum model_role *roles, int n, enum kern_use use, struct kern_weight **out)
{
    const struct tensor_view *embedding = find(b, ROLE_EMBEDDING, 0);
    struct kern *k = b->out->kern;
    struct kern_weight_part parts[MAX_PARTS];
    const struct tensor_view *tensors[MAX_PARTS];
    for (int i = 0; i < n; i++) {
        const struct model_slice *s = &b->slices.of[roles[i]];
        tensors[i] = find(b, roles[i] == ROLE_HEAD && b->config->tied ? ROLE_EMBEDDING : roles[i], layer);
        parts[i] = (struct kern_weight_part){.matrix = tensors[i]->matrix, .rows = s->rows, .n_rows = s->n_rows, .cols = s->cols,
                                             .n_cols = s->n_cols, .native = roles[i] == ROLE_GDN_B || roles[i] == ROLE_GDN_A};
        model_file_need(b->o->file, tensors[i]);
    }
    enum rc rc = k->weight_load(k, parts, n, b->o->how, use, out, b->err);
    if (rc == RC_OK) b->out->bytes += k->weight_bytes(*out);
    for (int i = 0; i < n; i++)
        if (tensors[i] != embedding) model_file_done(b->o->file, tensors[i]);
    b->o->beat(b->o->beat_ctx);
    return rc;
}

static enum rc load_attention(struct bind *b, int layer, struct model_layer *l)
{
    static const enum model_role qkv[] = {ROLE_Q, ROLE_K, ROLE_V}, o[] = {ROLE_O};
    const struct model_config *c = b->config;
    if (!b->o->part->q_heads.count) return RC_OK;
    enum rc rc = load(b, layer, qkv, 3, KERN_ROWS, &l->in_proj);
    if (rc == RC_OK) rc = load(b, layer, o, 1, KERN_PARTIAL, &l->out_proj);
    if (rc == RC_OK && c->qkv_bias) rc = load_bias(b, layer, &l->bias_dev);
    if (rc == RC_OK && c->qk_norm) rc = load_norm(b, ROLE_Q_NORM, layer, &l->q_norm_dev);
    if (rc == RC_OK && c->qk_norm) rc = load_norm(b, ROLE_K_NORM, layer, &l->k_norm_dev);
    return rc;
}

static enum rc load_gdn(struct bind *b, int layer, struct model_layer *l)
{
    static const enum model_role in[] = {ROLE_GDN_QKV, ROLE_GDN_Z, ROLE_GDN_B, ROLE_GDN_A}, out[] = {ROLE_GDN_OUT};
    if (!b->o->part->gdn_k_heads.count) return RC_OK;
    enum rc rc = load(b, layer, in, 4, KERN_ROWS, &l->in_proj);
    if (rc == RC_OK) rc = load(b, layer, out, 1, KERN_PARTIAL, &l->out_proj);
    if (rc == RC_OK) rc = load_conv(b, layer, &l->conv_dev);
    if (rc == RC_OK) rc = load_head_values(b, ROLE_GDN_A_LOG, layer, &l->a_dev);
    if (rc == RC_OK) rc = load_head_values(b, ROLE_GDN_DT, layer, &l->dt_dev);
    if (rc == RC_OK) rc = load_norm(b, ROLE_GDN_NORM, layer, &l->gdn_norm_dev);
    return rc;
}

static enum rc load_layer(struct bind *b, int layer)
{
    static const enum model_role gate_up[] = {ROLE_GATE, ROLE_UP}, down[] = {ROLE_DOWN};
    struct model_layer *l = &b->out->layers[layer];
    l->gdn = layer < b->config->n_layers && b->config->gdn[layer];
    enum rc rc = load_norm(b, ROLE_MIX_NORM, layer, &l->mix_norm_dev);
    if (rc == RC_OK) rc = l->gdn ? load_gdn(b, layer, l) : load_attention(b, layer, l);
    if (rc == RC_OK) rc = load_norm(b, ROLE_FFN_NORM, layer, &l->ffn_norm_dev);
    if (rc == RC_OK) rc = load(b, layer, gate_up, 2, KERN_SWIGLU, &l->gate_up);
    return rc == RC_OK ? load(b, layer, down, 1, KERN_PARTIAL, &l->down) : rc;
}

static enum rc load_mtp(struct bind *b)
{
    static const enum model_role fc[] = {ROLE_MTP_FC};
    struct model_weights *w = b->out;
    int layer = b->config->n_layers;
    enum rc rc = b->o->part->mtp_rows.count ? load(b, layer, fc, 1, KERN_ROWS, &w->mtp_fc) : RC_OK;
    if (rc == RC_OK) rc = load_norm(b, ROLE_MTP_EMBEDDING_NORM, layer, &w->mtp_embedding_norm_dev);
    if (rc == RC_OK) rc = load_norm(b, ROLE_MTP_HIDDEN_NORM, layer, &w->mtp_hidden_norm_dev);
    if (rc == RC_OK) rc = load_norm(b, ROLE_MTP_NORM, layer, &w->mtp_norm_dev);
    return rc == RC_OK ? load_layer(b, layer) : rc;
}

static enum rc load_whole(struct bind *b)
{
    static const enum model_role head[] = {ROLE_HEAD};
    struct model_weights *w = b->out;
    const struct model_config *c = b->config;
    const struct tensor_view *embedding = find(b, ROLE_EMBEDDING, 0);
    model_file_need(b->o->file, embedding);
    enum rc rc = w->kern->table_load(w->kern, &embedding->matrix, &w->embedding, b->err);
    if (rc == RC_OK) w->bytes += w->kern->table_bytes(w->embedding);
    for (int l = 0; l < c->n_layers && rc == RC_OK; l++) rc = load_layer(b, l);
    if (rc == RC_OK) rc = load_norm(b, ROLE_OUT_NORM, 0, &w->out_norm_dev);
    if (rc == RC_OK) rc = load(b, 0, head, 1, KERN_ROWS, &w->head);
    return rc == RC_OK && w->mtp ? load_mtp(b) : rc;
}

enum rc model_bind(const struct model_bind_options *o, struct model_weights *out, struct err *e)
{
    *out = (struct model_weights){.kern = o->kern, .mtp = o->mtp};
    struct bind b = {.o = o, .config = o->config, .out = out, .err = e};
    enum rc rc = o->mtp && !o->config->mtp ? refuse(&b, "no_mtp", "the model has no MTP layer") : RC_OK;
    if (rc == RC_OK) rc = model_slices_make(o->config, o->part, &b.slices, e);
    if (rc == RC_OK) rc = check_tensors(&b);
    if (rc == RC_OK) {
        out->layers = calloc((size_t)o->config->n_layers + 1, sizeof *out->layers);
        if (out->layers) out->n_layers = o->config->n_layers;
        rc = out->layers ? load_whole(&b) : err_no_memory(e);
    }
    model_slices_free(&b.slices);
    if (rc != RC_OK) model_bind_free(out);
    return rc;
}

void model_bind_free(struct model_weights *w)
{
    struct kern *k = w->kern;
    if (!k) return;
    for (int i = 0; i < w->n_layers + 1 && w->layers; i++) {
        struct model_layer *l = &w->layers[i];
        float *const vectors[] = {l->mix_norm_dev, l->ffn_norm_dev, l->bias_dev, l->q_norm_dev,  l->k_norm_dev,
                                  l->conv_dev,     l->a_dev,        l->dt_dev,   l->gdn_norm_dev};
        struct kern_weight *const weights[] = {l->in_proj, l->out_proj, l->gate_up, l->down};
        for (size_t j = 0; j < sizeof vectors / sizeof *vectors; j++) k->buffer_free(k, vectors[j]);
        for (size_t j = 0; j < sizeof weights / sizeof *weights; j++) k->weight_free(k, weights[j]);
    }
    float *const vectors[] = {w->out_norm_dev, w->mtp_embedding_norm_dev, w->mtp_hidden_norm_dev, w->mtp_norm_dev};
    for (size_t j = 0; j < sizeof vectors / sizeof *vectors; j++) k->buffer_free(k, vectors[j]);
    k->table_free(k, w->embedding);
    k->weight_free(k, w->head);
    k->weight_free(k, w->mtp_fc);
    free(w->layers);
    *w = (struct model_weights){0};
}
