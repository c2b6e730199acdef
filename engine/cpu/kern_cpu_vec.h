/* kern_cpu_vec: the vector words the CPU kernels are written in, private to engine/cpu.
 *
 * The kernels are compiled once per instruction set, with -DKERN_ISA=generic, avx2 or avx512 and the matching machine
 * flags. Everything works on blocks of 16 floats, held in NV vectors of VF lanes. Element-wise words give the same
 * value in every lane whatever its neighbours hold, so a lane of garbage (a free KV slot) harms only itself.
 * vf_fma is fused on avx2 and avx512 and two roundings on generic; the translation units are compiled without
 * contraction (-ffp-contract=off), so nothing else ever fuses and a chain has the same bits wherever it is inlined. */
#ifndef TANDEM_KERN_CPU_VEC_H
#define TANDEM_KERN_CPU_VEC_H

#include "quant.h"

#include <string.h>

#define KERN_ISA_ID_generic 0
#define KERN_ISA_ID_avx2 1
#define KERN_ISA_ID_avx512 2
#define KERN_PASTE_(a, b) a##b
#define KERN_PASTE(a, b) KERN_PASTE_(a, b)
#define KERN_ISA_ID KERN_PASTE(KERN_ISA_ID_, KERN_ISA)
/* kern_cpu_linear -> kern_cpu_linear_avx512 */
#define KERN_NAME(noun) KERN_PASTE(noun##_, KERN_ISA)

#define KERN_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif
/* KERN_EACH (i, n) statement: a loop over registers, unrolled. n is a constant after inlining. Under a sanitizer each
 * access is a branch or two, and unrolled kernels take minutes to compile: there it is a plain loop. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KERN_UNROLL
#elif defined(__clang__)
#define KERN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KERN_UNROLL _Pragma("GCC unroll 64")
#endif
#define KERN_EACH(i, n) KERN_UNROLL for (int i = 0; i < (n); i++)

#if KERN_ISA_ID > 0
#include <immintrin.h>
#endif

#if KERN_ISA_ID == 2

typedef __m512 vf;
typedef __m512i vi;
enum { VF = 16 };
KERN_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
KERN_INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
KERN_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
KERN_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
KERN_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); } /* b where either is NaN */
KERN_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); } /* b where either is NaN */
KERN_INLINE vf vf_below(vf a, vf b, vf yes, vf no)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
/* 2^n for n given as n + 1.5 * 2^23, n in -126 .. 127 */
KERN_INLINE vf vf_pow2(vf biased)
{
    vi n = _mm512_add_epi32(_mm512_castps_si512(biased), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}
KERN_INLINE vf vf_from_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
KERN_INLINE vf vf_from_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
KERN_INLINE void vf_to_f16(uint16_t *p, vf a)
{
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
KERN_INLINE vf vf_from_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
KERN_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
/* Nibble i of every 32-bit lane as a float. The permutation reads the low four bits of its index only: one shift and
 * one table look-up. */
KERN_INLINE vf vf_nibble(vi word, int i)
{
    const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(i ? _mm512_srli_epi32(word, (unsigned)(4 * i)) : word, table);
}
/* The same, of E2M1 numbers. */
KERN_INLINE vf vf_e2m1(vi word, int i)
{
    const vf table = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(i ? _mm512_srli_epi32(word, (unsigned)(4 * i)) : word, table);
}
/* E4M3 numbers times 2^-8, by way of F16, whose exponent is one bit wider; the NaN codes give 480 * 2^-8. */
KERN_INLINE vf vf_from_e4m3(const uint8_t *p)
{
    const __m256i sign_extended = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(sign_extended, 7), _mm256_set1_epi16((int16_t)0xbfff)));
}
/* E8M0 numbers; code 255 gives infinity. */
KERN_INLINE vf vf_from_e8m0(const uint8_t *p)
{
    vi bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x400000)));
}
KERN_INLINE float vf_sum16(const vf *a)
{
    __m256 h8 = _mm256_add_ps(_mm512_castps512_ps256(a[0]),
                              _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a[0]), 1)));
    __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_add_ss(h2, _mm_movehdup_ps(h2)));
}
KERN_INLINE float vf_max16(const vf *a)
{
    __m256 h8 = _mm256_max_ps(_mm512_castps512_ps256(a[0]),
                              _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a[0]), 1)));
    __m128 h4 = _mm_max_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    __m128 h2 = _mm_max_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_max_ss(h2, _mm_movehdup_ps(h2)));
}

#elif KERN_ISA_ID == 1

