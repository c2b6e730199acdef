/* op_attn_wgmma: prefill attention on Hopper, head_dim 64, 128 or 256, keys and values in two bytes or as codes.
 *
 * A cluster of two blocks has a tile of 64 rows of two query heads that share a KV head; the pages of the tile's keys are
 * halved between the blocks, which merge their results at the end: so a chunk of a prompt makes twice as many blocks, all of
 * much the same length. The halves depend on the tile's position alone. In a block, a warpgroup of producers reads pages as
 * they are stored and unpacks them to float16 operand tiles in shared memory, keys as [64 slots][dims], values as
 * [dims][64 slots], both K-major; two warpgroups of consumers, one a head, multiply. A consumer has the next page's scores and
 * this page's p V in flight while it computes probabilities, and the two take turns in starting products. Scores and outputs
 * are float32; queries, unpacked keys and values, and probabilities (times 2^12, against subnormals) are float16. One step of
 * the online softmax a page, pages in order:
 *   score = q k;   p = 2^(scale (score - max) + 12);   o = o 2^(scale (old max - max)) + p V
 * Factors of 1 may be left out: they change no bit.
 *
 * A tile lies within one page, the last of its pages: there scores past a row's position are selected away. Values past the
 * tile's rows are written as zeros; a value that is not finite is, too, and its slot noted in `broken`, which makes the scores
 * of the slot NaN, but only for rows that see it. */
#include "op_attn_prefill.cuh"
#include "wgmma_f16.cuh"

#include <math.h>

enum { PAGE = KV_PAGE_TOKENS, GROUP = 128, CONSUMERS = 2, THREADS = (CONSUMERS + 1) * GROUP, STAGES = 2, TEAM = 64 };
enum { BARRIER_QUERIES = 1, BARRIER_TURN = 3 }; /* named barriers, one a consumer */

