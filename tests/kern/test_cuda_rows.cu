/* Rows on a card: embedding, RMS norm, best logit and hashes against the host, and rows against themselves. */
#include "cuda_fixture.cuh"

#include "act.cuh"
#include "op_rows.h"

static struct op_context card;

/* A sum of n squares errs by about log2(n) + 16 roundings of its own size, of which the root halves the error; root, quotient and two
 * products: 5 more. */
static const double NORM_TOLERANCE = 24 * 0x1p-24;

static std::vector<float> random_values(size_t n, uint64_t seed)
{
    std::vector<float> v(n);
    for (float &x : v) x = 3 * random_float(&seed);
    return v;
}

/* Value of (row, column) of an act, without its factor. */
static double act_value(const std::vector<uint16_t> &act, struct kern_split split, int width, int row, int k)
{
    size_t at = (size_t)row * act_blocks(width) * ACT_BLOCK + k;
    if (row >= split.decode) {
        const int r = row - split.decode, in_tile = r % ACT_TILE_ROWS, p = act_place(k % 64);
        size_t byte = act_prefill_offset(split.decode, width) +
                      ((size_t)(r / ACT_TILE_ROWS) * act_blocks(width) + k / ACT_BLOCK) * ACT_TILE_BYTES;
        byte += in_tile * 128 + (((p >> 3) ^ (in_tile & 7)) << 4) + (p & 7) * 2;
        at = byte / 2;
    }
    const uint32_t bits = (uint32_t)act[at] << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return (double)f / (double)ACT_SCALE;
}

static void check_norm(int n, struct kern_split split)
{
    const int rows = kern_rows(split), sick = rows > 2 ? 1 : -1;
    std::vector<float> x = random_values((size_t)rows * n, 5), w = random_values(n, 6);
    const std::vector<float> other = random_values((size_t)rows * n, 7), other_w = random_values(n, 8);
    if (sick >= 0) x[(size_t)sick * n] = NAN;
    const size_t act_values = act_buffer_bytes(split.decode, split.prefill, n) / 2;
    const size_t pair_values = act_buffer_bytes(split.decode, split.prefill, 2 * n) / 2;
    struct guarded dx = to_device(x), dw = to_device(w), dy = guarded_new_dev((size_t)rows * n * 4), one = guarded_new_dev(n * 4);
    struct guarded act = guarded_new_dev(act_values * 2), pair = guarded_new_dev(pair_values * 2);
    struct guarded dother = to_device(other), dother_w = to_device(other_w), dz = guarded_new_dev((size_t)rows * n * 4);
    op_rms_norm(&card, (float *)dx.dev, (float *)dw.dev, split, n, 1e-6f, (float *)dy.dev, act.dev);
    op_rms_norm(&card, (float *)dother.dev, (float *)dother_w.dev, split, n, 1e-6f, (float *)dz.dev, NULL);
    op_rms_norm_pair(&card, (float *)dother.dev, (float *)dother_w.dev, (float *)dx.dev, (float *)dw.dev, split, n, 1e-6f, pair.dev);
    finish(&card);
    const std::vector<float> z = from_device<float>(dz.dev, (size_t)rows * n);
    const std::vector<uint16_t> p = from_device<uint16_t>(pair.dev, pair_values);
    const std::vector<float> y = from_device<float>(dy.dev, (size_t)rows * n);
    const std::vector<uint16_t> a = from_device<uint16_t>(act.dev, act_values);
    for (int r = 0; r < rows; r++) {
        double squares = 0;
        for (int i = 0; i < n; i++) squares += (double)x[(size_t)r * n + i] * x[(size_t)r * n + i];
        const double scale = 1 / sqrt(squares / n + 1e-6);
        for (int i = 0; i < n && r != sick; i++) {
            const double want = x[(size_t)r * n + i] * scale * w[i], got = y[(size_t)r * n + i];
            if (!(fabs(got - want) <= NORM_TOLERANCE * fabs(want) + 1e-30)) fail_msg("norm of %d: row %d value %d: %g, not %g", n, r, i, got, want);
            const double in_act = act_value(a, split, n, r, i), rounded = (double)bf16_round(y[(size_t)r * n + i]);
            if (in_act != rounded) fail_msg("act of %d: row %d value %d: %g, not %g", n, r, i, in_act, rounded);
            if (act_value(p, split, 2 * n, r, n + i) != rounded) fail_msg("pair of %d: row %d, second value %d", n, r, i);
            if (act_value(p, split, 2 * n, r, i) != (double)bf16_round(z[(size_t)r * n + i])) fail_msg("pair of %d: row %d, first value %d", n, r, i);
        }
        op_rms_norm(&card, (float *)dx.dev + (size_t)r * n, (float *)dw.dev, {1, 0}, n, 1e-6f, (float *)one.dev, NULL);
        finish(&card);
        const std::vector<float> alone = from_device<float>(one.dev, n);
        if (r != sick) assert_memory_equal(alone.data(), &y[(size_t)r * n], (size_t)n * 4);
    }
    guarded_free_dev(dx, "x"), guarded_free_dev(dw, "w"), guarded_free_dev(dy, "y"), guarded_free_dev(one, "one"), guarded_free_dev(act, "act");
    guarded_free_dev(dother, "other"), guarded_free_dev(dother_w, "other w"), guarded_free_dev(dz, "z"), guarded_free_dev(pair, "pair");
}

