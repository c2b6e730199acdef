/* tokenizer_split: the pre-tokenizers' regular expressions, run by PCRE2.
 *
 * All patterns are anchored and together match every character, so that pieces follow each other without a gap.
 * smollm needs two passes: the first cuts the text at single number characters, the second runs GPT-2's pattern on what
 * lies between, whose look-ahead must see the end of its own stretch and not the digit behind it.
 *
 * White space is written out as Unicode's White_Space (9..D, 85 and all separators): PCRE2's own \s would also take
 * U+180E, which the tokenizers' library does not.
 *
 * Cost: a failing alternative scans at most the run of white space that the next one then takes whole, so matching is
 * linear in the text. PCRE2 counts its steps, and the limit grows with the text, so only a fault in a pattern can reach
 * it. Single-class repeats take no stack a character, neither interpreted nor compiled. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer_split.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* Bodies of character classes: white space; white space, letters and numbers. */
#define SPACE "\\x09-\\x0d\\x{85}\\p{Z}"
#define WORDS SPACE "\\p{L}\\p{N}"
#define SPACE_TAIL "|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"

#define GPT2_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" WORDS "]+" SPACE_TAIL
/* Qwen2, Qwen3.5 and Llama 3 differ in what a word is made of (letters; and marks) and in how many digits make a piece. */
#define LLAMA_PATTERN(letters, digits)                                                                                 \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[" letters "]+|" digits "| ?[^" SPACE letters                 \
    "\\p{N}]+[\\r\\n]*|[" SPACE "]*[\\r\\n]+" SPACE_TAIL
/* The same expressions as the tokenizers' library's files spell them. */
#define LLAMA_PUBLISHED(word, letters, digits)                                                                         \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?" word "+|" digits "| ?[^\\s" letters                          \
    "\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define MARKED "\\p{L}\\p{M}"

enum {
    STEPS_BASE = 1000000, /* matching steps allowed for a piece, and … */
    STEPS_PER_BYTE = 16,  /* … for every byte still to be split */
    MATCH_DEPTH = 1000,   /* nested backtracking points; the patterns need fewer than ten */
    MATCH_HEAP_KIB = 16384
};

struct pre {
    const char *name;
    const char *cut;       /* first pass, NULL: none */
    const char *pattern;   /* second pass */
    const char *published; /* what a Split in a tokenizer.json says, NULL: it is not written as one expression */
};

static const struct pre PRES[] = {
    [PRE_GPT2] = {"gpt-2", NULL, GPT2_PATTERN, NULL},
    [PRE_SMOLLM] = {"smollm", "\\p{N}|\\P{N}+", GPT2_PATTERN, NULL},
    [PRE_QWEN2] = {"qwen2", NULL, LLAMA_PATTERN("\\p{L}", "\\p{N}"), LLAMA_PUBLISHED("\\p{L}", "\\p{L}", "\\p{N}")},
    [PRE_QWEN35] = {"qwen35", NULL, LLAMA_PATTERN(MARKED, "\\p{N}"),
                    LLAMA_PUBLISHED("[" MARKED "]", MARKED, "\\p{N}")},
    [PRE_LLAMA_BPE] = {"llama-bpe", NULL, LLAMA_PATTERN("\\p{L}", "\\p{N}{1,3}"),
                       LLAMA_PUBLISHED("\\p{L}", "\\p{L}", "\\p{N}{1,3}")},
};

struct splitter {
    pcre2_code *cut, *pattern; /* cut: NULL for one pass */
    pcre2_match_data *match;
    pcre2_match_context *context;
    const char *text;
    size_t len, at;
    size_t stretch_end; /* end of the stretch the second pass is in; at when the first pass comes next */
};

bool pre_kind_parse(const char *name, size_t len, enum pre_kind *out)
{
    for (size_t i = 0; i < sizeof PRES / sizeof PRES[0]; i++) {
        if (strlen(PRES[i].name) != len || memcmp(PRES[i].name, name, len) != 0) continue;
        *out = (enum pre_kind)i;
        return true;
    }
    return false;
}

const char *pre_kind_name(enum pre_kind kind) { return PRES[kind].name; }

bool pre_kind_published(const char *regex, enum pre_kind *out)
{
    for (size_t i = 0; i < sizeof PRES / sizeof PRES[0]; i++) {
        if (!PRES[i].published || strcmp(PRES[i].published, regex) != 0) continue;
        *out = (enum pre_kind)i;
        return true;
    }
    return false;
}

