/* engine_prefix: what several prompts begin with is computed once.
 *
 * Each rank has a store (prefix_store) of its own share: blocks of keys and values, and the state at positions where prompts part.
 * Three things happen here.
 *
 * Waiting. Rank 0 admits no request while another, running or ahead of it in the queue, has yet to compute what both begin with.
 * Then the request finds it in the store.
 *
 * Finding. Before a request is admitted the plan probes it: every rank says which positions its store can serve, all take the
 * greatest that is common to all, read and verify it, and vote. One that cannot leaves the next lower one; 0 is no hit. What was
 * read waits in host memory, as after a preemption, and the request begins at that position.
 *
 * Keeping. Prompt rows are cut where the prompt parts from that of another live request, or of one that the owner knows will come, and
 * after such a step every rank puts what it has into its store. Full by quota or floor is no matter. A disk that takes no more ends
 * the run: what else it is to take would be lost next. A rank whose index fails otherwise goes on without it; it offers
 * nothing, so nobody hits.
 *
 * No answer depends on any of this: a position's keys, values and state have the same bits whoever computed them. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "engine_private.h"

enum { MOST_TRIES = 8 };
static_assert((int)PREFIX_BLOCK_TOKENS == (int)KV_PAGE_TOKENS, "a block is a page");

/* ---- the queue ---- */

/* While a request is in the queue, what it may find there is not thrown out for others' sake: ids are the order of use. */
static enum rc mark(struct engine *e, const struct sequence *s, int64_t next_use, struct err *err)
{
    const int position = s->prompt_tokens / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    return e->prefixes && position ? prefix_store_mark(e->prefixes, s->tokens, position, next_use, err) : RC_OK;
}

enum rc engine_prefix_submitted(struct engine *e, struct sequence *s, struct err *err)
{
    static const struct prefix_key here; /* these keys are compared with one another only */
    const int blocks = s->prompt_tokens / KV_PAGE_TOKENS;
    if (!e->o.prefixes || s->cold) return RC_OK;
    enum rc rc = mark(e, s, s->id < PREFIX_NEVER ? (int64_t)s->id : PREFIX_NEVER - 1, err);
    if (rc != RC_OK || e->seat) return rc;
    s->keys = malloc(((size_t)blocks + 1) * sizeof *s->keys);
    if (!s->keys) return err_no_memory(err);
    prefix_chain(&here, s->tokens, s->prompt_tokens, s->keys);
    return RC_OK;
}

enum rc engine_prefix_left(struct engine *e, const struct sequence *s, struct err *err)
{
    return s->state == PLAN_QUEUED && !s->probed ? mark(e, s, PREFIX_NEVER, err) : RC_OK;
}

/* ---- rank 0: what requests have in common ---- */

/* Tokens that both prompts begin with, in whole blocks, as far as `s` could use them: its last token is always computed. */
static int common_tokens(const struct sequence *s, const struct sequence *other)
{
    const int mine = (s->prompt_tokens - 1) / KV_PAGE_TOKENS, theirs = other->prompt_tokens / KV_PAGE_TOKENS;
    int low = 0, high = mine < theirs ? mine : theirs;
    while (low < high) { /* equal keys: equal tokens up to there */
        const int middle = (low + high + 1) / 2;
        if (memcmp(&s->keys[middle - 1], &other->keys[middle - 1], sizeof *s->keys)) high = middle - 1;
        else low = middle;
    }
    return low * KV_PAGE_TOKENS;
}

/* Somebody else, running or ahead of it in the queue, has yet to compute what both begin with. */
static bool must_wait(const struct engine *e, const struct sequence *s)
{
    bool ahead = true;
    for (const struct sequence *o = e->sequences; o; o = o->next) {
        if (o == s) ahead = false;
        if (o == s || o->retire || !o->keys || (!ahead && o->state == PLAN_QUEUED)) continue;
        if (o->computed < o->prompt_tokens && common_tokens(s, o) > o->computed) return true;
    }
    return false;
}

/* The next position at which a request that was not probed yet, or has not come yet, parts from s; 0: none. */
static int next_parting(const struct engine *e, const struct sequence *s)
{
    int next = s->branch > s->computed ? s->branch : 0;
    for (const struct sequence *o = e->sequences; o; o = o->next) {
        if (o == s || o->retire || !o->keys || o->state != PLAN_QUEUED || o->probed) continue;
        const int parting = common_tokens(o, s);
        if (parting > s->computed && parting < s->prompt_tokens && (!next || parting < next)) next = parting;
    }
    return next;
}

void engine_prefix_want(const struct engine *e, const struct sequence *s, struct plan_sequence *out)
{
    if (!e->o.prefixes || !s->keys || s->retire) return;
    if (s->state == PLAN_QUEUED) {
        out->held = must_wait(e, s);
        out->probe = !s->probed && !out->held;
    }
    if (s->computed < s->prompt_tokens) out->cut = next_parting(e, s); /* its first rows may come with its admission */
}

