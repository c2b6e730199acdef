/* tokenizer_json: a tokenizer's parts from Hugging Face's tokenizer.json, tokenizer_config.json and generation_config.json.
 *
 * tokenizer.json describes a pipeline of parts; only the pipelines of the built-in pre-tokenizers are recognized, part by
 * part and field by field, the splitting expression by its exact text. Everything else is refused by name: a field that
 * is overlooked would give other tokens, silently. What cannot reach an encoding is not looked at: "truncation" and
 * "padding" (prompts are never cut), and of tokenizer_config.json all but special tokens.
 *
 * Added tokens stand in both files. The newer files of a family leave some to tokenizer_config.json alone, so the lists are
 * merged; where both name a token they must agree. A special one becomes a control token, which user text cannot spell;
 * another is matched in all text. Flags that make matching depend on what surrounds a token are refused. "normalized" says
 * whether a token is looked for before or after normalization: without a normalizer it means nothing, as long as all
 * tokens agree.
 *
 * Generation ends on what generation_config.json lists, and on the tokenizer's own end token. */
#define _GNU_SOURCE
#include "tokenizer_source.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json_text.h"

/* A vocabulary member is two values, a merge up to three. */
static const struct json_limits LIMITS = {(size_t)64 << 20, 2 * (size_t)MAX_TOKENS + 3 * (size_t)MAX_MERGES, 32};
static const struct json_limits SMALL_LIMITS = {(size_t)16 << 20, 1 << 20, 64};

enum { TOKENIZER, CONFIG };
static const char TOKENIZER_FILE[] = "tokenizer.json", CONFIG_FILE[] = "tokenizer_config.json",
                  GENERATION_FILE[] = "generation_config.json";

/* How a token was added; two files that name one token must give it the same. */
enum { ADDED = 1, ADDED_SPECIAL = 2, ADDED_NORMALIZED = 4 };

struct reader {
    struct tokenizer_source *s;
    uint8_t *added; /* by id */
    struct err *e;
};

