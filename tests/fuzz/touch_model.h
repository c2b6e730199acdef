/* touch_model: reads whatever a model file that opened hands out, at both ends of everything. For fuzzing: a sanitizer
 * sees what lies outside. */
#ifndef TANDEM_FUZZ_TOUCH_MODEL_H
#define TANDEM_FUZZ_TOUCH_MODEL_H

#include <stdint.h>
#include <stdlib.h>

#include "model_config.h"
#include "model_file.h"
#include "model_names.h"

static volatile uint64_t touch_sink; /* keeps the reads */

static inline void touch(const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    if (n) touch_sink += (uint64_t)p[0] + p[n - 1];
}

static inline void touch_scales(const struct quant_matrix *m)
{
    const struct quant_scales *g = &m->scales;
    if (!g->bytes) return;
    if (!g->row_block || !g->col_block || g->per_row != (m->cols - 1) / g->col_block + 1) abort();
    size_t rows = (size_t)((m->rows - 1) / g->row_block + 1);
    touch(g->bytes, rows * (size_t)g->per_row * quant_block_bytes(g->format));
}

static inline void touch_tensor(const struct model_file *m, const struct tensor_view *t)
{
    float row[4096];
    size_t row_bytes;
    touch(t->bytes, t->n_bytes);
    if (model_file_tensor(m, t->name) != t || !quant_row_bytes(t->format, t->dims[0], &row_bytes)) abort();
    if (t->matrix.rows * row_bytes != t->n_bytes || t->matrix.cols != t->dims[0] || t->matrix.bytes != t->bytes)
        abort();
    if (t->matrix.rows != t->dims[1] * t->dims[2] * t->dims[3] || !t->matrix.rows) abort();
    touch_scales(&t->matrix);
    if (t->dims[0] > sizeof row / sizeof *row) return;
    quant_matrix_decode(&t->matrix, 0, 0, (size_t)t->dims[0], row);
    quant_matrix_decode(&t->matrix, t->matrix.rows - 1, 0, (size_t)t->dims[0], row);
    touch(row, (size_t)t->dims[0] * sizeof *row);
}

/* The configuration, with what later code relies on, and every role's tensor. */
static inline void touch_config(const struct model_file *m)
{
    struct model_config c;
    struct err e = {0};
    if (model_config_read(m, &c, &e) != RC_OK) {
        if (e.rc == RC_OK || !e.source[0] || !e.text[0]) abort();
        return;
    }
    if (c.hidden < 16 || c.hidden % 16 || c.n_heads % c.n_kv_heads || c.vocab < 1 || c.ffn < 16) abort();
    if (c.rope_dim > c.head_dim || c.rope_dim % 2 || c.n_layers < 1 || c.n_layers > MODEL_MAX_LAYERS) abort();
    if (c.gdn_v_heads && (c.gdn_v_heads % c.gdn_k_heads || c.gdn_k_dim % 16 || c.gdn_v_dim % 16)) abort();
    for (int role = 0; role < MODEL_ROLES; role++)
        for (int layer = 0; layer <= c.n_layers; layer++) {
            const struct tensor_view *t = model_role_find(m, &c, (enum model_role)role, layer);
            uint64_t rows, cols;
            touch_sink += model_role_used(&c, (enum model_role)role, layer);
            model_role_shape(&c, (enum model_role)role, &rows, &cols);
            touch_sink += rows + cols;
            if (t) touch_tensor(m, t);
        }
}

static inline void touch_texts(const struct model_file *m)
{
    struct model_text text;
    for (int kind = 0; kind < MODEL_JSON_KINDS; kind++)
        if (model_file_json(m, (enum model_json)kind, &text)) touch(text.bytes, text.len);
    if (model_file_chat_template(m, &text)) touch(text.bytes, text.len);
}

static inline void touch_model(const struct model_file *m)
{
    for (size_t i = 0; i < model_file_tensor_count(m); i++) touch_tensor(m, model_file_tensor_at(m, i));
    touch_texts(m);
    touch_config(m);
}

#endif
