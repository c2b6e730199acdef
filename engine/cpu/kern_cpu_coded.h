/* kern_cpu_coded: panels of codes (kern_cpu_impl.h) as VNNI's and AMX's kernels read them, a group of 32 columns at a time;
 * private to engine/cpu. */
#ifndef TANDEM_KERN_CPU_CODED_H
#define TANDEM_KERN_CPU_CODED_H

#include "kern_cpu_impl.h"

/* Whether these kernels are made for part i's codes and groups. */
static inline bool coded_fits(const struct kern_weight *w, int i)
{
    const struct cpu_part *p = &w->parts[i];
    if (w->cols % CODED_GROUP) return false;
    return p->codes == CODES_4 || (p->codes == CODES_8 && (p->group == 32 || p->group == 64 || p->group == 128));
}

/* The weight without its other parts; outputs keep their places. */
static inline struct kern_weight coded_one_part(const struct kern_weight *w, int i)
{
    struct kern_weight alone = *w;
    alone.n_parts = 1;
    alone.parts = &w->parts[i];
    return alone;
}

#if defined(__AVX512VBMI__) /* for translation units that have AVX-512 */
#include <immintrin.h>

#define CODED_INLINE static inline __attribute__((always_inline))

/* What the compiler must know of a part to make a lean kernel; always a constant. */
struct coded_kind {
    enum cpu_codes codes;
    enum cpu_scales scales;
    bool mins;
};
#define CODED_KINDS(X)                                                                                                         \
    X(codes4_f16, CODES_4, SCALES_F16, true)                                                                                   \
    X(codes4_f32, CODES_4, SCALES_F32, true)                                                                                   \
    X(codes8_f16, CODES_8, SCALES_F16, false)                                                                                  \
    X(codes8_f16_mins, CODES_8, SCALES_F16, true)                                                                              \
    X(codes8_f32, CODES_8, SCALES_F32, false)                                                                                  \
    X(codes8_f32_mins, CODES_8, SCALES_F32, true)

/* Which of CODED_KINDS a part is. */
CODED_INLINE int coded_kind_index(const struct cpu_part *p)
{
    const int wide = p->scales == SCALES_F32;
    return p->codes == CODES_4 ? wide : 2 + 2 * wide + p->mins;
}

CODED_INLINE size_t coded_head(struct coded_kind kind)
{
    return PANEL_ROWS * (kind.scales == SCALES_F16 ? sizeof(uint16_t) : sizeof(float)) * (kind.mins ? 2 : 1);
}

/* Where in a panel the scales of its 32 columns g lie, and their codes. A part's group is 32 << wide columns. */
CODED_INLINE const uint8_t *coded_scales_at(const struct cpu_part *p, int wide, const uint8_t *panel, int g)
{
    return panel + (size_t)(g >> wide) * p->group_bytes;
}
CODED_INLINE const uint8_t *coded_codes_at(struct coded_kind kind, const struct cpu_part *p, int wide, const uint8_t *panel,
                                           int g)
{
    const size_t bytes = CODED_GROUP * (kind.codes == CODES_4 ? PANEL_ROWS / 2 : PANEL_ROWS);
    return coded_scales_at(p, wide, panel, g) + coded_head(kind) + (size_t)(g - (g >> wide << wide)) * bytes;
}
CODED_INLINE int coded_wide(struct coded_kind kind, const struct cpu_part *p)
{
    return kind.codes == CODES_4 ? 0 : __builtin_ctz((unsigned)p->group / CODED_GROUP);
}

CODED_INLINE __m512 coded_scale(struct coded_kind kind, const uint8_t *at)
{
    if (kind.scales == SCALES_F16) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)at));
    return _mm512_loadu_ps((const float *)(const void *)at);
}
CODED_INLINE __m512 coded_min(struct coded_kind kind, const uint8_t *at)
{
    return kind.mins ? coded_scale(kind, at + coded_head(kind) / 2) : _mm512_setzero_ps();
}

CODED_INLINE __mmask16 coded_outs(const struct cpu_part *p, int panel)
{
    const int n = p->rows - panel * PANEL_ROWS;
    return (__mmask16)(n >= PANEL_ROWS ? 0xffff : n > 0 ? (1u << n) - 1 : 0);
}
#endif

#endif
