/* tokenizer: byte-level BPE over the vocabulary of a model.
 *
 * Whatever files a model has, its tokenizer comes as one source (tokenizer_source): tokens by id with their types, merges,
 * a pre-tokenizer. Opening copies every token text into one buffer and builds three things from it: a hash table from text
 * to id, the merge ranks (tokenizer_bpe), and the sorted list of special tokens. Bytes become tokens through GPT-2's
 * alphabet, in which each byte is written as one printable character; the vocabulary stores texts in that alphabet, except
 * special tokens, which are stored as they look.
 *
 * Encoding: special tokens first (leftmost, longest where several start), then for the text between them normalization
 * (where the model has it), pieces (tokenizer_split), bytes to ids, merges. A control token can come out of the first step
 * alone, never out of merging: opening refuses merges that touch one, and whole-piece lookup takes normal tokens only. So
 * user text, encoded with parse_special false, cannot hold a control token, whatever it says.
 *
 * A byte that has no token (SmolLM2's vocabulary lacks bytes that hardly occur in text) is left out, as the tokenizers'
 * library does; there is no token that could stand for it.
 *
 * Ids without a token (holes in a JSON vocabulary, padding that GGUF marks as unused) are no tokens: they are neither
 * found nor matched, and a sampler must not choose them. */
#define _GNU_SOURCE
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "tokenizer_bpe.h"
#include "tokenizer_nfc.h"
#include "tokenizer_private.h"
#include "tokenizer_source.h"
#include "tokenizer_split.h"
#include "utf8.h"

enum {
    MAX_TOKEN_BYTES = 1024,
    MAX_SPECIAL_BYTES = 256,
    MAX_ALPHABET = 0x180 /* code points of the byte alphabet lie below */
};

struct tokenizer {
    struct buf texts; /* all token texts, one after the other */
    uint32_t *start;  /* n + 1: where each begins */
    uint8_t *types;   /* n; enum token_type */
    int32_t n;        /* ids of the source */
    int32_t vocab;    /* the last token's id + 1 */
    int32_t *slots; /* text -> id, -1 empty; linear probing */
    size_t mask;
    int32_t byte_ids[256];          /* -1: no token */
    int16_t bytes_of[MAX_ALPHABET]; /* code point -> byte, -1: not in the alphabet */
    int32_t *specials;              /* ids matched in raw text, in the order of their texts' bytes */
    size_t n_specials;
    size_t special_from[257]; /* specials by first byte */
    struct bpe *bpe;
    struct splitter *splitter;
    bool normalize, whole_pieces;
    int32_t bos;       /* -1: none */
    int32_t *holes;    /* ids below vocab that are no tokens, ascending */
    size_t n_holes;
    int32_t ends[MAX_ENDS];
    size_t n_ends;
    uint64_t digest;
    struct token_list piece_ids; /* scratch of encoding */
    struct buf valid, normal;
};

bool token_list_push(struct token_list *l, int32_t id)
{
    if (l->len == l->cap) {
        size_t cap = l->cap ? l->cap : 32;
        if (!size_mul(cap, 2, &cap)) return false;
        int32_t *ids = reallocarray(l->ids, cap, sizeof *ids);
        if (!ids) return false;
        l->ids = ids;
        l->cap = cap;
    }
    l->ids[l->len++] = id;
    return true;
}

void token_list_free(struct token_list *l)
{
    free(l->ids);
    *l = (struct token_list){0};
}

static const char *text_of(const struct tokenizer *t, int32_t id, size_t *len)
{
    *len = t->start[id + 1] - t->start[id];
    return t->texts.data + t->start[id];
}

/* Control tokens, and the unknown token, which is handled like one. */
static bool is_control(const struct tokenizer *t, int32_t id)
{
    return t->types[id] == TOKEN_CONTROL || t->types[id] == TOKEN_UNKNOWN;
}

static bool is_token(const struct tokenizer *t, int32_t id)
{
    return t->types[id] != TOKEN_HOLE && t->types[id] != TOKEN_UNUSED;
}

