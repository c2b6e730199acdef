/* op_attn_wgmma: prefill attention on Hopper, head_dim 64, 128 or 256, keys and values in two bytes or as codes.
 *
 * A cluster of two blocks has a tile of 64 rows of two query heads that share a KV head; the pages of the tile's keys are
 * halved between the blocks, which merge their results at the end, so that a chunk makes twice as many, evenly long, blocks. The
 * halves depend on the tile's position alone. In a block, a warpgroup of producers has pages brought into shared memory as they
 * are stored and unpacks them to float16 operand tiles, keys as [64 slots][dims], values as [dims][64 slots], both K-major; two
 * warpgroups of consumers, one a head, multiply. A consumer has the next page's scores and this page's p V in flight while it
 * computes probabilities. Scores and outputs are float32; queries, unpacked keys and values, and probabilities (times 2^12,
 * against subnormals) are float16. One step of the online softmax a page, pages in order:
 *   score = q k;   p = 2^(scale (score - max) + 12);   o = o 2^(scale (old max - max)) + p V
 * Factors of 1 may be left out: they change no bit.
 *
 * A tile lies within one page, the last of its pages: there scores past a row's position are selected away. Values past the
 * tile's rows are written as zeros; a value that is not finite is, too, and its slot noted in `broken`, which makes the scores
 * of the slot NaN, but only for rows that see it. */
#include "op_attn_prefill.cuh"
#include "wgmma_f16.cuh"

#include <math.h>

enum { PAGE = KV_PAGE_TOKENS, GROUP = 128, CONSUMERS = 2, THREADS = (CONSUMERS + 1) * GROUP, STAGES = 2, RAW_STAGES = 2 };
enum { BARRIER_QUERIES = 1, BARRIER_TURN = 3, BARRIER_PRODUCERS = 5 }; /* named barriers; the first two one a consumer */

/* Shared memory of a block, in bytes from its beginning. What is read by matrix instructions begins at multiples of 1024. */
template <int DIM, enum kv_format FORMAT> struct layout {
    static constexpr int tile_bytes = PAGE * DIM * 2;       /* a page's keys, or values, unpacked; queries of a head */
    static constexpr int half_bytes = FORMAT == KV_INT8 ? PAGE * DIM + PAGE * DIM / KV_INT8_RUN * 2 : PAGE * DIM * 2;
    static constexpr int parts = FORMAT != KV_INT8 && DIM == 256 ? 2 : 1; /* pieces that a half is unpacked in */
    static constexpr int raw_bytes = half_bytes / parts;
    static constexpr int items = PAGE * DIM * (FORMAT == KV_INT8 ? 1 : 2) / parts / 16 / GROUP; /* of a thread, 16 bytes */
    static constexpr int queries = 0;
    static constexpr int keys = queries + CONSUMERS * tile_bytes;
    static constexpr int values = keys + STAGES * tile_bytes;
    static constexpr int raw = values + STAGES * tile_bytes;
    static constexpr int barriers = raw + RAW_STAGES * raw_bytes;
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
enum { KEYS_FULL = 0, KEYS_EMPTY = 2, VALUES_FULL = 4, VALUES_EMPTY = 6, RAW_FULL = 8, BARRIERS = 10 };

__device__ __forceinline__ uint32_t bar_at(struct barriers b, int which, int i) { return b.first + (which + (i & 1)) * 8; }
/* Page or piece i of a ring of two has come, or its place is free for the first time or again. */
__device__ __forceinline__ void wait_full(struct barriers b, int which, int i) { mbar_wait(bar_at(b, which, i), i >> 1 & 1); }
__device__ __forceinline__ void wait_empty(struct barriers b, int which, int i)
{
    mbar_wait(bar_at(b, which, i), (i >> 1 & 1) ^ 1);
}

__device__ __forceinline__ void named_barrier(int id) { asm volatile("bar.sync %0,%1;" ::"r"(id), "n"((int)GROUP) : "memory"); }
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
__device__ __forceinline__ void operand_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

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
    asm volatile("st.shared::cluster.v4.f32 [%0],{%1,%2,%3,%4};" ::"r"(to), "f"(x0), "f"(x1), "f"(x2), "f"(x3) : "memory");
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

/* A piece of a page's keys or values: a thread's items of 16 bytes, and the scales of codes. */
template <int ITEMS> struct piece {
    uint4 cells[ITEMS];
    uint32_t scales[8]; /* keys: of an item; values: of two slots, two words for each tile of 16 slots */
};

__device__ __forceinline__ uint4 load_cells(uint32_t from)
{
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
    return x;
}

__device__ __forceinline__ uint32_t load_u16(uint32_t from)
{
    uint16_t x;
    asm volatile("ld.shared.u16 %0,[%1];" : "=h"(x) : "r"(from));
    return x;
}

__device__ __forceinline__ uint32_t load_u32(uint32_t from)
{
    uint32_t x;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(x) : "r"(from));
    return x;
}