static enum rc refuse(const struct reader *r, const char *code, const char *file, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static enum rc refuse(const struct reader *r, const char *code, const char *file, const char *format, ...)
{
    char what[400];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return err_set(r->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s: %s", file, what);
}

static enum rc unsupported(const struct reader *r, const char *file, const char *what)
{
    return refuse(r, "tokenizer_unsupported", file, "%s", what);
}

/* ---- questions about a value ---- */

static bool is_absent(const json_t *v) { return !v || json_is_null(v); }

static bool has_type(const json_t *o, const char *type)
{
    const json_t *v = json_object_get(o, "type");
    return json_is_string(v) && strcmp(json_string_value(v), type) == 0;
}

static bool is_off(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return is_absent(v) || json_is_false(v);
}

static bool is_on(const json_t *o, const char *key) { return json_is_true(json_object_get(o, key)); }

/* The first key of o that is not in names, which ends with NULL; NULL: o has no other. */
static const char *other_key(const json_t *o, const char *const *names)
{
    json_t *object = (json_t *)(uintptr_t)o;
    for (void *at = json_object_iter(object); at; at = json_object_iter_next(object, at)) {
        const char *key = json_object_iter_key(at);
        const char *const *name = names;
        while (*name && strcmp(*name, key) != 0) name++;
        if (!*name) return key;
    }
    return NULL;
}

static enum rc check_keys(const struct reader *r, const json_t *o, const char *const *names, const char *what)
{
    char shown[41];
    const char *key = other_key(o, names);
    if (!key) return RC_OK;
    source_show(shown, key, strlen(key));
    return refuse(r, "tokenizer_unsupported", TOKENIZER_FILE, "%s has the unknown field \"%s\"", what, shown);
}

static struct model_text text_of(const json_t *string)
{
    return (struct model_text){json_string_value(string), json_string_length(string)};
}

/* ---- the pipeline ---- */

static enum rc read_normalizer(const struct reader *r, const json_t *root)
{
    static const char *const names[] = {"type", NULL};
    const json_t *v = json_object_get(root, "normalizer");
    r->s->normalize = !is_absent(v);
    if (is_absent(v) || (has_type(v, "NFC") && !other_key(v, names))) return RC_OK;
    return unsupported(r, TOKENIZER_FILE, "its normalizer is neither NFC nor absent");
}

static bool is_byte_level(const json_t *v, bool regex)
{
    static const char *const names[] = {"type", "add_prefix_space", "trim_offsets", "use_regex", NULL};
    const json_t *use = json_object_get(v, "use_regex");
    return has_type(v, "ByteLevel") && !other_key(v, names) && is_off(v, "add_prefix_space") &&
           (regex ? is_absent(use) || json_is_true(use) : json_is_false(use));
}

static bool is_split(const json_t *v, enum pre_kind *kind)
{
    static const char *const names[] = {"type", "pattern", "behavior", "invert", NULL};
    static const char *const pattern_names[] = {"Regex", NULL};
    const json_t *pattern = json_object_get(v, "pattern"), *regex = json_object_get(pattern, "Regex");
    const json_t *behavior = json_object_get(v, "behavior");
    return has_type(v, "Split") && !other_key(v, names) && !other_key(pattern, pattern_names) && json_is_string(regex) &&
           json_is_string(behavior) && strcmp(json_string_value(behavior), "Isolated") == 0 && is_off(v, "invert") &&
           pre_kind_published(json_string_value(regex), kind);
}

static bool is_digits(const json_t *v)
{
    static const char *const names[] = {"type", "individual_digits", NULL};
    return has_type(v, "Digits") && !other_key(v, names) && is_on(v, "individual_digits");
}

static bool find_pre(const json_t *v, enum pre_kind *kind)
{
    static const char *const names[] = {"type", "pretokenizers", NULL};
    const json_t *parts = json_object_get(v, "pretokenizers");
    *kind = PRE_GPT2;
    if (is_byte_level(v, true)) return true;
    if (!has_type(v, "Sequence") || other_key(v, names) || json_array_size(parts) != 2) return false;
    const json_t *first = json_array_get(parts, 0), *second = json_array_get(parts, 1);
    *kind = PRE_SMOLLM;
    if (is_digits(first)) return is_byte_level(second, true);
    return is_split(first, kind) && is_byte_level(second, false);
}

/* Parts beside the model: what comes in front of it and behind it. */
static enum rc read_pipeline(const struct reader *r, const json_t *root)
{
    static const char *const names[] = {"version",       "truncation",     "padding", "added_tokens", "normalizer",
                                        "pre_tokenizer", "post_processor", "decoder", "model",        NULL};
    const json_t *after = json_object_get(root, "post_processor");
    enum rc rc = check_keys(r, root, names, "it");
    if (rc == RC_OK) rc = read_normalizer(r, root);
    if (rc != RC_OK) return rc;
    if (!find_pre(json_object_get(root, "pre_tokenizer"), &r->s->pre))
        return unsupported(r, TOKENIZER_FILE,
                           "its pre_tokenizer is none of those of smollm, qwen2, qwen35, llama-bpe, gpt-2");
    if (!has_type(json_object_get(root, "decoder"), "ByteLevel"))
        return unsupported(r, TOKENIZER_FILE, "its decoder is not ByteLevel");
    /* ByteLevel's post-processing moves offsets and no token. */
    if (!is_absent(after) && !has_type(after, "ByteLevel"))
        return unsupported(r, TOKENIZER_FILE, "its post_processor is neither ByteLevel nor absent");
    return RC_OK;
}

/* ---- the model ---- */

static bool is_empty_text(const json_t *v)
{
    return is_absent(v) || (json_is_string(v) && json_string_length(v) == 0);
}

static enum rc check_model(const struct reader *r, const json_t *model)
{
    static const char *const names[] = {"type",      "dropout",       "unk_token",     "continuing_subword_prefix",
                                        "fuse_unk",  "byte_fallback", "ignore_merges", "end_of_word_suffix",
                                        "vocab",     "merges",        NULL};
    if (!has_type(model, "BPE")) return unsupported(r, TOKENIZER_FILE, "its model is not BPE");
    const json_t *dropout = json_object_get(model, "dropout");
    if (!is_absent(dropout) && !(json_is_number(dropout) && json_number_value(dropout) == 0))
        return unsupported(r, TOKENIZER_FILE, "its model has a dropout");
    if (!is_absent(json_object_get(model, "unk_token")))
        return unsupported(r, TOKENIZER_FILE, "its model has an unk_token");
    if (!is_empty_text(json_object_get(model, "continuing_subword_prefix")) ||
        !is_empty_text(json_object_get(model, "end_of_word_suffix")))
        return unsupported(r, TOKENIZER_FILE, "its model marks the beginnings or ends of words");
    if (!is_off(model, "byte_fallback")) return unsupported(r, TOKENIZER_FILE, "its model has byte_fallback");
    if (!is_off(model, "ignore_merges") && !is_on(model, "ignore_merges"))
        return unsupported(r, TOKENIZER_FILE, "ignore_merges of its model is no boolean");
    r->s->whole_pieces = is_on(model, "ignore_merges");
    return check_keys(r, model, names, "its model");
}

/* An id that the tables have room for. */
static bool is_id(const json_t *v)
{
    return json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) < MAX_TOKENS;
}

static bool parse_id(const char *text, int32_t *out)
{
    size_t len = strlen(text);
    if (len == 0 || len > 7 || strspn(text, "0123456789") != len || (len > 1 && text[0] == '0')) return false;
    *out = (int32_t)strtol(text, NULL, 10);
    return *out < MAX_TOKENS;
}

/* Room for all ids that the files name; those that they leave out stay holes. */
static enum rc make_room(struct reader *r, json_t *vocab, const json_t *list, json_t *decoder)
{
    int64_t last = -1;
    char shown[41];
    for (void *at = json_object_iter(vocab); at; at = json_object_iter_next(vocab, at)) {
        const json_t *id = json_object_iter_value(at);
        const char *key = json_object_iter_key(at);
        source_show(shown, key, strlen(key));
        if (!is_id(id))
            return refuse(r, "tokenizer_vocabulary", TOKENIZER_FILE, "the id of \"%s\" is not 0 to %d", shown,
                          MAX_TOKENS - 1);
        if (json_integer_value(id) > last) last = json_integer_value(id);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *id = json_object_get(json_array_get(list, i), "id");
        if (!is_id(id))
            return refuse(r, "tokenizer_vocabulary", TOKENIZER_FILE, "added token %zu has no id of 0 to %d", i,
                          MAX_TOKENS - 1);
        if (json_integer_value(id) > last) last = json_integer_value(id);
    }
    for (void *at = json_object_iter(decoder); at; at = json_object_iter_next(decoder, at)) {
        int32_t id;
        const char *key = json_object_iter_key(at);
        source_show(shown, key, strlen(key));
        if (!parse_id(key, &id))
            return refuse(r, "tokenizer_vocabulary", CONFIG_FILE, "\"%s\" in added_tokens_decoder is no id", shown);
        if (id > last) last = id;
    }
    if (last < 0) return refuse(r, "tokenizer_vocabulary", TOKENIZER_FILE, "its vocabulary is empty");
    r->s->n_tokens = (size_t)last + 1;
    r->s->tokens = calloc(r->s->n_tokens, sizeof *r->s->tokens);
    r->added = calloc(r->s->n_tokens, sizeof *r->added);
    return r->s->tokens && r->added ? RC_OK : err_no_memory(r->e);
}

static enum rc read_vocab(const struct reader *r, json_t *vocab)
{
    for (void *at = json_object_iter(vocab); at; at = json_object_iter_next(vocab, at)) {
        struct source_token *t = &r->s->tokens[json_integer_value(json_object_iter_value(at))];
        const char *key = json_object_iter_key(at);
        if (t->type != TOKEN_HOLE)
            return refuse(r, "tokenizer_vocabulary", TOKENIZER_FILE, "two tokens have the id %td", t - r->s->tokens);
        *t = (struct source_token){{key, strlen(key)}, TOKEN_NORMAL};
    }
    return RC_OK;
}

static enum rc read_merges(const struct reader *r, const json_t *merges)
{
    size_t n = json_array_size(merges);
    if (n == 0 || n > MAX_MERGES)
        return refuse(r, "tokenizer_merges", TOKENIZER_FILE, "it has %zu merges, not 1 to %d", n, MAX_MERGES);
    r->s->merges = calloc(n, sizeof *r->s->merges);
    if (!r->s->merges) return err_no_memory(r->e);
    r->s->n_merges = n;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(merges, i), *left = json_array_get(v, 0), *right = json_array_get(v, 1);
        struct source_merge *merge = &r->s->merges[i];
        bool good = false;
        if (json_is_string(v)) {
            good = source_split_merge(json_string_value(v), json_string_length(v), merge);
        } else if (json_array_size(v) == 2 && json_is_string(left) && json_is_string(right)) {
            *merge = (struct source_merge){text_of(left), text_of(right)};
            good = true;
        }
        if (!good) return refuse(r, "tokenizer_merges", TOKENIZER_FILE, "merge %zu is not two tokens", i);
    }
    return RC_OK;
}

