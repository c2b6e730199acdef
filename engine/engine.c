/* engine: opening, limits and requests. What a step does is in engine_step.c, drafts in engine_draft.c.
 *
 * Lifetimes: the engine owns its model file, weights, work buffers and sequences; kernel table, comm and segment are the
 * caller's. A sequence lives from engine_submit to the RETIRE of a plan, on every rank. */
#include "engine.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine_private.h"
#include "fault_strike.h"

enum { MAX_LIVE = 4096, MAX_STOP = 16 };

static int prefill_rows_of(const struct engine_options *o)
{
    return o->prefill_rows ? o->prefill_rows : ENGINE_PREFILL_ROWS;
}

static int drafts_of(const struct engine_options *o)
{
    return o->spec == SPEC_OFF ? 0 : o->drafts ? o->drafts : ENGINE_DRAFTS;
}

static bool uses_mtp(const struct engine_options *o, const struct model_config *c)
{
    return c->mtp && (o->spec == SPEC_AUTO || o->spec == SPEC_MTP);
}

/* Every row of a decode segment is a pick; the MTP layer sees no more than a slot can keep of every sequence. */
static int max_picks_of(const struct engine_options *o) { return o->active * (1 + drafts_of(o)); }

static int max_rows_of(const struct engine_options *o, const struct model_config *c)
{
    int rows = prefill_rows_of(o) + max_picks_of(o), mtp_rows = o->active * (KERN_MAX_DRAFTS + 1);
    return uses_mtp(o, c) && mtp_rows > rows ? mtp_rows : rows;
}

static enum rc check_options(const struct engine_options *o, struct err *e)
{
    const char *wrong = NULL;
    if (o->ranks < 1 || o->ranks > MAX_RANKS) wrong = "ranks must be 1 to 4";
    else if (o->rank < 0 || o->rank >= o->ranks) wrong = "rank is out of range";
    else if (o->active < 1 || o->active > PLAN_MAX_SEGMENTS) wrong = "active sequences must be 1 to 64";
    else if (o->context < 0) wrong = "context must not be negative";
    else if (o->kv_tokens < 0 || o->kv_tokens > INT64_C(1) << 32) wrong = "KV tokens are out of range";
    else if (prefill_rows_of(o) < KV_PAGE_TOKENS || prefill_rows_of(o) % KV_PAGE_TOKENS || prefill_rows_of(o) > 16384)
        wrong = "prefill rows must be a multiple of 64, at most 16384";
    else if (o->spec < 0 || o->spec >= SPEC_MODES) wrong = "there is no such speculation mode";
    else if (o->drafts < 0 || o->drafts > KERN_MAX_DRAFTS) wrong = "drafts must be 1 to 5";
    return wrong ? err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "bad_option", "%s", wrong) : RC_OK;
}

static enum rc plan_limits(const struct engine_options *o, const struct model_config *c, struct engine_limits *out,
                           struct err *e)
{
    enum rc rc = check_options(o, e);
    if (rc != RC_OK) return rc;
    if (o->context > c->context)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "context_too_long",
                       "a context of %d tokens is more than the model's %d", o->context, c->context);
    if (o->spec == SPEC_MTP && !c->mtp)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "no_mtp", "this model has no MTP layer to draft with");
    int context = o->context ? o->context : c->context;
    int64_t page = KV_PAGE_TOKENS, whole = (context + page - 1) / page * page;
    int64_t tokens = o->kv_tokens ? o->kv_tokens / page * page : whole * o->active;
    if (tokens < page)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "kv_too_small", "%" PRId64 " KV tokens are less than one page of %d",
                       o->kv_tokens, KV_PAGE_TOKENS);
    if (tokens / page > INT32_MAX)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "kv_too_large", "%" PRId64 " KV tokens are too many", tokens);
    if (tokens < context) context = (int)tokens; /* one sequence must always fit alone */
    *out = (struct engine_limits){.context = context, .vocab = c->vocab, .kv_tokens = tokens};
    return RC_OK;
}

enum rc engine_limits_plan(const struct engine_options *o, const struct model_file *m, struct engine_limits *out,
                           struct err *e)
{
    struct model_config c;
    enum rc rc = model_config_read(m, &c, e);
    return rc == RC_OK ? plan_limits(o, &c, out, e) : rc;
}

