/* op_linear_decode: what the kernels of op_linear_decode.cu and op_linear_wide.cu share: the tree's segments, their
 * parameters, a tile's way out. */
#ifndef TANDEM_OP_LINEAR_DECODE_CUH
#define TANDEM_OP_LINEAR_DECODE_CUH

#include "blocks.cuh"

enum { SEGMENTS = 16, FEW_SEGMENTS = 8, PASS_ROWS = 8 }; /* PASS_ROWS: columns of a matrix instruction */

/* How one half's blocks are dealt to its segments: base each, one more where the bit is set. What comes after the last is empty. */
struct segment_plan {
    int first, base;
    uint32_t extra;
    int segments; /* SEGMENTS or FEW_SEGMENTS */
};

/* What a kernel needs first comes first: parameters are fetched line by line. */
struct linear_args {
    const uint8_t *blocks_dev;
    int blocks, tiles; /* tiles that have output */
    int halves, rows;  /* rows of x in this pass */
    struct segment_plan plan[2];
    const uint8_t *x; /* row-major, x_pitch bytes a row */
    size_t x_pitch;
    const float *row_scale_dev;
    float *y[2];
    size_t y_pitch;
    uint16_t *act; /* swiglu */
    size_t act_pitch;
    int outputs;                                  /* rows of the matrix, columns of act */
    int planes, groups, group_log2;               /* group_log2 0: no groups */
    const float *group_scale_dev, *group_min_dev; /* group_min_dev NULL: there are none */
};

#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < (n); i++)

__device__ __forceinline__ void segment_range(const struct segment_plan *p, int segment, int *first, int *count)
{
    *first = p->first + (segment < p->segments ? segment : p->segments) * p->base + __popc(p->extra & ((1u << segment) - 1));
    *count = segment < p->segments ? p->base + (int)(p->extra >> segment & 1) : 0;
}

/* Scales of a lane's two rows of a tile. */
__device__ __forceinline__ float2 read_scales(const struct linear_args *a, int tile, int lane)
{
    const float *scale = a->row_scale_dev + tile * BLOCK_ROWS + (lane >> 2);
    return make_float2(__ldg(scale), __ldg(scale + 8));
}

/* The tile's sums leave: lane 4 g + q has rows g (s.x, s.y) and g + 8 (s.z, s.w) of x rows x_first + 2 q and the next. */
__device__ __forceinline__ void store_tile(const struct linear_args *a, int half, int tile, int x_first, int lane,
                                           float4 s, float2 scale)
{
    const int g = lane >> 2, x_row = x_first + (lane & 3) * 2, row = tile * BLOCK_ROWS + g;
    const float v[2][2] = {{s.x * scale.x, s.z * scale.y}, {s.y * scale.x, s.w * scale.y}};
    EACH(i, 2)
    {
        if (x_row + i >= a->rows) continue;
        if (a->act) {
            const int col = tile * 8 + g;
            const float product = col < a->outputs ? swiglu_value(v[i][0], v[i][1]) * ACT_SCALE : 0.0f;
            a->act[(size_t)(x_row + i) * a->act_pitch + col] = __bfloat16_as_ushort(__float2bfloat16_rn(product));
            continue;
        }
        float *y = a->y[half] + (size_t)(x_row + i) * a->y_pitch;
        if (row < a->outputs) y[row] = v[i][0];
        if (row + 8 < a->outputs) y[row + 8] = v[i][1];
    }
}

__device__ __forceinline__ void multiply_block(const uint32_t (&w)[4][4], const uint4 x[2], float even[4], float odd[4])
{
    mma_bf16(even, w[0][0], w[0][1], w[0][2], w[0][3], x[0].x, x[0].y);
    mma_bf16(odd, w[1][0], w[1][1], w[1][2], w[1][3], x[0].z, x[0].w);
    mma_bf16(even, w[2][0], w[2][1], w[2][2], w[2][3], x[1].x, x[1].y);
    mma_bf16(odd, w[3][0], w[3][1], w[3][2], w[3][3], x[1].z, x[1].w);
}

/* Lets a kernel use so much shared memory. False: this card has less. fits: the kernel's own, by device: 1 yes, -1 no, 0 not
 * asked yet (asking twice does no harm). */
static inline bool shared_fits(const void *kernel, int bytes, int fits[64])
{
    int device = 0, most = 0;
    cudaGetDevice(&device);
    int *known = &fits[device & 63];
    if (!*known) {
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        *known = most >= bytes + 1024 ? 1 : -1;
        if (*known > 0) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    return *known > 0;
}

/* Up to 64 rows, as a->rows says, in one pass. False: not on this card, or not of this matrix. */
bool launch_linear_wide(const struct op_context *c, enum block_format format, const struct linear_args *a);

#endif
