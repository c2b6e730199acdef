/* kern_cpu_vnni: linear layers of coded weights by integer products of four (AVX-512 VNNI); everything else is AVX-512's.
 *
 * Activations become whole numbers, which meet codes without rounding. A group of 32 is x = quantum * q: the quantum is a power of
 * two and q a whole number, the largest of the group between 0x3fbfc0 and 0x7f7f7f, so that rounding to it errs by less than
 * 2^-22.99 of the largest, and 0, 1 or any value of few bits comes through unchanged. q is three signed bytes, the limbs: q = 2^16
 * q0 + 2^8 q1 + q2. Limbs are multiplied with codes of up to 8 bits and summed as integers; what is rounded are these, of the sums
 * c_i of code * q_i over a group:
 *   s = (2^8 (2^8 c0 + c1) + c2) quantum;  acc = scale * s + acc;  acc = min * sum(x) + acc
 * So a row has the same bits in PREFILL as in DECODE, whatever rows are beside it.
 *
 * 32 columns of 16 outputs take 8 instructions a limb where float32 takes 32 and as many to widen the codes: one row runs at the
 * memory's speed. Many rows take 28 instructions of the multipliers in all where float32 takes 32. */
#include "kern_cpu_coded.h"

#include <string.h>

enum {
    PREFETCH_BYTES = 4096,
    LIMB_ROWS = 4, /* rows that share what it takes to unpack a panel */
    FEW_ROWS = 2   /* so many are split one by one */
};

struct limb_call {
    const struct cpu_part *part;
    const struct limb_group
        *x; /* [rows / LIMB_ROWS][groups][LIMB_ROWS]; what lies past the last row is computed and thrown away */
    int rows, groups;
    float *y; /* the first output of the weight */
    size_t ldy;
};

/* The four rows from `row` on, a multiple of LIMB_ROWS. */
static const struct limb_group *rows_at(const struct limb_call *c, int row) { return c->x + (size_t)row * (size_t)c->groups; }

/* ---- panels ---- */

/* Eight columns of 16 outputs as two vectors of quads, in the order of struct limb_group. */
CODED_INLINE void limb_quads(struct coded_kind kind, const uint8_t *codes, int column, __m512i quads[2])
{
    if (kind.codes == CODES_4) {
        const __m512i words = _mm512_loadu_si512(codes + column * (PANEL_ROWS / 2)), nibble = _mm512_set1_epi8(15);
        quads[0] = _mm512_and_si512(words, nibble);
        quads[1] = _mm512_and_si512(_mm512_srli_epi32(words, 4), nibble);
        return;
    }
#define QUAD(column, out)                                                                                                      \
    (column) * 16 + (out), ((column) + 2) * 16 + (out), ((column) + 4) * 16 + (out), ((column) + 6) * 16 + (out)
#define QUADS(column)                                                                                                          \
    QUAD(column, 0), QUAD(column, 1), QUAD(column, 2), QUAD(column, 3), QUAD(column, 4), QUAD(column, 5), QUAD(column, 6),     \
        QUAD(column, 7), QUAD(column, 8), QUAD(column, 9), QUAD(column, 10), QUAD(column, 11), QUAD(column, 12),               \
        QUAD(column, 13), QUAD(column, 14), QUAD(column, 15)
    static const uint8_t even[64] = {QUADS(0)}, odd[64] = {QUADS(1)};
#undef QUADS
#undef QUAD
    const uint8_t *at = codes + column * PANEL_ROWS;
    const __m512i low = _mm512_loadu_si512(at), high = _mm512_loadu_si512(at + 64);
    quads[0] = _mm512_permutex2var_epi8(low, _mm512_loadu_si512(even), high);
    quads[1] = _mm512_permutex2var_epi8(low, _mm512_loadu_si512(odd), high);
}

