/* model_slice: a rank's heads, FFN columns and vocabulary rows as spans of stored tensors.
 *
 * Hugging Face's files store heads in the engine's order, so that every share is one span (three in what holds GDN's
 * queries, keys and values one below the other). GGUF of qwen35 deals GDN's value heads differently: of R value heads to
 * each of K key heads, head k R + r is stored as number r K + k. The engine's order is k R + r, so that a key head and its
 * value heads are neighbours and a rank's share is one run; stored order is undone here, by spans: of rows where heads are
 * outputs, of columns where they are inputs. */
#include "model_slice.h"

#include <stdlib.h>

static struct kern_span span_of(struct range r, int each)
{
    return (struct kern_span){(uint64_t)r.first * (uint64_t)each, (uint64_t)r.count * (uint64_t)each};
}

/* Where value head `head` of the engine's order is stored. */
static int stored_head(const struct model_config *c, int head)
{
    if (c->layout != MODEL_LAYOUT_GGUF) return head;
    int of_each = c->gdn_v_heads / c->gdn_k_heads;
    return head % of_each * c->gdn_k_heads + head / of_each;
}

/* What is written next. */
struct writer {
    const struct model_config *c;
    const struct rank_part *part;
    struct kern_span *next;
};

static struct kern_span *add(struct writer *w, struct kern_span s)
{
    *w->next = s;
    return w->next++;
}

/* The value heads, `width` stored rows each from `base` on; neighbours become one span. Returns their number. */
static int add_values(struct writer *w, uint64_t base, int width)
{
    const struct range heads = w->part->gdn_v_heads;
    struct kern_span *first = w->next;
    for (int i = 0; i < heads.count; i++) {
        struct kern_span s = span_of((struct range){stored_head(w->c, heads.first + i), 1}, width);
        s.first += base;
        if (w->next > first && w->next[-1].first + w->next[-1].count == s.first) w->next[-1].count += s.count;
        else add(w, s);
    }
    return (int)(w->next - first);
}

static void set_rows(struct model_slices *s, enum model_role role, const struct kern_span *rows, int n)
{
    s->of[role].rows = rows;
    s->of[role].n_rows = n;
}

static void set_cols(struct model_slices *s, enum model_role role, const struct kern_span *cols, int n)
{
    s->of[role].cols = cols;
    s->of[role].n_cols = n;
}

static void slice_plain(struct model_slices *s, struct writer *w)
{
    const struct model_config *c = w->c;
    const struct kern_span *q = add(w, span_of(w->part->q_heads, c->head_dim * (c->attn_gate ? 2 : 1)));
    const struct kern_span *heads = add(w, span_of(w->part->q_heads, c->head_dim));
    const struct kern_span *kv = add(w, span_of(w->part->kv_heads, c->head_dim));
    const struct kern_span *ffn = add(w, span_of(w->part->ffn, 1)), *vocab = add(w, span_of(w->part->vocab, 1));
    const struct kern_span *joined = add(w, span_of(w->part->mtp_rows, 1));
    set_rows(s, ROLE_Q, q, 1);
    set_rows(s, ROLE_K, kv, 1);
    set_rows(s, ROLE_V, kv, 1);
    set_cols(s, ROLE_O, heads, 1);
    set_cols(s, ROLE_Q_BIAS, q, 1);
    set_cols(s, ROLE_K_BIAS, kv, 1);
    set_cols(s, ROLE_V_BIAS, kv, 1);
    set_rows(s, ROLE_GATE, ffn, 1);
    set_rows(s, ROLE_UP, ffn, 1);
    set_cols(s, ROLE_DOWN, ffn, 1);
    set_rows(s, ROLE_HEAD, vocab, 1);
    set_rows(s, ROLE_MTP_FC, joined, 1);
}

static void slice_gdn(struct model_slices *s, struct writer *w)
{
    const struct model_config *c = w->c;
    const uint64_t keys = (uint64_t)c->gdn_k_heads * (uint64_t)c->gdn_k_dim;
    const struct kern_span *channels = w->next;
    if (w->part->gdn_k_heads.count) {
        add(w, span_of(w->part->gdn_k_heads, c->gdn_k_dim));
        add(w, span_of(w->part->gdn_k_heads, c->gdn_k_dim))->first += keys;
        add_values(w, 2 * keys, c->gdn_v_dim);
    }
    const int n_channels = (int)(w->next - channels);
    const struct kern_span *values = w->next;
    const int n_values = add_values(w, 0, c->gdn_v_dim);
    const struct kern_span *heads = w->next;
    const int n_heads = add_values(w, 0, 1);
    set_rows(s, ROLE_GDN_QKV, channels, n_channels);
    set_rows(s, ROLE_GDN_CONV, channels, n_channels);
    set_rows(s, ROLE_GDN_Z, values, n_values);
    set_cols(s, ROLE_GDN_OUT, values, n_values);
    set_rows(s, ROLE_GDN_A, heads, n_heads);
    set_rows(s, ROLE_GDN_B, heads, n_heads);
    set_cols(s, ROLE_GDN_A_LOG, heads, n_heads);
    set_cols(s, ROLE_GDN_DT, heads, n_heads);
}

enum rc model_slices_make(const struct model_config *c, const struct rank_part *part, struct model_slices *out, struct err *e)
{
    enum { PLAIN = 6, KEYS = 2, LISTS_OF_VALUES = 3, WHOLE = 2 };
    const size_t heads = (size_t)part->gdn_v_heads.count;
    *out = (struct model_slices){.memory = calloc(PLAIN + KEYS + LISTS_OF_VALUES * heads + WHOLE * MODEL_ROLES, sizeof *out->memory)};
    if (!out->memory) return err_no_memory(e);
    struct writer w = {c, part, out->memory};
    for (int role = 0; role < MODEL_ROLES; role++) {
        struct kern_span rows = {0}, cols = {0};
        model_role_shape(c, (enum model_role)role, &rows.count, &cols.count);
        set_rows(out, (enum model_role)role, add(&w, rows), 1);
        set_cols(out, (enum model_role)role, add(&w, cols), 1);
    }
    slice_plain(out, &w);
    if (c->gdn_v_heads) slice_gdn(out, &w);
    return RC_OK;
}

void model_slices_free(struct model_slices *s)
{
    free(s->memory);
    *s = (struct model_slices){0};
}

bool model_role_is_sliced(enum model_role role)
{
    switch (role) {
    case ROLE_HEAD:
    case ROLE_MTP_FC:
    case ROLE_GATE:
    case ROLE_UP:
    case ROLE_DOWN:
    case ROLE_Q:
    case ROLE_K:
    case ROLE_V:
    case ROLE_O:
    case ROLE_GDN_QKV:
    case ROLE_GDN_Z:
    case ROLE_GDN_B:
    case ROLE_GDN_A:
    case ROLE_GDN_OUT: return true;
    default: return false;
    }
}

uint64_t model_spans_total(const struct kern_span *spans, int n)
{
    uint64_t total = 0;
    for (int i = 0; i < n; i++) total += spans[i].count;
    return total;
}
