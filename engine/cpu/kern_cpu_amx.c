/* kern_cpu_amx: PREFILL linear of coded weights on AMX tiles; everything else is AVX-512's.
 *
 * Exact where it matters: codes of up to 8 bits are bfloat16 values, and an activation is the sum of three of them (8 bits
 * of significand each, 24 together), so all products are exact and only their float32 sums are rounded:
 *   per group of 32 columns: c = sum of code * (high + middle + low);  acc = scale * c + acc;  acc = min * sum(x) + acc
 * A row of a tile never meets another row, so bits do not depend on how many rows there are or where they lie.
 *
 * Rows are split once for all panels, 128 at a time; two panels' codes become tiles once for these rows. Two tiles of rows
 * meet two of outputs, so that what comes from the second-level cache is used twice and four products are in flight. */
#include "kern_cpu_impl.h"

#include <immintrin.h>
#include <string.h>

enum {
    TILE_ROWS = 16,
    STEP_ROWS = 2 * TILE_ROWS,
    PANELS = 2,        /* panels that share the rows' tiles */
    GROUP = 32,        /* columns of a scale, and of a tile product */
    BLOCK_GROUPS = 16, /* groups whose codes are tiles at once */
    TILE_WORDS = TILE_ROWS * GROUP
};

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
};

/* What a block of columns of one panel looks like to the tiles. */
struct block {
    _Alignas(64) uint16_t codes[BLOCK_GROUPS][TILE_WORDS]; /* pairs of columns, by output */
    float scales[BLOCK_GROUPS][PANEL_ROWS], mins[BLOCK_GROUPS][PANEL_ROWS];
    float sums[STEP_ROWS][PANEL_ROWS]; /* of one group, from the tiles */
    float acc[STEP_ROWS][PANEL_ROWS];
};

static void config_tiles(void)
{
    struct tile_config c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.column_bytes[i] = 64;
        c.rows[i] = TILE_ROWS;
    }
    _tile_loadconfig(&c);
}

static __m512i to_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

static __m512 from_bf16(__m256i half)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* x[cols] as three bfloat16 rows, `plane` words apart, and its sums over groups. */
static void split_row(const float *x, int cols, uint16_t *to, size_t plane, float *sums)
{
    for (int k = 0; k < cols; k += GROUP) {
        __m512 low = _mm512_loadu_ps(x + k), high = _mm512_loadu_ps(x + k + 16);
        sums[k / GROUP] = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
        for (int part = 0; part < 3; part++) {
            const __m512i words = to_bf16(low, high);
            _mm512_storeu_si512(to + (size_t)part * plane + k, words);
            low = _mm512_sub_ps(low, from_bf16(_mm512_castsi512_si256(words)));
            high = _mm512_sub_ps(high, from_bf16(_mm512_extracti64x4_epi64(words, 1)));
        }
    }
}

static __m512 load_scales(enum cpu_scales kind, const uint8_t *at)
{
    if (kind == SCALES_F16) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)at));
    return _mm512_loadu_ps((const float *)(const void *)at);
}

/* Two 4-bit codes of each output's word, bits 8 pair .. 8 pair + 7, as a pair of bfloat16. */
static __m512i pair_of_nibbles(__m512i words, unsigned pair, __m512i table)
{
    const __m512i byte = _mm512_srlv_epi32(words, _mm512_set1_epi32((int)(8 * pair)));
    const __m512i low = _mm512_and_si512(byte, _mm512_set1_epi32(15));
    const __m512i high = _mm512_and_si512(_mm512_slli_epi32(byte, 12), _mm512_set1_epi32(15 << 16));
    return _mm512_permutexvar_epi16(_mm512_or_si512(low, high), table);
}

/* Two columns of 8-bit codes, 16 outputs each, interleaved as pairs of bfloat16. */
static __m512i pair_of_bytes(const uint8_t *codes)
{
    const __m512 even = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes)));
    const __m512 odd =
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(codes + PANEL_ROWS))));
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                           _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32((int)0xffff0000u)));
}

