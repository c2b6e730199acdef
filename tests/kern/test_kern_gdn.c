/* Gated DeltaNet of the CPU backend against an FP64 oracle, and its rows against themselves.
 *
 * Every instruction set the machine has is tested. Two kinds of claims: values (the recurrence in double precision, from the
 * formulas, with a bound that the oracle derives row by row) and bits (a row and a state are the same alone, among others,
 * on any threads, whatever the cuts of a prompt, beside rows full of NaN; drafts as rows decoded one by one). */
#include "kern_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- a model's layer and one sequence's rows ---- */

/* How fast the state is forgotten: e^g between 0 and 1; hardly at all; hardly at all with a row of g near -50 now and then,
 * where exponents taken as differences of long sums would lose the small ones. */
enum decay { MIXED, WEAK, STRONG, DECAYS };

struct gdn_case {
    struct kern_gdn_shape shape;
    int rows;
};

/* Equal and unequal dimensions, one to three value heads a key head, short and long convolutions, lanes that fill no tile. */
static const struct gdn_case gdn_cases[] = {
    {{2, 4, 64, 64, 4, 1e-6f}, 210},  {{2, 6, 32, 32, 4, 1e-6f}, 300}, {{1, 1, 16, 16, 2, 1e-6f}, 250},
    {{4, 12, 128, 128, 4, 1e-6f}, 80}, {{1, 3, 48, 80, 8, 1e-5f}, 140}, {{2, 2, 80, 16, 3, 1e-6f}, 135},
    {{1, 2, 256, 256, 4, 1e-6f}, 70},
};
enum { N_GDN_CASES = sizeof gdn_cases / sizeof *gdn_cases };

struct layer {
    struct kern_gdn_shape shape;
    struct kern_gdn_weights weights;
    float *values; /* of all weights */
    size_t channels, width, o_width, state_bytes, replay_bytes;
};

static void layer_begin(struct layer *l, struct kern *k, const struct kern_gdn_shape *s, enum decay decay)
{
    *l = (struct layer){.shape = *s};
    l->channels = (size_t)kern_gdn_channels(s);
    l->width = (size_t)kern_gdn_width(s);
    l->o_width = (size_t)(s->v_heads * s->v_dim);
    l->state_bytes = k->gdn_state_bytes(s);
    l->replay_bytes = k->gdn_replay_bytes(s);
    const size_t conv = (size_t)s->conv_width * l->channels, heads = (size_t)s->v_heads;
    l->values = random_new(conv + 2 * heads + (size_t)s->v_dim, 5);
    float *a = l->values + conv, *dt = a + heads, *norm = dt + heads;
    for (size_t h = 0; h < heads; h++) a[h] = decay == STRONG ? -16 : decay == WEAK ? -1e-3f : -4 * fabsf(a[h]) - 0.01f;
    for (int i = 0; i < s->v_dim; i++) norm[i] = 1 + 0.5f * norm[i];
    l->weights = (struct kern_gdn_weights){l->values, a, dt, norm};
}

static void layer_end(struct layer *l) { free(l->values); }

/* Raw rows of a sequence: channels and gates up to 2, b up to 4, a as the decay wants it. */
static float *raw_rows(const struct layer *l, enum decay decay, int rows, uint64_t seed)
{
    float *in = random_new((size_t)rows * l->width, seed);
    const size_t heads = (size_t)l->shape.v_heads;
    for (size_t r = 0; r < (size_t)rows; r++) {
        float *row = in + r * l->width, *b = row + l->width - 2 * heads, *a = b + heads;
        for (float *x = row; x < b; x++) *x *= 2;
        for (size_t h = 0; h < heads; h++) {
            b[h] *= 4;
            if (decay == STRONG) a[h] = (r + h) % 7 == 3 ? 3 + a[h] : -9 + a[h];
        }
    }
    return in;
}

static void *state_new(const struct layer *l)
{
    void *state = aligned_alloc(64, l->state_bytes);
    assert_non_null(state);
    return memset(state, 0, l->state_bytes);
}

/* Rows first .. end of a sequence in one call. */
static void run(struct kern *k, const struct layer *l, enum kern_provenance p, const float *in, int first, int end, void *state,
                void *replay, float *o)
{
    const struct gdn_rows g = {0, end - first, first, state, replay};
    call_gdn(k, &l->shape, &l->weights, p, &g, 1, in + (size_t)first * l->width, o + (size_t)first * l->o_width);
}

