/* model_shard_verify: joins a shard folder again and compares it with its source, byte by byte.
 *
 * The window of each stored tensor is applied to the source's, and what that gives is compared with what is stored; then the
 * windows of all ranks together must leave nothing out. So neither the cutting nor the reading of windows is trusted. */
#define _GNU_SOURCE
#include "model_shard_write.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "model_file_private.h"
#include "shard_slice.h"

struct check {
    struct model_file *source;
    struct model_file *ranks[MAX_RANKS]; /* opened */
    int n_ranks;
    const char *folder;
    const struct shard_report *report;
    struct err *e;
};

static enum rc differ(const struct check *k, const char *file, const char *tensor, const char *what)
{
    enum rc rc = err_set(k->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "shard_differs", "tensor %.128s %s", tensor, what);
    err_place(k->e, file, 0, 0, 0);
    return rc;
}

/* ---- bytes ---- */

struct comparison {
    const unsigned char *stored;
    XXH3_state_t *hash;
};

static bool compare_put(void *ctx, const void *bytes, size_t n_bytes)
{
    struct comparison *c = ctx;
    if (memcmp(c->stored, bytes, n_bytes)) return false;
    XXH3_64bits_update(c->hash, bytes, n_bytes);
    c->stored += n_bytes;
    return true;
}

static bool same_description(const struct tensor_view *a, const struct tensor_view *b)
{
    const struct quant_matrix *m = &a->matrix, *n = &b->matrix;
    const struct quant_scales *g = &m->scales, *h = &n->scales;
    if (a->format != b->format || a->n_dims != b->n_dims || memcmp(a->dims, b->dims, sizeof a->dims)) return false;
    if (memcmp(&m->global, &n->global, sizeof m->global) || m->divide != n->divide || !g->bytes != !h->bytes) return false;
    return !g->bytes || (g->format == h->format && g->row_block == h->row_block && g->col_block == h->col_block && g->per_row == h->per_row);
}

static enum rc compare_tensor(const struct check *k, const struct tensor_view *stored, uint64_t hash, XXH3_state_t *state, const char *file)
{
    const struct tensor_view *t = model_file_tensor(k->source, stored->name);
    const struct quant_window *w = stored->matrix.window;
    if (!t) return differ(k, file, stored->name, "is not in the source");
    if (!same_description(t, stored)) return differ(k, file, stored->name, "is of another shape or format in the source");
    struct comparison c = {stored->matrix.bytes, state};
    const struct shard_sink sink = {&c, compare_put};
    XXH3_64bits_reset(state);
    model_file_need(k->source, t);
    bool same = shard_put_codes(&t->matrix, w, &sink);
    c.stored = stored->matrix.scales.bytes;
    same = same && shard_put_scales(&t->matrix, w, &sink);
    model_file_done(k->source, t);
    if (!same) return differ(k, file, stored->name, "has other bytes than in the source");
    return XXH3_64bits_digest(state) == hash ? RC_OK : differ(k, file, stored->name, "has another hash than its file says");
}

/* All tensors of one file of one rank's view: 0 the common one, 1 the rank's. */
static enum rc compare_file(const struct check *k, int rank, int which)
{
    const struct model_shard *s = model_file_shard(k->ranks[rank]);
    const struct mapped_file *map = &s->maps[which];
    XXH3_state_t *state = XXH3_createState();
    enum rc rc = state ? RC_OK : err_no_memory(k->e);
    size_t n = 0;
    for (size_t i = 0; i < s->tensors.n && rc == RC_OK; i++) {
        if ((i < s->n_common) != (which == 0)) continue;
        rc = compare_tensor(k, &s->tensors.views[i], s->hashes[i], state, map->path);
        n++;
    }
    XXH3_freeState(state);
    if (rc == RC_OK) k->report->file(k->report->ctx, strrchr(map->path, '/') + 1, n, map->n_bytes);
    return rc;
}

/* ---- nothing is left out ---- */

static int by_first(const void *a, const void *b)
{
    const struct quant_span *left = a, *right = b;
    return (left->first > right->first) - (left->first < right->first);
}

/* Whether spans together cover 0..whole. */
static bool cover(struct quant_span *spans, size_t n, uint64_t whole)
{
    uint64_t end = 0;
    if (n) qsort(spans, n, sizeof *spans, by_first);
    for (size_t i = 0; i < n && spans[i].first <= end; i++)
        if (spans[i].first + spans[i].count > end) end = spans[i].first + spans[i].count;
    return end >= whole;
}

