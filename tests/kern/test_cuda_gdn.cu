/* Gated DeltaNet on a card: against the recurrence in double precision, and its rows and states against themselves.
 *
 * Values: a state's columns may be off by STATE_TOLERANCE of their length; an output by the rounding to bfloat16 and by
 * OUTPUT_TOLERANCE of |S| |q|, which is what its dot products are rounded against. Bits: rows alone, with others,
 * beside NaN, in other cuts of a prompt, as drafts; states likewise, and after replay. `bench` as the first argument
 * prints times instead. */
#include "cuda_fixture.cuh"

#include <algorithm>

#include "../../cuda/op_gdn.cuh"

static struct op_context card;

enum { SLOTS = 8 };
static const double STATE_TOLERANCE = 1e-4, OUTPUT_TOLERANCE = 2e-5;

/* e^g between 0 and 1; hardly any; hardly any with g near -50 now and then. */
enum decay { MIXED, WEAK, STRONG };

struct gdn_case {
    struct kern_gdn_shape shape;
    int prompt, rows; /* of a sequence: prompt rows, then decoded ones */
    enum decay decay;
};

static const struct gdn_case cases[] = {
    {{16, 48, 128, 128, 4, 1e-6f}, 200, 300, MIXED}, {{8, 24, 128, 128, 4, 1e-6f}, 256, 300, WEAK},
    {{2, 6, 128, 128, 4, 1e-5f}, 330, 360, STRONG},  {{2, 2, 128, 128, 4, 1e-6f}, 60, 80, MIXED},
    {{2, 6, 32, 32, 4, 1e-6f}, 200, 300, MIXED},     {{1, 3, 16, 16, 2, 1e-6f}, 130, 300, STRONG},
    {{2, 2, 64, 48, 3, 1e-6f}, 150, 180, WEAK},      {{1, 2, 256, 256, 8, 1e-5f}, 70, 90, MIXED},
    {{1, 3, 128, 128, 5, 1e-6f}, 100, 120, MIXED},
};
enum { N_CASES = sizeof cases / sizeof *cases };

struct layer {
    struct gdn_case c;
    std::vector<float> values; /* conv, a, dt, norm */
    struct kern_gdn_weights host, weights;
    struct guarded dev, states, replays;
    size_t state_bytes, replay_bytes;
    int channels, width, o_width;
    struct kern_gdn_memory memory;
};

static struct layer layer_new(const struct gdn_case *c)
{
    struct layer l = {};
    const struct kern_gdn_shape *s = &c->shape;
    uint64_t seed = 5;
    l.c = *c;
    l.channels = kern_gdn_channels(s);
    l.width = kern_gdn_width(s);
    l.o_width = s->v_heads * s->v_dim;
    const size_t conv = (size_t)s->conv_width * l.channels, heads = s->v_heads;
    const size_t a_at = (conv + 63) / 64 * 64, dt_at = a_at + (heads + 63) / 64 * 64,
                 norm_at = dt_at + (heads + 63) / 64 * 64;
    l.values.resize(norm_at + s->v_dim);
    for (float &x : l.values) x = random_float(&seed);
    for (size_t h = 0; h < heads; h++) {
        float *a = &l.values[a_at + h];
        *a = c->decay == STRONG ? -16 : c->decay == WEAK ? -1e-3f : -4 * fabsf(*a) - 0.01f;
    }
    for (int i = 0; i < s->v_dim; i++) l.values[norm_at + i] = 1 + 0.5f * l.values[norm_at + i];
    l.dev = to_device(l.values);
    const float *h = l.values.data(), *d = (const float *)l.dev.dev;
    l.host = (struct kern_gdn_weights){h, h + a_at, h + dt_at, h + norm_at};
    l.weights = (struct kern_gdn_weights){d, d + a_at, d + dt_at, d + norm_at};
    l.state_bytes = op_gdn_state_bytes(s);
    l.replay_bytes = op_gdn_replay_bytes(s);
    l.states = guarded_new_dev(SLOTS * (l.state_bytes + 256)); /* unused bytes are NaN */
    l.replays = guarded_new_dev(SLOTS * (l.replay_bytes + 64));
    l.memory =
        (struct kern_gdn_memory){(char *)l.states.dev, (char *)l.replays.dev, l.state_bytes + 256, l.replay_bytes + 64};
    return l;
}

