/* shard_slice: spans to bytes.
 *
 * Columns are widened to the edges of blocks, and of the groups of 128 that 8-bit weights are made from, so that a slice can be
 * loaded in whatever form the whole can. Scales beside the codes follow the rows where every row has its own, and the columns
 * where no scale is cut; else the grid is kept whole. */
#include "shard_slice.h"

#include <stdlib.h>

static int by_first(const void *a, const void *b)
{
    const struct quant_span *left = a, *right = b;
    return (left->first > right->first) - (left->first < right->first);
}

/* Sorted and joined, on multiples of step or at the end; empty ones are left out. Returns their number. */
static int normalize(const struct kern_span *from, int n, uint64_t step, uint64_t whole, struct quant_span *to, uint64_t *total)
{
    int made = 0, kept = 0;
    for (int i = 0; i < n; i++) {
        if (!from[i].count) continue;
        const uint64_t first = from[i].first / step * step, end = (from[i].first + from[i].count + step - 1) / step * step;
        to[made++] = (struct quant_span){first, (end < whole ? end : whole) - first};
    }
    if (made) qsort(to, (size_t)made, sizeof *to, by_first);
    for (int i = 0; i < made; i++) {
        struct quant_span *last = kept ? &to[kept - 1] : NULL;
        const uint64_t end = to[i].first + to[i].count;
        if (!last || to[i].first > last->first + last->count) to[kept++] = to[i];
        else if (end > last->first + last->count) last->count = end - last->first;
    }
    *total = 0;
    for (int i = 0; i < kept; i++) *total += to[i].count;
    return kept;
}

static bool whole_scales(const struct quant_window *w, uint64_t col_block, uint64_t cols)
{
    for (int i = 0; i < w->n_cols; i++) {
        const uint64_t end = w->cols[i].first + w->cols[i].count;
        if (w->cols[i].first % col_block || (end % col_block && end != cols)) return false;
    }
    return true;
}

struct quant_window shard_window_of(const struct quant_matrix *m, const struct model_slice *s, struct quant_span *spans)
{
    struct quant_window w = {.rows = spans};
    w.n_rows = normalize(s->rows, s->n_rows, 1, m->rows, spans, &w.stored_rows);
    w.cols = spans + w.n_rows;
    w.n_cols = normalize(s->cols, s->n_cols, quant_window_step(m->format), m->cols, spans + w.n_rows, &w.stored_cols);
    w.scale_rows = m->scales.bytes && m->scales.row_block == 1;
    w.scale_cols = m->scales.bytes && whole_scales(&w, m->scales.col_block, m->cols);
    return w;
}

/* A window of everything. */
struct all {
    struct quant_span rows, cols;
    struct quant_window window;
};

static const struct quant_window *window_or_all(const struct quant_matrix *m, const struct quant_window *w, struct all *all)
{
    if (w) return w;
    all->rows = (struct quant_span){0, m->rows};
    all->cols = (struct quant_span){0, m->cols};
    all->window = (struct quant_window){&all->rows, &all->cols, 1, 1, m->rows, m->cols, false, false};
    return &all->window;
}

size_t shard_codes_bytes(const struct quant_matrix *m, const struct quant_window *w)
{
    struct all all;
    size_t row_bytes = 0;
    w = window_or_all(m, w, &all);
    quant_row_bytes(m->format, w->stored_cols, &row_bytes);
    return row_bytes * (size_t)w->stored_rows;
}

bool shard_put_codes(const struct quant_matrix *m, const struct quant_window *w, const struct shard_sink *to)
{
    struct all all;
    size_t n_bytes = 0;
    w = window_or_all(m, w, &all);
    const bool whole_rows = w->stored_cols == m->cols; /* they follow each other */
    for (int i = 0; i < w->n_rows; i++) {
        const struct quant_span *rows = &w->rows[i];
        for (uint64_t r = 0; r < (whole_rows ? 1 : rows->count); r++)
            for (int j = 0; j < w->n_cols; j++) {
                quant_row_bytes(m->format, w->cols[j].count, &n_bytes);
                if (whole_rows) n_bytes *= (size_t)rows->count;
                if (!to->put(to->ctx, quant_matrix_at(m, rows->first + r, w->cols[j].first), n_bytes)) return false;
            }
    }
    return true;
}

/* The grid's rows and columns that a window keeps. */
struct grid {
    uint64_t rows, per_row;
};

static struct grid grid_of(const struct quant_matrix *m, const struct quant_window *w)
{
    const struct quant_scales *g = &m->scales;
    struct grid out = {(m->rows - 1) / g->row_block + 1, g->per_row};
    if (w && w->scale_rows) out.rows = w->stored_rows;
    if (w && w->scale_cols) out.per_row = (w->stored_cols + g->col_block - 1) / g->col_block;
    return out;
}

size_t shard_scales_bytes(const struct quant_matrix *m, const struct quant_window *w)
{
    if (!m->scales.bytes) return 0;
    const struct grid g = grid_of(m, w);
    return (size_t)(g.rows * g.per_row) * quant_block_bytes(m->scales.format);
}

/* Of one row of the grid. */
static bool put_scale_row(const struct quant_matrix *m, const struct quant_window *w, uint64_t row, const struct shard_sink *to)
{
    const struct quant_scales *g = &m->scales;
    const size_t each = quant_block_bytes(g->format);
    const unsigned char *at = (const unsigned char *)g->bytes + (size_t)(row * g->per_row) * each;
    if (!w || !w->scale_cols) return to->put(to->ctx, at, (size_t)g->per_row * each);
    for (int j = 0; j < w->n_cols; j++) {
        const uint64_t first = w->cols[j].first / g->col_block, n = (w->cols[j].count + g->col_block - 1) / g->col_block;
        if (!to->put(to->ctx, at + first * each, (size_t)n * each)) return false;
    }
    return true;
}

bool shard_put_scales(const struct quant_matrix *m, const struct quant_window *w, const struct shard_sink *to)
{
    if (!m->scales.bytes) return true;
    const struct quant_span all = {0, (m->rows - 1) / m->scales.row_block + 1};
    const bool cut = w && w->scale_rows;
    const struct quant_span *rows = cut ? w->rows : &all;
    for (int i = 0; i < (cut ? w->n_rows : 1); i++)
        for (uint64_t r = 0; r < rows[i].count; r++)
            if (!put_scale_row(m, w, rows[i].first + r, to)) return false;
    return true;
}
