/* Attention of the CPU backend against an FP64 oracle, and its rows against themselves.
 *
 * Every instruction set the machine has is tested, with every KV format. Three kinds of claims: values (within named
 * tolerances of a double precision computation: projections to queries, keys and values; attention from keys and values as
 * stored; for INT8 also attention from values never rounded, within a bound derived from the scales), what is stored (to the
 * bit) and bits (a row gives the same bits alone, among others, as a draft, on any threads, in any chunk and page, beside rows
 * and free slots full of NaN). */
#include "kern_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Scores of magnitude below 8 err by about 8 * 8 roundings (64 products), the exponential carries that into the weights;
 * relative to the largest value. The gate is an element-wise function more. */
#define ATTENTION_TOLERANCE (128 * ROUNDING + ELEMENT_TOLERANCE)
/* A sum of squares in at most 14 roundings, of which the root halves the error; quotients, root and products: 5 more. */
#define NORM_TOLERANCE (12 * ROUNDING)
/* At most 16 fused or 32 plain steps within 16 lanes, 4 rounds of butterflies, a factor of two roundings and its product. */
#define HADAMARD_TOLERANCE (39 * ROUNDING)
/* Half a step, and what the quotient value / scale (below 128) and the scale itself add by their roundings. */
#define INT8_STEP (0.5 + 0x1p-15)
#define NORM_EPS 1e-6f

struct attn_case {
    struct kern_attn_shape shape; /* kv is set by the loops over formats */
    int positions;
    bool biased, normed;
};

/* Ranks of SmolLM2 (1, 2 and 3 of them), a wide group, tails of 16 dimensions, partial rotation, one head; Qwen2.5's bias;
 * the hybrid family's gated, normed heads of 256, six to a KV head. */
static const struct attn_case attn_cases[] = {
    {{9, 3, 64, 64, true, KV_F16, false}, 150, false, false},
    {{6, 2, 64, 64, true, KV_F16, false}, 260, false, false},
    {{3, 1, 64, 64, true, KV_F16, false}, 65, false, true},
    {{14, 2, 64, 64, false, KV_F16, false}, 80, true, false},
    {{9, 1, 80, 32, false, KV_F16, true}, 140, false, false},
    {{2, 2, 16, 16, true, KV_F16, false}, 129, true, true},
    {{4, 2, 128, 128, false, KV_F16, false}, 70, true, true},
    {{1, 1, 256, 64, false, KV_F16, false}, 66, false, false},
    {{12, 2, 256, 64, false, KV_F16, true}, 70, false, true},
};
enum { N_ATTN_CASES = sizeof attn_cases / sizeof *attn_cases };
enum { MOST_POSITIONS = 704, MOST_PAGES = MOST_POSITIONS / KV_PAGE_TOKENS, MOST_DIM = 256 };

static struct attn_case with_format(struct attn_case c, enum kv_format f)
{
    c.shape.kv = f;
    return c;
}

/* One sequence's rows of one layer. raw: projections as they come out of the matrix. */
struct sequence {
    struct kern_attn_shape shape;
    struct kern_attn_weights weights;
    int positions;
    size_t width, o_width;
    float *raw, *cos_sin, *bias, *q_norm, *k_norm;
    struct kern_kv_layer kv;
    size_t kv_bytes;
    int32_t pages[MOST_PAGES];
    float *qkv, *o;
};

static size_t query_width(const struct kern_attn_shape *a) { return (size_t)a->head_dim * (a->gated ? 2 : 1); }

/* First of the keys, first of the values within a row. */
static size_t keys_at(const struct kern_attn_shape *a) { return (size_t)a->n_heads * query_width(a); }
static size_t values_at(const struct kern_attn_shape *a) { return keys_at(a) + (size_t)(a->n_kv_heads * a->head_dim); }

static float *cos_sin_new(int positions, size_t half)
{
    float *table = malloc((size_t)positions * half * 2 * sizeof *table);
    assert_non_null(table);
    for (size_t p = 0; p < (size_t)positions; p++)
        for (size_t i = 0; i < half; i++) {
            const double angle = (double)p * pow(10000, -(double)i / (double)half);
            table[(p * half + i) * 2] = (float)cos(angle);
            table[(p * half + i) * 2 + 1] = (float)sin(angle);
        }
    return table;
}

