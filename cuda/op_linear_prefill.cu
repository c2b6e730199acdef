/* op_linear_prefill: products of the prefill rows. One chain over all columns in block order (for group scales one
 * chain a group), by wgmma where the card and the format have it and by mma.sync else: the same order gives the same
 * bits, which the vendor does not promise and op_linear_prefill_agrees looks at. */
#include "op_linear_prefill.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct prefill_job job_of(const struct device_matrix *m, const void *act, struct kern_split split)
{
    struct prefill_job job = {};
    job.weights = m->blocks_dev;
    job.x = (const uint8_t *)act + act_prefill_offset(split.decode, m->cols);
    job.row_scale = m->row_scale_dev;
    job.group_scale = m->group_scale_dev;
    job.group_min = m->mins ? m->group_min_dev : NULL;
    job.rows = split.prefill;
    job.out_rows = m->rows;
    job.row_tiles = m->tiles / PREFILL_ROW_TILES;
    job.blocks = m->blocks;
    job.planes = m->format == BLOCK_BF16 ? m->planes : 1;
    job.group = m->group;
    job.groups = block_groups(m->blocks, m->group);
    return job;
}

static void launch(const struct op_context *c, const struct device_matrix *m, const struct prefill_job *job)
{
    if (!job->rows) return;
    if (op_linear_wgmma_takes(c, m))
        op_linear_wgmma_launch(c, m, job);
    else
        op_linear_mma_launch(c, m, job);
}

void op_linear_prefill(const struct op_context *c, const struct device_matrix *m, const void *act,
                       struct kern_split split, float *y, size_t pitch)
{
    struct prefill_job job = job_of(m, act, split);
    job.y = y;
    job.pitch = pitch;
    launch(c, m, &job);
}

void op_linear_prefill_swiglu(const struct op_context *c, const struct device_matrix *m, const void *act,
                              struct kern_split split, void *y_act)
{
    struct prefill_job job = job_of(m, act, split);
    job.y_act = (uint8_t *)y_act + act_prefill_offset(split.decode, m->rows / 2);
    launch(c, m, &job);
}

void op_linear_prefill_mma(const struct op_context *c, const struct device_matrix *m, const void *act,
                           struct kern_split split, float *y, size_t pitch)
{
    struct prefill_job job = job_of(m, act, split);
    job.y = y;
    job.pitch = pitch;
    if (job.rows) op_linear_mma_launch(c, m, &job);
}

/* ---- the self-test ---- */

enum { AGREE_ROWS = 128, AGREE_COLS = 2048, AGREE_TOKENS = 256, AGREE_GROUP = 128 };

static uint32_t hash_next(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 33);
}

/* Any byte is a code; NVFP4 scale bytes are kept to those of finite numbers, bfloat16 to magnitudes around 1. */
static void random_weights(enum block_format format, uint64_t *state, uint8_t *bytes, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) {
        bytes[i] = (uint8_t)hash_next(state);
        if (format == BLOCK_NVFP4 && i % BLOCK_NVFP4_BYTES >= BLOCK_SLAB_BYTES) bytes[i] = 0x60 + bytes[i] % 0x8f;
        if (format == BLOCK_BF16 && i % 2) bytes[i] = (uint8_t)((bytes[i] & 0x83) | 0x3c);
    }
}

/* Runs both kernels on a matrix whose device memory begins at dev. */
static bool run_both(const struct op_context *c, enum block_format format, int group, char *dev, char *host)
{
    const int blocks = AGREE_COLS / BLOCK_COLS, tiles = AGREE_ROWS / BLOCK_ROWS;
    const size_t weight_bytes = (size_t)tiles * blocks * block_bytes(format, 1),
                 act_bytes = (size_t)AGREE_TOKENS * AGREE_COLS * 2;
    const size_t scale_bytes = (size_t)(AGREE_ROWS + AGREE_ROWS * block_groups(blocks, group)) * sizeof(float);
    const size_t y_bytes = (size_t)AGREE_ROWS * AGREE_TOKENS * sizeof(float);
    char *const act_dev = dev + weight_bytes, *const scale_dev = act_dev + act_bytes,
                *const y_dev = scale_dev + scale_bytes;
    uint64_t state = 1 + (uint64_t)format;

    struct device_matrix m = {};
    m.format = format, m.rows = AGREE_ROWS, m.cols = AGREE_COLS, m.tiles = tiles, m.blocks = blocks;
    m.planes = 1, m.group = group, m.halves = 1;
    m.blocks_dev = (const uint8_t *)dev;
    m.row_scale_dev = (const float *)scale_dev;
    m.group_scale_dev = group ? m.row_scale_dev + AGREE_ROWS : NULL;
    if (!op_linear_wgmma_takes(c, &m)) return true;

    random_weights(format, &state, (uint8_t *)host, weight_bytes);
    uint16_t *act = (uint16_t *)(host + weight_bytes);
    for (size_t i = 0; i < act_bytes / 2; i++)
        act[i] = (uint16_t)((hash_next(&state) & 0x83ff) | 0x5a00); /* 2^53 .. 2^57 */
    float *scales = (float *)(host + weight_bytes + act_bytes);
    for (size_t i = 0; i < scale_bytes / sizeof(float); i++)
        scales[i] = (float)(1 + (hash_next(&state) & 1023)) * 0x1p-10f;
    cudaMemcpyAsync(dev, host, weight_bytes + act_bytes + scale_bytes, cudaMemcpyHostToDevice, c->stream);

    const struct kern_split split = {0, AGREE_TOKENS};
    op_linear_prefill(c, &m, act_dev, split, (float *)y_dev, AGREE_ROWS);
    op_linear_prefill_mma(c, &m, act_dev, split, (float *)(y_dev + y_bytes), AGREE_ROWS);
    cudaMemcpyAsync(host, y_dev, 2 * y_bytes, cudaMemcpyDeviceToHost, c->stream);
    if (cudaGetLastError() != cudaSuccess || cudaStreamSynchronize(c->stream) != cudaSuccess) return false;
    return memcmp(host, host + y_bytes, y_bytes) == 0;
}

bool op_linear_prefill_agrees(const struct op_context *c, struct err *e)
{
    static const struct {
        enum block_format format;
        int group;
        const char *name;
    } cases[] = {{BLOCK_NVFP4, 0, "NVFP4"},
                 {BLOCK_FP8, 0, "FP8"},
                 {BLOCK_BF16, 0, "BF16"},
                 {BLOCK_FP8, AGREE_GROUP, "FP8 in groups"},
                 {BLOCK_INT8, AGREE_GROUP, "INT8 in groups"}};
    const size_t n_bytes = 4u << 20;
    char *dev = NULL, *host = (char *)malloc(n_bytes);
    bool same = host && cudaMalloc((void **)&dev, n_bytes) == cudaSuccess;
    if (!same) err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "no_memory", "no memory for the self-test of matrix products");
    for (size_t i = 0; same && i < sizeof cases / sizeof *cases; i++) {
        same = run_both(c, cases[i].format, cases[i].group, dev, host);
        if (!same)
            err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "numerics",
                    "matrix products by wgmma and by mma.sync differ on this card (%s)", cases[i].name);
    }
    cudaFree(dev);
    free(host);
    return same;
}