enum rc engine_comm_shape(const struct engine_options *o, struct engine_comm_shape *out, struct err *e)
{
    struct model_file *m = NULL;
    struct model_config c;
    struct partition p;
    enum rc rc = check_options(o, e);
    if (rc == RC_OK) rc = model_file_open_rank(o->model_path, o->rank, o->ranks, &m, e);
    if (rc == RC_OK) rc = model_config_read(m, &c, e);
    if (rc == RC_OK) rc = partition_make(&c, o->ranks, PARTITION_FFN_STEP, &p, e);
    if (rc == RC_OK)
        *out = (struct engine_comm_shape){.max_rows = max_rows_of(o, &c), .width = c.hidden,
                                          .max_gather_floats = model_forward_gather_floats(&p, max_picks_of(o))};
    model_file_close(m);
    return rc;
}

static void beat(void *ctx)
{
    struct engine *e = ctx;
    segment_beat(e->segment, e->seat);
}

/* After each layer's first sum: a sign of life, and the place where faults strike. */
static void on_layer(void *ctx, int layer, float *x_dev, int rows)
{
    struct engine *e = ctx;
    beat(e);
    if (e->o.fault.kind == FAULT_NONE || e->o.fault.step != e->step + 1 || layer != e->config.n_layers / 2) return;
    fault_strike(&e->o.fault, e->kern, x_dev, (size_t)rows * (size_t)e->config.hidden);
}

static void choose_drafts(struct engine *e)
{
    e->drafts = drafts_of(&e->o);
    e->mtp = uses_mtp(&e->o, &e->config);
    e->ngram = e->o.spec == SPEC_AUTO || e->o.spec == SPEC_NGRAM;
    e->max_rows = max_rows_of(&e->o, &e->config);
    e->max_picks = max_picks_of(&e->o);
    e->draft_cost = (struct draft_cost){.row = e->kern->row_cost, .mtp_pass = engine_mtp_share(&e->config)};
}

static enum rc open_model(struct engine *e, struct err *err)
{
    enum rc rc = model_file_open_rank(e->o.model_path, e->o.rank, e->o.ranks, &e->file, err);
    if (rc == RC_OK) rc = model_config_read(e->file, &e->config, err);
    if (rc == RC_OK) rc = plan_limits(&e->o, &e->config, &e->limits, err);
    if (rc == RC_OK) choose_drafts(e);
    if (rc == RC_OK) rc = partition_make(&e->config, e->o.ranks, PARTITION_FFN_STEP, &e->partition, err);
    if (rc == RC_OK) rc = partition_check(&e->partition, e->file, err);
    if (rc == RC_OK) rc = tokenizer_open(e->file, &e->tokenizer, err);
    beat(e);
    if (rc == RC_OK && tokenizer_vocab(e->tokenizer) > e->config.vocab)
        rc = err_set(err, RC_BAD_INPUT, EXIT_UNAVAILABLE, "vocabulary_mismatch",
                     "the tokenizer has %d tokens, the embedding %d rows", tokenizer_vocab(e->tokenizer),
                     e->config.vocab);
    if (rc == RC_OK)
        rc = model_bind(&(struct model_bind_options){.file = e->file, .config = &e->config, .part = &e->partition.part[e->o.rank],
                                                     .how = e->o.weights, .mtp = e->mtp, .kern = e->kern, .beat = beat,
                                                     .beat_ctx = e},
                        &e->weights, err);
    return rc;
}

/* Ids that stand for tokens, by bit. NULL: no memory. */
static uint32_t *allowed_ids(const struct engine *e)
{
    const int32_t *holes;
    const size_t n_holes = tokenizer_holes(e->tokenizer, &holes);
    uint32_t *allowed = calloc(((size_t)e->config.vocab + 31) / 32, sizeof *allowed);
    for (int id = 0; id < tokenizer_vocab(e->tokenizer) && allowed; id++) allowed[id / 32] |= UINT32_C(1) << id % 32;
    for (size_t i = 0; i < n_holes && allowed; i++) allowed[holes[i] / 32] &= ~(UINT32_C(1) << holes[i] % 32);
    return allowed;
}