static void sequence_begin(struct sequence *s, struct kern *k, const struct attn_case *c, uint64_t seed)
{
    *s = (struct sequence){.shape = c->shape, .positions = c->positions};
    const size_t dim = (size_t)c->shape.head_dim;
    s->width = values_at(&c->shape) + (size_t)c->shape.n_kv_heads * dim;
    s->o_width = (size_t)c->shape.n_heads * dim;
    s->raw = random_new((size_t)c->positions * s->width, seed);
    for (size_t i = 0; i < (size_t)c->positions * s->width; i++) s->raw[i] *= 2;
    /* Weights of a layer, the same for every sequence. */
    s->bias = random_new(s->width, 1001);
    s->q_norm = random_new(dim, 1002);
    s->k_norm = random_new(dim, 1003);
    for (size_t i = 0; i < dim; i++) s->q_norm[i] += 1.5f, s->k_norm[i] += 1.5f;
    if (c->biased) s->weights.bias_dev = s->bias;
    if (c->normed)
        s->weights = (struct kern_attn_weights){s->weights.bias_dev, s->q_norm, s->k_norm, NORM_EPS};
    s->cos_sin = cos_sin_new(c->positions, (size_t)c->shape.rope_dim / 2);
    s->kv.page_bytes = k->kv_page_bytes(&s->shape);
    s->kv_bytes = s->kv.page_bytes * (MOST_PAGES + 3);
    s->kv.base_dev = malloc(s->kv_bytes);
    assert_non_null(s->kv.base_dev);
    s->qkv = guarded_new((size_t)c->positions * s->width);
    s->o = guarded_new((size_t)c->positions * s->o_width);
}

static void sequence_end(struct sequence *s)
{
    guarded_free(s->qkv, (size_t)s->positions * s->width);
    guarded_free(s->o, (size_t)s->positions * s->o_width);
    free(s->raw);
    free(s->bias);
    free(s->q_norm);
    free(s->k_norm);
    free(s->cos_sin);
    free(s->kv.base_dev);
}

/* Empty pages (all NaN, scales too), another page order per turn. */
static void sequence_restart(struct sequence *s, int turn)
{
    memset(s->kv.base_dev, 0xff, s->kv_bytes);
    memcpy(s->qkv, s->raw, (size_t)s->positions * s->width * sizeof *s->qkv);
    for (int i = 0; i < MOST_PAGES; i++) s->pages[i] = turn % 2 ? MOST_PAGES + 2 - i : (i + turn) % MOST_PAGES;
}

/* Positions first .. end through append and attention in one call. */
static void sequence_run(struct sequence *s, struct kern *k, enum kern_provenance p, int first, int end)
{
    const struct kern_segment g = {0, end - first, first, s->pages, 0};
    float *qkv = s->qkv + (size_t)first * s->width;
    call_rope_kv_append(k, &s->shape, &s->weights, &g, 1, s->cos_sin, qkv, s->kv);
    call_attention(k, &s->shape, p, &g, 1, qkv, s->kv, s->o + (size_t)first * s->o_width);
}

/* ---- queries, keys and values ---- */

static float biased(const struct sequence *s, size_t p, size_t at)
{
    const float raw = s->raw[p * s->width + at];
    return s->weights.bias_dev ? raw + s->weights.bias_dev[at] : raw;
}

/* H_ij = (-1)^(number of ones of i & j) / sqrt(block), row by row. */
static void oracle_hadamard(size_t dim, double *x, double *bound)
{
    static double signs[MOST_DIM][MOST_DIM];
    for (size_t i = 0; i < MOST_DIM && signs[MOST_DIM - 1][0] == 0; i++)
        for (size_t j = MOST_DIM; j-- > 0;) signs[i][j] = __builtin_parityll(i & j) ? -1 : 1;
    size_t block = 16;
    while (dim % (2 * block) == 0) block *= 2;
    for (size_t first = 0; first < dim; first += block) {
        double turned[MOST_DIM], bounds = 0;
        for (size_t i = 0; i < block; i++) {
            turned[i] = 0;
            for (size_t j = 0; j < block; j++) turned[i] += signs[i][j] * x[first + j];
            bounds += bound[first + i] + HADAMARD_TOLERANCE * fabs(x[first + i]);
        }
        for (size_t i = 0; i < block; i++) {
            x[first + i] = turned[i] / sqrt((double)block);
            bound[first + i] = bounds / sqrt((double)block);
        }
    }
}