static void load_block(const struct cpu_part *p, const uint8_t *at, int groups, struct block *b)
{
    static const uint16_t bf16_of_nibble[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i table = _mm512_loadu_si512(bf16_of_nibble);
    const size_t head = PANEL_ROWS * (p->scales == SCALES_F16 ? sizeof(uint16_t) : sizeof(float));
    for (int g = 0; g < groups; g++, at += p->group_bytes) {
        const uint8_t *codes = at + head * (p->mins ? 2 : 1);
        _mm512_storeu_ps(b->scales[g], load_scales(p->scales, at));
        if (p->mins) _mm512_storeu_ps(b->mins[g], load_scales(p->scales, at + head));
        for (unsigned row = 0; row < GROUP / 2; row++) {
            const __m512i pair = p->codes == CODES_4
                                     ? pair_of_nibbles(_mm512_loadu_si512(codes + row / 4 * 64), row % 4, table)
                                     : pair_of_bytes(codes + (size_t)row * 2 * PANEL_ROWS);
            _mm512_store_si512(b->codes[g] + row * 2 * PANEL_ROWS, pair);
        }
    }
}

/* The blocks' sums = the products of one group of both panels with 32 split rows. */
static void multiply_group(const uint16_t *x, size_t stride_bytes, size_t plane, int group, struct block *b)
{
    const size_t down = TILE_ROWS * stride_bytes / sizeof *x;
    _tile_loadd(6, b[0].codes[group], 64);
    _tile_loadd(7, b[1].codes[group], 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int part = 0; part < 3; part++, x += plane) {
        _tile_loadd(4, x, stride_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + down, stride_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, b[0].sums[0], 64);
    _tile_stored(1, b[1].sums[0], 64);
    _tile_stored(2, b[0].sums[TILE_ROWS], 64);
    _tile_stored(3, b[1].sums[TILE_ROWS], 64);
}

struct step {
    const uint16_t *x;  /* split rows from the first of these and column 0 on */
    const float *sums;  /* group sums, likewise */
    size_t plane;
    int cols, rows;     /* rows that exist, at most STEP_ROWS */
    float *y;
    size_t ldy;
    int n_out; /* of both panels, at most 32 */
};

static __mmask16 outs_of(const struct step *s, int panel)
{
    const int n = s->n_out - panel * PANEL_ROWS;
    return (__mmask16)(n >= PANEL_ROWS ? 0xffff : n > 0 ? (1u << n) - 1 : 0);
}

/* One group's sums into the accumulators of one panel. */
static void add_group(const struct step *s, int group_of_all, int group, bool mins, struct block *b)
{
    const size_t all_groups = (size_t)(s->cols / GROUP);
    const float *x_sum = s->sums + group_of_all;
    const __m512 scale = _mm512_load_ps(b->scales[group]), min = _mm512_load_ps(b->mins[group]);
    for (int r = 0; r < s->rows; r++, x_sum += all_groups) {
        __m512 acc = _mm512_fmadd_ps(scale, _mm512_load_ps(b->sums[r]), _mm512_load_ps(b->acc[r]));
        if (mins) acc = _mm512_fmadd_ps(min, _mm512_set1_ps(*x_sum), acc);
        _mm512_store_ps(b->acc[r], acc);
    }
}

/* Up to 32 rows against the blocks that start at group `first`. Between blocks the sums rest in y. */
static void step_rows(const struct step *s, int first, int groups, bool mins, struct block *b)
{
    for (int i = 0; i < PANELS; i++)
        for (int r = 0; r < s->rows; r++) {
            const float *from = s->y + (size_t)r * s->ldy + i * PANEL_ROWS;
            _mm512_store_ps(b[i].acc[r], first ? _mm512_maskz_loadu_ps(outs_of(s, i), from) : _mm512_setzero_ps());
        }
    for (int g = 0; g < groups; g++) {
        multiply_group(s->x + (size_t)(first + g) * GROUP, (size_t)s->cols * sizeof *s->x, s->plane, g, b);
        for (int i = 0; i < PANELS; i++) add_group(s, first + g, g, mins, &b[i]);
    }
    for (int i = 0; i < PANELS; i++)
        for (int r = 0; r < s->rows; r++)
            _mm512_mask_storeu_ps(s->y + (size_t)r * s->ldy + i * PANEL_ROWS, outs_of(s, i), _mm512_load_ps(b[i].acc[r]));
}

static int pairs_of(const struct cpu_part *p) { return (p->panels + PANELS - 1) / PANELS; }

/* One pair of panels against all split rows; the last of a part may lack its second. */
static void run_pair(const struct kern_weight *w, int i, const struct cpu_scratch *scratch, int rows, float *y)
{
    struct block b[PANELS];
    const struct cpu_part *p = w->parts;
    for (; i >= pairs_of(p); p++) i -= pairs_of(p);
    const int all_groups = w->cols / GROUP, panel = i * PANELS, left = p->rows - panel * PANEL_ROWS;
    const bool both = panel + 1 < p->panels;
    if (!both) memset(&b[1], 0, sizeof b[1]);
    for (int first = 0; first < all_groups; first += BLOCK_GROUPS) {
        const int groups = all_groups - first < BLOCK_GROUPS ? all_groups - first : BLOCK_GROUPS;
        const uint8_t *at = p->bytes + (size_t)panel * p->panel_bytes + (size_t)first * p->group_bytes;
        load_block(p, at, groups, &b[0]);
        if (both) load_block(p, at + p->panel_bytes, groups, &b[1]);
        for (int r = 0; r < rows; r += STEP_ROWS) {
            struct step s = {.x = scratch->split + (size_t)r * (size_t)w->cols,
                             .sums = scratch->split_sums + (size_t)r * (size_t)all_groups,
                             .plane = (size_t)AMX_ROWS * (size_t)w->cols,
                             .cols = w->cols,
                             .rows = rows - r < STEP_ROWS ? rows - r : STEP_ROWS,
                             .y = y + (size_t)r * (size_t)w->rows + p->y_first + panel * PANEL_ROWS,
                             .ldy = (size_t)w->rows,
                             .n_out = left};
            step_rows(&s, first, groups, p->mins, b);
        }
    }
}

static void split_rows(const struct kern_weight *w, const float *x, int rows, struct cpu_scratch *scratch, int threads)
{
    const size_t cols = (size_t)w->cols, plane = (size_t)AMX_ROWS * cols;
    const int whole = (rows + STEP_ROWS - 1) / STEP_ROWS * STEP_ROWS;
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
#endif
    for (int r = 0; r < rows; r++)
        split_row(x + (size_t)r * cols, w->cols, scratch->split + (size_t)r * cols, plane,
                  scratch->split_sums + (size_t)r * (cols / GROUP));
    for (size_t part = 0; part < 3 && whole > rows; part++)
        memset(scratch->split + part * plane + (size_t)rows * cols, 0, (size_t)(whole - rows) * cols * sizeof(uint16_t));
    (void)threads;
}

/* Codes in groups of 32; the others go to AVX-512. */
static bool fits_tiles(const struct kern_weight *w)
{
    for (int i = 0; i < w->n_parts; i++)
        if (w->parts[i].codes > CODES_8 || w->parts[i].group != GROUP) return false;
    return w->cols % GROUP == 0;
}

static void linear_prefill(const struct kern_weight *w, const float *x, int rows, float *y, struct cpu_scratch *scratch,
                           int threads)
{
    if (!fits_tiles(w)) {
        kern_cpu_linear_avx512.prefill(w, x, rows, y, scratch, threads);
        return;
    }
    int n_pairs = 0;
    for (int i = 0; i < w->n_parts; i++) n_pairs += pairs_of(&w->parts[i]);
    for (int first = 0; first < rows; first += AMX_ROWS) {
        const int n = rows - first < AMX_ROWS ? rows - first : AMX_ROWS;
        float *ys = y + (size_t)first * (size_t)w->rows;
        split_rows(w, x + (size_t)first * (size_t)w->cols, n, scratch, threads);
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
        {
            config_tiles();
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
            for (int i = 0; i < n_pairs; i++) run_pair(w, i, scratch, n, ys);
            _tile_release();
        }
    }
}

static void linear_decode(const struct kern_weight *w, const float *x, int rows, float *y, float *group_sums, int threads)
{
    kern_cpu_linear_avx512.decode(w, x, rows, y, group_sums, threads);
}

const struct cpu_linear_ops kern_cpu_linear_amx = {linear_decode, linear_prefill};
