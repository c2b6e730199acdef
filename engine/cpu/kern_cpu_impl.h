/* kern_cpu_impl: what the CPU backend's files share, private to engine/cpu.
 *
 * kern_cpu.c owns the context and the memory, kern_cpu_pack.c makes packed weights; kern_cpu_linear, kern_cpu_attn,
 * kern_cpu_gdn and kern_cpu_norm are compiled once per instruction set and each gives one constant table of functions.
 * They write only where their arguments point and into the scratch of the thread they run on. */
#ifndef TANDEM_KERN_CPU_IMPL_H
#define TANDEM_KERN_CPU_IMPL_H

#include "kern.h"

/* Packed weights. A part is cut into panels of PANEL_ROWS output rows, the last one padded with zeros. A panel holds
 * its columns in groups; a group holds PANEL_ROWS scales, then (if mins) PANEL_ROWS mins, then the codes:
 *   CODES_4, CODES_E2M1: per 8 columns 64 bytes, one 32-bit word a row, column k + i in bits 4i .. 4i + 3
 *   others: per column PANEL_ROWS codes of 8 bits (signed integers, E4M3), 16 bits (F16, BF16) or 32 bits (F32)
 * Plain formats have neither scales nor groups. Scales and mins are kept as F16 where that is exact. SCALES_E4M3 and
 * SCALES_E8M0 are bytes as stored, of E2M1 codes only: a scale is the byte's value times (or divided by) the part's global
 * factor, rounded once. */
enum { PANEL_ROWS = 16 };
enum cpu_codes { CODES_4, CODES_8, CODES_F16, CODES_BF16, CODES_F32, CODES_E2M1, CODES_E4M3 };
enum cpu_scales { SCALES_NONE, SCALES_F16, SCALES_F32, SCALES_E4M3, SCALES_E8M0 };

