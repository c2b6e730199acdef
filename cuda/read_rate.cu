/* read_rate: every thread reads four words of 16 bytes at a time and adds them up; a sum that cannot be is written, so that nothing
 * is left out. */
#include "read_rate.h"

enum { READ_THREADS = 512, READ_AT_ONCE = 4, READINGS = 8 };
static const size_t buffer_bytes = (size_t)1 << 30;

static __global__ void __launch_bounds__(READ_THREADS) read_kernel(const uint4 *words, size_t n, uint32_t *out)
{
    const size_t stride = (size_t)gridDim.x * READ_THREADS;
    uint32_t sum = 0;
    for (size_t i = (size_t)blockIdx.x * READ_THREADS + threadIdx.x; i + (READ_AT_ONCE - 1) * stride < n; i += READ_AT_ONCE * stride) {
        uint4 w[READ_AT_ONCE];
#pragma unroll
        for (int j = 0; j < READ_AT_ONCE; j++) w[j] = __ldcs(words + i + j * stride);
#pragma unroll
        for (int j = 0; j < READ_AT_ONCE; j++) sum += w[j].x | w[j].y | w[j].z | w[j].w;
    }
    if (sum) *out = sum; /* the buffer is all zeros */
}

static float reading_ms(const struct op_context *c, const char *buffer, cudaEvent_t from, cudaEvent_t to)
{
    const unsigned blocks = (unsigned)c->processors * 4;
    float ms = 0;
    cudaEventRecord(from, c->stream);
    read_kernel<<<blocks, READ_THREADS, 0, c->stream>>>((const uint4 *)buffer, buffer_bytes / sizeof(uint4), (uint32_t *)(buffer + buffer_bytes));
    cudaEventRecord(to, c->stream);
    return cudaEventSynchronize(to) == cudaSuccess && cudaEventElapsedTime(&ms, from, to) == cudaSuccess ? ms : 0;
}

double read_rate(const struct op_context *c)
{
    char *buffer = NULL;
    cudaEvent_t from = NULL, to = NULL;
    double best = 0;
    const bool ready = cudaMalloc((void **)&buffer, buffer_bytes + 256) == cudaSuccess && cudaEventCreate(&from) == cudaSuccess &&
                       cudaEventCreate(&to) == cudaSuccess && cudaMemsetAsync(buffer, 0, buffer_bytes + 256, c->stream) == cudaSuccess;
    for (int i = 0; i < READINGS && ready; i++) {
        const float ms = reading_ms(c, buffer, from, to);
        const double rate = ms > 0 ? (double)buffer_bytes / ms * 1e3 : 0;
        if (i && rate > best) best = rate;
    }
    if (from) cudaEventDestroy(from);
    if (to) cudaEventDestroy(to);
    if (buffer) cudaFree(buffer);
    return best;
}
