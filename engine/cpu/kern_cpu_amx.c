/* kern_cpu_amx: the linear operations of machines with AMX tiles. PREFILL of coded weights is here; DECODE is VNNI's, whose few
 * rows tiles were slower for, and the rest AVX-512's.
 *
 * Exact where it matters: codes of up to 8 bits are bfloat16 values, and an activation is the sum of three of them (8 bits of
 * significand each, 24 together), so all products are exact and only their float32 sums are rounded:
 *   per group of 32 columns: c = sum of code * (high + middle + low);  acc = scale * c + acc;  acc = min * sum(x) + acc
 * A row of a tile never meets another row, so bits do not depend on how many rows there are or where they lie.
 *
 * Rows are split once for all panels, 128 at a time, into tiles as they will be loaded. Two panels' codes become tiles once
 * for these rows. Two tiles of rows meet two of outputs; while the products of one group run, the sums of the group before are
 * taken from their tiles and added. Tile instructions overlap only where nothing waits: a product takes 52 cycles and starts every
 * 16; a store of its sums that follows at once holds up everything behind it. So the sums of a tile are stored when the tile is
 * needed again, after the products of the other three. */
#include "kern_cpu_coded.h"

#include <stdatomic.h>
#include <string.h>

enum {
    TILE_ROWS = 16,
    TILE_ROW_BYTES = 64,
    STEP_TILES = 2, /* tiles of rows that meet a pair of panels at once */
    STEP_ROWS = STEP_TILES * TILE_ROWS,
    PANELS = 2,
    GROUP = CODED_GROUP, /* columns of a tile, and of the narrowest scale */
    PARTS = 3,           /* bfloat16 numbers to an activation */
    BLOCK_GROUPS = 24,   /* groups whose codes are tiles at once */
    TILE_WORDS = TILE_ROWS * GROUP,
    X_TILES = SPLIT_ROWS / TILE_ROWS
};

/* A pair of panels over a block of columns, and the step that meets them. */
struct block {
    _Alignas(64) uint16_t codes[BLOCK_GROUPS][PANELS][TILE_WORDS]; /* pairs (k, 16 + k) of columns, by output */
    float scales[BLOCK_GROUPS][PANELS][PANEL_ROWS], mins[BLOCK_GROUPS][PANELS][PANEL_ROWS];
    float sums[STEP_TILES][PANELS][TILE_ROWS][PANEL_ROWS]; /* of one group, from the tiles */
    float acc[STEP_ROWS][PANELS][PANEL_ROWS];
};

static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} config = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* The intrinsics are opaque to the compiler and say nothing of memory: what is stored before this is stored before them. */
CODED_INLINE void tiles_order(void) { atomic_signal_fence(memory_order_seq_cst); }

/* ---- rows ---- */

/* Where the first part's tile of a group and of rows 16 tile .. 16 tile + 15 lies; the other parts' follow. */
static size_t x_tile_at(int group, int tile) { return ((size_t)group * X_TILES + (size_t)tile) * PARTS * TILE_WORDS; }

/* The upper halves of 32-bit lanes, bfloat16 when cut off, of columns 0 .. 15 and 16 .. 31: lane k is the pair (k, 16 + k). */
static __m512i pair_halves(__m512i low, __m512i high)
{
    return _mm512_mask_mov_epi16(_mm512_srli_epi32(low, 16), 0xaaaaaaaa, high);
}

static __m512 below_half(__m512 x)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), upper)));
}

/* 32 columns of one row, to its row of a group's tile. Each part is the first 8 bits of significand of what those before left. */
static float split_group(const float *x, uint16_t *to)
{
    __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
    for (int part = 0; part < PARTS; part++, to += TILE_WORDS) {
        _mm512_store_si512(to, pair_halves(_mm512_castps_si512(low), _mm512_castps_si512(high)));
        low = below_half(low);
        high = below_half(high);
    }
    return sum;
}

/* A tile of rows after another, each written in the order of memory; sums[group][SPLIT_ROWS]. What lies past the last row stays
 * as it was: what it gives is not kept. */