/* ---- added tokens ---- */

/* One added token of either file. */
static enum rc read_added(const struct reader *r, const json_t *v, int32_t id, const char *file)
{
    static const char *const context_flags[] = {"lstrip", "rstrip", "single_word"};
    const json_t *content = json_object_get(v, "content");
    char shown[41];
    if (!json_is_string(content) || json_string_length(content) == 0)
        return refuse(r, "tokenizer_vocabulary", file, "the added token %d has no content", id);
    struct model_text text = text_of(content);
    source_show(shown, text.bytes, text.len);
    for (size_t i = 0; i < sizeof context_flags / sizeof context_flags[0]; i++)
        if (!is_off(v, context_flags[i]))
            return refuse(r, "tokenizer_unsupported", file, "the added token \"%s\" has \"%s\"", shown, context_flags[i]);
    unsigned flags = ADDED | (is_on(v, "special") ? ADDED_SPECIAL : 0u) | (is_on(v, "normalized") ? ADDED_NORMALIZED : 0u);
    if (r->s->normalize && flags & ADDED_NORMALIZED)
        return refuse(r, "tokenizer_unsupported", file, "the added token \"%s\" has \"normalized\" beside a normalizer", shown);
    struct source_token *t = &r->s->tokens[id];
    bool other_text = t->type != TOKEN_HOLE && (t->text.len != text.len || memcmp(t->text.bytes, text.bytes, text.len) != 0);
    if (other_text || (r->added[id] && r->added[id] != flags))
        return refuse(r, "tokenizer_vocabulary", file, "the added token %d, \"%s\", is not what was said of it before", id,
                      shown);
    *t = (struct source_token){text, flags & ADDED_SPECIAL ? TOKEN_CONTROL : TOKEN_USER};
    r->added[id] = (uint8_t)flags;
    return RC_OK;
}