/* The ranks that hold whole rows must have all rows, or those that hold whole columns all columns. */
static enum rc check_cover(const struct check *k, const struct tensor_view *t)
{
    const struct quant_window *windows[MAX_RANKS];
    size_t n = 0, n_rows = 0, n_cols = 0;
    for (int r = 0; r < k->n_ranks; r++) {
        const struct tensor_view *v = model_file_tensor(k->ranks[r], t->name);
        if (!v) return differ(k, k->folder, t->name, "is missing");
        if (!v->matrix.window) return RC_OK;
        windows[r] = v->matrix.window;
        n += (size_t)windows[r]->n_rows + (size_t)windows[r]->n_cols;
    }
    struct quant_span *rows = malloc(2 * (n + 1) * sizeof *rows), *cols = rows ? rows + n + 1 : NULL;
    if (!rows) return err_no_memory(k->e);
    for (int r = 0; r < k->n_ranks; r++) {
        const struct quant_window *w = windows[r];
        for (int i = 0; i < w->n_rows && w->stored_cols == t->matrix.cols; i++) rows[n_rows++] = w->rows[i];
        for (int i = 0; i < w->n_cols && w->stored_rows == t->matrix.rows; i++) cols[n_cols++] = w->cols[i];
    }
    const bool all = cover(rows, n_rows, t->matrix.rows) || cover(cols, n_cols, t->matrix.cols);
    free(rows);
    return all ? RC_OK : differ(k, k->folder, t->name, "is not there as a whole");
}

/* ---- small files ---- */

static enum rc compare_text(const struct check *k, const char *name, const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    if (a_bytes == b_bytes && !memcmp(a, b, a_bytes)) {
        k->report->file(k->report->ctx, name, 0, a_bytes);
        return RC_OK;
    }
    enum rc rc = err_set(k->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "shard_differs", "%s differs from the source's", name);
    err_place(k->e, k->folder, 0, 0, 0);
    return rc;
}

static enum rc compare_texts(const struct check *k)
{
    enum rc rc = RC_OK;
    if (model_file_layout(k->source) == MODEL_LAYOUT_GGUF) {
        struct buf source = {0}, own = {0};
        if (!model_shard_gguf_head(k->source, &source) || !model_shard_gguf_head(k->ranks[0], &own)) rc = err_no_memory(k->e);
        if (rc == RC_OK) rc = compare_text(k, SHARD_HEAD_NAME, source.data, source.len, own.data, own.len);
        buf_free(&source);
        buf_free(&own);
        return rc;
    }
    for (int i = 0; i < MODEL_FOLDER_TEXTS && rc == RC_OK; i++) {
        const char *name;
        struct model_text source = {"", 0}, own = {"", 0};
        const bool there = model_file_stored_text(k->source, i, &name, &source), here = model_file_stored_text(k->ranks[0], i, &name, &own);
        if (there || here) rc = compare_text(k, name, source.bytes, source.len, own.bytes, own.len);
    }
    return rc;
}

static enum rc check_all(struct check *k)
{
    char source[65], own[65];
    enum rc rc = model_file_digest(k->source, source, k->e);
    for (int r = 0; r < k->n_ranks && rc == RC_OK; r++) {
        rc = model_file_digest(k->ranks[r], own, k->e);
        if (rc == RC_OK && strcmp(source, own)) {
            rc = err_set(k->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "shard_differs", "it was cut from another model");
            err_place(k->e, k->folder, 0, 0, 0);
        }
    }
    if (rc == RC_OK && model_file_layout(k->source) != model_file_layout(k->ranks[0]))
        rc = err_set(k->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "shard_differs", "%s is of another kind than its source", k->folder);
    if (rc == RC_OK) rc = compare_texts(k);
    if (rc == RC_OK) rc = compare_file(k, 0, 0);
    for (int r = 0; r < k->n_ranks && rc == RC_OK; r++) rc = compare_file(k, r, 1);
    for (size_t i = 0; i < model_file_tensor_count(k->source) && rc == RC_OK; i++)
        rc = check_cover(k, model_file_tensor_at(k->source, i));
    return rc;
}

enum rc model_shard_verify(struct model_file *m, const struct partition *p, const char *folder, const struct shard_report *report,
                           struct err *e)
{
    struct check k = {.source = m, .folder = folder, .report = report, .e = e};
    enum rc rc = RC_OK;
    uint64_t cut;
    if (model_file_cut(m, &cut))
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "shard_of_shard", "%s is cut already; give its source", model_file_path(m));
    for (; k.n_ranks < p->ranks && rc == RC_OK; k.n_ranks++) rc = model_file_open_rank(folder, k.n_ranks, p->ranks, &k.ranks[k.n_ranks], e);
    if (rc == RC_OK && !model_file_cut(k.ranks[0], &cut))
        rc = err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "shard_none", "%s is no cut model", folder);
    if (rc == RC_OK) rc = partition_check(p, k.ranks[0], e);
    if (rc == RC_OK) rc = check_all(&k);
    for (int r = 0; r < k.n_ranks; r++) model_file_close(k.ranks[r]);
    return rc;
}
