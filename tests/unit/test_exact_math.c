/* exact_math against the machine's long double functions: 64-bit significands, some 2000 times finer than the bound. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <string.h>

#include "exact_math.h"

_Static_assert(LDBL_MANT_DIG >= 64, "the reference must be finer than double");

enum { SAMPLES = 400000 };
static const double bound = 1e-14;

static uint64_t noise(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Uniform in [0, 1). */
static double uniform(uint64_t *state) { return (double)(noise(state) >> 11) * 0x1p-53; }

static void check(double got, long double expected, double x)
{
    long double error = fabsl((long double)got - expected), allowed = fabsl(expected) * (long double)bound;
    if (error > allowed) fail_msg("x=%a: got %a, expected %La", x, got, expected);
}

static void exp_is_exact(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (int i = 0; i < SAMPLES; i++) {
        double x = (2.0 * uniform(&seed) - 1.0) * (i % 2 ? 700.0 : i % 3 ? 30.0 : 1e-3);
        check(exact_exp(x), expl((long double)x), x);
    }
    const double special[] = {0.0,    -0.0,   700.0, -700.0, 1.0, -1.0, 0x1.62e42fefa39efp-1, -0x1.62e42fefa39efp-2,
                              5e-324, -5e-324};
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++)
        check(exact_exp(special[i]), expl((long double)special[i]), special[i]);
    assert_true(exact_exp(0.0) == 1.0);
    assert_true(exact_exp(-700.0000001) == 0.0);
    assert_true(exact_exp(-1e300) == 0.0);
    assert_true(exact_exp((double)-INFINITY) == 0.0);
    assert_true(isnan(exact_exp((double)NAN)));
    for (int k = -2010; k <= 2010; k++) { /* both sides of where the rounding to a power of 2 changes */
        double x = k * 0x1.62e42fefa39efp-2;
        check(exact_exp(x), expl((long double)x), x);
        check(exact_exp(nextafter(x, 1e9)), expl((long double)nextafter(x, 1e9)), x);
    }
}

/* In lengths around the vector width; elements do not depend on their neighbours. */
static void exp_each_has_the_same_bits(void **state)
{
    (void)state;
    uint64_t seed = 4;
    for (size_t n = 0; n < 70; n++)
        for (int round = 0; round < 200; round++) {
            double x[70], expected[70];
            for (size_t i = 0; i < n; i++) {
                x[i] = i % 11 == 5 ? -1e4 * uniform(&seed) : (2.0 * uniform(&seed) - 1.0) * (i % 2 ? 700.0 : 10.0);
                if (i % 13 == 7) x[i] = i % 2 ? -1e300 : (double)-INFINITY;
                expected[i] = exact_exp(x[i]);
            }
            exact_exp_each(x, n);
            assert_memory_equal(x, expected, n * sizeof *x);
        }
}

static void log_is_exact(void **state)
{
    (void)state;
    uint64_t seed = 2;
    for (int i = 0; i < SAMPLES; i++) {
        uint64_t bits = (noise(&seed) & UINT64_C(0x000fffffffffffff)) | (1 + noise(&seed) % 2046) << 52;
        double any, near_one = 1.0 + (2.0 * uniform(&seed) - 1.0) * pow(2.0, -(double)(i % 52));
        memcpy(&any, &bits, sizeof any);
        check(exact_log(any), logl((long double)any), any);
        if (near_one > 0.0) check(exact_log(near_one), logl((long double)near_one), near_one);
    }
    const double special[] = {DBL_MIN,
                              DBL_MAX,
                              1.0 - DBL_EPSILON / 2,
                              1.0 + DBL_EPSILON,
                              0x1.6a09e667f3bcdp+0,
                              0x1.6a09e667f3bccp+0,
                              0x1.6a09e667f3bcdp-1,
                              2.0,
                              0.5,
                              10000.0,
                              1e6};
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++)
        check(exact_log(special[i]), logl((long double)special[i]), special[i]);
    assert_true(exact_log(1.0) == 0.0);
}

static void check_sincos(double x)
{
    double s, c;
    exact_sincos(x, &s, &c);
    check(s, sinl((long double)x), x);
    check(c, cosl((long double)x), x);
}

static void sincos_is_exact(void **state)
{
    (void)state;
    uint64_t seed = 3;
    for (int i = 0; i < SAMPLES; i++) check_sincos(uniform(&seed) * pow(2.0, i % 50 - 25));
    for (int position = 0; position < 300000; position++) check_sincos(position);
    check_sincos(0x1p24);
    check_sincos(nextafter(0x1p24, 0));
    check_sincos(1e-300);
    /* The doubles next to multiples of pi/4, where the reduced argument is smallest or at its border. */
    const long double quarter_pi = 3.14159265358979323846264338327950288L / 4;
    for (int i = 0; i < SAMPLES; i++) {
        uint64_t k = i < 1000 ? (uint64_t)i : noise(&seed) % 21361414;
        double x = (double)((long double)k * quarter_pi);
        check_sincos(x);
        check_sincos(nextafter(x, 1e9));
    }
    double s, c;
    exact_sincos(0.0, &s, &c);
    assert_true(s == 0.0 && c == 1.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_exact),
        cmocka_unit_test(exp_each_has_the_same_bits),
        cmocka_unit_test(log_is_exact),
        cmocka_unit_test(sincos_is_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
