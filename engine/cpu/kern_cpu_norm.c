/* kern_cpu_norm: RMS norm and SwiGLU, compiled once per instruction set. Both are cheap beside the matrices and run on
 * the calling thread. A row's sum of squares has one tree: four interleaved accumulators of 16 lanes, then halves. */
#include "kern_cpu_impl.h"
#include "kern_cpu_vec.h"

#include <math.h>

static void rms_norm(const float *x, const float *w, int rows, int n, float eps, float *y)
{
    for (int r = 0; r < rows; r++, x += n, y += n) {
        vf acc[4][NV];
        KERN_EACH (a, 4)
            KERN_EACH (v, NV) acc[a][v] = vf_zero();
        int i = 0;
        for (; i + 64 <= n; i += 64)
            KERN_EACH (a, 4)
                KERN_EACH (v, NV) {
                    vf at = vf_load(x + i + a * 16 + v * VF);
                    acc[a][v] = vf_fma(at, at, acc[a][v]);
                }
        for (; i + 16 <= n; i += 16)
            KERN_EACH (v, NV) {
                vf at = vf_load(x + i + v * VF);
                acc[0][v] = vf_fma(at, at, acc[0][v]);
            }
        KERN_EACH (v, NV) acc[0][v] = (acc[0][v] + acc[1][v]) + (acc[2][v] + acc[3][v]);
        const float inverse = 1.0f / sqrtf(vf_sum16(acc[0]) / (float)n + eps);
        for (i = 0; i + VF <= n; i += VF) vf_store(y + i, vf_load(x + i) * vf_set1(inverse) * vf_load(w + i));
    }
}

/* silu(g) * u = g / (1 + e^-g) * u */
KERN_INLINE vf silu_times(vf g, vf u) { return g / (vf_set1(1.0f) + vf_exp(vf_zero() - g)) * u; }

static void swiglu(const float *gate_up, int rows, int f, float *y)
{
    for (int r = 0; r < rows; r++, gate_up += 2 * (size_t)f, y += f) {
        int i = 0;
        for (; i + VF <= f; i += VF) vf_store(y + i, silu_times(vf_load(gate_up + i), vf_load(gate_up + f + i)));
        if (i < f) { /* the last lanes through a padded copy: the same operations on each */
            float g[VF] = {0}, u[VF] = {0};
            memcpy(g, gate_up + i, (size_t)(f - i) * sizeof *g);
            memcpy(u, gate_up + f + i, (size_t)(f - i) * sizeof *u);
            vf_store(g, silu_times(vf_load(g), vf_load(u)));
            memcpy(y + i, g, (size_t)(f - i) * sizeof *y);
        }
    }
}

const struct cpu_norm_ops KERN_NAME(kern_cpu_norm) = {rms_norm, swiglu};