static enum rc read_all_added(const struct reader *r, const json_t *list, json_t *decoder)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        enum rc rc = read_added(r, v, (int32_t)json_integer_value(json_object_get(v, "id")), TOKENIZER_FILE);
        if (rc != RC_OK) return rc;
    }
    for (void *at = json_object_iter(decoder); at; at = json_object_iter_next(decoder, at)) {
        int32_t id = 0; /* make_room has seen that every key is one */
        parse_id(json_object_iter_key(at), &id);
        enum rc rc = read_added(r, json_object_iter_value(at), id, CONFIG_FILE);
        if (rc != RC_OK) return rc;
    }
    unsigned seen = 0;
    for (size_t id = 0; id < r->s->n_tokens; id++)
        if (r->added[id]) seen |= r->added[id] & ADDED_NORMALIZED ? 1u : 2u;
    return seen == 3 ? unsupported(r, TOKENIZER_FILE, "some of the added tokens are \"normalized\" and some are not") : RC_OK;
}

/* ---- beginnings and ends ---- */

/* The id of a token that tokenizer_config.json names by its text, plain or inside an object; -1 for none. */
static enum rc find_named(const struct reader *r, const json_t *config, const char *key, int32_t *out)
{
    const json_t *v = json_object_get(config, key);
    *out = -1;
    if (json_is_object(v)) v = json_object_get(v, "content");
    if (is_absent(v)) return RC_OK;
    if (json_is_string(v)) {
        struct model_text text = text_of(v);
        for (size_t id = 0; id < r->s->n_tokens; id++) {
            const struct source_token *t = &r->s->tokens[id];
            if (t->type == TOKEN_HOLE || t->text.len != text.len || memcmp(t->text.bytes, text.bytes, text.len) != 0) continue;
            *out = (int32_t)id;
            return RC_OK;
        }
    }
    return refuse(r, "tokenizer_vocabulary", CONFIG_FILE, "its %s is no token", key);
}

