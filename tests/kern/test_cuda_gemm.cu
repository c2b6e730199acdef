/* Prefill matrix products on the card: against sums in double precision, for every block format, scale rule and edge;
 * and on bits: wgmma against mma.sync, a row among others against itself alone. `bench [shape]` as argument prints
 * throughput instead. */
#include "cuda_fixture.cuh"

#include <algorithm>

#include "op_linear_prefill.cuh"

static struct op_context context;

/* ---- a matrix and its packing ---- */

struct shape {
    enum block_format format;
    int planes, group;
    bool mins, swiglu;
    int rows, cols;
};

struct matrix {
    struct device_matrix m;
    struct guarded blocks, row_scale, group_scale, group_min,
        values; /* values: double [rows][cols], row scale included */
};

static double e2m1(int code)
{
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -magnitude[code & 7] : magnitude[code & 7];
}

static double e4m3(int code)
{
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double v = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 128 ? -v : v;
}

static float bf16_value(uint16_t bits)
{
    const uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint16_t bf16_bits(float f)
{
    f = bf16_round(f);
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)(u >> 16);
}

struct packer {
    struct shape s;
    int tiles, blocks, groups;
    std::vector<uint8_t> bytes;
    std::vector<float> row_scale, group_scale, group_min;
    std::vector<double> values;
    uint64_t random;
};

static uint8_t *block_of(struct packer *p, int row, int col)
{
    return p->bytes.data() + ((size_t)(row / 16) * p->blocks + col / 64) * block_bytes(p->s.format, p->s.planes);
}

static size_t group_at(const struct packer *p, int row, int group)
{
    return ((size_t)(row / 16) * p->groups + group) * 16 + row % 16;
}

static void pack_nvfp4(struct packer *p, int row)
{
    const int r = row % 16;
    for (int col = 0; col < p->s.cols; col += 16) {
        uint8_t *block = block_of(p, row, col);
        const int lane = (r & 7) * 4 + col % 64 / 16, h = r >> 3;
        const int byte = random_next(&p->random) % 8 ? 0xa0 + (int)(random_next(&p->random) % 32)
                                                     : 0x60 + (int)(random_next(&p->random) % 0x8f);
        const double scale = bf16_value((uint16_t)((byte + NVFP4_SCALE_BASE) << 4)) * 0x1p-118;
        block[BLOCK_SLAB_BYTES + 2 * lane + h] = (uint8_t)byte;
        uint32_t *words = (uint32_t *)(block + lane * 16);
        for (int i = 0; i < 16 && col + i < p->s.cols; i++) {
            const int code = (int)(random_next(&p->random) & 15);
            for (int bit = 0; bit < 4; bit++)
                words[2 * h + i / 8] |= (uint32_t)(code >> bit & 1) << nvfp4_place(i % 8 / 2, i & 1, bit);
            p->values[(size_t)row * p->s.cols + col + i] = e2m1(code) * scale;
        }
    }
}

static void pack_other(struct packer *p, int row)
{
    for (int col = 0; col < p->s.cols; col++) {
        uint8_t *block = block_of(p, row, col);
        const uint64_t bits = random_next(&p->random);
        const size_t group = p->s.group ? group_at(p, row, col / p->s.group) : 0;
        double value = 0;
        if (p->s.format == BLOCK_BF16) {
            float rest = random_float(&p->random);
            for (int plane = 0; plane < p->s.planes; plane++) {
                const uint16_t piece = bf16_bits(rest);
                memcpy(block + plane * BLOCK_PLANE_BYTES + block_bf16_place(row % 16, col % 64), &piece, 2);
                value += bf16_value(piece);
                rest -= bf16_value(piece);
            }
        } else {
            uint8_t code = (uint8_t)bits;
            if (p->s.format == BLOCK_FP8 && (code & 0x7f) == 0x7f) code ^= 1;
            block[block_byte_place(row % 16, col % 64)] = code;
            value = p->s.format == BLOCK_FP8 ? e4m3(code) : (double)(int8_t)code;
            if (p->s.group) value *= p->group_scale[group];
            if (p->s.mins) value += p->group_min[group];
        }
        p->values[(size_t)row * p->s.cols + col] = value;
    }
}