/* What places of a thread's items have in common, in bytes; the rest depends on the item's number alone.
 *
 * Keys: an item is 16 bytes of a row of a block, 16 slots x 1024 bytes. The upper 64 threads have the upper half of a tile's
 * blocks, or where there is but one, every other tile. With cells of two bytes eight threads in a row have two slots that differ
 * in bits 0 and 2, and so meet all banks when they write. An item becomes two chunks of an operand row (codes), or one, which
 * of an odd block is in the upper half of the row.
 * Values: an item is a lane's 16 bytes of a block of 512. A warp has a quarter of a tile's blocks, or where there are but two, a
 * block of two tiles. stmatrix writes 16 dimensions x 16 slots, each lane giving the address of a row. */
struct lane_places {
    uint32_t key_from, key_scales, key_to[2];
    uint32_t value_from, value_scales, value_to, value_chunk;
    int value_slot;
    uint32_t exponents; /* 0x64646464, in a register */
};

template <int DIM, enum kv_format FORMAT> struct items {
    static constexpr int key_blocks = FORMAT == KV_INT8 ? DIM / 64 : DIM / 32, key_pair = key_blocks / 2;
    static constexpr int value_blocks = FORMAT == KV_INT8 ? DIM / 32 : DIM / 16, value_own = value_blocks / 4;
    static constexpr int of_tile = value_own ? value_own : 1; /* items of values that a warp has of one tile of 16 slots */
    static constexpr int runs = DIM / KV_INT8_RUN, value_dims = DIM / value_blocks;

    static __device__ constexpr int key_tile(int part, int i)
    {
        return key_pair ? part * 4 / layout<DIM, FORMAT>::parts + i / (key_pair ? key_pair : 1) : 2 * i;
    }
    static __device__ constexpr int key_block(int i) { return key_pair ? i % (key_pair ? key_pair : 1) : 0; }
    static __device__ constexpr int value_tile(int part, int i) { return part * 4 / layout<DIM, FORMAT>::parts + i / of_tile; }
};

template <int DIM, enum kv_format FORMAT> __device__ __forceinline__ struct lane_places find_places(int thread)
{
    typedef struct items<DIM, FORMAT> I;
    struct lane_places at;
    const int upper = thread >> 6, bits = thread >> 2 & 15, c = thread & 3, warp = thread >> 5, lane = thread & 31;
    const int block = upper * I::key_pair, tile = I::key_pair ? 0 : upper;
    const int slot = FORMAT == KV_INT8 ? bits : (bits & 1) * 5 ^ (bits & 14), swizzle = slot & 7;
    at.key_from = (tile * I::key_blocks + block) * 1024 + slot * 64 + c * 16;
    at.key_scales = ((tile * 16 + slot) * I::runs + block) * 2;
    const uint32_t row = (tile * 16 + slot) * 128;
    if (FORMAT == KV_INT8) {
        at.key_to[0] = row + block * PAGE * 128 + ((2 * c ^ swizzle) << 4);
        at.key_to[1] = row + block * PAGE * 128 + ((2 * c + 1 ^ swizzle) << 4);
    } else {
        at.key_to[0] = row + block / 2 * PAGE * 128 + ((block % 2 * 4 + c ^ swizzle) << 4);
        at.key_to[1] = at.key_to[0] ^ 64;
    }
    const int value_block = I::value_own ? warp * I::value_own : warp % 2, value_tile = I::value_own ? 0 : warp / 2 * 2;
    at.value_from = (value_tile * I::value_blocks + value_block) * 512 + lane * 16;
    at.value_slot = value_tile * 16 + 2 * c;
    at.value_scales = (value_block / 2 * PAGE + at.value_slot) * 2;
    at.value_to = (value_block * I::value_dims + (lane >> 3 & 1) * 8 + (lane & 7)) * 128;
    at.value_chunk = (value_tile * 2 + (lane >> 4) ^ lane & 7) << 4;
    asm volatile("mov.b32 %0,0x64646464;" : "=r"(at.exponents));
    return at;
}

