/* chat_template: the built-in prompt formats, all of the ChatML family.
 *
 * A turn is `<|im_start|>ROLE\nTEXT<|im_end|>\n`, the prompt ends with `<|im_start|>assistant\n`. A system message may only
 * come first; user and assistant turns may follow in any order.
 *
 * Plain formats take texts as they are. smollm2 and qwen2.5 put a default system turn first when the messages give none;
 * a system message, empty or not, replaces it. chatml has no default.
 *
 * Formats that think trim every text of white space, as the templates' language understands it. The prompt goes on with
 * `<think>\n`, or with an empty thought, `<think>\n\n</think>\n\n`, when thinking is off. An assistant's turn after the last
 * question holds its thought, `<think>\nTHOUGHT\n</think>\n\nTEXT`; one before it does so only while thoughts are preserved.
 * A question is a user's message that is not a tool's answer in disguise (`<tool_response>…</tool_response>`).
 *   qwen3.5 takes a thought that is not given apart out of the text: what stands before the last `</think>`.
 *   qwen3.8 does not; it preserves thoughts by default, leaves an empty system message out, and says in the system turn
 *   what effort it is to make.
 *
 * Tokens are those of the rendered text with its markup read as control tokens: between two of them, role, line end and
 * message form one stretch and are split and merged as one, which matters when a message begins with a line end. The
 * stretch is encoded as user text, so that markup inside a message stays what it is: characters.
 *
 * A model's format is recognized by parts of its template's text, which is never run. The parts are those in which the
 * families differ, so that a template with other defaults is refused and not taken for its neighbour. */
#define _GNU_SOURCE
#include "chat_template.h"

#include <stdio.h>
#include <string.h>

#include "utf8.h"

enum { MAX_MARKS = 3 };

struct format {
    const char *name;
    const char *default_system;   /* plain formats; NULL: none */
    bool thinks;
    bool has_effort;              /* and the other ways of qwen3.8 */
    const char *marks[MAX_MARKS]; /* what the model's template holds, all of them */
};

static const struct format FORMATS[CHAT_FORMATS] = {
    [CHAT_SMOLLM2] = {.name = "smollm2",
                      .default_system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
                      .marks = {"You are a helpful AI assistant named SmolLM"}},
    [CHAT_CHATML] = {.name = "chatml", .marks = {"<|im_start|>"}},
    [CHAT_QWEN25] = {.name = "qwen2.5",
                     .default_system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
                     .marks = {"You are Qwen, created by Alibaba Cloud"}},
    [CHAT_QWEN35] = {.name = "qwen3.5",
                     .thinks = true,
                     .marks = {"loop.index0 > ns.last_query_index", "enable_thinking is false", "'<think>\\n' }}"}},
    [CHAT_QWEN38] = {.name = "qwen3.8",
                     .thinks = true,
                     .has_effort = true,
                     .marks = {"reasoning_effort|default('xhigh')", "preserve_thinking is undefined or preserve_thinking is true",
                               "enable_thinking is false"}},
};

static const char START[] = "<|im_start|>", END[] = "<|im_end|>", THINK[] = "<think>", THOUGHT[] = "</think>";

static const char *const EFFORTS[] = {
    [CHAT_EFFORT_LOW] = "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the "
                        "conclusion without unnecessary elaboration.",
    [CHAT_EFFORT_MEDIUM] = "",
    [CHAT_EFFORT_XHIGH] = "Reasoning effort is set to xhigh. Please think carefully through the task, validate key "
                          "assumptions, consider plausible alternatives, and prioritize correctness, consistency, and "
                          "clarity in the final answer.",
};

const char *chat_format_name(enum chat_format f) { return FORMATS[f].name; }
bool chat_format_thinks(enum chat_format f) { return FORMATS[f].thinks; }
bool chat_format_has_effort(enum chat_format f) { return FORMATS[f].has_effort; }

/* ---- choosing ---- */

static void list_names(char out[80])
{
    size_t len = 0;
    for (int f = 0; f < CHAT_FORMATS; f++)
        len += (size_t)snprintf(out + len, 80 - len, "%s%s", f ? ", " : "", FORMATS[f].name);
}