static void layer_free(struct layer *l)
{
    guarded_free_dev(l->dev, "weights");
    guarded_free_dev(l->states, "states");
    guarded_free_dev(l->replays, "replay memory");
}

static std::vector<float> raw_rows(const struct layer *l, int rows, uint64_t seed)
{
    std::vector<float> in((size_t)rows * l->width);
    const int heads = l->c.shape.v_heads;
    for (float &x : in) x = 2 * random_float(&seed);
    for (int r = 0; r < rows; r++) {
        float *b = &in[(size_t)(r + 1) * l->width - 2 * heads], *a = b + heads;
        for (int h = 0; h < heads; h++) {
            b[h] *= 2;
            if (l->c.decay == STRONG) a[h] = (r + h) % 7 == 3 ? 3 + a[h] / 2 : -9 + a[h] / 2;
        }
    }
    return in;
}

/* ---- slots ---- */

typedef std::vector<uint32_t> words;

static void slot_clear(const struct layer *l, int slot)
{
    CHECK_CUDA(cudaMemset(l->memory.state_dev + slot * l->memory.state_stride, 0, l->state_bytes));
}

static words slot_get(const struct layer *l, int slot)
{
    return from_device<uint32_t>(l->memory.state_dev + slot * l->memory.state_stride, l->state_bytes / 4);
}

static void slot_set(const struct layer *l, int slot, const words &w)
{
    CHECK_CUDA(cudaMemcpy(l->memory.state_dev + slot * l->memory.state_stride, w.data(), l->state_bytes,
                          cudaMemcpyHostToDevice));
}

/* ---- calls ---- */

struct run {
    bool decode;
    int slot, position, rows;
    const float *in; /* of its first row */
};

typedef std::vector<uint16_t> bits; /* [rows][o_width] bfloat16 */

static size_t act_index(struct kern_split split, int width, int row, int k)
{
    const int blocks = act_blocks(width), r = row - split.decode;
    if (r < 0) return (size_t)row * blocks * ACT_BLOCK + k;
    const int in_tile = r % ACT_TILE_ROWS, p = act_place(k & 63);
    return (act_prefill_offset(split.decode, width) +
            ((size_t)(r / ACT_TILE_ROWS) * blocks + k / ACT_BLOCK) * ACT_TILE_BYTES + in_tile * 128 +
            (((p >> 3) ^ (in_tile & 7)) << 4)) /
               2 +
           (p & 7);
}

