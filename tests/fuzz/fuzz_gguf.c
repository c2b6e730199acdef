/* Fuzzes the reading of a GGUF file: whatever opens must be readable wherever the index points. Touches every tensor's
 * bytes at both ends, decodes its first row, reads every metadata value in every way, and reads the configuration. */
#include <stdint.h>
#include <stdlib.h>

#include "model_config.h"
#include "model_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink; /* keeps the reads */

static void touch(const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    if (n) sink += (uint64_t)p[0] + p[n - 1];
}

static void touch_tensor(const struct model_file *m, const struct tensor_view *t)
{
    float row[4096];
    size_t row_bytes;
    touch(t->bytes, t->n_bytes);
    if (model_file_tensor(m, t->name) != t || !quant_row_bytes(t->format, t->dims[0], &row_bytes)) abort();
    if (row_bytes > t->n_bytes) abort();
    if (t->dims[0] > sizeof row / sizeof *row) return;
    quant_decode(t->format, t->bytes, (size_t)t->dims[0], row);
    touch(row, (size_t)t->dims[0] * sizeof *row);
}

static void touch_value(const struct model_file *m, const char *key)
{
    struct model_text text;
    uint64_t u = 0;
    int64_t i = 0;
    double f = 0;
    bool b = false;
    if (!model_file_has(m, key)) abort();
    if (model_file_u64(m, key, &u)) sink += u;
    if (model_file_f64(m, key, &f)) touch(&f, sizeof f);
    if (model_file_bool(m, key, &b)) sink += b;
    if (model_file_text(m, key, &text)) touch(text.bytes, text.len);
    for (size_t k = 0, n = model_file_text_array(m, key); k < n; k++) {
        if (!model_file_text_at(m, key, k, &text)) abort();
        touch(text.bytes, text.len);
    }
    for (size_t k = 0, n = model_file_int_array(m, key); k < n; k++)
        if (model_file_int_at(m, key, k, &i)) sink += (uint64_t)i;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model_file *m = NULL;
    struct err e = {0};
    struct model_config config;
    if (model_file_open_bytes(data, size, "input", &m, &e) != RC_OK) {
        if (m || e.rc == RC_OK || !e.code[0]) abort();
        return 0;
    }
    for (size_t i = 0; i < model_file_tensor_count(m); i++) touch_tensor(m, model_file_tensor_at(m, i));
    for (size_t i = 0; i < model_file_key_count(m); i++) touch_value(m, model_file_key_at(m, i));
    if (model_config_read(m, &config, &e) == RC_OK) {
        if (config.hidden < 16 || config.hidden % 16 || config.n_heads % config.n_kv_heads || config.vocab < 1) abort();
        if (config.rope_dim > config.head_dim || config.n_layers < 1 || config.n_layers > MODEL_MAX_LAYERS) abort();
    } else if (e.rc == RC_OK || !e.source[0]) {
        abort();
    }
    model_file_close(m);
    return 0;
}