/* ---- finding ---- */

/* servable becomes what all ranks can serve. */
static enum rc agree(struct engine *e, uint64_t *servable, size_t words, struct err *err)
{
    enum { MOST_WORDS = LOCKSTEP_BOARD_BYTES / sizeof(uint64_t) };
    uint64_t all[MAX_RANKS * MOST_WORDS];
    enum rc rc = RC_OK;
    for (size_t at = 0; at < words && e->ranks > 1 && rc == RC_OK; at += MOST_WORDS) {
        const size_t n = words - at < MOST_WORDS ? words - at : MOST_WORDS;
        rc = lockstep_exchange(e->segment, e->seat, servable + at, n * sizeof *servable, all, err);
        for (size_t i = 0; i < n && rc == RC_OK; i++)
            for (int r = 0; r < e->ranks; r++) servable[at + i] &= all[(size_t)r * n + i];
    }
    return rc;
}

struct loading {
    struct engine *e;
    struct sequence *s;
    size_t page_bytes;
    int n_pages;
};

static void take_block(void *ctx, int block, const void *bytes)
{
    const struct loading *l = ctx;
    segment_beat(l->e->segment, l->e->seat);
    memcpy(l->s->saved + (size_t)block * l->page_bytes, bytes, l->page_bytes);
}

static void take_state(void *ctx, const void *bytes)
{
    const struct loading *l = ctx;
    memcpy(l->s->saved + (size_t)l->n_pages * l->page_bytes, bytes, model_forward_slot_bytes(l->e->forward));
}

/* This rank's share of everything up to position into s->saved. */
static bool load(struct engine *e, struct sequence *s, int position)
{
    struct loading l = {e, s, model_forward_page_bytes(e->forward), position / KV_PAGE_TOKENS};
    const struct prefix_sink sink = {&l, take_block, take_state};
    s->saved = malloc(engine_state_bytes(e, l.n_pages) + 1);
    if (s->saved && prefix_store_load(e->prefixes, s->tokens, 0, position, &sink)) return true;
    free(s->saved);
    s->saved = NULL;
    return false;
}

enum rc engine_prefix_probe(struct engine *e, struct sequence *s, struct err *err)
{
    const size_t words = PREFIX_WORDS(s->prompt_tokens);
    if (s->computed || s->cold) return mark(e, s, PREFIX_NEVER, err);
    uint64_t *servable = calloc(words, sizeof *servable);
    if (!servable) return err_no_memory(err);
    if (e->prefixes) prefix_store_lookup(e->prefixes, s->tokens, s->prompt_tokens, servable);
    enum rc rc = agree(e, servable, words, err);
    int position;
    for (int i = 0; rc == RC_OK && i < MOST_TRIES && (position = prefix_greatest(servable, s->prompt_tokens)) > 0; i++) {
        uint64_t loaded = load(e, s, position);
        rc = agree(e, &loaded, 1, err);
        if (rc == RC_OK && loaded) {
            s->computed = position;
            s->n_pages = position / KV_PAGE_TOKENS;
            s->timing.cached_tokens = position;
            break;
        }
        free(s->saved);
        s->saved = NULL;
        const int bit = position / KV_PAGE_TOKENS - 1;
        servable[bit / PREFIX_WORD_BITS] &= ~(UINT64_C(1) << bit % PREFIX_WORD_BITS);
    }
    if (rc == RC_OK) rc = mark(e, s, PREFIX_NEVER, err);
    free(servable);
    return rc;
}

/* ---- keeping ---- */

struct keeping {
    struct engine *e;
    const struct sequence *s;
};

static void give_block(void *ctx, int block, void *out)
{
    const struct keeping *k = ctx;
    segment_beat(k->e->segment, k->e->seat);
    model_forward_save_page(k->e->forward, k->s->pages[block], out);
}

static void give_state(void *ctx, void *out)
{
    const struct keeping *k = ctx;
    model_forward_save_slot(k->e->forward, k->s->slot, out);
}

enum rc engine_prefix_keep(struct engine *e, const struct sequence *s, struct err *err)
{
    struct keeping k = {e, s};
    const struct prefix_source source = {&k, give_block, give_state};
    struct err why = {0};
    char line[sizeof why.text + 320];
    if (!e->prefixes) return RC_OK;
    const enum rc rc = prefix_store_put(e->prefixes, s->tokens, s->computed, &source, &why);
    if (rc == RC_OK || rc == RC_RETRY) return RC_OK; /* full: nothing more is kept while it is */
    if (rc == RC_FAILED && why.exit_status == EXIT_IO) {
        err_set(err, RC_FATAL, EXIT_IO, why.code, "%s", why.text);
        err_place(err, why.source, 0, 0, 0);
        return RC_FATAL;
    }
    log_line(LOG_WARN, "going on without the cache: %s", err_format(&why, line, sizeof line));
    e->prefixes = NULL;
    return RC_OK;
}
