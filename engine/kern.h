/* kern: the kernel interface, one backend's operations on its own memory.
 *
 * model_forward calls these and comm.h only; a backend is a filled `struct kern`. Every pointer named *_dev below is
 * memory from buffer_alloc (on the CPU plain memory). Operations never allocate and never fail on good shapes: what is
 * supported is decided while weights are loaded, where an unsupported shape is an error with the shape in its text.
 *
 * Operations are enqueued in order and may still run when the call returns; host memory they were given is read before it
 * returns. finish waits for all of them and says whether they succeeded. A backend that cannot go on keeps its first error for
 * finish and does nothing more.
 *
 * Three kinds of work memory. Rows: float32, row-major, [rows][width]. Activations (`act`): what a linear layer reads, rows x
 * width in the backend's own form, of act_bytes; written by the operation before it. Partials: a rank's share of a sum,
 * rows x width in the backend's own form, of partial_bytes; read by comm.
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
/* What becomes of a weight's product: rows (linear), a partial (linear_partial), or, of two parts of the same number of rows, gate
 * and up, an activation (linear_swiglu). */
enum kern_use { KERN_ROWS, KERN_PARTIAL, KERN_SWIGLU };

struct kern_weight; /* backend's own */
struct kern_table;  /* backend's own: an embedding */

/* Rows of an operation by provenance: the first `decode` are DECODE, the `prefill` after them PREFILL. */
struct kern_split {
    int decode, prefill;
};

/* Paged KV of one layer on one rank. A page holds KV_PAGE_TOKENS positions of all of the rank's KV heads of one layer, K
 * and V; its inner order is the backend's own. Page p of layer l starts at base + p * page_bytes. Layers share page ids. */
struct kern_kv_layer {
    void *base_dev;
    size_t page_bytes; /* kern->kv_page_bytes(...) */
};

/* One run of consecutive positions of one sequence within a batch. */
struct kern_segment {
    int row_first;       /* first row of the batch's arrays */
    int rows;            /* >= 1 */
    int position_first;  /* absolute position of row_first; of a PREFILL segment a multiple of 64 */
    const int32_t *pages; /* block table: page of positions [64 i, 64 i + 64), at least up to the last row's */
    int slot;            /* of the sequence, where it has memory beside pages */
};
/* The rows of a step or of a pass of the MTP layer. Decode rows and segments come first; a decode segment has 1 + drafts rows. */
struct kern_batch {
    const int32_t *tokens; /* [rows], each within the table; NULL where embed is not called. t < 0: the token at tokens_dev[-1 - t] */
    struct kern_split rows;
    const struct kern_segment *segments;
    int n_segments, n_decode_segments;
    const int32_t *tokens_dev; /* tokens that operations before this batch leave behind; NULL where there are none */
};
static inline int kern_rows(struct kern_split s) { return s.decode + s.prefill; }

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
/* What the sequences remember in one layer: of slot i, gdn_state_bytes at state_dev + i * state_stride (all zeros at position
 * 0), and gdn_replay_bytes at replay_dev + i * replay_stride (replay_dev NULL: no decode segment has drafts). */
struct kern_gdn_memory {
    char *state_dev, *replay_dev;
    size_t state_stride, replay_stride; /* bytes */
};

/* The largest of a row's logits that count, the lowest id where several are equal. id -1: one of them is not finite; KERN_NO_ID: none
 * counts. */
struct kern_best {
    float logit;
    int32_t id;
};
#define KERN_NO_ID INT32_MAX
/* The best of a row whose logits are dealt to ranks, in the order of their ids. */
struct kern_best kern_best_of(const struct kern_best *of_rank, int ranks);

/* What a family of operations took. */
struct kern_time {
    const char *family;
    uint64_t calls;
    double us;
};

struct kern {
    const char *name;     /* "cpu" */
    const char *numerics; /* what decides bits: "cpu-avx512"; part of the numerics identity */
    double row_cost;      /* about what a further row of a decode step costs, beside a step of one; plans go by it, bits do not */
    void *ctx;

    void (*close)(struct kern *k);
    /* Whether the operations below take rows of `width` and these shapes (NULL: the model, or the rank, has none). RC_BAD_INPUT,
     * EXIT_UNAVAILABLE: no, with the shape in the text. Weights are asked about while they are loaded. */
    enum rc (*supports)(struct kern *k, int width, const struct kern_attn_shape *a, const struct kern_gdn_shape *g, struct err *e);
    /* Waits for everything enqueued. RC_FATAL: the backend failed; the operation and its shape are in the text. */
    enum rc (*finish)(struct kern *k, struct err *e);