/* One call on a batch of these runs, decode runs first; the outputs of each. */
static std::vector<bits> call(const struct layer *l, const std::vector<struct run> &runs)
{
    std::vector<float> in;
    std::vector<struct device_segment> segments;
    std::vector<struct device_row> rows;
    struct device_batch b = {};
    for (const struct run &r : runs) {
        segments.push_back((struct device_segment){(int)rows.size(), r.rows, r.position, r.slot, 0, 0});
        for (int i = 0; i < r.rows; i++) rows.push_back((struct device_row){(int)segments.size() - 1, r.position + i});
        in.insert(in.end(), r.in, r.in + (size_t)r.rows * l->width);
        if (r.decode) {
            b.decode_rows += r.rows;
            b.n_decode_segments++;
        }
    }
    b.rows = (int)rows.size();
    b.n_segments = (int)segments.size();
    const struct kern_split split = {b.decode_rows, b.rows - b.decode_rows};
    struct guarded in_dev = to_device(in), segments_dev = to_device(segments), rows_dev = to_device(rows);
    struct guarded act = guarded_new_dev(act_buffer_bytes(split.decode, split.prefill, l->o_width));
    struct guarded scratch = guarded_new_dev(op_gdn_scratch_bytes(&l->c.shape, b.rows));
    b.segments = (const struct device_segment *)segments_dev.dev;
    b.row = (const struct device_row *)rows_dev.dev;
    CHECK_CUDA(cudaDeviceSynchronize()); /* the card's stream does not wait for memsets */
    op_gdn_decode(&card, &b, &l->c.shape, &l->weights, l->memory, (const float *)in_dev.dev, scratch.dev, act.dev);
    op_gdn_prefill(&card, &b, &l->c.shape, &l->weights, l->memory, (const float *)in_dev.dev, scratch.dev, act.dev);
    finish(&card);
    const bits got = from_device<uint16_t>(act.dev, act.n_bytes / 2);
    std::vector<bits> out;
    int row = 0;
    for (const struct run &r : runs) {
        bits o((size_t)r.rows * l->o_width);
        for (int i = 0; i < r.rows; i++, row++)
            for (int k = 0; k < act_blocks(l->o_width) * ACT_BLOCK; k++) {
                const uint16_t x = got[act_index(split, l->o_width, row, k)];
                if (k < l->o_width)
                    o[(size_t)i * l->o_width + k] = x;
                else if (x)
                    fail_msg("row %d: padding column %d is %04x", row, k, x);
            }
        out.push_back(o);
    }
    guarded_free_dev(in_dev, "in");
    guarded_free_dev(segments_dev, "segments");
    guarded_free_dev(rows_dev, "rows");
    guarded_free_dev(act, "act");
    guarded_free_dev(scratch, "scratch");
    return out;
}

static bits call_one(const struct layer *l, bool decode, int slot, int position, int rows, const std::vector<float> &in)
{
    return call(l, {{decode, slot, position, rows, &in[(size_t)position * l->width]}})[0];
}

static void replay(const struct layer *l, int slot, int rows)
{
    CHECK_CUDA(cudaDeviceSynchronize());
    op_gdn_replay(&card, &l->c.shape, &l->weights, 1, l->memory, slot, rows);
    finish(&card);
}

/* ---- bits ---- */

static int failures;

static void complain(const struct layer *l, const char *what, const char *detail)
{
    const struct kern_gdn_shape *s = &l->c.shape;
    printf("FAILED %d/%d heads %d x %d width %d: %s: %s\n", s->k_heads, s->v_heads, s->k_dim, s->v_dim, s->conv_width,
           what, detail);
    failures++;
}

template <class T>
static void check_same(const struct layer *l, const std::vector<T> &got, const T *want, const char *what)
{
    char detail[128];
    size_t n = 0, first = 0;
    for (size_t i = got.size(); i-- > 0;)
        if (got[i] != want[i]) n++, first = i;
    snprintf(detail, sizeof detail, "%zu of %zu differ, first %zu: %x, want %x", n, got.size(), first, got[first],
             want[first]);
    if (n) complain(l, what, detail);
}

/* ---- oracle ---- */

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static void oracle_convolve(const struct layer *l, const float *in, int t, int first, int n, double *y)
{
    const int width = l->c.shape.conv_width;
    for (int i = first; i < first + n; i++) {
        double sum = 0;
        for (int j = 0; j < width; j++) {
            const int row = t - width + 1 + j;
            if (row >= 0) sum += (double)l->host.conv_dev[(size_t)j * l->channels + i] * in[(size_t)row * l->width + i];
        }
        y[i - first] = sum * sigmoid(sum);
    }
}

static void oracle_normalize(double *y, int n, double by)
{
    double sum = 1e-6;
    for (int i = 0; i < n; i++) sum += y[i] * y[i];
    for (int i = 0; i < n; i++) y[i] *= by / sqrt(sum);
}

