/* kern_fixture: what the tests of kernels share: random inputs, guarded outputs, every instruction set of the machine. */
#ifndef TANDEM_KERN_FIXTURE_H
#define TANDEM_KERN_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kern_cpu.h"

/* Half a unit in the last place of float32: the error of one rounding. */
#define ROUNDING 0x1p-24
/* Chains of n roundings of random sign err like sqrt(n) of them; four times that is not reached by chance. */
double chain_tolerance(double n);
/* Element-wise functions: an exponential of one unit, two products, a quotient. */
#define ELEMENT_TOLERANCE (8 * ROUNDING)

uint64_t random_next(uint64_t *state);
float random_float(uint64_t *state); /* in [-1, 1) */
void random_fill(float *x, size_t n, uint64_t seed);
float *random_new(size_t n, uint64_t seed); /* free */

/* n floats, all NaN, between guards; free with guarded_free, which checks them. */
float *guarded_new(size_t n);
void guarded_free(float *p, size_t n);

void assert_bits(const float *a, const float *b, size_t n, const char *what);

struct kern *open_isa(const char *isa, int threads);
/* Runs test once for each instruction set that the machine has, on one thread, saying which it lacks. */
void on_every_isa(void (*test)(struct kern *));
#define ON_EVERY_ISA(name)                                                                                             \
    static void name##_isas(void **state)                                                                              \
    {                                                                                                                  \
        (void)state;                                                                                                   \
        on_every_isa(name);                                                                                            \
    }

#endif
