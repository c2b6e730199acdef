/* tokenizer_gguf: a tokenizer's parts from the keys tokenizer.ggml.*.
 *
 * GGUF names a pre-tokenizer and leaves the rest to the reader: whether text is normalized and whether whole pieces are
 * looked up belong to the name. */
#include "tokenizer_source.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static enum rc refuse(struct err *e, const char *code, const char *what, size_t index)
{
    return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s (entry %zu)", what, index);
}

static enum rc read_pre(struct tokenizer_source *s, const struct model_file *m, struct err *e)
{
    struct model_text model, pre;
    enum pre_kind kind;
    if (!model_file_text(m, "tokenizer.ggml.model", &model))
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_missing", "the file holds no tokenizer");
    if (model.len != 4 || memcmp(model.bytes, "gpt2", 4) != 0)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_unsupported",
                       "its tokenizer is not byte-level BPE (tokenizer.ggml.model is not \"gpt2\")");
    if (!model_file_text(m, "tokenizer.ggml.pre", &pre))
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_unsupported",
                       "its tokenizer names no pre-tokenizer (tokenizer.ggml.pre)");
    if (!pre_kind_parse(pre.bytes, pre.len, &kind)) {
        char name[41];
        source_show(name, pre.bytes, pre.len);
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_unsupported",
                       "its pre-tokenizer \"%s\" is none of smollm, qwen2, qwen35, llama-bpe, gpt-2", name);
    }
    source_set_pre(s, kind);
    return RC_OK;
}

static enum rc read_tokens(struct tokenizer_source *s, const struct model_file *m, struct err *e)
{
    size_t n = model_file_text_array(m, "tokenizer.ggml.tokens");
    if (n == 0 || n > MAX_TOKENS)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_vocabulary",
                       "tokenizer.ggml.tokens has %zu entries, not 1 to %d", n, MAX_TOKENS);
    size_t n_types = model_file_int_array(m, "tokenizer.ggml.token_type");
    if (n_types != n)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_vocabulary",
                       "tokenizer.ggml.token_type has %zu entries for %zu tokens", n_types, n);
    s->tokens = calloc(n, sizeof *s->tokens);
    if (!s->tokens) return err_no_memory(e);
    s->n_tokens = n;
    for (size_t id = 0; id < n; id++) {
        int64_t type;
        if (!model_file_text_at(m, "tokenizer.ggml.tokens", id, &s->tokens[id].text))
            return refuse(e, "tokenizer_vocabulary", "a token's text cannot be read", id);
        if (!model_file_int_at(m, "tokenizer.ggml.token_type", id, &type) || type < TOKEN_NORMAL || type > TOKEN_BYTE)
            return refuse(e, "tokenizer_vocabulary", "a token's type is unknown", id);
        s->tokens[id].type = (uint8_t)type;
    }
    return RC_OK;
}

static enum rc read_merges(struct tokenizer_source *s, const struct model_file *m, struct err *e)
{
    size_t n = model_file_text_array(m, "tokenizer.ggml.merges");
    if (n == 0 || n > MAX_MERGES)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_merges",
                       "tokenizer.ggml.merges has %zu entries, not 1 to %d", n, MAX_MERGES);
    s->merges = calloc(n, sizeof *s->merges);
    if (!s->merges) return err_no_memory(e);
    s->n_merges = n;
    for (size_t i = 0; i < n; i++) {
        struct model_text text;
        if (!model_file_text_at(m, "tokenizer.ggml.merges", i, &text) || text.len < 3)
            return refuse(e, "tokenizer_merges", "a merge's length is impossible", i);
        if (!source_split_merge(text.bytes, text.len, &s->merges[i]))
            return refuse(e, "tokenizer_merges", "a merge is not two tokens with a space between", i);
    }
    return RC_OK;
}

/* Reads an id; absent is -1. */
static enum rc read_id(const struct tokenizer_source *s, const struct model_file *m, const char *key, int32_t *out,
                       struct err *e)
{
    uint64_t id;
    *out = -1;
    if (!model_file_u64(m, key, &id)) return RC_OK;
    if (id >= s->n_tokens)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_vocabulary",
                       "%s is %" PRIu64 ", but there are %zu tokens", key, id, s->n_tokens);
    *out = (int32_t)id;
    return RC_OK;
}

static enum rc read_borders(struct tokenizer_source *s, const struct model_file *m, struct err *e)
{
    int32_t eos;
    enum rc rc = read_id(s, m, "tokenizer.ggml.eos_token_id", &eos, e);
    if (rc == RC_OK) rc = read_id(s, m, "tokenizer.ggml.bos_token_id", &s->bos, e);
    if (rc != RC_OK) return rc;
    /* Llama 3 files leave the key out and mean yes. */
    bool add_bos = false;
    if (!model_file_bool(m, "tokenizer.ggml.add_bos_token", &add_bos)) add_bos = s->pre == PRE_LLAMA_BPE;
    if (!add_bos) s->bos = -1;
    if (eos >= 0) source_add_end(s, eos);
    return RC_OK;
}

enum rc source_read_gguf(struct tokenizer_source *s, const struct model_file *m, struct err *e)
{
    enum rc rc = read_pre(s, m, e);
    if (rc == RC_OK) rc = read_tokens(s, m, e);
    if (rc == RC_OK) rc = read_merges(s, m, e);
    return rc == RC_OK ? read_borders(s, m, e) : rc;
}
