/* kern_cpu_vnni: DECODE linear of coded weights by integer products of four (AVX-512 VNNI); everything else is AVX-512's.
 *
 * Codes meet activations as bytes (kern_cpu_limbs.h): 32 columns of 16 outputs take 8 instructions a limb where float32 takes
 * 32 and as many to widen the codes. One row then runs at the memory's speed. */
#include "kern_cpu_limbs.h"

#include <string.h>

enum { PREFETCH_BYTES = 4096 };

/* ---- panels ---- */

/* c[row][limb] = products of one group, of even and odd columns in sums of their own where there are registers for them: a sum
 * takes five cycles. The instruction wants unsigned codes: signed ones get 128 more, and the bias starts the sums that much
 * lower. rows is a constant. */
LIMB_INLINE void multiply_group(struct limb_kind kind, int rows, const uint8_t *codes, const struct limb_group *x,
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
    for (int k = 0; k < LIMB_GROUP; k += 8) {
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

LIMB_INLINE void panel_rows(struct limb_kind kind, int rows, const struct limb_call *call, const uint8_t *panel,
                            const struct limb_group *x, __m512 out[LIMB_ROWS])
{
    const struct cpu_part *part = call->part;
    const int wide = limb_wide(kind, part), groups = call->groups;
    const size_t stride = call->x.stride, step = part->group_bytes >> wide;
    __m512 acc[LIMB_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, x += stride) {
        const uint8_t *scales = limb_scales_at(part, wide, panel, g), *codes = limb_codes_at(kind, part, wide, panel, g);
        for (size_t line = 0; line < step; line += 64) __builtin_prefetch(codes + PREFETCH_BYTES + line, 0, 3);
        const __m512 scale = limb_scale(kind, scales), min = limb_min(kind, scales);
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
        panel_rows((struct limb_kind){__VA_ARGS__}, rows, call, panel, x, acc);                                                \
    }
#define PANEL_FNS(name, ...)                                                                                                   \
    PANEL_FN(name, 1, __VA_ARGS__)                                                                                             \
    PANEL_FN(name, 2, __VA_ARGS__)                                                                                             \
    PANEL_FN(name, 3, __VA_ARGS__)                                                                                             \
    PANEL_FN(name, 4, __VA_ARGS__)
#define PANEL_ENTRIES(name, ...) {name##_1, name##_2, name##_3, name##_4},

LIMB_KINDS(PANEL_FNS)

void kern_cpu_limb_panels_vnni(const struct limb_call *call, int first, int end)
{
    static panel_fn *const kernels[][LIMB_ROWS] = {LIMB_KINDS(PANEL_ENTRIES)};
    const struct cpu_part *p = call->part;
    panel_fn *const *kernel = kernels[limb_kind_index(p)];
    for (int panel = first; panel < end; panel++)
        for (int r = 0, n; r < call->rows; r += n) {
            __m512 acc[LIMB_ROWS];
            n = call->rows - r < LIMB_ROWS ? call->rows - r : LIMB_ROWS;
            kernel[n - 1](call, p->bytes + (size_t)panel * p->panel_bytes, call->x.groups + r, acc);
            float *y = call->y + (size_t)r * call->ldy + p->y_first + panel * PANEL_ROWS;
            for (int i = 0; i < n; i++) _mm512_mask_storeu_ps(y + (size_t)i * call->ldy, limb_outs(p, panel), acc[i]);
        }
}

/* ---- activations ---- */

/* Bytes 0, 1 and 2 of the words of 32 columns become limbs, quad after quad. */
static void store_limbs(__m512i low, __m512i high, struct limb_group *to)
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
    const __m512i ones = _mm512_set1_epi8(1), zero = _mm512_setzero_si512(), sums = _mm512_dpbusd_epi32(zero, ones, two);
    to->bias[0] = -128 * _mm512_mask_reduce_add_epi32(0x00ff, sums);
    to->bias[1] = -128 * _mm512_mask_reduce_add_epi32(0xff00, sums);
    to->bias[2] = -128 * _mm512_mask_reduce_add_epi32(0x00ff, _mm512_dpbusd_epi32(zero, ones, one));
}

static float float_of_bits(int bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static void split_group(const float *x, struct limb_group *to)
{
    /* Of the largest magnitude, 24 bits of significand less one: q. Three signed bytes reach 0x7f7f7f; where q would round to
     * more, from these fractions on, the exponent is one more. Quanta below 2^-126 do not exist. */
    enum { MAGNITUDE = 0x7fffffff, NOT_FINITE = 0x7f800000, FRACTION = 0x7efeff, ONE = 0x800000, LEAST = 23, Q_BITS = 22 };
    const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE), middle = _mm512_set1_epi32(0x808080);
    const int most = _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(low), magnitude),
                                                              _mm512_and_si512(_mm512_castps_si512(high), magnitude)));
    if (most >= NOT_FINITE) { /* a NaN in each of its sums */
        memset(to, 0, sizeof *to);
        to->quantum = to->sum = float_of_bits(MAGNITUDE);
        return;
    }
    const int carried = (most + (ONE - FRACTION)) / ONE, exponent = carried < LEAST ? LEAST : carried;
    const __m512 inverse = _mm512_set1_ps(float_of_bits((2 * 127 + Q_BITS - exponent) * ONE));
    const __m512i q_low = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    const __m512i q_high = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    /* 128 added to each limb and taken away again leaves no borrows between them. */
    store_limbs(_mm512_xor_si512(_mm512_add_epi32(q_low, middle), middle),
                _mm512_xor_si512(_mm512_add_epi32(q_high, middle), middle), to);
    to->quantum = float_of_bits((exponent - Q_BITS) * ONE);
    to->sum = (float)_mm512_reduce_add_epi32(_mm512_add_epi32(q_low, q_high)) * to->quantum;
}