/* A piece from where it was loaded to. half: where the page's keys or values would begin. The two words of a tile's value scales
 * are divided among its items. */
template <int DIM, enum kv_format FORMAT, bool VALUES, int PART, int ITEMS>
__device__ __forceinline__ void read_piece(struct piece<ITEMS> *to, uint32_t half, const struct lane_places &at)
{
    typedef struct items<DIM, FORMAT> I;
    const uint32_t cells = half + (VALUES ? at.value_from : at.key_from);
    const uint32_t scales = half + PAGE * DIM + (VALUES ? at.value_scales : at.key_scales);
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        to->cells[i] = load_cells(cells + (VALUES ? (I::value_tile(PART, i) * I::value_blocks + i % I::of_tile) * 512
                                                  : (I::key_tile(PART, i) * I::key_blocks + I::key_block(i)) * 1024));
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (FORMAT != KV_INT8) break;
        if (!VALUES) {
            to->scales[i] = load_u16(scales + (I::key_tile(PART, i) * 16 * I::runs + I::key_block(i)) * 2);
        } else if (i % I::of_tile == 0) {
            to->scales[i / I::of_tile * 2] = load_u32(scales + I::value_tile(PART, i) * 32);
            to->scales[i / I::of_tile * 2 + 1] = load_u32(scales + I::value_tile(PART, i) * 32 + 16);
        }
    }
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
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(__uint_as_float(stored & 0xffff0000u)), "f"(__uint_as_float(stored << 16)));
    return r;
}

__device__ __forceinline__ void store_chunk(uint32_t to, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3)
{
    asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(to), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}

template <int DIM, enum kv_format FORMAT>
__device__ __forceinline__ void unpack_key(uint4 x, uint32_t scale, int part, int i, uint32_t tile, const struct lane_places &at)
{
    typedef struct items<DIM, FORMAT> I;
    const uint32_t row = tile + I::key_tile(part, i) * 16 * 128;
    if (FORMAT == KV_INT8) {
        const uint32_t to = row + I::key_block(i) * PAGE * 128, s = __byte_perm(scale, scale, 0x1010), e = at.exponents;
        store_chunk(to + at.key_to[0], lower_codes(x.x, s, e), upper_codes(x.x, s, e), lower_codes(x.y, s, e),
                    upper_codes(x.y, s, e));
        store_chunk(to + at.key_to[1], lower_codes(x.z, s, e), upper_codes(x.z, s, e), lower_codes(x.w, s, e),
                    upper_codes(x.w, s, e));
    } else {
        store_chunk(row + I::key_block(i) / 2 * PAGE * 128 + at.key_to[I::key_block(i) % 2], pair_f16<FORMAT>(x.x),
                    pair_f16<FORMAT>(x.y), pair_f16<FORMAT>(x.z), pair_f16<FORMAT>(x.w));
    }
}

struct own_page {
    int n_slots; /* that rows see; 0: this is another page */
    char *broken;
};

/* In a tile's own page: a pair of values, or of values' scales, of slots slot and slot + 1, with zeros in place of slots that no
 * row sees, and of what is not finite as float16, which is noted. */