/* The query or key head at `at` of row p: values and how far the kernel may be from each. */
static void oracle_head(const struct sequence *s, size_t p, size_t at, double *x, double *bound)
{
    const struct kern_attn_shape *a = &s->shape;
    const size_t half = (size_t)a->rope_dim / 2, dim = (size_t)a->head_dim;
    const float *norm = at < keys_at(a) ? s->weights.q_norm_dev : s->weights.k_norm_dev;
    double squares = 0;
    for (size_t d = 0; d < dim; d++) {
        x[d] = (double)biased(s, p, at + d);
        squares += x[d] * x[d];
    }
    for (size_t d = 0; norm && d < dim; d++) x[d] *= (double)norm[d] / sqrt(squares / (double)dim + (double)NORM_EPS);
    for (size_t d = 0; d < dim; d++) bound[d] = norm ? NORM_TOLERANCE * fabs(x[d]) : 0;
    for (size_t i = 0; i < half; i++) {
        const size_t i0 = a->rope_adjacent ? 2 * i : i, i1 = a->rope_adjacent ? 2 * i + 1 : i + half;
        const double c = (double)s->cos_sin[(p * half + i) * 2], n = (double)s->cos_sin[(p * half + i) * 2 + 1];
        const double x0 = x[i0], x1 = x[i1];
        x[i0] = x0 * c - x1 * n;
        x[i1] = x1 * c + x0 * n;
        bound[i0] = bound[i1] = bound[i0] + bound[i1] + 2 * ROUNDING * (fabs(x0) + fabs(x1));
    }
    if (a->kv == KV_INT8) oracle_hadamard(dim, x, bound);
}

/* The rows after rope_kv_append; gates and values are biased only. */
static void check_rows(const struct sequence *s, const char *numerics)
{
    const struct kern_attn_shape *a = &s->shape;
    const size_t dim = (size_t)a->head_dim;
    for (size_t p = 0; p < (size_t)s->positions; p++)
        for (size_t at = 0; at < s->width; at += dim) {
            const float *got = s->qkv + p * s->width + at;
            const bool gate = a->gated && at < keys_at(a) && at / dim % 2;
            double want[MOST_DIM], bound[MOST_DIM] = {0};
            if (gate || at >= values_at(a))
                for (size_t d = 0; d < dim; d++) want[d] = (double)biased(s, p, at + d);
            else
                oracle_head(s, p, at, want, bound);
            for (size_t d = 0; d < dim; d++)
                if (!(fabs((double)got[d] - want[d]) <= bound[d]))
                    fail_msg("%s %s head_dim %zu position %zu value %zu: %g, oracle %g", numerics, kv_format_name(a->kv),
                             dim, p, at + d, (double)got[d], want[d]);
        }
}

/* ---- keys and values as stored ---- */

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The nearer of the two bfloat16 around a finite x; of two as near the one with an even last bit. */
static float nearest_bf16(float x)
{
    const uint32_t below = bits_of(x) & 0xffff0000u, above = below + 0x10000u; /* in magnitude */
    float low, high;
    memcpy(&low, &below, sizeof low);
    memcpy(&high, &above, sizeof high);
    const double to_low = fabs((double)x - (double)low), to_high = fabs((double)high - (double)x);
    if (to_low != to_high) return to_low < to_high ? low : high;
    return below & 0x10000u ? high : low;
}

static float int8_scale(const float *x, size_t n)
{
    float most = 0;
    for (size_t i = 0; i < n; i++) most = fmaxf(most, fabsf(x[i]));
    return most / 127.0f;
}

/* One head's key or value, finite. INT8: exactly code times scale. */
static void as_stored(enum kv_format f, const float *x, size_t dim, double *out)
{
    for (size_t run = 0; run < dim; run += KV_INT8_RUN) {
        const size_t end = dim - run < KV_INT8_RUN ? dim : run + KV_INT8_RUN;
        const float scale = int8_scale(x + run, end - run);
        for (size_t d = run; d < end; d++) switch (f) {
            case KV_F16: out[d] = (double)quant_f16_to_f32(quant_f32_to_f16(x[d])); break;
            case KV_BF16: out[d] = (double)nearest_bf16(x[d]); break;
            case KV_INT8: out[d] = scale > 0 ? (double)rintf(x[d] / scale) * (double)scale : 0; break;
            default: out[d] = (double)x[d]; break;
            }
    }
}

/* A row alone sees its own value with a weight of one: the output is the value as stored. */
static void stored_values(struct kern *k, struct sequence *s, const float *values, float *out)
{
    sequence_restart(s, 0);
    memcpy(s->qkv + values_at(&s->shape), values, (size_t)s->shape.head_dim * sizeof *values);
    sequence_run(s, k, KERN_DECODE, 0, 1);
    memcpy(out, s->o, (size_t)s->shape.head_dim * sizeof *out);
}

