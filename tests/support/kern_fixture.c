/* kern_fixture: see the header. */
#include "kern_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const isa_names[] = {"generic", "avx2", "avx512", "vnni", "amx"};

double chain_tolerance(double n) { return 4 * sqrt(n) * ROUNDING; }

uint64_t random_next(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = *state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

float random_float(uint64_t *state) { return (float)(random_next(state) >> 40) * 0x1p-23f - 1.0f; }

void random_fill(float *x, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) x[i] = random_float(&seed);
}

enum { GUARD_WORDS = 64 };
static const uint32_t guard_word = 0x7fbadbad; /* a NaN */

float *guarded_new(size_t n)
{
    uint32_t *words = malloc((n + 2 * GUARD_WORDS) * sizeof *words);
    assert_non_null(words);
    for (size_t i = 0; i < n + 2 * GUARD_WORDS; i++) words[i] = guard_word;
    return (float *)(void *)(words + GUARD_WORDS);
}

void guarded_free(float *p, size_t n)
{
    uint32_t *words = (uint32_t *)(void *)p - GUARD_WORDS;
    for (size_t i = 0; i < GUARD_WORDS; i++) {
        assert_int_equal(words[i], guard_word);
        assert_int_equal(words[GUARD_WORDS + n + i], guard_word);
    }
    free(words);
}

float *random_new(size_t n, uint64_t seed)
{
    float *x = malloc((n ? n : 1) * sizeof *x);
    assert_non_null(x);
    random_fill(x, n, seed);
    return x;
}

void assert_bits(const float *a, const float *b, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a))
            fail_msg("%s: value %zu is %a, not %a", what, i, (double)a[i], (double)b[i]);
}

struct kern_split rows_of(enum kern_provenance p, int rows)
{
    return p == KERN_DECODE ? (struct kern_split){rows, 0} : (struct kern_split){0, rows};
}

static void begin(struct kern *k, enum kern_provenance p, const struct kern_segment *segments, int n)
{
    int rows = 0;
    for (int i = 0; i < n; i++)
        if (segments[i].row_first + segments[i].rows > rows) rows = segments[i].row_first + segments[i].rows;
    const struct kern_batch b = {.rows = rows_of(p, rows), .segments = segments, .n_segments = n,
                                 .n_decode_segments = p == KERN_DECODE ? n : 0};
    k->begin(k, &b);
}

void call_rope_kv_append(struct kern *k, const struct kern_attn_shape *s, const struct kern_attn_weights *w,
                         const struct kern_segment *segments, int n, const float *cos_sin, float *qkv, struct kern_kv_layer kv)
{
    begin(k, KERN_PREFILL, segments, n);
    k->rope_kv_append(k, s, w, cos_sin, qkv, kv);
}

void call_attention(struct kern *k, const struct kern_attn_shape *s, enum kern_provenance p, const struct kern_segment *segments,
                    int n, const float *qkv, struct kern_kv_layer kv, float *o)
{
    begin(k, p, segments, n);
    k->attention(k, s, qkv, kv, o);
}

void call_linear(struct kern *k, const struct kern_weight *w, enum kern_provenance p, const float *x, int rows, float *y)
{
    k->linear(k, w, rows_of(p, rows), x, y);
}

/* The backend wants the memory of all slots in one table. */
void call_gdn(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, enum kern_provenance p,
              const struct gdn_rows *sequences, int n, const float *in, float *o)
{
    const size_t state_bytes = k->gdn_state_bytes(s), replay_bytes = k->gdn_replay_bytes(s);
    struct kern_segment *segments = calloc((size_t)n, sizeof *segments);
    char *states = aligned_alloc(64, (size_t)n * state_bytes), *replays = aligned_alloc(64, (size_t)n * replay_bytes);
    assert_true(segments && states && replays);
    for (int i = 0; i < n; i++) {
        const struct gdn_rows *g = &sequences[i];
        segments[i] = (struct kern_segment){g->row_first, g->rows, g->position_first, NULL, i};
        memcpy(states + (size_t)i * state_bytes, g->state, state_bytes);
        if (g->replay) memcpy(replays + (size_t)i * replay_bytes, g->replay, replay_bytes);
    }
    begin(k, p, segments, n);
    k->gdn(k, s, w, (struct kern_gdn_memory){states, replays, state_bytes, replay_bytes}, in, o);
    for (int i = 0; i < n; i++) {
        memcpy(sequences[i].state, states + (size_t)i * state_bytes, state_bytes);
        if (sequences[i].replay) memcpy(sequences[i].replay, replays + (size_t)i * replay_bytes, replay_bytes);
    }
    free(replays);
    free(states);
    free(segments);
}

void call_gdn_replay(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, void *state, void *replay,
                     int rows)
{
    k->gdn_replay(k, s, w, 1, (struct kern_gdn_memory){state, replay, 0, 0}, 0, rows);
}

struct kern *open_isa(const char *isa, int threads)
{
    struct kern *k = NULL;
    struct err e = {0};
    if (kern_cpu_open(isa, threads, &k, &e) != RC_OK) fail_msg("%s: %s", isa, e.text);
    return k;
}

void on_every_isa(void (*test)(struct kern *))
{
    for (size_t i = 0; i < sizeof isa_names / sizeof *isa_names; i++) {
        if (!kern_cpu_numerics(isa_names[i])) {
            print_message("this machine has no %s\n", isa_names[i]);
            continue;
        }
        struct kern *k = open_isa(isa_names[i], 1);
        test(k);
        k->close(k);
    }
}

