/* op_gdn_chunk.cuh: what the kernels of the fast prefill share: a chunk's scratch, its place in the batch, products
 * by matrix instructions.
 *
 * Scratch of a chunk: by key head Q (32 KiB), K (32) and scores (32), by value head W (32), U, later O (32), P (16),
 * p and decays to the end (0.5). Q, K, W and P are second operands in blocks of 512 bytes: 32 lanes x {hi, lo of
 * elements 0 and 1, hi, lo of elements 8 and 9 of the lane's 16 along the sum}. Blocks of Q and W: [kdim / 16][row /
 * 8], of K: [row / 16][kdim / 8], of P: [row summed over / 16][row / 8]. U, O and scores are accumulators of 16 x 8. */
#ifndef TANDEM_OP_GDN_CHUNK_CUH
#define TANDEM_OP_GDN_CHUNK_CUH

#include "op_gdn.cuh"

enum { DIM = 128, CHUNK = KERN_GDN_CHUNK, BLOCK_BYTES = 512 };

/* Chunks first .. first + n of the batch in order, whose other factors are in scratch. */
void gdn_advance(const struct op_context *c, const struct gdn_call *call, int first, int n);

#ifdef __CUDACC__

/* Where things lie in a chunk's scratch. */
__device__ __forceinline__ char *chunk_memory(const struct gdn_call &a, int chunk)
{
    return a.scratch + (size_t)chunk * gdn_chunk_bytes(&a.s);
}
__device__ __forceinline__ char *q_memory(char *chunk, int k_head) { return chunk + (size_t)k_head * 98304; }
__device__ __forceinline__ char *k_memory(char *chunk, int k_head) { return q_memory(chunk, k_head) + 32768; }
__device__ __forceinline__ float4 *score_memory(char *chunk, int k_head)
{
    return (float4 *)(q_memory(chunk, k_head) + 65536);
}
__device__ __forceinline__ char *w_memory(const struct gdn_call &a, char *chunk, int head)
{
    return chunk + (size_t)a.s.k_heads * 98304 + (size_t)head * (81920 + 512);
}
__device__ __forceinline__ char *u_memory(const struct gdn_call &a, char *chunk, int head)
{
    return w_memory(a, chunk, head) + 32768;
}
__device__ __forceinline__ char *p_memory(const struct gdn_call &a, char *chunk, int head)
{
    return w_memory(a, chunk, head) + 65536;
}
__device__ __forceinline__ float *decay_memory(const struct gdn_call &a, char *chunk, int head)
{
    return (float *)(w_memory(a, chunk, head) + 81920);
}

/* Chunks of segments before `segment`, by a whole warp. */
__device__ __forceinline__ int chunks_before(const struct gdn_call &a, int segment)
{
    int n = 0;
    for (int i = threadIdx.x % 32; i < segment; i += 32) n += (a.segments[i].rows + CHUNK - 1) / CHUNK;
#pragma unroll
    for (int m = 16; m; m >>= 1) n += __shfl_xor_sync(~0u, n, m);
    return n;
}

/* The segment that has chunk `chunk` of the batch, -1 when there is none; *in_segment: which of its chunks. */
__device__ __forceinline__ int find_chunk(const struct gdn_call &a, int chunk, int *in_segment)
{
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < a.n_segments; base += 32) {
        const int n = base + lane < a.n_segments ? (a.segments[base + lane].rows + CHUNK - 1) / CHUNK : 0;
        int end = n;
#pragma unroll
        for (int m = 1; m < 32; m <<= 1) {
            const int before = __shfl_up_sync(~0u, end, m);
            if (lane >= m) end += before;
        }
        const unsigned behind = __ballot_sync(~0u, end > chunk);
        if (behind) {
            const int at = __ffs(behind) - 1;
            *in_segment = chunk - __shfl_sync(~0u, end - n, at);
            return base + at;
        }
        chunk -= __shfl_sync(~0u, end, 31);
    }
    return -1;
}

/* ---- pairs of bfloat16 ---- */

__device__ __forceinline__ void split_pair(float x0, float x1, uint32_t *hi, uint32_t *lo)
{
    const __nv_bfloat162 h = __floats2bfloat162_rn(x0, x1);
    const uint32_t bits = *(const uint32_t *)&h;
    const __nv_bfloat162 l =
        __floats2bfloat162_rn(x0 - __uint_as_float(bits << 16), x1 - __uint_as_float(bits & 0xffff0000u));
    *hi = bits;
    *lo = *(const uint32_t *)&l;
}

/* A first operand, 16 x 16. */
struct fragment {
    uint32_t hi[4], lo[4];
};

/* From accumulators of two neighbouring tiles. */
__device__ __forceinline__ struct fragment fragment_of(const float *c0, const float *c1)
{
    struct fragment f;
    split_pair(c0[0], c0[1], &f.hi[0], &f.lo[0]);
    split_pair(c0[2], c0[3], &f.hi[1], &f.lo[1]);
    split_pair(c1[0], c1[1], &f.hi[2], &f.lo[2]);
    split_pair(c1[2], c1[3], &f.hi[3], &f.lo[3]);
    return f;
}

/* From two blocks of second-operand form, of rows 0..7 and 8..15. */
__device__ __forceinline__ struct fragment fragment_of_blocks(uint4 x, uint4 y)
{
    return (struct fragment){{x.x, y.x, x.z, y.z}, {x.y, y.y, x.w, y.w}};
}

/* c[i] += a b[i] for n tiles; the three products go over all tiles in turn, so that none waits for the one before. */
template <int N> __device__ __forceinline__ void multiply(float (*c)[4], const struct fragment &a, const uint4 *b)
{
#pragma unroll
    for (int i = 0; i < N; i++) mma_bf16(c[i], a.hi[0], a.hi[1], a.hi[2], a.hi[3], b[i].x, b[i].z);
#pragma unroll
    for (int i = 0; i < N; i++) mma_bf16(c[i], a.hi[0], a.hi[1], a.hi[2], a.hi[3], b[i].y, b[i].w);
#pragma unroll
    for (int i = 0; i < N; i++) mma_bf16(c[i], a.lo[0], a.lo[1], a.lo[2], a.lo[3], b[i].x, b[i].z);
}

#endif /* __CUDACC__ */

#endif