/* The slot that holds the text, or the empty one where it would go. */
static int32_t *find_slot(const struct tokenizer *t, const char *text, size_t len)
{
    size_t i = (size_t)XXH3_64bits(text, len) & t->mask;
    for (;; i = (i + 1) & t->mask) {
        if (t->slots[i] < 0) return &t->slots[i];
        size_t n;
        const char *other = text_of(t, t->slots[i], &n);
        if (n == len && memcmp(other, text, len) == 0) return &t->slots[i];
    }
}

static int32_t find_id(const struct tokenizer *t, const char *text, size_t len) { return *find_slot(t, text, len); }

/* ---- opening ---- */

static enum rc refuse(struct err *e, const char *code, const char *what, size_t index)
{
    return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s (entry %zu)", what, index);
}

static enum rc load_token(struct tokenizer *t, const struct source_token *token, int32_t id, struct err *e)
{
    const struct model_text text = token->text;
    size_t index = (size_t)id;
    t->types[index] = token->type;
    if (token->type == TOKEN_HOLE) {
        t->start[index + 1] = t->start[index];
        return RC_OK;
    }
    if (text.len == 0) return refuse(e, "tokenizer_vocabulary", "a token's text is empty", index);
    if (text.len > MAX_TOKEN_BYTES) return refuse(e, "tokenizer_vocabulary", "a token's text is too long", index);
    if (!utf8_valid(text.bytes, text.len))
        return refuse(e, "tokenizer_vocabulary", "a token's text is not UTF-8", index);
    if (!buf_append(&t->texts, text.bytes, text.len)) return err_no_memory(e);
    t->start[index + 1] = (uint32_t)t->texts.len; /* at most MAX_TOKENS * MAX_TOKEN_BYTES */
    int32_t *slot = find_slot(t, text.bytes, text.len);
    if (*slot >= 0) return refuse(e, "tokenizer_vocabulary", "a token's text is there twice", index);
    *slot = id;
    if (is_token(t, id)) t->vocab = id + 1;
    return RC_OK;
}

static enum rc load_vocabulary(struct tokenizer *t, const struct tokenizer_source *s, struct err *e)
{
    size_t n = s->n_tokens, n_slots = 16;
    while (n_slots < 2 * n) n_slots *= 2;
    t->start = calloc(n + 1, sizeof *t->start);
    t->types = calloc(n, sizeof *t->types);
    t->slots = calloc(n_slots, sizeof *t->slots);
    if (!t->start || !t->types || !t->slots) return err_no_memory(e);
    memset(t->slots, 0xff, n_slots * sizeof *t->slots);
    t->mask = n_slots - 1;
    t->n = (int32_t)n;
    for (int32_t id = 0; id < t->n; id++) {
        enum rc rc = load_token(t, &s->tokens[id], id, e);
        if (rc != RC_OK) return rc;
    }
    if (t->vocab == 0)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_vocabulary", "the vocabulary has no token");
    return RC_OK;
}

static enum rc list_holes(struct tokenizer *t, struct err *e)
{
    for (int32_t id = 0; id < t->vocab; id++) t->n_holes += !is_token(t, id);
    if (t->n_holes == 0) return RC_OK;
    t->holes = calloc(t->n_holes, sizeof *t->holes);
    if (!t->holes) return err_no_memory(e);
    size_t n = 0;
    for (int32_t id = 0; id < t->vocab; id++)
        if (!is_token(t, id)) t->holes[n++] = id;
    return RC_OK;
}

/* GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order. */
static void build_alphabet(struct tokenizer *t)
{
    memset(t->bytes_of, 0xff, sizeof t->bytes_of);
    uint32_t next = 0x100;
    for (uint32_t b = 0; b < 256; b++) {
        bool printable = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        uint32_t code = printable ? b : next++;
        t->bytes_of[code] = (int16_t)b;
        char text[4];
        int32_t id = find_id(t, text, utf8_put(text, code));
        t->byte_ids[b] = id >= 0 && t->types[id] == TOKEN_NORMAL ? id : -1;
    }
}

