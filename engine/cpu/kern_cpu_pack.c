/* kern_cpu_pack: stored matrices become panels (layout in kern_cpu_impl.h).
 *
 * A plan chooses how each part is kept and counts bytes; filling then decodes the part's rows one by one and lays each into
 * its lane of a panel. Panels know nothing of spans: rows and columns lie in the order the part names them.
 *
 * Native weights keep the stored values exactly. Codes stay what they are wherever a kernel can read them from a register:
 * integers, E2M1 in four bits with its scales as bytes, E4M3 bytes. Rare shapes of E2M1 scales become doubled integers with
 * float32 scales. A stored NaN must not turn into a number on the way: an E4M3 code that is NaN makes the scale of its group
 * NaN, and with it, as the code itself would, every sum that the row takes part in.
 *
 * A group of a panel lies within one group of the matrix. FP8 and W8 scales reach over up to 128 columns; where spans cut
 * such a group the panel's groups are narrower and the scale is repeated. */
#include "kern_cpu_impl.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

enum { NARROWEST_GROUP = 16, PANEL_ALIGNMENT = 64 };

static uint64_t span_total(const struct kern_span *spans, int n)
{
    uint64_t total = 0;
    for (int i = 0; i < n; i++) total += spans[i].count;
    return total;
}

static bool spans_fit(const struct kern_span *spans, int n, uint64_t limit, uint64_t multiple)
{
    for (int i = 0; i < n; i++) {
        if (spans[i].first > limit || spans[i].count > limit - spans[i].first) return false;
        if (spans[i].first % multiple || spans[i].count % multiple) return false;
    }
    return n > 0;
}

/* Whether every `group` columns of the part in turn lie within one group of the matrix. The last span may end anywhere. */
static bool spans_keep_groups(const struct kern_span *spans, int n, uint64_t group)
{
    for (int i = 0; i < n; i++)
        if (spans[i].first % group || (i + 1 < n && spans[i].count % group)) return false;
    return true;
}

/* ---- the layout of a part ---- */

/* Whether all mins of a format with block-wise F16 scales are F16 values too. -8 d of Q4_0 is one unless d is huge. */
static bool mins_fit_f16(const struct kern_weight_part *p)
{
    if (p->matrix.format != QUANT_Q4_0) return true;
    enum { BLOCK = 32 };
    for (int i = 0; i < p->n_rows; i++)
        for (uint64_t r = p->rows[i].first; r < p->rows[i].first + p->rows[i].count; r++)
            for (uint64_t k = 0; k < p->matrix.cols; k += BLOCK) {
                int8_t codes[BLOCK];
                float scale, min;
                quant_matrix_codes(&p->matrix, r, k, BLOCK, codes, &scale, &min);
                if (quant_f16_to_f32(quant_f32_to_f16(min)) != min) return false;
            }
    return true;
}

static enum kern_weights how_of(const struct kern_weight_part *p, enum kern_weights how)
{
    return p->native ? KERN_WEIGHTS_NATIVE : how;
}

/* Columns for which W8 and FP8 keep one scale in the matrix. */
static uint64_t scaled_columns(const struct kern_weight_part *p, enum kern_weights how)
{
    return how == KERN_WEIGHTS_W8 ? QUANT_W8_GROUP : quant_matrix_group(&p->matrix);
}

static bool same_scale_in_a_row(const struct quant_matrix *m)
{
    return !m->scales.bytes || m->scales.col_block >= m->cols;
}

/* The group that W8 and FP8 panels have; 0 where the spans cut even the narrowest. */
static int wide_group(const struct kern_weight_part *p, enum kern_weights how)
{
    const uint64_t most = scaled_columns(p, how);
    if (how == KERN_WEIGHTS_NATIVE && same_scale_in_a_row(&p->matrix)) return (int)most;
    for (uint64_t group = most; group >= NARROWEST_GROUP; group /= 2)
        if (spans_keep_groups(p->cols, p->n_cols, group)) return (int)group;
    return 0;
}

