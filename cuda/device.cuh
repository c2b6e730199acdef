/* device: what every kernel family shares - launching with programmatic dependent launch (PDL), barriers and bulk copies in
 * shared memory, matrix instructions, the activation buffer's layout, the batch as kernels see it.
 *
 * PDL: a kernel is started before the one before it in the stream has ended. Rules, for every kernel without exception:
 *   - it calls pdl_go() early, and every block calls pdl_wait() before it touches memory that an earlier kernel writes or
 *     reads, and before it ends (also a block that has nothing to do);
 *   - before pdl_wait() only memory may be read that no kernel of the batch writes: weights, the arrays of the batch, pages of
 *     keys and values that are older than the batch. A batch's first kernel is not launched by PDL: it and those behind it begin
 *     when the batches before have ended.
 * So a kernel ends after all kernels before it, and buffers can be reused in stream order. */
#ifndef TANDEM_DEVICE_CUH
#define TANDEM_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

extern "C" {
#include "kern.h"
}

/* What a launcher needs to know: the stream, and the card. */
struct op_context {
    cudaStream_t stream;
    int sm;         /* 90 for compute capability 9.0 */
    int processors; /* multiprocessors */
    bool pdl;       /* launch with PDL; false below sm_90 */
};

template <class... Parameters, class... Arguments>
static inline void op_launch(const struct op_context *c, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                             Arguments... arguments)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute[1] = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = c->stream;
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attribute;
    config.numAttrs = c->pdl ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...); /* an error stays for cudaGetLastError */
}

#ifdef __CUDACC__

__device__ __forceinline__ void pdl_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void pdl_go()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- barriers and bulk copies in shared memory (sm_90 and later) ---- */

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(bar), "r"(arrivals) : "memory");
}

/* After mbar_init, before a copy engine or another thread uses the barrier. */
__device__ __forceinline__ void mbar_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t n_bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(bar), "r"(n_bytes) : "memory");
}

__device__ __forceinline__ void mbar_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p,[%0],%1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

/* Shared memory from global memory; all of it in multiples of 16 bytes. */
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t n_bytes, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to), "l"(from),
                 "r"(n_bytes), "r"(bar)
                 : "memory");
}
#endif

/* ---- matrix instructions ---- */

/* c += a b, 16 x 8 x 16, fragments as in the PTX manual. */
__device__ __forceinline__ void mma_bf16(float *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    __trap(); /* kern_cuda_open refuses cards below sm_80 */
#endif
}

__device__ __forceinline__ void mma_f16(float *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    __trap();
#endif
}

#endif /* __CUDACC__ */

#endif