typedef __m256 vf;
typedef __m256i vi;
enum { VF = 8 };
KERN_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
KERN_INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
KERN_INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
KERN_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
KERN_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
KERN_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
KERN_INLINE vf vf_below(vf a, vf b, vf yes, vf no)
{
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
KERN_INLINE vf vf_pow2(vf biased)
{
    vi n = _mm256_add_epi32(_mm256_castps_si256(biased), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
KERN_INLINE vf vf_from_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
KERN_INLINE vf vf_from_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
KERN_INLINE void vf_to_f16(uint16_t *p, vf a)
{
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
KERN_INLINE vf vf_from_i8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}
KERN_INLINE vi vi_load(const void *p) { return _mm256_loadu_si256(p); }
KERN_INLINE vf vf_nibble(vi word, int i)
{
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(word, 4 * i), _mm256_set1_epi32(15)));
}
/* The permutation reads the low three bits of its index only; the fourth is the sign. */
KERN_INLINE vf vf_e2m1(vi word, int i)
{
    const vf table = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const vi nibble = _mm256_srli_epi32(word, 4 * i);
    const vi sign = _mm256_and_si256(_mm256_slli_epi32(nibble, 28), _mm256_set1_epi32(INT32_MIN));
    return _mm256_or_ps(_mm256_permutevar8x32_ps(table, nibble), _mm256_castsi256_ps(sign));
}
KERN_INLINE vf vf_from_e4m3(const uint8_t *p)
{
    const __m128i sign_extended = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)p));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(sign_extended, 7), _mm_set1_epi16((int16_t)0xbfff)));
}
KERN_INLINE vf vf_from_e8m0(const uint8_t *p)
{
    vi bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x400000)));
}
KERN_INLINE float vf_sum16(const vf *a)
{
    __m256 h8 = _mm256_add_ps(a[0], a[1]);
    __m128 h4 = _mm_add_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    __m128 h2 = _mm_add_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_add_ss(h2, _mm_movehdup_ps(h2)));
}
KERN_INLINE float vf_max16(const vf *a)
{
    __m256 h8 = _mm256_max_ps(a[0], a[1]);
    __m128 h4 = _mm_max_ps(_mm256_castps256_ps128(h8), _mm256_extractf128_ps(h8, 1));
    __m128 h2 = _mm_max_ps(h4, _mm_movehl_ps(h4, h4));
    return _mm_cvtss_f32(_mm_max_ss(h2, _mm_movehdup_ps(h2)));
}

#else /* generic: the compiler's own four-lane vectors, any machine */

typedef float vf __attribute__((vector_size(16)));
typedef uint32_t vi __attribute__((vector_size(16)));
typedef int32_t vi_signed __attribute__((vector_size(16)));
enum { VF = 4 };
KERN_INLINE vf vf_load(const float *p)
{
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}
KERN_INLINE void vf_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
KERN_INLINE vf vf_set1(float x) { return (vf){x, x, x, x}; }
KERN_INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
KERN_INLINE vf vf_select(vi_signed mask, vf yes, vf no) { return (vf)(((vi)mask & (vi)yes) | (~(vi)mask & (vi)no)); }
KERN_INLINE vf vf_max(vf a, vf b) { return vf_select((vi_signed)(a > b), a, b); }
KERN_INLINE vf vf_min(vf a, vf b) { return vf_select((vi_signed)(a < b), a, b); }
KERN_INLINE vf vf_below(vf a, vf b, vf yes, vf no) { return vf_select((vi_signed)(a < b), yes, no); }
KERN_INLINE vf vf_pow2(vf biased) { return (vf)(((vi)biased + 127u) << 23); }
/* Numbers of a shorter exponent, moved into float32's place: the exponent gets `bias` more. Subnormals have no leading one:
 * they get it, one exponent higher, and it is taken away again. Exact, and never a subnormal float32, which is slow. */
