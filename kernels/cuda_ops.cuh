/* cuda_ops.cuh: what the .cu files of the CUDA backend share: checked calls, the context, small device helpers and
 * the launchers. Each launcher stands below its kernel, owns grid, block and shared memory, checks its
 * preconditions and the launch. No launcher allocates, so that any sequence of them can be captured in a graph. */
#ifndef SPDP_CUDA_OPS_CUH
#define SPDP_CUDA_OPS_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "backend.h"

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

/* A failure inside the backend is a lost device or a bug: name it and end the program. */
static inline void cuda_check(cudaError_t status, const char *call, const char *file, int line) {
    if (status != cudaSuccess) {
        fprintf(stderr, "%s:%d: %s: %s (%s)\n", file, line, call, cudaGetErrorString(status),
                cudaGetErrorName(status));
        exit(1);
    }
}

/* Device memory, released with cudaFree(). NULL where there is none: err (may be NULL) then says for what, how much
 * was asked and how much is free (cuda.cu). */
void *device_alloc(size_t bytes, const char *what, Error *err);

/* After every launch; `make debug` waits for the kernel too, so that its faults show here. */
#ifdef CUDA_SYNCHRONISE
#define CUDA_CHECK_LAUNCH(stream)                                                                       \
    do {                                                                                                \
        CUDA_CHECK(cudaGetLastError());                                                                 \
        cudaStreamCaptureStatus capturing_;                                                             \
        CUDA_CHECK(cudaStreamIsCapturing(stream, &capturing_));                                         \
        if (capturing_ == cudaStreamCaptureStatusNone) {                                                \
            CUDA_CHECK(cudaStreamSynchronize(stream));                                                  \
        }                                                                                               \
    } while (0)
#else
#define CUDA_CHECK_LAUNCH(stream) CUDA_CHECK(cudaGetLastError())
#endif

/* Written by kernels, read and reset by finish(). */
typedef struct {
    unsigned fault;                   // fault_code() of the first product whose input was not finite; 0 = none
    int token;                        // what sampling chose; -1: a logit is not finite
    ProductStats products[N_SITES];   // of single tokens; bytes without the values of Tiled-CBC
} DeviceReport;

/* What every launcher needs. */
typedef struct {
    cudaStream_t stream;
    int n_sms;
    size_t shared_per_block;   // most shared memory that one block can have
    bool overlap;              // may a kernel start before the previous one ends? See can_overlap_cuda().
    float *workspace;          // partial sums of SpMM; contents are nobody's between launches
    size_t workspace_bytes;
    unsigned *counters;        // N_COUNTERS zeros; a kernel that counts with them leaves zeros behind
    unsigned *letters;         // N_LETTERS times NO_LETTER; a kernel that posts letters takes them all
    DeviceReport *report;      // in device memory
} CudaLaunch;

#define N_COUNTERS 65536
#define N_LETTERS ((size_t)4 << 20)  // a product needs rows * (slices - 1), up to 4096 columns a slice
#define NO_LETTER 0xffffffffu
static_assert(NO_LETTER == (NO_LETTER & 0xff) * 0x01010101u, "memory is filled with it byte by byte");

/* Fill new memory for letters, in order of the stream. */
static inline void clear_letters(const CudaLaunch *c) {
    CUDA_CHECK(cudaMemsetAsync(c->letters, NO_LETTER & 0xff, N_LETTERS * sizeof *c->letters, c->stream));
}

/* The input of a product: site and layer in one positive number, taken apart by finish(). */
static inline unsigned fault_code(const Matrix *w) { return (unsigned)(w->site + N_SITES * (w->layer + 1) + 1); }

/* What becomes of the sums y of a product. */
enum Epilogue {
    EPILOGUE_STORE,   // out = y          (n, rows) fp32
    EPILOGUE_ADD,     // out += y         (n, rows) fp32
    EPILOGUE_SWIGLU,  // out_i = silu(y_2i) y_2i+1   (n, rows / 2) fp16
};

/* ---- launchers ---------------------------------------------------------------------------------------------- */

/* spMspV: one token (cuda_spmspv.cu). out as the epilogue says; x (cols) fp16, 16-byte aligned; threshold NULL or
 * one float in device memory. Counts active columns and nonzeros in the report, notes an x that is not finite.
 * slice_cols: columns that one block takes; 0 = chosen from the shape (the benchmark tries others). */
void spmspv_cuda(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x, const float *threshold,
                 Epilogue epilogue, int slice_cols);