template <enum kv_format FORMAT> __device__ __forceinline__ uint32_t select_pair(uint32_t pair, int slot, struct own_page own)
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
__device__ __forceinline__ void select_values(struct piece<ITEMS> *p, int part, struct own_page own, const struct lane_places &at)
{
    typedef struct items<DIM, FORMAT> I;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int slot = at.value_slot + I::value_tile(part, i) * 16;
        if (FORMAT != KV_INT8) {
            uint4 *x = &p->cells[i];
            *x = make_uint4(select_pair<FORMAT>(x->x, slot, own), select_pair<FORMAT>(x->y, slot, own),
                            select_pair<FORMAT>(x->z, slot + 8, own), select_pair<FORMAT>(x->w, slot + 8, own));
        } else if (i % I::of_tile == 0) {
            uint32_t *words = &p->scales[i / I::of_tile * 2];
            words[0] = select_pair<FORMAT>(words[0], slot, own);
            words[1] = select_pair<FORMAT>(words[1], slot + 8, own);
        }
    }
}

/* Four 8 x 8 matrices in the order of fragments: dimensions 0..7 and 8..15 of slots 0..7, then of slots 8..15. */
__device__ __forceinline__ void store_fragments(uint32_t to, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(to), "r"(a0), "r"(a1), "r"(a2), "r"(a3)
                 : "memory");
}

/* lower and upper: scales of the lane's slots in the lower and upper eight of the tile. */
template <int DIM, enum kv_format FORMAT>
__device__ __forceinline__ void unpack_value(uint4 x, uint32_t lower, uint32_t upper, int part, int i, uint32_t tile,
                                             const struct lane_places &at)
{
    typedef struct items<DIM, FORMAT> I;
    const uint32_t to = tile + at.value_to + (at.value_chunk ^ I::value_tile(part, i) << 5) + i % I::of_tile * I::value_dims * 128;
    if (FORMAT == KV_INT8) {
        const uint32_t e = at.exponents;
        store_fragments(to, lower_codes(x.x, lower, e), upper_codes(x.x, lower, e), lower_codes(x.y, upper, e),
                        upper_codes(x.y, upper, e));
        store_fragments(to + 16 * 128, lower_codes(x.z, lower, e), upper_codes(x.z, lower, e), lower_codes(x.w, upper, e),
                        upper_codes(x.w, upper, e));
    } else {
        store_fragments(to, pair_f16<FORMAT>(x.x), pair_f16<FORMAT>(x.y), pair_f16<FORMAT>(x.z), pair_f16<FORMAT>(x.w));
    }
}

template <int DIM, enum kv_format FORMAT, bool VALUES, int PART, int ITEMS>
__device__ __forceinline__ void write_piece(struct piece<ITEMS> *p, uint32_t tile, const struct lane_places &at)
{
    const int of_tile = items<DIM, FORMAT>::of_tile;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const uint32_t *words = &p->scales[i / of_tile * 2];
        if (VALUES)
            unpack_value<DIM, FORMAT>(p->cells[i], FORMAT == KV_INT8 ? words[0] : 0, FORMAT == KV_INT8 ? words[1] : 0, PART, i,
                                      tile, at);
        else
            unpack_key<DIM, FORMAT>(p->cells[i], FORMAT == KV_INT8 ? p->scales[i] : 0, PART, i, tile, at);
    }
}

/* This thread's part of an operand tile is written. */
__device__ __forceinline__ void hand_over(struct barriers bars, int which, int page)
{
    operand_fence();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbar_arrive(bar_at(bars, which, page));
}

struct producer {
    const char *pages_base; /* of the KV head on page 0 */
    size_t page_bytes;
    const int32_t *pages;
    int n_pages;
    uint32_t shared;
    struct barriers bars;
    struct own_page own; /* n_slots 0: it is not among these pages */
    struct lane_places at;
};