static void decode_each(struct kern *k, const struct layer *l, const float *in, int first, int end, void *state, float *o)
{
    for (int r = first; r < end; r++) run(k, l, KERN_DECODE, in, r, r + 1, state, NULL, o);
}

/* ---- oracle ---- */

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static double norm_of(const double *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

/* Channels first .. first + n of row t after convolution and SiLU, and how far float32 may be off: products of magnitude m
 * are rounded and added (width roundings), and SiLU, of slope below 1.1, adds its own. */
static void oracle_convolve(const struct layer *l, const float *in, int t, size_t first, size_t n, double *y, double *error)
{
    const int width = l->shape.conv_width;
    for (size_t i = 0; i < n; i++) {
        double sum = 0, magnitude = 0;
        for (int j = 0; j < width; j++) {
            const int row = t - width + 1 + j;
            if (row < 0) continue;
            const double x = (double)l->weights.conv_dev[(size_t)j * l->channels + first + i] *
                             (double)in[(size_t)row * l->width + first + i];
            sum += x;
            magnitude += fabs(x);
        }
        y[i] = sum * sigmoid(sum);
        error[i] = 1.1 * chain_tolerance(width) * magnitude + ELEMENT_TOLERANCE * fabs(y[i]);
    }
}

/* A row of queries or keys, normalized; returns the error of the vector. */
static double oracle_key(const struct layer *l, const float *in, int t, size_t first, double *y)
{
    const size_t n = (size_t)l->shape.k_dim;
    double error[256];
    oracle_convolve(l, in, t, first, n, y, error);
    const double length = sqrt(norm_of(y, n) * norm_of(y, n) + 1e-6);
    for (size_t i = 0; i < n; i++) y[i] /= length;
    return norm_of(error, n) / length + (chain_tolerance((double)n / 16 + 4) + ELEMENT_TOLERANCE) * norm_of(y, n);
}

/* One value head. Per column of the state: its largest length so far, decayed since, and the error accumulated. Steps
 * contract that by e^g, and each adds its own in quadrature, as roundings of independent signs do. */
struct oracle_head {
    double state[256][256]; /* [k][v] */
    double largest[256], error[256];
};

/* x . column c of the state in the order of the kernels' chain. Each of its partial sums is rounded once; four times the
 * root of the sum of squares of those roundings is not reached by chance. A chunk's chain goes on over up to 64 rows, with
 * partial sums that are taken for as large as the largest before. */
static double oracle_chain(const struct oracle_head *s, const double *x, size_t k_dim, size_t c, double *error)
{
    double sum = 0, squares = 0, largest = 0;
    for (size_t d = 0; d < k_dim; d++) {
        sum += s->state[d][c] * x[d];
        squares += sum * sum;
        largest = fabs(sum) > largest ? fabs(sum) : largest;
    }
    *error = 4 * ROUNDING * sqrt(squares + KERN_GDN_CHUNK * largest * largest);
    return sum;
}

/* What row t brings to a head. */
struct oracle_row {
    double q[256], k[256], v[256], v_error[256];
    double q_error, k_error;
    double beta, g;
};

static void oracle_row(const struct layer *l, const float *in, int t, size_t h, struct oracle_row *r)
{
    const struct kern_gdn_shape *p = &l->shape;
    const size_t k_dim = (size_t)p->k_dim, v_dim = (size_t)p->v_dim, heads = (size_t)p->v_heads;
    const size_t k_head = h / (heads / (size_t)p->k_heads), keys = (size_t)p->k_heads * k_dim;
    r->q_error = oracle_key(l, in, t, k_head * k_dim, r->q) / sqrt((double)k_dim);
    for (size_t d = 0; d < k_dim; d++) r->q[d] /= sqrt((double)k_dim);
    r->k_error = oracle_key(l, in, t, keys + k_head * k_dim, r->k);
    oracle_convolve(l, in, t, 2 * keys + h * v_dim, v_dim, r->v, r->v_error);
    const float *gates = in + (size_t)t * l->width + l->width - 2 * heads;
    const double x = (double)gates[heads + h] + (double)l->weights.dt_dev[h];
    r->beta = sigmoid((double)gates[h]);
    r->g = (double)l->weights.a_dev[h] * (x > 20 ? x : log1p(exp(x)));
}

static void oracle_step(const struct layer *l, const struct oracle_row *r, struct oracle_head *s, double *o, double *o_error)
{
    const size_t k_dim = (size_t)l->shape.k_dim, v_dim = (size_t)l->shape.v_dim;
    const double decay = exp(r->g), q_length = norm_of(r->q, k_dim);
    const double decay_error = ELEMENT_TOLERANCE * (1 + fabs(r->g)); /* relative: g itself is rounded */
    for (size_t c = 0; c < v_dim; c++) {
        for (size_t d = 0; d < k_dim; d++) s->state[d][c] *= decay;
        double u_error, length = 0;
        const double predicted = oracle_chain(s, r->k, k_dim, c, &u_error), u = r->beta * (r->v[c] - predicted);
        u_error = r->beta * hypot(u_error, r->v_error[c] + r->k_error * decay * s->largest[c]) + ELEMENT_TOLERANCE * fabs(u);
        for (size_t d = 0; d < k_dim; d++) {
            s->state[d][c] += r->k[d] * u;
            length += s->state[d][c] * s->state[d][c];
        }
        length = sqrt(length);
        const double added = u_error + r->k_error * fabs(u) + decay_error * decay * s->largest[c] + ROUNDING * length;
        s->error[c] = hypot(decay * s->error[c], added);
        s->largest[c] = length > decay * s->largest[c] ? length : decay * s->largest[c];
        o[c] = oracle_chain(s, r->q, k_dim, c, &o_error[c]);
        o_error[c] += q_length * s->error[c] + r->q_error * length;
    }
}

/* The gated norm of a row of a head and its bound. */
static void oracle_output(const struct layer *l, const float *in, int t, size_t h, const double *o, const double *o_error,
                          double *want, double *bound)
{
    const size_t n = (size_t)l->shape.v_dim;
    const double root = sqrt(norm_of(o, n) * norm_of(o, n) / (double)n + (double)l->shape.norm_eps);
    double root_error = 0; /* of the mean of o^2: columns err on their own */
    for (size_t c = 0; c < n; c++) root_error = hypot(root_error, o[c] * o_error[c] / root / (double)n);
    for (size_t c = 0; c < n; c++) {
        const double z = (double)in[(size_t)t * l->width + l->channels + h * n + c];
        const double factor = (double)l->weights.norm_dev[c] * z * sigmoid(z);
        want[c] = o[c] / root * factor;
        bound[c] = fabs(factor) / root * (o_error[c] + fabs(o[c]) / root * root_error) + ELEMENT_TOLERANCE * fabs(want[c]);
    }
}

struct oracle {
    double *want, *bound; /* [rows][o_width] */
};

static struct oracle oracle_new(const struct layer *l, const float *in, int rows)
{
    const size_t n = (size_t)rows * l->o_width, dim = (size_t)l->shape.v_dim;
    struct oracle a = {malloc(n * sizeof(double)), malloc(n * sizeof(double))};
    struct oracle_head *s = malloc(sizeof *s);
    struct oracle_row *row = malloc(sizeof *row);
    assert_true(a.want && a.bound && s && row);
    for (size_t h = 0; h < (size_t)l->shape.v_heads; h++) {
        memset(s, 0, sizeof *s);
        for (int t = 0; t < rows; t++) {
            double o[256], o_error[256];
            const size_t at = (size_t)t * l->o_width + h * dim;
            oracle_row(l, in, t, h, row);
            oracle_step(l, row, s, o, o_error);
            oracle_output(l, in, t, h, o, o_error, a.want + at, a.bound + at);
        }
    }
    free(row);
    free(s);
    return a;
}

static void oracle_free(struct oracle *a)
{
    free(a->want);
    free(a->bound);
}

/* Each value within its bound. Those are wide, for they add up what is not reached by chance at every step; all values
 * together must therefore be close as well: an output is some sixteen roundings away from its inputs (convolution, norms, gates,
 * the two chains, whose state forgets older errors), of random sign, so 4 of them off on average; four times that. */
static void check_rows(const struct layer *l, const struct oracle *a, const float *o, int first, int end, const char *what)
{
    const double most = 16 * ROUNDING;
    double errors = 0, values = 0;
    for (size_t i = (size_t)first * l->o_width; i < (size_t)end * l->o_width; i++) {
        const double error = (double)o[i] - a->want[i];
        if (!(fabs(error) <= a->bound[i]))
            fail_msg("%s, dims %d %d: row %zu value %zu: %g, oracle %g, bound %g", what, l->shape.k_dim, l->shape.v_dim,
                     i / l->o_width, i % l->o_width, (double)o[i], a->want[i], a->bound[i]);
        errors += error * error;
        values += a->want[i] * a->want[i];
    }
    if (!(errors <= most * most * values))
        fail_msg("%s, dims %d %d: root mean square of errors is %g roundings", what, l->shape.k_dim, l->shape.v_dim,
                 sqrt(errors / values) / ROUNDING);
}

static void check_oracle(struct kern *k, const struct gdn_case *c, enum decay decay)
{
    struct layer l;
    layer_begin(&l, k, &c->shape, decay);
    const size_t n = (size_t)c->rows * l.o_width, in_bytes = (size_t)c->rows * l.width * sizeof(float);
    float *in = raw_rows(&l, decay, c->rows, 17), *before = malloc(in_bytes), *o = guarded_new(n);
    assert_non_null(before);
    memcpy(before, in, in_bytes);
    void *state = state_new(&l);
    struct oracle a = oracle_new(&l, in, c->rows);
    decode_each(k, &l, in, 0, c->rows, state, o);
    check_rows(&l, &a, o, 0, c->rows, "decode");
    memset(state, 0, l.state_bytes);
    memset(o, 0xff, n * sizeof *o);
    run(k, &l, KERN_PREFILL, in, 0, c->rows, state, NULL, o);
    check_rows(&l, &a, o, 0, c->rows, "prefill");
    assert_memory_equal(in, before, in_bytes);
    oracle_free(&a);
    guarded_free(o, n);
    free(state);
    free(before);
    free(in);
    layer_end(&l);
}

static void test_gdn_oracle(struct kern *k)
{
    for (int i = 0; i < N_GDN_CASES; i++)
        for (int d = 0; d < DECAYS; d++)
            if (gdn_cases[i].shape.k_dim <= 64 || d == i % DECAYS) check_oracle(k, &gdn_cases[i], (enum decay)d);
}

/* ---- bits ---- */

/* Every prompt length modulo 64: its rows have the bits they have in a longer prompt, and generated tokens go on from its
 * state as the oracle does. */
static void test_gdn_lengths(struct kern *k)
{
    enum { LONGEST = 160, MORE = 4 };
    const struct kern_gdn_shape shape = {2, 6, 32, 32, 4, 1e-6f};
    struct layer l;
    layer_begin(&l, k, &shape, MIXED);
    const size_t n = LONGEST * l.o_width;
    float *in = raw_rows(&l, MIXED, LONGEST, 23), *whole = guarded_new(n), *o = guarded_new(n);
    void *state = state_new(&l);
    struct oracle a = oracle_new(&l, in, LONGEST);
    run(k, &l, KERN_PREFILL, in, 0, LONGEST, state, NULL, whole);
    for (int length = 1; length < LONGEST - MORE; length += length == 66 ? 60 : 1) {
        memset(state, 0, l.state_bytes);
        run(k, &l, KERN_PREFILL, in, 0, length, state, NULL, o);
        assert_bits(o, whole, (size_t)length * l.o_width, "shorter prompt");
        decode_each(k, &l, in, length, length + MORE, state, o);
        check_rows(&l, &a, o, length, length + MORE, "generated behind a prompt");
    }
    oracle_free(&a);
    guarded_free(o, n);
    guarded_free(whole, n);
    free(state);
    free(in);
    layer_end(&l);
}

/* The same prompt in chunks of 64, 128, 192 and whole, on other threads: outputs and state. */
static void check_cuts(const char *isa, const struct kern_gdn_shape *shape, enum decay decay)
{
    enum { ROWS = 300, TURNS = 4 };
    float *outputs[TURNS];
    void *states[TURNS];
    size_t n = 0, state_bytes = 0;
    for (int i = 0; i < TURNS; i++) {
        struct kern *k = open_isa(isa, 1 + i % 3);
        struct layer l;
        layer_begin(&l, k, shape, decay);
        n = ROWS * l.o_width;
        state_bytes = l.state_bytes;
        outputs[i] = guarded_new(n);
        states[i] = state_new(&l);
        float *in = raw_rows(&l, decay, ROWS, 31);
        const int step = i == 3 ? ROWS : (i + 1) * KERN_GDN_CHUNK;
        for (int first = 0; first < ROWS; first += step) {
            const int end = first + step < ROWS ? first + step : ROWS;
            run(k, &l, KERN_PREFILL, in, first, end, states[i], NULL, outputs[i]);
        }
        free(in);
        layer_end(&l);
        k->close(k);
    }
    for (int i = 1; i < TURNS; i++) {
        assert_bits(outputs[i], outputs[0], n, "cut prompt");
        assert_memory_equal(states[i], states[0], state_bytes);
    }
    for (int i = 0; i < TURNS; i++) {
        guarded_free(outputs[i], n);
        free(states[i]);
    }
}

static void test_gdn_cuts(struct kern *k)
{
    const char *isa = k->numerics + strlen("cpu-");
    check_cuts(isa, &gdn_cases[0].shape, MIXED);
    check_cuts(isa, &gdn_cases[4].shape, WEAK);
    check_cuts(isa, &gdn_cases[5].shape, STRONG);
}

/* Rows behind a row may hold anything: nothing of them reaches it, though they share its chunk and tile. */
static void test_gdn_causal(struct kern *k)
{
    enum { ROWS = 100 };
    struct layer l;
    layer_begin(&l, k, &gdn_cases[1].shape, MIXED);
    const size_t n = ROWS * l.o_width;
    float *in = raw_rows(&l, MIXED, ROWS, 41), *clean = guarded_new(n), *o = guarded_new(n);
    void *state = state_new(&l);
    run(k, &l, KERN_PREFILL, in, 0, ROWS, state, NULL, clean);
    for (int poisoned = ROWS - 1; poisoned > 60; poisoned--) {
        for (size_t i = 0; i < l.width; i++) in[(size_t)poisoned * l.width + i] = i % 2 ? NAN : INFINITY;
        memset(state, 0, l.state_bytes);
        run(k, &l, KERN_PREFILL, in, 0, ROWS, state, NULL, o);
        assert_bits(o, clean, (size_t)poisoned * l.o_width, "row before poisoned rows");
        for (size_t i = 0; i < l.o_width; i++) assert_true(isnan(o[(size_t)poisoned * l.o_width + i])); /* where it belongs */
    }
    guarded_free(o, n);
    guarded_free(clean, n);
    free(state);
    free(in);
    layer_end(&l);
}

/* Several sequences in one call against each alone; rows that belong to none hold NaN and stay as they are, and one
 * sequence is NaN altogether. */
static void check_batch(const char *isa, const struct kern_gdn_shape *shape, enum kern_provenance p, int threads)
{
    enum { N = 6, SICK = 2, GAP = 3, PROMPT = 64 };
    static const int lengths[N] = {5, 64, 70, 1, 133, 30};
    struct kern *k = open_isa(isa, threads), *alone = open_isa(isa, 1);
    struct layer l;
    layer_begin(&l, k, shape, MIXED);
    struct gdn_rows g[N];
    float *ins[N];
    void *states[N], *copies[N], *replays[N];
    int rows = GAP;
    for (int i = 0; i < N; i++) {
        const int length = p == KERN_PREFILL ? lengths[i] : i % (KERN_MAX_DRAFTS + 1) + 1;
        ins[i] = raw_rows(&l, MIXED, PROMPT + length, 50 + (uint64_t)i);
        states[i] = state_new(&l);
        copies[i] = state_new(&l);
        replays[i] = malloc(l.replay_bytes);
        float *o = guarded_new(PROMPT * l.o_width);
        run(alone, &l, KERN_PREFILL, ins[i], 0, PROMPT, states[i], NULL, o);
        guarded_free(o, PROMPT * l.o_width);
        if (i == SICK) memset(states[i], 0xff, l.state_bytes);
        memcpy(copies[i], states[i], l.state_bytes);
        g[i] = (struct gdn_rows){rows, length, PROMPT, states[i], p == KERN_DECODE && length > 1 ? replays[i] : NULL};
        rows += length + GAP;
    }
    float *in = guarded_new((size_t)rows * l.width), *o = guarded_new((size_t)rows * l.o_width);
    float *untouched = guarded_new((size_t)rows * l.o_width);
    for (int i = 0; i < N; i++)
        memcpy(in + (size_t)g[i].row_first * l.width, ins[i] + PROMPT * l.width, (size_t)g[i].rows * l.width * sizeof *in);
    call_gdn(k, &l.shape, &l.weights, p, g, N, in, o);
    for (int i = 0; i < N; i++) {
        const size_t n = (size_t)g[i].rows * l.o_width;
        float *rows_alone = guarded_new(n), *here = o + (size_t)g[i].row_first * l.o_width;
        const struct gdn_rows one = {0, g[i].rows, PROMPT, copies[i], g[i].replay};
        call_gdn(alone, &l.shape, &l.weights, p, &one, 1, ins[i] + PROMPT * l.width, rows_alone);
        if (i != SICK) assert_bits(here, rows_alone, n, "row among others");
        if (i != SICK) assert_memory_equal(states[i], copies[i], l.state_bytes);
        memset(here, 0, n * sizeof *here); /* and now only rows of no segment are NaN */
        memset(untouched + (size_t)g[i].row_first * l.o_width, 0, n * sizeof *here);
        guarded_free(rows_alone, n);
    }
    assert_memory_equal(o, untouched, (size_t)rows * l.o_width * sizeof *o);
    for (int i = 0; i < N; i++) {
        free(ins[i]);
        free(states[i]);
        free(copies[i]);
        free(replays[i]);
    }
    guarded_free(untouched, (size_t)rows * l.o_width);
    guarded_free(o, (size_t)rows * l.o_width);
    guarded_free(in, (size_t)rows * l.width);
    layer_end(&l);
    alone->close(alone);
    k->close(k);
}

static void test_gdn_batch(struct kern *k)
{
    static const int cases[] = {0, 1, 4};
    const char *isa = k->numerics + strlen("cpu-");
    for (int i = 0; i < 3; i++)
        for (int threads = 1; threads <= 3; threads++) {
            check_batch(isa, &gdn_cases[cases[i]].shape, KERN_PREFILL, threads);
            check_batch(isa, &gdn_cases[cases[i]].shape, KERN_DECODE, threads);
        }
}

/* A row and drafts in one call: outputs as if decoded one by one; then any number of them accepted: the state too, also
 * after a next round. Threads share out whole key heads or single value heads. */
static void check_drafts(const char *isa, const struct kern_gdn_shape *shape, int threads)
{
    enum { FIRST = 10, ROUND = KERN_MAX_DRAFTS + 1, ROWS = FIRST + 3 * ROUND };
    struct kern *k = open_isa(isa, threads);
    struct layer l;
    layer_begin(&l, k, shape, MIXED);
    const size_t n = ROWS * l.o_width;
    float *in = raw_rows(&l, MIXED, ROWS, 71), *wrong = raw_rows(&l, MIXED, ROWS, 72), *one = guarded_new(n), *o = guarded_new(n);
    void *singly = state_new(&l), *drafted = state_new(&l), *replay = malloc(l.replay_bytes);
    assert_non_null(replay);
    for (int accepted = 0; accepted <= KERN_MAX_DRAFTS; accepted++)
        for (int behind = 0; accepted + behind <= KERN_MAX_DRAFTS; behind++) { /* rejected drafts */
            memset(singly, 0, l.state_bytes);
            run(k, &l, KERN_PREFILL, in, 0, FIRST, singly, NULL, one);
            memcpy(drafted, singly, l.state_bytes);
            for (int round = 0, row = FIRST; round < 2; round++, row += 1 + accepted) {
                float *rows = malloc(ROUND * l.width * sizeof *rows);
                assert_non_null(rows);
                memcpy(rows, in + (size_t)row * l.width, (size_t)(1 + accepted) * l.width * sizeof *rows);
                memcpy(rows + (size_t)(1 + accepted) * l.width, wrong, (size_t)behind * l.width * sizeof *rows);
                const struct gdn_rows g = {0, 1 + accepted + behind, row, drafted, replay};
                memset(replay, 0xff, l.replay_bytes);
                call_gdn(k, &l.shape, &l.weights, KERN_DECODE, &g, 1, rows, o);
                decode_each(k, &l, in, row, row + 1, singly, one);
                assert_memory_equal(drafted, singly, l.state_bytes); /* drafts leave no trace */
                decode_each(k, &l, in, row + 1, row + 1 + accepted, singly, one);
                assert_bits(o, one + (size_t)row * l.o_width, (size_t)(1 + accepted) * l.o_width, "drafted row");
                memset(rows, 0xff, ROUND * l.width * sizeof *rows);
                call_gdn_replay(k, &l.shape, &l.weights, drafted, replay, accepted);
                assert_memory_equal(drafted, singly, l.state_bytes);
                free(rows);
            }
        }
    guarded_free(o, n);
    guarded_free(one, n);
    free(replay);
    free(drafted);
    free(singly);
    free(wrong);
    free(in);
    layer_end(&l);
    k->close(k);
}

static void test_gdn_drafts(struct kern *k)
{
    const char *isa = k->numerics + strlen("cpu-");
    static const int cases[] = {1, 2, 4, 5}; /* histories shorter and longer than a round */
    for (int i = 0; i < 4; i++) check_drafts(isa, &gdn_cases[cases[i]].shape, 1 + i % 3);
}

/* ---- edges ---- */

static void check_finite(struct kern *k, const struct layer *l, const float *in, int rows, bool zero)
{
    const size_t n = (size_t)rows * l->o_width;
    float *o = guarded_new(n);
    void *state = state_new(l);
    for (int p = 0; p < 2; p++) {
        memset(state, 0, l->state_bytes);
        if (p)
            decode_each(k, l, in, 0, rows, state, o);
        else
            run(k, l, KERN_PREFILL, in, 0, rows, state, NULL, o);
        for (size_t i = 0; i < n; i++) assert_true(isfinite(o[i]) && (!zero || o[i] == 0));
    }
    free(state);
    guarded_free(o, n);
}

/* Rows of zeros, whose keys have no direction; gates far beyond saturation; large and tiny values. */
static void test_gdn_extremes(struct kern *k)
{
    enum { ROWS = 70 };
    struct layer l;
    layer_begin(&l, k, &gdn_cases[1].shape, MIXED);
    const size_t heads = (size_t)l.shape.v_heads;
    float *in = raw_rows(&l, MIXED, ROWS, 81);
    static const float scales[] = {1, 1e-30f, 1e15f};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        for (size_t r = 0; r < ROWS; r++)
            for (size_t j = 0; j < l.channels; j++) in[r * l.width + j] = random_float(&(uint64_t){r * l.width + j}) * scales[i];
        for (size_t r = 0; r < ROWS; r++)
            for (size_t h = 0; h < heads; h++) {
                float *b = in + (r + 1) * l.width - 2 * heads + h, *a = b + heads;
                *b = r % 3 == 0 ? -1e4f : r % 3 == 1 ? 1e4f : 0;
                *a = r % 5 == 0 ? -1e4f : r % 5 == 1 ? 1e4f : 0;
            }
        check_finite(k, &l, in, ROWS, false);
    }
    memset(in, 0, ROWS * l.width * sizeof *in);
    check_finite(k, &l, in, ROWS, true);
    free(in);
    layer_end(&l);
}