struct oracle {
    std::vector<double> want, bound;    /* [rows][o_width] */
    std::vector<double> at_prompt, end; /* states [v_heads][v_dim][k_dim] */
};

static void oracle_head(const struct layer *l, const float *in, int h, struct oracle *a)
{
    const struct kern_gdn_shape *s = &l->c.shape;
    const int kd = s->k_dim, vd = s->v_dim, k_head = h / (s->v_heads / s->k_heads);
    std::vector<double> state((size_t)vd * kd);
    double q[256], k[256], v[256], o[256];
    for (int t = 0; t < l->c.rows; t++) {
        const float *row = in + (size_t)t * l->width, *b = row + l->width - 2 * s->v_heads;
        oracle_convolve(l, in, t, k_head * kd, kd, q);
        oracle_convolve(l, in, t, (s->k_heads + k_head) * kd, kd, k);
        oracle_convolve(l, in, t, 2 * s->k_heads * kd + h * vd, vd, v);
        oracle_normalize(q, kd, 1 / sqrt((double)kd));
        oracle_normalize(k, kd, 1);
        const double x = (double)b[s->v_heads + h] + l->host.dt_dev[h], beta = sigmoid(b[h]);
        const double decay = exp(l->host.a_dev[h] * (x > 20 ? x : log1p(exp(x))));
        double squares = 0, length = 0;
        for (int c = 0; c < vd; c++) {
            double *column = &state[(size_t)c * kd], predicted = 0;
            for (int d = 0; d < kd; d++) predicted += (column[d] *= decay) * k[d];
            const double u = beta * (v[c] - predicted);
            o[c] = 0;
            for (int d = 0; d < kd; d++) {
                column[d] += k[d] * u;
                o[c] += column[d] * q[d];
                length += column[d] * column[d];
            }
            squares += o[c] * o[c];
        }
        double q_squares = 0;
        for (int d = 0; d < kd; d++) q_squares += q[d] * q[d];
        const double root = sqrt(squares / vd + s->norm_eps),
                     error = OUTPUT_TOLERANCE * sqrt(length * q_squares / vd) / root;
        for (int c = 0; c < vd; c++) {
            const double z = row[l->channels + h * vd + c], factor = l->host.norm_dev[c] * z * sigmoid(z);
            const size_t at = (size_t)t * l->o_width + h * vd + c;
            a->want[at] = o[c] / root * factor;
            a->bound[at] = 0x1.01p-8 * fabs(a->want[at]) + fabs(factor) * error * (1 + fabs(o[c]) / root) + 1e-30;
        }
        if (t == l->c.prompt - 1) std::copy(state.begin(), state.end(), a->at_prompt.begin() + (size_t)h * vd * kd);
    }
    std::copy(state.begin(), state.end(), a->end.begin() + (size_t)h * vd * kd);
}

static struct oracle oracle_new(const struct layer *l, const std::vector<float> &in)
{
    struct oracle a;
    a.want.resize((size_t)l->c.rows * l->o_width);
    a.bound = a.want;
    a.at_prompt.resize(gdn_matrix_floats(&l->c.shape));
    a.end = a.at_prompt;
    for (int h = 0; h < l->c.shape.v_heads; h++) oracle_head(l, in.data(), h, &a);
    return a;
}

static void check_rows(const struct layer *l, const struct oracle *a, int first, const bits &got, const char *what)
{
    char detail[160];
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const uint32_t u = (uint32_t)got[i] << 16;
        float f;
        memcpy(&f, &u, sizeof f);
        const size_t j = (size_t)first * l->o_width + i;
        const double off = fabs((double)f * 0x1p-60 - a->want[j]) / a->bound[j];
        if (!(off <= worst)) worst = off, at = j;
        if (off != off) break;
    }
    snprintf(detail, sizeof detail, "%.3f of the bound, row %zu value %zu, want %g", worst, at / l->o_width,
             at % l->o_width, a->want[at]);
    if (!(worst <= 1))
        complain(l, what, detail);
    else
        printf("  %s: %s\n", what, detail);
}