static void choose_e2m1(const struct quant_matrix *m, struct cpu_part *p)
{
    const enum quant_format bytes = quant_matrix_e2m1_scales(m);
    p->codes = bytes == QUANT_FORMATS ? CODES_8 : CODES_E2M1;
    p->scales = bytes == QUANT_FP8 ? SCALES_E4M3 : bytes == QUANT_E8M0 ? SCALES_E8M0 : SCALES_F32;
    p->group = (int)quant_matrix_group(m);
    p->global = m->global;
    p->divide = m->divide;
}

/* How one part is kept. Formats with a fixed offset and bytes as codes are stored with the offset subtracted, so they
 * need no mins; four-bit integers stay unsigned and always have mins. */
static void choose_layout(const struct kern_weight_part *from, enum kern_weights how, struct cpu_part *p)
{
    const enum quant_format format = from->matrix.format;
    p->group = 32;
    if (how == KERN_WEIGHTS_W8 || format == QUANT_FP8) {
        p->codes = how == KERN_WEIGHTS_W8 ? CODES_8 : CODES_E4M3;
        p->scales = SCALES_F32;
        p->group = wide_group(from, how);
        return;
    }
    switch (format) {
    case QUANT_F32: p->codes = CODES_F32; return;
    case QUANT_F16: p->codes = CODES_F16; return;
    case QUANT_BF16: p->codes = CODES_BF16; return;
    case QUANT_MXFP4:
    case QUANT_NVFP4:
    case QUANT_FP4_PAIRS: choose_e2m1(&from->matrix, p); return;
    case QUANT_Q4_0:
    case QUANT_Q4_1:
    case QUANT_Q4_K:
        p->codes = CODES_4;
        p->mins = true;
        break;
    case QUANT_Q5_1:
    case QUANT_Q5_K:
        p->codes = CODES_8;
        p->mins = true;
        break;
    default: p->codes = CODES_8; break;
    }
    p->group = (int)quant_group_values(format);
    /* Scales of K-quants are products of two factors and need float32. */
    p->scales = quant_block_values(format) == 32 && mins_fit_f16(from) ? SCALES_F16 : SCALES_F32;
}

static size_t column_bytes(enum cpu_codes codes)
{
    static const size_t bytes[] = {[CODES_4] = 8,     [CODES_8] = 16,   [CODES_F16] = 32, [CODES_BF16] = 32,
                                   [CODES_F32] = 64, [CODES_E2M1] = 8, [CODES_E4M3] = 16};
    return bytes[codes];
}

static size_t scale_bytes(enum cpu_scales scales)
{
    static const size_t bytes[] = {
        [SCALES_NONE] = 0, [SCALES_F16] = 2, [SCALES_F32] = 4, [SCALES_E4M3] = 1, [SCALES_E8M0] = 1};
    return PANEL_ROWS * bytes[scales];
}

static void lay_out(const struct kern_weight_part *from, enum kern_weights how, int y_first, struct cpu_part *p)
{
    choose_layout(from, how, p);
    const size_t cols = (size_t)span_total(from->cols, from->n_cols), group = (size_t)p->group, rest = cols % group;
    const size_t head = scale_bytes(p->scales) * (p->mins ? 2 : 1);
    p->rows = (int)span_total(from->rows, from->n_rows);
    p->panels = (p->rows + PANEL_ROWS - 1) / PANEL_ROWS;
    p->y_first = y_first;
    p->group_bytes = head + group * column_bytes(p->codes);
    p->panel_bytes = cols / group * p->group_bytes + (rest ? head + rest * column_bytes(p->codes) : 0);
    p->panel_bytes = (p->panel_bytes + PANEL_ALIGNMENT - 1) / PANEL_ALIGNMENT * PANEL_ALIGNMENT;
}

/* ---- the plan of a weight ---- */