/* Shared memory of a block, in bytes from its beginning. What is read by matrix instructions begins at multiples of 1024. */
template <int DIM, enum kv_format FORMAT>
struct layout {
    static constexpr int tile_bytes = 2 * PAGE *DIM; /* a page's keys, or values, unpacked; queries of a head */
    static constexpr int half_bytes = FORMAT == KV_INT8 ? PAGE * DIM + PAGE * DIM / KV_INT8_RUN * 2 : PAGE * DIM * 2;
    static constexpr int queries = 0;
    static constexpr int keys = queries + CONSUMERS * tile_bytes;
    static constexpr int values = keys + STAGES * tile_bytes;
    static constexpr int barriers = values + STAGES * tile_bytes;
    static constexpr int broken = barriers + 128;
    static constexpr int bytes = broken + PAGE;
    static constexpr int merged = keys;   /* after the loops: of the other block half of the outputs */
    static constexpr int states = values; /* and its maxima and sums */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- barriers ---- */

struct barriers {
    uint32_t first;
};
enum { KEYS_FULL = 0, KEYS_EMPTY = 2, VALUES_FULL = 4, VALUES_EMPTY = 6, BARRIERS = 8 };

__device__ __forceinline__ uint32_t bar_at(struct barriers b, int which, int i)
{
    return b.first + (which + (i & 1)) * 8;
}
/* Page i of a ring of two has come, or its place is free for the first time or again. */
__device__ __forceinline__ void wait_full(struct barriers b, int which, int i)
{
    mbar_wait(bar_at(b, which, i), i >> 1 & 1);
}
__device__ __forceinline__ void wait_empty(struct barriers b, int which, int i)
{
    mbar_wait(bar_at(b, which, i), (i >> 1 & 1) ^ 1);
}

__device__ __forceinline__ void named_barrier(int id)
{
    asm volatile("bar.sync %0,%1;" ::"r"(id), "n"((int)GROUP) : "memory");
}
/* Consumers start products in turn, so that one multiplies while the other computes probabilities. */
__device__ __forceinline__ void take_turn(int consumer)
{
    asm volatile("bar.sync %0,%1;" ::"r"(BARRIER_TURN + consumer), "n"(CONSUMERS * GROUP) : "memory");
}
__device__ __forceinline__ void give_turn(int consumer)
{
    asm volatile("bar.arrive %0,%1;" ::"r"(BARRIER_TURN + consumer), "n"(CONSUMERS * GROUP) : "memory");
}
/* Makes this thread's writes to shared memory visible to matrix instructions. */
__device__ __forceinline__ void operand_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t rank;
    asm("mov.u32 %0,%%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_barrier()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t peer_address(uint32_t address, uint32_t rank)
{
    uint32_t to;
    asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(to) : "r"(address), "r"(rank));
    return to;
}

__device__ __forceinline__ void peer_store(uint32_t to, float x0, float x1, float x2, float x3)
{
    asm volatile("st.shared::cluster.v4.f32 [%0],{%1,%2,%3,%4};" ::"r"(to), "f"(x0), "f"(x1), "f"(x2), "f"(x3)
                 : "memory");
}

/* ---- what a block works on ---- */

struct work {
    struct prefill_tile tile;
    int kv_head, head_first, heads; /* 1 or 2 query heads */
    int page_first, pages;          /* this block's half */
    bool has_last;                  /* of them the last one is the tile's own */
};

__device__ __forceinline__ struct work find_work(const struct prefill_call &p, uint32_t rank)
{
    struct work w;
    const int per_kv = p.shape.n_heads / p.shape.n_kv_heads, pairs = (per_kv + 1) / 2, unit = blockIdx.x / 2;
    w.tile = prefill_find_tile(&p.batch, blockIdx.y, PAGE);
    w.kv_head = unit / pairs;
    w.head_first = w.kv_head * per_kv + unit % pairs * 2;
    w.heads = min(2, (w.kv_head + 1) * per_kv - w.head_first);
    const int pages = w.tile.position_first / PAGE + 1, lower = pages / 2;
    w.page_first = rank ? lower : 0;
    w.pages = rank ? pages - lower : lower;
    w.has_last = rank;
    return w;
}

/* ---- producers: pages to operand tiles ---- */

/* Two warps unpack keys, two values. A piece is at most eight items a thread, of 16 bytes as they are stored, and the scales of
 * codes; the next piece is loaded item by item while this one is unpacked.
 *
 * Keys: an item of the 64 threads is a block of 16 slots, 1024 bytes. With cells of two bytes eight threads in a row have
 * two slots that differ in bits 0 and 2, and so meet all banks when they write. An item becomes two chunks of an operand row
 * (codes), or one, which of an odd block is in the upper half of the row.
 * Values: an item of a warp is a block of 512 bytes; each warp has half of a tile's blocks. stmatrix writes 16 dimensions x 16
 * slots, each lane giving the address of a row. */
template <int DIM, enum kv_format FORMAT>
struct pieces {
    static constexpr int cell_bytes = FORMAT == KV_INT8 ? 1 : 2, runs = DIM / KV_INT8_RUN;
    static constexpr int all_items = PAGE * DIM * cell_bytes / 16 / TEAM, items = all_items < 8 ? all_items : 8;
    static constexpr int parts = all_items / items; /* pieces of a page */
    static constexpr int tiles = PAGE / 16 / parts; /* of 16 slots, of a piece */
    static constexpr int bytes = PAGE * DIM * cell_bytes / parts;
    static constexpr int key_blocks = items / tiles;                            /* of a tile */
    static constexpr int value_blocks = 2 * items / tiles, own = items / tiles; /* of a tile; a warp's */
    static constexpr int value_dims = DIM / value_blocks;
    static constexpr int of_scale = own < 2 ? 1 : 2; /* items of values in a row that have the same scales */
};

template <int ITEMS> struct piece {
    uint4 cells[ITEMS];
    uint32_t scales[8]; /* keys: of an item; values: of two slots each, slots 0..7 and 8..15 of the tile */
};

__device__ __forceinline__ uint4 load_cells(const char *from)
{
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

__device__ __forceinline__ uint32_t load_u16(const char *from)
{
    uint16_t x;
    asm volatile("ld.global.u16 %0,[%1];" : "=h"(x) : "l"(from));
    return x;
}

__device__ __forceinline__ uint32_t load_u32(const char *from)
{
    uint32_t x;
    asm volatile("ld.global.u32 %0,[%1];" : "=r"(x) : "l"(from));
    return x;
}

/* Where a thread reads and writes, in bytes: the part that does not depend on the item. */
struct lane_places {
    uint32_t from, scales;
    uint32_t to[2]; /* keys: the two chunks; values: row, chunk */
    int slot;
    uint32_t exponents; /* 0x64646464, in a register */
};

template <int DIM, enum kv_format FORMAT, bool VALUES>
__device__ __forceinline__ struct lane_places find_places(int thread)
{
    typedef struct pieces<DIM, FORMAT> P;
    struct lane_places at;
    const int bits = thread >> 2, c = thread & 3, warp = thread >> 5, lane = thread & 31;
    asm volatile("mov.b32 %0,0x64646464;" : "=r"(at.exponents));
    if (VALUES) {
        at.from = warp * P::own * 512 + lane * 16;
        at.slot = 2 * c;
        at.scales = PAGE * DIM + (warp * P::own / 2 * PAGE + at.slot) * 2;
        at.to[0] = (warp * P::own * P::value_dims + (lane >> 3 & 1) * 8 + (lane & 7)) * 128;
        at.to[1] = (lane >> 4 ^ lane & 7) << 4;
        return at;
    }
    at.slot = FORMAT == KV_INT8 ? bits : (bits & 1) * 5 ^ (bits & 14);
    at.from = at.slot * 64 + c * 16;
    at.scales = PAGE * DIM + at.slot * P::runs * 2;
    const int chunk = FORMAT == KV_INT8 ? 2 * c : c, other = FORMAT == KV_INT8 ? 2 * c + 1 : 4 + c;
    at.to[0] = at.slot * 128 + ((chunk ^ at.slot & 7) << 4);
    at.to[1] = at.slot * 128 + ((other ^ at.slot & 7) << 4);
    return at;
}

/* Item i of a piece; half: the page's keys or values. */
template <int DIM, enum kv_format FORMAT, bool VALUES, int ITEMS>
__device__ __forceinline__ void load_item(struct piece<ITEMS> *to, const char *half, int part, int i,
                                          const struct lane_places &at)
{
    typedef struct pieces<DIM, FORMAT> P;
    const char *cells = half + at.from + part * P::bytes, *scales = half + at.scales;
    if (!VALUES) {
        to->cells[i] = load_cells(cells + i * 1024);
        if (FORMAT == KV_INT8)
            to->scales[i] = load_u16(scales + part * P::tiles * 16 * P::runs * 2 +
                                     (i / P::key_blocks * 16 * P::runs + i % P::key_blocks) * 2);
        return;
    }
    to->cells[i] = load_cells(cells + (i / P::own * P::value_blocks + i % P::own) * 512);
    if (FORMAT != KV_INT8) return;
    const int words = 2 / P::of_scale, run = i % P::own / 2, tile = i / P::own;
#pragma unroll
    for (int j = i * words; j < (i + 1) * words; j++)
        to->scales[j] = load_u32(scales + part * P::tiles * 32 + run * PAGE * 2 + tile * 32 + j % 2 * 16);
}

__device__ __forceinline__ uint32_t mul_pair(uint32_t a, uint32_t b)
{
    uint32_t r;
    asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

/* The lower or upper two of four codes, times a pair of scales. A byte below 0x64 is 1024 + byte. */
__device__ __forceinline__ uint32_t lower_codes(uint32_t codes, uint32_t scales, uint32_t exponents)
{
    return mul_pair(kv_codes_minus_bias(__byte_perm(codes, exponents, 0x4140)), scales);
}
__device__ __forceinline__ uint32_t upper_codes(uint32_t codes, uint32_t scales, uint32_t exponents)
{
    return mul_pair(kv_codes_minus_bias(__byte_perm(codes, exponents, 0x4342)), scales);
}

template <enum kv_format FORMAT> __device__ __forceinline__ uint32_t pair_f16(uint32_t stored)
{
    if (FORMAT == KV_F16) return stored;
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;"
        : "=r"(r)
        : "f"(__uint_as_float(stored & 0xffff0000u)), "f"(__uint_as_float(stored << 16)));
    return r;
}

__device__ __forceinline__ void store_chunk(uint32_t to, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3)
{
    asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(to), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

/* tile: the piece's first row. */
template <int DIM, enum kv_format FORMAT>
__device__ __forceinline__ void unpack_key(uint4 x, uint32_t scale, int i, uint32_t tile, const struct lane_places &at)
{
    typedef struct pieces<DIM, FORMAT> P;
    const int block = i % P::key_blocks;
    const uint32_t row = tile + i / P::key_blocks * 16 * 128;
    if (FORMAT == KV_INT8) {
        const uint32_t to = row + block * PAGE * 128, s = __byte_perm(scale, scale, 0x1010), e = at.exponents;
        store_chunk(to + at.to[0], lower_codes(x.x, s, e), upper_codes(x.x, s, e), lower_codes(x.y, s, e),
                    upper_codes(x.y, s, e));
        store_chunk(to + at.to[1], lower_codes(x.z, s, e), upper_codes(x.z, s, e), lower_codes(x.w, s, e),
                    upper_codes(x.w, s, e));
    } else {
        store_chunk(row + block / 2 * PAGE * 128 + at.to[block % 2], pair_f16<FORMAT>(x.x), pair_f16<FORMAT>(x.y),
                    pair_f16<FORMAT>(x.z), pair_f16<FORMAT>(x.w));
    }
}

struct own_page {
    int n_slots; /* that rows see; 0: this is another page */
    char *broken;
};

/* In a tile's own page: a pair of values, or of values' scales, of slots slot and slot + 1, with zeros in place of slots
 * that no row sees, and of what is not finite as float16, which is noted. */
template <enum kv_format FORMAT>
__device__ __forceinline__ uint32_t select_pair(uint32_t pair, int slot, struct own_page own)
{
    const uint32_t too_large = FORMAT == KV_BF16 ? 0x4780 : 0x7c00;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool seen = slot + i < own.n_slots, finite = (pair >> 16 * i & 0x7fff) < too_large;
        if (seen && finite) continue;
        if (seen) own.broken[slot + i] = 1;
        pair &= ~(0xffffu << 16 * i);
    }
    return pair;
}

/* Of codes the scales are selected. */
template <int DIM, enum kv_format FORMAT, int ITEMS>
__device__ __forceinline__ void select_values(struct piece<ITEMS> *p, int part, struct own_page own,
                                              const struct lane_places &at)
{
    typedef struct pieces<DIM, FORMAT> P;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int slot = at.slot + (part * P::tiles + i / P::own) * 16;
        if (FORMAT != KV_INT8) {
            uint4 *x = &p->cells[i];
            *x = make_uint4(select_pair<FORMAT>(x->x, slot, own), select_pair<FORMAT>(x->y, slot, own),
                            select_pair<FORMAT>(x->z, slot + 8, own), select_pair<FORMAT>(x->w, slot + 8, own));
        } else if (i % P::of_scale == 0) {
            uint32_t *words = &p->scales[i / P::of_scale * 2];
            words[0] = select_pair<FORMAT>(words[0], slot, own);
            words[1] = select_pair<FORMAT>(words[1], slot + 8, own);
        }
    }
}

/* Four 8 x 8 matrices in the order of fragments: dimensions 0..7 and 8..15 of slots 0..7, then of slots 8..15. */
__device__ __forceinline__ void store_fragments(uint32_t to, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(to), "r"(a0), "r"(a1), "r"(a2),
                 "r"(a3)
                 : "memory");
}

