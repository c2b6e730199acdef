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

/* How keys and values are stored. F32 doubles the memory and takes the rounding of the store out of an answer. */
enum kv_format { KV_F16, KV_F32, KV_FORMATS };
const char *kv_format_name(enum kv_format f); /* "f16" */
bool kv_format_parse(const char *name, enum kv_format *out);
size_t kv_format_bytes(enum kv_format f); /* of one value */

enum { KV_PAGE_TOKENS = 64 };

/* A matrix [rows, cols] cut out of a stored tensor: y = x W^T uses its rows as outputs. */
struct kern_weight_part {
    enum quant_format format;
    const void *bytes;    /* the whole stored tensor, row-major, rows of tensor_cols values */
    uint64_t tensor_cols; /* stored row length */
    uint64_t row_first, rows;
    uint64_t col_first, cols; /* multiples of the format's group (16 or 32; 1 for plain formats) */
};

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
    enum rc (*weight_load)(struct kern *k, const struct kern_weight_part *parts, int n_parts, struct kern_weight **out,
                           struct err *e);
    void (*weight_free)(struct kern *k, struct kern_weight *w); /* NULL is fine */
    size_t (*weight_bytes)(const struct kern_weight *w);

    /* y[rows, cols] = the exact decoding of row ids[i] of the stored table. The table's bytes must outlive its use. */
    void (*embed)(struct kern *k, const struct kern_weight_part *table, const int32_t *ids, int rows, float *y_dev);

    /* y[i] = x[i] / sqrt(mean(x[i]^2) + eps) * w. y may be x. n a multiple of 16. */
    void (*rms_norm)(struct kern *k, const float *x_dev, const float *w_dev, int rows, int n, float eps, float *y_dev);

    /* y[rows, W.rows] = x[rows, W.cols] W^T in float32. y and x do not overlap. */
    void (*linear)(struct kern *k, const struct kern_weight *w, enum kern_provenance p, const float *x_dev, int rows,
                   float *y_dev);

    /* qkv[rows, (n_heads + 2 n_kv_heads) head_dim] = q heads, k heads, v heads. Rotates q (in place) and k by the row's
     * position, stores k and v into the pages. cos_sin_dev[position][rope_dim / 2][2]. */
    void (*rope_kv_append)(struct kern *k, const struct kern_attn_shape *s, const struct kern_segment *segments,
                           int n_segments, const float *cos_sin_dev, float *qkv_dev, struct kern_kv_layer kv);

    /* o[rows, n_heads * head_dim]: causal attention of each row over positions 0 .. its own, keys and values as stored,
     * scale 1 / sqrt(head_dim). Rows of q lie in qkv as above. All segments of one call have one provenance. */
    void (*attention)(struct kern *k, const struct kern_attn_shape *s, enum kern_provenance p,
                      const struct kern_segment *segments, int n_segments, const float *qkv_dev,
                      struct kern_kv_layer kv, float *o_dev);
    size_t (*kv_page_bytes)(const struct kern_attn_shape *s); /* per layer */

    /* y[rows, f] = silu(gate_up[rows, 0..f)) * gate_up[rows, f..2f) */
    void (*swiglu)(struct kern *k, const float *gate_up_dev, int rows, int f, float *y_dev);

    /* out[i] = XXH3-64 of the bytes of row i. */
    void (*hash_rows)(struct kern *k, const float *x_dev, int rows, int n, uint64_t *out_host);
};

#endif
