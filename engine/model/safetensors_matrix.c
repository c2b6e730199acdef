/* safetensors_matrix: logical tensors from what is stored: codes and their scales become one matrix.
 *
 * How a matrix is quantized is read off its element type and the tensors beside it, never off config.json: releases mix
 * formats by layer, and the patterns in their configurations overlap. For a matrix X.weight of N rows and K columns:
 *
 *   X.weight F8_E4M3 [N, K] + X.weight_scale or X.weight_scale_inv        codes times scales (the name _inv misleads):
 *       one value; [N] or [N, 1], one a row; [ceil(N / 128), ceil(K / 128)], one a block
 *   X.weight_packed U8 [N, K / 2] + X.weight_scale F8_E4M3 [N, K / 16] + X.weight_global_scale F32, which divides
 *   X.weight        U8 [N, K / 2] + X.weight_scale F8_E4M3 [N, K / 16] + X.weight_scale_2 F32, which multiplies
 *   X.weight or X.weight_packed U8 [N, K / 2] + X.weight_scale U8 or F8_E8M0 [N, K / 32]          MXFP4
 *   BF16, F16, F32                                                        as they are
 *
 * Scales of activations and of stored keys and values are left out: weights alone define the function that is computed.
 * A scale of weights that no matrix took is an error: something else must have been meant. So is a zero point or an
 * integer matrix of another scheme. Other tensors of integers are left out, and missed by name if they were needed. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"

enum { FP8_BLOCK = 128, NVFP4_GROUP = 16, MXFP4_GROUP = 32, SHAPE_TEXT = 200 };

struct resolver {
    const struct safetensors *s;
    const struct stored_tensor **by_name; /* [s->n], sorted */
    bool *taken;                          /* [s->n], as in s->tensors: a scale that a matrix took */
    struct tensor_index *out;
    struct err *e;
};

