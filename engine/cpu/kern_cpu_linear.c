/* kern_cpu_linear: y = x W^T over packed panels (kern_cpu_impl.h), compiled once per instruction set.
 *
 * Outputs lie in vector lanes, so an output is a chain over columns and never a sum across lanes; which rows share a
 * call, which thread runs a panel and how a tile ends change no bit.
 *
 * DECODE streams the weights once: codes become floats in registers and meet up to eight activation rows each.
 *   per group: s = chains over the codes;  acc = scale * s + acc;  acc = min * (sum of x over the group) + acc
 * The bound is the memory's speed, so the stream is prefetched and scales stay F16 or bytes where that is exact. E4M3 codes
 * are read as numbers 2^-8 of theirs; a group's chains are brought back before they meet the scale.
 *
 * PREFILL decodes PREFILL_BLOCK columns of PREFILL_OUTS outputs to float32 in the thread's scratch and multiplies them
 * by all rows with a register tile. Every output is one chain over all columns; between blocks it rests in y. */
#include "kern_cpu_impl.h"
#include "kern_cpu_vec.h"

#include <math.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

enum {
    DECODE_ROWS = 8, /* activation rows that share one unpacking, at most */
    PREFETCH_BYTES = 4096,
    PIECE = 32,         /* columns between two bursts of prefetches */
    PREFILL_ROWS = 144, /* activation rows that stay in the second-level cache while all panels pass */
#if KERN_ISA_ID == 2
    CHAINS = 2, /* partial chains of a group's dot product */
    TILE_ROWS = 12,
    TILE_BLOCKS = 2
#elif KERN_ISA_ID == 1
    CHAINS = 1,
    TILE_ROWS = 6,
    TILE_BLOCKS = 1
#else
    CHAINS = 1,
    TILE_ROWS = 2,
    TILE_BLOCKS = 1
#endif
};

#define E4M3_UNIT 0x1p8f /* what column_codes leaves out */

KERN_INLINE bool in_nibbles(enum cpu_codes codes) { return codes == CODES_4 || codes == CODES_E2M1; }

KERN_INLINE size_t column_bytes(enum cpu_codes codes)
{
    if (in_nibbles(codes)) return PANEL_ROWS / 2;
    return PANEL_ROWS * (codes == CODES_8 || codes == CODES_E4M3 ? 1 : codes == CODES_F32 ? 4 : 2);
}

/* Codes of one column of a panel as floats; at is the group's first code, column the column within it. */
KERN_INLINE vf column_codes(enum cpu_codes codes, const uint8_t *at, int column, int v)
{
    const uint8_t *row = at + (size_t)column * column_bytes(codes);
    if (codes == CODES_8) return vf_from_i8((const int8_t *)row + v * VF);
    if (codes == CODES_E4M3) return vf_from_e4m3(row + v * VF);
    if (codes == CODES_F16) return vf_from_f16((const uint16_t *)(const void *)row + v * VF);
    if (codes == CODES_BF16) return vf_from_bf16((const uint16_t *)(const void *)row + v * VF);
    return vf_load((const float *)(const void *)row + v * VF);
}

/* The i-th column of each lane's word. */
KERN_INLINE vf nibble_code(enum cpu_codes codes, vi word, int i)
{
    return codes == CODES_4 ? vf_nibble(word, i) : vf_e2m1(word, i);
}

/* NaN bytes give NaN. */
KERN_INLINE vf byte_scale(const struct cpu_part *p, enum cpu_scales scales, const uint8_t *at, int v)
{
    const vf global = vf_set1(p->global), nan = vf_set1(NAN);
    vf scale;
    if (scales == SCALES_E4M3) {
        scale = vf_from_e4m3(at + v * VF) * vf_set1(E4M3_UNIT);
        scale = vf_below(scale, vf_set1(480), scale, nan);
    } else {
        scale = vf_from_e8m0(at + v * VF);
        scale = vf_below(scale, vf_set1(INFINITY), scale, nan);
    }
    return p->divide ? scale / global : scale * global;
}