static enum rc bad_shape(const struct kern_weight_part *p, const char *what, struct err *e)
{
    return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape",
                   "cpu backend: %s: %s %" PRIu64 " x %" PRIu64 ", of it %" PRIu64 " x %" PRIu64, what,
                   quant_name(p->matrix.format), p->matrix.rows, p->matrix.cols, span_total(p->rows, p->n_rows),
                   span_total(p->cols, p->n_cols));
}

static bool columns_fit(const struct kern_weight_part *p, enum kern_weights how)
{
    const struct quant_matrix *m = &p->matrix;
    if (how == KERN_WEIGHTS_W8 || m->format == QUANT_FP8) return wide_group(p, how) != 0;
    const size_t group = quant_matrix_group(m);
    return group && spans_fit(p->cols, p->n_cols, m->cols, group);
}

/* A slice of a matrix may hold less than is asked for. */
static bool is_stored(const struct kern_weight_part *p)
{
    const struct quant_span none = {0, 0};
    for (int i = 0; i < p->n_rows; i++)
        if (!quant_matrix_holds(&p->matrix, (struct quant_span){p->rows[i].first, p->rows[i].count}, none)) return false;
    for (int i = 0; i < p->n_cols; i++)
        if (!quant_matrix_holds(&p->matrix, none, (struct quant_span){p->cols[i].first, p->cols[i].count})) return false;
    return true;
}

static enum rc check_part(const struct kern_weight_part *p, enum kern_weights how, uint64_t cols, struct err *e)
{
    size_t row_bytes;
    const struct quant_matrix *m = &p->matrix;
    if (m->rows > MAX_ROWS || !spans_fit(p->rows, p->n_rows, m->rows, 1)) return bad_shape(p, "row range", e);
    if (m->cols > MAX_COLS || !spans_fit(p->cols, p->n_cols, m->cols, 1)) return bad_shape(p, "column range", e);
    const uint64_t n_rows = span_total(p->rows, p->n_rows), n_cols = span_total(p->cols, p->n_cols);
    if (n_cols != cols) return bad_shape(p, "stacked parts differ in columns", e);
    if (!n_cols || n_cols > MAX_COLS) return bad_shape(p, "column count", e);
    if (!n_rows || n_rows > MAX_ROWS) return bad_shape(p, "row count", e);
    if (!quant_row_bytes(m->format, m->cols, &row_bytes)) return bad_shape(p, "row length", e);
    if (!columns_fit(p, how)) return bad_shape(p, "columns cut a group", e);
    if (!is_stored(p)) return bad_shape(p, "rows or columns that are not stored", e);
    return RC_OK;
}

enum rc kern_cpu_pack_plan(const struct kern_weight_part *parts, int n_parts, enum kern_weights how,
                           struct kern_weight *w, struct err *e)
{
    if (n_parts < 1)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape", "cpu backend: a weight of no parts");
    w->parts = calloc((size_t)n_parts, sizeof *w->parts);
    if (!w->parts) return err_no_memory(e);
    for (int i = 0; i < n_parts; i++) {
        const enum kern_weights part_how = how_of(&parts[i], how);
        enum rc rc = check_part(&parts[i], part_how, span_total(parts[0].cols, parts[0].n_cols), e);
        if (rc != RC_OK) return rc;
        if (span_total(parts[i].rows, parts[i].n_rows) > (uint64_t)(MAX_ROWS - w->rows))
            return bad_shape(&parts[i], "row count", e);
        struct cpu_part *p = &w->parts[i];
        lay_out(&parts[i], part_how, w->rows, p);
        w->rows += p->rows;
        w->any_mins = w->any_mins || p->mins;
        size_t bytes;
        if (!size_mul((size_t)p->panels, p->panel_bytes, &bytes) || !size_add(w->memory_bytes, bytes, &w->memory_bytes))
            return bad_shape(&parts[i], "size", e);
    }
    w->cols = (int)span_total(parts[0].cols, parts[0].n_cols);
    w->n_parts = n_parts;
    return RC_OK;
}

/* ---- rows into lanes ---- */