static enum rc load_merge(struct tokenizer *t, const struct source_merge *merge, size_t index, struct err *e)
{
    const struct model_text left_text = merge->left, right_text = merge->right;
    char both[2 * MAX_TOKEN_BYTES];
    if (left_text.len > MAX_TOKEN_BYTES || right_text.len > MAX_TOKEN_BYTES)
        return refuse(e, "tokenizer_merges", "a merge's length is impossible", index);
    memcpy(both, left_text.bytes, left_text.len);
    memcpy(both + left_text.len, right_text.bytes, right_text.len);
    int32_t left = find_id(t, left_text.bytes, left_text.len), right = find_id(t, right_text.bytes, right_text.len);
    int32_t result = find_id(t, both, left_text.len + right_text.len);
    if (left < 0 || right < 0 || result < 0)
        return refuse(e, "tokenizer_merges", "a merge names a token that is not in the vocabulary", index);
    if (is_control(t, left) || is_control(t, right) || is_control(t, result))
        return refuse(e, "tokenizer_merges", "a merge touches a control token", index);
    if (!bpe_add(t->bpe, left, right, result)) return refuse(e, "tokenizer_merges", "a merge is there twice", index);
    return RC_OK;
}

static enum rc load_merges(struct tokenizer *t, const struct tokenizer_source *s, struct err *e)
{
    t->bpe = bpe_open(s->n_merges);
    if (!t->bpe) return err_no_memory(e);
    for (size_t i = 0; i < s->n_merges; i++) {
        enum rc rc = load_merge(t, &s->merges[i], i, e);
        if (rc != RC_OK) return rc;
    }
    return RC_OK;
}

static int compare_texts(const void *a, const void *b, void *arg)
{
    const struct tokenizer *t = arg;
    size_t a_len, b_len;
    const char *a_text = text_of(t, *(const int32_t *)a, &a_len), *b_text = text_of(t, *(const int32_t *)b, &b_len);
    int order = memcmp(a_text, b_text, a_len < b_len ? a_len : b_len);
    return order ? order : (a_len > b_len) - (a_len < b_len);
}

static enum rc list_specials(struct tokenizer *t, struct err *e)
{
    t->specials = calloc((size_t)t->n, sizeof *t->specials);
    if (!t->specials) return err_no_memory(e);
    size_t len;
    for (int32_t id = 0; id < t->n; id++) {
        if (!is_control(t, id) && t->types[id] != TOKEN_USER) continue;
        text_of(t, id, &len);
        if (len > MAX_SPECIAL_BYTES)
            return refuse(e, "tokenizer_vocabulary", "a special token's text is too long", (size_t)id);
        t->specials[t->n_specials++] = id;
    }
    qsort_r(t->specials, t->n_specials, sizeof *t->specials, compare_texts, t);
    for (size_t i = 0; i < t->n_specials; i++)
        t->special_from[(unsigned char)text_of(t, t->specials[i], &len)[0] + 1]++;
    for (size_t b = 1; b <= 256; b++) t->special_from[b] += t->special_from[b - 1];
    return RC_OK;
}

/* What the files say, and tokens that end a text whatever files say. */
static enum rc load_borders(struct tokenizer *t, struct tokenizer_source *s, struct err *e)
{
    static const char *const names[] = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        int32_t id = find_id(t, names[i], strlen(names[i]));
        if (id >= 0 && is_control(t, id) && !source_add_end(s, id))
            return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "tokenizer_unsupported", "there are more than %d end tokens",
                           MAX_ENDS);
    }
    memcpy(t->ends, s->ends, sizeof t->ends);
    t->n_ends = s->n_ends;
    t->bos = s->bos;
    return RC_OK;
}

static void hash_number(XXH3_state_t *h, uint64_t v)
{
    unsigned char bytes[8];
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(v >> 8 * i);
    XXH3_64bits_update(h, bytes, sizeof bytes);
}

static void hash_text(XXH3_state_t *h, const char *text, size_t len)
{
    hash_number(h, len);
    XXH3_64bits_update(h, text, len);
}

/* Everything that decides about ids and about where a text ends, each part after its size. PCRE2's Unicode version is one:
 * it says what a letter is. Merges go in as their texts. */