static struct matrix matrix_new(struct shape s, uint64_t seed)
{
    struct packer p = {s, (s.rows + 127) / 128 * 8, act_blocks(s.cols), 0, {}, {}, {}, {}, {}, seed};
    p.groups = block_groups(p.blocks, s.group);
    p.bytes.resize((size_t)p.tiles * p.blocks * block_bytes(s.format, s.planes));
    p.row_scale.resize((size_t)p.tiles * 16);
    p.group_scale.resize((size_t)p.tiles * p.groups * 16 + 1);
    p.group_min.resize(p.group_scale.size());
    p.values.resize((size_t)s.rows * s.cols);
    const float factor = s.format == BLOCK_NVFP4 ? BLOCK_FACTOR_NVFP4
                         : s.format == BLOCK_FP8 ? BLOCK_FACTOR_FP8
                                                 : BLOCK_FACTOR_PLAIN;
    for (int row = 0; row < s.rows; row++) {
        for (int g = 0; g < p.groups; g++) {
            p.group_scale[group_at(&p, row, g)] = 0.01f + fabsf(random_float(&p.random));
            p.group_min[group_at(&p, row, g)] = 40 * random_float(&p.random);
        }
        if (s.format == BLOCK_NVFP4)
            pack_nvfp4(&p, row);
        else
            pack_other(&p, row);
        const float scale = 0.5f + fabsf(random_float(&p.random));
        p.row_scale[row] = scale * factor;
        for (int col = 0; col < s.cols; col++) p.values[(size_t)row * s.cols + col] *= scale;
    }
    for (size_t row = s.rows; row < p.row_scale.size(); row++) p.row_scale[row] = NAN; /* nobody's */

    struct matrix out = {};
    out.blocks = to_device(p.bytes), out.row_scale = to_device(p.row_scale), out.values = to_device(p.values);
    out.group_scale = to_device(p.group_scale), out.group_min = to_device(p.group_min);
    struct device_matrix *m = &out.m;
    m->format = s.format, m->rows = s.rows, m->cols = s.cols, m->tiles = p.tiles, m->blocks = p.blocks;
    m->planes = s.planes, m->group = s.group, m->mins = s.mins, m->halves = 1, m->swiglu = s.swiglu;
    m->blocks_dev = (const uint8_t *)out.blocks.dev, m->row_scale_dev = (const float *)out.row_scale.dev;
    m->group_scale_dev = s.group ? (const float *)out.group_scale.dev : NULL;
    m->group_min_dev = s.mins ? (const float *)out.group_min.dev : NULL;
    return out;
}

static void matrix_free(struct matrix *w)
{
    guarded_free_dev(w->blocks, "blocks");
    guarded_free_dev(w->row_scale, "row scales");
    guarded_free_dev(w->group_scale, "group scales");
    guarded_free_dev(w->group_min, "group minimums");
    guarded_free_dev(w->values, "values");
}

/* ---- activations ---- */

/* [rows][cols], rounded to bfloat16. */
static std::vector<float> random_rows(int rows, int cols, uint64_t seed)
{
    std::vector<float> x((size_t)rows * cols);
    for (float &v : x) v = bf16_round(random_float(&seed));
    return x;
}

/* An act of `decode` rows of garbage and prefill rows x[source[i]], NaN where the source is -1 and in the last tile's
 * rest. */