static void test_norm(void **state)
{
    (void)state;
    for (int n : {16, 64, 96, 576, 896, 1024, 1040, 5120, 8192, 10240, 16384})
        for (struct kern_split split : {kern_split{1, 0}, kern_split{4, 0}, kern_split{0, 70}, kern_split{3, 259}}) check_norm(n, split);
}

static void test_embed(void **state)
{
    (void)state;
    enum { TOKENS = 50, COLS = 200, ROWS = 9 };
    const std::vector<float> values = random_values(TOKENS * COLS, 8);
    std::vector<uint16_t> half(values.size());
    for (size_t i = 0; i < values.size(); i++) {
        const float rounded = bf16_round(values[i]);
        uint32_t u;
        memcpy(&u, &rounded, 4);
        half[i] = (uint16_t)(u >> 16);
    }
    const std::vector<int32_t> tokens = {3, 0, 49, 3, 7, 8, 9, 10, 11}, stored = {3, -2, -1, 3, 7, 8, 9, 10, 11}, left = {49, 0};
    struct guarded full = to_device(values), bf16 = to_device(half), ids = to_device(stored), left_ids = to_device(left);
    for (int kind = 0; kind < 2; kind++) {
        struct guarded y = guarded_new_dev(ROWS * COLS * 4);
        struct kern_table t = {};
        struct device_batch b = {};
        t.bf16 = kind, t.rows = TOKENS, t.cols = COLS, t.rows_dev = kind ? bf16.dev : full.dev;
        b.rows = ROWS, b.tokens = (const int32_t *)ids.dev, b.left = (const int32_t *)left_ids.dev;
        op_embed(&card, &b, &t, (float *)y.dev);
        finish(&card);
        const std::vector<float> got = from_device<float>(y.dev, ROWS * COLS);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < COLS; i++) {
                const float want = values[(size_t)tokens[r] * COLS + i];
                assert_true(got[(size_t)r * COLS + i] == (kind ? bf16_round(want) : want));
            }
        guarded_free_dev(y, "y");
    }
    guarded_free_dev(full, "table"), guarded_free_dev(bf16, "table"), guarded_free_dev(ids, "ids"), guarded_free_dev(left_ids, "left");
}