static enum rc open_work(struct engine *e, struct err *err)
{
    uint32_t *allowed = allowed_ids(e);
    if (!allowed) return err_no_memory(err);
    int n_pages = (int)(e->limits.kv_tokens / KV_PAGE_TOKENS);
    struct model_forward_options f = {
        .config = &e->config,
        .partition = &e->partition,
        .weights = &e->weights,
        .kern = e->kern,
        .comm = e->comm,
        .context = e->limits.context,
        .max_rows = e->max_rows,
        .max_picks = e->max_picks,
        .kv_pages = n_pages,
        .kv = e->o.kv,
        .slots = e->o.active,
        .mtp = e->mtp,
        .max_drafts = e->drafts,
        .trace = e->o.trace,
        .allowed = allowed,
        .on_layer = on_layer,
        .on_layer_ctx = e,
    };
    enum rc rc = model_forward_open(&f, &e->forward, err);
    free(allowed);
    if (rc == RC_OK) rc = kv_pages_open(n_pages, &e->pages, err);
    if (rc != RC_OK) return rc;
    size_t rows = (size_t)e->max_rows, picks = (size_t)e->max_picks;
    e->batch_tokens = calloc(rows, sizeof *e->batch_tokens);
    e->picks = calloc(picks, sizeof *e->picks);
    e->picked_tokens = calloc(picks, sizeof *e->picked_tokens);
    e->mtp_work.tokens = calloc(rows, sizeof *e->mtp_work.tokens);
    e->mtp_work.source = calloc(rows, sizeof *e->mtp_work.source);
    e->sampler_scratch = malloc(sampler_scratch_bytes(e->config.vocab));
    bool ok = e->batch_tokens && e->picks && e->picked_tokens && e->mtp_work.tokens && e->mtp_work.source && e->sampler_scratch;
    return ok ? RC_OK : err_no_memory(err);
}

enum rc engine_open(const struct engine_options *o, struct kern *kern, struct comm *comm, struct segment *segment,
                    struct engine **out, struct err *err)
{
    struct engine *e = calloc(1, sizeof *e);
    if (!e) return err_no_memory(err);
    e->o = *o;
    e->kern = kern;
    e->comm = comm;
    e->segment = segment;
    e->seat = o->solo ? 0 : o->rank;
    e->ranks = o->solo ? 1 : o->ranks;
    e->prefill_rows = prefill_rows_of(o);
    e->lockstep_us = segment_bounds(segment).lockstep_us;
    if (o->fault.rank != o->rank) e->o.fault.kind = FAULT_NONE;
    enum rc rc = open_model(e, err);
    if (rc == RC_OK) rc = open_work(e, err);
    beat(e);
    if (rc == RC_OK) *out = e;
    else engine_close(e);
    return rc;
}

void engine_close(struct engine *e)
{
    if (!e) return;
    while (e->sequences) engine_remove(e, e->sequences);
    free(e->plan_input);
    free(e->batch_tokens);
    free(e->picks);
    free(e->picked_tokens);
    free(e->mtp_work.tokens);
    free(e->mtp_work.source);
    free(e->sampler_scratch);
    kv_pages_close(&e->pages);
    model_forward_close(e->forward);
    model_bind_free(&e->weights);
    tokenizer_close(e->tokenizer);
    model_file_close(e->file);
    free(e);
}

static size_t weight_bytes_of(const struct engine *e, const struct kern_weight *w) { return w ? e->kern->weight_bytes(w) : 0; }

/* One layer's weights, added up. */
static void add_layer(const struct engine *e, const struct model_layer *l, struct engine_step_bytes *b)
{
    b->linear += weight_bytes_of(e, l->in_proj);
    b->swiglu += weight_bytes_of(e, l->gate_up);
    b->partial += weight_bytes_of(e, l->out_proj) + weight_bytes_of(e, l->down);
}

struct engine_sizes engine_sizes_of(const struct engine *e)
{
    const size_t page = model_forward_page_bytes(e->forward), head = weight_bytes_of(e, e->weights.head);
    const int layers = e->config.n_layers, kv_layers = model_forward_kv_layers(e->forward);
    struct engine_sizes s = {
        .limits = e->limits,
        .weight_bytes = e->weights.bytes,
        .kv_bytes = model_forward_kv_bytes(e->forward),
        .state_bytes = model_forward_state_bytes(e->forward),
        .partition_digest = partition_digest(&e->partition),
        .step = {.linear = head},
    };
    for (int l = 0; l < layers; l++) add_layer(e, &e->weights.layers[l], &s.step);
    if (kv_layers) s.step.kv_token = page / KV_PAGE_TOKENS / (size_t)kv_layers * (size_t)(kv_layers - e->mtp);
    s.step.state = 2 * model_forward_slot_bytes(e->forward);
    if (!e->mtp) return s;
    s.mtp_pass.linear = head + weight_bytes_of(e, e->weights.mtp_fc);
    add_layer(e, &e->weights.layers[layers], &s.mtp_pass);
    if (kv_layers) s.mtp_pass.kv_token = page / KV_PAGE_TOKENS / (size_t)kv_layers;
    return s;
}