static void test_gdn_sizes(struct kern *k)
{
    for (int i = 0; i < N_GDN_CASES; i++) {
        const struct kern_gdn_shape *s = &gdn_cases[i].shape;
        const size_t channels = (size_t)kern_gdn_channels(s);
        const size_t state = (size_t)(s->v_heads * s->k_dim * s->v_dim) + (size_t)(s->conv_width - 1) * channels;
        assert_int_equal(k->gdn_state_bytes(s), (4 * state + 63) / 64 * 64);
        assert_int_equal(k->gdn_replay_bytes(s) % 64, 0);
        assert_true(k->gdn_replay_bytes(s) >= 4 * KERN_MAX_DRAFTS * (channels + 2 * (size_t)s->v_heads));
    }
}

ON_EVERY_ISA(test_gdn_oracle)
ON_EVERY_ISA(test_gdn_lengths)
ON_EVERY_ISA(test_gdn_cuts)
ON_EVERY_ISA(test_gdn_causal)
ON_EVERY_ISA(test_gdn_batch)
ON_EVERY_ISA(test_gdn_drafts)
ON_EVERY_ISA(test_gdn_extremes)
ON_EVERY_ISA(test_gdn_sizes)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gdn_oracle_isas), cmocka_unit_test(test_gdn_lengths_isas),
        cmocka_unit_test(test_gdn_cuts_isas),   cmocka_unit_test(test_gdn_causal_isas),
        cmocka_unit_test(test_gdn_batch_isas),  cmocka_unit_test(test_gdn_drafts_isas),
        cmocka_unit_test(test_gdn_extremes_isas), cmocka_unit_test(test_gdn_sizes_isas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
