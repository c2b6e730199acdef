/* kern_cpu_amx_decode: DECODE of more than two rows on AMX tiles, with the sums and so the bits of kern_cpu_vnni.
 *
 * The limbs of four rows are the rows of one tile (kern_cpu_limbs.h: each row's fourth tile row is no limb and its sums are not
 * used), so one product of 32 columns does for four rows what takes VNNI 96 instructions. Two panels and two groups take turns
 * on four tiles of sums. Tiles that were idle for some ten microseconds take two to start, which is why fewer rows stay with
 * VNNI. */
#include "kern_cpu_limbs.h"
#include "kern_cpu_tiles.h"

enum { PANELS = 2, QUADS = LIMB_GROUP / 4, RING = 4, PREFETCH_BYTES = 2048 };

/* What is in flight between codes and sums. */
struct group_work {
    _Alignas(64) int8_t quads[PANELS][QUADS][PANEL_ROWS * 4];
    int32_t sums[PANELS][LIMB_ROWS][LIMBS + 1][PANEL_ROWS];
};

/* Where a stage of the work stands: a group of a pair of panels, for a block of rows. */
struct place {
    int panel, row, group;
};

struct run {
    const struct limb_call *call;
    int end; /* the panel to stop before */
    int wide;
};

LIMB_INLINE void advance(struct place *p, const struct run *run)
{
    if (++p->group < run->call->groups) return;
    p->group = 0;
    p->row += LIMB_ROWS;
    if (p->row < run->call->rows) return;
    p->row = 0;
    p->panel += PANELS;
}

/* Panel i of the pair; the last one of all may lack its second and is then taken twice. */
LIMB_INLINE const uint8_t *panel_at(const struct run *run, const struct place *p, int i)
{
    const struct cpu_part *part = run->call->part;
    return part->bytes + (size_t)(p->panel + (p->panel + i < run->end ? i : 0)) * part->panel_bytes;
}

LIMB_INLINE const struct limb_group *rows_at(const struct run *run, const struct place *p)
{
    return kern_cpu_limbs_at(run->call, p->row, p->group);
}

/* Sums lie in tiles 0 .. 3, rows of limbs in 4 and 5, codes in 6 and 7. */
static const struct tile_config config = {.palette = 1,
                                          .row_bytes = {64, 64, 64, 64, LIMB_GROUP, LIMB_GROUP, 64, 64},
                                          .rows = {16, 16, 16, 16, 16, 16, QUADS, QUADS}};

LIMB_INLINE void unpack_group(struct limb_kind kind, const struct run *run, const struct place *at, struct group_work *to)
{
    const size_t step = run->call->part->group_bytes >> run->wide;
#pragma GCC unroll 2
    for (int i = 0; i < PANELS; i++) {
        const uint8_t *codes = limb_codes_at(kind, run->call->part, run->wide, panel_at(run, at, i), at->group);
        for (size_t line = 0; line < step; line += 64) _mm_prefetch((const char *)codes + PREFETCH_BYTES + line, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int k = 0; k < LIMB_GROUP; k += 8) {
            __m512i quads[2];
            limb_quads(kind, codes, k, quads);
            _mm512_store_si512(to->quads[i][k / 4], quads[0]);
            _mm512_store_si512(to->quads[i][k / 4 + 1], quads[1]);
        }
    }
    tiles_order();
}

/* The sums that tiles c0 and c1 hold are stored, and they become those of another group. Tiles are named by literals. */
#define NEXT_SUMS(c0, c1, x_tile, x, codes, sums)                                                                              \
    do {                                                                                                                       \
        _tile_loadd(x_tile, x, LIMB_GROUP);                                                                                    \
        _tile_loadd(6, (codes)[0], TILE_ROW_BYTES);                                                                            \
        _tile_stored(c0, (sums)[0], TILE_ROW_BYTES);                                                                           \
        _tile_zero(c0);                                                                                                        \
        _tile_dpbssd(c0, x_tile, 6);                                                                                           \
        _tile_loadd(7, (codes)[1], TILE_ROW_BYTES);                                                                            \
        _tile_stored(c1, (sums)[1], TILE_ROW_BYTES);                                                                           \
        _tile_zero(c1);                                                                                                        \
        _tile_dpbssd(c1, x_tile, 7);                                                                                           \
    } while (0)

