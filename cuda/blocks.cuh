/* blocks: the byte layout of weights in device memory, and how a warp reads them.
 *
 * A block is 16 rows x 64 columns. Lane 4 g + q of a warp owns, of rows g and g + 8, columns 16 q .. 16 q + 15 of the block:
 * what it reads itself becomes its A fragments of four mma m16n8k16 (or a row quarter of wgmma's A operand), without an
 * exchange. Instruction j multiplies the lane's columns 4 j + {0, 1} (K = 2 q + {0, 1}) and 4 j + {2, 3} (8 further);
 * act_place of act.cuh is the same order for the other operand.
 *
 * A slab is 512 bytes, 16 a lane, in the order of lanes. "Words" are little-endian uint32.
 *   NVFP4  one slab of codes: words [row g: columns 0-7, 8-15; row g + 8: 0-7, 8-15], bits placed by nvfp4_place; then 64 bytes
 *          of scales, byte 2 lane + h for row g + 8 h. A scale byte is E5M3 without sign or subnormals: bits 4..11 of
 *          bfloat16(scale * 2^118) minus NVFP4_SCALE_BASE. Of valid E4M3 scales it is 0x60 .. 0xee; a scale of zero is byte 0
 *          over codes 0; NaN is 0xff. Fragments are value * 2^-8.
 *   FP8    slabs of row g and of row g + 8; bytes of a word are columns 4 j + {0, 2, 1, 3}. Fragments are value * 2^-120.
 *          (A NaN code is no NaN here: the row's scale is made NaN when weights are loaded.)
 *   INT8   as FP8, signed codes. Fragments are the codes.
 *   BF16   a plane is four slabs: row g columns 0-7, 8-15, row g + 8 columns 0-7, 8-15. Planes of a block follow each other.
 *
 * All of this is exact in bfloat16. A row's sum times row_scale_dev gives the number: the act's 2^60 and the format's power
 * are in it.
 *
 * Group scales (FP8 and INT8: groups of 16, 32, 64 or 128 columns; [tiles][groups][16], block_groups of them) are applied to
 * FP32 sums. Groups of 64 and more: a group's chain starts from zero in t, then acc = fma(t, scale, acc). Groups of 16 and 32
 * are lanes 1 or 2 of each quad: block_mask_lanes zeroes the others' fragments, one group after the other. A minimum (of
 * groups of 16 and 32): t of A = 1 (block_ones) over the group's columns, acc = fma(t, min, acc), after the scale. */
#ifndef TANDEM_BLOCKS_CUH
#define TANDEM_BLOCKS_CUH

#include "act.cuh"
#include "op_linear.h"

enum {
    BLOCK_ROWS = 16,
    BLOCK_COLS = 64,
    BLOCK_SLAB_BYTES = 512,
    BLOCK_NVFP4_BYTES = 576,
    BLOCK_FP8_BYTES = 1024,
    BLOCK_INT8_BYTES = 1024,
    BLOCK_PLANE_BYTES = 2048,
    NVFP4_SCALE_BASE = 0x700
};

/* Powers of two that row_scale_dev undoes: of the act alone (BF16, INT8), or with the format's own. */
#define BLOCK_FACTOR_PLAIN 0x1p-60f
#define BLOCK_FACTOR_NVFP4 0x1p-52f /* 2^8 2^-60 */
#define BLOCK_FACTOR_FP8 0x1p60f    /* 2^120 2^-60 */

static inline __host__ __device__ int block_bytes(int format, int planes)
{
    return format == BLOCK_NVFP4  ? BLOCK_NVFP4_BYTES
           : format == BLOCK_BF16 ? planes * BLOCK_PLANE_BYTES
                                  : BLOCK_FP8_BYTES;
}

/* Group scales of one row: whole blocks are covered, scales of padding are zero. */
static inline __host__ __device__ int block_groups(int blocks, int group)
{
    return group == 0           ? 0
           : group < BLOCK_COLS ? blocks * (BLOCK_COLS / group)
                                : (blocks * BLOCK_COLS + group - 1) / group;
}