/* lower and upper: scales of the lane's slots in the lower and upper eight of the tile; chunk: of the piece's first tile. */
template <int DIM, enum kv_format FORMAT>
__device__ __forceinline__ void unpack_value(uint4 x, uint32_t lower, uint32_t upper, int i, uint32_t rows,
                                             uint32_t chunk, uint32_t exponents)
{
    typedef struct pieces<DIM, FORMAT> P;
    const uint32_t to = rows + i % P::own * P::value_dims * 128 + (chunk ^ i / P::own << 5);
    if (FORMAT == KV_INT8) {
        store_fragments(to, lower_codes(x.x, lower, exponents), upper_codes(x.x, lower, exponents),
                        lower_codes(x.y, upper, exponents), upper_codes(x.y, upper, exponents));
        store_fragments(to + 16 * 128, lower_codes(x.z, lower, exponents), upper_codes(x.z, lower, exponents),
                        lower_codes(x.w, upper, exponents), upper_codes(x.w, upper, exponents));
    } else {
        store_fragments(to, pair_f16<FORMAT>(x.x), pair_f16<FORMAT>(x.y), pair_f16<FORMAT>(x.z), pair_f16<FORMAT>(x.w));
    }
}

/* Unpacks a piece to an operand tile; next: the half of the page that the next piece, next_part, is of; NULL: there is none. */
template <int DIM, enum kv_format FORMAT, bool VALUES, int ITEMS>
__device__ __forceinline__ void unpack_piece(struct piece<ITEMS> *p, int part, const char *next, int next_part,
                                             uint32_t tile, const struct lane_places &at)
{
    typedef struct pieces<DIM, FORMAT> P;
    const uint32_t rows = VALUES ? tile + at.to[0] : tile + part * P::tiles * 16 * 128;
    const uint32_t chunk = at.to[1] ^ part * P::tiles << 5;
    uint32_t lower = 0, upper = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (VALUES) {
            if (FORMAT == KV_INT8 && i % P::of_scale == 0) {
                lower = p->scales[i / P::of_scale * 2];
                upper = p->scales[i / P::of_scale * 2 + 1];
            }
            unpack_value<DIM, FORMAT>(p->cells[i], lower, upper, i, rows, chunk, at.exponents);
        } else {
            unpack_key<DIM, FORMAT>(p->cells[i], p->scales[i], i, rows, at);
        }
        if (next) load_item<DIM, FORMAT, VALUES>(p, next, next_part, i, at);
        __syncwarp(); /* keeps the compiler from gathering the loads at the end, where nothing hides their latency */
    }
}