static void split_rows(const float *x, int rows, int cols, struct cpu_scratch *scratch, int threads)
{
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int tile = 0; tile < tiles; tile++)
        for (int g = 0; g < cols / GROUP; g++) {
            uint16_t *to = scratch->split + x_tile_at(g, tile);
            for (int r = tile * TILE_ROWS; r < rows && r < (tile + 1) * TILE_ROWS; r++, to += GROUP)
                scratch->split_sums[g * SPLIT_ROWS + r] = split_group(x + (size_t)r * (size_t)cols + g * GROUP, to);
        }
    (void)threads;
}

/* ---- codes ---- */

/* Nibble n of the words of columns 8 j .. 8 j + 7 and 16 + 8 j .., so columns k and 16 + k, as bfloat16. The permutation reads
 * five bits of an index; its table has everything twice, so that the fifth does not matter. */
CODED_INLINE __m512i pair_of_nibbles(__m512i low, __m512i high, unsigned n, __m512i table)
{
    const __m512i upper = n < 4 ? _mm512_slli_epi32(high, 16 - 4 * n) : _mm512_srli_epi32(high, 4 * n - 16);
    return _mm512_permutexvar_epi16(_mm512_mask_mov_epi16(_mm512_srli_epi32(low, 4 * n), 0xaaaaaaaa, upper), table);
}

CODED_INLINE __m512i floats_of_bytes(const uint8_t *codes)
{
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes))));
}

CODED_INLINE void load_group(struct coded_kind kind, const uint8_t *first, uint16_t *to)
{
    static const uint16_t bf16_of_nibble[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                                                0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i table = _mm512_loadu_si512(bf16_of_nibble);
    const uint8_t *codes = first;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const uint8_t *words = first + half * 64;
#pragma GCC unroll 8
        for (unsigned n = 0; n < 8; n++, to += 2 * PANEL_ROWS, codes += PANEL_ROWS)
            _mm512_store_si512(to, kind.codes == CODES_4
                                       ? pair_of_nibbles(_mm512_loadu_si512(words), _mm512_loadu_si512(words + 128), n, table)
                                       : pair_halves(floats_of_bytes(codes), floats_of_bytes(codes + 16 * PANEL_ROWS)));
    }
}

/* Panel i of the pair: its groups from `first` on. */
CODED_INLINE void load_panel(struct coded_kind kind, const struct cpu_part *p, const uint8_t *panel, int first, int groups,
                              int i, struct block *b)
{
    const int wide = coded_wide(kind, p);
    for (int g = 0; g < groups; g++) {
        const uint8_t *scales = coded_scales_at(p, wide, panel, first + g);
        _mm512_store_ps(b->scales[g][i], coded_scale(kind, scales));
        _mm512_store_ps(b->mins[g][i], coded_min(kind, scales));
        load_group(kind, coded_codes_at(kind, p, wide, panel, first + g), b->codes[g][i]);
    }
}

typedef void load_fn(const struct cpu_part *p, const uint8_t *panel, int first, int groups, int i, struct block *b);
#define LOAD_FN(name, ...)                                                                                                     \
    static void name(const struct cpu_part *p, const uint8_t *panel, int first, int groups, int i, struct block *b)            \
    {                                                                                                                          \
        load_panel((struct coded_kind){__VA_ARGS__}, p, panel, first, groups, i, b);                                           \
    }
#define LOAD_ENTRY(name, ...) name,

CODED_KINDS(LOAD_FN)

/* ---- products ---- */

/* Up to 32 rows against a block. */
struct step {
    const uint16_t *x; /* the first row tile's, of the block's first group */
    const float *sums; /* likewise */
    int rows;          /* that exist, at most STEP_ROWS */
    bool fresh;        /* the first block of columns: outputs start from zero, not from y */
    int groups;
    float *y;
    size_t ldy;
    __mmask16 outs[PANELS];
};

/* One group's sums, once they are stored, into the accumulators of one tile of rows; these come from y at the block's first
 * group and go there at its last. */
