/* exact_math: exp, log, sine and cosine in double precision by + - * / only, so that their bits do not depend on the
 * machine's libm. Relative error below 1e-14 in the stated ranges. */
#ifndef TANDEM_EXACT_MATH_H
#define TANDEM_EXACT_MATH_H

#include <stddef.h>

double exact_exp(double x);                            /* |x| <= 700; below -700 gives 0 */
void exact_exp_each(double *x, size_t n);              /* x[i] = exact_exp(x[i]), the same bits; each x[i] <= 700 */
double exact_log(double x);                            /* x > 0, normal */
void exact_sincos(double x, double *sin, double *cos); /* 0 <= x <= 2^24 */

#endif
