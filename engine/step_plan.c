/* step_plan: retiring and saving, then one pass over the running sequences in order of admission, then restores, then admissions, then drafts.
 *
 * Serving in order of admission is what makes preemption safe: a victim is always younger than the one that takes its
 * pages and has not been given rows in this plan yet, so no segment is ever withdrawn. A single sequence always fits the
 * store (engine_open sees to it), so the oldest cannot starve. Drafts come last: a guess displaces no sequence and keeps
 * none out. */
#include "step_plan.h"

#include <string.h>

#include "kern.h"
#include "kv_pages.h"

struct build {
    const struct plan_input *in;
    struct step_plan *out;
    int order[PLAN_MAX_SEGMENTS]; /* running sequences, oldest first */
    bool gone[PLAN_MAX_SEGMENTS]; /* preempted by this plan */
    const struct plan_sequence *served[PLAN_MAX_SEGMENTS]; /* whose segment it is */
    int n_running;
    int pages_free;
    int rows_left;
    bool preempted;
};

static bool act(struct build *b, uint64_t request, enum plan_action_kind kind)
{
    if (b->out->n_actions == PLAN_MAX_ACTIONS) return false;
    b->out->actions[b->out->n_actions++] = (struct plan_action){request, kind, 0};
    return true;
}

static void retire_all(struct build *b)
{
    for (int i = 0; i < b->in->n_sequences; i++) {
        const struct plan_sequence *s = &b->in->sequences[i];
        if (s->retire && act(b, s->request, PLAN_RETIRE) && s->state == PLAN_RUNNING) b->pages_free += s->pages;
    }
}

static void save_wanted(struct build *b)
{
    for (int i = 0; i < b->in->n_sequences; i++) {
        const struct plan_sequence *s = &b->in->sequences[i];
        if (s->save && !s->retire && act(b, s->request, PLAN_SAVE)) b->out->actions[b->out->n_actions - 1].pages = (uint32_t)s->save_pages;
    }
}

static void order_running(struct build *b)
{
    for (int i = 0; i < b->in->n_sequences; i++) {
        const struct plan_sequence *s = &b->in->sequences[i];
        if (s->state != PLAN_RUNNING || s->retire || b->n_running == PLAN_MAX_SEGMENTS) continue;
        int at = b->n_running++;
        while (at > 0 && b->in->sequences[b->order[at - 1]].admitted > s->admitted) {
            b->order[at] = b->order[at - 1];
            at--;
        }
        b->order[at] = i;
    }
}

/* Takes the pages of the youngest running sequence after `after` in the order. False: there is none that holds any. */
static bool preempt_youngest(struct build *b, int after)
{
    for (int i = b->n_running - 1; i > after; i--) {
        const struct plan_sequence *s = &b->in->sequences[b->order[i]];
        if (b->gone[i] || !s->pages) continue;
        if (!act(b, s->request, PLAN_PREEMPT)) return false;
        b->gone[i] = b->preempted = true;
        b->pages_free += s->pages;
        return true;
    }
    return false;
}

/* Gives sequence s its next rows: one decode row, or as many prompt rows as budget and pages allow. may_preempt: index in the
 * order, or -1 for a sequence that has just been admitted and may displace nobody. */