static enum rc fail(const struct resolver *r, const struct stored_tensor *t, const char *code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static enum rc fail(const struct resolver *r, const struct stored_tensor *t, const char *code, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    enum rc rc = err_set(r->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "tensor %.100s %s", t->name, text);
    err_place(r->e, t->source, 0, 0, 0);
    return rc;
}

static const char *shape_text(const struct stored_tensor *t, char out[SHAPE_TEXT])
{
    size_t len = (size_t)snprintf(out, SHAPE_TEXT, "%s [", safetensors_dtype_name(t->dtype));
    for (int i = 0; i < t->rank && len < SHAPE_TEXT; i++)
        len += (size_t)snprintf(out + len, SHAPE_TEXT - len, "%s%" PRIu64, i ? ", " : "", t->shape[i]);
    if (len < SHAPE_TEXT) snprintf(out + len, SHAPE_TEXT - len, "]");
    return out;
}

static int compare_names(const void *a, const void *b)
{
    const struct stored_tensor *const *left = a, *const *right = b;
    return strcmp((*left)->name, (*right)->name);
}

static const struct stored_tensor *find(const struct resolver *r, const char *name)
{
    for (size_t low = 0, high = r->s->n; low < high;) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, r->by_name[middle]->name);
        if (!order) return r->by_name[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

static bool ends_with(const char *name, const char *suffix)
{
    size_t n = strlen(name), k = strlen(suffix);
    return n > k && !strcmp(name + n - k, suffix);
}

static bool ends_with_one_of(const char *name, const char *const *suffixes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ends_with(name, suffixes[i])) return true;
    return false;
}

static bool is_weight_scale(const char *name)
{
    static const char *const suffixes[] = {".weight_scale", ".weight_scale_inv", ".weight_scale_2",
                                           ".weight_global_scale"};
    return ends_with_one_of(name, suffixes, sizeof suffixes / sizeof *suffixes);
}

/* Of activations, and of keys and values as a cache stores them. */
static bool is_other_scale(const char *name)
{
    static const char *const suffixes[] = {
        ".input_scale", ".input_global_scale", ".output_scale", ".q_scale", ".k_scale",
        ".v_scale",     ".activation_scale"};
    return ends_with_one_of(name, suffixes, sizeof suffixes / sizeof *suffixes);
}

/* What only schemes have that are not read: GPTQ, AWQ, integers with zero points. */
static bool is_other_scheme(const char *name)
{
    static const char *const suffixes[] = {".qweight", ".qzeros", ".g_idx", ".weight_g_idx", ".weight_zero_point"};
    return ends_with_one_of(name, suffixes, sizeof suffixes / sizeof *suffixes);
}

/* Towers for images: never used, so they may be stored in any way. */
static bool is_vision(const char *name) { return !strncmp(name, "model.visual.", 13) || !strncmp(name, "visual.", 7); }

/* The tensor beside t whose name ends in `suffix` instead of `own`; NULL: there is none. */
static const struct stored_tensor *sibling(const struct resolver *r, const struct stored_tensor *t, const char *own,
                                           const char *suffix)
{
    char name[320];
    size_t len = strlen(t->name) - strlen(own);
    if (len + strlen(suffix) >= sizeof name) return NULL;
    memcpy(name, t->name, len);
    strcpy(name + len, suffix);
    return find(r, name);
}

static void take(const struct resolver *r, const struct stored_tensor *t) { r->taken[t - r->s->tensors] = true; }

static bool is_one_value(const struct stored_tensor *t)
{
    for (int i = 0; i < t->rank; i++)
        if (t->shape[i] != 1) return false;
    return true;
}

static bool is_grid(const struct stored_tensor *t, uint64_t rows, uint64_t cols)
{
    return t->rank == 2 && t->shape[0] == rows && t->shape[1] == cols;
}

/* A view named `name`, taken over, of t's bytes; its matrix has no scales yet. */
static enum rc add_view(const struct resolver *r, const struct stored_tensor *t, char *name, enum quant_format format,
                        struct tensor_view **out)
{
    struct tensor_view *v = name ? tensor_index_add(r->out, name) : NULL;
    if (!v) return err_no_memory(r->e);
    v->format = format;
    v->bytes = t->bytes;
    v->n_bytes = t->n_bytes;
    v->n_dims = t->rank < 1 ? 1 : t->rank < MODEL_DIMS ? t->rank : MODEL_DIMS;
    for (int i = 0; i < MODEL_DIMS; i++) v->dims[i] = 1;
    for (int i = 0; i < t->rank; i++) v->dims[i < MODEL_DIMS ? i : MODEL_DIMS - 1] *= t->shape[t->rank - 1 - i];
    v->matrix = (struct quant_matrix){.format = format,
                                      .rows = v->dims[1] * v->dims[2] * v->dims[3],
                                      .cols = v->dims[0],
                                      .bytes = v->bytes,
                                      .global = 1};
    *out = v;
    return RC_OK;
}

static bool plain_format(enum safetensors_dtype d, enum quant_format *out)
{
    switch (d) {
    case SAFETENSORS_BF16: *out = QUANT_BF16; return true;
    case SAFETENSORS_F16: *out = QUANT_F16; return true;
    case SAFETENSORS_F32: *out = QUANT_F32; return true;
    default: return false;
    }
}

static enum rc check_codes(const struct resolver *r, const struct stored_tensor *t)
{
    char text[SHAPE_TEXT];
    if (t->rank == 2 && t->shape[0] && t->shape[1]) return RC_OK;
    return fail(r, t, "model_bad_shape", "is quantized, but %s is no matrix", shape_text(t, text));
}

static enum rc no_fit(const struct resolver *r, const struct stored_tensor *t, const struct stored_tensor *scale,
                      const char *expected)
{
    char codes[SHAPE_TEXT], scales[SHAPE_TEXT];
    return fail(r, t, "model_bad_scale", "is %s, but its scale %.100s is %s, not %s", shape_text(t, codes), scale->name,
                shape_text(scale, scales), expected);
}

static enum rc missing(const struct resolver *r, const struct stored_tensor *t, const char *suffixes)
{
    char text[SHAPE_TEXT];
    return fail(r, t, "model_missing_scale", "is %s, but there is no %s beside it", shape_text(t, text), suffixes);
}

static enum rc resolve_fp8(const struct resolver *r, const struct stored_tensor *t)
{
    const struct stored_tensor *scale = sibling(r, t, ".weight", ".weight_scale");
    const struct stored_tensor *inverse = sibling(r, t, ".weight", ".weight_scale_inv");
    struct tensor_view *v;
    enum rc rc = check_codes(r, t);
    if (rc != RC_OK) return rc;
    if (!scale && !inverse) return missing(r, t, "weight_scale or weight_scale_inv");
    if (scale && inverse)
        return fail(r, t, "model_bad_scale", "has both a weight_scale and a weight_scale_inv beside it");
    if (!scale) scale = inverse;
    const uint64_t n = t->shape[0], k = t->shape[1];
    const uint64_t block_rows = (n - 1) / FP8_BLOCK + 1, block_cols = (k - 1) / FP8_BLOCK + 1;
    struct quant_scales grid = {.bytes = scale->bytes};
    if (scale->dtype == SAFETENSORS_F8_E8M0)
        grid.format = QUANT_E8M0;
    else if (!plain_format(scale->dtype, &grid.format))
        return no_fit(r, t, scale, "F32, BF16, F16 or F8_E8M0");
    if (is_one_value(scale)) {
        grid.row_block = n, grid.col_block = k, grid.per_row = 1;
    } else if (is_grid(scale, n, 1) || (scale->rank == 1 && scale->shape[0] == n)) {
        grid.row_block = 1, grid.col_block = k, grid.per_row = 1;
    } else if (is_grid(scale, block_rows, block_cols)) {
        grid.row_block = grid.col_block = FP8_BLOCK, grid.per_row = block_cols;
    } else {
        char expected[SHAPE_TEXT];
        snprintf(expected, sizeof expected, "one value, [%" PRIu64 ", 1] or [%" PRIu64 ", %" PRIu64 "]", n, block_rows,
                 block_cols);
        return no_fit(r, t, scale, expected);
    }
    take(r, scale);
    if ((rc = add_view(r, t, strdup(t->name), QUANT_FP8, &v))) return rc;
    v->matrix.scales = grid;
    return RC_OK;
}

/* The factor of a whole NVFP4 matrix. */
static enum rc read_global(const struct resolver *r, const struct stored_tensor *t, const char *own, const char *suffix,
                           float *out)
{
    const struct stored_tensor *global = sibling(r, t, own, suffix);
    if (!global) return missing(r, t, suffix + 1);
    if (global->dtype != SAFETENSORS_F32 || !is_one_value(global)) return no_fit(r, t, global, "one value of F32");
    memcpy(out, global->bytes, sizeof *out);
    if (!isfinite(*out) || *out <= 0)
        return fail(r, global, "model_bad_scale", "is %g, not a number above 0", (double)*out);
    take(r, global);
    return RC_OK;
}

/* own: ".weight" or ".weight_packed", how t's name ends. */
static enum rc resolve_fp4(const struct resolver *r, const struct stored_tensor *t, const char *own)
{
    const struct stored_tensor *scale = sibling(r, t, own, ".weight_scale");
    struct tensor_view *v;
    char *name, expected[SHAPE_TEXT];
    float global = 1;
    enum rc rc = check_codes(r, t);
    if (rc != RC_OK) return rc;
    if (t->dtype != SAFETENSORS_U8) {
        char text[SHAPE_TEXT];
        return fail(r, t, "model_unsupported", "is %s; packed weights that can be read are U8", shape_text(t, text));
    }
    if (!scale) return missing(r, t, "weight_scale");
    const bool nvfp4 = scale->dtype == SAFETENSORS_F8_E4M3, divide = nvfp4 && strcmp(own, ".weight") != 0;
    if (!nvfp4 && scale->dtype != SAFETENSORS_U8 && scale->dtype != SAFETENSORS_F8_E8M0)
        return no_fit(r, t, scale, "F8_E4M3 (NVFP4), U8 or F8_E8M0 (MXFP4)");
    const uint64_t n = t->shape[0], k = 2 * t->shape[1], group = nvfp4 ? NVFP4_GROUP : MXFP4_GROUP;
    if (k % group || !is_grid(scale, n, k / group)) {
        snprintf(expected, sizeof expected, "one for %" PRIu64 " of [%" PRIu64 ", %" PRIu64 "] values", group, n, k);
        return no_fit(r, t, scale, expected);
    }
    if (nvfp4 && (rc = read_global(r, t, own, divide ? ".weight_global_scale" : ".weight_scale_2", &global))) return rc;
    take(r, scale);
    if (asprintf(&name, "%.*s.weight", (int)(strlen(t->name) - strlen(own)), t->name) < 0) name = NULL;
    if ((rc = add_view(r, t, name, QUANT_FP4_PAIRS, &v))) return rc;
    v->dims[0] = v->matrix.cols = k;
    v->matrix.scales = (struct quant_scales){scale->bytes, nvfp4 ? QUANT_FP8 : QUANT_E8M0, 1, group, k / group};
    v->matrix.global = global;
    v->matrix.divide = divide;
    return RC_OK;
}

static enum rc resolve_plain(const struct resolver *r, const struct stored_tensor *t, enum quant_format format)
{
    struct tensor_view *v;
    for (int i = 0; i < t->rank; i++)
        if (!t->shape[i]) return fail(r, t, "model_bad_shape", "has an empty dimension");
    return add_view(r, t, strdup(t->name), format, &v);
}

static bool is_integer(enum safetensors_dtype d) { return d >= SAFETENSORS_U8 && d <= SAFETENSORS_BOOL; }

static enum rc resolve_one(const struct resolver *r, const struct stored_tensor *t)
{
    const bool vision = is_vision(t->name);
    enum quant_format format;
    if (is_other_scale(t->name) || is_weight_scale(t->name)) return RC_OK;
    if (is_other_scheme(t->name) && !vision)
        return fail(r, t, "model_unsupported",
                    "belongs to a quantization that cannot be read (GPTQ, AWQ, zero points)");
    if (plain_format(t->dtype, &format)) return vision && !t->n_bytes ? RC_OK : resolve_plain(r, t, format);
    if (vision) return RC_OK;
    if (ends_with(t->name, ".weight_packed")) return resolve_fp4(r, t, ".weight_packed");
    if (ends_with(t->name, ".weight") && t->dtype == SAFETENSORS_U8) return resolve_fp4(r, t, ".weight");
    if (ends_with(t->name, ".weight") && t->dtype == SAFETENSORS_F8_E4M3) return resolve_fp8(r, t);
    if (is_integer(t->dtype)) return RC_OK;
    return fail(r, t, "model_unsupported", "is stored as %s, which cannot be read", safetensors_dtype_name(t->dtype));
}

static enum rc check_scales_taken(const struct resolver *r)
{
    for (size_t i = 0; i < r->s->n; i++) {
        const struct stored_tensor *t = &r->s->tensors[i];
        if (is_weight_scale(t->name) && !r->taken[i] && !is_vision(t->name))
            return fail(r, t, "model_bad_scale", "is the scale of no quantized matrix");
    }
    return RC_OK;
}

static enum rc sort_stored(const struct resolver *r)
{
    for (size_t i = 0; i < r->s->n; i++) r->by_name[i] = &r->s->tensors[i];
    qsort(r->by_name, r->s->n, sizeof *r->by_name, compare_names);
    for (size_t i = 1; i < r->s->n; i++)
        if (!strcmp(r->by_name[i - 1]->name, r->by_name[i]->name))
            return fail(r, r->by_name[i], "model_duplicate", "is there twice, also in %.200s",
                        r->by_name[i - 1]->source);
    return RC_OK;
}

enum rc safetensors_resolve(const struct safetensors *s, struct tensor_index *out, struct err *e)
{
    struct resolver r = {.s = s, .out = out, .e = e};
    const char *twin = NULL;
    r.by_name = malloc((s->n + 1) * sizeof *r.by_name);
    r.taken = calloc(s->n + 1, sizeof *r.taken);
    enum rc rc = r.by_name && r.taken ? sort_stored(&r) : err_no_memory(e);
    for (size_t i = 0; i < s->n && rc == RC_OK; i++) rc = resolve_one(&r, &s->tensors[i]);
    if (rc == RC_OK) rc = check_scales_taken(&r);
    if (rc == RC_OK && !tensor_index_sort(out, &twin)) rc = err_no_memory(e);
    if (rc == RC_OK && twin) /* X.weight beside X.weight_packed */
        rc = fail(&r, find(&r, twin), "model_duplicate", "is there twice, plain and packed");
    free(r.taken);
    free(r.by_name);
    return rc;
}