KERN_INLINE vf scale_load(const struct cpu_part *p, enum cpu_scales scales, const uint8_t *at, int v)
{
    if (scales == SCALES_NONE) return vf_zero();
    if (scales == SCALES_F16) return vf_from_f16((const uint16_t *)(const void *)at + v * VF);
    if (scales == SCALES_F32) return vf_load((const float *)(const void *)at + v * VF);
    return byte_scale(p, scales, at, v);
}

KERN_INLINE size_t scale_bytes(enum cpu_scales scales)
{
    if (scales == SCALES_NONE) return 0;
    return PANEL_ROWS * (scales == SCALES_F32 ? 4 : scales == SCALES_F16 ? 2 : 1);
}

/* What the compiler must know to make a lean kernel; always a constant. */
struct panel_kind {
    enum cpu_codes codes;
    enum cpu_scales scales;
    bool mins;
};

struct dot_call {
    const struct cpu_part *part;
    int cols;
    const float *x;          /* rows of cols values */
    const float *group_sums; /* rows of cols / 32 values; used where the part has mins */
};

/* s[r][chain][v] += codes * x over n columns of a group. */
KERN_INLINE void group_dot(enum cpu_codes codes, const uint8_t *at, int n, const float *x, size_t ldx, int rows,
                           vf s[][CHAINS][NV])
{
    if (in_nibbles(codes)) {
        for (int j = 0; j < n; j += 8) {
            vi word[NV];
            KERN_EACH (v, NV) word[v] = vi_load(at + (size_t)j * 8 + (size_t)v * VF * 4);
            KERN_EACH (i, 8) {
                KERN_EACH (v, NV) {
                    vf code = nibble_code(codes, word[v], i);
                    KERN_EACH (r, rows)
                        s[r][i % CHAINS][v] =
                            vf_fma(code, vf_set1(x[(size_t)r * ldx + (size_t)(j + i)]), s[r][i % CHAINS][v]);
                }
            }
        }
        return;
    }
    int j = 0;
    for (; j + CHAINS <= n; j += CHAINS) {
        KERN_EACH (i, CHAINS) {
            KERN_EACH (v, NV) {
                vf code = column_codes(codes, at, j + i, v);
                KERN_EACH (r, rows)
                    s[r][i][v] = vf_fma(code, vf_set1(x[(size_t)r * ldx + (size_t)(j + i)]), s[r][i][v]);
            }
        }
    }
    for (; j < n; j++) { /* only the odd last column of a format without blocks */
        KERN_EACH (v, NV) {
            vf code = column_codes(codes, at, j, v);
            KERN_EACH (r, rows) s[r][0][v] = vf_fma(code, vf_set1(x[(size_t)r * ldx + (size_t)j]), s[r][0][v]);
        }
    }
}

/* Columns of a group: a constant where the kind has one. */
KERN_INLINE int group_of(struct panel_kind kind, const struct cpu_part *p)
{
    if (kind.scales == SCALES_E4M3) return 16;
    return kind.codes == CODES_4 || kind.scales == SCALES_E8M0 ? 32 : p->group;
}

