/* device_matrix.cuh: random Tiled-CBC matrices of real sizes, made and encoded on the device within
 * milliseconds, and the judgement of a product there; shared by tests and benchmarks. The encoding is
 * compared with tiled_cbc_encode()'s, byte for byte, by spmm_test. Everything runs on the default stream and
 * waits. */
#ifndef SPDP_DEVICE_MATRIX_CUH
#define SPDP_DEVICE_MATRIX_CUH

#include <math.h>
#include <string.h>

#include <vector>

#include "../../kernels/cuda_ops.cuh"

/* ---- random numbers ------------------------------------------------------------------------------------ */

/* A random number that depends on seed and place alone, so that threads can draw in any order. */
static __host__ __device__ inline uint32_t random_bits(uint64_t seed, uint64_t i) {
    uint64_t z = (seed << 40) + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32);
}

static __host__ __device__ inline float random_normal(uint64_t seed,
                                                      uint64_t i) {  // about normal, variance 1
    const uint32_t a = random_bits(seed, 2 * i), b = random_bits(seed, 2 * i + 1);
    return ((float)((a >> 16) + (a & 0xffff) + (b >> 16) + (b & 0xffff)) - 2 * 65535.0f) *
           (1.7320508f / 65536);
}

/* Normal numbers, or integers -2 .. 2. */
static __host__ __device__ inline float draw(bool integer, uint64_t seed, uint64_t i) {
    return integer ? (float)(random_bits(seed, i) % 5) - 2 : random_normal(seed, i);
}

static inline std::vector<fp16> random_input(size_t count, bool integer, uint64_t seed) {
    std::vector<fp16> v(count);
    for (size_t i = 0; i < count; i++) {
        v[i] = fp16_from_float(draw(integer, seed, i));
    }
    return v;
}

/* ---- encoding ------------------------------------------------------------------------------------------ */

/* Element i is kept with a probability of keep / 2^32; a kept one is not zero. */
static __global__ void fill_kernel(fp16 *w, size_t count, uint64_t keep, bool integer, uint64_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        const fp16 value = __half_as_ushort(__float2half_rn(draw(integer, seed, i)));
        w[i] = random_bits(seed + 1, i) >= keep ? 0 : (value & 0x7fff) == 0 ? 0x3c00 : value;
    }
}

/* Thread = one bitmap word (64 rows, blockIdx.y) of column k. */
static __global__ void bitmap_kernel(uint64_t *bitmap, const fp16 *w, size_t rows, size_t cols,
                                     size_t cols_padded) {
    const size_t k = blockIdx.x * (size_t)blockDim.x + threadIdx.x, first = blockIdx.y * (size_t)64;
    if (k >= cols_padded) {
        return;
    }
    uint64_t bits = 0;
    for (size_t r = 0; r < 64 && first + r < rows && k < cols; r++) {
        bits |= (uint64_t)((w[(first + r) * cols + k] & 0x7fff) != 0) << r;
    }
    bitmap[(blockIdx.y / BITMAP_WORDS * cols_padded + k) * BITMAP_WORDS + blockIdx.y % BITMAP_WORDS] = bits;
}

/* Thread = one GTile: ColInfo of its columns, its length in units of 8 values; *most becomes the fullest
 * column's values. */
static __global__ void col_info_kernel(uint32_t *col_info, uint32_t *units, unsigned *most,
                                       const uint64_t *bitmap, size_t n_gtiles) {
    const size_t g = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (g >= n_gtiles) {
        return;
    }
    uint32_t first = 0;
    for (size_t column = g * TILE_K; column < (g + 1) * TILE_K; column++) {
        uint32_t nnz = 0;
        for (int word = 0; word < BITMAP_WORDS; word++) {
            nnz += (uint32_t)__popcll(bitmap[column * BITMAP_WORDS + word]);
        }
        const uint32_t padded = (nnz + COLUMN_ALIGN - 1) / COLUMN_ALIGN * COLUMN_ALIGN;
        col_info[column] = first << 16 | nnz;
        first += padded;
        atomicMax(most, padded);
    }
    units[g] = first / COLUMN_ALIGN;
}