/* Place in its word of bit 0, 1, 2 (magnitude) and 3 (sign) of column 2 * pair + odd of the word's 8 columns. */
static inline __host__ __device__ int nvfp4_place(int pair, int odd, int bit)
{
    const int to = (bit == 3 ? 15 : 6 + bit) + 16 * odd;
    const int rotated = pair == 0 ? 0 : pair == 1 ? 4 : pair == 2 ? 10 : bit == 0 ? 6 : 14;
    return (to - rotated) & 31;
}

/* The byte of column c (0..63), row r (0..15) in an FP8 or INT8 block. */
static inline __host__ __device__ int block_byte_place(int r, int c)
{
    const int lane = (r & 7) * 4 + (c >> 4), within = c & 15;
    return (r >> 3) * BLOCK_SLAB_BYTES + lane * 16 + (within & 12) + (within & 1) * 2 + (within >> 1 & 1);
}

/* The offset in bytes of column c, row r in a plane of a BF16 block. */
static inline __host__ __device__ int block_bf16_place(int r, int c)
{
    const int lane = (r & 7) * 4 + (c >> 4), within = c & 15;
    return ((r >> 3) * 2 + (within >> 3)) * BLOCK_SLAB_BYTES + lane * 16 + (within & 7) * 2;
}

#ifdef __CUDACC__

/* silu(gate) * up, the same bits in decode and prefill kernels. */
__device__ __forceinline__ float swiglu_value(float gate, float up)
{
    const float e = __expf(-gate);
    return __fmul_rn(__fdividef(gate, __fadd_rn(1.0f, e)), up);
}

__device__ __forceinline__ uint32_t bf16x2_mul(uint32_t a, uint32_t b)
{
    uint32_t r = 0;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
#elif __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return r;
}

__device__ __forceinline__ uint32_t bf16x2_sub(uint32_t a, uint32_t b)
{
    uint32_t r = 0;
#if __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(b), "r"(0xbf80bf80u), "r"(a));
#endif
    return r;
}

/* Eight E2M1 codes to four pairs, times the scale (a pair of equal bfloat16): magnitudes at bits 8..6 are bfloat16 * 2^-126,
 * subnormal code included, and the scale carries 2^118. */
__device__ __forceinline__ void nvfp4_expand(uint32_t w, uint32_t scale, uint32_t out[4])
{
    const uint32_t keep = 0x81c081c0u;
    const uint32_t last = (w << 6 & 0x00400040u) | (__funnelshift_l(w, w, 14) & 0x81808180u);
    out[0] = bf16x2_mul(w & keep, scale);
    out[1] = bf16x2_mul(w << 4 & keep, scale);
    out[2] = bf16x2_mul(__funnelshift_l(w, w, 10) & keep, scale);
    out[3] = bf16x2_mul(last, scale);
}

__device__ __forceinline__ uint32_t nvfp4_scale_pair(uint32_t byte)
{
    return byte * 0x00100010u + (uint32_t)(NVFP4_SCALE_BASE << 4) * 0x00010001u;
}

/* Four E4M3 codes to two pairs. */
__device__ __forceinline__ void fp8_expand(uint32_t w, uint32_t out[2])
{
    out[0] = (w << 8 & 0x80008000u) | (w << 4 & 0x07f007f0u);
    out[1] = (w & 0x80008000u) | (w >> 4 & 0x07f007f0u);
}

/* Two signed codes, in bytes 0 and 2: 128 + the low seven bits, minus 128 or, where the sign bit is set, 256. */
__device__ __forceinline__ uint32_t int8_pair(uint32_t w)
{
    return bf16x2_sub((w & 0x007f007fu) | 0x43004300u, (w & 0x00800080u) | 0x43004300u);
}

__device__ __forceinline__ void int8_expand(uint32_t w, uint32_t out[2])
{
    out[0] = int8_pair(w);
    out[1] = int8_pair(w >> 8);
}

