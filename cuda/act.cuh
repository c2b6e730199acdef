/* act: activation buffers, what a linear layer reads. bfloat16 values times 2^60 (ACT_SCALE): FP8 codes become bfloat16 by
 * placing bits, which leaves a factor of 2^-120 that no bfloat16 could undo on its own; the other half of it is in a row's scale.
 *
 * A buffer of `rows` x `width` holds its decode rows first, then its prefill rows. blocks = ceil(width / 64); columns from width
 * to 64 * blocks are zero (their weights are zero too, and 0 * NaN is NaN).
 *
 *   decode rows    row-major, 64 * blocks values a row
 *   prefill rows   from act_prefill_offset(decode rows) on: tiles [ceil(prefill rows / 256)][blocks] of 32 KiB, a tile being 256
 *                  rows x 64 columns, 128 bytes a row, as wgmma wants its B operand (128-byte swizzle, K-major):
 *                  column k of a block lies at place p = act_place(k), the 16-byte chunk p / 8 of row r at chunk (p / 8) ^ (r % 8).
 *
 * act_place puts columns in the order of the weights' fragments: lane q of a quad owns columns 16 q .. 16 q + 15 of a block,
 * and the matrix instruction j (of four for a block) multiplies columns 16 q + 4 j + {0, 1} and 16 q + 4 j + {2, 3}, which in
 * its fragments are K = 2 q + {0, 1} and 2 q + 8 + {0, 1}. A decode row needs no permutation: a lane of kernel reads its 16
 * columns, 32 bytes. */
#ifndef TANDEM_ACT_CUH
#define TANDEM_ACT_CUH

#include "device.cuh"

#define ACT_SCALE 0x1p60f

enum { ACT_TILE_ROWS = 256, ACT_BLOCK = 64, ACT_TILE_BYTES = ACT_TILE_ROWS * ACT_BLOCK * 2 };

static inline __host__ __device__ int act_blocks(int width) { return (width + ACT_BLOCK - 1) / ACT_BLOCK; }

/* Bytes. */
static inline __host__ __device__ size_t act_prefill_offset(int decode_rows, int width)
{
    return ((size_t)decode_rows * (size_t)act_blocks(width) * ACT_BLOCK * 2 + 1023) / 1024 * 1024;
}

static inline __host__ __device__ size_t act_buffer_bytes(int decode_rows, int prefill_rows, int width)
{
    size_t tiles = (size_t)((prefill_rows + ACT_TILE_ROWS - 1) / ACT_TILE_ROWS) * (size_t)act_blocks(width);
    return act_prefill_offset(decode_rows, width) + tiles * ACT_TILE_BYTES;
}

/* Place of column k (0..63) of a block in a prefill tile's row. */
static inline __host__ __device__ int act_place(int k) { return ((k >> 2) & 3) * 16 + ((k >> 1) & 1) * 8 + (k >> 4) * 2 + (k & 1); }

#ifdef __CUDACC__

/* Writes two neighbouring columns (k even) of a row, x as it is; row counts from the first decode row. */
__device__ __forceinline__ void act_store2(void *act, struct kern_split split, int width, int row, int k, float x0, float x1)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(x0 * ACT_SCALE, x1 * ACT_SCALE);
    const int blocks = act_blocks(width);
    char *base = (char *)act;
    if (row < split.decode) {
        *(__nv_bfloat162 *)(base + ((size_t)row * blocks * ACT_BLOCK + k) * 2) = pair;
        return;
    }
    const int r = row - split.decode, in_tile = r & (ACT_TILE_ROWS - 1), p = act_place(k & 63);
    base += act_prefill_offset(split.decode, width) + ((size_t)(r / ACT_TILE_ROWS) * blocks + k / ACT_BLOCK) * ACT_TILE_BYTES;
    *(__nv_bfloat162 *)(base + in_tile * 128 + (((p >> 3) ^ (in_tile & 7)) << 4) + (p & 7) * 2) = pair;
}

#endif

#endif
