/* kern_cpu_limbs: activations as whole numbers, which meet codes without rounding; private to engine/cpu.
 *
 * A group of 32 activations is x = quantum * q: the quantum is a power of two and q a whole number, the largest of the group
 * between 0x3fbfc0 and 0x7f7f7f, so that rounding to it errs by less than 2^-22.99 of the largest, and 0, 1 or any value of
 * few bits comes through unchanged. q is three signed bytes, the limbs: q = 2^16 q0 + 2^8 q1 + q2. Integer instructions
 * multiply limbs with codes of up to 8 bits and sum without rounding; what is rounded are these, the same for every way to the
 * sums c_i of code * q_i over a group, so that rows have equal bits whatever instructions they went through:
 *   s = (2^8 (2^8 c0 + c1) + c2) quantum;  acc = scale * s + acc;  acc = min * sum(x) + acc
 *
 * What computes is for translation units that have AVX-512 with VNNI and VBMI. */
#ifndef TANDEM_KERN_CPU_LIMBS_H
#define TANDEM_KERN_CPU_LIMBS_H

#include "kern_cpu_impl.h"

enum { LIMB_ROWS = 4 }; /* rows that share what it takes to unpack a panel */

struct limb_call {
    const struct cpu_part *part;
    const struct limb_group *x; /* [rows / LIMB_ROWS][groups][LIMB_ROWS]; what lies past the last row is computed and thrown away */
    int rows, groups;
    float *y; /* the first output of the weight */
    size_t ldy;
};
/* The four rows from `row` on, a multiple of LIMB_ROWS, in one group. */
static inline const struct limb_group *kern_cpu_limbs_at(const struct limb_call *c, int row, int group)
{
    return c->x + (size_t)row * (size_t)c->groups + (size_t)group * LIMB_ROWS;
}
/* y of panels first .. end - 1 of the part. */
typedef void limb_panels(const struct limb_call *c, int first, int end);
void kern_cpu_limb_panels_vnni(const struct limb_call *c, int first, int end);
void kern_cpu_limb_panels_amx(const struct limb_call *c, int first, int end);

/* Whether part i's codes and groups are what limbs and tiles are made for. */
bool kern_cpu_limbs_fit(const struct kern_weight *w, int i);
/* The weight without its other parts; outputs keep their places. */
static inline struct kern_weight kern_cpu_one_part(const struct kern_weight *w, int i)
{
    struct kern_weight alone = *w;
    alone.n_parts = 1;
    alone.parts = &w->parts[i];
    return alone;
}
/* A linear operation: parts that fit through VNNI's panels for one row and two, through `many` for more, the rest through
 * `others`. Rows are split `block` at a time: scratch->limbs has room for so many. */
struct limb_linear {
    int block;
    limb_panels *many;
    void (*others)(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch, int threads);
};
void kern_cpu_limbs_linear(struct limb_linear how, const struct kern_weight *w, const float *x, int rows, float *y,
                           struct cpu_scratch *scratch, int threads);

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#include <immintrin.h>

#define LIMB_INLINE static inline __attribute__((always_inline))

/* What the compiler must know of a part to make a lean kernel; always a constant. */
struct limb_kind {
    enum cpu_codes codes;
    enum cpu_scales scales;
    bool mins;
};
#define LIMB_KINDS(X)                                                                                                          \
    X(codes4_f16, CODES_4, SCALES_F16, true)                                                                                   \
    X(codes4_f32, CODES_4, SCALES_F32, true)                                                                                   \
    X(codes8_f16, CODES_8, SCALES_F16, false)                                                                                  \
    X(codes8_f16_mins, CODES_8, SCALES_F16, true)                                                                              \
    X(codes8_f32, CODES_8, SCALES_F32, false)                                                                                  \
    X(codes8_f32_mins, CODES_8, SCALES_F32, true)

/* Which of LIMB_KINDS a part is. */
LIMB_INLINE int limb_kind_index(const struct cpu_part *p)
{
    const int wide = p->scales == SCALES_F32;
    return p->codes == CODES_4 ? wide : 2 + 2 * wide + p->mins;
}

LIMB_INLINE size_t limb_head(struct limb_kind kind)
{
    return PANEL_ROWS * (kind.scales == SCALES_F16 ? sizeof(uint16_t) : sizeof(float)) * (kind.mins ? 2 : 1);
}

/* Where in a panel the scales of its 32 columns g lie, and their codes. A part's group is 32 << wide columns. */
LIMB_INLINE const uint8_t *limb_scales_at(const struct cpu_part *p, int wide, const uint8_t *panel, int g)
{
    return panel + (size_t)(g >> wide) * p->group_bytes;
}
LIMB_INLINE const uint8_t *limb_codes_at(struct limb_kind kind, const struct cpu_part *p, int wide, const uint8_t *panel, int g)
{
    const size_t bytes = LIMB_GROUP * (kind.codes == CODES_4 ? PANEL_ROWS / 2 : PANEL_ROWS);
    return limb_scales_at(p, wide, panel, g) + limb_head(kind) + (size_t)(g - (g >> wide << wide)) * bytes;
}
LIMB_INLINE int limb_wide(struct limb_kind kind, const struct cpu_part *p)
{
    return kind.codes == CODES_4 ? 0 : __builtin_ctz((unsigned)p->group / LIMB_GROUP);
}

LIMB_INLINE __m512 limb_scale(struct limb_kind kind, const uint8_t *at)
{
    if (kind.scales == SCALES_F16) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)at));
    return _mm512_loadu_ps((const float *)(const void *)at);
}
LIMB_INLINE __m512 limb_min(struct limb_kind kind, const uint8_t *at)
{
    return kind.mins ? limb_scale(kind, at + limb_head(kind) / 2) : _mm512_setzero_ps();
}

/* Eight columns of 16 outputs as two vectors of quads, in the order of struct limb_group. */
LIMB_INLINE void limb_quads(struct limb_kind kind, const uint8_t *codes, int column, __m512i quads[2])
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
LIMB_INLINE __m512 limb_add(struct limb_kind kind, __m512 acc, __m512i c0, __m512i c1, __m512i c2, const struct limb_group *x,
                            __m512 scale, __m512 min)
{
    const __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(c0, 8), c1));
    const __m512 whole = _mm512_fmadd_ps(high, _mm512_set1_ps(256), _mm512_cvtepi32_ps(c2));
    acc = _mm512_fmadd_ps(scale, _mm512_mul_ps(whole, _mm512_set1_ps(x->quantum)), acc);
    return kind.mins ? _mm512_fmadd_ps(min, _mm512_set1_ps(x->sum), acc) : acc;
}

LIMB_INLINE __mmask16 limb_outs(const struct cpu_part *p, int panel)
{
    const int n = p->rows - panel * PANEL_ROWS;
    return (__mmask16)(n >= PANEL_ROWS ? 0xffff : n > 0 ? (1u << n) - 1 : 0);
}
#endif

#endif
