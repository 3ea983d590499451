/* Random weights, made on the device: the matrices of random_weights.h, dense or as Tiled-CBC, bit for bit.
 *
 * Tiled-CBC takes two kernels, with a sum over the GTiles on the host between them: the index (bitmap, ColInfo,
 * size of each GTile) has to be known before there is memory for the values. Both draw the same numbers; nothing
 * dense is stored.
 *
 * In both, one block = one GTile, thread r = row r of the tile with its TILE_K columns, two draws of
 * WEIGHTS_PER_DRAW. Reference: random_weights.c and tiled_cbc_encode(). Test: tests/test_synthetic.c. */
#include "cuda_ops.cuh"

#include <curand_kernel.h>

namespace {

constexpr int DRAWS = TILE_K / WEIGHTS_PER_DRAW;
constexpr int DENSE_THREADS = 256;
constexpr int ROW_WORDS = TILE_M / 32;  // of 32 bits in a column's bitmap

static_assert(TILE_K % WEIGHTS_PER_DRAW == 0, "GTiles begin with a draw");
static_assert(sizeof(uint4) == WEIGHTS_PER_DRAW * sizeof(fp16), "a draw has 16 bits for every weight");

/* The words of block number `block` of a row, for values or, with matrix + DROP_DRAWS, for what is removed. */
__device__ uint4 draw(const RandomWeights &r, uint32_t matrix, size_t row, size_t block) {
    curandStatePhilox4_32_10_t state;
    curand_init(r.seed, (unsigned long long)r.layer << 32 | matrix, ((unsigned long long)row << 32 | block) * 4,
                &state);
    return curand4(&state);
}

/* 16 bits for weight i of a draw. */
__device__ __forceinline__ unsigned bits_of(const uint4 &words, int i) {
    const unsigned word = i / 2 == 0 ? words.x : i / 2 == 1 ? words.y : i / 2 == 2 ? words.z : words.w;
    return word >> 16 * (i % 2) & 0xffff;
}

/* WEIGHTS_PER_DRAW weights of a row, from column block * WEIGHTS_PER_DRAW on; zeros beyond cols. */
__device__ void make_weights(fp16 out[WEIGHTS_PER_DRAW], const RandomWeights &r, size_t row, size_t block,
                             size_t cols) {
    const uint4 chosen = draw(r, r.matrix, row, block);
    const uint4 fate = r.dropped > 0 ? draw(r, r.matrix + DROP_DRAWS, row, block) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < WEIGHTS_PER_DRAW; i++) {
        const bool kept = bits_of(fate, i) >= r.dropped && block * WEIGHTS_PER_DRAW + i < cols;
        out[i] = kept ? r.values[bits_of(chosen, i)] : 0;
    }
}

__global__ void dense_kernel(fp16 *out, size_t rows, size_t cols, size_t stride, RandomWeights r,
                             RandomTotals *totals) {
    const size_t i = (size_t)blockIdx.x * DENSE_THREADS + threadIdx.x, blocks = stride / WEIGHTS_PER_DRAW;
    unsigned nonzeros = 0;
    if (i < rows * blocks) {
        union {
            fp16 weights[WEIGHTS_PER_DRAW];
            uint4 vector;
        } made;
        make_weights(made.weights, r, i / blocks, i % blocks, cols);
        reinterpret_cast<uint4 *>(out)[i] = made.vector;
        for (int k = 0; k < WEIGHTS_PER_DRAW; k++) {
            nonzeros += made.weights[k] != 0;
        }
    }
    nonzeros = __reduce_add_sync(~0u, nonzeros);
    if (threadIdx.x % 32 == 0) {
        count(&totals->nnz, nonzeros);
    }
}