/* This thread's part of an operand tile is written. */
__device__ __forceinline__ void hand_over(struct barriers bars, int which, int page)
{
    operand_fence();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbar_arrive(bar_at(bars, which, page));
}

template <int DIM, enum kv_format FORMAT, bool VALUES>
__device__ __forceinline__ void produce(const struct prefill_call &p, const struct work &w, char *shared,
                                        struct barriers bars, int thread)
{
    typedef struct layout<DIM, FORMAT> L;
    typedef struct pieces<DIM, FORMAT> P;
    if (!w.pages) return;
    const uint32_t tiles = shared_address(shared + (VALUES ? L::values : L::keys));
    const struct lane_places at = find_places<DIM, FORMAT, VALUES>(thread);
    const int32_t *pages = w.tile.pages + w.page_first;
    struct piece<P::items> now;
    const char *half = kv_page_keys(p.kv, pages[0], w.kv_head, FORMAT, DIM) + (VALUES ? L::half_bytes : 0);
#pragma unroll
    for (int i = 0; i < P::items; i++) load_item<DIM, FORMAT, VALUES>(&now, half, 0, i, at);
    for (int page = 0; page < w.pages; page++) {
        const char *next = nullptr;
        if (page + 1 < w.pages)
            next = kv_page_keys(p.kv, pages[page + 1], w.kv_head, FORMAT, DIM) + (VALUES ? L::half_bytes : 0);
        const struct own_page own = {w.has_last && page == w.pages - 1 ? w.tile.rows : 0, shared + L::broken};
        wait_empty(bars, VALUES ? VALUES_EMPTY : KEYS_EMPTY, page);
#pragma unroll 1
        for (int part = 0; part < P::parts; part++) {
            const bool last = part == P::parts - 1;
            if (VALUES && own.n_slots) select_values<DIM, FORMAT>(&now, part, own, at);
            unpack_piece<DIM, FORMAT, VALUES>(&now, part, last ? next : half, last ? 0 : part + 1,
                                              tiles + (page & 1) * L::tile_bytes, at);
        }
        hand_over(bars, VALUES ? VALUES_FULL : KEYS_FULL, page);
        half = next;
    }
}