static void serve(struct build *b, const struct plan_sequence *s, int pages_held, int may_preempt)
{
    bool decode = s->computed >= s->prompt_tokens;
    int rows = decode ? 1 : s->prompt_tokens - s->computed;
    const bool cut = !decode && s->cut > s->computed && s->cut - s->computed < rows;
    if (cut) rows = s->cut - s->computed;
    if (!decode && rows > b->rows_left) rows = b->rows_left / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    if (rows <= 0 || b->out->n_segments == PLAN_MAX_SEGMENTS) return;
    int missing = kv_pages_for(s->computed + rows) - pages_held;
    while (missing > b->pages_free && may_preempt >= 0 && preempt_youngest(b, may_preempt)) {}
    if (missing > b->pages_free) {
        if (decode) return;
        rows = (pages_held + b->pages_free) * KV_PAGE_TOKENS - s->computed;
        if (rows <= 0) return;
        missing = kv_pages_for(s->computed + rows) - pages_held;
    }
    b->pages_free -= missing;
    if (!decode) b->rows_left -= rows;
    b->served[b->out->n_segments] = s;
    b->out->segments[b->out->n_segments++] = (struct plan_segment){
        .request = s->request,
        .position_first = s->computed,
        .rows = rows,
        .kind = decode ? PLAN_DECODE : PLAN_PREFILL,
        .picks = s->computed + rows >= s->prompt_tokens,
        .keep = cut && s->computed + rows == s->cut,
    };
}

static int running_after(const struct build *b)
{
    int n = 0;
    for (int i = 0; i < b->n_running; i++) n += !b->gone[i];
    return n;
}

/* Index of the next preempted sequence by age, or -1. */
static int oldest_preempted(const struct plan_input *in, int64_t after)
{
    int best = -1;
    for (int i = 0; i < in->n_sequences; i++) {
        const struct plan_sequence *s = &in->sequences[i];
        if (s->state != PLAN_PREEMPTED || s->retire || s->admitted <= after) continue;
        if (best < 0 || s->admitted < in->sequences[best].admitted) best = i;
    }
    return best;
}

/* Restores what fits, then admits from the queue. A newcomer must leave one page for every running sequence, or it would be
 * thrown out again at once. */
static void bring_in(struct build *b)
{
    const struct plan_input *in = b->in;
    int running = running_after(b);
    int64_t after = -1;
    for (int i; (i = oldest_preempted(in, after)) >= 0;) {
        const struct plan_sequence *s = &in->sequences[i];
        after = s->admitted;
        if (running >= in->active || b->pages_free < kv_pages_for(s->computed + 1) + running) return;
        if (!act(b, s->request, PLAN_RESTORE)) return;
        b->pages_free -= s->pages;
        running++;
        serve(b, s, s->pages, -1);
    }
    for (int i = 0; i < in->n_sequences && running < in->active && b->rows_left > 0; i++) {
        const struct plan_sequence *s = &in->sequences[i];
        if (s->state != PLAN_QUEUED || s->retire || s->held) continue;
        if (s->probe) {
            if (!act(b, s->request, PLAN_PROBE)) return;
            running++; /* it has a place in the next plan */
            continue;
        }
        int first_rows = s->computed < s->prompt_tokens ? s->prompt_tokens - s->computed : 1;
        if (first_rows > b->rows_left) first_rows = b->rows_left;
        if (b->pages_free < kv_pages_for(s->computed + first_rows) + running) return;
        if (!act(b, s->request, PLAN_ADMIT)) return;
        b->pages_free -= s->pages;
        running++;
        serve(b, s, s->pages, -1);
    }
}

/* Lengthens decode segments by the drafts wanted, as far as the pages go. */
static void add_drafts(struct build *b)
{
    for (uint32_t i = 0; i < b->out->n_segments; i++) {
        struct plan_segment *g = &b->out->segments[i];
        const struct plan_sequence *s = b->served[i];
        if (g->kind != PLAN_DECODE) continue;
        int held = kv_pages_for(s->computed + 1);
        int64_t room = ((int64_t)held + b->pages_free) * KV_PAGE_TOKENS - (s->computed + 1);
        g->drafts = (int16_t)(s->drafts < room ? s->drafts : room);
        if (!g->drafts) continue;
        g->rows = 1 + g->drafts;
        g->source = (int16_t)s->source;
        b->pages_free -= kv_pages_for(s->computed + g->rows) - held;
    }
}

