/* gemv: out = W x for one token and a dense W.
 *
 *   out  (rows) fp32 or (rows / 2) fp16, by the epilogue      W  (rows, cols) fp16, rows `stride` apart, zeros
 *   x    (cols) fp16, 16-byte aligned                            between cols and stride
 *
 * A warp takes a pair of neighbouring rows, which is what SwiGLU needs and lets both use one load of x. Lanes read
 * 16 bytes each, UNROLL of them from each row before the first is used, so that enough bytes are in flight, and the
 * first ones before x is there. Sums in fp32, in a fixed order.
 *
 * Bytes: rows * stride * 2; x stays in L1. Reference: kernels/cpu.c (dense_product). Test: tests/test_kernels.c. */
#include "cuda_ops.cuh"

namespace {

constexpr int WARPS = 4;
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
__global__ void __launch_bounds__(32 * WARPS)
    gemv_kernel(void *out, const fp16 *__restrict__ w, size_t stride, int rows, int cols,
                const fp16 *x, DeviceReport *report, unsigned fault, int site) {
    const int lane = threadIdx.x % 32, row = 2 * (int)(blockIdx.x * WARPS + threadIdx.x / 32);
    if (row >= rows) {
        return;
    }
    const fp16 *first = w + row * stride, *second = row + 1 < rows ? first + stride : first;
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
    const int begin = lane * VECTOR;
    load(begin);  // nobody writes weights
    wait_for_previous();
    let_next_start();
    float sum[2] = {0, 0};
    bool finite = true;
    for (int k = begin; k < cols; k += UNROLL * STEP) {
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
    if (row == 0 && lane == 0) {
        count(&report->products[site].bytes, rows * stride * sizeof(fp16));
    }
    sum[0] = warp_sum(sum[0]);
    sum[1] = warp_sum(sum[1]);
    if (EPILOGUE == EPILOGUE_SWIGLU) {
        if (lane == 0) {
            static_cast<half *>(out)[row / 2] = __float2half_rn(silu(sum[0]) * sum[1]);
        }
    } else if (lane < 2 && row + lane < rows) {
        float *o = static_cast<float *>(out) + row + lane;
        const float y = lane == 0 ? sum[0] : sum[1];
        *o = EPILOGUE == EPILOGUE_ADD ? *o + y : y;
    }
}

template <Epilogue EPILOGUE> void launch(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x) {
    const unsigned blocks = (unsigned)ceil_div(w->rows, 2 * WARPS);
    launch_overlapped(c, gemv_kernel<EPILOGUE>, dim3(blocks), 32 * WARPS, 0, out, w->dense, w->stride, (int)w->rows,
                      (int)w->cols, x, c->report, fault_code(w), (int)w->site);
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