static bool holds(const struct model_text *text, const char *part)
{
    return memmem(text->bytes, text->len, part, strlen(part)) != NULL;
}

static bool recognize(const struct model_text *template, enum chat_format *out)
{
    static const enum chat_format order[] = {CHAT_SMOLLM2, CHAT_QWEN25, CHAT_QWEN38, CHAT_QWEN35, CHAT_CHATML};
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        bool all = true;
        for (int m = 0; m < MAX_MARKS && FORMATS[order[i]].marks[m]; m++)
            all = all && holds(template, FORMATS[order[i]].marks[m]);
        /* Thinking that is none of the above is not plain ChatML. */
        if (!all || (order[i] == CHAT_CHATML && holds(template, THINK))) continue;
        *out = order[i];
        return true;
    }
    return false;
}

enum rc chat_format_choose(const char *name, const struct model_file *m, const struct tokenizer *t, enum chat_format *out,
                           struct err *e)
{
    char names[80];
    struct model_text template;
    list_names(names);
    if (name) {
        for (int f = 0; f < CHAT_FORMATS; f++) {
            if (strcmp(FORMATS[f].name, name) != 0) continue;
            *out = (enum chat_format)f;
            return RC_OK;
        }
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "unknown_chat_format", "unknown chat format %s; there are %s", name,
                       names);
    }
    bool given = model_file_chat_template(m, &template);
    if (given && recognize(&template, out)) return RC_OK;
    if (!given && tokenizer_find(t, START) >= 0 && tokenizer_find(t, THINK) < 0) {
        *out = CHAT_CHATML;
        return RC_OK;
    }
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "chat_format_unknown", "%s; --chat-format chooses one (%s)",
                         given ? "the model's chat template is none of the built-in ones" : "the model has no chat template",
                         names);
    err_place(e, model_file_path(m), 0, 0, 0);
    return rc;
}

/* ---- texts ---- */

struct span {
    const char *at;
    size_t len;
};

/* What the templates' language takes for white space. */
static bool is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

/* Length of the white space character that s ends with, 0 for none. */
static size_t space_at_end(struct span s)
{
    for (size_t n = 1; n <= 3 && n <= s.len; n++) {
        struct utf8_step step = utf8_next(s.at + s.len - n, n);
        if (step.kind == UTF8_CHAR) return step.n_bytes == n && is_space(step.code) ? n : 0;
    }
    return 0;
}

static struct span trim(struct span s)
{
    while (s.len) {
        struct utf8_step step = utf8_next(s.at, s.len);
        if (step.kind != UTF8_CHAR || !is_space(step.code)) break;
        s = (struct span){s.at + step.n_bytes, s.len - step.n_bytes};
    }
    for (size_t n; (n = space_at_end(s)) != 0;) s.len -= n;
    return s;
}

static struct span skip_line_ends(struct span s)
{
    while (s.len && s.at[0] == '\n') s = (struct span){s.at + 1, s.len - 1};
    return s;
}

static bool starts_with(struct span s, const char *text)
{
    size_t len = strlen(text);
    return s.len >= len && memcmp(s.at, text, len) == 0;
}

static bool ends_with(struct span s, const char *text)
{
    size_t len = strlen(text);
    return s.len >= len && memcmp(s.at + s.len - len, text, len) == 0;
}

/* What follows the last mark, or all of s. */
static struct span after_last(struct span s, const char *mark)
{
    size_t len = strlen(mark);
    for (const char *found; s.len && (found = memmem(s.at, s.len, mark, len));)
        s = (struct span){found + len, s.len - (size_t)(found - s.at) - len};
    return s;
}

static struct span text_of(const struct chat_message *m) { return (struct span){m->len ? m->text : "", m->len}; }

/* An assistant's thought and its text. */
static void take_apart(const struct chat *c, const struct chat_message *m, struct span *thought, struct span *text)
{
    *text = trim(text_of(m));
    *thought = (struct span){"", 0};
    if (m->reasoning) {
        *thought = trim((struct span){m->reasoning, m->reasoning_len});
        return;
    }
    const char *end = text->len ? memmem(text->at, text->len, THOUGHT, strlen(THOUGHT)) : NULL;
    if (FORMATS[c->format].has_effort || !end) return;
    /* Trimming covers the line ends that the template takes off before it. */
    *thought = trim(after_last((struct span){text->at, (size_t)(end - text->at)}, THINK));
    *text = skip_line_ends(after_last(*text, THOUGHT));
}