CODED_INLINE void add_rows(const struct step *s, int group, int tile, bool first, bool last, struct block *b)
{
    const float *x_sums = s->sums + group * SPLIT_ROWS + tile * TILE_ROWS;
    const int left = s->rows - tile * TILE_ROWS, rows = left < TILE_ROWS ? left : TILE_ROWS;
    const __m512 scale0 = _mm512_load_ps(b->scales[group][0]), scale1 = _mm512_load_ps(b->scales[group][1]);
    const __m512 min0 = _mm512_load_ps(b->mins[group][0]), min1 = _mm512_load_ps(b->mins[group][1]);
    float *y = s->y + (size_t)(tile * TILE_ROWS) * s->ldy;
    for (int r = 0; r < rows; r++, y += s->ldy) {
        float *rest = b->acc[tile * TILE_ROWS + r][0];
        __m512 acc0 = _mm512_setzero_ps(), acc1 = _mm512_setzero_ps();
        if (!first) {
            acc0 = _mm512_load_ps(rest);
            acc1 = _mm512_load_ps(rest + PANEL_ROWS);
        } else if (!s->fresh) {
            acc0 = _mm512_maskz_loadu_ps(s->outs[0], y);
            acc1 = _mm512_maskz_loadu_ps(s->outs[1], y + PANEL_ROWS);
        }
        const __m512 x_sum = _mm512_set1_ps(x_sums[r]);
        acc0 = _mm512_fmadd_ps(scale0, _mm512_load_ps(b->sums[tile][0][r]), acc0);
        acc1 = _mm512_fmadd_ps(scale1, _mm512_load_ps(b->sums[tile][1][r]), acc1);
        acc0 = _mm512_fmadd_ps(min0, x_sum, acc0);
        acc1 = _mm512_fmadd_ps(min1, x_sum, acc1);
        if (!last) {
            _mm512_store_ps(rest, acc0);
            _mm512_store_ps(rest + PANEL_ROWS, acc1);
        } else {
            _mm512_mask_storeu_ps(y, s->outs[0], acc0);
            _mm512_mask_storeu_ps(y + PANEL_ROWS, s->outs[1], acc1);
        }
    }
}

static void add_tile(const struct step *s, int group, int tile, struct block *b)
{
    const bool first = group == 0, last = group == s->groups - 1;
    if (!first && !last)
        add_rows(s, group, tile, false, false, b);
    else if (!last)
        add_rows(s, group, tile, true, false, b);
    else if (!first)
        add_rows(s, group, tile, false, true, b);
    else
        add_rows(s, group, tile, true, true, b);
}

/* Sums lie in tiles 2 row tile + panel, rows in 4 and 5, codes in 6 and 7. */
#define NEXT_SUMS(sum_tile, x_tile, code_tile, to)                                                                             \
    do {                                                                                                                       \
        _tile_stored(sum_tile, to, TILE_ROW_BYTES);                                                                            \
        _tile_zero(sum_tile);                                                                                                  \
        _tile_dpbf16ps(sum_tile, x_tile, code_tile);                                                                           \
    } while (0)

