/* rank_wire: frames between runner and ranks, encoded and decoded.
 *
 * Writing appends to a buffer and patches the length in afterwards; a frame that would pass WIRE_MAX_FRAME_BYTES is taken
 * back and refused, so a peer never sees one that it must reject. Reading goes through one cursor that knows how many bytes
 * are left and turns sticky on the first overrun: a decoder reads all its fields and asks once at the end. Counts are
 * compared with the bytes that are left before anything is allocated, so the memory taken is bounded by a small multiple
 * of the frame that was really received, whatever its counts claim.
 *
 * Both sides come from one build, yet neither trusts the other: a rank that has gone wrong may write anything. Enumerations,
 * flags and lengths are therefore checked here; ids, sampling ranges and the vocabulary are the engine's to check.
 *
 * A decoded frame borrows: texts point into the received bytes, arrays (which would not be aligned there) and stop strings
 * (which need their NUL) are copied into `store`, reserved in one piece so that pointers into it never move. */
#include "rank_wire.h"

#include <limits.h>
#include <string.h>

enum { FRAME_HEAD_BYTES = 6, MAX_STOPS = 16 };

/* ---- writing ---- */

static void put_u8(struct buf *out, uint8_t v) { buf_append(out, &v, 1); }

static void put_u16(struct buf *out, uint16_t v)
{
    unsigned char b[2] = {(unsigned char)v, (unsigned char)(v >> 8)};
    buf_append(out, b, sizeof b);
}

static void put_u32(struct buf *out, uint32_t v)
{
    unsigned char b[4] = {(unsigned char)v, (unsigned char)(v >> 8), (unsigned char)(v >> 16), (unsigned char)(v >> 24)};
    buf_append(out, b, sizeof b);
}

static void put_u64(struct buf *out, uint64_t v)
{
    put_u32(out, (uint32_t)v);
    put_u32(out, (uint32_t)(v >> 32));
}

static void put_i32(struct buf *out, int32_t v) { put_u32(out, (uint32_t)v); }
static void put_i64(struct buf *out, int64_t v) { put_u64(out, (uint64_t)v); }

static void put_f32(struct buf *out, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    put_u32(out, bits);
}

static void put_bytes(struct buf *out, const char *bytes, size_t n)
{
    put_u32(out, (uint32_t)n);
    buf_append(out, bytes, n);
}

static void put_text(struct buf *out, const char *text) { put_bytes(out, text, strlen(text)); }

static void put_ids(struct buf *out, const int32_t *ids, size_t n)
{
    put_u32(out, (uint32_t)n);
    if (!buf_reserve(out, n * 4)) return;
    for (size_t i = 0; i < n; i++) put_i32(out, ids[i]);
}

static void put_hello(struct buf *out, const struct wire_hello *h)
{
    put_u32(out, h->version);
    put_u32(out, h->rank);
    put_u32(out, h->ranks);
    put_u32(out, h->context);
    put_u64(out, h->partition_digest);
    put_u64(out, h->kv_tokens);
    put_u64(out, h->weight_bytes);
    put_u64(out, h->kv_bytes);
    put_u64(out, h->load_us);
    put_text(out, h->identity);
}

static void put_submit(struct buf *out, const struct engine_request *r)
{
    put_u64(out, r->id);
    put_i32(out, r->max_tokens);
    buf_append(out, r->key, sizeof r->key);
    put_u64(out, r->branch_tokens);
    put_u8(out, r->ignore_end);
    put_u8(out, r->resume);
    put_u8(out, r->cold);
    put_f32(out, r->sampling.temperature);
    put_f32(out, r->sampling.top_p);
    put_f32(out, r->sampling.min_p);
    put_i32(out, r->sampling.top_k);
    put_f32(out, r->sampling.presence_penalty);
    put_f32(out, r->sampling.frequency_penalty);
    put_f32(out, r->sampling.repetition_penalty);
    put_u64(out, r->sampling.seed);
    put_ids(out, r->prompt, r->prompt_tokens);
    put_u32(out, (uint32_t)r->n_stop);
    for (int i = 0; i < r->n_stop; i++) put_text(out, r->stop[i]);
}

static void put_done(struct buf *out, const struct wire_done *d)
{
    put_u64(out, d->id);
    put_u32(out, d->finish);
    put_u64(out, d->prompt_tokens);
    put_i64(out, d->timing.queue_us);
    put_i64(out, d->timing.prefill_us);
    put_i64(out, d->timing.ttft_us);
    put_i64(out, d->timing.decode_us);
    put_i64(out, d->timing.steps);
    put_i64(out, d->timing.rounds);
    put_i64(out, d->timing.drafted);
    put_i64(out, d->timing.accepted);
    put_i64(out, d->timing.preemptions);
    put_i64(out, d->timing.max_in_step);
    put_i64(out, d->timing.cached_tokens);
    put_i64(out, d->timing.resumed_tokens);
    put_bytes(out, d->text, d->text_len);
    put_ids(out, d->tokens, d->n_tokens);
    put_u32(out, d->trace ? (uint32_t)d->n_tokens : 0);
    if (!d->trace || !buf_reserve(out, d->n_tokens * 16)) return;
    for (size_t i = 0; i < 2 * d->n_tokens; i++) put_u64(out, d->trace[i]);
}