/* ---- consumers ---- */

/* Of one head and 64 rows; a thread has rows g and g + 8 of its warp's 16, g = lane / 4, and columns 8 i + 2 (lane % 4)
 * + {0, 1}: o[4 i + {0, 1}] of row g, o[4 i + {2, 3}] of row g + 8. A sum is of the thread's own columns until the end. */
template <int DIM> struct state {
    float o[DIM / 2];
    float max[2], sum[2];
};

/* Queries as float16 to an operand tile; rows past the tile's are zeros. */
template <int DIM>
__device__ __forceinline__ void load_queries(const struct prefill_call &p, const struct work &w, int head, char *to,
                                             int thread)
{
    const int pieces = DIM / 4;
#pragma unroll 8
    for (int i = thread; i < PAGE * pieces; i += GROUP) {
        const int r = i / pieces, d = i % pieces * 4;
        float4 x = make_float4(0, 0, 0, 0);
        if (r < w.tile.rows) x = *(const float4 *)(prefill_query(p, w.tile.row_first + r, head) + d);
        const __half2 lower = __floats2half2_rn(x.x, x.y), upper = __floats2half2_rn(x.z, x.w);
        char *row = to + d / 64 * PAGE * 128 + r * 128;
        *(uint2 *)(row + ((d % 64 / 8 ^ r & 7) << 4) + d % 8 * 2) =
            make_uint2(*(const uint32_t *)&lower, *(const uint32_t *)&upper);
    }
}

template <int DIM> __device__ __forceinline__ void start_scores(float (&s)[32], uint32_t queries, uint32_t keys)
{
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        const int at = (k / 4 * PAGE * 128 >> 4) + k % 4 * 2;
        wgmma_shared(s, queries, keys, at, k > 0);
    }
    wgmma_commit();
}

