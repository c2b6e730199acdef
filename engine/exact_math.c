/* exact_math: elementary functions by + - * / alone.
 *
 * IEEE 754 defines the bits of these four operations, so the results are the same on every machine and compiler, as
 * long as no multiply and add are contracted into one (the build says -ffp-contract=off). Constants are hexadecimal
 * floats rounded once from more than 80 digits, or quotients of small integers that the compiler rounds once.
 *
 * exp: x = k ln2 + r, |r| <= ln2/2; e^r by terms up to r^13 (the next is 4e-18), even and odd powers apart, so that
 * they run side by side; then k is added to the exponent. No table and no branch: it vectorizes.
 *
 * log: x = 2^e m, m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(f), f = (m-1)/(m+1), |f| < 0.172, as an odd series.
 *
 * sincos: x = k pi/2 + r. pi/2 is cut into three parts of at most 29 bits, whose products with k (24 bits) are exact,
 * and a rest; r is kept as a sum of two doubles, because the double nearest to a multiple of pi/2 may leave only 2^-54
 * of it. */
#include "exact_math.h"

#include <stdint.h>
#include <string.h>

static double from_bits(uint64_t bits)
{
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static uint64_t to_bits(double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

/* Adding this to |v| < 2^51 rounds v to an integer, which then stands in the low bits. */
static const double rounder = 0x1.8p52;
static const double one_over_ln2 = 0x1.71547652b82fep+0;
static const double ln2_high = 0x1.62e42fefa3800p-1,
                    ln2_low = 0x1.ef35793c76730p-45; /* k * ln2_high is exact for 11 bits */

/* 1/n! for n = 12, 10, ... 0 and n = 13, 11, ... 1. */
static const double exp_even[] = {1.0 / 479001600.0, 1.0 / 3628800.0, 1.0 / 40320.0, 1.0 / 720.0, 1.0 / 24.0, 0.5, 1.0};
static const double exp_odd[] = {
    1.0 / 6227020800.0, 1.0 / 39916800.0, 1.0 / 362880.0, 1.0 / 5040.0, 1.0 / 120.0, 1.0 / 6.0, 1.0};
enum { EXP_TERMS = sizeof exp_even / sizeof exp_even[0] };

double exact_exp(double x)
{
    if (!(x >= -700.0)) return x < -700.0 ? 0.0 : x;
    if (x > 700.0) x = 700.0;
    double rounded = x * one_over_ln2 + rounder, k = rounded - rounder;
    double r = (x - k * ln2_high) - k * ln2_low, q = r * r;
    double even = exp_even[0], odd = exp_odd[0];
    for (int i = 1; i < EXP_TERMS; i++) {
        even = even * q + exp_even[i];
        odd = odd * q + exp_odd[i];
    }
    return from_bits(to_bits(even + r * odd) + (to_bits(rounded) << 52));
}

/* Eight at a time, in the vectors of GCC and Clang, which any machine can carry out: the same operations on each
 * element as in exact_exp, hence the same bits. Only the instructions differ, and they are chosen at run time. */
typedef double f64x8 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));

static inline __attribute__((always_inline)) void exp_blocks(double *x, size_t n)
{
    for (size_t at = 0; at < n; at += 8) {
        f64x8 v;
        memcpy(&v, x + at, sizeof v);
        u64x8 in_range = (u64x8)(v >= -700.0);
        f64x8 rounded = v * one_over_ln2 + rounder, k = rounded - rounder;
        f64x8 r = (v - k * ln2_high) - k * ln2_low, q = r * r;
        f64x8 even = exp_even[0] - (f64x8){0}, odd = exp_odd[0] - (f64x8){0};
        for (int i = 1; i < EXP_TERMS; i++) {
            even = even * q + exp_even[i];
            odd = odd * q + exp_odd[i];
        }
        u64x8 result = ((u64x8)(even + r * odd) + ((u64x8)rounded << 52)) & in_range;
        memcpy(x + at, &result, sizeof result);
    }
}

static void exp_blocks_any(double *x, size_t n) { exp_blocks(x, n); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void exp_blocks_avx2(double *x, size_t n) { exp_blocks(x, n); }
__attribute__((target("avx512f"))) static void exp_blocks_avx512(double *x, size_t n) { exp_blocks(x, n); }
#endif

void exact_exp_each(double *x, size_t n)
{
    size_t whole = n / 8 * 8;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        exp_blocks_avx512(x, whole);
    else if (__builtin_cpu_supports("avx2"))
        exp_blocks_avx2(x, whole);
    else
        exp_blocks_any(x, whole);
#else
    exp_blocks_any(x, whole);
#endif
    for (size_t i = whole; i < n; i++) x[i] = exact_exp(x[i]);
}

double exact_log(double x)
{
    uint64_t bits = to_bits(x);
    int exponent = (int)(bits >> 52) - 1023;
    double m = from_bits((bits & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x3ff0000000000000));
    if (m >= 0x1.6a09e667f3bcdp+0) m *= 0.5, exponent++;
    double f = (m - 1.0) / (m + 1.0), q = f * f;
    double series = 1.0 / 23.0;
    for (int n = 21; n >= 3; n -= 2) series = series * q + 1.0 / n;
    double log_m = 2.0 * f + 2.0 * f * q * series;
    return exponent * ln2_high + (log_m + exponent * ln2_low);
}

/* a + b = *sum + *error exactly. */
static void two_sum(double a, double b, double *sum, double *error)
{
    double s = a + b, b_part = s - a;
    *error = (a - (s - b_part)) + (b - b_part);
    *sum = s;
}

static double sin_series(double r)
{
    double q = r * r;
    double series = -1.0 / 1307674368000.0;
    series = series * q + 1.0 / 6227020800.0;
    series = series * q - 1.0 / 39916800.0;
    series = series * q + 1.0 / 362880.0;
    series = series * q - 1.0 / 5040.0;
    series = series * q + 1.0 / 120.0;
    series = series * q - 1.0 / 6.0;
    return r + r * q * series;
}

static double cos_series(double r)
{
    double q = r * r;
    double series = 1.0 / 20922789888000.0;
    series = series * q - 1.0 / 87178291200.0;
    series = series * q + 1.0 / 479001600.0;
    series = series * q - 1.0 / 3628800.0;
    series = series * q + 1.0 / 40320.0;
    series = series * q - 1.0 / 720.0;
    series = series * q + 1.0 / 24.0;
    return 1.0 - (0.5 * q - q * q * series);
}

void exact_sincos(double x, double *sin, double *cos)
{
    const double two_over_pi = 0x1.45f306dc9c883p-1;
    const double part_1 = 0x1.921fb54p+0, part_2 = 0x1.10b461p-30, part_3 = 0x1.a626331p-58,
                 rest = 0x1.1701b839a2520p-88;
    int64_t quarter_turns = (int64_t)(x * two_over_pi + 0.5);
    double k = (double)quarter_turns, high, low, error;
    two_sum(x - k * part_1, -(k * part_2), &high, &low);
    two_sum(high, -(k * part_3), &high, &error);
    low = low + (error - k * rest);
    double s = sin_series(high), c = cos_series(high);
    double s_full = s + low * c, c_full = c - low * s;
    switch (quarter_turns & 3) {
    case 0: *sin = s_full, *cos = c_full; break;
    case 1: *sin = c_full, *cos = -s_full; break;
    case 2: *sin = -s_full, *cos = -c_full; break;
    default: *sin = -c_full, *cos = s_full; break;
    }
}
