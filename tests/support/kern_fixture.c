/* kern_fixture: see the header. */
#include "kern_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const isa_names[] = {"generic", "avx2", "avx512", "vnni", "amx"};

double chain_tolerance(double n) { return 4 * sqrt(n) * ROUNDING; }

uint64_t random_next(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = *state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

float random_float(uint64_t *state) { return (float)(random_next(state) >> 40) * 0x1p-23f - 1.0f; }

void random_fill(float *x, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) x[i] = random_float(&seed);
}

enum { GUARD_WORDS = 64 };
static const uint32_t guard_word = 0x7fbadbad; /* a NaN */

float *guarded_new(size_t n)
{
    uint32_t *words = malloc((n + 2 * GUARD_WORDS) * sizeof *words);
    assert_non_null(words);
    for (size_t i = 0; i < n + 2 * GUARD_WORDS; i++) words[i] = guard_word;
    return (float *)(void *)(words + GUARD_WORDS);
}

void guarded_free(float *p, size_t n)
{
    uint32_t *words = (uint32_t *)(void *)p - GUARD_WORDS;
    for (size_t i = 0; i < GUARD_WORDS; i++) {
        assert_int_equal(words[i], guard_word);
        assert_int_equal(words[GUARD_WORDS + n + i], guard_word);
    }
    free(words);
}

float *random_new(size_t n, uint64_t seed)
{
    float *x = malloc((n ? n : 1) * sizeof *x);
    assert_non_null(x);
    random_fill(x, n, seed);
    return x;
}

void assert_bits(const float *a, const float *b, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a))
            fail_msg("%s: value %zu is %a, not %a", what, i, (double)a[i], (double)b[i]);
}

struct kern *open_isa(const char *isa, int threads)
{
    struct kern *k = NULL;
    struct err e = {0};
    if (kern_cpu_open(isa, threads, &k, &e) != RC_OK) fail_msg("%s: %s", isa, e.text);
    return k;
}

void on_every_isa(void (*test)(struct kern *))
{
    for (size_t i = 0; i < sizeof isa_names / sizeof *isa_names; i++) {
        if (!kern_cpu_numerics(isa_names[i])) {
            print_message("this machine has no %s\n", isa_names[i]);
            continue;
        }
        struct kern *k = open_isa(isa_names[i], 1);
        test(k);
        k->close(k);
    }
}

