/* op_gdn.cuh: what the kernels of op_gdn share: memory of a slot, rows, elementwise functions, chunks.
 *
 * State of a slot: matrices [v_heads][v_dim][k_dim], then a ring of the last conv_width raw rows (channels only):
 * position p lies at row p mod conv_width. A decode row at p reads p - conv_width + 1 .. p - 1 and writes p, which
 * is none of those rows, so blocks that share channels need no order among them; and the bytes depend on the
 * sequence only.
 *
 * Replay memory of a slot: the position of the first draft (64 bytes), then rows of channels, b and a: the
 * conv_width - 1 rows before the first draft, and the drafts. A replay reads nothing of the ring, which it writes. */
#ifndef TANDEM_OP_GDN_CUH
#define TANDEM_OP_GDN_CUH

#include "act.cuh"
#include "op_gdn.h"

enum {
    GDN_MAX_ROWS = KERN_MAX_DRAFTS + 1, /* of a decode segment */
    GDN_HEADER_BYTES = 64,              /* of replay memory */
    GDN_WINDOW = 32,                    /* chunks that the scratch of the fast prefill holds */
    GDN_MAX_SEGMENTS = 64               /* more only cost further windows */
};

/* A batch's GDN call as a kernel argument. */
struct gdn_call {
    struct kern_gdn_shape s;
    struct kern_gdn_weights w;
    struct kern_gdn_memory m;
    struct kern_split split;
    const struct device_segment *segments; /* of this provenance */
    const struct device_row *row;          /* of the batch */
    int n_segments;
    const float *in;
    char *scratch;
    void *o_act;
};

#define GDN_QUERY_SCALE 0.08838834764831845f /* 1 / sqrt(128), of the fast kernels */

/* The fast kernels' shapes. The parity of v_heads keeps raw rows aligned to 16 bytes. */
static inline bool gdn_fast_shape(const struct kern_gdn_shape *s)
{
    return s->k_dim == 128 && s->v_dim == 128 && s->conv_width == 4 && s->v_heads % 2 == 0;
}

/* The fast kernels need clusters, bulk copies and over 200 KB of shared memory. */
static inline bool gdn_fast_card(const struct op_context *c) { return c->sm >= 90 && c->sm < 120; }

static inline __host__ __device__ int gdn_channels(const struct kern_gdn_shape *s)
{
    return 2 * s->k_heads * s->k_dim + s->v_heads * s->v_dim;
}

static inline __host__ __device__ int gdn_width(const struct kern_gdn_shape *s)
{
    return gdn_channels(s) + s->v_heads * s->v_dim + 2 * s->v_heads;
}

static inline __host__ __device__ size_t gdn_matrix_floats(const struct kern_gdn_shape *s)
{
    return (size_t)s->v_heads * s->v_dim * s->k_dim;
}

/* Floats of a row in replay memory. */
static inline __host__ __device__ int gdn_replay_pitch(const struct kern_gdn_shape *s)
{
    return (gdn_channels(s) + 2 * s->v_heads + 3) / 4 * 4;
}

/* What a chunk of the fast prefill has in scratch, in bytes; layouts in op_gdn_prefill.cu. */
static inline __host__ __device__ size_t gdn_chunk_bytes(const struct kern_gdn_shape *s)
{
    return (size_t)s->k_heads * 98304 + (size_t)s->v_heads * (81920 + 512);
}

/* Most chunks of so many rows in so many segments. */
static inline int gdn_chunks_bound(int rows, int n_segments)
{
    return (rows + (KERN_GDN_CHUNK - 1) * n_segments) / KERN_GDN_CHUNK;
}

void gdn_prefill_fast(const struct op_context *c, const struct gdn_call *call, int rows);

#ifdef __CUDACC__

__device__ __forceinline__ float *gdn_state(const struct gdn_call &a, int slot)
{
    return (float *)(a.m.state_dev + (size_t)slot * a.m.state_stride);
}

/* 1 / x and 1 / sqrt(x) to a unit or two in the last place, without the branches of the exactly rounded functions. */
__device__ __forceinline__ float gdn_reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float gdn_inverse_root(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

/* The error is a unit or two, and that of x's product with log2 e. */
__device__ __forceinline__ float gdn_exp(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(1.4426950408889634f * x));
    return y;
}

/* For a gate or an activation; 0 and 1 at the ends. */
__device__ __forceinline__ float gdn_sigmoid(float x) { return gdn_reciprocal(1.0f + gdn_exp(-x)); }

__device__ __forceinline__ float gdn_silu(float x) { return __fmul_rn(x, gdn_sigmoid(x)); }

/* g of a row of a head. Exact to a few units where softplus is tiny as well: sums of g over a chunk become
 * exponents. */
__device__ __forceinline__ float gdn_log_decay(float a, float x) { return a * (x > 20.0f ? x : log1pf(expf(x))); }

__device__ __forceinline__ float gdn_warp_sum(float x)
{
#pragma unroll
    for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(~0u, x, m);
    return x;
}

__device__ __forceinline__ float4 gdn_fma4(float4 w, float4 x, float4 y)
{
    return make_float4(fmaf(w.x, x.x, y.x), fmaf(w.y, x.y, y.y), fmaf(w.z, x.z, y.z), fmaf(w.w, x.w, y.w));
}

__device__ __forceinline__ float4 gdn_silu4(float4 x)
{
    return make_float4(gdn_silu(x.x), gdn_silu(x.y), gdn_silu(x.z), gdn_silu(x.w));
}

__device__ __forceinline__ float4 gdn_scale4(float4 x, float by)
{
    return make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
}

__device__ __forceinline__ float gdn_square4(float4 x)
{
    return fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, x.x * x.x)));
}

/* Factor of l2norm. */
__device__ __forceinline__ float gdn_inverse_length(float squares) { return gdn_inverse_root(squares + 1e-6f); }

/* Raw row t of a prefill segment, t < 0: before it; NULL before the sequence. */
__device__ __forceinline__ const float *gdn_raw_row(const struct gdn_call &a, const struct device_segment &g,
                                                    const float *ring, int t)
{
    if (t >= 0) return a.in + (size_t)(g.row_first + t) * gdn_width(&a.s);
    const int position = g.position_first + t;
    return position < 0 ? NULL : ring + (size_t)(position % a.s.conv_width) * gdn_channels(&a.s);
}

/* The ring after a prefill segment, by threads 0 .. threads of the grid. */
__device__ __forceinline__ void gdn_advance_ring(const struct gdn_call &a, const struct device_segment &g, float *ring,
                                                 int thread, int threads)
{
    const int channels = gdn_channels(&a.s), n = min(g.rows, a.s.conv_width);
    for (int t = g.rows - n; t < g.rows; t++) {
        const float *from = a.in + (size_t)(g.row_first + t) * gdn_width(&a.s);
        float *to = ring + (size_t)((g.position_first + t) % a.s.conv_width) * channels;
        for (int i = thread; i < channels; i += threads) to[i] = from[i];
    }
}

#endif /* __CUDACC__ */

#endif
