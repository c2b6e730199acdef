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

/* Operations as tests of the CPU backend want them: all rows of one provenance, segments beside each other, acts being rows of
 * float32. Each begins a batch of its own. */
struct kern_split rows_of(enum kern_provenance p, int rows);
void call_rope_kv_append(struct kern *k, const struct kern_attn_shape *s, const struct kern_attn_weights *w,
                         const struct kern_segment *segments, int n, const float *cos_sin, float *qkv, struct kern_kv_layer kv);
void call_attention(struct kern *k, const struct kern_attn_shape *s, enum kern_provenance p, const struct kern_segment *segments,
                    int n, const float *qkv, struct kern_kv_layer kv, float *o);
void call_linear(struct kern *k, const struct kern_weight *w, enum kern_provenance p, const float *x, int rows, float *y);
/* Rows of a sequence with its state, and its replay memory where drafts follow the first. */
struct gdn_rows {
    int row_first, rows, position_first;
    void *state, *replay;
};
void call_gdn(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, enum kern_provenance p,
              const struct gdn_rows *sequences, int n, const float *in, float *o);
void call_gdn_replay(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, void *state, void *replay,
                     int rows);

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