/* The products of a step's group start, and what started before them, products of the group or the step before, is added. */
static void multiply_group(const struct step *s, int group, const struct step *before, int group_before, struct block *b)
{
    const uint16_t *x = s->x + x_tile_at(group, 0), *x1 = x + PARTS * TILE_WORDS;
    _tile_loadd(6, b->codes[group][0], TILE_ROW_BYTES);
    _tile_loadd(7, b->codes[group][1], TILE_ROW_BYTES);
    _tile_loadd(4, x, TILE_ROW_BYTES);
    NEXT_SUMS(0, 4, 6, b->sums[0][0]);
    NEXT_SUMS(1, 4, 7, b->sums[0][1]);
    _tile_loadd(5, x1, TILE_ROW_BYTES);
    NEXT_SUMS(2, 5, 6, b->sums[1][0]);
    NEXT_SUMS(3, 5, 7, b->sums[1][1]);
    _tile_loadd(4, x + TILE_WORDS, TILE_ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    tiles_order();
    if (before) add_tile(before, group_before, 0, b);
    _tile_loadd(5, x1 + TILE_WORDS, TILE_ROW_BYTES);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_loadd(4, x + 2 * TILE_WORDS, TILE_ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (before) add_tile(before, group_before, 1, b);
    _tile_loadd(5, x1 + 2 * TILE_WORDS, TILE_ROW_BYTES);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    tiles_order();
}

static void add_last(const struct step *s, struct block *b)
{
    _tile_stored(0, b->sums[0][0], TILE_ROW_BYTES);
    _tile_stored(1, b->sums[0][1], TILE_ROW_BYTES);
    _tile_stored(2, b->sums[1][0], TILE_ROW_BYTES);
    _tile_stored(3, b->sums[1][1], TILE_ROW_BYTES);
    tiles_order();
    for (int tile = 0; tile < STEP_TILES; tile++) add_tile(s, s->groups - 1, tile, b);
}

/* ---- the operation ---- */

struct prefill {
    const struct cpu_part *part;
    const struct cpu_scratch *scratch;
    int groups, rows;
    float *y; /* the weight's first output */
    size_t ldy;
};

/* Groups first .. first + groups - 1 of a pair of panels against all split rows. */
static void run_block(const struct prefill *c, int panel, int first, int groups, struct block *b)
{
    struct step steps[2];
    const struct step *before = NULL;
    for (int r = 0; r < c->rows; r += STEP_ROWS) {
        struct step *s = &steps[r / STEP_ROWS % 2];
        *s = (struct step){.x = c->scratch->split + x_tile_at(first, r / TILE_ROWS),
                           .sums = c->scratch->split_sums + first * SPLIT_ROWS + r,
                           .rows = c->rows - r < STEP_ROWS ? c->rows - r : STEP_ROWS,
                           .fresh = first == 0,
                           .groups = groups,
                           .y = c->y + (size_t)r * c->ldy + c->part->y_first + panel * PANEL_ROWS,
                           .ldy = c->ldy,
                           .outs = {coded_outs(c->part, panel), coded_outs(c->part, panel + 1)}};
        multiply_group(s, 0, before, groups - 1, b);
        for (int g = 1; g < groups; g++) multiply_group(s, g, s, g - 1, b);
        before = s;
    }
    add_last(before, b);
}

/* One pair of panels; the last of a part may lack its second and is then multiplied with what was there before. */
static void run_pair(const struct prefill *c, int panel, struct block *b)
{
    const struct cpu_part *p = c->part;
    const uint8_t *at = p->bytes + (size_t)panel * p->panel_bytes;
    static load_fn *const loaders[] = {CODED_KINDS(LOAD_ENTRY)};
    load_fn *load = loaders[coded_kind_index(p)];
    const int blocks = (c->groups + BLOCK_GROUPS - 1) / BLOCK_GROUPS;
    for (int i = 0; i < blocks; i++) {
        const int first = c->groups * i / blocks, groups = c->groups * (i + 1) / blocks - first;
        load(p, at, first, groups, 0, b);
        if (panel + 1 < p->panels) load(p, at + p->panel_bytes, first, groups, 1, b);
        tiles_order();
        run_block(c, panel, first, groups, b);
    }
}

static void run_part(const struct prefill *c, int threads)
{
    const int panels = c->part->panels;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
    {
        struct block b;
        memset(&b, 0, sizeof b);
        _tile_loadconfig(&config);
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
        for (int panel = 0; panel < panels; panel += PANELS) run_pair(c, panel, &b);
        _tile_release();
    }
    (void)threads;
}

static void linear_prefill(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                           int threads)
{
    for (int i = 0; i < w->n_parts; i++) {
        const struct kern_weight alone = coded_one_part(w, i);
        if (!coded_fits(w, i)) kern_cpu_linear_avx512.prefill(&alone, x, rows, y, scratch, threads);
    }
    for (int first = 0; first < rows; first += SPLIT_ROWS) {
        const int n = rows - first < SPLIT_ROWS ? rows - first : SPLIT_ROWS;
        bool split = false;
        for (int i = 0; i < w->n_parts; i++) {
            if (!coded_fits(w, i)) continue;
            if (!split) split_rows(x + (size_t)first * (size_t)w->cols, n, w->cols, scratch, threads);
            split = true;
            const struct prefill c = {&w->parts[i], scratch, w->cols / GROUP, n, y + (size_t)first * (size_t)w->rows,
                                      (size_t)w->rows};
            run_part(&c, threads);
        }
    }
}

static void linear_decode(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                          int threads)
{
    kern_cpu_linear_vnni.decode(w, x, rows, y, scratch, threads);
}

const struct cpu_linear_ops kern_cpu_linear_amx = {linear_decode, linear_prefill};