/* Piece i: of each page its keys, then its values. By one thread. */
template <int DIM, enum kv_format FORMAT> __device__ __forceinline__ void load_piece(const struct producer *p, int i)
{
    typedef struct layout<DIM, FORMAT> L;
    const int page = i / (2 * L::parts);
    if (page >= p->n_pages) return;
    const char *from = p->pages_base + (size_t)p->pages[page] * p->page_bytes + i % (2 * L::parts) * L::raw_bytes;
    const uint32_t bar = bar_at(p->bars, RAW_FULL, i);
    mbar_expect(bar, L::raw_bytes);
    bulk_load(p->shared + L::raw + (i & 1) * L::raw_bytes, from, L::raw_bytes, bar);
}

/* Part of the keys or values of a page, to its operand tile. The place it was loaded to is loaded again once all have read. */
template <int DIM, enum kv_format FORMAT, bool VALUES, int PART>
__device__ __forceinline__ void unpack_piece(const struct producer *p, int page, int thread)
{
    typedef struct layout<DIM, FORMAT> L;
    const int i = (page * 2 + VALUES) * L::parts + PART;
    struct piece<L::items> now;
    wait_full(p->bars, RAW_FULL, i);
    read_piece<DIM, FORMAT, VALUES, PART>(&now, p->shared + L::raw + (i & 1) * L::raw_bytes - PART * L::raw_bytes, p->at);
    named_barrier(BARRIER_PRODUCERS);
    if (thread == 0) load_piece<DIM, FORMAT>(p, i + RAW_STAGES);
    if (VALUES && p->own.n_slots && page == p->n_pages - 1) select_values<DIM, FORMAT>(&now, PART, p->own, p->at);
    if (PART == 0) wait_empty(p->bars, VALUES ? VALUES_EMPTY : KEYS_EMPTY, page);
    write_piece<DIM, FORMAT, VALUES, PART>(&now, p->shared + (VALUES ? L::values : L::keys) + (page & 1) * L::tile_bytes, p->at);
    if (PART == L::parts - 1) hand_over(p->bars, VALUES ? VALUES_FULL : KEYS_FULL, page);
}

template <int DIM, enum kv_format FORMAT>
__device__ __forceinline__ void produce(const struct prefill_call &c, const struct work &w, char *shared, struct barriers bars,
                                        int thread)
{
    typedef struct layout<DIM, FORMAT> L;
    struct producer p;
    p.pages_base = kv_page_keys(c.kv, 0, w.kv_head, FORMAT, DIM);
    p.page_bytes = c.kv.page_bytes;
    p.pages = w.tile.pages + w.page_first;
    p.n_pages = w.pages;
    p.shared = shared_address(shared);
    p.bars = bars;
    p.own = {w.has_last ? w.tile.rows : 0, shared + L::broken};
    p.at = find_places<DIM, FORMAT>(thread);
    if (thread == 0)
        for (int i = 0; i < RAW_STAGES; i++) load_piece<DIM, FORMAT>(&p, i);
    for (int page = 0; page < w.pages; page++) {
        unpack_piece<DIM, FORMAT, false, 0>(&p, page, thread);
        if (L::parts == 2) unpack_piece<DIM, FORMAT, false, 1>(&p, page, thread);
        unpack_piece<DIM, FORMAT, true, 0>(&p, page, thread);
        if (L::parts == 2) unpack_piece<DIM, FORMAT, true, 1>(&p, page, thread);
    }
}

/* ---- consumers ---- */

/* Of one head and 64 rows; a thread has rows g and g + 8 of its warp's 16, g = lane / 4, and columns 8 i + 2 (lane % 4) + {0, 1}:
 * o[4 i + {0, 1}] of row g, o[4 i + {2, 3}] of row g + 8. A sum is of the thread's own columns until the end. */
template <int DIM> struct state {
    float o[DIM / 2];
    float max[2], sum[2];
};