static struct guarded act_new(const std::vector<float> &x, int cols, int decode, const std::vector<int> &source)
{
    const int blocks = act_blocks(cols), rows = (int)source.size();
    std::vector<uint16_t> act(act_buffer_bytes(decode, rows, cols) / 2, 0xffff);
    char *base = (char *)act.data() + act_prefill_offset(decode, cols);
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < blocks * 64; k++) {
            uint16_t v = 0;
            if (k < cols) v = source[r] < 0 ? 0xffff : bf16_bits(x[(size_t)source[r] * cols + k] * ACT_SCALE);
            const int in_tile = r % 256, place = act_place(k % 64);
            char *tile = base + ((size_t)(r / 256) * blocks + k / 64) * ACT_TILE_BYTES;
            memcpy(tile + in_tile * 128 + ((place / 8) ^ (in_tile % 8)) * 16 + place % 8 * 2, &v, 2);
        }
    return to_device(act);
}

static std::vector<int> first_rows(int n)
{
    std::vector<int> v(n);
    for (int i = 0; i < n; i++) v[i] = i;
    return v;
}

/* ---- oracle ---- */

/* out[token][row] = sum, and the sum of magnitudes beside it. */
__global__ void exact_product(const double *w, const float *x, int rows, int cols, double *sum, double *magnitude)
{
    __shared__ double part[2][128];
    const int row = blockIdx.x, token = blockIdx.y;
    double s = 0, m = 0;
    for (int k = threadIdx.x; k < cols; k += 128) {
        const double v = w[(size_t)row * cols + k] * x[(size_t)token * cols + k];
        s += v, m += fabs(v);
    }
    part[0][threadIdx.x] = s, part[1][threadIdx.x] = m;
    for (int o = 64; o; o >>= 1) {
        __syncthreads();
        if (threadIdx.x < o)
            for (int i = 0; i < 2; i++) part[i][threadIdx.x] += part[i][threadIdx.x + o];
    }
    if (threadIdx.x) return;
    sum[(size_t)token * rows + row] = part[0][0];
    magnitude[(size_t)token * rows + row] = part[1][0];
}

struct exact {
    std::vector<double> sum, magnitude;
};

static struct exact exact_of(const struct matrix *w, const std::vector<float> &x, int tokens)
{
    const size_t n = (size_t)tokens * w->m.rows;
    const struct guarded x_dev = to_device(x), sum = guarded_new_dev(n * 8), magnitude = guarded_new_dev(n * 8);
    exact_product<<<dim3(w->m.rows, tokens), 128>>>((const double *)w->values.dev, (const float *)x_dev.dev, w->m.rows,
                                                    w->m.cols, (double *)sum.dev, (double *)magnitude.dev);
    struct exact e = {from_device<double>(sum.dev, n), from_device<double>(magnitude.dev, n)};
    guarded_free_dev(x_dev, "x");
    guarded_free_dev(sum, "sums");
    guarded_free_dev(magnitude, "magnitudes");
    return e;
}

/* A step of the chain rounds or cuts a running sum of at most `magnitude` at its 23rd bit or below; cols / 16 steps of
 * random sign, and a factor of 4. With minimums, whose products are of another size, the magnitude counts both. */
static double tolerance(int cols, double magnitude) { return 4 * sqrt(cols / 16.0 + 4) * 0x1p-23 * magnitude; }

/* ---- tests ---- */

enum { MMA, CHOSEN };

/* y rows of pitch floats, everything else must stay NaN. */
static std::vector<float> product(const struct matrix *w, const struct guarded *act, struct kern_split split, int how,
                                  size_t pitch)
{
    const size_t n = split.prefill * pitch;
    const struct guarded y = guarded_new_dev(n * sizeof(float));
    CHECK_CUDA(cudaDeviceSynchronize()); /* the fixture's copies run on another stream */
    if (how == MMA)
        op_linear_prefill_mma(&context, &w->m, act->dev, split, (float *)y.dev, pitch);
    else
        op_linear_prefill(&context, &w->m, act->dev, split, (float *)y.dev, pitch);
    finish(&context);
    std::vector<float> out = from_device<float>(y.dev, n);
    guarded_free_dev(y, "y");
    return out;
}