__global__ void index_kernel(uint32_t *tile_sizes, uint32_t *col_info, uint64_t *bitmap, size_t rows, size_t cols,
                             size_t gtiles_per_row, RandomWeights r, RandomTotals *totals) {
    __shared__ uint32_t words[TILE_K][ROW_WORDS];
    const size_t g = blockIdx.x, row = g / gtiles_per_row * TILE_M + threadIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned nonzero = 0;  // bit c: column c of this row
    if (row < rows) {
        for (int d = 0; d < DRAWS; d++) {
            fp16 weights[WEIGHTS_PER_DRAW];
            make_weights(weights, r, row, g % gtiles_per_row * DRAWS + d, cols);
            for (int i = 0; i < WEIGHTS_PER_DRAW; i++) {
                nonzero |= (unsigned)(weights[i] != 0) << (d * WEIGHTS_PER_DRAW + i);
            }
        }
    }
    for (int c = 0; c < TILE_K; c++) {
        const unsigned column = __ballot_sync(~0u, nonzero >> c & 1);
        if (lane == 0) {
            words[c][warp] = column;
        }
    }
    __syncthreads();  // counts and the copy below need all warps' words
    if (threadIdx.x < TILE_K * ROW_WORDS) {
        // Little-endian: two words of 32 rows are one of 64.
        reinterpret_cast<uint32_t *>(bitmap + g * TILE_K * BITMAP_WORDS)[threadIdx.x] =
            words[threadIdx.x / ROW_WORDS][threadIdx.x % ROW_WORDS];
    }
    if (warp == 0) {
        unsigned nnz = 0;
        for (int i = 0; lane < TILE_K && i < ROW_WORDS; i++) {
            nnz += __popc(words[lane][i]);
        }
        const unsigned padded = (nnz + COLUMN_ALIGN - 1) / COLUMN_ALIGN * COLUMN_ALIGN;
        unsigned end = padded;  // of the column's values, counted from the start of the GTile
        for (int offset = 1; offset < 32; offset *= 2) {
            const unsigned before = __shfl_up_sync(~0u, end, offset);
            end += lane >= offset ? before : 0;
        }
        if (lane < TILE_K) {
            col_info[g * TILE_K + lane] = (end - padded) << 16 | nnz;
        }
        const unsigned all = __reduce_add_sync(~0u, nnz), most = __reduce_max_sync(~0u, padded);
        if (lane == 31) {
            tile_sizes[g] = end / COLUMN_ALIGN;
            count(&totals->nnz, all);
            atomicMax(&totals->max_col_values, most);
        }
    }
}

/* Every thread finds its rank in a column from the bitmap. Padding has been zeroed before. */
__global__ void values_kernel(fp16 *values, const uint32_t *tile_offset, const uint32_t *col_info,
                              const uint64_t *bitmap, size_t cols, size_t gtiles_per_row, RandomWeights r) {
    const size_t g = blockIdx.x, row = g / gtiles_per_row * TILE_M + threadIdx.x;
    const int word = threadIdx.x / 64, bit = threadIdx.x % 64;
    fp16 *tile = values + (size_t)tile_offset[g] * COLUMN_ALIGN;
    for (int d = 0; d < DRAWS; d++) {
        fp16 weights[WEIGHTS_PER_DRAW];
        make_weights(weights, r, row, g % gtiles_per_row * DRAWS + d, cols);
        for (int i = 0; i < WEIGHTS_PER_DRAW; i++) {
            const size_t column = g * TILE_K + d * WEIGHTS_PER_DRAW + i;
            const uint64_t *words = bitmap + column * BITMAP_WORDS;
            if (words[word] >> bit & 1) {
                int rank = __popcll(words[word] & ((1ull << bit) - 1));
                for (int before = 0; before < word; before++) {
                    rank += __popcll(words[before]);
                }
                tile[(col_info[column] >> 16) + rank] = weights[i];
            }
        }
    }
}

unsigned grid_of(size_t blocks) {
    CHECK(blocks > 0 && blocks <= INT32_MAX);
    return (unsigned)blocks;
}

}  // namespace

void random_dense_cuda(const CudaLaunch *c, fp16 *out, size_t rows, size_t cols, size_t stride,
                       const RandomWeights *r, RandomTotals *totals) {
    CHECK(stride % WEIGHTS_PER_DRAW == 0 && stride >= cols);
    const size_t draws = rows * (stride / WEIGHTS_PER_DRAW);
    const unsigned grid = grid_of(ceil_div(draws, DENSE_THREADS));
    dense_kernel<<<grid, DENSE_THREADS, 0, c->stream>>>(out, rows, cols, stride, *r, totals);
    CUDA_CHECK_LAUNCH(c->stream);
}

void random_index_cuda(const CudaLaunch *c, uint32_t *tile_sizes, uint32_t *col_info, uint64_t *bitmap,
                       size_t rows, size_t cols, const RandomWeights *r, RandomTotals *totals) {
    const size_t per_row = tiled_cbc_cols_padded(cols) / TILE_K;
    const unsigned grid = grid_of(tiled_cbc_tile_rows(rows) * per_row);
    index_kernel<<<grid, TILE_M, 0, c->stream>>>(tile_sizes, col_info, bitmap, rows, cols, per_row, *r, totals);
    CUDA_CHECK_LAUNCH(c->stream);
}

void random_values_cuda(const CudaLaunch *c, const TiledCbc *w, fp16 *values, const RandomWeights *r) {
    const size_t per_row = tiled_cbc_cols_padded(w->cols) / TILE_K;
    const unsigned grid = grid_of(tiled_cbc_tile_rows(w->rows) * per_row);
    values_kernel<<<grid, TILE_M, 0, c->stream>>>(values, w->tile_offset, w->col_info, w->bitmap, w->cols, per_row,
                                                  *r);
    CUDA_CHECK_LAUNCH(c->stream);
}
