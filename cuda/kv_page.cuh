/* kv_page: how a page of keys and values lies in memory, and readers of its elements.
 *
 * A page holds 64 positions (slots) of all of the rank's KV heads of one layer: head after head, each kv_page_head_bytes. Of a
 * head: its keys, then its values, each kv_page_half_bytes, a multiple of 128. Two bulk copies bring a head into shared memory,
 * and parts of both are in the order of fragments of mma.m16n8k16 with keys (16 keys x 16 dimensions) and transposed values
 * (16 dimensions x 16 keys) as operand A, so that a lane reads 16 bytes at a time without bank conflicts. Keys are cut into
 * tiles of 16 slots, D is head_dim, lane = 4 g + q with g = 0..7, q = 0..3.
 *
 * INT8, keys: codes + 128 in bytes, [4 tiles][blocks of 64 dimensions][16 slots][64 dimensions], a last block of D % 64
 *   dimensions being so much narrower. Lane (g, q) reads dimensions 16 q .. 16 q + 15 of slots g and g + 8; instruction j of
 *   four takes 16 q + 4 j + {0, 1} as K = 2 q + {0, 1} and 16 q + 4 j + {2, 3} as K = 2 q + 8 + {0, 1}; the queries likewise.
 *   Then scales, float16, [64 slots][runs].
 * INT8, values: codes + 128, [4 tiles][blocks of 32 dimensions][32 lanes][16 bytes]; a lane's bytes are four words, for
 *   dimensions 0..15 and 16..31 of the block, each first for slots 0..7, then 8..15 of the tile; in a word dimension g of slots
 *   2 q, 2 q + 1, then dimension g + 8 of the same two. A last block of D % 32 = 16 dimensions has two words a lane.
 *   Then scales, float16, [runs][64 slots].
 * F16, BF16, keys: [4 tiles][blocks of 32 dimensions][16 slots][32 dimensions], the last block as above. Lane (g, q) reads
 *   dimensions 8 q .. 8 q + 7; instruction j of two takes 8 q + 4 j + {0, 1} and 8 q + 4 j + {2, 3}.
 * F16, BF16, values: [4 tiles][blocks of 16 dimensions][32 lanes][4 words], words a0 .. a3 of the fragment: dimension g, g + 8
 *   of slots 2 q, 2 q + 1, then g, g + 8 of slots 2 q + 8, 2 q + 9.
 * F32: keys and values [64 slots][D].
 *
 * INT8 scales are float16 here: largest magnitude of the run / 127, rounded up, so that no code needs cutting and the error
 * is at most half a scale however small the scale is. Codes are value / that scale, to nearest even. A run with a value that is
 * not finite, or a scale past 65504, gets NaN for its scale: what is broken stays visible. A run of zeros has scale 0.
 *
 * Slots past a row's position hold anything, NaN too. INT8 codes are finite whatever they are, so there it is enough to
 * select scores and scales; elsewhere a value in a shared operand of a matrix instruction must be selected itself. */
#ifndef TANDEM_KV_PAGE_CUH
#define TANDEM_KV_PAGE_CUH

#include "device.cuh"

enum { KV_CODE_BIAS = 128 };

static inline __host__ __device__ int kv_page_cell_bytes(enum kv_format f)
{
    return f == KV_F32 ? 4 : f == KV_INT8 ? 1 : 2;
}

/* Runs of one scale in a head's key or value. */
static inline __host__ __device__ int kv_page_runs(int dim) { return (dim + KV_INT8_RUN - 1) / KV_INT8_RUN; }

/* Bytes of a head's keys, or of its values, scales included. */
static inline __host__ __device__ int kv_page_half_bytes(enum kv_format f, int dim)
{
    const int scales = f == KV_INT8 ? kv_page_runs(dim) * 2 : 0;
    return KV_PAGE_TOKENS * (dim * kv_page_cell_bytes(f) + scales);
}

static inline __host__ __device__ int kv_page_head_bytes(enum kv_format f, int dim)
{
    return 2 * kv_page_half_bytes(f, dim);
}

/* ---- places: bytes from the beginning of a head's keys, or of its values ---- */

