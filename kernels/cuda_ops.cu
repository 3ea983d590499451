/* cuda_ops.cu: embedding, norm, RoPE, SwiGLU and the check of inputs: operations that read and write each
 * number once and wait for memory, not for arithmetic. Reference: cpu.c. Test: tests/gpu/ops_test.cu.
 *
 * A thread takes VECTOR neighbouring values of one row: 16 bytes of fp16, 32 of fp32, in one or two loads.
 * Where rows do not start on 16 bytes or end inside a vector, the same thread takes the same values one by
 * one, so that every shape runs through the same code in the same order. Only rmsnorm adds numbers up: its
 * order is fixed by dim alone. */
#include "cuda_ops.cuh"

#include <limits.h>

#define VECTOR 8
#define THREADS 128        // of the operations without a sum: small blocks spread a decode step over many SMs
#define NORM_THREADS 1024  // most of rmsnorm

static_assert(VECTOR * sizeof(fp16) == sizeof(uint4) && VECTOR * sizeof(float) == 2 * sizeof(float4),
              "a vector is one 16-byte load of fp16 and two of fp32");
static_assert(NORM_THREADS == 32 * 32, "one warp adds up the sums of all warps, one a lane");

static bool is_aligned(const void *p) {
    return (uintptr_t)p % sizeof(uint4) == 0;
}

/* ---- vectors ------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float to_float(fp16 h) {
    return __half2float(__ushort_as_half(h));
}
static __device__ __forceinline__ void convert(float *out, float x) {
    *out = x;
}
static __device__ __forceinline__ void convert(fp16 *out, float x) {
    *out = __half_as_ushort(__float2half_rn(x));
}

/* A vector as it lies in memory. */
template <class T>
struct alignas(sizeof(uint4)) Vector {
    T value[VECTOR];
};

/* The vector at p, of which `left` values (any sign) belong to the row; zeros beyond. aligned: whole vectors
 * of this row lie on 16 bytes. */
template <class T>
static __device__ __forceinline__ Vector<T> load_vector(const T *__restrict__ p, int64_t left, bool aligned) {
    if (aligned && left >= VECTOR) {
        return *reinterpret_cast<const Vector<T> *>(p);
    }
    Vector<T> v = {};
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        if (i < left) {
            v.value[i] = p[i];
        }
    }
    return v;
}

template <class T>
static __device__ __forceinline__ void store_vector(T *p, const float (&x)[VECTOR], int64_t left,
                                                    bool aligned) {
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        convert(&v.value[i], x[i]);
    }
    if (aligned && left >= VECTOR) {
        *reinterpret_cast<Vector<T> *>(p) = v;
        return;
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        if (i < left) {
            p[i] = v.value[i];
        }
    }
}

/* ---- embedding ----------------------------------------------------------------------------------------- */

/* embed: out[i] = row ids[i] of the table.
 *
 *   out    (n, cols) fp32  overwritten          ids  (n)
 *   table  (rows, stride) fp16, stride a multiple of VECTOR: its vectors always lie on 16 bytes
 *
 * grid (n, vectors of a row / THREADS). Bytes: 6 an element. */
static __global__ void embed_kernel(float *__restrict__ out, const fp16 *__restrict__ table, size_t stride,
                                    const int *__restrict__ ids, size_t cols) {
    wait_for_previous();
    let_next_start();
    const size_t col = ((size_t)blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    if (col >= cols) {
        return;
    }
    const Vector<fp16> v = load_vector(table + (size_t)ids[blockIdx.x] * stride + col, VECTOR, true);
    float x[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        x[i] = to_float(v.value[i]);
    }
    store_vector(out + blockIdx.x * cols + col, x, (int64_t)(cols - col), cols % VECTOR == 0);
}

bool can_overlap_cuda(void) {
    cudaFuncAttributes code;
    CUDA_CHECK(cudaFuncGetAttributes(&code, embed_kernel));  // as good as any
    return code.ptxVersion >= 90;
}

void embed_cuda(const CudaLaunch *c, float *out, const Matrix *table, const int *ids, int n) {
    CHECK(n >= 1 && table->format == FORMAT_DENSE && table->stride % VECTOR == 0 &&
          table->stride >= table->cols);
    CHECK(is_aligned(out) && is_aligned(table->dense));
    const dim3 grid((unsigned)n, (unsigned)ceil_div(table->cols, VECTOR * THREADS));
    launch_overlapped(c, embed_kernel, grid, THREADS, 0, out, table->dense, table->stride, ids, table->cols);
}

/* ---- norm ---------------------------------------------------------------------------------------------- */

/* rmsnorm: out = x / sqrt(mean(x^2) + eps) * weight.
 *
 *   out  (n, dim) fp16  overwritten          x  (n, dim) fp32          weight  (dim) fp16
 *
 * One block a token, threads as many as there are vectors, up to NORM_THREADS. In decode this is one block
 * that everything waits for, so it is made of two waits only: for x and weight, which are asked for together
 * and stay in registers, and for the sum. Vectors beyond the threads (dim above NORM_THREADS * VECTOR) are
 * read twice. Thread t takes vectors t, t + threads, ...; squares are added in that order, then over the
 * lanes of a warp, then over the warps, by every warp for itself, which saves a second barrier. Shared: one
 * float a warp; the barrier stands between writing and reading them. Bytes: 6 an element, and weight. */
static __device__ __forceinline__ float add_squares(float sum, const Vector<float> &v) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        sum += v.value[i] * v.value[i];
    }
    return sum;
}