/* Ties of F16 and BF16 both ways, subnormals, signed zeros, magnitudes far apart within a run, a run of zeros. */
static void hard_values(float *x, size_t dim, uint64_t seed)
{
    static const float special[] = {0x1.008p0f,   0x1.018p0f,  -0x1.01p0f,   -0x1.03p0f, 0x1.002p0f, 0x1.006p0f,  0x1p-24f,
                                    0x1.8p-25f,   -0x1p-25f,   0x1.fffffep0f, 0.0f,      -0.0f,      3.0f * 127,  1.5f,
                                    -2.5f,        4.5f};
    random_fill(x, dim, seed);
    for (size_t i = 0; i < dim; i++) x[i] *= ldexpf(1, (int)(i % 24) - 12);
    memcpy(x, special, dim < 16 ? dim * sizeof *x : sizeof special);
    if (dim > KV_INT8_RUN) memset(x + KV_INT8_RUN, 0, (dim - KV_INT8_RUN < KV_INT8_RUN ? 8 : KV_INT8_RUN) * sizeof *x);
}

static void check_stored(struct kern *k, const struct attn_case *c)
{
    const size_t dim = (size_t)c->shape.head_dim;
    struct sequence s;
    sequence_begin(&s, k, c, 41);
    for (uint64_t seed = 0; seed < 20; seed++) {
        float x[MOST_DIM], got[MOST_DIM];
        double want[MOST_DIM];
        hard_values(x, dim, seed);
        as_stored(c->shape.kv, x, dim, want);
        stored_values(k, &s, x, got);
        for (size_t d = 0; d < dim; d++) {
            const size_t run = d / KV_INT8_RUN * KV_INT8_RUN, n = dim - run < KV_INT8_RUN ? dim - run : KV_INT8_RUN;
            if (got[d] != (float)want[d])
                fail_msg("%s %s value %zu %a is stored as %a, not %a", k->numerics, kv_format_name(c->shape.kv), d,
                         (double)x[d], (double)got[d], want[d]);
            if (c->shape.kv == KV_INT8)
                assert_true(fabs((double)got[d] - (double)x[d]) <= INT8_STEP * (double)int8_scale(x + run, n));
        }
        /* What is not finite stays visible, in its run if not in its place, and harms no other run. */
        x[dim - 1] = seed % 2 ? NAN : INFINITY;
        stored_values(k, &s, x, got);
        assert_true(!isfinite(got[dim - 1]));
        for (size_t d = 0; d + KV_INT8_RUN < dim; d++) assert_true(got[d] == (float)want[d]);
    }
    sequence_end(&s);
}

static void test_values_as_stored(struct kern *k)
{
    static const int dims[] = {16, 64, 80, 256};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int f = 0; f < KV_FORMATS; f++) {
            const struct attn_case c = {{1, 1, dims[i], 16, false, (enum kv_format)f, false}, 1, false, false};
            check_stored(k, &c);
        }
}

/* ---- attention ---- */

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* One query head's softmax over keys[0 .. p][dim], and the output before the gate. */
static void oracle_attention(const double *q, const double *keys, const double *values, size_t dim, size_t p,
                             double *weights, double *out)
{
    double most = -INFINITY, sum = 0;
    for (size_t j = 0; j <= p; j++) {
        weights[j] = 0;
        for (size_t d = 0; d < dim; d++) weights[j] += q[d] * keys[j * dim + d];
        weights[j] /= sqrt((double)dim);
        if (weights[j] > most) most = weights[j];
    }
    for (size_t j = 0; j <= p; j++) sum += weights[j] = exp(weights[j] - most);
    memset(out, 0, dim * sizeof *out);
    for (size_t j = 0; j <= p; j++) {
        weights[j] /= sum;
        for (size_t d = 0; d < dim; d++) out[d] += weights[j] * values[j * dim + d];
    }
}

static double gate_of(const struct sequence *s, size_t p, size_t head, size_t d)
{
    const size_t at = head * query_width(&s->shape) + (size_t)s->shape.head_dim + d;
    return s->shape.gated ? sigmoid((double)biased(s, p, at)) : 1;
}

static double largest_of(const double *x, size_t n)
{
    double largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs(x[i]));
    return largest;
}