KERN_INLINE vf vf_widen(vi magnitude, uint32_t bias)
{
    const vi one = {(bias + 1) << 23, (bias + 1) << 23, (bias + 1) << 23, (bias + 1) << 23};
    vf subnormal = (vf)(magnitude + one) - (vf)one;
    return vf_select((vi_signed)(magnitude < 0x800000u), subnormal, (vf)(magnitude + (bias << 23)));
}
KERN_INLINE vf vf_from_f16(const uint16_t *p)
{
    /* All-ones exponents keep theirs. */
    vi h = {p[0], p[1], p[2], p[3]};
    vf magnitude = vf_widen((h & 0x7fffu) << 13, 112);
    vi special = (vi)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (vf)((vi)magnitude | special | ((h & 0x8000u) << 16));
}
KERN_INLINE vf vf_from_bf16(const uint16_t *p)
{
    vi h = {p[0], p[1], p[2], p[3]};
    return (vf)(h << 16);
}
KERN_INLINE void vf_to_f16(uint16_t *p, vf a)
{
    for (int i = 0; i < VF; i++) p[i] = quant_f32_to_f16(a[i]);
}
KERN_INLINE vf vf_from_i8(const int8_t *p) { return (vf){(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
KERN_INLINE vi vi_load(const void *p)
{
    vi a;
    memcpy(&a, p, sizeof a);
    return a;
}
KERN_INLINE vf vf_nibble(vi word, int i)
{
    return __builtin_convertvector((vi_signed)((word >> (unsigned)(4 * i)) & 15u), vf);
}
KERN_INLINE vf vf_e2m1(vi word, int i)
{
    vi nibble = word >> (unsigned)(4 * i);
    vf magnitude = vf_widen((nibble & 7u) << 22, 126);
    return (vf)((vi)magnitude | ((nibble & 8u) << 28));
}
KERN_INLINE vf vf_from_e4m3(const uint8_t *p)
{
    vi code = {p[0], p[1], p[2], p[3]};
    vf magnitude = vf_widen((code & 0x7fu) << 20, 112);
    return (vf)((vi)magnitude | ((code & 0x80u) << 24));
}
KERN_INLINE vf vf_from_e8m0(const uint8_t *p)
{
    vi code = {p[0], p[1], p[2], p[3]};
    return (vf)(code << 23 | ((vi)(code == 0u) & 0x400000u));
}
KERN_INLINE float vf_sum16(const vf *a)
{
    vf h4 = (a[0] + a[2]) + (a[1] + a[3]);
    return (h4[0] + h4[2]) + (h4[1] + h4[3]);
}
KERN_INLINE float vf_max16(const vf *a)
{
    vf h4 = vf_max(vf_max(a[0], a[2]), vf_max(a[1], a[3]));
    float even = h4[0] > h4[2] ? h4[0] : h4[2], odd = h4[1] > h4[3] ? h4[1] : h4[3];
    return even > odd ? even : odd;
}

#endif

enum { NV = 16 / VF }; /* vectors of a block of 16 lanes */

KERN_INLINE vf vf_zero(void) { return vf_set1(0.0f); }

/* e^x to about one unit in the last place, 0 below -87.3, clamped above 88.3; NaN stays NaN. Reduction by n ln 2 in two
 * steps, then a polynomial of degree 6 fitted at Chebyshev nodes (relative error 2e-8 before rounding). */
KERN_INLINE vf vf_exp(vf x)
{
    const float shift = 0x1.8p23f;
    vf in = vf_max(vf_set1(-87.3f), vf_min(vf_set1(88.3f), x));
    vf biased = vf_fma(in, vf_set1(0x1.715476p0f), vf_set1(shift));
    vf n = biased - vf_set1(shift);
    vf r = vf_fma(n, vf_set1(-0x1.62e4p-1f), in);
    r = vf_fma(n, vf_set1(-0x1.7f7d1cp-20f), r);
    vf p = vf_set1(0x1.6d7536p-10f);
    p = vf_fma(p, r, vf_set1(0x1.126faap-7f));
    p = vf_fma(p, r, vf_set1(0x1.5554acp-5f));
    p = vf_fma(p, r, vf_set1(0x1.555404p-3f));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_fma(p, r, vf_set1(1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_below(x, vf_set1(-87.3f), vf_zero(), p * vf_pow2(biased));
}

KERN_INLINE vf vf_sigmoid(vf x) { return vf_set1(1.0f) / (vf_set1(1.0f) + vf_exp(vf_zero() - x)); }

/* log(1 + e^x), to a few units in the last place at every size of the result: max(x, 0) + log(1 + t), t = e^-|x|, and
 * log(1 + t) = 2 artanh(s), s = t / (2 + t) <= 1/3: an odd polynomial fitted at Chebyshev nodes (relative error 8e-9).
 * Above 20 the second term is below half a unit of x: linear. */
KERN_INLINE vf vf_softplus(vf x)
{
    vf t = vf_exp(vf_min(vf_zero() - x, x));
    vf s = t / (vf_set1(2.0f) + t), z = s * s;
    vf p = vf_set1(0x1.2055eep-2f);
    p = vf_fma(p, z, vf_set1(0x1.1e5cfcp-2f));
    p = vf_fma(p, z, vf_set1(0x1.99da14p-2f));
    p = vf_fma(p, z, vf_set1(0x1.5554e2p-1f));
    p = vf_fma(p, z, vf_set1(2.0f));
    return vf_fma(s, p, vf_max(vf_zero(), x));
}

#endif