/* Queries as float16 to an operand tile; rows past the tile's are zeros. */
template <int DIM>
__device__ __forceinline__ void load_queries(const struct prefill_call &p, const struct work &w, int head, char *to, int thread)
{
    const int pieces = DIM / 4;
#pragma unroll 8
    for (int i = thread; i < PAGE * pieces; i += GROUP) {
        const int r = i / pieces, d = i % pieces * 4;
        float4 x = make_float4(0, 0, 0, 0);
        if (r < w.tile.rows) x = *(const float4 *)(prefill_query(p, w.tile.row_first + r, head) + d);
        const __half2 lower = __floats2half2_rn(x.x, x.y), upper = __floats2half2_rn(x.z, x.w);
        char *row = to + d / 64 * PAGE * 128 + r * 128;
        *(uint2 *)(row + ((d % 64 / 8 ^ r & 7) << 4) + d % 8 * 2) = make_uint2(*(const uint32_t *)&lower, *(const uint32_t *)&upper);
    }
}

template <int DIM> __device__ __forceinline__ void start_scores(float (&s)[32], uint64_t queries, uint64_t keys)
{
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        const int at = (k / 4 * PAGE * 128 >> 4) + k % 4 * 2;
        wgmma_shared(s, queries + at, keys + at, k > 0);
    }
    wgmma_commit();
}

template <int DIM> __device__ __forceinline__ void start_outputs(struct state<DIM> *t, const uint32_t (&probs)[4][4], uint64_t values)
{
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_registers(t->o, probs[k], values + k * 2);
    wgmma_commit();
}

/* In the tile's own page row r sees slots 0..r. What is broken is known when the values have been unpacked. */
template <int DIM>
__device__ __forceinline__ void finish_scores(const struct work &w, struct barriers bars, const char *broken, int page, int row,
                                              int lane, float (&s)[32])
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
template <int DIM> __device__ __forceinline__ void softmax_step(struct state<DIM> *t, float (&s)[32], float scale, float (&shrink)[2])
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
__device__ __forceinline__ void consume(const struct prefill_call &p, const struct work &w, char *shared, struct barriers bars,
                                        int consumer, int thread, struct state<DIM> *t)
{
    typedef struct layout<DIM, FORMAT> L;
    char *const own_queries = shared + L::queries + consumer * L::tile_bytes;
    load_queries<DIM>(p, w, w.head_first + consumer, own_queries, thread);
    operand_fence();
    named_barrier(BARRIER_QUERIES + consumer);

    const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
    const uint64_t queries = wgmma_tile(shared_address(own_queries)), keys = wgmma_tile(shared_address(shared + L::keys)),
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
    peer_store(peer_address(shared_address(shared + L::states), peer) + threadIdx.x * 16, t->max[0], t->max[1], t->sum[0],
               t->sum[1]);
}

/* This block's factor and the other's, the division by the sum included. */
__device__ __forceinline__ void merge_factors(float max, float sum, float other_max, float other_sum, float scale, float *own,
                                              float *other)
{
    const float most = fmaxf(max, other_max);
    *own = prefill_ex2((max - most) * scale);
    *other = prefill_ex2((other_max - most) * scale);
    const float inverse = 1.0f / (sum * *own + other_sum * *other);
    *own *= inverse;
    *other *= inverse;
}

/* Eight outputs of a row: columns k + 16 j + {0, 1}, j = 0..3, which make a chunk of the activation's tile. k: within a head. */
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
__device__ __forceinline__ void store_half(const struct prefill_call &p, const struct work &w, const struct state<DIM> *t,
                                           const char *shared, uint32_t rank, int head)
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
            mbar_init(bars.first + i * 8, i >= RAW_FULL ? 1 : (by_consumers ? heads : 1) * GROUP / 32);
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
        produce<DIM, FORMAT>(p, w, shared, bars, thread);
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

template <int DIM, enum kv_format FORMAT> static void launch(const struct op_context *c, const struct prefill_call *call)
{
    const struct kern_attn_shape *s = &call->shape;
    const int pairs = (s->n_heads / s->n_kv_heads + 1) / 2 * s->n_kv_heads, tiles = prefill_tiles_bound(&call->batch, PAGE);
    const int bytes = layout<DIM, FORMAT>::bytes;
    cudaFuncSetAttribute(wgmma_kernel<DIM, FORMAT>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    op_launch(c, wgmma_kernel<DIM, FORMAT>, dim3(2 * (unsigned)pairs, (unsigned)tiles), dim3(THREADS), (size_t)bytes, *call);
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