template <int DIM>
__device__ __forceinline__ void start_outputs(struct state<DIM> *t, const uint32_t (&probs)[4][4], uint32_t values)
{
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_registers(t->o, probs[k], values, k * 2);
    wgmma_commit();
}

/* In the tile's own page row r sees slots 0..r. What is broken is known when the values have been unpacked. */
template <int DIM>
__device__ __forceinline__ void finish_scores(const struct work &w, struct barriers bars, const char *broken, int page,
                                              int row, int lane, float (&s)[32])
{
    if (!w.has_last || page < w.pages - 1) return;
    wait_full(bars, VALUES_FULL, page);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int slot = i / 4 * 8 + 2 * (lane & 3) + (i & 1), own = row + (i & 2) * 4;
        if (broken[slot]) s[i] = NAN;
        if (slot > own) s[i] = -INFINITY;
    }
}

/* Scores become probabilities. shrink: what earlier sums are multiplied by. */
template <int DIM>
__device__ __forceinline__ void softmax_step(struct state<DIM> *t, float (&s)[32], float scale, float (&shrink)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
        for (int i = 1; i < 8; i++) most = fmaxf(most, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 2)), t->max[h]);
        shrink[h] = prefill_ex2((t->max[h] - most) * scale);
        t->max[h] = most;
        const float offset = fmaf(-most, scale, 12.0f);
        float sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *x = &s[i / 2 * 4 + 2 * h + i % 2];
            *x = prefill_ex2(fmaf(*x, scale, offset));
            sum[i % 2] += *x;
        }
        t->sum[h] = fmaf(t->sum[h], shrink[h], sum[0] + sum[1]);
    }
}

template <int DIM> __device__ __forceinline__ void shrink_outputs(struct state<DIM> *t, const float (&shrink)[2])
{
    if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) t->o[i] *= shrink[i / 2 % 2];
}

/* Scores' places are those of operand A: no exchange is needed. */
__device__ __forceinline__ void pack_probs(const float (&s)[32], uint32_t (&probs)[4][4])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const __half2 pair = __floats2half2_rn(s[2 * i], s[2 * i + 1]);
        probs[i / 4][i % 4] = *(const uint32_t *)&pair;
    }
}

__device__ __forceinline__ void release(struct barriers bars, int which, int page)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbar_arrive(bar_at(bars, which, page));
}

template <int DIM, enum kv_format FORMAT>
__device__ __forceinline__ void consume(const struct prefill_call &p, const struct work &w, char *shared,
                                        struct barriers bars, int consumer, int thread, struct state<DIM> *t)
{
    typedef struct layout<DIM, FORMAT> L;
    char *const own_queries = shared + L::queries + consumer * L::tile_bytes;
    load_queries<DIM>(p, w, w.head_first + consumer, own_queries, thread);
    operand_fence();
    named_barrier(BARRIER_QUERIES + consumer);

    const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
    const uint32_t queries = wgmma_tile(shared_address(own_queries)),
                   keys = wgmma_tile(shared_address(shared + L::keys)),
                   values = wgmma_tile(shared_address(shared + L::values));
    float s[32], shrink[2];
    uint32_t probs[4][4];
    if (!w.pages) return;
    wait_full(bars, KEYS_FULL, 0);
    wgmma_begin();
    start_scores<DIM>(s, queries, keys);
    wgmma_wait<0>();
    wgmma_settle(s);
    release(bars, KEYS_EMPTY, 0);
    finish_scores<DIM>(w, bars, shared + L::broken, 0, row, lane, s);
    softmax_step<DIM>(t, s, p.scale_log2, shrink);
    pack_probs(s, probs);
    const bool turns = w.heads == 2;
    if (turns && consumer == 1) give_turn(0);
    for (int page = 1; page < w.pages; page++) {
        wait_full(bars, KEYS_FULL, page);
        if (turns) take_turn(consumer);
        wgmma_begin();
        start_scores<DIM>(s, queries, keys + (page & 1) * (L::tile_bytes >> 4));
        wait_full(bars, VALUES_FULL, page - 1);
        start_outputs<DIM>(t, probs, values + (page - 1 & 1) * (L::tile_bytes >> 4));
        if (turns) give_turn(consumer ^ 1);
        wgmma_wait<1>();
        wgmma_settle(s);
        release(bars, KEYS_EMPTY, page);
        finish_scores<DIM>(w, bars, shared + L::broken, page, row, lane, s);
        softmax_step<DIM>(t, s, p.scale_log2, shrink);
        wgmma_wait<0>();
        wgmma_settle(t->o);
        release(bars, VALUES_EMPTY, page - 1);
        shrink_outputs<DIM>(t, shrink);
        pack_probs(s, probs);
    }
    wait_full(bars, VALUES_FULL, w.pages - 1);
    wgmma_begin();
    start_outputs<DIM>(t, probs, values + (w.pages - 1 & 1) * (L::tile_bytes >> 4));
    wgmma_wait<0>();
    wgmma_settle(t->o);
}