    /* For benchmarks. measure(k, true): from now on every operation is made on its own and timed, nothing is replayed. times: what
     * was measured since, by family, which is then forgotten; returns how many rows, at most `most`. After finish. NULL: this
     * backend cannot tell. */
    void (*measure)(struct kern *k, bool on);
    int (*times)(struct kern *k, struct kern_time *out, int most);
    /* For benchmarks: the most bytes a second that a kernel reads from memory, measured now. NULL: no such thing here. */
    double (*read_rate)(struct kern *k);

    /* ---- memory ---- */

    /* Zeroed memory, aligned to 64. RC_FATAL when there is none. Free with buffer_free (NULL is fine). */
    enum rc (*buffer_alloc)(struct kern *k, size_t n_bytes, void **out_dev, struct err *e);
    void (*buffer_free)(struct kern *k, void *dev);
    /* Host memory that operations may write while the host goes on. Free with host_free (NULL is fine). */
    enum rc (*host_alloc)(struct kern *k, size_t n_bytes, void **out, struct err *e);
    void (*host_free)(struct kern *k, void *host);
    void (*to_host)(struct kern *k, void *host, const void *dev, size_t n_bytes); /* done when it returns */
    void (*to_dev)(struct kern *k, void *dev, const void *host, size_t n_bytes);
    void (*copy)(struct kern *k, void *to_dev, const void *from_dev, size_t n_bytes); /* no overlap */
    size_t (*act_bytes)(int rows, int width);     /* of at most so many rows, however split */
    size_t (*partial_bytes)(int rows, int width);

    /* ---- weights ---- */

    /* Loads parts stacked by rows (all of one cols) into the backend's own layout. The stored bytes need not outlive the
     * call. *out is freed with weight_free. RC_BAD_INPUT, EXIT_UNAVAILABLE: unsupported shape. */
    enum rc (*weight_load)(struct kern *k, const struct kern_weight_part *parts, int n_parts, enum kern_weights how,
                           enum kern_use use, struct kern_weight **out, struct err *e);
    void (*weight_free)(struct kern *k, struct kern_weight *w); /* NULL is fine */
    size_t (*weight_bytes)(const struct kern_weight *w);
    /* The whole matrix, each row decoded exactly. Its bytes must outlive the table. */
    enum rc (*table_load)(struct kern *k, const struct quant_matrix *m, struct kern_table **out, struct err *e);
    void (*table_free)(struct kern *k, struct kern_table *t); /* NULL is fine */
    size_t (*table_bytes)(const struct kern_table *t); /* held beside the file's map */

    /* ---- a batch ---- */

    /* The rows that embed, rope_kv_append, attention and gdn work on, until the next call. What it points to stays until then. */
    void (*begin)(struct kern *k, const struct kern_batch *b);
    /* Records the operations between two calls to replay them: true when operations under this key were recorded already and
     * have now been enqueued again, on the present batch, so that the caller must leave them out; false when the caller has to
     * make them, and then call record_end. The same key means the same operations on the same buffers, for batches of the same
     * numbers of rows and segments. Between the two calls to_host, to_dev and finish are not called. record_end returns false
     * when recording failed and nothing was enqueued: the caller makes the operations once more. NULL: this backend has no use
     * for it. */
    bool (*record)(struct kern *k, uint64_t key);
    bool (*record_end)(struct kern *k);

    /* y[rows, cols]: the batch's tokens. */
    void (*embed)(struct kern *k, const struct kern_table *t, float *y_dev);

    /* qkv[rows, width] = q heads (or [q | gate] heads), k heads, v heads. Adds the bias, norms q and k, rotates both by the
     * row's position (for INT8 then by the Hadamard matrix), all in place, and stores k and v into the pages.
     * cos_sin_dev[position][rope_dim / 2][2]. */
    void (*rope_kv_append)(struct kern *k, const struct kern_attn_shape *s, const struct kern_attn_weights *w,
                           const float *cos_sin_dev, float *qkv_dev, struct kern_kv_layer kv);

