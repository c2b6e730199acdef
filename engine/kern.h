/* kern: the kernel interface, one backend's operations on its own memory.
 *
 * model_forward calls these and comm.h only; a backend is a filled `struct kern`. Every pointer named *_dev below is
 * memory from buffer_alloc (on the CPU plain memory). Operations never allocate and never fail on good shapes: supports
 * is decided while weights are loaded, where an unsupported shape is an error with the shape in its text.
 *
 * Exactness, to be kept by every operation: the bits of an output row depend on its inputs, its provenance and its
 * absolute position only - never on the number of rows, their order, page placement or threads. */
#ifndef TANDEM_KERN_H
#define TANDEM_KERN_H

#include "base.h"
#include "quant.h"

/* Which reduction trees a row uses: prompt tokens are PREFILL, generated tokens DECODE, always. */
enum kern_provenance { KERN_PREFILL, KERN_DECODE };

/* How keys and values are stored. F32 takes the rounding of the store out of an answer. INT8: each run of KV_INT8_RUN values
 * of a head has one float32 scale (largest magnitude / 127, codes rounded to nearest even); keys are rotated by the
 * orthonormal Hadamard matrix of the largest power of two that divides head_dim, block by block, before they are rounded, and
 * queries likewise, so that scores are unchanged and outliers are spread. */
enum kv_format { KV_F16, KV_F32, KV_BF16, KV_INT8, KV_FORMATS };
enum { KV_INT8_RUN = 64 }; /* a shorter last run where head_dim is no multiple */
const char *kv_format_name(enum kv_format f); /* "f16" */
bool kv_format_parse(const char *name, enum kv_format *out);
size_t kv_format_bytes(enum kv_format f, int head_dim); /* of one head's key or value, scales included */

enum { KV_PAGE_TOKENS = 64 };

/* Rows and columns cut out of a stored matrix: y = x W^T has the rows of `rows`, span after span, as outputs and expects x in
 * the order of `cols`. Spans may come in any order (GGUF's tiled heads). Column spans start and end at multiples of
 * quant_matrix_group (1 for plain formats). FP8 and W8, whose groups are wide, may be cut at multiples of 16, and their last
 * span may end anywhere; FP8 with one scale a row is cut anywhere. */
struct kern_span {
    uint64_t first, count;
};
struct kern_weight_part {
    struct quant_matrix matrix;
    const struct kern_span *rows; /* until weight_load returns */
    int n_rows;
    const struct kern_span *cols;
    int n_cols;
    bool native; /* this part stays native whatever the weight is loaded as */
};
/* Native keeps the stored values exactly; W8 requantizes (quant_matrix_w8) whatever the source. */
enum kern_weights { KERN_WEIGHTS_NATIVE, KERN_WEIGHTS_W8 };

struct kern_weight; /* backend's own */

/* Paged KV of one layer on one rank. A page holds KV_PAGE_TOKENS positions of all of the rank's KV heads of one layer, K
 * and V; its inner order is the backend's own. Page p of layer l starts at base + p * page_bytes. Layers share page ids. */
struct kern_kv_layer {
    void *base_dev;
    size_t page_bytes; /* kern->kv_page_bytes(...) */
};

/* One run of consecutive positions of one sequence within a step. */
struct kern_segment {
    int row_first;       /* first row of the step's arrays */
    int rows;            /* >= 1 */
    int position_first;  /* absolute position of row_first */
    const int32_t *pages; /* block table: page of positions [64 i, 64 i + 64), at least up to the last row's */
};

struct kern_attn_shape {
    int n_heads;    /* query heads on this rank; a multiple of n_kv_heads */
    int n_kv_heads; /* > 0 */
    int head_dim;   /* a multiple of 16, at most 256 */
    int rope_dim;
    bool rope_adjacent;
    enum kv_format kv;
    bool gated;     /* a query head is [query | gate], 2 head_dim wide, and the output is multiplied by sigmoid(gate) */
};
/* What one layer's attention needs besides the matrices. NULL: this model has none. */
struct kern_attn_weights {
    const float *bias_dev;   /* [width of a qkv row] added first */
    const float *q_norm_dev; /* [head_dim] RMSNorm of every query head, before rotation */
    const float *k_norm_dev; /* [head_dim] */
    float norm_eps;
};

/* Gated DeltaNet on one rank (formulas at the head of kern_cpu_gdn.c). Channels of the convolution:
 * k_heads k_dim (queries), k_heads k_dim (keys), v_heads v_dim (values). Value head j uses key head j / (v_heads / k_heads). */
struct kern_gdn_shape {
    int k_heads, v_heads; /* v_heads a multiple of k_heads; k_heads > 0 */
    int k_dim, v_dim;     /* multiples of 16, at most 256 */
    int conv_width;       /* 2..8 */
    float norm_eps;
};
struct kern_gdn_weights {
    const float *conv_dev; /* [conv_width][channels] */
    const float *a_dev;    /* [v_heads] -exp(A_log) */
    const float *dt_dev;   /* [v_heads] */
    const float *norm_dev; /* [v_dim] */
};
enum { KERN_GDN_CHUNK = 64, KERN_MAX_DRAFTS = 5 };
static inline int kern_gdn_channels(const struct kern_gdn_shape *s)
{
    return 2 * s->k_heads * s->k_dim + s->v_heads * s->v_dim;
}
/* Width of a row of the projections: channels (raw, before the convolution), z [v_heads v_dim], b [v_heads], a [v_heads]. */
static inline int kern_gdn_width(const struct kern_gdn_shape *s)
{
    return kern_gdn_channels(s) + s->v_heads * s->v_dim + 2 * s->v_heads;
}
/* One run of rows of one sequence, as kern_segment, and what the sequence remembers in this layer. state_dev: of
 * gdn_state_bytes, all zeros at position 0. replay_dev: of gdn_replay_bytes, or NULL where rows == 1 or PREFILL. */