/* ---- the end ---- */

/* Each block merges and stores half of the rows: of a thread's two, rank 0 the first. */
template <int DIM, enum kv_format FORMAT>
__device__ __forceinline__ void send_half(const struct state<DIM> *t, char *shared, uint32_t rank)
{
    typedef struct layout<DIM, FORMAT> L;
    const uint32_t peer = rank ^ 1, outputs = peer_address(shared_address(shared + L::merged), peer) + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        const float *o = &t->o[i * 8];
        peer_store(outputs + i * CONSUMERS * GROUP * 16, peer ? o[2] : o[0], peer ? o[3] : o[1], peer ? o[6] : o[4],
                   peer ? o[7] : o[5]);
    }
    peer_store(peer_address(shared_address(shared + L::states), peer) + threadIdx.x * 16, t->max[0], t->max[1],
               t->sum[0], t->sum[1]);
}

/* This block's factor and the other's, the division by the sum included. */
__device__ __forceinline__ void merge_factors(float max, float sum, float other_max, float other_sum, float scale,
                                              float *own, float *other)
{
    const float most = fmaxf(max, other_max);
    *own = prefill_ex2((max - most) * scale);
    *other = prefill_ex2((other_max - most) * scale);
    const float inverse = 1.0f / (sum * *own + other_sum * *other);
    *own *= inverse;
    *other *= inverse;
}

/* Eight outputs of a row: columns k + 16 j + {0, 1}, j = 0..3, which make a chunk of the activation's tile (act_place). k is
 * within a head. */
__device__ __forceinline__ void store_outputs(const struct prefill_call &p, int row, int head, int k, float (&x)[8])
{
    const int dim = p.shape.head_dim, column = head * dim + k, r = row - p.batch.decode_rows;
    if (p.shape.gated) {
        const float *gate = prefill_query(p, row, head) + dim + k;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 g = *(const float2 *)(gate + 16 * j);
            x[2 * j] *= prefill_sigmoid(g.x);
            x[2 * j + 1] *= prefill_sigmoid(g.y);
        }
    }
    __nv_bfloat162 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = __floats2bfloat162_rn(x[2 * j] * ACT_SCALE, x[2 * j + 1] * ACT_SCALE);
    const int width = p.shape.n_heads * dim, in_tile = r % ACT_TILE_ROWS, chunk = act_place(column % ACT_BLOCK) / 8;
    const size_t tile = (size_t)(r / ACT_TILE_ROWS) * act_blocks(width) + column / ACT_BLOCK;
    char *to = (char *)p.o_act + act_prefill_offset(p.batch.decode_rows, width) + tile * ACT_TILE_BYTES + in_tile * 128;
    *(uint4 *)(to + ((chunk ^ in_tile & 7) << 4)) = *(const uint4 *)pairs;
}

template <int DIM, enum kv_format FORMAT>
__device__ __forceinline__ void store_half(const struct prefill_call &p, const struct work &w,
                                           const struct state<DIM> *t, const char *shared, uint32_t rank, int head)
{
    typedef struct layout<DIM, FORMAT> L;
    const int lane = threadIdx.x & 31, row = (threadIdx.x % GROUP >> 5) * 16 + (lane >> 2) + rank * 8;
    const float4 other = ((const float4 *)(shared + L::states))[threadIdx.x];
    const float *theirs = (const float *)(shared + L::merged) + threadIdx.x * 4;
    float own_factor, other_factor;
    merge_factors(rank ? t->max[1] : t->max[0], rank ? t->sum[1] : t->sum[0], rank ? other.y : other.x,
                  rank ? other.w : other.z, p.scale_log2, &own_factor, &other_factor);
    if (row >= w.tile.rows) return;
#pragma unroll
    for (int first = 0; first < DIM / 8; first += 1 + first % 2 * 6) { /* runs of 8 columns: 0, 1, 8, 9, ... */
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int i = first + j / 2 * 2, c = j % 2;
            const float own = rank ? t->o[i * 4 + 2 + c] : t->o[i * 4 + c];
            x[j] = fmaf(theirs[i / 2 * CONSUMERS * GROUP * 4 + i % 2 * 2 + c], other_factor, own * own_factor);
        }
        store_outputs(p, w.tile.row_first + row, head, first * 8 + 2 * (lane & 3), x);
    }
}