/* acc with one group added, from the sums of its limbs. */
CODED_INLINE __m512 limb_add(struct coded_kind kind, __m512 acc, __m512i c0, __m512i c1, __m512i c2, const struct limb_group *x,
                             __m512 scale, __m512 min)
{
    const __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(c0, 8), c1));
    const __m512 whole = _mm512_fmadd_ps(high, _mm512_set1_ps(256), _mm512_cvtepi32_ps(c2));
    acc = _mm512_fmadd_ps(scale, _mm512_mul_ps(whole, _mm512_set1_ps(x->quantum)), acc);
    return kind.mins ? _mm512_fmadd_ps(min, _mm512_set1_ps(x->sum), acc) : acc;
}

/* c[row][limb] = products of one group, of even and odd columns in sums of their own where there are registers for them: a sum
 * takes five cycles. The instruction wants unsigned codes: signed ones get 128 more, and the bias starts the sums that much
 * lower. rows is a constant. */
CODED_INLINE void multiply_group(struct coded_kind kind, int rows, const uint8_t *codes, const struct limb_group *x,
                                 __m512i c[][LIMBS])
{
    const int sums = rows <= 2 ? 2 : 1;
    __m512i half[LIMB_ROWS][LIMBS][2];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int i = 0; i < LIMBS; i++) {
            half[r][i][0] = kind.codes == CODES_4 ? _mm512_setzero_si512() : _mm512_set1_epi32(x[r].bias[i]);
            half[r][i][1] = _mm512_setzero_si512();
        }
#pragma GCC unroll 4
    for (int k = 0; k < CODED_GROUP; k += 8) {
        __m512i quads[2];
        limb_quads(kind, codes, k, quads);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            if (kind.codes != CODES_4) quads[odd] = _mm512_xor_si512(quads[odd], _mm512_set1_epi8(-128));
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
                for (int i = 0; i < LIMBS; i++) {
                    int32_t quad;
                    memcpy(&quad, x[r].limbs[i] + k + 4 * odd, sizeof quad);
                    __m512i *sum = &half[r][i][odd % sums];
                    *sum = _mm512_dpbusd_epi32(*sum, quads[odd], _mm512_set1_epi32(quad));
                }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int i = 0; i < LIMBS; i++) c[r][i] = sums == 2 ? _mm512_add_epi32(half[r][i][0], half[r][i][1]) : half[r][i][0];
}

CODED_INLINE void panel_rows(struct coded_kind kind, int rows, const struct limb_call *call, const uint8_t *panel,
                             const struct limb_group *x, __m512 out[LIMB_ROWS])
{
    const struct cpu_part *part = call->part;
    const int wide = coded_wide(kind, part), groups = call->groups;
    const size_t step = part->group_bytes >> wide;
    __m512 acc[LIMB_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, x += LIMB_ROWS) {
        const uint8_t *scales = coded_scales_at(part, wide, panel, g), *codes = coded_codes_at(kind, part, wide, panel, g);
        for (size_t line = 0; line < step; line += 64) __builtin_prefetch(codes + PREFETCH_BYTES + line, 0, 3);
        const __m512 scale = coded_scale(kind, scales), min = coded_min(kind, scales);
        __m512i c[LIMB_ROWS][LIMBS];
        multiply_group(kind, rows, codes, x, c);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) acc[r] = limb_add(kind, acc[r], c[r][0], c[r][1], c[r][2], &x[r], scale, min);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) out[r] = acc[r];
}

typedef void panel_fn(const struct limb_call *call, const uint8_t *panel, const struct limb_group *x, __m512 acc[LIMB_ROWS]);

#define PANEL_FN(name, rows, ...)                                                                                              \
    static void name##_##rows(const struct limb_call *call, const uint8_t *panel, const struct limb_group *x,                  \
                              __m512 acc[LIMB_ROWS])                                                                           \
    {                                                                                                                          \
        panel_rows((struct coded_kind){__VA_ARGS__}, rows, call, panel, x, acc);                                               \
    }
#define PANEL_FNS(name, ...)                                                                                                   \
    PANEL_FN(name, 1, __VA_ARGS__)                                                                                             \
    PANEL_FN(name, 2, __VA_ARGS__)                                                                                             \
    PANEL_FN(name, 3, __VA_ARGS__)                                                                                             \
    PANEL_FN(name, 4, __VA_ARGS__)