/* Thread = column k of tile row blockIdx.y; the padding is zero already. */
static __global__ void values_kernel(TiledCbc cbc, fp16 *values, const fp16 *w, size_t cols_padded) {
    const size_t k = blockIdx.x * (size_t)blockDim.x + threadIdx.x, column = blockIdx.y * cols_padded + k;
    if (k >= cbc.cols) {
        return;
    }
    size_t at = (size_t)cbc.tile_offset[column / TILE_K] * COLUMN_ALIGN + (cbc.col_info[column] >> 16);
    for (size_t r = blockIdx.y * (size_t)TILE_M; r < cbc.rows && r < (blockIdx.y + 1) * (size_t)TILE_M; r++) {
        const fp16 value = w[r * cbc.cols + k];
        if ((value & 0x7fff) != 0) {
            values[at++] = value;
        }
    }
}

static inline unsigned blocks_for(size_t count, size_t threads) {
    return (unsigned)ceil_div(count, threads);
}

/* A random matrix in device memory, dense (rows, cols) and as one block in the layout of tiled_cbc_layout().
 */
struct DeviceMatrix {
    size_t rows, cols, bytes;  // of the block
    fp16 *dense;
    unsigned char *block;
    Matrix w;  // Tiled-CBC

    DeviceMatrix(size_t m, size_t k, double density, bool integer, uint64_t seed) : rows(m), cols(k) {
        CUDA_CHECK(cudaMalloc(&dense, m * k * sizeof *dense));
        fill_kernel<<<4096, 256>>>(dense, m * k, (uint64_t)(density * 0x1p32), integer, seed);
        CUDA_CHECK(cudaGetLastError());
        encode();
    }
    ~DeviceMatrix() {
        CUDA_CHECK(cudaFree(dense));
        CUDA_CHECK(cudaFree(block));
    }
    DeviceMatrix(const DeviceMatrix &) = delete;

    /* The same matrix with its arrays in another block. */
    Matrix in(unsigned char *other) const {
        TiledCbcLayout layout;
        CHECK(tiled_cbc_layout(&layout, rows, cols, NULL) == OK);
        Matrix m = w;
        m.cbc.tile_offset = reinterpret_cast<uint32_t *>(other + layout.tile_offset);
        m.cbc.col_info = reinterpret_cast<uint32_t *>(other + layout.col_info);
        m.cbc.bitmap = reinterpret_cast<uint64_t *>(other + layout.bitmap);
        m.cbc.values = reinterpret_cast<fp16 *>(other + layout.values);
        return m;
    }

   private:
    void encode() {
        const size_t tile_rows = tiled_cbc_tile_rows(rows), cols_padded = tiled_cbc_cols_padded(cols);
        const size_t columns = tile_rows * cols_padded, n_gtiles = columns / TILE_K;
        uint32_t *col_info, *units;
        uint64_t *bitmap;
        unsigned *most;
        CUDA_CHECK(cudaMalloc(&col_info, columns * sizeof *col_info));
        CUDA_CHECK(cudaMalloc(&units, n_gtiles * sizeof *units));
        CUDA_CHECK(cudaMalloc(&bitmap, columns * BITMAP_WORDS * sizeof *bitmap));
        CUDA_CHECK(cudaMalloc(&most, sizeof *most));
        CUDA_CHECK(cudaMemset(most, 0, sizeof *most));
        bitmap_kernel<<<dim3(blocks_for(cols_padded, 128), (unsigned)(tile_rows * BITMAP_WORDS)), 128>>>(
            bitmap, dense, rows, cols, cols_padded);
        col_info_kernel<<<blocks_for(n_gtiles, 128), 128>>>(col_info, units, most, bitmap, n_gtiles);
        CUDA_CHECK(cudaGetLastError());

        std::vector<uint32_t> offsets(n_gtiles + 1);
        CUDA_CHECK(cudaMemcpy(offsets.data() + 1, units, n_gtiles * sizeof *units, cudaMemcpyDeviceToHost));
        for (size_t g = 0; g < n_gtiles; g++) {
            offsets[g + 1] += offsets[g];
        }
        const size_t n_values = (size_t)offsets[n_gtiles] * COLUMN_ALIGN;
        TiledCbcLayout layout;
        CHECK(tiled_cbc_layout(&layout, rows, cols, NULL) == OK);
        bytes = tiled_cbc_block_bytes(&layout, n_values);
        CUDA_CHECK(cudaMalloc(&block, bytes));
        CUDA_CHECK(cudaMemset(block, 0, bytes));
        w = {};
        w.format = FORMAT_TILED_CBC;
        w.rows = w.cbc.rows = rows;
        w.cols = w.cbc.cols = cols;
        w.site = SITE_MLP_IN;
        w.cbc.n_values = n_values;
        CUDA_CHECK(cudaMemcpy(&w.cbc.max_col_values, most, sizeof *most, cudaMemcpyDeviceToHost));
        w = in(block);
        CUDA_CHECK(cudaMemcpy(block + layout.tile_offset, offsets.data(), offsets.size() * sizeof offsets[0],
                              cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaMemcpy(block + layout.col_info, col_info, columns * sizeof *col_info,
                              cudaMemcpyDeviceToDevice));
        CUDA_CHECK(cudaMemcpy(block + layout.bitmap, bitmap, columns * BITMAP_WORDS * sizeof *bitmap,
                              cudaMemcpyDeviceToDevice));
        values_kernel<<<dim3(blocks_for(cols, 128), (unsigned)tile_rows), 128>>>(
            w.cbc, reinterpret_cast<fp16 *>(block + layout.values), dense, cols_padded);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaDeviceSynchronize());
        for (void *p : {(void *)col_info, (void *)units, (void *)bitmap, (void *)most}) {
            CUDA_CHECK(cudaFree(p));
        }
    }
};

