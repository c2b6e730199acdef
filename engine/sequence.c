/* sequence: what one request owns, and when it is over.
 *
 * Stop strings are looked for in the decoded bytes, across token borders: after each token the search starts one stop
 * length before the new bytes. The earliest match wins and the text is cut before it. */
#define _GNU_SOURCE
#include "sequence.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "kv_pages.h"

static enum rc copy_stops(struct sequence *s, const struct engine_request *r, struct err *e)
{
    if (!r->n_stop) return RC_OK;
    s->stop = calloc((size_t)r->n_stop, sizeof *s->stop);
    if (!s->stop) return err_no_memory(e);
    s->n_stop = r->n_stop;
    for (int i = 0; i < r->n_stop; i++) {
        s->stop[i] = strdup(r->stop[i]);
        if (!s->stop[i]) return err_no_memory(e);
        size_t len = strlen(r->stop[i]);
        if (len > s->longest_stop) s->longest_stop = len;
    }
    return RC_OK;
}

enum rc sequence_open(const struct engine_request *r, bool trace, struct sequence **out, struct err *e)
{
    struct sequence *s = calloc(1, sizeof *s);
    if (!s) return err_no_memory(e);
    s->id = r->id;
    s->state = PLAN_QUEUED;
    s->prompt_tokens = (int)r->prompt_tokens;
    s->max_tokens = r->max_tokens;
    const size_t last = r->prompt_tokens - 1; /* is always computed */
    s->branch = (int)(r->branch_tokens < last ? r->branch_tokens : last) / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    s->sampling = r->sampling;
    s->ignore_end = r->ignore_end;
    static const unsigned char none[CHECKPOINT_KEY_BYTES];
    memcpy(s->key, r->key, sizeof s->key);
    s->keyed = memcmp(s->key, none, sizeof none) != 0;
    s->cold = r->cold;
    s->resume = r->resume && s->keyed && !s->cold;
    s->submitted_us = clock_now_us();
    size_t room = r->prompt_tokens + (size_t)r->max_tokens;
    s->tokens = malloc(room * sizeof *s->tokens);
    s->pages = malloc((size_t)kv_pages_for((int64_t)room) * sizeof *s->pages);
    if (trace) s->trace = calloc((size_t)r->max_tokens, 2 * sizeof *s->trace);
    enum rc rc = s->tokens && s->pages && (s->trace || !trace) ? copy_stops(s, r, e) : err_no_memory(e);
    if (rc == RC_OK) {
        memcpy(s->tokens, r->prompt, r->prompt_tokens * sizeof *s->tokens);
        s->token_chain = XXH3_64bits(s->tokens, r->prompt_tokens * sizeof *s->tokens);
        bool counted = sampling_needs_counts(&s->sampling);
        for (size_t i = 0; i < r->prompt_tokens && counted && rc == RC_OK; i++)
            if (!token_counts_add(&s->counts, r->prompt[i], false)) rc = err_no_memory(e);
    }
    if (rc == RC_OK) *out = s;
    else sequence_free(s);
    return rc;
}

void sequence_free(struct sequence *s)
{
    if (!s) return;
    for (int i = 0; i < s->n_stop; i++) free(s->stop[i]);
    free(s->stop);
    free(s->tokens);
    free(s->pages);
    free(s->saved);
    checkpoint_close(s->checkpoint);
    free(s->keys);
    free(s->trace);
    draft_index_free(&s->index);
    token_counts_free(&s->counts);
    buf_free(&s->bytes);
    buf_free(&s->text);
    free(s);
}

enum rc sequence_count(struct sequence *s, int32_t token, struct err *e)
{
    return !sampling_needs_counts(&s->sampling) || token_counts_add(&s->counts, token, true) ? RC_OK : err_no_memory(e);
}

void sequence_append(struct sequence *s, int32_t token)
{
    s->tokens[s->prompt_tokens + s->sampled++] = token;
    s->token_chain = XXH3_64bits_withSeed(&token, sizeof token, s->token_chain);
}

/* Offset of the earliest stop string that ends after old_len, or SIZE_MAX. */
static size_t find_stop(const struct sequence *s, size_t old_len)
{
    size_t from = old_len > s->longest_stop ? old_len - s->longest_stop : 0, best = SIZE_MAX;
    for (int i = 0; i < s->n_stop && s->bytes.len > from; i++) {
        const char *at = memmem(s->bytes.data + from, s->bytes.len - from, s->stop[i], strlen(s->stop[i]));
        if (at && (size_t)(at - s->bytes.data) < best) best = (size_t)(at - s->bytes.data);
    }
    return best;
}

bool sequence_finish_check(struct sequence *s, const struct tokenizer *t, struct err *e)
{
    int32_t token = s->tokens[s->prompt_tokens + s->answered++];
    bool end = !s->ignore_end && tokenizer_is_end(t, token);
    size_t old_len = s->bytes.len, text_len;
    if (!end && !tokenizer_decode(t, token, false, &s->bytes)) err_no_memory(e);
    size_t stop = end || !s->n_stop ? SIZE_MAX : find_stop(s, old_len);
    if (end || stop != SIZE_MAX) {
        s->finish = FINISH_STOP;
        text_len = stop != SIZE_MAX ? stop : s->bytes.len;
    } else if (s->answered >= s->max_tokens) {
        s->finish = FINISH_LENGTH;
        text_len = s->bytes.len;
    } else {
        return false;
    }
    if (!utf8_append_complete(&s->text, s->bytes.data ? s->bytes.data : "", text_len)) err_no_memory(e);
    return true;
}