#define PANEL_ENTRIES(name, ...) {name##_1, name##_2, name##_3, name##_4},

CODED_KINDS(PANEL_FNS)

/* y of panels first .. end - 1 of the part. */
static void run_panels(const struct limb_call *call, int first, int end)
{
    static panel_fn *const kernels[][LIMB_ROWS] = {CODED_KINDS(PANEL_ENTRIES)};
    const struct cpu_part *p = call->part;
    panel_fn *const *kernel = kernels[coded_kind_index(p)];
    for (int panel = first; panel < end; panel++)
        for (int r = 0, n; r < call->rows; r += n) {
            __m512 acc[LIMB_ROWS];
            n = call->rows - r < LIMB_ROWS ? call->rows - r : LIMB_ROWS;
            kernel[n - 1](call, p->bytes + (size_t)panel * p->panel_bytes, rows_at(call, r), acc);
            float *y = call->y + (size_t)r * call->ldy + p->y_first + panel * PANEL_ROWS;
            for (int i = 0; i < n; i++) _mm512_mask_storeu_ps(y + (size_t)i * call->ldy, coded_outs(p, panel), acc[i]);
        }
}

/* ---- activations ---- */

/* Lane i of each quarter of turned[0 .. 3] is v[i]'s. */
CODED_INLINE void turn(const __m512i v[LIMB_ROWS], __m512i turned[LIMB_ROWS])
{
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    turned[0] = _mm512_unpacklo_epi64(a, c);
    turned[1] = _mm512_unpackhi_epi64(a, c);
    turned[2] = _mm512_unpacklo_epi64(b, d);
    turned[3] = _mm512_unpackhi_epi64(b, d);
}