/* out[rows][PANEL_ROWS] = x * panel^T. rows is a constant. */
KERN_INLINE void panel_dot(struct panel_kind kind, int rows, const struct dot_call *c, const uint8_t *at, float *out)
{
    const size_t ldx = (size_t)c->cols, n_sums = (size_t)c->cols / 32;
    const size_t step = c->part->group_bytes, head = scale_bytes(kind.scales);
    const int group = group_of(kind, c->part);
    vf acc[DECODE_ROWS][NV];
    KERN_EACH (r, rows)
        KERN_EACH (v, NV) acc[r][v] = vf_zero();
    size_t g = 0;
    for (int k = 0; k < c->cols; k += group, g++, at += step) {
        const uint8_t *codes = at + head * (kind.mins ? 2 : 1);
        const int n = in_nibbles(kind.codes) || c->cols - k >= group ? group : c->cols - k;
        size_t fetched = 0;
        vf s[DECODE_ROWS][CHAINS][NV];
        KERN_EACH (r, rows)
            KERN_EACH (i, CHAINS)
                KERN_EACH (v, NV) s[r][i][v] = vf_zero();
        for (int j = 0; j < n; j += PIECE) {
            const size_t piece_end = j + PIECE < n ? (size_t)(j + PIECE) * column_bytes(kind.codes) : step;
            for (; fetched < piece_end; fetched += 64) __builtin_prefetch(at + PREFETCH_BYTES + fetched, 0, 3);
            group_dot(kind.codes, codes + (size_t)j * column_bytes(kind.codes), n - j < PIECE ? n - j : PIECE, c->x + k + j,
                      ldx, rows, s);
        }
        KERN_EACH (v, NV) {
            vf scale = scale_load(c->part, kind.scales, at, v);
            vf min = kind.mins ? scale_load(c->part, kind.scales, at + head, v) : vf_zero();
            KERN_EACH (r, rows) {
                vf sum = s[r][0][v];
                if (CHAINS == 2) sum += s[r][CHAINS - 1][v];
                if (kind.codes == CODES_E4M3) sum *= vf_set1(E4M3_UNIT);
                if (kind.scales == SCALES_NONE)
                    acc[r][v] += sum;
                else
                    acc[r][v] = vf_fma(scale, sum, acc[r][v]);
                if (kind.mins) acc[r][v] = vf_fma(min, vf_set1(c->group_sums[(size_t)r * n_sums + g]), acc[r][v]);
            }
        }
    }
    KERN_EACH (r, rows)
        KERN_EACH (v, NV) vf_store(out + r * PANEL_ROWS + v * VF, acc[r][v]);
}

typedef void panel_fn(const struct dot_call *c, const uint8_t *at, float *out);

#define PANEL_FN(name, rows, ...)                                                                                      \
    static void name##_##rows(const struct dot_call *c, const uint8_t *at, float *out)                                 \
    {                                                                                                                  \
        panel_dot((struct panel_kind){__VA_ARGS__}, rows, c, at, out);                                                 \
    }
#define PANEL_FNS(name, ...)                                                                                           \
    PANEL_FN(name, 1, __VA_ARGS__)                                                                                     \
    PANEL_FN(name, 2, __VA_ARGS__)                                                                                     \
    PANEL_FN(name, 3, __VA_ARGS__)                                                                                     \
    PANEL_FN(name, 4, __VA_ARGS__)                                                                                     \
    PANEL_FN(name, 8, __VA_ARGS__)
#define PANEL_ENTRIES(name)                                                                                            \
    {                                                                                                                  \
        name##_1, name##_2, name##_3, name##_4, name##_8                                                               \
    }

PANEL_FNS(codes4_f16, CODES_4, SCALES_F16, true)
PANEL_FNS(codes4_f32, CODES_4, SCALES_F32, true)
PANEL_FNS(codes8_f16, CODES_8, SCALES_F16, false)
PANEL_FNS(codes8_f16_mins, CODES_8, SCALES_F16, true)
PANEL_FNS(codes8_f32, CODES_8, SCALES_F32, false)
PANEL_FNS(codes8_f32_mins, CODES_8, SCALES_F32, true)
PANEL_FNS(plain_f16, CODES_F16, SCALES_NONE, false)
PANEL_FNS(plain_bf16, CODES_BF16, SCALES_NONE, false)
PANEL_FNS(plain_f32, CODES_F32, SCALES_NONE, false)
PANEL_FNS(e2m1_e4m3, CODES_E2M1, SCALES_E4M3, false)
PANEL_FNS(e2m1_e8m0, CODES_E2M1, SCALES_E8M0, false)
PANEL_FNS(e4m3, CODES_E4M3, SCALES_F32, false)

