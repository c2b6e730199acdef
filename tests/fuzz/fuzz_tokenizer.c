/* The tokenizer under hostile input, by the first byte: 0 to 3, the rest is text for one of the pre-tokenizers, whose
 * tokens must give it back and never be control tokens; otherwise the rest is a model file. */
#include <stdlib.h>
#include <string.h>

#include "../unit/tokenizer_fixture.h"
#include "chat_template.h"
#include "tokenizer_private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fuzz_text(const char *pre, const char *text, size_t len)
{
    struct vocab v;
    struct buf file = {0}, back = {0}, shown = {0};
    struct model_file *m = NULL;
    struct tokenizer *t = NULL;
    struct token_list ids = {0};
    vocab_default(&v);
    vocab_gguf(&v, &file);
    struct tokenizer_options options = {.pre = pre, .no_jit = true, .no_normalize = len % 2 == 0};
    if (model_file_open_bytes(file.data, file.len, "fixture", &m, NULL) != RC_OK) abort();
    if (tokenizer_open_with(m, &options, &t, NULL) != RC_OK) abort();
    if (tokenizer_encode(t, text, len, false, &ids, NULL) != RC_OK) abort();
    for (size_t i = 0; i < ids.len; i++) {
        if (v.types[ids.ids[i]] == F_CONTROL) abort();
        if (!tokenizer_decode(t, ids.ids[i], false, &back)) abort();
    }
    if (!utf8_append_complete(&shown, back.data ? back.data : "", back.len)) abort();
    if (shown.len != back.len) abort();
    bool same = options.no_normalize || strcmp(pre, "qwen2") != 0;
    if (same && utf8_valid(text, len) && (back.len != len || (len && memcmp(back.data, text, len) != 0))) abort();
    ids.len = 0;
    if (tokenizer_encode(t, text, len, true, &ids, NULL) != RC_OK) abort();
    token_list_free(&ids);
    buf_free(&shown);
    buf_free(&back);
    tokenizer_close(t);
    model_file_close(m);
    buf_free(&file);
}

static void fuzz_file(const void *bytes, size_t len)
{
    struct model_file *m = NULL;
    struct tokenizer *t = NULL;
    enum chat_format format;
    if (model_file_open_bytes(bytes, len, "fuzzed", &m, NULL) != RC_OK) return;
    if (tokenizer_open_with(m, &(struct tokenizer_options){.no_jit = true}, &t, NULL) == RC_OK) {
        struct token_list ids = {0};
        static const char text[] = "<|im_start|>user\nhello aab 12 \xe4\xb8\xad\xff<|im_end|>\n";
        if (tokenizer_encode(t, text, sizeof text - 1, true, &ids, NULL) != RC_OK) abort();
        for (size_t i = 0; i < ids.len; i++)
            if (ids.ids[i] < 0 || ids.ids[i] >= tokenizer_vocab(t)) abort();
        token_list_free(&ids);
    }
    (void)chat_format_detect(m, &format, NULL);
    tokenizer_close(t);
    model_file_close(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const pres[] = {"gpt-2", "smollm", "qwen2", "llama-bpe"};
    if (size == 0) return 0;
    if (data[0] < 4)
        fuzz_text(pres[data[0]], (const char *)data + 1, size - 1);
    else
        fuzz_file(data + 1, size - 1);
    return 0;
}