    /* o, an act of n_heads * head_dim: causal attention of each row over positions 0 .. its own, keys and values as stored,
     * scale 1 / sqrt(head_dim), times sigmoid(gate) where gated. Rows of q lie in qkv as above. Decode segments may have
     * several rows (drafts), each with the bits it would have alone. */
    void (*attention)(struct kern *k, const struct kern_attn_shape *s, const float *qkv_dev, struct kern_kv_layer kv, void *o_act);
    size_t (*kv_page_bytes)(const struct kern_attn_shape *s); /* per layer */

    /* o, an act of v_heads * v_dim, from in[rows, kern_gdn_width]: convolution, l2norm, delta rule, gated norm.
     * PREFILL: chunks of KERN_GDN_CHUNK rows, the state advances over all rows.
     * DECODE: the recurrence, row by row. The first row advances the state. Further rows are drafts: they see the state as
     * advanced by the rows before them, but leave it as it was after the first row; their raw inputs are kept in the slot's
     * replay memory. The drafts' own state is the backend's scratch: it is not kept. */
    void (*gdn)(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, struct kern_gdn_memory m,
                const float *in_dev, void *o_act);
    /* Advances a slot's state over the first `rows` drafts kept by the last gdn call on it (0: nothing): the same bits as if
     * they had been decoded one by one. Of n_layers layers, w[n_layers]; m is the first one's memory, the others' follow it at
     * gdn_state_bytes and gdn_replay_bytes. */
    void (*gdn_replay)(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, int n_layers,
                       struct kern_gdn_memory m, int slot, int rows);
    size_t (*gdn_state_bytes)(const struct kern_gdn_shape *s);  /* a multiple of 64: matrices and the last conv_width - 1 raw
                                                                   rows, float32 */
    size_t (*gdn_replay_bytes)(const struct kern_gdn_shape *s); /* KERN_MAX_DRAFTS rows */

    /* ---- rows ---- */

    /* y[i] = x[i] / sqrt(mean(x[i]^2) + eps) * w; y may be x. n a multiple of 16. Where y_act is given, the same numbers also
     * go to that act of width n; y_dev may then be NULL. */
    void (*rms_norm)(struct kern *k, const float *x_dev, const float *w_dev, struct kern_split rows, int n, float eps,
                     float *y_dev, void *y_act);
    /* The same of two rows each, to the first and the last n columns of an act of width 2 n. */
    void (*rms_norm_pair)(struct kern *k, const float *first_dev, const float *first_w_dev, const float *second_dev,
                          const float *second_w_dev, struct kern_split rows, int n, float eps, void *y_act);

    /* y[rows, W.rows] = x[rows, W.cols] W^T in float32. y and x do not overlap. Weight loaded for KERN_ROWS. */
    void (*linear)(struct kern *k, const struct kern_weight *w, struct kern_split rows, const void *x_act, float *y_dev);
    /* The same product as a partial. Weight loaded for KERN_PARTIAL. */
    void (*linear_partial)(struct kern *k, const struct kern_weight *w, struct kern_split rows, const void *x_act,
                           void *y_partial);
    /* y, an act of f columns, = silu(gate) * up where [gate | up] = x W^T, W of 2 f rows. scratch_dev: swiglu_scratch_bytes of
     * memory that the call may use (NULL where that is 0). Weight loaded for KERN_SWIGLU. */
    void (*linear_swiglu)(struct kern *k, const struct kern_weight *w, struct kern_split rows, const void *x_act,
                          void *scratch_dev, void *y_act);
    size_t (*swiglu_scratch_bytes)(int rows, int f);

    /* out_dev[i] = the best of logits[i][0 .. n), whose ids are first .. first + n. Bit id % 32 of allowed_dev[id / 32] says whether
     * a logit counts. */
    void (*best)(struct kern *k, const float *logits_dev, int rows, int n, int first, const uint32_t *allowed_dev,
                 struct kern_best *out_dev);

    /* Of each row i the token of kern_best_of best_dev[i][0 .. ranks), 0 where there is none (id -1 or KERN_NO_ID), to tokens_dev[i],
     * and to tokens[i], which is from host_alloc and there after finish. */
    void (*best_tokens)(struct kern *k, const struct kern_best *best_dev, int rows, int ranks, int32_t *tokens_dev, int32_t *tokens);

    /* out[i] = a 64-bit hash of the bytes of row i; the same function at any place and time. out: from host_alloc, there after finish. */
    void (*hash_rows)(struct kern *k, const float *x_dev, int rows, int n, uint64_t *out);
};

#endif
