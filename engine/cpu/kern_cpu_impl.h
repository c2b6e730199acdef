/* kern_cpu_impl: what the CPU backend's files share, private to engine/cpu.
 *
 * kern_cpu.c owns the context, the memory and the packed weights; kern_cpu_linear, kern_cpu_attn and kern_cpu_norm are
 * compiled once per instruction set and each gives one constant table of functions. They write only where their
 * arguments point and into the scratch of the thread they run on. */
#ifndef TANDEM_KERN_CPU_IMPL_H
#define TANDEM_KERN_CPU_IMPL_H

#include "kern.h"

/* Packed weights. A part is cut into panels of PANEL_ROWS output rows, the last one padded with zeros. A panel holds
 * its columns in groups; a group holds PANEL_ROWS scales, then (if mins) PANEL_ROWS mins, then the codes:
 *   CODES_4: per 8 columns 64 bytes, one 32-bit word a row, column k + i in bits 4i .. 4i + 3
 *   others:  per column PANEL_ROWS codes of 8 bits (signed), 16 bits (F16, BF16) or 32 bits (F32)
 * Plain formats have neither scales nor groups. Scales and mins are kept as F16 where that is exact. */
enum { PANEL_ROWS = 16 };
enum cpu_codes { CODES_4, CODES_8, CODES_F16, CODES_BF16, CODES_F32 };
enum cpu_scales { SCALES_NONE, SCALES_F16, SCALES_F32 };

struct cpu_part {
    enum cpu_codes codes;
    enum cpu_scales scales;
    bool mins;
    int group;  /* 32 or 16 columns; for plain formats 32, the granule of summation */
    int rows;   /* outputs */
    int panels; /* ceil(rows / PANEL_ROWS) */
    int y_first;
    size_t group_bytes; /* one full group; plain formats have a shorter last one */
    size_t panel_bytes; /* a multiple of 64 */
    const uint8_t *bytes;
};

struct kern_weight {
    int rows, cols;
    bool any_mins;
    int n_parts;
    struct cpu_part *parts;
    void *memory;
    size_t memory_bytes;
};

/* Limits of shapes, so that ints and scratch sizes hold. */
enum { MAX_COLS = 1 << 18, MAX_ROWS = 1 << 22, MAX_HEAD_DIM = 256 };

enum {
    DECODE_BLOCK = 16,   /* activation rows whose group sums are kept at once */
    PREFILL_BLOCK = 256, /* columns decoded to float32 at once, by PREFILL_OUTS outputs */
    PREFILL_OUTS = 32,
    AMX_ROWS = 128,      /* activation rows split for AMX at once */
    ATTN_Q_ROWS = 64, /* query positions of one piece of prefill attention */
    ATTN_Q_HEADS = 8, /* query heads of one piece, at most */
    ATTN_TILE = 6     /* rows of the widest attention tile */
};

/* One thread's working memory. */
struct cpu_scratch {
    _Alignas(64) float panel[PREFILL_BLOCK * PREFILL_OUTS];
    float keys[MAX_HEAD_DIM * KV_PAGE_TOKENS];
    float values[KV_PAGE_TOKENS * MAX_HEAD_DIM];
    float probs[ATTN_TILE * KV_PAGE_TOKENS];
    float sums[ATTN_Q_ROWS * ATTN_Q_HEADS * 16]; /* 16 partial sums of e^score a row */
    float maxima[ATTN_Q_ROWS * ATTN_Q_HEADS];
    /* Of the first thread's scratch, for AMX: [3][AMX_ROWS][cols] bfloat16 and [AMX_ROWS][cols / 32] sums, shared by all. */
    uint16_t *split;
    float *split_sums;
};

struct cpu_attn_call {
    const struct kern_attn_shape *shape;
    const struct kern_segment *segments;
    int n_segments;
    const float *qkv;
    struct kern_kv_layer kv;
    float *o;
};

struct cpu_linear_ops {
    /* group_sums: DECODE_BLOCK * cols / 32 floats */
    void (*decode)(const struct kern_weight *w, const float *x, int rows, float *y, float *group_sums, int threads);
    void (*prefill)(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                    int threads);
};

struct cpu_attn_ops {
    void (*rope_kv_append)(const struct cpu_attn_call *call, const float *cos_sin, float *qkv, int threads);
    void (*prefill)(const struct cpu_attn_call *call, struct cpu_scratch *scratch, int threads);
    void (*decode)(const struct cpu_attn_call *call, struct cpu_scratch *scratch, int threads);
};

struct cpu_norm_ops {
    void (*rms_norm)(const float *x, const float *w, int rows, int n, float eps, float *y);
    void (*swiglu)(const float *gate_up, int rows, int f, float *y);
};

extern const struct cpu_linear_ops kern_cpu_linear_generic, kern_cpu_linear_avx2, kern_cpu_linear_avx512,
    kern_cpu_linear_amx;
extern const struct cpu_attn_ops kern_cpu_attn_generic, kern_cpu_attn_avx2, kern_cpu_attn_avx512;
extern const struct cpu_norm_ops kern_cpu_norm_generic, kern_cpu_norm_avx2, kern_cpu_norm_avx512;

#endif
