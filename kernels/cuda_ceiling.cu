/* How fast the device reads memory: the bound of all that decoding can reach. */
#include <math.h>

#include "cuda_ops.cuh"

constexpr int IN_FLIGHT = 8;  // loads of 16 bytes
constexpr int THREADS = 512;

/* Reads p (n, a multiple of IN_FLIGHT for every thread); the result is written only to keep the compiler from dropping
 * the loads. */
__global__ static void stream_read_kernel(const uint4 *p, size_t n, unsigned *out) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    unsigned x = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += IN_FLIGHT * step) {
        uint4 v[IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++) {
            v[j] = __ldcs(p + i + j * step);
        }
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++) {
            x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
        }
    }
    if (x == 0x12345678) {
        *out = x;
    }
}

double read_ceiling_cuda(const CudaLaunch *c) {
    const size_t bytes = (size_t)2 << 30;
    const int repeats = 20;
    void *p = device_alloc(bytes, "the measurement of reading", NULL);
    if (!p) {
        return NAN;
    }
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    CUDA_CHECK(cudaMemsetAsync(p, 1, bytes, c->stream));  // all words are the same and XOR to 0: nothing is written
    double best = 0;
    for (int per_sm = 4; per_sm <= 16; per_sm *= 2) {
        const int blocks = c->n_sms * per_sm;
        const size_t all = bytes / sizeof(uint4), n = all - all % ((size_t)IN_FLIGHT * blocks * THREADS);
        for (int i = 0; i < repeats; i++) {
            float ms;
            CUDA_CHECK(cudaEventRecord(begin, c->stream));
            stream_read_kernel<<<blocks, THREADS, 0, c->stream>>>(static_cast<const uint4 *>(p), n, c->counters);
            CUDA_CHECK_LAUNCH(c->stream);
            CUDA_CHECK(cudaEventRecord(end, c->stream));
            CUDA_CHECK(cudaEventSynchronize(end));
            CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
            best = fmax(best, (double)(n * sizeof(uint4)) / (double)ms * 1e-6);
        }
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaFree(p));
    return best;
}