/* What a lane reads of a block (of one plane). */
template <int FORMAT> struct block_words {
    uint4 slab[FORMAT == BLOCK_NVFP4 ? 1 : FORMAT == BLOCK_BF16 ? 4 : 2];
    uint32_t scales; /* NVFP4 */
};

/* From shared or global memory; GLOBAL: weights in global memory, by the read-only path. */
template <int FORMAT, bool GLOBAL>
__device__ __forceinline__ void block_read(const uint8_t *block, int lane, struct block_words<FORMAT> *w)
{
    constexpr int slabs = FORMAT == BLOCK_NVFP4 ? 1 : FORMAT == BLOCK_BF16 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < slabs; i++) {
        const uint4 *p = (const uint4 *)(block + i * BLOCK_SLAB_BYTES) + lane;
        w->slab[i] = GLOBAL ? __ldg(p) : *p;
    }
    if (FORMAT == BLOCK_NVFP4) {
        const uint16_t *p = (const uint16_t *)(block + BLOCK_SLAB_BYTES) + lane;
        w->scales = GLOBAL ? __ldg(p) : *p;
    }
}

/* a[j]: the fragments of instruction j, in the order of mma's operands. */
template <int FORMAT>
__device__ __forceinline__ void block_expand(const struct block_words<FORMAT> *w, uint32_t (&a)[4][4])
{
    if constexpr (FORMAT == BLOCK_NVFP4) {
        const uint4 c = w->slab[0];
        const uint32_t scale[2] = {nvfp4_scale_pair(w->scales & 0xff), nvfp4_scale_pair(w->scales >> 8)};
        const uint32_t word[2][2] = {{c.x, c.y}, {c.z, c.w}};
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t pair[4];
                nvfp4_expand(word[h][u], scale[h], pair);
                a[2 * u][h] = pair[0], a[2 * u][2 + h] = pair[1];
                a[2 * u + 1][h] = pair[2], a[2 * u + 1][2 + h] = pair[3];
            }
    } else if constexpr (FORMAT == BLOCK_BF16) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 c = w->slab[i];
            const int h = i >> 1, j = (i & 1) * 2;
            a[j][h] = c.x, a[j][2 + h] = c.y, a[j + 1][h] = c.z, a[j + 1][2 + h] = c.w;
        }
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t word[4] = {w->slab[h].x, w->slab[h].y, w->slab[h].z, w->slab[h].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t pair[2];
                if (FORMAT == BLOCK_FP8)
                    fp8_expand(word[j], pair);
                else
                    int8_expand(word[j], pair);
                a[j][h] = pair[0], a[j][2 + h] = pair[1];
            }
        }
    }
}

/* The fragments of a block (BF16: of the plane at `block`). */
template <int FORMAT, bool GLOBAL = false>
__device__ __forceinline__ void block_decode(const uint8_t *block, int lane, uint32_t (&a)[4][4])
{
    struct block_words<FORMAT> w;
    block_read<FORMAT, GLOBAL>(block, lane, &w);
    block_expand<FORMAT>(&w, a);
}

/* Keeps the fragments of lanes q_first .. q_first + q_count - 1 of a quad, the columns of a group narrower than a block. */
__device__ __forceinline__ void block_mask_lanes(const uint32_t (&a)[4][4], int lane, int q_first, int q_count,
                                                 uint32_t (&out)[4][4])
{
    const uint32_t keep = (unsigned)((lane & 3) - q_first) < (unsigned)q_count ? 0xffffffffu : 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[j][i] = a[j][i] & keep;
}

/* Ones in those lanes: the product is the sum of x over the group's columns, for minimums. */
__device__ __forceinline__ void block_ones(int lane, int q_first, int q_count, uint32_t (&out)[4][4])
{
    const uint32_t one = (unsigned)((lane & 3) - q_first) < (unsigned)q_count ? 0x3f803f80u : 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[j][i] = one;
}

#endif /* __CUDACC__ */

#endif