static const char *text_of(struct shape s)
{
    static char text[96];
    static const char *const name[] = {"NVFP4", "FP8", "BF16", "INT8"};
    snprintf(text, sizeof text, "%s planes %d group %d%s %d x %d", name[s.format], s.planes, s.group,
             s.mins ? " mins" : "", s.rows, s.cols);
    return text;
}

/* Of the products of both kernels: errors, columns beyond the rows, bits. */
static int check_rows(struct shape s, int tokens, int decode)
{
    struct matrix w = matrix_new(s, 7 + s.rows);
    const std::vector<float> x = random_rows(tokens, s.cols, 99);
    const struct guarded act = act_new(x, s.cols, decode, first_rows(tokens));
    const struct exact e = exact_of(&w, x, tokens);
    const struct kern_split split = {decode, tokens};
    const size_t pitch = s.rows + 3;
    int bad = 0;
    std::vector<float> y[2];
    for (int how = MMA; how <= CHOSEN; how++) {
        y[how] = product(&w, &act, split, how, pitch);
        double worst = 0, error2 = 0, norm2 = 0;
        int wrong = 0, written = 0;
        for (int t = 0; t < tokens; t++)
            for (size_t r = 0; r < pitch; r++) {
                const float got = y[how][t * pitch + r];
                if (r >= (size_t)s.rows) {
                    written += !isnan(got);
                    continue;
                }
                const double want = e.sum[(size_t)t * s.rows + r],
                             allowed = tolerance(s.cols, e.magnitude[(size_t)t * s.rows + r]);
                const double ratio = fabs(got - want) / allowed;
                if (!(ratio <= 1) && !wrong++)
                    printf("  first wrong: token %d row %zu: %.9g, expected %.9g\n", t, r, got, want);
                worst = ratio > worst ? ratio : worst;
                error2 += (got - want) * (got - want), norm2 += want * want;
            }
        printf("%s, %d tokens, %s: error %.1e, %.2f of the tolerance\n", text_of(s), tokens,
               how == MMA ? "mma.sync" : "chosen", sqrt(error2 / norm2), worst);
        if (wrong || written) printf("  %d wrong, %d written beyond the rows\n", wrong, written);
        bad += wrong + written;
    }
    if (memcmp(y[0].data(), y[1].data(), y[0].size() * 4)) {
        size_t i = 0, n = 0;
        for (size_t j = y[0].size(); j-- > 0;)
            if (memcmp(&y[0][j], &y[1][j], 4)) i = j, n++;
        printf("  mma.sync and the chosen kernel differ in %zu, first at token %zu row %zu: %.9g %.9g\n", n, i / pitch,
               i % pitch, y[0][i], y[1][i]);
        bad++;
    }
    guarded_free_dev(act, "act");
    matrix_free(&w);
    return bad;
}