/* One row in the order of the part's columns: codes, and of each of the panel's groups what the layout wants. */
struct row_work {
    uint8_t *codes; /* signed where the layout's are */
    float *scales, *mins;
    uint8_t *scale_bytes;
};

/* Of `threads` rows, in one piece of memory: that of the first one's scales. */
static struct row_work *row_works_new(size_t cols, int threads)
{
    const size_t groups = cols / NARROWEST_GROUP + 2, n = (size_t)threads;
    struct row_work *works = calloc(n, sizeof *works);
    float *memory = calloc(n, 2 * groups * sizeof *memory + groups + cols);
    if (!works || !memory) {
        free(works);
        free(memory);
        return NULL;
    }
    uint8_t *bytes = (uint8_t *)(memory + 2 * groups * n);
    for (size_t i = 0; i < n; i++) {
        works[i].scales = memory + 2 * groups * i;
        works[i].mins = works[i].scales + groups;
        works[i].scale_bytes = bytes + (groups + cols) * i;
        works[i].codes = works[i].scale_bytes + groups;
    }
    return works;
}

static void row_works_free(struct row_work *works)
{
    if (works) free(works->scales);
    free(works);
}

/* W8 and FP8: the columns of one span, from column `done` of the part on. `mins`, which neither has, takes the scales of the
 * matrix's groups until they are handed to the panel's. */
static void read_wide_span(const struct kern_weight_part *from, enum kern_weights how, uint64_t row,
                           const struct kern_span *s, const struct cpu_part *p, size_t done, struct row_work *work)
{
    const size_t n = (size_t)s->count, group = (size_t)p->group, reach = (size_t)scaled_columns(from, how);
    if (how == KERN_WEIGHTS_W8)
        quant_matrix_w8(&from->matrix, row, s->first, n, (int8_t *)work->codes + done, work->mins);
    else
        quant_matrix_fp8(&from->matrix, row, s->first, n, work->codes + done, work->mins);
    for (size_t k = 0; k < n; k += group - (done + k) % group)
        work->scales[(done + k) / group] = work->mins[(s->first % reach + k) / reach];
    if (p->codes != CODES_E4M3) return;
    for (size_t k = done; k < done + n; k++)
        if ((work->codes[k] & 0x7f) == 0x7f) work->scales[k / group] = NAN;
}

static int code_offset(enum quant_format f) { return f == QUANT_Q5_0 ? 16 : f == QUANT_Q6_K ? 32 : 0; }

/* The columns of one span of a format with groups of its own. */
static void read_span(const struct kern_weight_part *from, uint64_t row, const struct kern_span *s, const struct cpu_part *p,
                      size_t done, struct row_work *work)
{
    const struct quant_matrix *m = &from->matrix;
    const size_t n = (size_t)s->count, first = done / (size_t)p->group, end = (done + n) / (size_t)p->group;
    if (p->codes == CODES_E2M1) {
        quant_matrix_e2m1(m, row, s->first, n, work->codes + done, work->scale_bytes + first);
        for (size_t g = first; p->scales == SCALES_E4M3 && g < end; g++)
            if (work->scale_bytes[g] == 0xff) work->scale_bytes[g] = 0x7f; /* kernels know the positive NaN only */
        return;
    }
    quant_matrix_codes(m, row, s->first, n, (int8_t *)work->codes + done, work->scales + first, work->mins + first);
    const int offset = code_offset(m->format);
    for (size_t k = done; offset && k < done + n; k++) work->codes[k] = (uint8_t)(work->codes[k] - offset);
}

static uint8_t *put_factor(enum cpu_scales scales, float value, uint8_t byte, int lane, uint8_t *at)
{
    const uint16_t half = quant_f32_to_f16(value);
    switch (scales) {
    case SCALES_F16: memcpy(at + 2 * lane, &half, sizeof half); break;
    case SCALES_F32: memcpy(at + 4 * lane, &value, sizeof value); break;
    default: at[lane] = byte; break;
    }
    return at + scale_bytes(scales);
}