static inline __host__ __device__ int kv_page_key_at(enum kv_format f, int dim, int slot, int d)
{
    const int cell = kv_page_cell_bytes(f);
    if (f == KV_F32) return (slot * dim + d) * cell;
    const int width = f == KV_INT8 ? 64 : 32, first = d / width * width;
    const int own_width = dim - first < width ? dim - first : width;
    return (slot / 16 * 16 * dim + first * 16 + slot % 16 * own_width + d - first) * cell;
}

static inline __host__ __device__ int kv_page_value_at(enum kv_format f, int dim, int slot, int d)
{
    if (f == KV_F32) return (slot * dim + d) * 4;
    const int lane = d % 8 * 4 + slot % 8 / 2, upper_slots = slot % 16 / 8, upper_dims = d % 16 / 8;
    if (f != KV_INT8)
        return slot / 16 * 32 * dim + d / 16 * 512 + lane * 16 + (upper_slots * 2 + upper_dims) * 4 + slot % 2 * 2;
    const int first = d / 32 * 32, lane_bytes = dim - first < 32 ? 8 : 16;
    return slot / 16 * 16 * dim + first * 16 + lane * lane_bytes + (d % 32 / 16 * 2 + upper_slots) * 4 +
           upper_dims * 2 + slot % 2;
}

static inline __host__ __device__ int kv_page_key_scale_at(int dim, int slot, int run)
{
    return KV_PAGE_TOKENS * dim + (slot * kv_page_runs(dim) + run) * 2;
}

static inline __host__ __device__ int kv_page_value_scale_at(int dim, int slot, int run)
{
    return KV_PAGE_TOKENS * dim + (run * KV_PAGE_TOKENS + slot) * 2;
}

#ifdef __CUDACC__

/* Keys of a KV head on a page; its values follow at kv_page_half_bytes. */
static __device__ __forceinline__ char *kv_page_keys(struct kern_kv_layer kv, int32_t page, int kv_head,
                                                     enum kv_format f, int dim)
{
    return (char *)kv.base_dev + (size_t)page * kv.page_bytes + (size_t)kv_head * (size_t)kv_page_head_bytes(f, dim);
}

/* One element, scale included; keys and values point at a head's keys or values. For shapes that have no fast path. */
static __device__ __forceinline__ float kv_page_cell(enum kv_format f, const char *cell, const char *scale)
{
    switch (f) {
    case KV_F32: return *(const float *)cell;
    case KV_F16: return __half2float(*(const __half *)cell);
    case KV_BF16: return __bfloat162float(*(const __nv_bfloat16 *)cell);
    default: return (float)((int)*(const uint8_t *)cell - KV_CODE_BIAS) * __half2float(*(const __half *)scale);
    }
}

static __device__ __forceinline__ float kv_page_key(enum kv_format f, const char *keys, int dim, int slot, int d)
{
    return kv_page_cell(f, keys + kv_page_key_at(f, dim, slot, d),
                        keys + kv_page_key_scale_at(dim, slot, d / KV_INT8_RUN));
}

static __device__ __forceinline__ float kv_page_value(enum kv_format f, const char *values, int dim, int slot, int d)
{
    return kv_page_cell(f, values + kv_page_value_at(f, dim, slot, d),
                        values + kv_page_value_scale_at(dim, slot, d / KV_INT8_RUN));
}

/* The lower or upper two of four codes as a pair of float16: a byte under 0x64 is 1024 + byte. */
static __device__ __forceinline__ uint32_t kv_codes_minus_bias(uint32_t pair)
{
    uint32_t r;
    asm("sub.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(pair), "r"(0x64806480u));
    return r;
}
static __device__ __forceinline__ uint32_t kv_codes_lower(uint32_t codes)
{
    return kv_codes_minus_bias(__byte_perm(codes, 0x64646464u, 0x4140));
}
static __device__ __forceinline__ uint32_t kv_codes_upper(uint32_t codes)
{
    return kv_codes_minus_bias(__byte_perm(codes, 0x64646464u, 0x4342));
}

#endif

#endif
