/* tokenizer_source: what a tokenizer is made of, whichever kind of file said it (private to engine/text).
 *
 * Texts point into the files (or into parsed JSON, which the source holds); they live until source_free. A reader checks
 * what only it can know, such as counts, types and spellings; what a token or a merge must be is checked once, by the
 * tokenizer that is built from the source. */
#ifndef TANDEM_TOKENIZER_SOURCE_H
#define TANDEM_TOKENIZER_SOURCE_H

#include "base.h"
#include "model_file.h"
#include "tokenizer_private.h"
#include "tokenizer_split.h"

enum {
    MAX_TOKENS = 1 << 20,
    MAX_MERGES = 1 << 21,
    MAX_ENDS = 32
};

/* As GGUF numbers them; TOKEN_HOLE: no token has this id. */
enum token_type { TOKEN_HOLE, TOKEN_NORMAL, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER, TOKEN_UNUSED, TOKEN_BYTE };

struct source_token {
    struct model_text text;
    uint8_t type;
};

struct source_merge {
    struct model_text left, right;
};

struct tokenizer_source {
    struct source_token *tokens; /* by id */
    size_t n_tokens;
    struct source_merge *merges; /* by rank */
    size_t n_merges;
    enum pre_kind pre;
    bool normalize;    /* NFC before splitting */
    bool whole_pieces; /* a piece that is a token is not merged ("ignore_merges") */
    int32_t bos;       /* put in front of every prompt; -1: nothing */
    int32_t ends[MAX_ENDS];
    size_t n_ends;
    struct json_t *trees[2]; /* own the texts of a JSON source */
};

/* The pre-tokenizer and, where files do not say otherwise, what belongs to it. */
void source_set_pre(struct tokenizer_source *s, enum pre_kind pre);
/* Splits "LEFT RIGHT". False: not two texts with one space between. */
bool source_split_merge(const char *text, size_t len, struct source_merge *out);
/* An end token more; one that is there already is not added twice. False: there are MAX_ENDS. */
bool source_add_end(struct tokenizer_source *s, int32_t id);
/* A text from a file as printable ASCII of at most 40 characters, for messages. */
void source_show(char out[41], const char *text, size_t len);

/* Both fill *s, which starts as zeros; after an error it is still to be freed. RC_BAD_INPUT, EXIT_UNAVAILABLE. */
enum rc source_read_gguf(struct tokenizer_source *s, const struct model_file *m, struct err *e);
enum rc source_read_json(struct tokenizer_source *s, const struct tokenizer_texts *texts, struct err *e);
void source_free(struct tokenizer_source *s);

#endif