__device__ __forceinline__ void prepare(char *shared, int barriers_at, int broken_at, int heads)
{
    if (threadIdx.x < PAGE) shared[broken_at + threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        const struct barriers bars = {shared_address(shared + barriers_at)};
        for (int i = 0; i < BARRIERS; i++) {
            const bool by_consumers = i / 2 * 2 == KEYS_EMPTY || i / 2 * 2 == VALUES_EMPTY;
            mbar_init(bars.first + i * 8, (by_consumers ? heads * GROUP : TEAM) / 32);
        }
        mbar_init_fence();
    }
    __syncthreads();
}

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define CLUSTER_OF_TWO
#else
#define CLUSTER_OF_TWO __cluster_dims__(2, 1, 1)
#endif

template <int DIM, enum kv_format FORMAT>
__global__ static void CLUSTER_OF_TWO __launch_bounds__(THREADS, 1) wgmma_kernel(const __grid_constant__ prefill_call p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef struct layout<DIM, FORMAT> L;
    extern __shared__ __align__(1024) char shared[];
    pdl_go();
    pdl_wait();
    const uint32_t rank = cluster_rank();
    const struct work w = find_work(p, rank);
    if (!w.tile.rows) return; /* both blocks of the cluster */
    prepare(shared, L::barriers, L::broken, w.heads);
    const struct barriers bars = {shared_address(shared + L::barriers)};
    const int thread = threadIdx.x % GROUP;
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0); /* so that the compiler knows that a warp has one */
    if (group == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        if (__shfl_sync(~0u, thread / TEAM, 0))
            produce<DIM, FORMAT, true>(p, w, shared, bars, thread % TEAM);
        else
            produce<DIM, FORMAT, false>(p, w, shared, bars, thread);
        cluster_barrier();
        cluster_barrier();
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    const bool used = group < w.heads;
    struct state<DIM> t;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) t.o[i] = 0;
    t.max[0] = t.max[1] = -INFINITY;
    t.sum[0] = t.sum[1] = 0;
    if (used) consume<DIM, FORMAT>(p, w, shared, bars, group, thread, &t);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        t.sum[h] += __shfl_xor_sync(~0u, t.sum[h], 1);
        t.sum[h] += __shfl_xor_sync(~0u, t.sum[h], 2);
    }
    cluster_barrier(); /* both blocks are done with their operand tiles */
    if (used) send_half<DIM, FORMAT>(&t, shared, rank);
    cluster_barrier();
    if (used) store_half<DIM, FORMAT>(p, w, &t, shared, rank, w.head_first + group);
#else
    __trap(); /* op_attn_wgmma_serves is false on other cards */
#endif
}

bool op_attn_wgmma_serves(const struct op_context *c, const struct kern_attn_shape *s)
{
    const bool dim = s->head_dim == 64 || s->head_dim == 128 || s->head_dim == 256;
    return c->sm == 90 && dim && s->kv != KV_F32;
}

template <int DIM, enum kv_format FORMAT>
static void launch(const struct op_context *c, const struct prefill_call *call)
{
    const struct kern_attn_shape *s = &call->shape;
    const int pairs = (s->n_heads / s->n_kv_heads + 1) / 2 * s->n_kv_heads,
              tiles = prefill_tiles_bound(&call->batch, PAGE);
    const int bytes = layout<DIM, FORMAT>::bytes;
    cudaFuncSetAttribute(wgmma_kernel<DIM, FORMAT>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    op_launch(c, wgmma_kernel<DIM, FORMAT>, dim3(2 * (unsigned)pairs, (unsigned)tiles), dim3(THREADS), (size_t)bytes,
              *call);
}

template <int DIM> static void launch_format(const struct op_context *c, const struct prefill_call *call)
{
    switch (call->shape.kv) {
    case KV_INT8: launch<DIM, KV_INT8>(c, call); break;
    case KV_F16: launch<DIM, KV_F16>(c, call); break;
    default: launch<DIM, KV_BF16>(c, call);
    }
}

void op_attn_wgmma(const struct op_context *c, const struct prefill_call *call)
{
    switch (call->shape.head_dim) {
    case 64: launch_format<64>(c, call); break;
    case 128: launch_format<128>(c, call); break;
    default: launch_format<256>(c, call);
    }
}