/* Dense matrix, one token (cuda_gemv.cu). out as the epilogue says; x (cols) fp16, 16-byte aligned. */
void gemv_cuda(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x, Epilogue epilogue);

/* SpMM on Tensor Cores: n >= 1 tokens (cuda_spmm.cu). out, x, threshold as for spmspv_cuda with n rows. */
void spmm_cuda(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x, int n, const float *threshold,
               Epilogue epilogue);

/* Tile rows first .. first + count - 1 of a Tiled-CBC matrix as dense fp16 rows: out (count * TILE_M, stride), rows
 * beyond the matrix are not written; stride a multiple of 8, columns from cols to stride are zeroed (cuda_spmm.cu). */
void expand_cuda(const CudaLaunch *c, fp16 *out, size_t stride, const Matrix *w, size_t first, size_t count);

/* Attention (cuda_attention.cu) of rotated queries q over a cache that has the tokens' keys and values; or of one token, with
 * qkv and rope given, all that Backend.attention does (q is not used then). kv_len_max bounds *pos + n and decides how a
 * decode step is cut along the context; the real length is read from *pos on the device. */
void attention_cuda(const CudaLaunch *c, fp16 *out, const fp16 *q, fp16 *k_cache, fp16 *v_cache, const float *qkv,
                    const float *rope, const AttentionShape *shape, const int *pos, int n, int kv_len_max);

/* Choose report->token as sample_token() does (cuda_sampling.cu); -1 if a logit is not finite.
 * step: the draw's number. */
void sample_cuda(const CudaLaunch *c, const float *logits, int n, const SampleParams *params, uint64_t step);

/* The simple operations (cuda_ops.cu), as their namesakes in Backend. */
void embed_cuda(const CudaLaunch *c, float *out, const Matrix *table, const int *ids, int n);
void rmsnorm_cuda(const CudaLaunch *c, fp16 *out, const float *x, const fp16 *weight, int n, int dim, float eps);
/* q (n, n_heads * head_dim) fp16 rotated, k rotated and v into the cache: the first half of Backend.attention */
void rope_append_cuda(const CudaLaunch *c, fp16 *q, fp16 *k_cache, fp16 *v_cache, const float *qkv,
                      const float *rope, const AttentionShape *shape, const int *pos, int n);
/* out (count) fp16 from y (2 count) fp32, gate and up interleaved */
void swiglu_cuda(const CudaLaunch *c, fp16 *out, const float *y, size_t count);
/* out = x (count) with elements |x| <= *threshold as zero */
void drop_small_cuda(const CudaLaunch *c, fp16 *out, const fp16 *x, size_t count, const float *threshold);
/* Note in the report if an element of x (count) is not finite: the input of w. */
void check_finite_cuda(const CudaLaunch *c, const fp16 *x, size_t count, const Matrix *w);

/* Is the code that runs on this device made for overlapping launches, sm_90 and up? Code that the driver compiled from
 * older PTX is not, whatever the device (cuda_ops.cu). */
bool can_overlap_cuda(void);

/* GB/s of the best streaming read of 2 GiB; NAN if there is no room (cuda_ceiling.cu). Waits. */
double read_ceiling_cuda(const CudaLaunch *c);

/* What is counted while random weights are made. */
typedef struct {
    uint64_t nnz;
    unsigned max_col_values;
} RandomTotals;

/* Random weights (cuda_synthetic.cu), see random_weights.h; what is counted is added to *totals in device memory.
 * A dense matrix: out (rows, stride), zeros beyond cols. */
void random_dense_cuda(const CudaLaunch *c, fp16 *out, size_t rows, size_t cols, size_t stride,
                       const RandomWeights *r, RandomTotals *totals);
/* The index of a Tiled-CBC matrix. tile_sizes (GTiles): values of each in units of COLUMN_ALIGN. */
void random_index_cuda(const CudaLaunch *c, uint32_t *tile_sizes, uint32_t *col_info, uint64_t *bitmap,
                       size_t rows, size_t cols, const RandomWeights *r, RandomTotals *totals);
/* The values of one whose index is complete, into zeroed memory. */
void random_values_cuda(const CudaLaunch *c, const TiledCbc *w, fp16 *values, const RandomWeights *r);

/* ---- device helpers -------------------------------------------------------------------------------------------- */

#ifdef __CUDACC__

/* Launch a kernel that may start while the one before it still runs (programmatic dependent launch). It must call
 * wait_for_previous() before it reads or writes anything that the kernel before it touches, and let_next_start() only
 * after that: what the kernels before that one wrote is then there from the start. It must not declare what they
 * write __restrict__, or the compiler may read it earlier. Where launches cannot overlap it is an ordinary one, and
 * the two functions do nothing. */
