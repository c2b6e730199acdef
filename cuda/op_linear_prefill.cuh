/* op_linear_prefill: what the two prefill kernels share - the job, and the SwiGLU epilogue. */
#ifndef TANDEM_OP_LINEAR_PREFILL_CUH
#define TANDEM_OP_LINEAR_PREFILL_CUH

#include "blocks.cuh"

enum { PREFILL_TILE_ROWS = 128, PREFILL_ROW_TILES = PREFILL_TILE_ROWS / BLOCK_ROWS };

/* One product. Device memory; x and y_act are the prefill areas of acts. Either y or y_act is given. */
struct prefill_job {
    const uint8_t *weights, *x;
    const float *row_scale, *group_scale, *group_min;
    int rows;      /* of x */
    int out_rows;  /* of the matrix */
    int row_tiles; /* of 128 */
    int blocks;    /* of 64 columns */
    int planes;
    int group, groups;
    float *y;
    size_t pitch;
    uint8_t *y_act;
};

/* wgmma is in this build, this card has it, and the kernel takes this matrix. */
bool op_linear_wgmma_takes(const struct op_context *c, const struct device_matrix *m);
void op_linear_wgmma_launch(const struct op_context *c, const struct device_matrix *m, const struct prefill_job *job);
void op_linear_mma_launch(const struct op_context *c, const struct device_matrix *m, const struct prefill_job *job);

#ifdef __CUDACC__

/* A tile of 16 matrix rows is 8 gate rows and 8 up rows, so a lane's fragment of 8 tokens holds gate (c[0], c[1]) and
 * up (c[2], c[3]) of tokens 2 q and 2 q + 1 for column g. Lanes g and g ^ 1 swap one token, so that each has a pair of
 * columns of one token, and put it into an act tile in shared memory (128 bytes a token). column: the first of the 8,
 * within the block of 64; columns from `valid` on are padding. */
__device__ __forceinline__ void prefill_stage_swiglu(char *tile, int token_first, int column, int valid, int lane,
                                                     const float *c, float gate_scale, float up_scale)
{
    const int g = lane >> 2, odd = g & 1;
    float v0 = swiglu_value(c[0] * gate_scale, c[2] * up_scale);
    float v1 = swiglu_value(c[1] * gate_scale, c[3] * up_scale);
    if (column + g >= valid) v0 = v1 = 0;
    const float got = __shfl_xor_sync(0xffffffffu, odd ? v0 : v1, 4);
    const float low = odd ? got : v0, high = odd ? v1 : got;
    const int token = token_first + 2 * (lane & 3) + odd, place = act_place(column + (g & 6));
    *(__nv_bfloat162 *)(tile + token * 128 + (((place >> 3) ^ (token & 7)) << 4) + (place & 7) * 2) =
        __floats2bfloat162_rn(low * ACT_SCALE, high * ACT_SCALE);
}

#endif

#endif