static enum rc make_digest(struct tokenizer *t, const struct tokenizer_source *s, struct err *e)
{
    XXH3_state_t *h = XXH3_createState();
    if (!h) return err_no_memory(e);
    char unicode[24];
    splitter_unicode(unicode);
    XXH3_64bits_reset(h);
    const char *names[] = {"tandem tokenizer 2", pre_kind_name(s->pre), t->normalize ? "nfc" : "raw",
                           t->whole_pieces ? "whole" : "merged", unicode};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) hash_text(h, names[i], strlen(names[i]));
    hash_number(h, (uint64_t)t->n);
    for (int32_t id = 0; id < t->n; id++) {
        size_t len;
        const char *text = text_of(t, id, &len);
        hash_number(h, t->types[id]);
        hash_text(h, text, len);
    }
    hash_number(h, s->n_merges);
    for (size_t i = 0; i < s->n_merges; i++) {
        hash_text(h, s->merges[i].left.bytes, s->merges[i].left.len);
        hash_text(h, s->merges[i].right.bytes, s->merges[i].right.len);
    }
    hash_number(h, (uint64_t)(int64_t)t->bos);
    hash_number(h, t->n_ends);
    for (size_t i = 0; i < t->n_ends; i++) hash_number(h, (uint64_t)t->ends[i]);
    t->digest = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    return RC_OK;
}

static enum rc load_all(struct tokenizer *t, struct tokenizer_source *s, bool jit, struct err *e)
{
    t->normalize = s->normalize;
    t->whole_pieces = s->whole_pieces;
    enum rc rc = splitter_open(s->pre, jit, &t->splitter, e);
    if (rc == RC_OK) rc = load_vocabulary(t, s, e);
    if (rc == RC_OK) rc = list_holes(t, e);
    if (rc != RC_OK) return rc;
    build_alphabet(t);
    rc = load_merges(t, s, e);
    if (rc == RC_OK) rc = list_specials(t, e);
    if (rc == RC_OK) rc = load_borders(t, s, e);
    return rc == RC_OK ? make_digest(t, s, e) : rc;
}

static enum rc build(struct tokenizer_source *s, const struct tokenizer_options *o, struct tokenizer **out, struct err *e)
{
    enum pre_kind pre;
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t) return err_no_memory(e);
    if (o->pre && pre_kind_parse(o->pre, strlen(o->pre), &pre)) source_set_pre(s, pre);
    if (o->no_normalize) s->normalize = false;
    enum rc rc = load_all(t, s, !o->no_jit, e);
    if (rc == RC_OK)
        *out = t;
    else
        tokenizer_close(t);
    return rc;
}

enum rc tokenizer_open_json(const struct tokenizer_texts *texts, const struct tokenizer_options *options,
                            struct tokenizer **out, struct err *e)
{
    struct tokenizer_source s = {0};
    *out = NULL;
    enum rc rc = source_read_json(&s, texts, e);
    if (rc == RC_OK) rc = build(&s, options, out, e);
    source_free(&s);
    return rc;
}

static enum rc open_gguf(const struct model_file *m, const struct tokenizer_options *options, struct tokenizer **out,
                         struct err *e)
{
    struct tokenizer_source s = {0};
    *out = NULL;
    enum rc rc = source_read_gguf(&s, m, e);
    if (rc == RC_OK) rc = build(&s, options, out, e);
    source_free(&s);
    return rc;
}

enum rc tokenizer_open_with(const struct model_file *m, const struct tokenizer_options *options, struct tokenizer **out,
                            struct err *e)
{
    struct tokenizer_texts texts = {.tokenizer = {0}};
    bool json = model_file_json(m, MODEL_JSON_TOKENIZER, &texts.tokenizer);
    model_file_json(m, MODEL_JSON_TOKENIZER_CONFIG, &texts.config);
    model_file_json(m, MODEL_JSON_GENERATION, &texts.generation);
    json = json || model_file_layout(m) == MODEL_LAYOUT_HF;
    enum rc rc = json ? tokenizer_open_json(&texts, options, out, e) : open_gguf(m, options, out, e);
    if (rc != RC_OK) err_place(e, model_file_path(m), 0, 0, 0);
    return rc;
}

enum rc tokenizer_open(const struct model_file *m, struct tokenizer **out, struct err *e)
{
    return tokenizer_open_with(m, &(struct tokenizer_options){0}, out, e);
}