/* ---- messages ---- */

static enum rc check_messages(const struct chat *c, struct err *e)
{
    if (c->n_messages == 0) return err_set(e, RC_BAD_INPUT, 0, "invalid_messages", "there is no message");
    for (size_t i = 0; i < c->n_messages; i++) {
        const char *role = c->messages[i].role;
        bool system = strcmp(role, "system") == 0;
        if (system && i > 0)
            return err_set(e, RC_BAD_INPUT, 0, "invalid_messages",
                           "message %zu: a system message can only be the first", i);
        if (!system && strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0)
            return err_set(e, RC_BAD_INPUT, 0, "invalid_messages",
                           "message %zu: its role is none of system, user, assistant", i);
    }
    return RC_OK;
}

/* Index of the last question; n_messages for none. */
static size_t last_question(const struct chat *c)
{
    for (size_t i = c->n_messages; i-- > 0;) {
        struct span text = trim(text_of(&c->messages[i]));
        bool answer = starts_with(text, "<tool_response>") && ends_with(text, "</tool_response>");
        if (strcmp(c->messages[i].role, "user") == 0 && !answer) return i;
    }
    return c->n_messages;
}

/* ---- tokens ---- */

struct sink {
    struct tokenizer *t;
    struct token_list *tokens;
    struct buf stretch; /* characters since the last control token */
    struct err *e;
};

static enum rc put(struct sink *s, const char *text, size_t len)
{
    return buf_append(&s->stretch, text, len) ? RC_OK : err_no_memory(s->e);
}

static enum rc put_text(struct sink *s, const char *text) { return put(s, text, strlen(text)); }

static enum rc flush(struct sink *s)
{
    enum rc rc = tokenizer_encode(s->t, s->stretch.data ? s->stretch.data : "", s->stretch.len, false, s->tokens, s->e);
    buf_clear(&s->stretch);
    return rc;
}

static enum rc put_control(struct sink *s, const char *markup)
{
    enum rc rc = flush(s);
    return rc != RC_OK ? rc : tokenizer_encode(s->t, markup, strlen(markup), true, s->tokens, s->e);
}

static enum rc put_opening(struct sink *s, const char *role)
{
    enum rc rc = put_control(s, START);
    if (rc == RC_OK) rc = put_text(s, role);
    return rc == RC_OK ? put_text(s, "\n") : rc;
}

static enum rc put_closing(struct sink *s)
{
    enum rc rc = put_control(s, END);
    return rc == RC_OK ? put_text(s, "\n") : rc;
}

static enum rc put_turn(struct sink *s, const char *role, struct span text)
{
    enum rc rc = put_opening(s, role);
    if (rc == RC_OK) rc = put(s, text.at, text.len);
    return rc == RC_OK ? put_closing(s) : rc;
}

static enum rc put_thought(struct sink *s, struct span thought)
{
    enum rc rc = put_control(s, THINK);
    if (rc == RC_OK) rc = put_text(s, "\n");
    if (rc == RC_OK) rc = put(s, thought.at, thought.len);
    if (rc == RC_OK) rc = put_text(s, "\n");
    if (rc == RC_OK) rc = put_control(s, THOUGHT);
    return rc == RC_OK ? put_text(s, "\n\n") : rc;
}

static enum rc put_plain(const struct chat *c, struct sink *s)
{
    enum rc rc = RC_OK;
    const char *system = FORMATS[c->format].default_system;
    if (system && strcmp(c->messages[0].role, "system") != 0)
        rc = put_turn(s, "system", (struct span){system, strlen(system)});
    for (size_t i = 0; i < c->n_messages && rc == RC_OK; i++)
        rc = put_turn(s, c->messages[i].role, text_of(&c->messages[i]));
    return rc == RC_OK ? put_opening(s, "assistant") : rc;
}