static void put_failure(struct buf *out, const struct wire_text *t)
{
    put_u64(out, t->id);
    put_u32(out, t->exit_status);
    put_text(out, t->code);
    put_text(out, t->text);
}

static void put_stats(struct buf *out, const struct engine_stats *s)
{
    put_u64(out, s->steps);
    put_u64(out, s->prefill_rows);
    put_u64(out, s->decode_rows);
    put_u64(out, s->preemptions);
    put_u64(out, s->tokens);
    put_u64(out, s->drafted);
    put_u64(out, s->accepted);
    put_u64(out, s->restored_rows);
    put_i32(out, s->max_sequences_in_step);
}

static void put_payload(struct buf *out, const struct wire_frame *f)
{
    switch (f->type) {
    case WIRE_HELLO: put_hello(out, &f->u.hello); break;
    case WIRE_SUBMIT: put_submit(out, &f->u.submit); break;
    case WIRE_CANCEL: put_u64(out, f->u.cancel); break;
    case WIRE_SHUTDOWN: break;
    case WIRE_TOKEN:
        put_u64(out, f->u.token.step);
        put_u64(out, f->u.token.tokens_total);
        put_u64(out, f->u.token.prefill_total);
        break;
    case WIRE_DONE: put_done(out, &f->u.done); break;
    case WIRE_FAILED:
    case WIRE_ERROR: put_failure(out, &f->u.text); break;
    case WIRE_STATS: put_stats(out, &f->u.stats); break;
    case WIRE_STARTED: put_u64(out, f->u.started); break;
    case WIRE_SAVED:
        put_u64(out, f->u.saved.id);
        put_u32(out, f->u.saved.position);
        break;
    case WIRE_STOP:
    case WIRE_STOPPED: break;
    }
}

/* What the fields alone promise, before a byte is written: no count may pass what u32 or the frame's limit hold. */
static bool sizes_fit(const struct wire_frame *f)
{
    if (f->type == WIRE_SUBMIT) {
        if (f->u.submit.n_stop < 0 || f->u.submit.n_stop > MAX_STOPS) return false;
        return f->u.submit.prompt_tokens <= WIRE_MAX_FRAME_BYTES / 4;
    }
    if (f->type == WIRE_DONE)
        return f->u.done.n_tokens <= WIRE_MAX_FRAME_BYTES / 4 && f->u.done.text_len <= WIRE_MAX_FRAME_BYTES;
    return true;
}

bool wire_encode(const struct wire_frame *f, struct buf *out)
{
    size_t start = out->len;
    if (!sizes_fit(f)) return false;
    put_u32(out, 0);
    put_u16(out, (uint16_t)f->type);
    put_payload(out, f);
    if (out->failed) return false;
    size_t length = out->len - start - 4;
    if (length > WIRE_MAX_FRAME_BYTES - 4) {
        out->len = start;
        return false;
    }
    for (int i = 0; i < 4; i++) out->data[start + (size_t)i] = (char)(unsigned char)(length >> (8 * i));
    return true;
}

/* ---- reading ---- */

struct cursor {
    const unsigned char *at;
    size_t left;
    bool failed;
};

static const unsigned char *take(struct cursor *c, size_t n)
{
    if (c->failed || n > c->left) {
        c->failed = true;
        return NULL;
    }
    const unsigned char *at = c->at;
    c->at += n;
    c->left -= n;
    return at;
}

static uint8_t get_u8(struct cursor *c)
{
    const unsigned char *b = take(c, 1);
    return b ? b[0] : 0;
}