static void decode_first(struct step_plan *p)
{
    struct plan_segment sorted[PLAN_MAX_SEGMENTS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n_segments; i++)
        if (p->segments[i].kind == PLAN_DECODE) sorted[n++] = p->segments[i];
    for (uint32_t i = 0; i < p->n_segments; i++)
        if (p->segments[i].kind == PLAN_PREFILL) sorted[n++] = p->segments[i];
    memcpy(p->segments, sorted, n * sizeof sorted[0]);
}

bool step_plan_build(const struct plan_input *in, struct step_plan *out)
{
    memset(out, 0, sizeof *out);
    out->step = in->step;
    struct build b = {.in = in, .out = out, .pages_free = in->pages_free, .rows_left = in->prefill_rows};
    retire_all(&b);
    save_wanted(&b);
    if (in->hold) return out->n_actions > 0;
    order_running(&b);
    for (int i = 0; i < b.n_running; i++)
        if (!b.gone[i]) serve(&b, &in->sequences[b.order[i]], in->sequences[b.order[i]].pages, i);
    if (!b.preempted) bring_in(&b);
    add_drafts(&b);
    decode_first(out);
    return out->n_actions || out->n_segments;
}

static size_t head_bytes(void) { return offsetof(struct step_plan, actions); }

size_t step_plan_pack(const struct step_plan *p, void *out)
{
    char *at = out;
    size_t actions = p->n_actions * sizeof p->actions[0], segments = p->n_segments * sizeof p->segments[0];
    memcpy(at, p, head_bytes());
    memcpy(at + head_bytes(), p->actions, actions);
    memcpy(at + head_bytes() + actions, p->segments, segments);
    return head_bytes() + actions + segments;
}

static bool segment_ok(const struct plan_segment *s)
{
    if (s->rows < 1 || s->position_first < 0 || s->rows > INT32_MAX - s->position_first) return false;
    if (s->drafts < 0 || s->drafts > KERN_MAX_DRAFTS || s->source < DRAFT_NONE || s->source >= DRAFT_SOURCES) return false;
    if ((s->drafts == 0) != (s->source == DRAFT_NONE)) return false;
    if (s->keep != 0 && (s->keep != 1 || s->kind != PLAN_PREFILL || s->picks || (s->position_first + s->rows) % KV_PAGE_TOKENS)) return false;
    if (s->kind == PLAN_DECODE) return s->rows == 1 + s->drafts && s->picks == 1;
    return s->kind == PLAN_PREFILL && s->drafts == 0 && (s->picks == 0 || s->picks == 1);
}

static bool action_ok(const struct plan_action *a)
{
    return a->kind >= PLAN_RETIRE && a->kind <= PLAN_SAVE && (a->kind == PLAN_SAVE ? a->pages <= INT32_MAX : a->pages == 0);
}

enum rc step_plan_unpack(const void *bytes, size_t n_bytes, struct step_plan *out, struct err *e)
{
    const char *at = bytes;
    memset(out, 0, sizeof *out);
    if (n_bytes < head_bytes()) goto bad;
    memcpy(out, at, head_bytes());
    if (out->n_actions > PLAN_MAX_ACTIONS || out->n_segments > PLAN_MAX_SEGMENTS) goto bad;
    size_t actions = out->n_actions * sizeof out->actions[0], segments = out->n_segments * sizeof out->segments[0];
    if (n_bytes != head_bytes() + actions + segments) goto bad;
    memcpy(out->actions, at + head_bytes(), actions);
    memcpy(out->segments, at + head_bytes() + actions, segments);
    for (uint32_t i = 0; i < out->n_actions; i++)
        if (!action_ok(&out->actions[i])) goto bad;
    for (uint32_t i = 0; i < out->n_segments; i++)
        if (!segment_ok(&out->segments[i])) goto bad;
    return RC_OK;
bad:
    return err_set(e, RC_FATAL, EXIT_LOCKSTEP, "bad_plan", "the step plan in the shared segment is malformed");
}