/* The system turn of a format that thinks: the effort, the message, both or neither. */
static enum rc put_system(const struct chat *c, struct sink *s)
{
    bool given = strcmp(c->messages[0].role, "system") == 0, effort_speaks = FORMATS[c->format].has_effort;
    struct span text = given ? trim(text_of(&c->messages[0])) : (struct span){"", 0};
    enum chat_effort effort = c->options.effort != CHAT_EFFORT_DEFAULT ? c->options.effort : CHAT_EFFORT_XHIGH;
    const char *instruction = effort_speaks && c->options.thinking != CHAT_OFF ? EFFORTS[effort] : "";
    if (!*instruction && (!given || (effort_speaks && text.len == 0))) return RC_OK;
    enum rc rc = put_opening(s, "system");
    if (rc == RC_OK) rc = put_text(s, instruction);
    if (rc == RC_OK && *instruction && text.len) rc = put_text(s, "\n\n");
    if (rc == RC_OK) rc = put(s, text.at, text.len);
    return rc == RC_OK ? put_closing(s) : rc;
}

static enum rc put_answer(const struct chat *c, struct sink *s, const struct chat_message *m, bool with_thought)
{
    struct span thought, text;
    take_apart(c, m, &thought, &text);
    enum rc rc = put_opening(s, "assistant");
    if (rc == RC_OK && with_thought) rc = put_thought(s, thought);
    if (rc == RC_OK) rc = put(s, text.at, text.len);
    return rc == RC_OK ? put_closing(s) : rc;
}

static enum rc put_thinking(const struct chat *c, struct sink *s)
{
    size_t question = last_question(c);
    bool preserve = c->options.preserve_thinking == CHAT_ON ||
                    (c->options.preserve_thinking == CHAT_DEFAULT && FORMATS[c->format].has_effort);
    if (question == c->n_messages)
        return err_set(s->e, RC_BAD_INPUT, 0, "invalid_messages", "there is no user's question among the messages");
    enum rc rc = put_system(c, s);
    for (size_t i = 0; i < c->n_messages && rc == RC_OK; i++) {
        const struct chat_message *m = &c->messages[i];
        if (strcmp(m->role, "user") == 0)
            rc = put_turn(s, "user", trim(text_of(m)));
        else if (strcmp(m->role, "assistant") == 0)
            rc = put_answer(c, s, m, preserve || i > question);
    }
    if (rc == RC_OK) rc = put_opening(s, "assistant");
    if (rc != RC_OK) return rc;
    if (c->options.thinking == CHAT_OFF) return put_thought(s, (struct span){"", 0});
    rc = put_control(s, THINK);
    return rc == RC_OK ? put_text(s, "\n") : rc;
}

/* The format's markup must be tokens of the model, or a prompt would be nonsense to it. */
static enum rc check_markup(enum chat_format f, struct tokenizer *t, struct err *e)
{
    const char *markup[] = {START, END, THINK, THOUGHT};
    size_t n = FORMATS[f].thinks ? 4 : 2;
    for (size_t i = 0; i < n; i++) {
        struct token_list ids = {0};
        enum rc rc = tokenizer_encode(t, markup[i], strlen(markup[i]), true, &ids, e);
        bool one = ids.len == 1 && ids.ids[0] == tokenizer_find(t, markup[i]);
        token_list_free(&ids);
        if (rc != RC_OK) return rc;
        if (!one)
            return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "chat_format_unusable",
                           "chat format %s needs the token %s, which the model does not have", FORMATS[f].name,
                           markup[i]);
    }
    return RC_OK;
}

enum rc chat_template_encode(const struct chat *c, struct tokenizer *t, struct token_list *out, struct err *e)
{
    enum rc rc = check_messages(c, e);
    if (rc == RC_OK) rc = check_markup(c->format, t, e);
    if (rc != RC_OK) return rc;
    size_t before = out->len;
    struct sink s = {.t = t, .tokens = out, .e = e};
    rc = FORMATS[c->format].thinks ? put_thinking(c, &s) : put_plain(c, &s);
    if (rc == RC_OK) rc = flush(&s);
    buf_free(&s.stretch);
    if (rc != RC_OK) out->len = before;
    return rc;
}