struct cpu_part {
    enum cpu_codes codes;
    enum cpu_scales scales;
    bool mins;
    int group;  /* columns of a scale, 16 to 128: 16 of E4M3 scales, 32 of E8M0 scales, CODES_4 and plain formats (their
                   granule of summation); the last group of FP8 and W8 may be shorter */
    bool divide; /* by global; of scales that are bytes */
    float global;
    int rows;   /* outputs */
    int panels; /* ceil(rows / PANEL_ROWS) */
    int y_first;
    size_t group_bytes; /* one full group */
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

/* kern_cpu_pack.c. The plan checks the parts and fills in all of *w (zeroed before) but its memory, which is then filled:
 * memory_bytes of zeros, aligned to 64. Errors as weight_load; the caller frees w->parts in any case. */
enum rc kern_cpu_pack_plan(const struct kern_weight_part *parts, int n_parts, enum kern_weights how,
                           struct kern_weight *w, struct err *e);
enum rc kern_cpu_pack_fill(const struct kern_weight_part *parts, enum kern_weights how, struct kern_weight *w, int threads,
                           struct err *e);

/* Limits of shapes, so that ints and scratch sizes hold. */
enum { MAX_COLS = 1 << 18, MAX_ROWS = 1 << 22, MAX_HEAD_DIM = 256 };

enum {
    DECODE_BLOCK = 16,   /* activation rows whose group sums are kept at once */
    PREFILL_BLOCK = 256, /* columns decoded to float32 at once, by PREFILL_OUTS outputs */
    PREFILL_OUTS = 32,
    SPLIT_ROWS = 128,    /* activation rows of PREFILL split at once, for VNNI or AMX */
    ATTN_Q_ROWS = 64, /* query positions of one piece of prefill attention */
    ATTN_Q_HEADS = 8, /* query heads of one piece, at most */
    ATTN_TILE = 6     /* rows of the widest attention tile */
};

/* Of gdn: rows of one key head and one value head, at most a chunk of them. */
struct cpu_gdn_scratch {
    _Alignas(64) float q[KERN_GDN_CHUNK * MAX_HEAD_DIM]; /* [rows][k_dim], normalized and scaled */
    float k[KERN_GDN_CHUNK * MAX_HEAD_DIM];              /* [rows][k_dim], normalized */
    float v[KERN_GDN_CHUNK * MAX_HEAD_DIM];              /* [rows][v_dim] values, in PREFILL then the updates u */
    float o[KERN_GDN_CHUNK * MAX_HEAD_DIM];              /* [rows][v_dim] outputs before the gated norm */
    float g[KERN_GDN_CHUNK], beta[KERN_GDN_CHUNK];       /* decay is e^g */
    union {
        struct { /* PREFILL. Rows of the square ones: [row][earlier row] */
            float k_turned[MAX_HEAD_DIM * KERN_GDN_CHUNK];  /* [k_dim][rows] */
            float k_state[KERN_GDN_CHUNK * MAX_HEAD_DIM];   /* keys times the state the chunk starts from */
            float kk[KERN_GDN_CHUNK * KERN_GDN_CHUNK], qk[KERN_GDN_CHUNK * KERN_GDN_CHUNK];
            float to_u[KERN_GDN_CHUNK * KERN_GDN_CHUNK], to_o[KERN_GDN_CHUNK * KERN_GDN_CHUNK]; /* the same, decayed */
            float from_start[KERN_GDN_CHUNK], to_end[KERN_GDN_CHUNK];                           /* decays */
        };
        float draft_state[MAX_HEAD_DIM * MAX_HEAD_DIM]; /* DECODE: [k_dim][v_dim] */
    };
};

enum { LIMBS = 3, CODED_GROUP = 32 };
/* 32 activations of a row as whole numbers of three signed bytes (kern_cpu_vnni.c). A limb's bytes lie as the codes they meet in
 * CODES_4: of eight columns first 0, 2, 4, 6, then 1, 3, 5, 7. */
struct limb_group {
    _Alignas(128) int8_t limbs[LIMBS][CODED_GROUP]; /* the highest first */
    float quantum, sum;  /* what a unit of the lowest limb is worth; of the activations. NaN where one is not finite */
    int32_t bias[LIMBS]; /* -128 times the sum of each limb, for codes that have 128 added */
};

/* One thread's working memory. */
struct cpu_scratch {
    _Alignas(64) float panel[PREFILL_BLOCK * PREFILL_OUTS];
    float keys[MAX_HEAD_DIM * KV_PAGE_TOKENS];
    float values[KV_PAGE_TOKENS * MAX_HEAD_DIM];
    float probs[ATTN_TILE * KV_PAGE_TOKENS], scaled_probs[ATTN_TILE * KV_PAGE_TOKENS];
    float sums[ATTN_Q_ROWS * ATTN_Q_HEADS * 16]; /* 16 partial sums of e^score a row */
    float maxima[ATTN_Q_ROWS * ATTN_Q_HEADS];
    struct cpu_gdn_scratch gdn;
    /* Of the first thread's scratch, shared by all: DECODE_BLOCK rows' sums over groups of 32 columns; the limbs of as many, for
     * VNNI of SPLIT_ROWS. For AMX, SPLIT_ROWS rows as three bfloat16 parts and sums, in the order of kern_cpu_amx. */
    float *group_sums;
    struct limb_group *limbs;
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

/* A segment with its slot's memory. replay_dev: NULL where rows == 1 or PREFILL. */
struct cpu_gdn_segment {
    int row_first, rows, position_first;
    void *state_dev;
    void *replay_dev;
};

struct cpu_gdn_call {
    const struct kern_gdn_shape *shape;
    const struct kern_gdn_weights *weights;
    const struct cpu_gdn_segment *segments;
    int n_segments;
    const float *in;
    float *o;
};

struct cpu_linear_ops {
    void (*decode)(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch, int threads);
    void (*prefill)(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                    int threads);
};

struct cpu_attn_ops {
    void (*rope_kv_append)(const struct cpu_attn_call *call, const struct kern_attn_weights *w, const float *cos_sin,
                           float *qkv, int threads);
    void (*prefill)(const struct cpu_attn_call *call, struct cpu_scratch *scratch, int threads);
    void (*decode)(const struct cpu_attn_call *call, struct cpu_scratch *scratch, int threads);
};

struct cpu_gdn_ops {
    void (*prefill)(const struct cpu_gdn_call *call, struct cpu_scratch *scratch, int threads);
    void (*decode)(const struct cpu_gdn_call *call, struct cpu_scratch *scratch, int threads);
    /* call: one segment, only rows and state_dev of it used; no in, no o */
    void (*replay)(const struct cpu_gdn_call *call, const void *replay_dev, struct cpu_scratch *scratch, int threads);
};

struct cpu_norm_ops {
    void (*rms_norm)(const float *x, const float *w, int rows, int n, float eps, float *y);
    void (*swiglu)(const float *gate_up, int rows, int f, float *y);
};

extern const struct cpu_linear_ops kern_cpu_linear_generic, kern_cpu_linear_avx2, kern_cpu_linear_avx512,
    kern_cpu_linear_vnni, kern_cpu_linear_amx;
extern const struct cpu_attn_ops kern_cpu_attn_generic, kern_cpu_attn_avx2, kern_cpu_attn_avx512;
extern const struct cpu_gdn_ops kern_cpu_gdn_generic, kern_cpu_gdn_avx2, kern_cpu_gdn_avx512;
extern const struct cpu_norm_ops kern_cpu_norm_generic, kern_cpu_norm_avx2, kern_cpu_norm_avx512;

#endif