/* ---- judgement ----------------------------------------------------------------------------------------- */

/* What a product may differ by: roundings[token] * magnitude, and half an ulp of fp32. */
static __global__ void judge_kernel(unsigned long long *worst, const float *got, const double *want,
                                    const double *magnitude, const double *roundings, size_t rows,
                                    size_t count) {
    double own = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        int exponent = -125;
        if (want[i] != 0) {
            frexp(want[i], &exponent);
        }
        const double half_ulp = ldexp(1.0, max(exponent, -125) - 25);
        const double error = fabs((double)got[i] - want[i]);
        const double bound = roundings[i / rows] > 0 ? roundings[i / rows] * magnitude[i] + half_ulp : 0;
        own = fmax(own, error == 0             ? 0
                        : error <= 1e9 * bound ? error / bound
                                               : (double)INFINITY);  // NaN is beyond
    }
    atomicMax(worst,
              (unsigned long long)__double_as_longlong(own));  // from 0 up, doubles are ordered like integers
}

/* Worst error of outputs (n, rows) as a share of its bound; all pointers but roundings (n) are the device's.
 * A token whose roundings are 0 must match exactly. */
static inline double worst_share(const float *got, const double *want, const double *magnitude,
                                 const std::vector<double> &roundings, size_t rows) {
    const size_t n = roundings.size();
    double *device_roundings, worst = 0;
    CUDA_CHECK(cudaMalloc(&device_roundings, (n + 1) * sizeof *device_roundings));
    CUDA_CHECK(cudaMemcpy(device_roundings, roundings.data(), n * sizeof(double), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemset(device_roundings + n, 0, sizeof(double)));
    judge_kernel<<<1024, 256>>>(reinterpret_cast<unsigned long long *>(device_roundings + n), got, want,
                                magnitude, device_roundings, rows, n * rows);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaMemcpy(&worst, device_roundings + n, sizeof worst, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(device_roundings));
    return worst;
}

/* Roundings that a product allows for each token of x (n, cols): one for each input above the threshold, and
 * those of sums in pairs of fp16 where they are used. */
static inline std::vector<double> allowed_roundings(const std::vector<fp16> &x, size_t cols, size_t n,
                                                    float threshold, bool fp16_pairs) {
    std::vector<double> roundings(n);
    for (size_t t = 0; t < n; t++) {
        size_t active = 0;
        for (size_t k = 0; k < cols; k++) {
            active += fabsf(fp16_to_float(x[t * cols + k])) > threshold;
        }
        roundings[t] = (double)active * 0x1p-24 + (fp16_pairs ? 8 * 0x1p-11 : 0);
    }
    return roundings;
}

#endif
