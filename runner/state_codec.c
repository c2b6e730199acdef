/* state_codec: fields in, fields out, with no knowledge of LMDB.
 *
 * Decoding is strict: a value with bytes left over, a length past its end or an unknown kind is refused, and the caller
 * reports the state as damaged. Strings keep their NUL inside the value, so that reading one copies nothing. */
#include "state_codec.h"

#include <nettle/sha2.h>
#include <string.h>
#include <xxhash.h>

const char *const state_table_names[STATE_TABLES] = {"meta", "jobs", "pins", "results", "attempts"};

enum { CHECKSUM_BYTES = 8 };

static void u64_store(unsigned char *at, uint64_t v)
{
    for (int i = 0; i < 8; i++) at[i] = (unsigned char)(v >> (8 * i));
}

static uint64_t u64_load(const unsigned char *at)
{
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) v |= (uint64_t)at[i] << (8 * i);
    return v;
}

static uint64_t checksum(const void *key, size_t key_len, const void *bytes, size_t len)
{
    return XXH3_64bits_withSeed(bytes, len, XXH3_64bits(key, key_len));
}

void state_value_start(struct buf *value)
{
    static const unsigned char room[CHECKSUM_BYTES];
    buf_clear(value);
    buf_append(value, room, sizeof room);
}

bool state_value_seal(struct buf *value, const void *key, size_t key_len)
{
    if (value->failed) return false;
    u64_store((unsigned char *)value->data,
              checksum(key, key_len, value->data + CHECKSUM_BYTES, value->len - CHECKSUM_BYTES));
    return true;
}

void state_put_u64(struct buf *value, uint64_t v)
{
    unsigned char bytes[8];
    u64_store(bytes, v);
    buf_append(value, bytes, sizeof bytes);
}

void state_put_bytes(struct buf *value, const void *bytes, size_t len)
{
    state_put_u64(value, len);
    buf_append(value, bytes, len);
}

bool state_value_open(const void *key, size_t key_len, const void *value, size_t value_len, struct bytes_view *out)
{
    if (value_len < CHECKSUM_BYTES) return false;
    const unsigned char *bytes = value;
    *out = (struct bytes_view){bytes + CHECKSUM_BYTES, value_len - CHECKSUM_BYTES};
    return u64_load(bytes) == checksum(key, key_len, out->bytes, out->len);
}

bool state_take_u64(struct bytes_view *v, uint64_t *out)
{
    if (v->len < 8) return false;
    *out = u64_load(v->bytes);
    v->bytes = (const char *)v->bytes + 8;
    v->len -= 8;
    return true;
}

bool state_take_bytes(struct bytes_view *v, struct bytes_view *out)
{
    uint64_t len;
    if (!state_take_u64(v, &len) || len > v->len) return false;
    *out = (struct bytes_view){v->bytes, (size_t)len};
    v->bytes = (const char *)v->bytes + len;
    v->len -= (size_t)len;
    return true;
}

/* A string stored with its NUL. */
static bool take_string(struct bytes_view *v, const char **out)
{
    struct bytes_view text;
    if (!state_take_bytes(v, &text) || text.len == 0) return false;
    *out = text.bytes;
    return memchr(text.bytes, 0, text.len) == *out + text.len - 1;
}

static bool take_fixed(struct bytes_view *v, void *out, size_t len)
{
    struct bytes_view bytes;
    if (!state_take_bytes(v, &bytes) || bytes.len != len) return false;
    memcpy(out, bytes.bytes, len);
    return true;
}

static bool take_count(struct bytes_view *v, int64_t *out)
{
    uint64_t u;
    if (!state_take_u64(v, &u) || u > INT64_MAX) return false;
    *out = (int64_t)u;
    return true;
}

void state_order_key(uint64_t order, unsigned char out[8])
{
    for (int i = 0; i < 8; i++) out[i] = (unsigned char)(order >> (56 - 8 * i));
}

void state_job_encode(const struct state_job *j, struct buf *value)
{
    state_put_bytes(value, j->key, sizeof j->key);
    state_put_bytes(value, j->line_digest, sizeof j->line_digest);
    state_put_u64(value, (uint64_t)j->line);
    state_put_bytes(value, j->custom_id, strlen(j->custom_id) + 1);
    state_put_bytes(value, j->source, strlen(j->source) + 1);
    state_put_bytes(value, j->document_digests, j->document_digests_bytes);
}