static void put_row(const struct cpu_part *p, const struct row_work *from, size_t cols, int lane, uint8_t *panel)
{
    const size_t group = (size_t)p->group;
    for (size_t k = 0, g = 0; k < cols; k += group, g++, panel += p->group_bytes) {
        uint8_t *at = put_factor(p->scales, from->scales[g], from->scale_bytes[g], lane, panel);
        if (p->mins) at = put_factor(p->scales, from->mins[g], 0, lane, at);
        const size_t n = cols - k < group ? cols - k : group;
        const uint8_t *code = from->codes + k;
        if (p->codes == CODES_4 || p->codes == CODES_E2M1)
            for (size_t j = 0; j < n; j++)
                at[j / 8 * 64 + (size_t)lane * 4 + j % 8 / 2] |= (uint8_t)(code[j] << j % 2 * 4);
        else
            for (size_t j = 0; j < n; j++) at[j * PANEL_ROWS + (size_t)lane] = code[j];
    }
}

/* Plain formats: the stored numbers of one span, from column `done` of the part on. */
static void put_plain_span(const struct quant_matrix *m, uint64_t row, const struct kern_span *s, const struct cpu_part *p,
                           size_t done, int lane, uint8_t *panel)
{
    const size_t value_bytes = p->codes == CODES_F32 ? 4 : 2;
    const uint8_t *stored = s->count ? quant_matrix_at(m, row, s->first) : NULL;
    for (size_t k = 0; k < s->count; k++)
        memcpy(panel + ((done + k) * PANEL_ROWS + (size_t)lane) * value_bytes, stored + k * value_bytes, value_bytes);
}

static void pack_row(const struct kern_weight_part *from, enum kern_weights how, uint64_t row, const struct cpu_part *p,
                     struct row_work *work, int lane, uint8_t *panel)
{
    size_t done = 0;
    for (int i = 0; i < from->n_cols; i++) {
        const struct kern_span *s = &from->cols[i];
        if (p->scales == SCALES_NONE)
            put_plain_span(&from->matrix, row, s, p, done, lane, panel);
        else if (how == KERN_WEIGHTS_W8 || from->matrix.format == QUANT_FP8)
            read_wide_span(from, how, row, s, p, done, work);
        else
            read_span(from, row, s, p, done, work);
        done += (size_t)s->count;
    }
    if (p->scales != SCALES_NONE) put_row(p, work, done, lane, panel);
}

/* The stored row that is output `r` of the part. */
static uint64_t stored_row(const struct kern_weight_part *from, int r)
{
    const struct kern_span *s = from->rows;
    uint64_t left = (uint64_t)r;
    for (; left >= s->count; s++) left -= s->count;
    return s->first + left;
}

static void pack_panel(const struct kern_weight_part *from, enum kern_weights how, const struct cpu_part *p,
                       struct row_work *work, int panel, uint8_t *to)
{
    for (int lane = 0, r = panel * PANEL_ROWS; lane < PANEL_ROWS && r < p->rows; lane++, r++)
        pack_row(from, how, stored_row(from, r), p, work, lane, to + (size_t)panel * p->panel_bytes);
}

enum rc kern_cpu_pack_fill(const struct kern_weight_part *parts, enum kern_weights how, struct kern_weight *w, int threads,
                           struct err *e)
{
    struct row_work *works = row_works_new((size_t)w->cols, threads);
    if (!works) return err_no_memory(e);
    uint8_t *to = w->memory;
    for (int i = 0; i < w->n_parts; i++) {
        const enum kern_weights part_how = how_of(&parts[i], how);
        struct cpu_part *p = &w->parts[i];
        p->bytes = to;
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int panel = 0; panel < p->panels; panel++)
            pack_panel(&parts[i], part_how, p, &works[omp_get_thread_num()], panel, to);
#else
        for (int panel = 0; panel < p->panels; panel++) pack_panel(&parts[i], part_how, p, works, panel, to);
#endif
        to += (size_t)p->panels * p->panel_bytes;
    }
    row_works_free(works);
    return RC_OK;
}
