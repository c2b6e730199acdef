/* tokenizer_fixture: a small vocabulary, and the GGUF bytes that hold it, for tests that need a tokenizer and no model.
 * A test takes the default, changes what it is about, and opens the bytes. */
#ifndef TANDEM_TOKENIZER_FIXTURE_H
#define TANDEM_TOKENIZER_FIXTURE_H

#include <stdlib.h>
#include <string.h>

#include "model_file.h"
#include "tokenizer.h"

enum { FIXTURE_TOKENS = 320, FIXTURE_MERGES = 32, FIXTURE_LAST_WORD = 263 /* "ba", made by the last merge */ };
enum { F_NORMAL = 1, F_UNKNOWN, F_CONTROL, F_USER, F_UNUSED };

struct vocab {
    const char *model, *pre, *chat_template; /* NULL: the key is left out */
    const char *tokens[FIXTURE_TOKENS];
    int32_t types[FIXTURE_TOKENS];
    size_t n_tokens, n_types;
    const char *merges[FIXTURE_MERGES];
    size_t n_merges;
    int64_t eos, bos; /* -1: left out */
    int add_bos;      /* -1: left out */
    char alphabet[256][3];
};

static inline int32_t vocab_add(struct vocab *v, const char *text, int32_t type)
{
    if (v->n_tokens == FIXTURE_TOKENS) abort();
    v->tokens[v->n_tokens] = text;
    v->types[v->n_tokens++] = type;
    v->n_types = v->n_tokens;
    return (int32_t)v->n_tokens - 1;
}

static inline void vocab_merge(struct vocab *v, const char *merge)
{
    if (v->n_merges == FIXTURE_MERGES) abort();
    v->merges[v->n_merges++] = merge;
}

/* Ids 0..255 are the bytes, written in the byte alphabet. */
static inline void vocab_add_bytes(struct vocab *v)
{
    unsigned next = 0x100;
    for (unsigned b = 0; b < 256; b++) {
        unsigned code = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad) ? b : next++;
        char *text = v->alphabet[b];
        text[0] = (char)(code < 0x80 ? code : 0xc0 | code >> 6);
        text[1] = (char)(code < 0x80 ? 0 : 0x80 | (code & 0x3f));
        vocab_add(v, text, F_NORMAL);
    }
}

/* Bytes, the words of a few merges, ChatML's control tokens, two user-defined ones. Lives where it is put: tokens point
 * into it. */
static inline void vocab_default(struct vocab *v)
{
    static const char *const words[] = {"he", "ll", "hell", "hello", "aa", "ab", "aab", "ba"};
    static const char *const merges[] = {"h e", "l l", "he ll", "hell o", "a a", "a b", "a ab", "b a"};
    *v = (struct vocab){.model = "gpt2", .pre = "gpt-2", .eos = -1, .bos = -1, .add_bos = -1};
    vocab_add_bytes(v);
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) vocab_add(v, words[i], F_NORMAL);
    for (size_t i = 0; i < sizeof merges / sizeof merges[0]; i++) vocab_merge(v, merges[i]);
    vocab_add(v, "<|im_start|>", F_CONTROL);
    vocab_add(v, "<|im_end|>", F_CONTROL);
    vocab_add(v, "<|endoftext|>", F_CONTROL);
    vocab_add(v, "<think>", F_USER);
    vocab_add(v, "<think>\xc3\xa9", F_USER);
}

static inline void put_number(struct buf *b, uint64_t value, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) {
        char c = (char)(value >> 8 * i);
        buf_append(b, &c, 1);
    }
}

static inline void put_text(struct buf *b, const char *text)
{
    put_number(b, strlen(text), 8);
    buf_append_str(b, text);
}

enum { GGUF_KIND_U32 = 4, GGUF_KIND_I32 = 5, GGUF_KIND_BOOL = 7, GGUF_KIND_TEXT = 8, GGUF_KIND_ARRAY = 9 };

static inline void put_key(struct buf *b, size_t *count, const char *key, uint32_t kind)
{
    put_text(b, key);
    put_number(b, kind, 4);
    (*count)++;
}

static inline void put_text_value(struct buf *b, size_t *count, const char *key, const char *text)
{
    if (!text) return;
    put_key(b, count, key, GGUF_KIND_TEXT);
    put_text(b, text);
}

static inline void put_text_array(struct buf *b, size_t *count, const char *key, const char *const *texts, size_t n)
{
    put_key(b, count, key, GGUF_KIND_ARRAY);
    put_number(b, GGUF_KIND_TEXT, 4);
    put_number(b, n, 8);
    for (size_t i = 0; i < n; i++) put_text(b, texts[i]);
}

/* The file: header, metadata, no tensor. */
static inline void vocab_gguf(const struct vocab *v, struct buf *out)
{
    struct buf b = {0};
    size_t n = 0;
    put_text_value(&b, &n, "general.architecture", "llama");
    put_text_value(&b, &n, "tokenizer.ggml.model", v->model);
    put_text_value(&b, &n, "tokenizer.ggml.pre", v->pre);
    put_text_value(&b, &n, "tokenizer.chat_template", v->chat_template);
    put_text_array(&b, &n, "tokenizer.ggml.tokens", v->tokens, v->n_tokens);
    put_key(&b, &n, "tokenizer.ggml.token_type", GGUF_KIND_ARRAY);
    put_number(&b, GGUF_KIND_I32, 4);
    put_number(&b, v->n_types, 8);
    for (size_t i = 0; i < v->n_types; i++) put_number(&b, (uint32_t)v->types[i], 4);
    put_text_array(&b, &n, "tokenizer.ggml.merges", v->merges, v->n_merges);
    const struct {
        const char *key;
        int64_t id;
    } ids[] = {{"tokenizer.ggml.eos_token_id", v->eos}, {"tokenizer.ggml.bos_token_id", v->bos}};
    for (size_t i = 0; i < 2; i++) {
        if (ids[i].id < 0) continue;
        put_key(&b, &n, ids[i].key, GGUF_KIND_U32);
        put_number(&b, (uint64_t)ids[i].id, 4);
    }
    if (v->add_bos >= 0) {
        put_key(&b, &n, "tokenizer.ggml.add_bos_token", GGUF_KIND_BOOL);
        put_number(&b, (uint64_t)v->add_bos, 1);
    }
    buf_append(out, "GGUF", 4);
    put_number(out, 3, 4);
    put_number(out, 0, 8);
    put_number(out, n, 8);
    buf_append(out, b.data, b.len);
    buf_free(&b);
}

#endif
