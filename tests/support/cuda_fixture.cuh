/* cuda_fixture: what the tests of CUDA kernels share: a card or a visible skip, guarded device memory, copies, bits. */
#ifndef TANDEM_CUDA_FIXTURE_CUH
#define TANDEM_CUDA_FIXTURE_CUH

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "device.cuh"

extern "C" {
#include <cmocka.h>
}

enum { SKIPPED = 77 }; /* ctest's SKIP_RETURN_CODE */

#define CHECK_CUDA(call)                                                                                                 \
    do {                                                                                                                 \
        cudaError_t status_ = (call);                                                                                    \
        if (status_ != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(status_));                              \
    } while (0)

/* The first card. Ends the program with 77, saying so, where there is none. */
static inline struct op_context open_card(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || !n) {
        fprintf(stderr, "SKIPPED: no CUDA device, these tests did not run\n");
        exit(SKIPPED);
    }
    struct cudaDeviceProp p;
    struct op_context c = {};
    if (cudaGetDeviceProperties(&p, 0) != cudaSuccess || cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking) != cudaSuccess) {
        fprintf(stderr, "the CUDA device cannot be used\n");
        exit(1);
    }
    c.sm = p.major * 10 + p.minor;
    c.processors = p.multiProcessorCount;
    c.pdl = p.major >= 9;
    return c;
}

static inline void finish(const struct op_context *c)
{
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaStreamSynchronize(c->stream));
}

static inline uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static inline float random_float(uint64_t *state) /* in [-1, 1) */
{
    return (float)(int32_t)(uint32_t)(random_next(state) >> 32) * 0x1p-31f;
}

static inline float bf16_round(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Device memory full of NaN bytes (0xff) between guards of 256 bytes of 0xa5. */
struct guarded {
    char *whole;
    size_t n_bytes;
    void *dev;
};

static inline struct guarded guarded_new_dev(size_t n_bytes)
{
    struct guarded g = {NULL, n_bytes, NULL};
    CHECK_CUDA(cudaMalloc((void **)&g.whole, n_bytes + 512));
    CHECK_CUDA(cudaMemset(g.whole, 0xa5, n_bytes + 512));
    CHECK_CUDA(cudaMemset(g.whole + 256, 0xff, n_bytes));
    CHECK_CUDA(cudaDeviceSynchronize()); /* a non-blocking stream would not wait for it */
    g.dev = g.whole + 256;
    return g;
}

static inline void guarded_free_dev(struct guarded g, const char *what)
{
    std::vector<unsigned char> host(512);
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(host.data(), g.whole, 256, cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(host.data() + 256, g.whole + 256 + g.n_bytes, 256, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < host.size(); i++)
        if (host[i] != 0xa5) fail_msg("%s: a guard byte was overwritten %s", what, i < 256 ? "before" : "after");
    CHECK_CUDA(cudaFree(g.whole));
}

template <class T> static inline struct guarded to_device(const std::vector<T> &v)
{
    struct guarded g = guarded_new_dev(v.size() * sizeof(T));
    CHECK_CUDA(cudaMemcpy(g.dev, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaDeviceSynchronize());
    return g;
}

template <class T> static inline std::vector<T> from_device(const void *dev, size_t n)
{
    std::vector<T> v(n);
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(v.data(), dev, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}

#endif