static void split_rows(const float *x, int rows, int cols, size_t stride, struct limb_group *to)
{
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < cols; k += LIMB_GROUP)
            split_group(x + (size_t)r * (size_t)cols + k, to + (size_t)(k / LIMB_GROUP) * stride + r);
}

/* ---- the operation ---- */

bool kern_cpu_limbs_fit(const struct kern_weight *w, int i)
{
    const struct cpu_part *p = &w->parts[i];
    if (w->cols % LIMB_GROUP) return false;
    return p->codes == CODES_4 || (p->codes == CODES_8 && (p->group == 32 || p->group == 64 || p->group == 128));
}

static void run_part(const struct limb_call *call, int threads, limb_panels *run)
{
    const int64_t panels = call->part->panels;
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int t = 0; t < threads; t++) run(call, (int)(panels * t / threads), (int)(panels * (t + 1) / threads));
}

void kern_cpu_limbs_decode(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                           int threads, limb_panels *many)
{
    enum { FEW = 2 };
    for (int first = 0; first < rows; first += DECODE_BLOCK) {
        const int n = rows - first < DECODE_BLOCK ? rows - first : DECODE_BLOCK;
        const size_t stride = (size_t)(n + LIMB_ROWS - 1) / LIMB_ROWS * LIMB_ROWS;
        const float *xs = x + (size_t)first * (size_t)w->cols;
        float *ys = y + (size_t)first * (size_t)w->rows;
        bool split = false;
        for (int i = 0; i < w->n_parts; i++) {
            const struct kern_weight alone = kern_cpu_one_part(w, i);
            if (!kern_cpu_limbs_fit(w, i)) {
                kern_cpu_linear_avx512.decode(&alone, xs, n, ys, scratch, threads);
                continue;
            }
            if (!split) split_rows(xs, n, w->cols, stride, scratch->limbs);
            split = true;
            const struct limb_call call = {alone.parts, {scratch->limbs, stride}, n, w->cols / LIMB_GROUP, ys, (size_t)w->rows};
            run_part(&call, threads, n <= FEW ? kern_cpu_limb_panels_vnni : many);
        }
    }
}

static void linear_decode(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                          int threads)
{
    kern_cpu_limbs_decode(w, x, rows, y, scratch, threads, kern_cpu_limb_panels_vnni);
}

static void linear_prefill(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                          int threads)
{
    kern_cpu_linear_avx512.prefill(w, x, rows, y, scratch, threads);
}

const struct cpu_linear_ops kern_cpu_linear_vnni = {linear_decode, linear_prefill};
