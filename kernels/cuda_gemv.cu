/* gemv: out = W x for one token and a dense W.
 *
 *   out  (rows) fp32 or (rows / 2) fp16, by the epilogue      W  (rows, cols) fp16, rows `stride` apart, zeros
 *   x    (cols) fp16, 16-byte aligned                            between cols and stride
 *
 * Warps of a block share a pair of neighbouring rows, which is what SwiGLU needs and lets both use one load of x.
 * They are so many that each has all its columns in flight at once, if that can be: blocks are short then, and the
 * last ones end together. Lanes read 16 bytes each, UNROLL of them from each row before the first is used, and the
 * first ones before x is there. Sums in fp32, in a fixed order.
 *
 * Bytes: rows * stride * 2; x stays in L1. Reference: kernels/cpu.c (dense_product). Test: tests/test_kernels.c. */
#include "cuda_ops.cuh"

namespace {

constexpr int MIN_WARPS = 4;             // of a block: narrow matrices have several pairs of rows in one
constexpr int MAX_WARPS = 8;
// Threads that an SM shall hold at least: bounds the registers. For compute capability 8.0 ptxas needs more of them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
constexpr int THREADS_PER_SM = 768;
#else
constexpr int THREADS_PER_SM = 1024;
#endif
constexpr int UNROLL = 4;
constexpr int VECTOR = 8;                // fp16 in 16 bytes
constexpr int STEP = 32 * VECTOR;        // columns that a warp takes with one load a lane

/* sum += the products of 8 pairs of fp16. */
__device__ __forceinline__ float dot8(float sum, const uint4 &w, const float2 x[4]) {
    const unsigned words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 f = __half22float2(*reinterpret_cast<const half2 *>(&words[i]));
        sum = fmaf(f.x, x[i].x, sum);
        sum = fmaf(f.y, x[i].y, sum);
    }
    return sum;
}

__device__ __forceinline__ void to_floats(float2 out[4], const uint4 &v) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[i] = __half22float2(*reinterpret_cast<const half2 *>(&words[i]));
    }
}

/* 8 inputs from column k on; what lies beyond cols may hold anything and counts as zero. */
__device__ __forceinline__ uint4 load_inputs(const fp16 *x, int k, int cols) {
    if (k + VECTOR <= cols) {
        return *reinterpret_cast<const uint4 *>(x + k);
    }
    unsigned words[4] = {0, 0, 0, 0};
    for (int i = 0; i < VECTOR && k + i < cols; i++) {
        words[i / 2] |= (unsigned)x[k + i] << (i % 2 * 16);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <Epilogue EPILOGUE>
__global__ void __launch_bounds__(32 * MAX_WARPS, THREADS_PER_SM / (32 * MAX_WARPS))
    gemv_kernel(void *out, const fp16 *__restrict__ w, size_t stride, int rows, int cols, int sharing,
                const fp16 *x, DeviceReport *report, unsigned fault, int site) {
    __shared__ float partial[MAX_WARPS][2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % sharing;
    const int row = 2 * (int)(blockIdx.x * (blockDim.x / 32 / sharing) + warp / sharing);
    const bool has_row = row < rows;
    const fp16 *first = w + (has_row ? row : 0) * stride, *second = row + 1 < rows ? first + stride : first;
    uint4 a[UNROLL], b[UNROLL];
    const auto load = [&](int k) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (k + i * STEP < cols) {
                a[i] = __ldcs(reinterpret_cast<const uint4 *>(first + k + i * STEP));
                b[i] = __ldcs(reinterpret_cast<const uint4 *>(second + k + i * STEP));
            }
        }
    };
    const int begin = part * UNROLL * STEP + lane * VECTOR;
    load(begin);  // nobody writes weights
    wait_for_previous();
    let_next_start();
    float sum[2] = {0, 0};
    bool finite = true;
    for (int k = begin; k < cols; k += sharing * UNROLL * STEP) {
        if (k != begin) {
            load(k);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (k + i * STEP < cols) {
                float2 xf[4];
                to_floats(xf, load_inputs(x, k + i * STEP, cols));
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    finite &= isfinite(xf[j].x) && isfinite(xf[j].y);
                }
                sum[0] = dot8(sum[0], a[i], xf);
                sum[1] = dot8(sum[1], b[i], xf);
            }
        }
    }
    if (row == 0 && !finite) {
        note_fault(report, fault);
    }
    if (row == 0 && threadIdx.x == 0) {
        count(&report->products[site].bytes, rows * stride * sizeof(fp16));
    }
    sum[0] = warp_sum(sum[0]);
    sum[1] = warp_sum(sum[1]);
    if (lane < 2) {
        partial[warp][lane] = lane == 0 ? sum[0] : sum[1];
    }
    __syncthreads();
    if (part != 0 || lane >= 2 || !has_row) {
        return;
    }
    float y = 0;
    for (int i = 0; i < sharing; i++) {
        y += partial[warp + i][lane];
    }
    if (EPILOGUE == EPILOGUE_SWIGLU) {
        const float up = __shfl_down_sync(3u, y, 1);
        if (lane == 0) {
            static_cast<half *>(out)[row / 2] = __float2half_rn(silu(y) * up);
        }
    } else if (row + lane < rows) {
        float *o = static_cast<float *>(out) + row + lane;
        *o = EPILOGUE == EPILOGUE_ADD ? *o + y : y;
    }
}

template <Epilogue EPILOGUE> void launch(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x) {
    const size_t turns = ceil_div(w->cols, UNROLL * STEP);  // of one warp alone
    const size_t sharing = ceil_div(turns, ceil_div(turns, MAX_WARPS)), pairs = max_size(1, MIN_WARPS / sharing);
    launch_overlapped(c, gemv_kernel<EPILOGUE>, dim3((unsigned)ceil_div(w->rows, 2 * pairs)),
                      32 * (unsigned)(sharing * pairs), 0, out, w->dense, w->stride, (int)w->rows, (int)w->cols,
                      (int)sharing, x, c->report, fault_code(w), (int)w->site);
}

}  // namespace

void gemv_cuda(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x, Epilogue epilogue) {
    CHECK(w->format == FORMAT_DENSE && w->rows < INT32_MAX && w->cols < INT32_MAX / 2);
    CHECK(w->stride % VECTOR == 0 && (uintptr_t)w->dense % 16 == 0 && (uintptr_t)x % 16 == 0);
    switch (epilogue) {
    case EPILOGUE_STORE: launch<EPILOGUE_STORE>(c, out, w, x); break;
    case EPILOGUE_ADD: launch<EPILOGUE_ADD>(c, out, w, x); break;
    case EPILOGUE_SWIGLU: launch<EPILOGUE_SWIGLU>(c, out, w, x); break;
    }
}