/* Attention of every row from the queries after append, keys and values rounded as they are stored. */
static void check_attention(const struct sequence *s, const char *numerics)
{
    const struct kern_attn_shape *a = &s->shape;
    const size_t dim = (size_t)a->head_dim, n = (size_t)s->positions, group = (size_t)(a->n_heads / a->n_kv_heads);
    double *weights = malloc(n * sizeof *weights), *keys = malloc(n * dim * sizeof *keys),
           *values = malloc(n * dim * sizeof *values);
    assert_true(weights && keys && values);
    for (size_t h = 0; h < (size_t)a->n_heads; h++) {
        for (size_t j = 0; j < n && h % group == 0; j++) {
            const float *row = s->qkv + j * s->width + h / group * dim;
            as_stored(a->kv, row + keys_at(a), dim, keys + j * dim);
            as_stored(a->kv, row + values_at(a), dim, values + j * dim);
        }
        double largest[MOST_DIM] = {0}; /* value so far, of each dimension */
        for (size_t p = 0; p < n; p++) {
            double q[MOST_DIM], want[MOST_DIM];
            for (size_t d = 0; d < dim; d++) largest[d] = fmax(largest[d], fabs(values[p * dim + d]));
            for (size_t d = 0; d < dim; d++) q[d] = (double)s->qkv[p * s->width + h * query_width(a) + d];
            oracle_attention(q, keys, values, dim, p, weights, want);
            for (size_t d = 0; d < dim; d++) {
                const double gated = want[d] * gate_of(s, p, h, d), got = (double)s->o[p * s->o_width + h * dim + d];
                if (!(fabs(got - gated) <= ATTENTION_TOLERANCE * largest[d]))
                    fail_msg("%s %s head_dim %zu position %zu head %zu: %g, oracle %g", numerics,
                             kv_format_name(a->kv), dim, p, h, got, gated);
            }
        }
    }
    free(weights);
    free(keys);
    free(values);
}

/* The step of each value of a head: its run's largest magnitude / 127. */
static void int8_steps(const double *x, size_t dim, double *steps)
{
    for (size_t run = 0; run < dim; run += KV_INT8_RUN) {
        const size_t end = dim - run < KV_INT8_RUN ? dim : run + KV_INT8_RUN;
        const double step = largest_of(x + run, end - run) / 127;
        for (size_t d = run; d < end; d++) steps[d] = INT8_STEP * step;
    }
}

/* INT8 against attention that rounds nothing. A key is off by at most a half step in each (rotated) dimension, so score j by
 * at most e_j = sum |q_d| step_jd / sqrt(dim), and weight w_j by a factor within e^(+-2e), e the largest e_j. As weights sum
 * to one, with the values' own half steps:
 *   |error| <= (e^2e - 1) sum_j w_j |v_j - output| + e^2e sum_j w_j step_j, times the gate. */
static void check_int8_bound(const struct sequence *s, const char *numerics)
{
    const struct kern_attn_shape *a = &s->shape;
    const size_t dim = (size_t)a->head_dim, n = (size_t)s->positions, group = (size_t)(a->n_heads / a->n_kv_heads);
    double *weights = malloc(n * sizeof *weights), *rows = malloc(4 * n * dim * sizeof *rows);
    assert_true(weights && rows);
    double *keys = rows, *key_steps = rows + n * dim, *values = rows + 2 * n * dim, *value_steps = rows + 3 * n * dim;
    for (size_t h = 0; h < (size_t)a->n_heads; h++) {
        double unused[MOST_DIM], q[MOST_DIM], want[MOST_DIM], largest;
        for (size_t j = 0; j < n && h % group == 0; j++) {
            oracle_head(s, j, keys_at(a) + h / group * dim, keys + j * dim, unused);
            for (size_t d = 0; d < dim; d++)
                values[j * dim + d] = (double)biased(s, j, values_at(a) + h / group * dim + d);
            int8_steps(keys + j * dim, dim, key_steps + j * dim);
            int8_steps(values + j * dim, dim, value_steps + j * dim);
        }
        largest = largest_of(values, n * dim);
        for (size_t p = h % 5; p < n; p += 5) {
            oracle_head(s, p, h * query_width(a), q, unused);
            oracle_attention(q, keys, values, dim, p, weights, want);
            double most = 0;
            for (size_t j = 0; j <= p; j++) {
                double e = 0;
                for (size_t d = 0; d < dim; d++) e += fabs(q[d]) * key_steps[j * dim + d] / sqrt((double)dim);
                most = fmax(most, e);
            }
            for (size_t d = 0; d < dim; d++) {
                double spread = 0, step = 0;
                for (size_t j = 0; j <= p; j++) {
                    spread += weights[j] * fabs(values[j * dim + d] - want[d]);
                    step += weights[j] * value_steps[j * dim + d];
                }
                const double gate = gate_of(s, p, h, d), got = (double)s->o[p * s->o_width + h * dim + d];
                const double bound = gate * ((exp(2 * most) - 1) * spread + exp(2 * most) * step) +
                                     ATTENTION_TOLERANCE * largest;
                if (!(fabs(got - want[d] * gate) <= bound))
                    fail_msg("%s int8 head_dim %zu position %zu head %zu: %g, not within %g of %g", numerics, dim, p, h,
                             got, bound, want[d] * gate);
            }
        }
    }
    free(weights);
    free(rows);
}

static void check_sequence(const struct sequence *s, const char *numerics)
{
    check_rows(s, numerics);
    check_attention(s, numerics);
    if (s->shape.kv == KV_INT8) check_int8_bound(s, numerics);
}