static enum rc add_end(const struct reader *r, const json_t *v)
{
    int64_t id = json_is_integer(v) ? json_integer_value(v) : -1;
    if (id < 0 || (uint64_t)id >= r->s->n_tokens || r->s->tokens[id].type == TOKEN_HOLE)
        return refuse(r, "tokenizer_vocabulary", GENERATION_FILE, "its eos_token_id %" PRId64 " is no token", id);
    if (!source_add_end(r->s, (int32_t)id))
        return refuse(r, "tokenizer_unsupported", GENERATION_FILE, "it has more than %d end tokens", MAX_ENDS);
    return RC_OK;
}

static enum rc read_borders(const struct reader *r, const json_t *config, const json_t *generation)
{
    const json_t *ends = json_object_get(generation, "eos_token_id");
    enum rc rc = RC_OK;
    if (json_is_array(ends))
        for (size_t i = 0; i < json_array_size(ends) && rc == RC_OK; i++) rc = add_end(r, json_array_get(ends, i));
    else if (!is_absent(ends))
        rc = add_end(r, ends);
    int32_t eos = -1;
    if (rc == RC_OK) rc = find_named(r, config, "eos_token", &eos);
    if (rc == RC_OK && eos >= 0 && !source_add_end(r->s, eos))
        rc = refuse(r, "tokenizer_unsupported", GENERATION_FILE, "it has more than %d end tokens", MAX_ENDS);
    if (rc == RC_OK && is_on(config, "add_bos_token")) rc = find_named(r, config, "bos_token", &r->s->bos);
    return rc;
}

/* ---- all files ---- */

static enum rc read_trees(struct reader *r, const json_t *root, const json_t *config, const json_t *generation)
{
    const json_t *model = json_object_get(root, "model"), *list = json_object_get(root, "added_tokens");
    json_t *vocab = json_object_get(model, "vocab"), *decoder = json_object_get(config, "added_tokens_decoder");
    enum rc rc = read_pipeline(r, root);
    if (rc == RC_OK) rc = check_model(r, model);
    if (rc != RC_OK) return rc;
    if (!json_is_object(vocab)) return refuse(r, "tokenizer_vocabulary", TOKENIZER_FILE, "its vocabulary is no object");
    if (!is_absent(list) && !json_is_array(list))
        return refuse(r, "tokenizer_vocabulary", TOKENIZER_FILE, "its added_tokens is no array");
    if (!is_absent(decoder) && !json_is_object(decoder))
        return refuse(r, "tokenizer_vocabulary", CONFIG_FILE, "its added_tokens_decoder is no object");
    if (!is_off(config, "add_prefix_space") || !is_off(config, "split_special_tokens"))
        return unsupported(r, CONFIG_FILE, "it has add_prefix_space or split_special_tokens");
    rc = make_room(r, vocab, list, decoder);
    if (rc == RC_OK) rc = read_vocab(r, vocab);
    if (rc == RC_OK) rc = read_merges(r, json_object_get(model, "merges"));
    if (rc == RC_OK) rc = read_all_added(r, list, decoder);
    return rc == RC_OK ? read_borders(r, config, generation) : rc;
}

/* Absent text: no tree. */
static enum rc parse(const struct model_text *text, struct json_limits limits, const char *file, json_t **out, struct err *e)
{
    return text->bytes ? json_text_parse(text->bytes, text->len, limits, file, 0, out, e) : RC_OK;
}

enum rc source_read_json(struct tokenizer_source *s, const struct tokenizer_texts *texts, struct err *e)
{
    struct reader r = {.s = s, .e = e};
    json_t *generation = NULL;
    s->bos = -1;
    if (!texts->tokenizer.bytes)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_missing", "there is no %s", TOKENIZER_FILE);
    enum rc rc = parse(&texts->tokenizer, LIMITS, TOKENIZER_FILE, &s->trees[TOKENIZER], e);
    if (rc == RC_OK) rc = parse(&texts->config, SMALL_LIMITS, CONFIG_FILE, &s->trees[CONFIG], e);
    if (rc == RC_OK) rc = parse(&texts->generation, SMALL_LIMITS, GENERATION_FILE, &generation, e);
    if (rc == RC_OK) rc = read_trees(&r, s->trees[TOKENIZER], s->trees[CONFIG], generation);
    json_decref(generation);
    free(r.added);
    return rc;
}