static enum rc compile(const char *pattern, bool jit, pcre2_code **out, struct err *e)
{
    int error;
    PCRE2_SIZE offset;
    uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED;
    *out = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, options, &error, &offset, NULL);
    if (!*out) {
        char reason[128] = "";
        pcre2_get_error_message(error, (PCRE2_UCHAR *)reason, sizeof reason);
        return err_set(e, RC_FATAL, EXIT_INTERNAL, "tokenizer_pattern", "PCRE2 refuses a splitting pattern: %s",
                       reason);
    }
    /* Without executable memory this fails and pcre2_match interprets. */
    if (jit) (void)pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE);
    return RC_OK;
}

enum rc splitter_open(enum pre_kind kind, bool jit, struct splitter **out, struct err *e)
{
    *out = NULL;
    struct splitter *s = calloc(1, sizeof *s);
    if (!s) return err_no_memory(e);
    enum rc rc = RC_OK;
    if (PRES[kind].cut) rc = compile(PRES[kind].cut, jit, &s->cut, e);
    if (rc == RC_OK) rc = compile(PRES[kind].pattern, jit, &s->pattern, e);
    if (rc != RC_OK) goto fail;
    s->match = pcre2_match_data_create(1, NULL);
    s->context = pcre2_match_context_create(NULL);
    if (!s->match || !s->context) {
        rc = err_no_memory(e);
        goto fail;
    }
    pcre2_set_depth_limit(s->context, MATCH_DEPTH);
    pcre2_set_heap_limit(s->context, MATCH_HEAP_KIB);
    *out = s;
    return RC_OK;
fail:
    splitter_close(s);
    return rc;
}

void splitter_close(struct splitter *s)
{
    if (!s) return;
    pcre2_match_context_free(s->context);
    pcre2_match_data_free(s->match);
    pcre2_code_free(s->pattern);
    pcre2_code_free(s->cut);
    free(s);
}

void splitter_start(struct splitter *s, const char *text, size_t len)
{
    s->text = text;
    s->len = len;
    s->at = s->stretch_end = 0;
    size_t steps = STEPS_BASE;
    if (len > (UINT32_MAX - STEPS_BASE) / STEPS_PER_BYTE)
        steps = UINT32_MAX;
    else
        steps += len * STEPS_PER_BYTE;
    pcre2_set_match_limit(s->context, (uint32_t)steps);
}

/* Length of the match of code at the current place, whose subject ends at end. */
static enum rc match_here(struct splitter *s, const pcre2_code *code, size_t end, size_t *n, struct err *e)
{
    PCRE2_SPTR subject = (PCRE2_SPTR)(s->text + s->at);
    size_t len = end - s->at;
    int found = pcre2_match(code, subject, len, 0, PCRE2_NO_UTF_CHECK, s->match, s->context);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT)
        found = pcre2_match(code, subject, len, 0, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s->match, s->context);
    *n = found > 0 ? pcre2_get_ovector_pointer(s->match)[1] : 0;
    if (*n > 0) return RC_OK;
    if (found == PCRE2_ERROR_NOMEMORY) return err_no_memory(e);
    return err_set(e, RC_BAD_INPUT, 0, "tokenizer_pattern", "splitting stopped at byte %zu of %zu (PCRE2: %d)", s->at,
                   s->len, found);
}

enum rc splitter_next(struct splitter *s, const char **piece, size_t *piece_len, struct err *e)
{
    *piece = s->text + s->at;
    *piece_len = 0;
    if (s->at == s->len) return RC_OK;
    size_t n;
    if (!s->cut) {
        s->stretch_end = s->len;
    } else if (s->at == s->stretch_end) {
        enum rc rc = match_here(s, s->cut, s->len, &n, e);
        if (rc != RC_OK) return rc;
        s->stretch_end = s->at + n;
        /* A single number character is a piece by itself; GPT-2's pattern then takes it whole. */
    }
    enum rc rc = match_here(s, s->pattern, s->stretch_end, &n, e);
    if (rc != RC_OK) return rc;
    s->at += n;
    *piece_len = n;
    return RC_OK;
}

void splitter_unicode(char out[24]) { pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, out); }