/* The kernel for a part and its kind of row block: 0 .. 3 for 1 .. 4 rows, 4 for eight. */
static panel_fn *panel_kernel(const struct cpu_part *p, int block)
{
    static panel_fn *const four[2][5] = {PANEL_ENTRIES(codes4_f16), PANEL_ENTRIES(codes4_f32)};
    static panel_fn *const eight[2][2][5] = {{PANEL_ENTRIES(codes8_f16), PANEL_ENTRIES(codes8_f16_mins)},
                                             {PANEL_ENTRIES(codes8_f32), PANEL_ENTRIES(codes8_f32_mins)}};
    static panel_fn *const plain[3][5] = {PANEL_ENTRIES(plain_f16), PANEL_ENTRIES(plain_bf16),
                                          PANEL_ENTRIES(plain_f32)};
    static panel_fn *const e2m1[2][5] = {PANEL_ENTRIES(e2m1_e4m3), PANEL_ENTRIES(e2m1_e8m0)};
    static panel_fn *const fp8[5] = PANEL_ENTRIES(e4m3);
    int wide = p->scales == SCALES_F32;
    if (p->codes == CODES_4) return four[wide][block];
    if (p->codes == CODES_8) return eight[wide][p->mins][block];
    if (p->codes == CODES_E2M1) return e2m1[p->scales == SCALES_E8M0][block];
    if (p->codes == CODES_E4M3) return fp8[block];
    return plain[p->codes - CODES_F16][block];
}

/* Sums of x over groups of 32 columns, for the mins: one tree, the same for every row. */
static void sum_groups(const float *x, int rows, int cols, float *sums)
{
    for (int r = 0; r < rows; r++)
        for (int k = 0; k + 32 <= cols; k += 32) {
            const float *at = x + (size_t)r * (size_t)cols + k;
            vf pair[NV];
            KERN_EACH (v, NV) pair[v] = vf_load(at + v * VF) + vf_load(at + 16 + v * VF);
            *sums++ = vf_sum16(pair);
        }
}

/* All of the call's rows through one panel. */
static void decode_panel(const struct dot_call *call, const uint8_t *at, int rows, int n_out, float *y, size_t ldy)
{
    struct dot_call c = *call;
    for (int done = 0, n; done < rows; done += n) {
        float out[DECODE_ROWS * PANEL_ROWS];
        int left = rows - done;
        n = left >= DECODE_ROWS ? DECODE_ROWS : left > 4 ? 4 : left;
        panel_kernel(c.part, n == DECODE_ROWS ? 4 : n - 1)(&c, at, out);
        for (int r = 0; r < n; r++)
            memcpy(y + (size_t)(done + r) * ldy, out + r * PANEL_ROWS, (size_t)n_out * sizeof *out);
        c.x += (size_t)n * (size_t)c.cols;
        c.group_sums += (size_t)n * ((size_t)c.cols / 32);
    }
}

/* Splits item i of the flattened list of all parts' pieces (per_item panels each) into part and first panel. */
static const struct cpu_part *find_panel(const struct kern_weight *w, int per_item, int i, int *panel)
{
    const struct cpu_part *p = w->parts;
    for (int items; i >= (items = (p->panels + per_item - 1) / per_item); p++) i -= items;
    *panel = i * per_item;
    return p;
}

static int count_items(const struct kern_weight *w, int per_item)
{
    int n = 0;
    for (int i = 0; i < w->n_parts; i++) n += (w->parts[i].panels + per_item - 1) / per_item;
    return n;
}

static int outs_of(const struct cpu_part *p, int panel, int most)
{
    int left = p->rows - panel * PANEL_ROWS;
    return left < most ? left : most;
}

static void linear_decode(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                          int threads)
{
    float *group_sums = scratch->group_sums;
    const int n_items = count_items(w, 1);
    for (int first = 0; first < rows; first += DECODE_BLOCK) {
        const int n = rows - first < DECODE_BLOCK ? rows - first : DECODE_BLOCK;
        const float *xs = x + (size_t)first * (size_t)w->cols;
        float *ys = y + (size_t)first * (size_t)w->rows;
        if (w->any_mins) sum_groups(xs, n, w->cols, group_sums);
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
        for (int i = 0; i < n_items; i++) {
            int panel;
            const struct cpu_part *p = find_panel(w, 1, i, &panel);
            struct dot_call c = {p, w->cols, xs, group_sums};
            decode_panel(&c, p->bytes + (size_t)panel * p->panel_bytes, n, outs_of(p, panel, PANEL_ROWS),
                         ys + p->y_first + panel * PANEL_ROWS, (size_t)w->rows);
        }
    }
    (void)threads;
}

