/* Fuzzes the reading of cut models: shard.json, a byte 0xff, the file of rank 0. Whatever is accepted must be readable at every
 * place that it says it holds. */
#include <stdlib.h>
#include <string.h>

#include "model_shard.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile float sink; /* keeps the reads */

static void touch_span(const struct quant_matrix *m, uint64_t row, struct quant_span cols)
{
    float values[512];
    if (cols.count > sizeof values / sizeof *values) cols.count = sizeof values / sizeof *values;
    if (!quant_matrix_holds(m, (struct quant_span){row, 1}, cols)) abort();
    quant_matrix_decode(m, row, cols.first, (size_t)cols.count, values);
    if (cols.count) sink += values[0] + values[cols.count - 1];
}

/* Both ends of every span. */
static void touch_matrix(const struct quant_matrix *m)
{
    const struct quant_span all_rows = {0, m->rows}, all_cols = {0, m->cols};
    const struct quant_window *w = m->window, all = {&all_rows, &all_cols, 1, 1, m->rows, m->cols, false, false};
    if (!w) w = &all;
    for (int i = 0; i < w->n_rows; i++)
        for (int j = 0; j < w->n_cols; j++) {
            const struct quant_span *r = &w->rows[i], *c = &w->cols[j];
            const uint64_t tail = c->count > 256 ? c->count - c->count % 256 - 256 : 0;
            touch_span(m, r->first, *c);
            touch_span(m, r->first + r->count - 1, (struct quant_span){c->first + tail, c->count - tail});
        }
}

static void read_all(const uint8_t *data, size_t size, struct model_shard *s, struct err *e)
{
    const uint8_t *split = size ? memchr(data, 0xff, size) : NULL;
    const size_t index = split ? (size_t)(split - data) : size;
    enum rc rc = model_shard_read_index((const char *)data, index, "shard.json", s, e);
    if (rc == RC_OK && split) rc = model_shard_read_tensors(split + 1, size - index - 1, "rank-0", 0, s, e);
    if (rc != RC_OK && (e->rc == RC_OK || !e->code[0] || !e->text[0])) abort();
    if (rc != RC_OK) return;
    for (size_t i = 0; i < s->tensors.n; i++) touch_matrix(&s->tensors.views[i].matrix);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model_shard s = {0};
    struct err e = {0};
    read_all(data, size, &s, &e);
    model_shard_free(&s);
    return 0;
}