void tokenizer_close(struct tokenizer *t)
{
    if (!t) return;
    buf_free(&t->normal);
    buf_free(&t->valid);
    token_list_free(&t->piece_ids);
    splitter_close(t->splitter);
    bpe_close(t->bpe);
    free(t->specials);
    free(t->holes);
    free(t->slots);
    free(t->types);
    free(t->start);
    buf_free(&t->texts);
    free(t);
}

/* ---- questions ---- */

int tokenizer_vocab(const struct tokenizer *t) { return t->vocab; }

size_t tokenizer_holes(const struct tokenizer *t, const int32_t **ids)
{
    *ids = t->holes;
    return t->n_holes;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text) { return find_id(t, text, strlen(text)); }

bool tokenizer_is_end(const struct tokenizer *t, int32_t id)
{
    for (size_t i = 0; i < t->n_ends; i++)
        if (t->ends[i] == id) return true;
    return false;
}

int32_t tokenizer_bos(const struct tokenizer *t) { return t->bos; }

uint64_t tokenizer_digest(const struct tokenizer *t) { return t->digest; }

/* ---- encoding ---- */

static enum rc encode_piece(struct tokenizer *t, const char *piece, size_t len, struct token_list *out, struct err *e)
{
    t->piece_ids.len = 0;
    for (size_t i = 0; i < len; i++) {
        int32_t id = t->byte_ids[(unsigned char)piece[i]];
        if (id >= 0 && !token_list_push(&t->piece_ids, id)) return err_no_memory(e);
    }
    if (!bpe_merge(t->bpe, t->piece_ids.ids, t->piece_ids.len, out)) return err_no_memory(e);
    return RC_OK;
}

/* The normal token that a whole piece is, -1 for none. */
static int32_t whole_piece(const struct tokenizer *t, const char *piece, size_t len)
{
    char text[MAX_TOKEN_BYTES];
    size_t n = 0;
    if (len > MAX_TOKEN_BYTES / 2) return -1; /* a byte takes one or two bytes in the alphabet */
    for (size_t i = 0; i < len; i++) {
        int32_t id = t->byte_ids[(unsigned char)piece[i]];
        if (id < 0) return -1;
        size_t part_len;
        const char *part = text_of(t, id, &part_len);
        memcpy(text + n, part, part_len);
        n += part_len;
    }
    int32_t id = find_id(t, text, n);
    return id >= 0 && t->types[id] == TOKEN_NORMAL ? id : -1;
}

/* Text without special tokens. */
static enum rc encode_plain(struct tokenizer *t, const char *text, size_t len, struct token_list *out, struct err *e)
{
    if (t->normalize) {
        buf_clear(&t->normal);
        if (!nfc_append(&t->normal, text, len)) return err_no_memory(e);
        text = t->normal.data;
        len = t->normal.len;
    }
    splitter_start(t->splitter, text, len);
    for (;;) {
        const char *piece;
        size_t n;
        enum rc rc = splitter_next(t->splitter, &piece, &n, e);
        if (rc != RC_OK || n == 0) return rc;
        int32_t whole = t->whole_pieces ? whole_piece(t, piece, n) : -1;
        if (whole >= 0)
            rc = token_list_push(out, whole) ? RC_OK : err_no_memory(e);
        else
            rc = encode_piece(t, piece, n, out, e);
        if (rc != RC_OK) return rc;
    }
}