static void test_attention_oracle(struct kern *k)
{
    for (int i = 0; i < N_ATTN_CASES * KV_FORMATS; i++) {
        const struct attn_case c = with_format(attn_cases[i / KV_FORMATS], (enum kv_format)(i % KV_FORMATS));
        struct sequence s;
        sequence_begin(&s, k, &c, 51);
        sequence_restart(&s, i);
        sequence_run(&s, k, KERN_PREFILL, 0, s.positions);
        check_sequence(&s, k->numerics);
        sequence_restart(&s, i);
        for (int p = 0; p < s.positions; p++) sequence_run(&s, k, KERN_DECODE, p, p + 1);
        check_sequence(&s, k->numerics);
        sequence_end(&s);
    }
}

/* The same prompt in chunks of 64, 128, 448, 512, one piece and odd starts; other pages, other threads. */
static void check_chunks(const char *isa, const struct attn_case *c)
{
    static const int chunks[][2] = {{64, 0},  {128, 0},  {448, 0}, {512, 0}, {MOST_POSITIONS, 0},
                                    {64, 37}, {128, 63}, {512, 1}};
    float *reference = NULL;
    size_t n = 0;
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        struct kern *k = open_isa(isa, 1 + (int)i % 3);
        struct sequence s;
        sequence_begin(&s, k, c, 61);
        sequence_restart(&s, (int)i);
        n = (size_t)s.positions * s.o_width;
        for (int first = 0, end; first < s.positions; first = end) {
            end = (first + chunks[i][0]) / 64 * 64; /* cuts on the absolute grid, save the first where one is given */
            if (first == 0 && chunks[i][1]) end = chunks[i][1];
            if (end <= first) end = first + 64;
            if (end > s.positions) end = s.positions;
            sequence_run(&s, k, KERN_PREFILL, first, end);
        }
        if (!reference) {
            reference = malloc(n * sizeof *reference);
            assert_non_null(reference);
            memcpy(reference, s.o, n * sizeof *reference);
        }
        assert_bits(s.o, reference, n, "chunked prefill");
        sequence_end(&s);
        k->close(k);
    }
    free(reference);
}