struct kern_gdn_segment {
    int row_first, rows, position_first;
    void *state_dev;
    void *replay_dev;
};

struct kern {
    const char *name;     /* "cpu" */
    const char *numerics; /* what decides bits: "cpu-avx512"; part of the numerics identity */
    void *ctx;

    void (*close)(struct kern *k);
    /* Zeroed memory, aligned to 64. RC_FATAL when there is none. Free with buffer_free (NULL is fine). */
    enum rc (*buffer_alloc)(struct kern *k, size_t n_bytes, void **out_dev, struct err *e);
    void (*buffer_free)(struct kern *k, void *dev);
    void (*to_host)(struct kern *k, void *host, const void *dev, size_t n_bytes);
    void (*to_dev)(struct kern *k, void *dev, const void *host, size_t n_bytes);
    void (*copy)(struct kern *k, void *to_dev, const void *from_dev, size_t n_bytes); /* no overlap */

    /* Loads parts stacked by rows (all of one cols) into the backend's own layout. The stored bytes need not outlive the
     * call. *out is freed with weight_free. RC_BAD_INPUT, EXIT_UNAVAILABLE: unsupported shape. */
    enum rc (*weight_load)(struct kern *k, const struct kern_weight_part *parts, int n_parts, enum kern_weights how,
                           struct kern_weight **out, struct err *e);
    void (*weight_free)(struct kern *k, struct kern_weight *w); /* NULL is fine */
    size_t (*weight_bytes)(const struct kern_weight *w);

    /* y[rows, cols] = the exact decoding of row ids[i] of the stored table. The table's bytes must outlive its use. */
    void (*embed)(struct kern *k, const struct quant_matrix *table, const int32_t *ids, int rows, float *y_dev);

    /* y[i] = x[i] / sqrt(mean(x[i]^2) + eps) * w. y may be x. n a multiple of 16. */
    void (*rms_norm)(struct kern *k, const float *x_dev, const float *w_dev, int rows, int n, float eps, float *y_dev);

    /* y[rows, W.rows] = x[rows, W.cols] W^T in float32. y and x do not overlap. */
    void (*linear)(struct kern *k, const struct kern_weight *w, enum kern_provenance p, const float *x_dev, int rows,
                   float *y_dev);

    /* qkv[rows, width] = q heads (or [q | gate] heads), k heads, v heads. Adds the bias, norms q and k, rotates both by the
     * row's position (for INT8 then by the Hadamard matrix), all in place, and stores k and v into the pages.
     * cos_sin_dev[position][rope_dim / 2][2]. */
    void (*rope_kv_append)(struct kern *k, const struct kern_attn_shape *s, const struct kern_attn_weights *w,
                           const struct kern_segment *segments, int n_segments, const float *cos_sin_dev, float *qkv_dev,
                           struct kern_kv_layer kv);

    /* o[rows, n_heads * head_dim]: causal attention of each row over positions 0 .. its own, keys and values as stored,
     * scale 1 / sqrt(head_dim), times sigmoid(gate) where gated. Rows of q lie in qkv as above. All segments of one call have
     * one provenance; DECODE segments may have several rows (drafts), each with the bits it would have alone. */
    void (*attention)(struct kern *k, const struct kern_attn_shape *s, enum kern_provenance p,
                      const struct kern_segment *segments, int n_segments, const float *qkv_dev,
                      struct kern_kv_layer kv, float *o_dev);
    size_t (*kv_page_bytes)(const struct kern_attn_shape *s); /* per layer */

    /* o[rows, v_heads v_dim] from in[rows, kern_gdn_width]: convolution, l2norm, delta rule, gated norm.
     * PREFILL: position_first is a multiple of KERN_GDN_CHUNK; chunks of that many rows, the state advances over all rows.
     * DECODE: the recurrence, row by row. The first row advances the state. Further rows are drafts: they see the state as
     * advanced by the rows before them, but leave it as it was after the first row; their raw inputs are kept in replay_dev.
     * The drafts' own state is the backend's scratch, a head at a time: it is not in replay_dev and ends with the call. */
    void (*gdn)(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, enum kern_provenance p,
                const struct kern_gdn_segment *segments, int n_segments, const float *in_dev, float *o_dev);
    /* Advances the state over the first `rows` drafts kept by the last gdn call on it (0: nothing): the same bits as if they had
     * been decoded one by one. */
    void (*gdn_replay)(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, void *state_dev,
                       const void *replay_dev, int rows);
    size_t (*gdn_state_bytes)(const struct kern_gdn_shape *s);  /* a multiple of 64: matrices [v_heads][k_dim][v_dim] and the
                                                                   last conv_width - 1 raw rows, float32 */
    size_t (*gdn_replay_bytes)(const struct kern_gdn_shape *s); /* KERN_MAX_DRAFTS rows */

    /* y[rows, f] = silu(gate_up[rows, 0..f)) * gate_up[rows, f..2f) */
    void (*swiglu)(struct kern *k, const float *gate_up_dev, int rows, int f, float *y_dev);

    /* out[i] = XXH3-64 of the bytes of row i. */
    void (*hash_rows)(struct kern *k, const float *x_dev, int rows, int n, uint64_t *out_host);
};

#endif