static void test_products(void **state)
{
    (void)state;
    static const struct {
        struct shape s;
        int tokens;
    } cases[] = {
        /* The big model's columns, whole and of a rank of two. */
        {{BLOCK_NVFP4, 1, 0, false, false, 384, 5120}, 512},
        {{BLOCK_NVFP4, 1, 0, false, false, 128, 17408}, 64},
        {{BLOCK_NVFP4, 1, 0, false, false, 256, 8704}, 300},
        {{BLOCK_FP8, 1, 0, false, false, 300, 6144}, 256},
        {{BLOCK_FP8, 1, 0, false, false, 512, 3072}, 200},
        {{BLOCK_BF16, 1, 0, false, false, 200, 5120}, 129},
        /* The small models': rows and columns that fill no tile and no block. */
        {{BLOCK_BF16, 1, 0, false, false, 960, 576}, 65},
        {{BLOCK_BF16, 1, 0, false, false, 576, 1536}, 1},
        {{BLOCK_FP8, 1, 0, false, false, 64, 96}, 70},
        {{BLOCK_NVFP4, 1, 0, false, false, 72, 48}, 5},
        {{BLOCK_BF16, 1, 0, false, false, 1, 1}, 3},
        {{BLOCK_BF16, 1, 0, false, false, 200, 200}, 1025},
        /* More units than one round of multiprocessors. */
        {{BLOCK_FP8, 1, 0, false, false, 5120, 576}, 2048},
        {{BLOCK_NVFP4, 1, 0, false, false, 2176, 128}, 2300},
        /* Planes and groups. */
        {{BLOCK_BF16, 2, 0, false, false, 200, 576}, 130},
        {{BLOCK_BF16, 3, 0, false, false, 130, 200}, 40},
        {{BLOCK_FP8, 1, 128, false, false, 384, 5120}, 300},
        {{BLOCK_FP8, 1, 64, false, false, 130, 576}, 64},
        {{BLOCK_FP8, 1, 128, false, false, 130, 576}, 2000},
        {{BLOCK_FP8, 1, 16, false, false, 130, 576}, 64},
        {{BLOCK_INT8, 1, 128, false, false, 576, 1536}, 300},
        {{BLOCK_INT8, 1, 128, false, false, 200, 1000}, 129},
        {{BLOCK_INT8, 1, 32, true, false, 384, 576}, 130},
        {{BLOCK_INT8, 1, 32, false, false, 130, 96}, 64},
        {{BLOCK_INT8, 1, 16, false, false, 130, 576}, 64},
        {{BLOCK_INT8, 1, 16, true, false, 72, 80}, 33},
        {{BLOCK_INT8, 1, 256, true, false, 72, 1100}, 33},
    };
    int bad = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        bad += check_rows(cases[i].s, cases[i].tokens, (int)(i % 4));
    assert_int_equal(bad, 0);
}

/* out[row][f]: what the act must hold, from the matrix's float32 product. */
__global__ void swiglu_of_rows(const float *y, int f, float *out)
{
    for (int c = threadIdx.x; c < f; c += blockDim.x) {
        const float *gate =
            y + (size_t)blockIdx.x * 2 * f; /* row 16 t + i: 8 gate rows and 8 up rows, the last fewer */
        out[(size_t)blockIdx.x * f + c] =
            swiglu_value(gate[c / 8 * 16 + c % 8], gate[c / 8 * 16 + 8 + c % 8]) * ACT_SCALE;
    }
}

/* The act has the bits of swiglu_value of the rows, zeros in padding, nothing in other rows. f: a multiple of 8. */
static int check_swiglu(struct shape s, int tokens, int decode)
{
    struct matrix w = matrix_new(s, 11 + s.rows);
    const int f = s.rows / 2, blocks = act_blocks(f);
    const std::vector<float> x = random_rows(tokens, s.cols, 98);
    const struct guarded act = act_new(x, s.cols, decode, first_rows(tokens));
    const struct kern_split split = {decode, tokens};
    const struct guarded y = to_device(product(&w, &act, split, MMA, s.rows));
    const struct guarded want_dev = guarded_new_dev((size_t)tokens * f * 4);
    swiglu_of_rows<<<tokens, 256>>>((const float *)y.dev, f, (float *)want_dev.dev);
    const std::vector<float> want = from_device<float>(want_dev.dev, (size_t)tokens * f);
    const size_t n_bytes = act_buffer_bytes(decode, tokens, f);
    const struct guarded out = guarded_new_dev(n_bytes);
    CHECK_CUDA(cudaDeviceSynchronize());
    op_linear_prefill_swiglu(&context, &w.m, act.dev, split, out.dev);
    finish(&context);
    const std::vector<uint16_t> got = from_device<uint16_t>(out.dev, n_bytes / 2);
    int wrong = 0;
    const size_t offset = act_prefill_offset(decode, f);
    for (size_t i = 0; i < offset / 2; i++) wrong += got[i] != 0xffff;
    if (wrong) printf("  %d written before the prefill rows\n", wrong);
    for (int r = 0; r < (tokens + 255) / 256 * 256; r++)
        for (int k = 0; k < blocks * 64; k++) {
            const int in_tile = r % 256, place = act_place(k % 64);
            const size_t at = offset + ((size_t)(r / 256) * blocks + k / 64) * ACT_TILE_BYTES + in_tile * 128 +
                              ((place / 8) ^ (in_tile % 8)) * 16 + place % 8 * 2;
            const uint16_t expected = r >= tokens ? 0xffff : k >= f ? 0 : bf16_bits(want[(size_t)r * f + k]);
            if (got[at / 2] == expected) continue;
            if (!wrong++)
                printf("  first wrong: token %d column %d: %04x, expected %04x\n", r, k, got[at / 2], expected);
        }
    printf("swiglu %s, %d tokens: %d wrong\n", text_of(s), tokens, wrong);
    guarded_free_dev(out, "swiglu act");
    guarded_free_dev(want_dev, "expected");
    guarded_free_dev(y, "y");
    guarded_free_dev(act, "act");
    matrix_free(&w);
    return wrong;
}