static void test_attention_chunks(struct kern *k)
{
    static const struct attn_case cases[] = {{{3, 1, 64, 64, true, KV_F16, false}, 600, false, false},
                                             {{10, 1, 48, 16, false, KV_F16, false}, 520, false, true},
                                             {{2, 1, 32, 32, true, KV_F32, false}, 520, true, false},
                                             {{7, 1, 64, 16, false, KV_BF16, true}, 520, false, true},
                                             {{3, 1, 80, 32, false, KV_INT8, true}, 520, true, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_chunks(k->numerics + strlen("cpu-"), &cases[i]);
}

/* Rows behind a row in its chunk may have infinite or NaN queries and keys: nothing of them reaches it. */
static void check_causal(struct kern *k, enum kv_format format)
{
    const struct attn_case c = {{6, 2, 64, 64, true, format, false}, 150, false, false};
    enum { POISONED = 100 };
    struct sequence s, t;
    sequence_begin(&s, k, &c, 71);
    sequence_begin(&t, k, &c, 71);
    for (size_t r = POISONED; r < (size_t)t.positions; r++)
        for (size_t i = 0; i < 8 * 64; i++) t.raw[r * t.width + i] = i % 3 ? (i % 2 ? INFINITY : -INFINITY) : NAN;
    sequence_restart(&s, 0);
    sequence_restart(&t, 1);
    sequence_run(&s, k, KERN_PREFILL, 0, s.positions);
    sequence_run(&t, k, KERN_PREFILL, 0, t.positions);
    assert_bits(t.o, s.o, POISONED * s.o_width, "row before poisoned rows");
    /* And where it belongs it stays visible, though the values are finite. */
    for (size_t i = 0; i < t.o_width; i++) assert_true(isnan(t.o[POISONED * t.o_width + i]));
    /* One key of the first KV head: later rows of its query heads are lost, the other heads unharmed. */
    enum { KEY = 70, AFTER = 90, HEAD_GROUP = 3 * 64 };
    memcpy(t.raw, s.raw, (size_t)t.positions * t.width * sizeof *t.raw);
    t.raw[KEY * t.width + 6 * 64] = NAN;
    sequence_restart(&t, 1);
    sequence_run(&t, k, KERN_PREFILL, 0, t.positions);
    assert_bits(t.o, s.o, KEY * s.o_width, "row before a NaN key");
    for (size_t i = 0; i < HEAD_GROUP; i++) assert_true(isnan(t.o[AFTER * t.o_width + i]));
    assert_bits(t.o + AFTER * t.o_width + HEAD_GROUP, s.o + AFTER * s.o_width + HEAD_GROUP, HEAD_GROUP,
                "other KV head");
    sequence_end(&s);
    sequence_end(&t);
}

static void test_attention_causal(struct kern *k)
{
    for (int f = 0; f < KV_FORMATS; f++) check_causal(k, (enum kv_format)f);
}

/* Segments of several decode rows, across a page's border: each row's bits as if alone; a later row full of NaN (a draft may
 * be anything) reaches none before it. */
static void check_drafts(const char *isa, int threads, const struct attn_case *c)
{
    enum { DRAFTS = KERN_MAX_DRAFTS + 1, FIRST = 60 };
    struct kern *k = open_isa(isa, 1);
    struct sequence alone;
    sequence_begin(&alone, k, c, 91);
    sequence_restart(&alone, 0);
    sequence_run(&alone, k, KERN_PREFILL, 0, FIRST);
    for (int p = FIRST; p < alone.positions; p++) sequence_run(&alone, k, KERN_DECODE, p, p + 1);
    k->close(k);
    for (int rows = 2; rows <= DRAFTS; rows += 2) {
        k = open_isa(isa, threads);
        struct sequence s;
        sequence_begin(&s, k, c, 91);
        sequence_restart(&s, rows);
        sequence_run(&s, k, KERN_PREFILL, 0, FIRST);
        for (int first = FIRST, end; first < s.positions; first = end) {
            end = first + rows < s.positions ? first + rows : s.positions;
            float *last = s.qkv + (size_t)(end - 1) * s.width;
            for (size_t i = 0; i < s.width && end - first > 1; i++) last[i] = NAN;
            sequence_run(&s, k, KERN_DECODE, first, end);
            /* Once more with the true row: rejected drafts stay in the page until then. */
            memcpy(s.qkv + (size_t)first * s.width, s.raw + (size_t)first * s.width,
                   (size_t)(end - first) * s.width * sizeof *s.raw);
            assert_bits(s.o + (size_t)first * s.o_width, alone.o + (size_t)first * s.o_width,
                        (size_t)(end - first > 1 ? end - first - 1 : 1) * s.o_width, "rows before a broken draft");
            sequence_run(&s, k, KERN_DECODE, first, end);
        }
        assert_bits(s.o, alone.o, (size_t)s.positions * s.o_width, "rows among drafts");
        assert_bits(s.qkv, alone.qkv, (size_t)s.positions * s.width, "projections among drafts");
        sequence_end(&s);
        k->close(k);
    }
    sequence_end(&alone);
}

static void test_attention_drafts(struct kern *k)
{
    static const struct attn_case cases[] = {{{6, 2, 64, 64, true, KV_F16, false}, 140, false, false},
                                             {{12, 2, 256, 64, false, KV_F16, true}, 75, false, true}};
    for (int i = 0; i < 2 * KV_FORMATS; i++) {
        const struct attn_case c = with_format(cases[i / KV_FORMATS], (enum kv_format)(i % KV_FORMATS));
        check_drafts(k->numerics + strlen("cpu-"), 1, &c);
    }
    /* More threads than KV heads: rows part. */
    const struct attn_case narrow = {{3, 1, 64, 64, true, KV_INT8, false}, 72, false, false};
    check_drafts(k->numerics + strlen("cpu-"), 3, &narrow);
}

/* Several sequences in one call, of prefill or of decode, against each alone. */
static void check_batch(const char *isa, enum kern_provenance p, enum kv_format format)
{
    enum { N = 8 };
    const struct kern_attn_shape shape = {6, 2, 64, 32, true, format, format == KV_BF16};
    const size_t width = values_at(&shape) + 2 * 64, o_width = 6 * 64;
    struct kern *k = open_isa(isa, 1);
    struct sequence s[N];
    struct kern_segment g[N];
    struct kern_kv_layer kv = {NULL, k->kv_page_bytes(&shape)};
    int32_t tables[N][MOST_PAGES];
    const size_t kv_bytes = kv.page_bytes * N * 4;
    char *pool = malloc(kv_bytes), *start = malloc(kv_bytes);
    assert_true(pool && start);
    memset(start, 0xff, kv_bytes);
    int rows = 0;
    for (int i = 0; i < N; i++) {
        const struct attn_case c = {shape, 40 + 23 * i, true, true};
        sequence_begin(&s[i], k, &c, 81 + (uint64_t)i);
        sequence_restart(&s[i], 0);
        const int before = p == KERN_DECODE ? s[i].positions - 1 - i % 4 : s[i].positions / 2;
        for (int j = 0; j < 4; j++) {
            tables[i][j] = j * N + (i * 3 + j) % N; /* pages of all sequences lie mixed */
            s[i].pages[j] = j;
        }
        sequence_run(&s[i], k, KERN_PREFILL, 0, before);
        for (int j = 0; j < 4; j++)
            memcpy(start + (size_t)tables[i][j] * kv.page_bytes, (char *)s[i].kv.base_dev + (size_t)j * kv.page_bytes,
                   kv.page_bytes);
        sequence_run(&s[i], k, p, before, s[i].positions);
        g[i] = (struct kern_segment){rows, s[i].positions - before, before, tables[i], 0};
        rows += g[i].rows;
    }
    k->close(k);
    for (int threads = 1; threads <= 3; threads++) {
        k = open_isa(isa, threads);
        float *qkv = guarded_new((size_t)rows * width), *o = guarded_new((size_t)rows * o_width);
        memcpy(pool, start, kv_bytes);
        kv.base_dev = pool;
        for (int i = 0; i < N; i++)
            memcpy(qkv + (size_t)g[i].row_first * width, s[i].raw + (size_t)g[i].position_first * width,
                   (size_t)g[i].rows * width * sizeof *qkv);
        call_rope_kv_append(k, &shape, &s[0].weights, g, N, s[N - 1].cos_sin, qkv, kv);
        call_attention(k, &shape, p, g, N, qkv, kv, o);
        for (int i = 0; i < N; i++)
            assert_bits(o + (size_t)g[i].row_first * o_width, s[i].o + (size_t)g[i].position_first * o_width,
                        (size_t)g[i].rows * o_width, "sequence in a batch");
        guarded_free(qkv, (size_t)rows * width);
        guarded_free(o, (size_t)rows * o_width);
        k->close(k);
    }
    for (int i = 0; i < N; i++) sequence_end(&s[i]);
    free(pool);
    free(start);
}

static void test_attention_batch(struct kern *k)
{
    const char *isa = k->numerics + strlen("cpu-");
    for (int f = 0; f < KV_FORMATS; f++) {
        check_batch(isa, KERN_PREFILL, (enum kv_format)f);
        check_batch(isa, KERN_DECODE, (enum kv_format)f);
    }
}

/* ---- formats ---- */

static void test_kv_formats(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        enum kv_format format;
        size_t bytes16, bytes64, bytes80, bytes256; /* of one head's key: values and, for INT8, 4 bytes a run of 64 */
    } formats[] = {{"f16", KV_F16, 32, 128, 160, 512},
                   {"f32", KV_F32, 64, 256, 320, 1024},
                   {"bf16", KV_BF16, 32, 128, 160, 512},
                   {"int8", KV_INT8, 16 + 4, 64 + 4, 80 + 8, 256 + 16}};
    assert_int_equal(sizeof formats / sizeof *formats, KV_FORMATS);
    struct kern *k = open_isa("generic", 1);
    for (size_t i = 0; i < KV_FORMATS; i++) {
        enum kv_format found = KV_FORMATS;
        assert_true(kv_format_parse(formats[i].name, &found));
        assert_int_equal(found, formats[i].format);
        assert_string_equal(kv_format_name(found), formats[i].name);
        assert_int_equal(kv_format_bytes(found, 16), formats[i].bytes16);
        assert_int_equal(kv_format_bytes(found, 64), formats[i].bytes64);
        assert_int_equal(kv_format_bytes(found, 80), formats[i].bytes80);
        assert_int_equal(kv_format_bytes(found, 256), formats[i].bytes256);
        /* Keys and values of 64 tokens and 3 heads. */
        const struct kern_attn_shape shape = {6, 3, 80, 80, false, found, true};
        assert_int_equal(k->kv_page_bytes(&shape), 2 * 64 * 3 * formats[i].bytes80);
    }
    k->close(k);
    static const char *const unknown[] = {"", "f1", "f166", "F16", "int8 ", "fp8", "int4"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        enum kv_format found = KV_F32;
        assert_false(kv_format_parse(unknown[i], &found));
        assert_int_equal(found, KV_F32);
    }
}

ON_EVERY_ISA(test_values_as_stored)
ON_EVERY_ISA(test_attention_oracle)
ON_EVERY_ISA(test_attention_chunks)
ON_EVERY_ISA(test_attention_causal)
ON_EVERY_ISA(test_attention_drafts)
ON_EVERY_ISA(test_attention_batch)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_formats),
        cmocka_unit_test(test_values_as_stored_isas),
        cmocka_unit_test(test_attention_oracle_isas),
        cmocka_unit_test(test_attention_chunks_isas),
        cmocka_unit_test(test_attention_causal_isas),
        cmocka_unit_test(test_attention_drafts_isas),
        cmocka_unit_test(test_attention_batch_isas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
