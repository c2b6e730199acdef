/* tokenizer_source: what the readers of GGUF and JSON share. */
#include "tokenizer_source.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

void source_set_pre(struct tokenizer_source *s, enum pre_kind pre)
{
    s->pre = pre;
    s->normalize = pre == PRE_QWEN2 || pre == PRE_QWEN35;
    s->whole_pieces = pre == PRE_LLAMA_BPE;
}

bool source_split_merge(const char *text, size_t len, struct source_merge *out)
{
    const char *space = memchr(text, ' ', len);
    size_t left_len = space ? (size_t)(space - text) : 0;
    if (left_len == 0 || left_len + 1 == len || memchr(space + 1, ' ', len - left_len - 1)) return false;
    *out = (struct source_merge){{text, left_len}, {space + 1, len - left_len - 1}};
    return true;
}

bool source_add_end(struct tokenizer_source *s, int32_t id)
{
    for (size_t i = 0; i < s->n_ends; i++)
        if (s->ends[i] == id) return true;
    if (s->n_ends == MAX_ENDS) return false;
    s->ends[s->n_ends++] = id;
    return true;
}

void source_show(char out[41], const char *text, size_t len)
{
    size_t n = 0;
    for (; n < len && n < 40; n++) out[n] = text[n] > ' ' && text[n] < 0x7f ? text[n] : '?';
    out[n] = '\0';
}

void source_free(struct tokenizer_source *s)
{
    free(s->tokens);
    free(s->merges);
    for (size_t i = 0; i < sizeof s->trees / sizeof s->trees[0]; i++) json_decref(s->trees[i]);
    *s = (struct tokenizer_source){0};
}