static __device__ __forceinline__ void store_normed(fp16 *out, const Vector<float> &x,
                                                    const Vector<fp16> &weight, float factor, int left,
                                                    bool aligned) {
    float y[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        y[i] = to_float(weight.value[i]) * (x.value[i] * factor);
    }
    store_vector(out, y, left, aligned);
}

static __global__ void __launch_bounds__(NORM_THREADS, 1)  // 1: aiming at two blocks an SM, ptxas spills
    rmsnorm_kernel(fp16 *__restrict__ out, const float *x, const fp16 *__restrict__ weight,
                   int dim, float inverse_dim, float eps) {
    __shared__ float warp_sums[NORM_THREADS / 32];
    const bool aligned = dim % VECTOR == 0;
    const int first = threadIdx.x * VECTOR, step = blockDim.x * VECTOR;
    x += (size_t)blockIdx.x * dim;
    out += (size_t)blockIdx.x * dim;

    const Vector<fp16> w = load_vector(weight + first, dim - first, aligned);  // nobody writes weights
    wait_for_previous();
    let_next_start();
    const Vector<float> v = load_vector(x + first, dim - first, aligned);
    float sum = add_squares(0, v);
    for (int at = first + step; at < dim; at += step) {
        sum = add_squares(sum, load_vector(x + at, dim - at, aligned));
    }

    sum = warp_sum(sum);
    const int lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    if (lane == 0) {
        warp_sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = warp_sum(lane < n_warps ? warp_sums[lane] : 0.0f);

    const float factor = rsqrtf(sum * inverse_dim + eps);
    store_normed(out + first, v, w, factor, dim - first, aligned);
    for (int at = first + step; at < dim; at += step) {
        store_normed(out + at, load_vector(x + at, dim - at, aligned),
                     load_vector(weight + at, dim - at, aligned), factor, dim - at, aligned);
    }
}

void rmsnorm_cuda(const CudaLaunch *c, fp16 *out, const float *x, const fp16 *weight, int n, int dim,
                  float eps) {
    CHECK(n >= 1 && dim >= 1 && dim <= INT_MAX - NORM_THREADS * VECTOR);
    CHECK(dim % VECTOR != 0 || (is_aligned(out) && is_aligned(x) && is_aligned(weight)));
    const size_t vectors = ceil_div((size_t)dim, VECTOR), per_thread = ceil_div(vectors, NORM_THREADS);
    const unsigned threads = (unsigned)round_up(ceil_div(vectors, per_thread), 32);
    launch_overlapped(c, rmsnorm_kernel, dim3((unsigned)n), threads, 0, out, x, weight, dim, 1.0f / (float)dim, eps);
}

/* ---- RoPE ---------------------------------------------------------------------------------------------- */

/* rope_append: rotate q and k by position, put k and v into the cache.
 *
 *   q                 (n, n_heads * head_dim) fp16  overwritten
 *   k_cache, v_cache  (n_kv_heads, seq_len, head_dim) fp16, positions *pos .. *pos + n - 1 written
 *   qkv               (n, (n_heads + 2 n_kv_heads) * head_dim) fp32
 *   rope              (seq_len, head_dim) fp32: cos and sin of each pair
 *
 * grid (n, vectors of a row of qkv / THREADS); vectors do not cross heads. The position is read from device
 * memory, so the same launch serves every step; what does not depend on it is asked for first.
 * Products are rounded before they are added, as on the CPU: both backends fill caches with the same bits.
 * Bytes: 6 an element, and the row of rope. */
static __global__ void rope_append_kernel(fp16 *__restrict__ q, fp16 *__restrict__ k_cache,
                                          fp16 *__restrict__ v_cache, const float *qkv,
                                          const float *__restrict__ rope, AttentionShape shape,
                                          const int *pos) {
    wait_for_previous();
    let_next_start();
    const int hd = shape.head_dim, vectors = (hd + VECTOR - 1) / VECTOR;  // of one head
    const int index = blockIdx.y * THREADS + threadIdx.x;
    const int n_rotated = shape.n_heads + shape.n_kv_heads;
    const int n_vectors = (n_rotated + shape.n_kv_heads) * vectors;
    if (index >= n_vectors) {
        return;
    }
    const int head = index / vectors, at = index % vectors * VECTOR, left = hd - at;
    const bool aligned = hd % VECTOR == 0;
    const size_t row = (size_t)blockIdx.x * (n_rotated + shape.n_kv_heads) * hd;
    const Vector<float> v = load_vector(qkv + row + (size_t)head * hd + at, left, aligned);
    const size_t p = (size_t)*pos + blockIdx.x;

    float x[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        x[i] = v.value[i];
    }
    if (head < n_rotated) {
        const Vector<float> angle = load_vector(rope + p * hd + at, left, aligned);
#pragma unroll
        for (int i = 0; i < VECTOR; i += 2) {
            const float c = angle.value[i], s = angle.value[i + 1];
            x[i] = __fsub_rn(__fmul_rn(v.value[i], c), __fmul_rn(v.value[i + 1], s));
            x[i + 1] = __fadd_rn(__fmul_rn(v.value[i], s), __fmul_rn(v.value[i + 1], c));
        }
    }

    fp16 *out;
    if (head < shape.n_heads) {
        out = q + ((size_t)blockIdx.x * shape.n_heads + head) * hd;
    } else {
        const int kv_head = head < n_rotated ? head - shape.n_heads : head - n_rotated;
        out = (head < n_rotated ? k_cache : v_cache) + ((size_t)kv_head * shape.seq_len + p) * hd;
    }
    store_vector(out + at, x, left, aligned);
}

void rope_append_cuda(const CudaLaunch *c, fp16 *q, fp16 *k_cache, fp16 *v_cache, const float *qkv,
                      const float *rope, const AttentionShape *shape, const int *pos, int n) {
    CHECK(n >= 1 && n <= shape->seq_len && shape->head_dim >= 2 && shape->head_dim % 2 == 0);
    CHECK(is_aligned(q) && is_aligned(k_cache) && is_aligned(v_cache) && is_aligned(qkv) && is_aligned(rope));
    const size_t heads = (size_t)shape->n_heads + 2 * (size_t)shape->n_kv_heads;
    const size_t vectors = heads * ceil_div((size_t)shape->head_dim, VECTOR);
    const dim3 grid((unsigned)n, (unsigned)ceil_div(vectors, THREADS));
    launch_overlapped(c, rope_append_kernel, grid, THREADS, 0, q, k_cache, v_cache, qkv, rope, *shape, pos);
}

/* ---- SwiGLU -------------------------------------------------------------------------------------------- */

/* swiglu: out_i = silu(y_2i) * y_2i+1.   out (count) fp16, y (2 count) fp32.   Bytes: 10 an output. */
static __global__ void swiglu_kernel(fp16 *__restrict__ out, const float *__restrict__ y, size_t count) {
    const size_t at = ((size_t)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (at >= count) {
        return;
    }
    const int64_t left = (int64_t)(count - at);
    const Vector<float> pairs[2] = {load_vector(y + 2 * at, 2 * left, true),
                                    load_vector(y + 2 * at + VECTOR, 2 * left - VECTOR, true)};
    float x[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const Vector<float> &v = pairs[2 * i / VECTOR];
        x[i] = silu(v.value[2 * i % VECTOR]) * v.value[2 * i % VECTOR + 1];
    }
    store_vector(out + at, x, left, true);
}

void swiglu_cuda(const CudaLaunch *c, fp16 *out, const float *y, size_t count) {
    CHECK(count >= 1 && is_aligned(out) && is_aligned(y));
    swiglu_kernel<<<(unsigned)ceil_div(count, VECTOR * THREADS), THREADS, 0, c->stream>>>(out, y, count);
    CUDA_CHECK_LAUNCH(c->stream);
}

/* ---- check of inputs ----------------------------------------------------------------------------------- */

/* check_finite: note code if an element of x (count) fp16 is not finite.   Bytes: 2 an element. */
static __global__ void check_finite_kernel(DeviceReport *__restrict__ report, const fp16 *__restrict__ x,
                                           size_t count, unsigned code) {
    const size_t at = ((size_t)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (at >= count) {
        return;
    }
    const Vector<fp16> v = load_vector(x + at, (int64_t)(count - at), true);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        finite &= half_is_finite(v.value[i]);
    }
    if (!finite) {
        note_fault(report, code);
    }
}

void check_finite_cuda(const CudaLaunch *c, const fp16 *x, size_t count, const Matrix *w) {
    CHECK(count >= 1 && is_aligned(x));
    check_finite_kernel<<<(unsigned)ceil_div(count, VECTOR * THREADS), THREADS, 0, c->stream>>>(
        c->report, x, count, fault_code(w));
    CUDA_CHECK_LAUNCH(c->stream);
}

/* ---- dynamic pruning of many tokens -------------------------------------------------------------------- */

/* drop_small: out = x (count) fp16, zero where |x| <= *threshold.   Bytes: 4 an element. */
static __global__ void drop_small_kernel(fp16 *__restrict__ out, const fp16 *__restrict__ x, size_t count,
                                         const float *__restrict__ threshold) {
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count) {
        out[i] = fabsf(__half2float(__ushort_as_half(x[i]))) <= *threshold ? 0 : x[i];
    }
}

void drop_small_cuda(const CudaLaunch *c, fp16 *out, const fp16 *x, size_t count, const float *threshold) {
    CHECK(count >= 1);
    drop_small_kernel<<<(unsigned)ceil_div(count, THREADS), THREADS, 0, c->stream>>>(out, x, count,
                                                                                     threshold);
    CUDA_CHECK_LAUNCH(c->stream);
}
