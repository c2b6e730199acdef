/* tokenizer: byte-level BPE, text to token ids and back.
 *
 * Built from a model's files: GGUF metadata (tokenizer.ggml.*), or Hugging Face's tokenizer.json, tokenizer_config.json and
 * generation_config.json. Pre-tokenizers smollm, qwen2, qwen35, llama-bpe, gpt-2 (PCRE2 with Unicode properties); NFC where
 * the model has it. Encoding is linear-logarithmic in the text, whatever it holds (1 MiB of one letter included).
 * An object is immutable after opening; encoding with one object from several threads at once is not supported
 * (scratch memory is kept inside). */
#ifndef TANDEM_TOKENIZER_H
#define TANDEM_TOKENIZER_H

#include "base.h"
#include "model_file.h"

struct tokenizer;

/* Token ids, growable; zero-initialize, token_list_free. */
struct token_list {
    int32_t *ids;
    size_t len;
    size_t cap;
};
bool token_list_push(struct token_list *l, int32_t id);
void token_list_free(struct token_list *l);

/* Errors: RC_BAD_INPUT, EXIT_UNAVAILABLE: no or unsupported tokenizer, inconsistent vocabulary or merges. The model file
 * may be closed afterwards (all texts are copied). */
enum rc tokenizer_open(const struct model_file *m, struct tokenizer **out, struct err *e);
void tokenizer_close(struct tokenizer *t);

/* The last token's id + 1. Ids from there on are padding of the model's vocabulary and must never be produced. */
int tokenizer_vocab(const struct tokenizer *t);
/* Ids below that which are no tokens either, ascending: their number. They must never be produced. */
size_t tokenizer_holes(const struct tokenizer *t, const int32_t **ids);
/* Id of a token's exact stored text ("<|im_end|>"), -1 if there is none. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text);
/* True if generation ends on this token: the end tokens of the files (of generation_config.json all), and <|im_end|>,
 * <|endoftext|>, <|eot_id|> where they are control tokens. */
bool tokenizer_is_end(const struct tokenizer *t, int32_t id);
/* The token put in front of every prompt, -1 for none (add_bos_token false; or absent, save for llama-bpe in GGUF, whose
 * files leave it out and mean true). */
int32_t tokenizer_bos(const struct tokenizer *t);

/* Appends the ids of text[0..len) to out. parse_special: control tokens ("<|im_start|>") in the text become their ids
 * (template parts); false: user text, where they are ordinary characters and user-defined tokens alone are matched.
 * Input must be UTF-8; each invalid byte is taken as U+FFFD. RC_FATAL out of memory, RC_BAD_INPUT pattern failure. */
enum rc tokenizer_encode(struct tokenizer *t, const char *text, size_t len, bool parse_special, struct token_list *out,
                         struct err *e);
/* Appends the bytes of one token to out (not necessarily whole UTF-8 characters). Control tokens give nothing unless
 * show_special. Ids out of range give nothing. False: out of memory. */
bool tokenizer_decode(const struct tokenizer *t, int32_t id, bool show_special, struct buf *out);

/* Hash over vocabulary, token types, merges, pre-tokenizer and ends: the tokenizer's part of the numerics identity. */
uint64_t tokenizer_digest(const struct tokenizer *t);

/* Appends bytes to out as valid UTF-8: each maximal invalid part becomes U+FFFD, an incomplete character at the very end
 * is left out. */
bool utf8_append_complete(struct buf *out, const char *bytes, size_t len);
bool utf8_valid(const char *bytes, size_t len);

#endif