struct engine_prefix_shape engine_prefix_shape_of(const struct engine *e)
{
    const uint64_t what[] = {(uint64_t)e->o.rank, (uint64_t)e->o.ranks, (uint64_t)e->o.kv, (uint64_t)e->o.weights, e->mtp,
                             model_forward_page_bytes(e->forward), model_forward_slot_bytes(e->forward), partition_digest(&e->partition)};
    return (struct engine_prefix_shape){.block_bytes = model_forward_page_bytes(e->forward),
                                        .state_bytes = model_forward_slot_bytes(e->forward),
                                        .seed = XXH3_64bits_withSeed(what, sizeof what, XXH3_64bits(e->kern->numerics, strlen(e->kern->numerics)))};
}

void engine_use_prefixes(struct engine *e, struct prefix_store *s) { e->prefixes = s; }

static const char *request_problem(struct engine *e, const struct engine_request *r)
{
    if (!r->id || engine_find(e, r->id)) return "its id is 0 or in use";
    if (e->n_sequences >= MAX_LIVE) return "too many live requests";
    if (!r->prompt_tokens || r->max_tokens < 1) return "it has no prompt or no tokens to generate";
    if (r->prompt_tokens > (size_t)e->limits.context || r->max_tokens > e->limits.context - (int)r->prompt_tokens)
        return "prompt and generated tokens exceed the context";
    if (r->n_stop < 0 || r->n_stop > MAX_STOP) return "it has too many stop strings";
    for (int i = 0; i < r->n_stop; i++)
        if (!r->stop[i][0]) return "a stop string is empty";
    for (size_t i = 0; i < r->prompt_tokens; i++)
        if (r->prompt[i] < 0 || r->prompt[i] >= e->config.vocab) return "a prompt token is outside the vocabulary";
    return NULL;
}

enum rc engine_submit(struct engine *e, const struct engine_request *r, struct err *err)
{
    const char *problem = request_problem(e, r);
    if (problem) return err_set(err, RC_BAD_INPUT, EXIT_INTERNAL, "bad_request", "request %" PRIu64 ": %s", r->id, problem);
    if (e->n_sequences == e->plan_input_cap) {
        int cap = e->plan_input_cap ? 2 * e->plan_input_cap : 16;
        struct plan_sequence *grown = realloc(e->plan_input, (size_t)cap * sizeof *grown);
        if (!grown) return err_no_memory(err);
        e->plan_input = grown;
        e->plan_input_cap = cap;
    }
    struct sequence *s = NULL;
    enum rc rc = sequence_open(r, e->o.trace, &s, err);
    if (rc == RC_OK) rc = engine_prefix_submitted(e, s, err);
    if (rc != RC_OK) {
        sequence_free(s);
        return rc;
    }
    struct sequence **end = &e->sequences;
    while (*end) end = &(*end)->next;
    *end = s;
    e->n_sequences++;
    return RC_OK;
}

struct sequence *engine_find(struct engine *e, uint64_t id)
{
    struct sequence *s = e->sequences;
    while (s && s->id != id) s = s->next;
    return s;
}

void engine_remove(struct engine *e, struct sequence *s)
{
    struct sequence **at = &e->sequences;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    e->n_sequences--;
    sequence_free(s);
}

void engine_cancel(struct engine *e, uint64_t id)
{
    struct sequence *s = engine_find(e, id);
    if (s) s->retire = true;
}

int engine_position(const struct engine *e, uint64_t id)
{
    const struct sequence *s = e->sequences;
    while (s && s->id != id) s = s->next;
    return s && s->state == PLAN_RUNNING ? s->computed : 0;
}

bool engine_busy(const struct engine *e) { return e->sequences != NULL; }

struct engine_stats engine_stats_of(const struct engine *e) { return e->stats; }

bool engine_next_event(struct engine *e, struct engine_event *out)
{
    if (e->next_event >= e->n_events) return false;
    const struct sequence *s = e->events[e->next_event++];
    *out = (struct engine_event){
        .kind = s->failed ? ENGINE_EVENT_FAILED : ENGINE_EVENT_DONE,
        .id = s->id,
        .finish = s->finish,
        .text = s->text.data ? s->text.data : "",
        .text_len = s->text.len,
        .tokens = s->tokens + s->prompt_tokens,
        .n_tokens = (size_t)s->answered,
        .trace = s->trace,
        .prompt_tokens = (size_t)s->prompt_tokens,
        .timing = s->timing,
    };
    if (s->failed) {
        out->code = "non_finite_logits";
        out->message = "the model's logits are not finite numbers";
    }
    return true;
}
