/* Fuzzes the files of a folder together: the input is cut at bytes of 0xff, which no JSON has, into config.json,
 * tokenizer_config.json, model.safetensors.index.json and a file of weights; an empty one is not there. Without weights,
 * the configuration meets an embedding that suits the seeds. */
#include <stdlib.h>
#include <string.h>

#include "../unit/safetensors_build.h"
#include "model_file_private.h"
#include "touch_model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { CONFIG, TOKENIZER_CONFIG, INDEX, WEIGHTS, PARTS };

static void build_weights(struct buf *out)
{
    struct safetensors_build s = {0};
    add_2d(&s, "model.embed_tokens.weight", "BF16", 8, 48);
    add_1d(&s, "mtp.fc.weight", "BF16", 4);
    build_safetensors(&s, out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[PARTS] = {"config.json", "tokenizer_config.json", "model.safetensors.index.json",
                                             "a.safetensors"};
    struct model_blob blobs[PARTS];
    struct buf weights = {0};
    struct model_file *m = NULL;
    struct err e = {0};
    size_t at = 0, n = 0;
    bool indexed = false, weighed = false;
    for (int part = 0; part < PARTS && at < size; part++) {
        const uint8_t *end = part == WEIGHTS ? NULL : memchr(data + at, 0xff, size - at);
        size_t len = end ? (size_t)(end - (data + at)) : size - at;
        if (len) {
            const char *name = part == WEIGHTS && !indexed ? "model.safetensors" : names[part];
            blobs[n++] = (struct model_blob){name, data + at, len};
            indexed |= part == INDEX;
            weighed |= part == WEIGHTS;
        }
        at += len + 1;
    }
    if (!weighed && n < PARTS) {
        build_weights(&weights);
        blobs[n++] = (struct model_blob){"model.safetensors", weights.data, weights.len};
    }
    if (model_file_open_blobs(blobs, n, "folder", &m, &e) == RC_OK) {
        touch_model(m);
        model_file_close(m);
    } else if (m || e.rc == RC_OK || !e.code[0] || !e.text[0]) {
        abort();
    }
    buf_free(&weights);
    return 0;
}