static void test_swiglu(void **state)
{
    (void)state;
    static const struct {
        struct shape s;
        int tokens;
    } cases[] = {
        {{BLOCK_NVFP4, 1, 0, false, true, 1024, 5120}, 512}, {{BLOCK_FP8, 1, 0, false, true, 512, 5120}, 300},
        {{BLOCK_BF16, 1, 0, false, true, 3072, 576}, 65},    {{BLOCK_BF16, 1, 0, false, true, 192, 64}, 1},
        {{BLOCK_NVFP4, 1, 0, false, true, 2176, 128}, 2300}, {{BLOCK_FP8, 1, 128, false, true, 176, 576}, 130},
        {{BLOCK_INT8, 1, 128, false, true, 512, 576}, 600},  {{BLOCK_INT8, 1, 32, true, true, 192, 64}, 130},
        {{BLOCK_BF16, 3, 0, false, true, 192, 64}, 300},
    };
    int bad = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        bad += check_swiglu(cases[i].s, cases[i].tokens, (int)(i % 3));
    assert_int_equal(bad, 0);
}

/* A row's bits: in other company, at other places, among NaN rows. */
static int check_company(struct shape s)
{
    enum { TOKENS = 2048 };
    struct matrix w = matrix_new(s, 5);
    const std::vector<float> x = random_rows(TOKENS, s.cols, 97);
    const struct guarded act = act_new(x, s.cols, 0, first_rows(TOKENS));
    const std::vector<float> all = product(&w, &act, {0, TOKENS}, CHOSEN, s.rows);
    guarded_free_dev(act, "act");
    int bad = 0;
    uint64_t random = 3;
    for (int tokens : {1, 8, 64, 100, 128, 129, 512, 700, 2048}) {
        std::vector<int> source(tokens);
        for (int &i : source) i = random_next(&random) % 3 ? (int)(random_next(&random) % TOKENS) : -1;
        source[tokens / 2] = 1234;
        const int decode = tokens % 5;
        const struct guarded some = act_new(x, s.cols, decode, source);
        const std::vector<float> y = product(&w, &some, {decode, tokens}, CHOSEN, s.rows);
        int differ = 0;
        for (int t = 0; t < tokens; t++)
            if (source[t] >= 0)
                differ += memcmp(&y[(size_t)t * s.rows], &all[(size_t)source[t] * s.rows], (size_t)s.rows * 4) != 0;
        if (differ) printf("  %s: %d rows differ in company of %d\n", text_of(s), differ, tokens);
        bad += differ;
        guarded_free_dev(some, "act");
    }
    matrix_free(&w);
    return bad;
}

