/* row_norm: the one tree by which a row's RMS norm is formed, shared by the norm kernel and the sum that norms what
 * it summed, so that both give the same bits whatever their grids.
 *
 * A row of n floats (a multiple of 16) is cut into chunks of 1024. In a chunk thread t of 128 owns floats 8 t .. 8 t
 * + 7 (those past the row count as zero) and sums their squares in order; a warp's 32 sums are added by a butterfly,
 * the chunk's four warps in order, then the chunks in order. A block or a cluster may spread chunks as it likes. */
#ifndef TANDEM_ROW_NORM_CUH
#define TANDEM_ROW_NORM_CUH

#include "device.cuh"

enum { ROW_NORM_CHUNK = 1024, ROW_NORM_THREADS = 128, ROW_NORM_EACH = 8, ROW_NORM_WARPS = 4, ROW_NORM_MAX = 16384 };

static inline __host__ __device__ int row_norm_chunks(int n) { return (n + ROW_NORM_CHUNK - 1) / ROW_NORM_CHUNK; }

#ifdef __CUDACC__

/* A thread's share; of a thread past the row: pass zeros. */
__device__ __forceinline__ float row_norm_squares(const float v[ROW_NORM_EACH])
{
    float sum = __fmul_rn(v[0], v[0]);
#pragma unroll
    for (int i = 1; i < ROW_NORM_EACH; i++) sum = __fmaf_rn(v[i], v[i], sum);
    return sum;
}

/* The warp's sum, in every lane. All 32 lanes call it. */
__device__ __forceinline__ float row_norm_warp(float sum)
{
#pragma unroll
    for (int lane = 16; lane; lane >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lane));
    return sum;
}

/* A chunk's sum from those of its four warps. */
__device__ __forceinline__ float row_norm_chunk(const float warp_sum[ROW_NORM_WARPS])
{
    return __fadd_rn(__fadd_rn(__fadd_rn(warp_sum[0], warp_sum[1]), warp_sum[2]), warp_sum[3]);
}

/* The row's sum from those of its chunks. */
__device__ __forceinline__ float row_norm_total(const float *chunk_sum, int chunks)
{
    float total = chunk_sum[0];
    for (int i = 1; i < chunks; i++) total = __fadd_rn(total, chunk_sum[i]);
    return total;
}

/* 1 / sqrt(mean + eps) */
__device__ __forceinline__ float row_norm_scale(float total, int n, float eps)
{
    return rsqrtf(__fadd_rn(__fdiv_rn(total, (float)n), eps));
}

__device__ __forceinline__ float row_norm_apply(float x, float scale, float w)
{
    return __fmul_rn(__fmul_rn(x, scale), w);
}

#endif

#endif