LIMB_INLINE void next_sums(int64_t step, const struct limb_group *x, struct group_work *codes, struct group_work *sums)
{
    if (step % 2)
        NEXT_SUMS(2, 3, 5, x, codes->quads, sums->sums);
    else
        NEXT_SUMS(0, 1, 4, x, codes->quads, sums->sums);
    tiles_order();
}

LIMB_INLINE void add_group(struct limb_kind kind, const struct run *run, const struct place *at, const struct group_work *from,
                           __m512 acc[PANELS][LIMB_ROWS])
{
    const struct limb_group *x = rows_at(run, at);
#pragma GCC unroll 2
    for (int i = 0; i < PANELS; i++) {
        const uint8_t *scales = limb_scales_at(run->call->part, run->wide, panel_at(run, at, i), at->group);
        const __m512 scale = limb_scale(kind, scales), min = limb_min(kind, scales);
#pragma GCC unroll 4
        for (int r = 0; r < LIMB_ROWS; r++) {
            const int32_t(*c)[PANEL_ROWS] = from->sums[i][r];
            acc[i][r] = limb_add(kind, at->group ? acc[i][r] : _mm512_setzero_ps(), _mm512_load_si512(c[0]),
                                 _mm512_load_si512(c[1]), _mm512_load_si512(c[2]), &x[r], scale, min);
        }
    }
}

LIMB_INLINE void store_rows(const struct run *run, const struct place *at, __m512 acc[PANELS][LIMB_ROWS])
{
    const struct limb_call *c = run->call;
#pragma GCC unroll 2
    for (int i = 0; i < PANELS; i++) {
        const __mmask16 outs = at->panel + i < run->end ? limb_outs(c->part, at->panel + i) : 0;
        float *y = c->y + (size_t)at->row * c->ldy + c->part->y_first + (at->panel + i) * PANEL_ROWS;
#pragma GCC unroll 4
        for (int r = 0; r < LIMB_ROWS; r++)
            if (at->row + r < c->rows) _mm512_mask_storeu_ps(y + (size_t)r * c->ldy, outs, acc[i][r]);
    }
}

/* Three stages follow one another through all groups: a group's codes are unpacked one step before its products start, its
 * sums are stored two steps later and added in the step after that. */
LIMB_INLINE void run_panels(struct limb_kind kind, const struct run *run, int first)
{
    enum { AHEAD = 1, STORED = 2, ADDED = 3 };
    const int pairs = (run->end - first + PANELS - 1) / PANELS, blocks = (run->call->rows + LIMB_ROWS - 1) / LIMB_ROWS;
    const int64_t steps = (int64_t)pairs * blocks * run->call->groups;
    struct group_work work[RING];
    __m512 acc[PANELS][LIMB_ROWS];
    struct place unpacked = {first, 0, 0}, multiplied = unpacked, added = unpacked;
    const struct limb_group *x = rows_at(run, &multiplied);
    for (int64_t step = -AHEAD; step < steps + ADDED; step++) {
        if (step + AHEAD < steps) {
            unpack_group(kind, run, &unpacked, &work[(step + AHEAD) % RING]);
            advance(&unpacked, run);
        }
        if (step < 0) continue;
        if (step < steps) x = rows_at(run, &multiplied); /* afterwards products only push out the last sums */
        next_sums(step, x, &work[step % RING], &work[(step + RING - STORED) % RING]);
        advance(&multiplied, run);
        if (step < ADDED) continue;
        add_group(kind, run, &added, &work[(step - ADDED) % RING], acc);
        if (added.group == run->call->groups - 1) store_rows(run, &added, acc);
        advance(&added, run);
    }
}

typedef void run_fn(const struct run *run, int first);
#define RUN_FN(name, ...)                                                                                                      \
    static void name(const struct run *run, int first) { run_panels((struct limb_kind){__VA_ARGS__}, run, first); }
#define RUN_ENTRY(name, ...) name,

LIMB_KINDS(RUN_FN)

void kern_cpu_limb_panels_amx(const struct limb_call *call, int first, int end)
{
    static run_fn *const kernels[] = {LIMB_KINDS(RUN_ENTRY)};
    const struct run run = {call, end, __builtin_ctz((unsigned)call->part->group / LIMB_GROUP)};
    if (first >= end) return;
    _tile_loadconfig(&config);
    kernels[limb_kind_index(call->part)](&run, first);
    _tile_release();
}