/* First index in specials[from..to) whose text has a byte >= low at place depth; texts share the bytes before it. */
static size_t lower_bound(const struct tokenizer *t, size_t from, size_t to, size_t depth, unsigned low)
{
    while (from < to) {
        size_t middle = from + (to - from) / 2, len;
        const char *text = text_of(t, t->specials[middle], &len);
        if (len <= depth || (unsigned char)text[depth] < low)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

/* The longest special token that text starts with, -1 for none. */
static int32_t special_at(const struct tokenizer *t, const char *text, size_t len, bool with_control)
{
    int32_t best = -1;
    size_t from = t->special_from[(unsigned char)text[0]], to = t->special_from[(unsigned char)text[0] + 1];
    for (size_t depth = 1; from < to; depth++) {
        size_t n;
        text_of(t, t->specials[from], &n); /* the shortest of those that share depth bytes comes first */
        if (n == depth) {
            if (with_control || !is_control(t, t->specials[from])) best = t->specials[from];
            from++;
        }
        if (depth == len) break;
        unsigned next = (unsigned char)text[depth];
        from = lower_bound(t, from, to, depth, next);
        to = lower_bound(t, from, to, depth, next + 1);
    }
    return best;
}

static enum rc encode_valid(struct tokenizer *t, const char *text, size_t len, bool parse_special,
                            struct token_list *out, struct err *e)
{
    size_t plain = 0; /* start of the text not yet encoded */
    for (size_t at = 0; at < len;) {
        int32_t id = special_at(t, text + at, len - at, parse_special);
        if (id < 0) {
            at++;
            continue;
        }
        enum rc rc = encode_plain(t, text + plain, at - plain, out, e);
        if (rc != RC_OK) return rc;
        if (!token_list_push(out, id)) return err_no_memory(e);
        size_t n;
        text_of(t, id, &n);
        at += n;
        plain = at;
    }
    return encode_plain(t, text + plain, len - plain, out, e);
}

/* The text with U+FFFD for every byte that is no character or part of one. */
static bool make_valid(struct buf *out, const char *text, size_t len)
{
    buf_clear(out);
    for (size_t at = 0; at < len;) {
        struct utf8_step s = utf8_next(text + at, len - at);
        bool good = s.kind == UTF8_CHAR;
        if (!(good ? buf_append(out, text + at, s.n_bytes) : buf_append_str(out, "\xef\xbf\xbd"))) return false;
        at += good ? s.n_bytes : 1;
    }
    return true;
}

/* Scratch left by an unusually long text is given back, so that one large document does not stay in memory. */
static void trim(struct tokenizer *t)
{
    enum { KEEP_BYTES = 1 << 18 };
    bpe_trim(t->bpe);
    if (t->valid.cap > KEEP_BYTES) buf_free(&t->valid);
    if (t->normal.cap > KEEP_BYTES) buf_free(&t->normal);
    if (t->piece_ids.cap > KEEP_BYTES / sizeof *t->piece_ids.ids) token_list_free(&t->piece_ids);
}

enum rc tokenizer_encode(struct tokenizer *t, const char *text, size_t len, bool parse_special, struct token_list *out,
                         struct err *e)
{
    size_t before = out->len;
    enum rc rc = RC_OK;
    if (!utf8_valid(text, len)) {
        if (!make_valid(&t->valid, text, len)) {
            buf_free(&t->valid);
            return err_no_memory(e);
        }
        text = t->valid.data;
        len = t->valid.len;
    }
    if (len > INT32_MAX / 4) /* positions inside a piece are 32-bit; normalization may lengthen a text up to 3 times */
        rc = err_set(e, RC_BAD_INPUT, 0, "text_too_long", "a text of %zu bytes cannot be tokenized at once", len);
    else
        rc = encode_valid(t, text, len, parse_special, out, e);
    if (rc != RC_OK) out->len = before;
    trim(t);
    return rc;
}

/* ---- decoding ---- */

/* Bytes of a text in the alphabet; false when it holds anything else, and then out is as before. */
static bool append_alphabet(const struct tokenizer *t, const char *text, size_t len, struct buf *out)
{
    size_t before = out->len;
    for (size_t at = 0; at < len;) {
        struct utf8_step s = utf8_next(text + at, len - at);
        int16_t byte = s.code < MAX_ALPHABET ? t->bytes_of[s.code] : -1;
        if (byte < 0) {
            out->len = before;
            return false;
        }
        char c = (char)byte;
        buf_append(out, &c, 1);
        at += s.n_bytes;
    }
    return true;
}

bool tokenizer_decode(const struct tokenizer *t, int32_t id, bool show_special, struct buf *out)
{
    if (id < 0 || id >= t->n) return !out->failed;
    size_t len;
    const char *text = text_of(t, id, &len);
    bool hidden = is_control(t, id) || t->types[id] == TOKEN_UNUSED;
    if (hidden && !show_special) return !out->failed;
    if (hidden || t->types[id] == TOKEN_USER || !append_alphabet(t, text, len, out)) buf_append(out, text, len);
    return !out->failed;
}
