/* A tokenizer's JSON files under hostile input: tokenizer.json, tokenizer_config.json and generation_config.json, a zero byte
 * between them; an empty one is absent. What opens must encode to tokens that exist, and never to a control token from user
 * text. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer_private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct model_text take(const char **at, const char *end)
{
    size_t len = strnlen(*at, (size_t)(end - *at));
    struct model_text text = {len ? *at : NULL, len};
    *at += len < (size_t)(end - *at) ? len + 1 : len;
    return text;
}

static void check_ids(const struct tokenizer *t, const struct token_list *ids, bool control)
{
    const int32_t *holes;
    size_t n_holes = tokenizer_holes(t, &holes);
    for (size_t i = 0; i < ids->len; i++) {
        struct buf hidden = {0};
        if (ids->ids[i] < 0 || ids->ids[i] >= tokenizer_vocab(t)) abort();
        for (size_t h = 0; h < n_holes && h < 1000; h++)
            if (holes[h] == ids->ids[i]) abort();
        /* a control token is the one that shows nothing */
        if (!tokenizer_decode(t, ids->ids[i], false, &hidden)) abort();
        if (!control && hidden.len == 0) abort();
        buf_free(&hidden);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] = "<|im_start|>user\nhello  aab 12 \xe4\xb8\xad\xcc\x81\xff<think>'LL<|im_end|>\n";
    const char *at = (const char *)data, *end = at + size;
    struct tokenizer_texts texts;
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (size == 0) return 0;
    texts.tokenizer = take(&at, end);
    texts.config = take(&at, end);
    texts.generation = take(&at, end);
    enum rc rc = tokenizer_open_json(&texts, &(struct tokenizer_options){.no_jit = true}, &t, &e);
    if (rc != RC_OK) {
        if (rc != RC_BAD_INPUT || t || !e.code[0] || !e.text[0] || e.exit_status != EXIT_UNAVAILABLE) abort();
        return 0;
    }
    for (int special = 0; special < 2; special++) {
        struct token_list ids = {0};
        if (tokenizer_encode(t, text, sizeof text - 1, special, &ids, NULL) != RC_OK) abort();
        check_ids(t, &ids, special);
        token_list_free(&ids);
    }
    tokenizer_close(t);
    return 0;
}
