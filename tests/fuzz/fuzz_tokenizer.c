/* The tokenizer under hostile input, by the first byte: 0 to 4, the rest is text for one of the pre-tokenizers, whose tokens
 * must give it back and never be control tokens; 5, a byte of options and then the messages of a chat, whose tokens must
 * open and close exactly its turns; otherwise the rest is a model file. */
#define _GNU_SOURCE
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
    bool same = options.no_normalize || strncmp(pre, "qwen", 4) != 0;
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
        (void)chat_format_choose(NULL, m, t, &format, NULL);
    }
    tokenizer_close(t);
    model_file_close(m);
}

static size_t count(const struct token_list *ids, int32_t id)
{
    size_t n = 0;
    for (size_t i = 0; i < ids->len; i++) n += ids->ids[i] == id;
    return n;
}

/* Messages end with a zero byte; the first byte of each chooses its role, and whether what follows a line end are thoughts. */
static void fuzz_chat(uint8_t options, const char *text, size_t len)
{
    static const char *const roles[] = {"user", "assistant", "system", "tool"};
    struct vocab v;
    struct buf file = {0};
    struct model_file *m = NULL;
    struct tokenizer *t = NULL;
    struct token_list ids = {0};
    struct chat_message messages[16];
    struct chat c = {.format = options % CHAT_FORMATS, .options = {options / 8 % 3, options / 24 % 3, options / 72 % 4},
                     .messages = messages};
    vocab_default(&v);
    vocab_add(&v, "</think>", F_USER);
    vocab_gguf(&v, &file);
    if (model_file_open_bytes(file.data, file.len, "fixture", &m, NULL) != RC_OK) abort();
    if (tokenizer_open_with(m, &(struct tokenizer_options){.no_jit = true}, &t, NULL) != RC_OK) abort();
    for (size_t at = 0; at < len && c.n_messages < 16; c.n_messages++) {
        struct chat_message *one = &messages[c.n_messages];
        unsigned char how = (unsigned char)text[at++];
        size_t n = strnlen(text + at, len - at);
        *one = (struct chat_message){.role = roles[how % 4], .text = text + at, .len = n};
        const char *line = how & 4 ? memchr(text + at, '\n', n) : NULL;
        if (line) {
            one->reasoning = line + 1;
            one->reasoning_len = n - (size_t)(one->reasoning - one->text);
            one->len = (size_t)(line - one->text);
        }
        at += n + 1;
    }
    struct err e = {0};
    enum rc rc = chat_template_encode(&c, t, &ids, &e);
    if (rc != RC_OK && (rc != RC_BAD_INPUT || strcmp(e.code, "invalid_messages") != 0 || ids.len)) abort();
    size_t opened = count(&ids, tokenizer_find(t, "<|im_start|>")), closed = count(&ids, tokenizer_find(t, "<|im_end|>"));
    if (rc == RC_OK && (opened != closed + 1 || closed > c.n_messages + 1 || closed + 1 < c.n_messages)) abort();
    token_list_free(&ids);
    tokenizer_close(t);
    model_file_close(m);
    buf_free(&file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const pres[] = {"gpt-2", "smollm", "qwen2", "llama-bpe", "qwen35"};
    if (size == 0) return 0;
    if (data[0] == 5 && size > 1)
        fuzz_chat(data[1], (const char *)data + 2, size - 2);
    else if (data[0] < sizeof pres / sizeof pres[0])
        fuzz_text(pres[data[0]], (const char *)data + 1, size - 1);
    else
        fuzz_file(data + 1, size - 1);
    return 0;
}