static void check_state(const struct layer *l, const std::vector<double> &want, const words &got, const char *what)
{
    char detail[160];
    const size_t kd = l->c.shape.k_dim;
    double worst = 0, all = 0, all_length = 0;
    size_t at = 0;
    for (size_t c = 0; c < want.size() / kd; c++) {
        double error = 0, length = 0;
        for (size_t d = 0; d < kd; d++) {
            float f;
            memcpy(&f, &got[c * kd + d], sizeof f);
            error += (f - want[c * kd + d]) * (f - want[c * kd + d]);
            length += want[c * kd + d] * want[c * kd + d];
        }
        all += error;
        all_length += length;
        const double off = sqrt(error / (length + 1e-30));
        if (!(off <= worst)) worst = off, at = c;
    }
    snprintf(detail, sizeof detail, "column %zu is off by %.2e of its length, all by %.2e", at, worst,
             sqrt(all / all_length));
    if (!(worst <= STATE_TOLERANCE))
        complain(l, what, detail);
    else
        printf("  %s: %s\n", what, detail);
}

/* ---- tests of a case ---- */

/* A sequence computed the plain way: what everything else must equal. */
struct reference {
    std::vector<float> in;
    bits out;                  /* [rows] */
    std::vector<words> states; /* [i]: after the prompt and i decoded rows */
};

static struct reference reference_new(const struct layer *l, uint64_t seed, int slot)
{
    struct reference f;
    f.in = raw_rows(l, l->c.rows, seed);
    slot_clear(l, slot);
    f.out = call_one(l, false, slot, 0, l->c.prompt, f.in);
    f.states.push_back(slot_get(l, slot));
    for (int t = l->c.prompt; t < l->c.rows; t++) {
        const bits row = call_one(l, true, slot, t, 1, f.in);
        f.out.insert(f.out.end(), row.begin(), row.end());
        f.states.push_back(slot_get(l, slot));
    }
    return f;
}

static const uint16_t *row_of(const struct layer *l, const struct reference *f, int t)
{
    return &f->out[(size_t)t * l->o_width];
}

static void test_cuts(const struct layer *l, const struct reference *f)
{
    slot_clear(l, 1);
    const int cuts[] = {0, 64, 192, l->c.prompt};
    int at = 0;
    for (int i = 1; i < 4; i++) {
        const int end = std::min(cuts[i], l->c.prompt);
        if (end == at) continue;
        check_same(l, call_one(l, false, 1, at, end - at, f->in), row_of(l, f, at), "cut prompt");
        at = end;
    }
    check_same(l, slot_get(l, 1), f->states[0].data(), "state of a cut prompt");
    const int shorter[] = {1, 3, 17, 63, 64, 90, 127, 129};
    for (int n : shorter) {
        if (n >= l->c.prompt) continue;
        slot_clear(l, 1);
        check_same(l, call_one(l, false, 1, 0, n, f->in), row_of(l, f, 0), "beginning of a prompt");
    }
}

static void test_drafts(const struct layer *l, const struct reference *f)
{
    for (int rows = 2; rows <= GDN_MAX_ROWS; rows++)
        for (int keep = 0; keep < rows; keep++) {
            const int skip = 3 + keep, t = l->c.prompt + skip;
            slot_set(l, 3, f->states[skip]);
            check_same(l, call_one(l, true, 3, t, rows, f->in), row_of(l, f, t), "drafts");
            check_same(l, slot_get(l, 3), f->states[skip + 1].data(), "state after drafts");
            replay(l, 3, keep);
            check_same(l, slot_get(l, 3), f->states[skip + 1 + keep].data(), "state after replay");
            check_same(l, call_one(l, true, 3, t + 1 + keep, 1, f->in), row_of(l, f, t + 1 + keep), "row after replay");
        }
}