template <typename... Parameters, typename... Arguments>
void launch_overlapped(const CudaLaunch *c, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                       size_t shared_bytes, Arguments... arguments) {
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = c->stream;
    config.attrs = &overlap;
    config.numAttrs = c->overlap ? 1 : 0;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
    CUDA_CHECK_LAUNCH(c->stream);
}

/* All that the kernels before this one wrote is there. */
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel may begin to start: its blocks come when all of ours have called this and there is room. */
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int offset = 16; offset > 0; offset /= 2) {
        v += __shfl_xor_sync(~0u, v, offset);
    }
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
    for (int offset = 16; offset > 0; offset /= 2) {
        v = fmaxf(v, __shfl_xor_sync(~0u, v, offset));
    }
    return v;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

/* Not infinite and not NaN, by the bits. */
__device__ __forceinline__ bool half_is_finite(fp16 h) { return (h & 0x7c00) != 0x7c00; }

/* Only the first fault counts: layers are computed in order, so that is the one that names the cause. */
__device__ __forceinline__ void note_fault(DeviceReport *report, unsigned code) {
    atomicCAS(&report->fault, 0u, code);
}

/* Add to a counter of the report: integers, so the order does not matter. */
__device__ __forceinline__ void count(uint64_t *counter, uint64_t n) {
    atomicAdd(reinterpret_cast<unsigned long long *>(counter), (unsigned long long)n);
}

/* Letters: sums that a block hands to another without barrier, fence or counter. A letter is one word, NO_LETTER until
 * it is posted; who takes it puts NO_LETTER back. Who waits for a letter relies on the poster's block having started:
 * it has the smaller number, and blocks start in the order of their numbers. CUDA does not promise that; CUB's scans
 * rely on it, too. */

/* The word that stands for a sum: its bits, but for a NaN that would read NO_LETTER, which becomes another one. */
__device__ __forceinline__ unsigned letter_of(float sum) { return min(__float_as_uint(sum), NO_LETTER - 1); }

/* Letters go alone (unsigned) or four side by side (uint4), each word with its own mark. */
template <class Letters> __device__ Letters all_of(unsigned word);
template <> __device__ __forceinline__ unsigned all_of(unsigned word) { return word; }
template <> __device__ __forceinline__ uint4 all_of(unsigned word) { return make_uint4(word, word, word, word); }

__device__ __forceinline__ bool has_come(unsigned l) { return l != NO_LETTER; }
__device__ __forceinline__ bool has_come(const uint4 &l) {
    return has_come(l.x) && has_come(l.y) && has_come(l.z) && has_come(l.w);
}

__device__ __forceinline__ void post(unsigned *letter, float sum) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(letter), "r"(letter_of(sum)) : "memory");
}
__device__ __forceinline__ void post(uint4 *letters, const float4 &sums) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(letters), "r"(letter_of(sums.x)),
                 "r"(letter_of(sums.y)), "r"(letter_of(sums.z)), "r"(letter_of(sums.w))
                 : "memory");
}

/* Look once more if it had not come. */
__device__ __forceinline__ void look(const unsigned *letter, unsigned *content) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, %2;\n @p ld.relaxed.gpu.global.u32 %0, [%1]; }"
                 : "+r"(*content)
                 : "l"(letter), "r"(NO_LETTER)
                 : "memory");
}
__device__ __forceinline__ void look(const uint4 *letters, uint4 *content) {
    if (!has_come(*content)) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(content->x), "=r"(content->y), "=r"(content->z), "=r"(content->w)
                     : "l"(letters)
                     : "memory");
    }
}

/* Wait for the first n (at most N) of letters that are `stride` apart, all at once, and take them: content has the
 * sums' bits. Further ones are -0, which adds nothing. */
template <int N, class Letters>
__device__ __forceinline__ void take(Letters (&content)[N], Letters *letters, int stride, int n) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        content[i] = all_of<Letters>(i < n ? NO_LETTER : __float_as_uint(-0.0f));
    }
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < N; i++) {
            look(letters + i * stride, &content[i]);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            all &= has_come(content[i]);
        }
    } while (!all);
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i < n) {
            letters[i * stride] = all_of<Letters>(NO_LETTER);
        }
    }
}

/* cp.async (sm_80 and up): 16 bytes from global to shared memory without passing through registers. */
__device__ __forceinline__ void copy_async_16(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(global)
                 : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif
#endif