/* Lane i: the largest of v[i]. */
CODED_INLINE __m128i largest_of_each(const __m512i v[LIMB_ROWS])
{
    __m512i t[LIMB_ROWS];
    turn(v, t);
    const __m512i quarters = _mm512_max_epi32(_mm512_max_epi32(t[0], t[1]), _mm512_max_epi32(t[2], t[3]));
    const __m256i halves = _mm256_max_epi32(_mm512_castsi512_si256(quarters), _mm512_extracti64x4_epi64(quarters, 1));
    return _mm_max_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

/* Lane i: the sums over the lower and over the upper half of v[i]. */
CODED_INLINE void sums_of_each(const __m512i v[LIMB_ROWS], __m128i *lower, __m128i *upper)
{
    __m512i t[LIMB_ROWS];
    turn(v, t);
    const __m512i quarters = _mm512_add_epi32(_mm512_add_epi32(t[0], t[1]), _mm512_add_epi32(t[2], t[3]));
    const __m256i low = _mm512_castsi512_si256(quarters), high = _mm512_extracti64x4_epi64(quarters, 1);
    *lower = _mm_add_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    *upper = _mm_add_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

/* Bytes 0, 1 and 2 of the words of 32 columns become limbs, quad after quad. The first two limbs' sums of quads are the halves
 * of sums[0], the third's the lower half of sums[1]. */
CODED_INLINE void store_limbs(__m512i low, __m512i high, struct limb_group *to, __m512i sums[2])
{
#define QUAD(column, byte)                                                                                                     \
    (column) * 4 + (byte), ((column) + 2) * 4 + (byte), ((column) + 4) * 4 + (byte), ((column) + 6) * 4 + (byte)
#define LIMB(byte)                                                                                                             \
    QUAD(0, byte), QUAD(1, byte), QUAD(8, byte), QUAD(9, byte), QUAD(16, byte), QUAD(17, byte), QUAD(24, byte), QUAD(25, byte)
    static const uint8_t upper[64] = {LIMB(2), LIMB(1)}, lowest[64] = {LIMB(0)};
#undef LIMB
#undef QUAD
    const __m512i two = _mm512_permutex2var_epi8(low, _mm512_loadu_si512(upper), high);
    const __m512i one = _mm512_permutex2var_epi8(low, _mm512_loadu_si512(lowest), high);
    _mm512_store_si512(to->limbs[0], two);
    _mm256_store_si256((__m256i *)(void *)to->limbs[2], _mm512_castsi512_si256(one));
    const __m512i ones = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
    sums[0] = _mm512_dpbusd_epi32(zero, ones, two);
    sums[1] = _mm512_dpbusd_epi32(zero, ones, one);
}

static int least(int a, int b) { return a < b ? a : b; }

/* Four groups at once, because what one needs across its lanes takes as long: x, x + x_step, .. become to[0], to[to_step], ..
 * Only n exist, and the last of them stands for the rest. */
CODED_INLINE void split_four(const float *x, size_t x_step, struct limb_group *to, size_t to_step, int n)
{
    /* Of the largest magnitude, 24 bits of significand less one: q. Three signed bytes reach 0x7f7f7f; where q would round to
     * more, from these fractions on, the exponent is one more. Quanta below 2^-126 do not exist. */
    enum {
        MAGNITUDE = 0x7fffffff,
        FINITE = 0x7f7fffff,
        FRACTION = 0x7efeff,
        ONE = 0x800000,
        EXPONENT = 23,
        LEAST = 23,
        Q_BITS = 22
    };
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE), middle = _mm512_set1_epi32(0x808080);
    __m512 low[LIMB_ROWS], high[LIMB_ROWS];
    __m512i larger[LIMB_ROWS], sums[2][LIMB_ROWS];
#pragma GCC unroll 4
    for (int i = 0; i < LIMB_ROWS; i++) {
        const float *from = x + (size_t)least(i, n - 1) * x_step;
        low[i] = _mm512_loadu_ps(from), high[i] = _mm512_loadu_ps(from + 16);
        larger[i] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(low[i]), magnitude),
                                     _mm512_and_si512(_mm512_castps_si512(high[i]), magnitude));
    }
    const __m128i most = largest_of_each(larger);
    const __m128i carried = _mm_srli_epi32(_mm_add_epi32(most, _mm_set1_epi32(ONE - FRACTION)), EXPONENT);
    const __m128i exponent = _mm_max_epi32(carried, _mm_set1_epi32(LEAST));
    const __m128i inverses = _mm_slli_epi32(_mm_sub_epi32(_mm_set1_epi32(2 * 127 + Q_BITS), exponent), EXPONENT);
    __m128 quanta = _mm_castsi128_ps(_mm_slli_epi32(_mm_sub_epi32(exponent, _mm_set1_epi32(Q_BITS)), EXPONENT));
#pragma GCC unroll 4
    for (int i = 0; i < LIMB_ROWS; i++) {
        const __m512i inverse = _mm512_permutexvar_epi32(_mm512_set1_epi32(i), _mm512_castsi128_si512(inverses));
        const __m512i q_low = _mm512_cvtps_epi32(_mm512_mul_ps(low[i], _mm512_castsi512_ps(inverse)));
        const __m512i q_high = _mm512_cvtps_epi32(_mm512_mul_ps(high[i], _mm512_castsi512_ps(inverse)));
        /* 128 added to each limb and taken away again leaves no borrows between them. */
        __m512i of_limbs[2];
        store_limbs(_mm512_xor_si512(_mm512_add_epi32(q_low, middle), middle),
                    _mm512_xor_si512(_mm512_add_epi32(q_high, middle), middle), &to[(size_t)i * to_step], of_limbs);
        sums[0][i] = of_limbs[0], sums[1][i] = of_limbs[1];
    }
    __m128i of_limb[LIMBS], none;
    sums_of_each(sums[0], &of_limb[0], &of_limb[1]);
    sums_of_each(sums[1], &of_limb[2], &none);
    const __m128i upper = _mm_add_epi32(_mm_slli_epi32(of_limb[0], 8), of_limb[1]);
    const __m128i all = _mm_add_epi32(_mm_slli_epi32(upper, 8), of_limb[2]);
    /* A NaN or an infinity makes a NaN of each sum it is in. */
    const __m128 nan = _mm_castsi128_ps(_mm_set1_epi32(MAGNITUDE));
    quanta = _mm_mask_mov_ps(quanta, _mm_cmpgt_epi32_mask(most, _mm_set1_epi32(FINITE)), nan);
    __m128 tail[LIMB_ROWS] = {quanta, _mm_mul_ps(_mm_cvtepi32_ps(all), quanta),
                              _mm_castsi128_ps(_mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), of_limb[0]), 7)),
                              _mm_castsi128_ps(_mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), of_limb[1]), 7))};
    _MM_TRANSPOSE4_PS(tail[0], tail[1], tail[2], tail[3]);
    int32_t third[LIMB_ROWS];
    _mm_storeu_si128((__m128i *)(void *)third, of_limb[2]);