bool state_job_decode(struct bytes_view v, struct state_job *out)
{
    struct bytes_view digests;
    if (!take_fixed(&v, out->key, sizeof out->key) || !take_fixed(&v, out->line_digest, sizeof out->line_digest) ||
        !take_count(&v, &out->line) || !take_string(&v, &out->custom_id) || !take_string(&v, &out->source) ||
        !state_take_bytes(&v, &digests))
        return false;
    out->document_digests = digests.bytes;
    out->document_digests_bytes = digests.len;
    return v.len == 0;
}

void state_result_encode(const struct state_result *r, struct buf *value)
{
    state_put_u64(value, r->kind == STATE_OUTPUT ? 0 : 1);
    state_put_u64(value, r->settled);
    state_put_u64(value, (uint64_t)r->prompt_tokens);
    state_put_u64(value, (uint64_t)r->cached_tokens);
    state_put_u64(value, (uint64_t)r->completion_tokens);
    state_put_bytes(value, r->record, r->record_len);
    state_put_bytes(value, r->timing, r->timing_len);
}

bool state_result_decode(struct bytes_view v, struct state_result *out)
{
    uint64_t kind;
    struct bytes_view record, timing;
    *out = (struct state_result){0};
    if (!state_take_u64(&v, &kind) || kind > 1 || !state_take_u64(&v, &out->settled) ||
        !take_count(&v, &out->prompt_tokens) || !take_count(&v, &out->cached_tokens) ||
        !take_count(&v, &out->completion_tokens) || !state_take_bytes(&v, &record) || !state_take_bytes(&v, &timing) ||
        v.len)
        return false;
    out->kind = kind ? STATE_ERROR : STATE_OUTPUT;
    out->record = record.bytes;
    out->record_len = record.len;
    out->timing = timing.bytes;
    out->timing_len = timing.len;
    return true;
}

void state_attempts_encode(const struct state_attempts *a, struct buf *value)
{
    state_put_u64(value, (uint64_t)a->attempts);
    state_put_u64(value, (uint64_t)a->failures);
    state_put_u64(value, (uint64_t)a->rank_restarts);
    state_put_u64(value, (uint64_t)a->failed_position);
    state_put_u64(value, a->running);
}

bool state_attempts_decode(struct bytes_view v, struct state_attempts *out)
{
    uint64_t running;
    if (!take_count(&v, &out->attempts) || !take_count(&v, &out->failures) || !take_count(&v, &out->rank_restarts) ||
        !take_count(&v, &out->failed_position) ||
        !state_take_u64(&v, &running) || running > 1)
        return false;
    out->running = running == 1;
    return v.len == 0;
}

unsigned state_version_decode(struct bytes_view v)
{
    const unsigned char *b = v.bytes;
    return v.len == 4 ? b[0] | (unsigned)b[1] << 8 | (unsigned)b[2] << 16 | (unsigned)b[3] << 24 : 0;
}

void state_totals_encode(const struct state_totals *t, struct buf *value)
{
    const struct state_counts *c = &t->counts;
    const uint64_t fields[] = {t->settled, c->jobs, c->done, c->failed, (uint64_t)c->prompt_tokens, (uint64_t)c->cached_tokens,
                               (uint64_t)c->completion_tokens, (uint64_t)c->attempts, (uint64_t)c->rank_restarts};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) state_put_u64(value, fields[i]);
}

bool state_totals_decode(struct bytes_view v, struct state_totals *out)
{
    int64_t jobs, done, failed;
    struct state_counts *c = &out->counts;
    if (!state_take_u64(&v, &out->settled) || !take_count(&v, &jobs) || !take_count(&v, &done) || !take_count(&v, &failed) ||
        !take_count(&v, &c->prompt_tokens) || !take_count(&v, &c->cached_tokens) || !take_count(&v, &c->completion_tokens) ||
        !take_count(&v, &c->attempts) || !take_count(&v, &c->rank_restarts) || v.len)
        return false;
    c->jobs = (size_t)jobs;
    c->done = (size_t)done;
    c->failed = (size_t)failed;
    c->pending = done <= jobs && failed <= jobs - done ? (size_t)(jobs - done - failed) : 0;
    return true;
}

void state_pin_key(const char *custom_id, const unsigned char line_digest[32], unsigned char out[32])
{
    struct sha256_ctx sha;
    sha256_init(&sha);
    sha256_update(&sha, 32, line_digest);
    sha256_update(&sha, strlen(custom_id), (const uint8_t *)custom_id);
    sha256_digest(&sha, 32, out);
}