/* to[n][PREFILL_OUTS], one vector of it: the values of n columns of one group. */
KERN_INLINE void group_values(enum cpu_codes kind, const uint8_t *codes, int n, vf scale, vf min, int v, float *to)
{
    if (in_nibbles(kind)) {
        for (int j = 0; j < n; j += 8) {
            vi word = vi_load(codes + (size_t)j * 8 + (size_t)v * VF * 4);
            KERN_EACH (i, 8) vf_store(to + (j + i) * PREFILL_OUTS, vf_fma(scale, nibble_code(kind, word, i), min));
        }
        return;
    }
    for (int j = 0; j < n; j++) {
        vf code = column_codes(kind, codes, j, v);
        if (kind == CODES_E4M3) code *= vf_set1(E4M3_UNIT);
        vf_store(to + j * PREFILL_OUTS, kind == CODES_8 || kind == CODES_E4M3 ? vf_fma(scale, code, min) : code);
    }
}

/* out[n][PREFILL_OUTS], its first PANEL_ROWS: the exact values of n columns of a panel from k, a multiple of the
 * group. */
static void decode_columns(const struct cpu_part *p, const uint8_t *panel, int k, int n, float *out)
{
    const size_t head = scale_bytes(p->scales);
    const uint8_t *at = panel + (size_t)(k / p->group) * p->group_bytes;
    for (int g = 0; g < n; g += p->group, at += p->group_bytes) {
        const uint8_t *codes = at + head * (p->mins ? 2 : 1);
        int columns = n - g < p->group ? n - g : p->group;
        KERN_EACH (v, NV) {
            vf scale = scale_load(p, p->scales, at, v);
            vf min = p->mins ? scale_load(p, p->scales, at + head, v) : vf_zero();
            float *to = out + (size_t)g * PREFILL_OUTS + v * VF;
            switch (p->codes) {
            case CODES_4: group_values(CODES_4, codes, columns, scale, min, v, to); break;
            case CODES_8: group_values(CODES_8, codes, columns, scale, min, v, to); break;
            case CODES_E2M1: group_values(CODES_E2M1, codes, columns, scale, min, v, to); break;
            case CODES_E4M3: group_values(CODES_E4M3, codes, columns, scale, min, v, to); break;
            default: group_values(p->codes, codes, columns, scale, min, v, to); break;
            }
        }
    }
}

struct tile_call {
    const float *x;
    size_t ldx;
    const float *b;
    int n;
    float *y;
    size_t ldy;
    bool first; /* start from zero, not from y */
};

/* y[rows][TILE_BLOCKS * 16] (+)= x[rows][n] * b[n][PREFILL_OUTS]; rows is a constant. */
KERN_INLINE void tile(int rows, const struct tile_call *c)
{
    enum { TV = TILE_BLOCKS * NV };
    const float *x = c->x, *b = c->b;
    const size_t ldx = c->ldx, ldy = c->ldy;
    const int n = c->n;
    vf acc[TILE_ROWS][TV];
    KERN_EACH (r, rows)
        KERN_EACH (v, TV) acc[r][v] = c->first ? vf_zero() : vf_load(c->y + (size_t)r * ldy + v * VF);
    for (int k = 0; k < n; k++) {
        vf w[TV];
        KERN_EACH (v, TV) w[v] = vf_load(b + (size_t)k * PREFILL_OUTS + v * VF);
        KERN_EACH (r, rows) {
            vf xv = vf_set1(x[(size_t)r * ldx + (size_t)k]);
            KERN_EACH (v, TV) acc[r][v] = vf_fma(xv, w[v], acc[r][v]);
        }
    }
    KERN_EACH (r, rows)
        KERN_EACH (v, TV) vf_store(c->y + (size_t)r * ldy + v * VF, acc[r][v]);
}