/* Several sequences in a call, two of them all NaN. */
static void test_together(const struct layer *l, const struct reference *f, const struct reference *g)
{
    const int p = l->c.prompt, w = l->width, half = p > 64 ? 64 : 0;
    std::vector<float> nan((size_t)70 * w, NAN);
    slot_set(l, 0, f->states[0]);
    slot_set(l, 6, g->states[5]);
    slot_clear(l, 2);
    slot_clear(l, 4);
    slot_clear(l, 5);
    slot_clear(l, 1);
    slot_clear(l, 7);
    if (half) call_one(l, false, 5, 0, half, g->in);
    const std::vector<bits> o = call(l, {{true, 0, p, 3, &f->in[(size_t)p * w]},
                                         {true, 2, 9, 2, nan.data()},
                                         {true, 6, p + 5, 1, &g->in[(size_t)(p + 5) * w]},
                                         {false, 4, 0, 70, nan.data()},
                                         {false, 5, half, p - half, &g->in[(size_t)half * w]},
                                         {false, 1, 0, 5, f->in.data()},
                                         {false, 7, 0, p, f->in.data()}});
    check_same(l, o[0], row_of(l, f, p), "drafts with others");
    check_same(l, o[2], row_of(l, g, p + 5), "row with others");
    check_same(l, o[4], row_of(l, g, half), "rest of a prompt with others");
    check_same(l, o[5], row_of(l, f, 0), "short prompt with others");
    check_same(l, o[6], row_of(l, f, 0), "prompt with others");
    check_same(l, slot_get(l, 0), f->states[1].data(), "state with others, decode");
    check_same(l, slot_get(l, 6), g->states[6].data(), "state with others, one row");
    check_same(l, slot_get(l, 5), g->states[0].data(), "state with others, rest of a prompt");
    check_same(l, slot_get(l, 7), f->states[0].data(), "state with others, prompt");
    replay(l, 0, 2);
    check_same(l, slot_get(l, 0), f->states[3].data(), "replay with others");
}

static void test_case(const struct gdn_case *c)
{
    struct layer l = layer_new(c);
    printf("%d/%d heads %d x %d width %d\n", c->shape.k_heads, c->shape.v_heads, c->shape.k_dim, c->shape.v_dim,
           c->shape.conv_width);
    assert_null(op_gdn_unsupported(&c->shape));
    const struct reference f = reference_new(&l, 11, 0), g = reference_new(&l, 12, 0);
    const struct oracle a = oracle_new(&l, f.in);
    const size_t prompt = (size_t)c->prompt * l.o_width;
    check_rows(&l, &a, 0, bits(f.out.begin(), f.out.begin() + prompt), "prefill");
    check_rows(&l, &a, c->prompt, bits(f.out.begin() + prompt, f.out.end()), "decode");
    check_state(&l, a.at_prompt, f.states.front(), "state after prefill");
    check_state(&l, a.end, f.states.back(), "state at the end");
    test_cuts(&l, &f);
    test_drafts(&l, &f);
    test_together(&l, &f, &g);
    layer_free(&l);
}

static void test_all(void **unused)
{
    (void)unused;
    failures = 0;
    for (int i = 0; i < N_CASES; i++) test_case(&cases[i]);
    assert_int_equal(failures, 0);
}

static void test_unsupported(void **unused)
{
    (void)unused;
    const struct kern_gdn_shape good = {2, 6, 32, 48, 4, 1e-6f};
    struct kern_gdn_shape s[8] = {good, good, good, good, good, good, good, good};
    s[0].k_dim = 40;
    s[1].v_dim = 272;
    s[2].v_heads = 5;
    s[3].conv_width = 1;
    s[4].conv_width = 9;
    s[5].k_dim = 0;
    s[6].k_heads = 0;
    s[7].v_dim = 8;
    assert_null(op_gdn_unsupported(&good));
    for (int i = 0; i < 8; i++) assert_non_null(op_gdn_unsupported(&s[i]));
}

