/* wgmma_f16: warpgroup matrix instructions of sm_90a on float16 with float32 sums, as attention uses them: operand tiles of 64
 * columns of 2 bytes in shared memory, K-major, with the 128-byte swizzle: row r has its 16-byte chunk c at chunk c ^ (r % 8),
 * eight rows are 1024 bytes and aligned to that. */
#ifndef TANDEM_WGMMA_F16_CUH
#define TANDEM_WGMMA_F16_CUH

#include "device.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The lower word of an operand tile's descriptor, from its shared address; + 2 for each 16 columns further. The upper word is
 * always the same. Descriptors are put together inside the instructions' text, where the compiler cannot keep all of them in
 * registers over a loop. */
__device__ __forceinline__ uint32_t wgmma_tile(uint32_t address) { return (address & 0x3ffff) >> 4 | 1u << 16; }

#define WGMMA_UPPER_WORD "0x40000040" /* 1024 bytes from eight rows to the next; 128-byte swizzle */

/* Before the first instruction after registers were written that it reads. */
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* All but the newest N groups are done. */
template <int N> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from using sums before the wait that stands above this. */
template <int N> __device__ __forceinline__ void wgmma_settle(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* clang-format off */
#define WGMMA_NAMES_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_NAMES_64 WGMMA_NAMES_32 "," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_NAMES_128 WGMMA_NAMES_64 "," \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_SUMS_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_SUMS_32(d, i) \
    WGMMA_SUMS_8(d, i), WGMMA_SUMS_8(d, i + 8), WGMMA_SUMS_8(d, i + 16), WGMMA_SUMS_8(d, i + 24)

/* d = a b^T, or d + a b^T where more: 64 x 64 x 16, both tiles in shared memory, at so much further. */
__device__ __forceinline__ void wgmma_shared(float (&d)[32], uint32_t a, uint32_t b, uint32_t at, int more)
{
    asm volatile("{\n.reg .pred p;\n.reg .b32 la,lb;\n.reg .b64 da,db;\nsetp.ne.b32 p,%35,0;\n"
                 "add.u32 la,%32,%34;\nmov.b64 da,{la," WGMMA_UPPER_WORD "};\n"
                 "add.u32 lb,%33,%34;\nmov.b64 db,{lb," WGMMA_UPPER_WORD "};\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WGMMA_NAMES_32 "},da,db,p,1,1,0,0;\n}"
                 : WGMMA_SUMS_32(d, 0) : "r"(a), "r"(b), "r"(at), "r"(more));
}

/* d += a b^T: 64 x (2 N) x 16, a in registers, b at so much further. */
__device__ __forceinline__ void wgmma_registers(float (&d)[32], const uint32_t (&a)[4], uint32_t b, uint32_t b_at)
{
    asm volatile("{\n.reg .pred p;\n.reg .b32 lb;\n.reg .b64 db;\nsetp.ne.b32 p,1,0;\n"
                 "add.u32 lb,%36,%37;\nmov.b64 db,{lb," WGMMA_UPPER_WORD "};\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WGMMA_NAMES_32 "},{%32,%33,%34,%35},db,p,1,1,0;\n}"
                 : WGMMA_SUMS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b_at));
}

__device__ __forceinline__ void wgmma_registers(float (&d)[64], const uint32_t (&a)[4], uint32_t b, uint32_t b_at)
{
    asm volatile("{\n.reg .pred p;\n.reg .b32 lb;\n.reg .b64 db;\nsetp.ne.b32 p,1,0;\n"
                 "add.u32 lb,%68,%69;\nmov.b64 db,{lb," WGMMA_UPPER_WORD "};\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" WGMMA_NAMES_64 "},{%64,%65,%66,%67},db,p,1,1,0;\n}"
                 : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b_at));
}

__device__ __forceinline__ void wgmma_registers(float (&d)[128], const uint32_t (&a)[4], uint32_t b, uint32_t b_at)
{
    asm volatile("{\n.reg .pred p;\n.reg .b32 lb;\n.reg .b64 db;\nsetp.ne.b32 p,1,0;\n"
                 "add.u32 lb,%132,%133;\nmov.b64 db,{lb," WGMMA_UPPER_WORD "};\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" WGMMA_NAMES_128 "},"
                 "{%128,%129,%130,%131},db,p,1,1,0;\n}"
                 : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_32(d, 32), WGMMA_SUMS_32(d, 64), WGMMA_SUMS_32(d, 96)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b_at));
}
/* clang-format on */

#endif

#endif
