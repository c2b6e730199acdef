/* tokenizer_split: text to the pieces that merging may not cross (private to engine/text). */
#ifndef TANDEM_TOKENIZER_SPLIT_H
#define TANDEM_TOKENIZER_SPLIT_H

#include "base.h"

enum pre_kind { PRE_GPT2, PRE_SMOLLM, PRE_QWEN2, PRE_QWEN35, PRE_LLAMA_BPE };

/* The name in tokenizer.ggml.pre; false: not one of ours. */
bool pre_kind_parse(const char *name, size_t len, enum pre_kind *out);
const char *pre_kind_name(enum pre_kind kind);
/* By the exact text of the expression in a tokenizer.json's Split; false: not one of ours. */
bool pre_kind_published(const char *regex, enum pre_kind *out);

struct splitter;

/* jit: use PCRE2's just-in-time compiler where this machine has it; the pieces are the same without. RC_FATAL: no
 * memory, or a PCRE2 without Unicode. Free with splitter_close (NULL is fine). */
enum rc splitter_open(enum pre_kind kind, bool jit, struct splitter **out, struct err *e);
void splitter_close(struct splitter *s);

/* Starts on text[0..len), which must be valid UTF-8 and stay until the last piece was taken. */
void splitter_start(struct splitter *s, const char *text, size_t len);
/* The next piece, *piece_len > 0; 0 at the end. The pieces joined are the text. RC_BAD_INPUT (code "tokenizer_pattern"):
 * PCRE2 ran into a limit. */
enum rc splitter_next(struct splitter *s, const char **piece, size_t *piece_len, struct err *e);

/* Unicode version of the tables that decide what a letter is: "14.0.0". */
void splitter_unicode(char out[24]);

#endif