/* As the CPU's: ties to the lowest id, what is not allowed counts for nothing, not even when it is no number. */
static void test_best(void **state)
{
    (void)state;
    enum { ROWS = 6, FIRST = 21 };
    for (int n : {333, 49152, 124160, 248320}) {
        std::vector<float> x = random_values((size_t)ROWS * n, 9);
        std::vector<uint32_t> allowed((FIRST + n + 31) / 32, 0xffffffffu), none(allowed.size(), 0);
        allowed[(FIRST + 100) / 32] &= ~(1u << (FIRST + 100) % 32);
        const size_t m = (size_t)n;
        x[300] = 20;
        x[m + 7] = x[m + 8] = x[m + 200] = 30;
        x[2 * m + 150] = NAN;
        x[3 * m + m - 1] = INFINITY;
        x[4 * m + 100] = NAN, x[4 * m + 40] = 50;
        struct guarded dx = to_device(x), da = to_device(allowed), dn = to_device(none);
        struct guarded scratch = to_device(std::vector<struct op_best_row>(ROWS)), out = guarded_new_dev(ROWS * sizeof(struct kern_best));
        struct kern_best *o = (struct kern_best *)out.dev;
        struct op_best_row *s = (struct op_best_row *)scratch.dev;
        op_best(&card, (float *)dx.dev, ROWS - 1, n, FIRST, (uint32_t *)da.dev, s, o);
        op_best(&card, (float *)dx.dev + 5 * m, 1, n, FIRST, (uint32_t *)dn.dev, s, o + 5);
        finish(&card);
        const std::vector<struct kern_best> b = from_device<struct kern_best>(out.dev, ROWS);
        const int32_t want[ROWS] = {FIRST + 300, FIRST + 7, -1, -1, FIRST + 40, KERN_NO_ID};
        for (int r = 0; r < ROWS; r++)
            if (b[r].id != want[r]) fail_msg("of %d: row %d: id %d, not %d", n, r, b[r].id, want[r]);
        assert_true(b[0].logit == 20 && b[1].logit == 30 && b[4].logit == 50);
        guarded_free_dev(dx, "x"), guarded_free_dev(da, "allowed"), guarded_free_dev(dn, "none"), guarded_free_dev(scratch, "scratch"), guarded_free_dev(out, "out");
    }
}

/* As kern_best_of on the host: each rank's turn, a tie, a number that is none, a row without anything that counts. */
static void test_best_tokens(void **state)
{
    (void)state;
    enum { ROWS = 40, RANKS = 3 };
    std::vector<struct kern_best> best(ROWS * RANKS);
    std::vector<int32_t> want(ROWS);
    for (int i = 0; i < ROWS; i++) {
        struct kern_best *b = &best[(size_t)i * RANKS];
        for (int r = 0; r < RANKS; r++) b[r] = {(float)((i * 7 + r * 5) % 4), r * 1000 + i};
        if (i % 5 == 3) b[i % RANKS].id = -1;
        if (i % 11 == 6) b[0] = b[1] = b[2] = {-INFINITY, KERN_NO_ID};
        const int32_t id = kern_best_of(b, RANKS).id;
        want[i] = id < 0 || id == KERN_NO_ID ? 0 : id;
    }
    struct guarded in = to_device(best), out = guarded_new_dev(ROWS * 4), again = guarded_new_dev(ROWS * 4);
    op_best_tokens(&card, (struct kern_best *)in.dev, ROWS, RANKS, (int32_t *)out.dev, (int32_t *)again.dev);
    finish(&card);
    assert_true(from_device<int32_t>(out.dev, ROWS) == want && from_device<int32_t>(again.dev, ROWS) == want);
    guarded_free_dev(in, "in"), guarded_free_dev(out, "out"), guarded_free_dev(again, "again");
}

/* Equal rows have equal hashes wherever they lie; a bit, or two values changed for each other, makes another. */
static void test_hash(void **state)
{
    (void)state;
    enum { ROWS = 5, N = 5120 };
    std::vector<float> x = random_values(ROWS * N, 10);
    memcpy(&x[3 * N], &x[0], N * 4);
    memcpy(&x[4 * N], &x[0], N * 4);
    memcpy(&x[2 * N], &x[0], N * 4);
    x[2 * N + 77] = nextafterf(x[77], 9);
    std::swap(x[4 * N + 8], x[4 * N + 9]);
    struct guarded dx = to_device(x), out = guarded_new_dev(ROWS * 8);
    op_hash_rows(&card, (float *)dx.dev, ROWS, N, (uint64_t *)out.dev);
    finish(&card);
    const std::vector<uint64_t> h = from_device<uint64_t>(out.dev, ROWS);
    assert_true(h[0] == h[3] && h[0] != h[1] && h[0] != h[2] && h[0] != h[4]);
    guarded_free_dev(dx, "x"), guarded_free_dev(out, "out");
}

int main(void)
{
    card = open_card();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_best),
        cmocka_unit_test(test_best_tokens),
        cmocka_unit_test(test_hash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