static uint32_t get_u32(struct cursor *c)
{
    const unsigned char *b = take(c, 4);
    return b ? (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24 : 0;
}

static uint64_t get_u64(struct cursor *c)
{
    uint64_t low = get_u32(c);
    return low | (uint64_t)get_u32(c) << 32;
}

static int32_t get_i32(struct cursor *c) { return (int32_t)get_u32(c); }
static int64_t get_i64(struct cursor *c) { return (int64_t)get_u64(c); }

static float get_f32(struct cursor *c)
{
    uint32_t bits = get_u32(c);
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* A count of elements that take at least element_bytes each: more than the rest of the frame can hold is broken. */
static size_t get_count(struct cursor *c, size_t element_bytes)
{
    size_t n = get_u32(c);
    if (n > c->left / element_bytes) {
        c->failed = true;
        return 0;
    }
    return n;
}

/* A short text into a fixed array; it must fit with its NUL and hold none itself. */
static void get_text(struct cursor *c, char *out, size_t out_bytes)
{
    size_t n = get_count(c, 1);
    const unsigned char *b = take(c, n);
    out[0] = '\0';
    if (!b || n >= out_bytes || memchr(b, 0, n)) {
        c->failed = true;
        return;
    }
    memcpy(out, b, n);
    out[n] = '\0';
}

static void read_ids(const unsigned char *b, size_t n, int32_t *out)
{
    struct cursor c = {b, n * 4, false};
    for (size_t i = 0; i < n; i++) out[i] = get_i32(&c);
}

static void get_hello(struct cursor *c, struct wire_hello *h)
{
    h->version = get_u32(c);
    h->rank = get_u32(c);
    h->ranks = get_u32(c);
    h->context = get_u32(c);
    h->partition_digest = get_u64(c);
    h->kv_tokens = get_u64(c);
    h->weight_bytes = get_u64(c);
    h->kv_bytes = get_u64(c);
    h->load_us = get_u64(c);
    get_text(c, h->identity, sizeof h->identity);
}

/* Lays out store as: pointers to the stop strings, prompt ids, stop strings with their NULs. */
static bool store_submit(struct engine_request *r, const unsigned char *prompt, const unsigned char *const *stops,
                         const size_t *stop_len, struct buf *store)
{
    size_t pointer_bytes = (size_t)r->n_stop * sizeof(char *), id_bytes = r->prompt_tokens * 4;
    size_t need = pointer_bytes + id_bytes;
    for (int i = 0; i < r->n_stop; i++) need += stop_len[i] + 1;
    if (!buf_reserve(store, need)) return false;
    const char **pointers = (const char **)(void *)store->data;
    int32_t *ids = (int32_t *)(void *)(store->data + pointer_bytes);
    char *text = store->data + pointer_bytes + id_bytes;
    read_ids(prompt, r->prompt_tokens, ids);
    for (int i = 0; i < r->n_stop; i++) {
        memcpy(text, stops[i], stop_len[i]);
        text[stop_len[i]] = '\0';
        pointers[i] = text;
        text += stop_len[i] + 1;
    }
    store->len = need;
    r->prompt = ids;
    r->stop = r->n_stop ? pointers : NULL;
    return true;
}

static bool get_flag(struct cursor *c)
{
    const uint8_t flag = get_u8(c);
    if (flag > 1) c->failed = true;
    return flag == 1;
}

static bool get_submit(struct cursor *c, struct engine_request *r, struct buf *store)
{
    r->id = get_u64(c);
    r->max_tokens = get_i32(c);
    const unsigned char *key = take(c, sizeof r->key);
    if (key) memcpy(r->key, key, sizeof r->key);
    r->branch_tokens = get_u64(c);
    r->ignore_end = get_flag(c);
    r->resume = get_flag(c);
    r->cold = get_flag(c);
    r->sampling.temperature = get_f32(c);
    r->sampling.top_p = get_f32(c);
    r->sampling.min_p = get_f32(c);
    r->sampling.top_k = get_i32(c);
    r->sampling.presence_penalty = get_f32(c);
    r->sampling.frequency_penalty = get_f32(c);
    r->sampling.repetition_penalty = get_f32(c);
    r->sampling.seed = get_u64(c);
    r->prompt_tokens = get_count(c, 4);
    const unsigned char *prompt = take(c, r->prompt_tokens * 4);
    const unsigned char *stops[MAX_STOPS];
    size_t stop_len[MAX_STOPS];
    size_t n_stop = get_count(c, 4);
    if (n_stop > MAX_STOPS) c->failed = true;
    for (size_t i = 0; i < n_stop && !c->failed; i++) {
        stop_len[i] = get_count(c, 1);
        stops[i] = take(c, stop_len[i]);
        if (stops[i] && memchr(stops[i], 0, stop_len[i])) c->failed = true;
    }
    if (c->failed || c->left) return true;
    r->n_stop = (int)n_stop;
    return store_submit(r, prompt, stops, stop_len, store);
}

static bool get_done(struct cursor *c, struct wire_done *d, struct buf *store)
{
    d->id = get_u64(c);
    d->finish = get_u32(c);
    d->prompt_tokens = get_u64(c);
    d->timing.queue_us = get_i64(c);
    d->timing.prefill_us = get_i64(c);
    d->timing.ttft_us = get_i64(c);
    d->timing.decode_us = get_i64(c);
    d->timing.steps = get_i64(c);
    d->timing.rounds = get_i64(c);
    d->timing.drafted = get_i64(c);
    d->timing.accepted = get_i64(c);
    d->timing.preemptions = get_i64(c);
    d->timing.max_in_step = get_i64(c);
    d->timing.cached_tokens = get_i64(c);
    d->timing.resumed_tokens = get_i64(c);
    d->text_len = get_count(c, 1);
    d->text = (const char *)take(c, d->text_len);
    d->n_tokens = get_count(c, 4);
    const unsigned char *tokens = take(c, d->n_tokens * 4);
    size_t n_trace = get_count(c, 16);
    const unsigned char *trace = take(c, n_trace * 16);
    if (d->finish > FINISH_LENGTH || (n_trace && n_trace != d->n_tokens)) c->failed = true;
    if (c->failed || c->left) return true;
    size_t trace_bytes = n_trace * 16, need = trace_bytes + d->n_tokens * 4;
    if (!buf_reserve(store, need)) return false;
    uint64_t *trace_out = (uint64_t *)(void *)store->data;
    int32_t *tokens_out = (int32_t *)(void *)(store->data + trace_bytes);
    struct cursor t = {trace, trace_bytes, false};
    for (size_t i = 0; i < 2 * n_trace; i++) trace_out[i] = get_u64(&t);
    read_ids(tokens, d->n_tokens, tokens_out);
    store->len = need;
    d->tokens = tokens_out;
    d->trace = n_trace ? trace_out : NULL;
    return true;
}

static void get_failure(struct cursor *c, struct wire_text *t)
{
    t->id = get_u64(c);
    t->exit_status = get_u32(c);
    get_text(c, t->code, sizeof t->code);
    get_text(c, t->text, sizeof t->text);
}

static void get_stats(struct cursor *c, struct engine_stats *s)
{
    s->steps = get_u64(c);
    s->prefill_rows = get_u64(c);
    s->decode_rows = get_u64(c);
    s->preemptions = get_u64(c);
    s->tokens = get_u64(c);
    s->drafted = get_u64(c);
    s->accepted = get_u64(c);
    s->restored_rows = get_u64(c);
    s->max_sequences_in_step = get_i32(c);
}

/* False: out of memory. Everything else is told by the cursor. */
static bool get_payload(struct cursor *c, struct wire_frame *f)
{
    switch (f->type) {
    case WIRE_HELLO: get_hello(c, &f->u.hello); break;
    case WIRE_SUBMIT: return get_submit(c, &f->u.submit, &f->store);
    case WIRE_CANCEL: f->u.cancel = get_u64(c); break;
    case WIRE_SHUTDOWN: break;
    case WIRE_TOKEN:
        f->u.token.step = get_u64(c);
        f->u.token.tokens_total = get_u64(c);
        f->u.token.prefill_total = get_u64(c);
        break;
    case WIRE_DONE: return get_done(c, &f->u.done, &f->store);
    case WIRE_FAILED:
    case WIRE_ERROR: get_failure(c, &f->u.text); break;
    case WIRE_STATS: get_stats(c, &f->u.stats); break;
    case WIRE_STARTED: f->u.started = get_u64(c); break;
    case WIRE_SAVED:
        f->u.saved.id = get_u64(c);
        f->u.saved.position = get_u32(c);
        break;
    case WIRE_STOP:
    case WIRE_STOPPED: break;
    }
    return true;
}

enum rc wire_decode(const void *bytes, size_t n_bytes, struct wire_frame *out, size_t *used, struct err *e)
{
    struct cursor c = {bytes, n_bytes, false};
    memset(out, 0, sizeof *out);
    *used = 0;
    if (n_bytes < 4) return RC_RETRY;
    size_t length = get_u32(&c);
    if (length < 2 || length > WIRE_MAX_FRAME_BYTES - 4)
        return err_set(e, RC_BAD_INPUT, EXIT_INTERNAL, "bad_frame", "a frame claims %zu bytes", length);
    if (n_bytes < FRAME_HEAD_BYTES || length > c.left) return RC_RETRY;
    c.left = length;
    unsigned type = get_u8(&c);
    type |= (unsigned)get_u8(&c) << 8;
    if (type < WIRE_HELLO || type > WIRE_STOPPED)
        return err_set(e, RC_BAD_INPUT, EXIT_INTERNAL, "bad_frame", "a frame is of unknown type %u", type);
    out->type = (enum wire_type)type;
    if (!get_payload(&c, out)) {
        wire_frame_free(out);
        return err_no_memory(e);
    }
    if (c.failed || c.left) {
        wire_frame_free(out);
        return err_set(e, RC_BAD_INPUT, EXIT_INTERNAL, "bad_frame", "a frame of type %u and %zu bytes %s", type, length,
                       c.failed ? "breaks its layout" : "has bytes left over");
    }
    *used = length + 4;
    return RC_OK;
}

void wire_frame_free(struct wire_frame *f)
{
    buf_free(&f->store);
    memset(&f->u, 0, sizeof f->u);
}