/* More chunks than scratch holds at once. */
static void test_windows(void **unused)
{
    (void)unused;
    const struct gdn_case c = {{2, 4, 128, 128, 4, 1e-6f}, 3000, 3001, MIXED};
    struct layer l = layer_new(&c);
    const std::vector<float> in = raw_rows(&l, c.rows, 13);
    const struct oracle a = oracle_new(&l, in);
    failures = 0;
    slot_clear(&l, 0);
    const bits whole = call_one(&l, false, 0, 0, c.prompt, in);
    check_rows(&l, &a, 0, whole, "long prompt");
    check_state(&l, a.at_prompt, slot_get(&l, 0), "state after a long prompt");
    slot_clear(&l, 1);
    for (int t = 0; t < c.prompt; t += 640) {
        const int n = std::min(640, c.prompt - t);
        check_same(&l, call_one(&l, false, 1, t, n, in), &whole[(size_t)t * l.o_width], "long prompt in cuts");
    }
    check_same(&l, slot_get(&l, 1), slot_get(&l, 0).data(), "state of a long prompt in cuts");
    const int rows[] = {1000, 1100, 900};
    std::vector<struct run> runs;
    for (int i = 0; i < 3; i++) {
        slot_clear(&l, 2 + i);
        runs.push_back((struct run){false, 2 + i, 0, rows[i], in.data()});
    }
    const std::vector<bits> several = call(&l, runs);
    for (const bits &o : several) check_same(&l, o, whole.data(), "several long prompts");
    layer_free(&l);
    assert_int_equal(failures, 0);
}

/* ---- bench ---- */

struct bench {
    struct kern_gdn_shape s;
    int decode_segments, rows, prefill; /* rows of each decode segment; prefill rows in one segment */
    int replay;
};

