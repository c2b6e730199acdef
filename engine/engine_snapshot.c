/* engine_snapshot: everything a sequence remembers, as bytes: for preemption in this process, and with a header for later ones.
 *
 *   header | position token ids, int32 | pages of positions 0 .. position-1 | slot
 *
 * A snapshot is only ever bytes from outside: header, length and a checksum over all of it are verified before any of it is
 * used, and the tokens themselves are compared with the prompt, because equal hashes do not mean equal tokens. What the header
 * does not know is which weights made the state; whoever stores snapshots keeps those of different models apart. Bits are the
 * backend's own, so its numerics belong to what must agree. */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine.h"
#include "engine_private.h"

static const uint64_t snapshot_magic = UINT64_C(0x3150414e53444e54); /* "TNDSNAP1" */
enum { SNAPSHOT_VERSION = 1 };

/* Stored as is: fixed sizes, no padding. */
struct snapshot_header {
    uint64_t magic;
    uint32_t version, kv_format;
    uint32_t rank, ranks;
    uint32_t position, n_pages;
    uint64_t partition_digest;
    uint64_t numerics; /* hash of the backend's numerics, the weight format and whether MTP rows are in it */
    uint64_t page_bytes, slot_bytes;
    uint64_t checksum; /* XXH3-64 of the header with 0 here, then of all that follows */
};
static_assert(sizeof(struct snapshot_header) == 72, "no padding");

size_t engine_state_bytes(const struct engine *e, int n_pages)
{
    return (size_t)n_pages * model_forward_page_bytes(e->forward) + model_forward_slot_bytes(e->forward);
}

void engine_state_save(struct engine *e, const struct sequence *s, char *out)
{
    size_t page_bytes = model_forward_page_bytes(e->forward);
    for (int i = 0; i < s->n_pages; i++, out += page_bytes) model_forward_save_page(e->forward, s->pages[i], out);
    model_forward_save_slot(e->forward, s->slot, out);
}

void engine_state_load(struct engine *e, const struct sequence *s, const char *bytes)
{
    size_t page_bytes = model_forward_page_bytes(e->forward);
    for (int i = 0; i < s->n_pages; i++, bytes += page_bytes) model_forward_load_page(e->forward, s->pages[i], bytes);
    model_forward_load_slot(e->forward, s->slot, bytes);
}

static struct snapshot_header make_header(const struct engine *e, int position)
{
    uint32_t formats[] = {(uint32_t)e->o.weights, e->mtp};
    return (struct snapshot_header){
        .magic = snapshot_magic,
        .version = SNAPSHOT_VERSION,
        .kv_format = (uint32_t)e->o.kv,
        .rank = (uint32_t)e->o.rank,
        .ranks = (uint32_t)e->o.ranks,
        .position = (uint32_t)position,
        .n_pages = (uint32_t)kv_pages_for(position),
        .partition_digest = partition_digest(&e->partition),
        .numerics = XXH3_64bits_withSeed(e->kern->numerics, strlen(e->kern->numerics), XXH3_64bits(formats, sizeof formats)),
        .page_bytes = model_forward_page_bytes(e->forward),
        .slot_bytes = model_forward_slot_bytes(e->forward),
    };
}

static uint64_t checksum(struct snapshot_header h, const void *rest, size_t n)
{
    h.checksum = 0;
    return XXH3_64bits_withSeed(rest, n, XXH3_64bits(&h, sizeof h));
}

int engine_position(const struct engine *e, uint64_t id)
{
    const struct sequence *s = e->sequences;
    while (s && s->id != id) s = s->next;
    return s && s->state == PLAN_RUNNING ? s->computed : 0;
}

enum rc engine_snapshot(struct engine *e, uint64_t id, struct buf *out, struct err *err)
{
    struct sequence *s = engine_find(e, id);
    buf_clear(out);
    if (!s || s->state != PLAN_RUNNING)
        return err_set(err, RC_BAD_INPUT, EXIT_INTERNAL, "no_snapshot", "request %" PRIu64 " is not running", id);
    if (!s->computed || s->computed % KV_PAGE_TOKENS || s->computed >= s->prompt_tokens)
        return err_set(err, RC_BAD_INPUT, EXIT_INTERNAL, "no_snapshot",
                       "request %" PRIu64 " is at position %d of a prompt of %d", id, s->computed, s->prompt_tokens);
    struct snapshot_header h = make_header(e, s->computed);
    size_t tokens = (size_t)s->computed * sizeof *s->tokens, rest = tokens + engine_state_bytes(e, s->n_pages);
    if (!buf_reserve(out, sizeof h + rest)) return err_no_memory(err);
    memcpy(out->data + sizeof h, s->tokens, tokens);
    engine_state_save(e, s, out->data + sizeof h + tokens);
    h.checksum = checksum(h, out->data + sizeof h, rest);
    memcpy(out->data, &h, sizeof h);
    out->len = sizeof h + rest;
    out->data[out->len] = '\0';
    return RC_OK;
}

static const char *header_problem(const struct snapshot_header *h, const struct snapshot_header *own)
{
    if (h->magic != own->magic) return "it is no snapshot";
    if (h->version != own->version) return "it is of another version";
    if (h->kv_format != own->kv_format) return "it is of another KV format";
    if (h->rank != own->rank || h->ranks != own->ranks || h->partition_digest != own->partition_digest)
        return "it is another rank's share";
    if (h->numerics != own->numerics) return "it was made with other numerics";
    if (h->page_bytes != own->page_bytes || h->slot_bytes != own->slot_bytes) return "it is of another model";
    return NULL;
}

/* Everything wrong with it, or NULL. *h is its header, *state where pages and slot begin. */
static const char *snapshot_problem(const struct engine *e, const struct engine_request *r, struct snapshot_header *h,
                                    const char **state)
{
    if (r->snapshot_bytes < sizeof *h) return "it is too short";
    memcpy(h, r->snapshot, sizeof *h);
    struct snapshot_header own = make_header(e, 0);
    const char *problem = header_problem(h, &own);
    if (problem) return problem;
    if (h->position == 0 || h->position % KV_PAGE_TOKENS || h->position > (uint32_t)e->limits.context)
        return "its position is impossible";
    int pages = kv_pages_for((int64_t)h->position);
    size_t tokens = h->position * sizeof(int32_t), rest = tokens + engine_state_bytes(e, pages);
    if (h->n_pages != (uint32_t)pages || r->snapshot_bytes - sizeof *h != rest) return "its size is not that of its position";
    const char *after = (const char *)r->snapshot + sizeof *h;
    if (h->checksum != checksum(*h, after, rest)) return "its checksum is wrong";
    if (r->prompt_tokens <= h->position) return "the prompt is not longer";
    if (memcmp(after, r->prompt, tokens) != 0) return "the prompt starts with other tokens";
    *state = after + tokens;
    return NULL;
}

enum rc engine_snapshot_take(struct engine *e, const struct engine_request *r, struct sequence *s, struct err *err)
{
    struct snapshot_header h;
    const char *state = NULL, *problem = snapshot_problem(e, r, &h, &state);
    if (problem)
        return err_set(err, RC_BAD_INPUT, EXIT_INTERNAL, "bad_snapshot", "the snapshot of request %" PRIu64 ": %s", r->id,
                       problem);
    size_t n = engine_state_bytes(e, (int)h.n_pages);
    s->saved = malloc(n + 1);
    if (!s->saved) return err_no_memory(err);
    memcpy(s->saved, state, n);
    s->computed = (int)h.position;
    s->n_pages = (int)h.n_pages;
    return RC_OK;
}