static void test_rows_are_independent(void **state)
{
    (void)state;
    int bad = check_company({BLOCK_NVFP4, 1, 0, false, false, 640, 2112});
    bad += check_company({BLOCK_FP8, 1, 0, false, false, 384, 1536});
    bad += check_company({BLOCK_BF16, 1, 0, false, false, 200, 576});
    bad += check_company({BLOCK_FP8, 1, 128, false, false, 200, 960});
    bad += check_company({BLOCK_INT8, 1, 32, true, false, 200, 576});
    assert_int_equal(bad, 0);
}

static void test_kernels_agree(void **state)
{
    (void)state;
    struct err e = {};
    const bool agrees = op_linear_prefill_agrees(&context, &e);
    if (!agrees) printf("  self-test: %s\n", e.text);
    assert_true(agrees);
}

/* ---- throughput ---- */

__global__ void random_blocks(uint32_t *words, size_t n, int format, uint32_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t v = (uint32_t)i * 0x9e3779b9u + seed;
        v = (v ^ v >> 16) * 0x7feb352du;
        v = (v ^ v >> 15) * 0x846ca68bu;
        v ^= v >> 16;
        if (format == BLOCK_BF16) v = (v & 0x81ff81ffu) | 0x3c003c00u;
        if (format == BLOCK_NVFP4 && i % 144 >= 128) v = (v & 0x1f1f1f1fu) | 0xa0a0a0a0u;
        words[i] = v;
    }
}

__global__ void stamp(long long *out)
{
    out[0] = clock64();
    asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(out[1]));
}

static double clock_mhz; /* of the last timed replay */

