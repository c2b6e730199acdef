/* Fuzzes the reading of a GGUF file: whatever opens must be readable wherever the index points. Touches every tensor's
 * bytes at both ends, decodes its first row, reads every metadata value in every way, and reads the configuration. */
#include <stdlib.h>

#include "touch_model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void touch_value(const struct model_file *m, const char *key)
{
    struct model_text text;
    uint64_t u = 0;
    int64_t i = 0;
    double f = 0;
    bool b = false;
    if (!model_file_has(m, key)) abort();
    if (model_file_u64(m, key, &u)) touch_sink += u;
    if (model_file_f64(m, key, &f)) touch(&f, sizeof f);
    if (model_file_bool(m, key, &b)) touch_sink += b;
    if (model_file_text(m, key, &text)) touch(text.bytes, text.len);
    for (size_t k = 0, n = model_file_text_array(m, key); k < n; k++) {
        if (!model_file_text_at(m, key, k, &text)) abort();
        touch(text.bytes, text.len);
    }
    for (size_t k = 0, n = model_file_int_array(m, key); k < n; k++)
        if (model_file_int_at(m, key, k, &i)) touch_sink += (uint64_t)i;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model_file *m = NULL;
    struct err e = {0};
    if (model_file_open_bytes(data, size, "input", &m, &e) != RC_OK) {
        if (m || e.rc == RC_OK || !e.code[0]) abort();
        return 0;
    }
    for (size_t i = 0; i < model_file_key_count(m); i++) touch_value(m, model_file_key_at(m, i));
    touch_model(m);
    model_file_close(m);
    return 0;
}