/* Heights of tiles there are: the full one, and powers of two for what is left. */
static int tile_height(int left)
{
    if (left >= TILE_ROWS) return TILE_ROWS;
    return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

static void run_tile(const struct tile_call *c, int rows)
{
    switch (rows) {
#if KERN_ISA_ID == 2
    case 12: tile(12, c); break;
    case 8: tile(8, c); break;
    case 4: tile(4, c); break;
#elif KERN_ISA_ID == 1
    case 6: tile(6, c); break;
    case 4: tile(4, c); break;
#endif
    case 2: tile(2, c); break;
    default: tile(1, c); break;
    }
}

/* One tile's rows against the decoded block, all PREFILL_OUTS outputs. Where fewer exist, it works on a copy. */
static void tile_rows(struct tile_call c, int rows, int n_out)
{
    float copy[TILE_ROWS * PREFILL_OUTS];
    float *y = c.y;
    const size_t ldy = c.ldy;
    const bool whole = n_out == PREFILL_OUTS;
    if (!whole) {
        if (!c.first)
            for (int r = 0; r < rows; r++)
                memcpy(copy + r * PREFILL_OUTS, y + (size_t)r * ldy, (size_t)n_out * sizeof *y);
        for (int r = 0; r < rows; r++)
            memset(copy + r * PREFILL_OUTS + n_out, 0, (size_t)(PREFILL_OUTS - n_out) * sizeof *y);
        c.y = copy;
        c.ldy = PREFILL_OUTS;
    }
    for (int column = 0; column < PREFILL_OUTS; column += TILE_BLOCKS * 16) {
        run_tile(&c, rows);
        c.b += TILE_BLOCKS * 16;
        c.y += TILE_BLOCKS * 16;
    }
    if (!whole)
        for (int r = 0; r < rows; r++) memcpy(y + (size_t)r * ldy, copy + r * PREFILL_OUTS, (size_t)n_out * sizeof *y);
}

/* All rows against PREFILL_OUTS outputs from item i on. b is the thread's panel. */
static void prefill_item(const struct kern_weight *w, int i, const float *x, int rows, float *y, float *b)
{
    int panel;
    const struct cpu_part *p = find_panel(w, PREFILL_OUTS / PANEL_ROWS, i, &panel);
    float *to = y + p->y_first + panel * PANEL_ROWS;
    const uint8_t *at = p->bytes + (size_t)panel * p->panel_bytes;
    const bool two = panel + 1 < p->panels;
    if (!two) memset(b, 0, PREFILL_BLOCK * PREFILL_OUTS * sizeof *b);
    for (int k = 0; k < w->cols; k += PREFILL_BLOCK) {
        const int n = w->cols - k < PREFILL_BLOCK ? w->cols - k : PREFILL_BLOCK;
        decode_columns(p, at, k, n, b);
        if (two) decode_columns(p, at + p->panel_bytes, k, n, b + PANEL_ROWS);
        for (int r = 0, height; r < rows; r += height) {
            height = tile_height(rows - r);
            struct tile_call c = {x + (size_t)r * (size_t)w->cols + k, (size_t)w->cols, b,     n,
                                  to + (size_t)r * (size_t)w->rows,    (size_t)w->rows, k == 0};
            tile_rows(c, height, outs_of(p, panel, PREFILL_OUTS));
        }
    }
}

static void linear_prefill(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                           int threads)
{
    const int n_items = count_items(w, PREFILL_OUTS / PANEL_ROWS);
    for (int first = 0; first < rows; first += PREFILL_ROWS) {
        const int n = rows - first < PREFILL_ROWS ? rows - first : PREFILL_ROWS;
        const float *xs = x + (size_t)first * (size_t)w->cols;
        float *ys = y + (size_t)first * (size_t)w->rows;
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int i = 0; i < n_items; i++) prefill_item(w, i, xs, n, ys, scratch[omp_get_thread_num()].panel);
#else
        for (int i = 0; i < n_items; i++) prefill_item(w, i, xs, n, ys, scratch[0].panel);
#endif
    }
    (void)threads;
}

const struct cpu_linear_ops KERN_NAME(kern_cpu_linear) = {linear_decode, linear_prefill};