/* Median microseconds of a launch, from replays of a graph of n launches. */
template <class F> static double time_us(F launch, int n)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaEvent_t begin, end;
    std::vector<double> us;
    const struct guarded stamps = guarded_new_dev(4 * sizeof(long long));
    launch(0);
    finish(&context);
    CHECK_CUDA(cudaStreamBeginCapture(context.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < n; i++) launch(i);
    CHECK_CUDA(cudaStreamEndCapture(context.stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    for (int i = 0; i < 9; i++) {
        stamp<<<1, 1, 0, context.stream>>>((long long *)stamps.dev);
        CHECK_CUDA(cudaEventRecord(begin, context.stream));
        CHECK_CUDA(cudaGraphLaunch(executable, context.stream));
        CHECK_CUDA(cudaEventRecord(end, context.stream));
        stamp<<<1, 1, 0, context.stream>>>((long long *)stamps.dev + 2);
        CHECK_CUDA(cudaStreamSynchronize(context.stream));
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 2) us.push_back(ms * 1000.0 / n);
    }
    const std::vector<long long> at = from_device<long long>(stamps.dev, 4);
    clock_mhz = 1e3 * (double)(at[2] - at[0]) / (double)(at[3] - at[1]);
    guarded_free_dev(stamps, "stamps");
    CHECK_CUDA(cudaGraphExecDestroy(executable));
    CHECK_CUDA(cudaGraphDestroy(graph));
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

static const char *bench_only; /* NULL: all shapes */

static void bench_shape(const char *name, struct shape s, const std::vector<int> &tokens)
{
    if (bench_only && strcmp(name, bench_only)) return;
    struct device_matrix m = {};
    m.format = s.format, m.rows = s.rows, m.cols = s.cols, m.tiles = (s.rows + 127) / 128 * 8,
    m.blocks = act_blocks(s.cols);
    m.planes = s.planes, m.group = s.group, m.mins = s.mins, m.halves = 1, m.swiglu = s.swiglu;
    m.bytes = (size_t)m.tiles * m.blocks * block_bytes(s.format, s.planes);
    const int copies = (int)(130000000 / m.bytes) + 2, max_tokens = tokens.back();
    const size_t scales = (size_t)m.tiles * 16 * (block_groups(m.blocks, s.group) + 1);
    const std::vector<float> ones(scales, BLOCK_FACTOR_PLAIN);
    const struct guarded weights = guarded_new_dev(m.bytes * copies), scale = to_device(ones);
    const struct guarded act = guarded_new_dev(act_buffer_bytes(0, max_tokens, s.cols));
    const struct guarded y =
        guarded_new_dev(s.swiglu ? act_buffer_bytes(0, max_tokens, s.rows / 2) : (size_t)max_tokens * s.rows * 4);
    random_blocks<<<1024, 256>>>((uint32_t *)weights.dev, m.bytes * copies / 4, s.format, 1);
    random_blocks<<<1024, 256>>>((uint32_t *)act.dev, act.n_bytes / 4, BLOCK_BF16, 2);
    CHECK_CUDA(cudaDeviceSynchronize());
    m.row_scale_dev = m.group_scale_dev = m.group_min_dev = (const float *)scale.dev;
    printf("%-8s %-28s", name, text_of(s));
    for (int n : tokens) {
        const struct kern_split split = {0, n};
        const double us = time_us(
            [&](int i) {
                m.blocks_dev = (const uint8_t *)weights.dev + m.bytes * (i % copies);
                if (s.swiglu)
                    op_linear_prefill_swiglu(&context, &m, act.dev, split, y.dev);
                else
                    op_linear_prefill(&context, &m, act.dev, split, (float *)y.dev, s.rows);
            },
            n >= 2048 ? 12 : 32);
        printf("  M %4d: %7.1f us %4.0f TFLOP/s %4.0f MHz", n, us, 2e-6 * n * s.rows * s.cols / us, clock_mhz);
    }
    printf("\n");
    fflush(stdout);
    guarded_free_dev(weights, "weights");
    guarded_free_dev(scale, "scale");
    guarded_free_dev(act, "act");
    guarded_free_dev(y, "y");
}

static void bench(void **state)
{
    (void)state;
    const std::vector<int> tokens = {64, 128, 512, 2048};
    bench_shape("square", {BLOCK_BF16, 1, 0, false, false, 8192, 8192}, {8192});
    bench_shape("gate_up", {BLOCK_NVFP4, 1, 0, false, true, 34816, 5120}, tokens);
    bench_shape("down", {BLOCK_NVFP4, 1, 0, false, false, 5120, 17408}, tokens);
    bench_shape("qkvz", {BLOCK_FP8, 1, 0, false, false, 16384, 5120}, tokens);
    bench_shape("o", {BLOCK_FP8, 1, 0, false, false, 5120, 6144}, tokens);
    bench_shape("gate_up", {BLOCK_FP8, 1, 0, false, true, 34816, 5120}, tokens);
    bench_shape("bf16", {BLOCK_BF16, 1, 0, false, false, 14336, 5120}, tokens);
    bench_shape("gate_up2", {BLOCK_NVFP4, 1, 0, false, true, 17408, 5120}, tokens);
    bench_shape("down2", {BLOCK_NVFP4, 1, 0, false, false, 5120, 8704}, tokens);
    bench_shape("qkvz2", {BLOCK_FP8, 1, 0, false, false, 8192, 5120}, tokens);
    bench_shape("o2", {BLOCK_FP8, 1, 0, false, false, 5120, 3072}, tokens);
    bench_shape("w8", {BLOCK_INT8, 1, 128, false, false, 16384, 5120}, tokens);
    bench_shape("fp8g", {BLOCK_FP8, 1, 128, false, false, 16384, 5120}, tokens);
    bench_shape("q4", {BLOCK_INT8, 1, 32, true, false, 8192, 5120}, tokens);
    bench_shape("f16", {BLOCK_BF16, 2, 0, false, false, 8192, 5120}, tokens);
}

int main(int argc, char **argv)
{
    context = open_card();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kernels_agree),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_rows_are_independent),
    };
    const struct CMUnitTest benches[] = {cmocka_unit_test(bench)};
    bench_only = argc > 2 ? argv[2] : NULL;
    if (argc > 1 && strcmp(argv[1], "bench") == 0) return cmocka_run_group_tests(benches, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