static void bench_one(const struct bench *x)
{
    enum { LAYERS = 12, ROUNDS = 9 };
    const struct kern_gdn_shape *s = &x->s;
    const int rows = x->decode_segments * x->rows + x->prefill,
              slots = std::max(1, x->decode_segments + (x->prefill > 0));
    const struct gdn_case gc = {*s, 1, 1, MIXED};
    struct layer l = layer_new(&gc);
    std::vector<float> in((size_t)rows * l.width);
    uint64_t seed = 3;
    for (float &f : in) f = random_float(&seed);
    std::vector<struct device_segment> segments;
    std::vector<struct device_row> of_row;
    for (int i = 0; i < x->decode_segments + (x->prefill > 0); i++) {
        const bool decode = i < x->decode_segments;
        segments.push_back((struct device_segment){i * x->rows, decode ? x->rows : x->prefill, 64, i, 0, 0});
    }
    for (int i = 0; i < (int)segments.size(); i++)
        for (int r = 0; r < segments[i].rows; r++) of_row.push_back((struct device_row){i, 64 + r});
    struct guarded in_dev = to_device(in), segments_dev = to_device(segments), rows_dev = to_device(of_row);
    struct guarded act = guarded_new_dev(act_buffer_bytes(x->decode_segments * x->rows, x->prefill, l.o_width));
    struct guarded scratch = guarded_new_dev(op_gdn_scratch_bytes(s, rows));
    char *states, *replays;
    CHECK_CUDA(cudaMalloc((void **)&states, LAYERS * slots * l.state_bytes));
    CHECK_CUDA(cudaMalloc((void **)&replays, LAYERS * slots * l.replay_bytes));
    CHECK_CUDA(cudaMemset(states, 0, LAYERS * slots * l.state_bytes));
    CHECK_CUDA(cudaMemset(replays, 0, LAYERS * slots * l.replay_bytes));
    struct device_batch b = {};
    b.rows = rows;
    b.decode_rows = x->decode_segments * x->rows;
    b.n_segments = (int)segments.size();
    b.n_decode_segments = x->decode_segments;
    b.row = (const struct device_row *)rows_dev.dev;
    b.segments = (const struct device_segment *)segments_dev.dev;
    for (int pdl = 0; pdl < 2; pdl++) {
        struct op_context c = card;
        c.pdl = pdl && card.pdl;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK_CUDA(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < LAYERS; i++) {
            const struct kern_gdn_memory m = {states + i * slots * l.state_bytes, replays + i * slots * l.replay_bytes,
                                              l.state_bytes, l.replay_bytes};
            if (x->replay)
                op_gdn_replay(&c, s, &l.weights, 1, m, 0, x->replay);
            else {
                op_gdn_decode(&c, &b, s, &l.weights, m, (const float *)in_dev.dev, scratch.dev, act.dev);
                op_gdn_prefill(&c, &b, s, &l.weights, m, (const float *)in_dev.dev, scratch.dev, act.dev);
            }
        }
        CHECK_CUDA(cudaStreamEndCapture(c.stream, &graph));
        CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
        cudaEvent_t from, to;
        CHECK_CUDA(cudaEventCreate(&from));
        CHECK_CUDA(cudaEventCreate(&to));
        std::vector<float> times;
        for (int i = 0; i < ROUNDS; i++) {
            float ms;
            CHECK_CUDA(cudaEventRecord(from, c.stream));
            CHECK_CUDA(cudaGraphLaunch(exec, c.stream));
            CHECK_CUDA(cudaEventRecord(to, c.stream));
            CHECK_CUDA(cudaEventSynchronize(to));
            CHECK_CUDA(cudaEventElapsedTime(&ms, from, to));
            times.push_back(ms);
        }
        std::sort(times.begin(), times.end());
        printf("%2d/%2d heads, %2d x %d decode rows, %4d prefill, replay %d, %s: %8.2f us a layer\n", s->k_heads,
               s->v_heads, x->decode_segments, x->rows, x->prefill, x->replay, c.pdl ? "PDL  " : "plain",
               times[ROUNDS / 2] * 1000 / LAYERS);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
    }
    cudaFree(states);
    cudaFree(replays);
    guarded_free_dev(in_dev, "in");
    guarded_free_dev(segments_dev, "segments");
    guarded_free_dev(rows_dev, "rows");
    guarded_free_dev(act, "act");
    guarded_free_dev(scratch, "scratch");
    layer_free(&l);
}

static int bench(void)
{
    const struct kern_gdn_shape whole = {16, 48, 128, 128, 4, 1e-6f}, half = {8, 24, 128, 128, 4, 1e-6f};
    const struct bench all[] = {
        {half, 1, 1, 0, 0},   {half, 1, 4, 0, 0},   {half, 1, 6, 0, 0},    {half, 0, 0, 0, 3},     {whole, 1, 1, 0, 0},
        {whole, 1, 4, 0, 0},  {whole, 1, 6, 0, 0},  {whole, 0, 0, 0, 3},   {whole, 2, 4, 0, 0},    {whole, 4, 4, 0, 0},
        {whole, 8, 4, 0, 0},  {whole, 32, 1, 0, 0}, {whole, 64, 1, 0, 0},  {half, 4, 4, 0, 0},     {half, 8, 4, 0, 0},
        {half, 64, 1, 0, 0},  {whole, 0, 0, 64, 0}, {whole, 0, 0, 512, 0}, {whole, 0, 0, 2048, 0}, {half, 0, 0, 512, 0},
        {half, 0, 0, 2048, 0}};
    for (const struct bench &x : all) bench_one(&x);
    return 0;
}

int main(int argc, char **argv)
{
    setbuf(stdout, NULL);
    card = open_card();
    if (argc > 1 && !strcmp(argv[1], "bench")) return bench();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_unsupported), cmocka_unit_test(test_all),
                                       cmocka_unit_test(test_windows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