#pragma GCC unroll 4
    for (int i = 0; i < LIMB_ROWS; i++) {
        _mm_store_ps(&to[(size_t)i * to_step].quantum, tail[i]);
        to[(size_t)i * to_step].bias[2] = -128 * third[i];
    }
}

/* In the order of struct limb_call; up to three groups more are written. */
static void split_rows(const float *x, int rows, int cols, struct limb_group *to, int threads)
{
    const int groups = cols / CODED_GROUP, blocks = (rows + LIMB_ROWS - 1) / LIMB_ROWS;
    if (rows <= FEW_ROWS) {
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < groups; g += LIMB_ROWS)
                split_four(x + (size_t)r * (size_t)cols + g * CODED_GROUP, CODED_GROUP, to + (size_t)g * LIMB_ROWS + r,
                           LIMB_ROWS, groups - g);
        return;
    }
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > DECODE_BLOCK)
#endif
    for (int block = 0; block < blocks; block++) {
        const float *from = x + (size_t)block * LIMB_ROWS * (size_t)cols;
        struct limb_group *at = to + (size_t)block * LIMB_ROWS * (size_t)groups;
        for (int g = 0; g < groups; g++)
            split_four(from + g * CODED_GROUP, (size_t)cols, at + (size_t)g * LIMB_ROWS, 1, rows - block * LIMB_ROWS);
    }
    (void)threads;
}

/* ---- the operation ---- */

static void run_part(const struct limb_call *call, int threads)
{
    const int64_t panels = call->part->panels;
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int t = 0; t < threads; t++) run_panels(call, (int)(panels * t / threads), (int)(panels * (t + 1) / threads));
}

typedef void linear_fn(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                       int threads);

/* Rows are split `block` at a time, for which scratch->limbs has room. Parts that are not coded go to `others`. */
static void linear(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch, int threads,
                   int block, linear_fn *others)
{
    for (int first = 0; first < rows; first += block) {
        const int n = least(rows - first, block);
        const float *xs = x + (size_t)first * (size_t)w->cols;
        float *ys = y + (size_t)first * (size_t)w->rows;
        bool split = false;
        for (int i = 0; i < w->n_parts; i++) {
            if (!coded_fits(w, i)) {
                const struct kern_weight alone = coded_one_part(w, i);
                others(&alone, xs, n, ys, scratch, threads);
                continue;
            }
            if (!split) split_rows(xs, n, w->cols, scratch->limbs, threads);
            split = true;
            const struct limb_call call = {&w->parts[i], scratch->limbs, n, w->cols / CODED_GROUP, ys, (size_t)w->rows};
            run_part(&call, threads);
        }
    }
}

static void linear_decode(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                          int threads)
{
    linear(w, x, rows, y, scratch, threads, DECODE_BLOCK, kern_cpu_linear_avx512.decode);
}

static void linear_prefill(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                           int threads)
{
    linear(w, x, rows, y, scratch, threads, SPLIT_ROWS, kern_cpu_linear_avx512.prefill);
}

const struct cpu_linear_ops kern_cpu_linear_vnni = {linear_decode, linear_prefill};
