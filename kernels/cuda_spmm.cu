/* SpMM: out = W x on Tensor Cores for n tokens, W in Tiled-CBC; and expand: W as dense rows, for products
 * large enough to be left to a library.
 *
 *   out    (n, rows) fp32 or (n, rows / 2) fp16, by the epilogue     W          (rows, cols)  Tiled-CBC
 *   x      (n, cols) fp16                                            threshold  NULL or one float
 *   dense  (count * TILE_M, stride) fp16, what expand writes
 *
 * A block walks along a tile row (256 rows) in chunks of CHUNK_K = 32 columns. Both kernels share the walk:
 *
 *   copy     The values of a chunk are one contiguous run: cp.async into a ring of STAGES slots, each as
 * large as a chunk without zeros. index    Thread = 32 rows of one column: its bitmap word and ColInfo,
 * loaded a chunk ahead into registers. A scan over the 8 threads of a column turns popcounts into the place
 * of each word's first value. decode   Warp w = bitmap word w of every column, rows 32w .. 32w + 31. Lane (g,
 * t) = (lane / 4, lane % 4) takes the rows 4g .. 4g + 3 of the columns 8t .. 8t + 7. One masked popcount
 * finds the first of 4 values, the others follow it; a row whose bit is 0 loads nothing and is 0. Two columns
 * share a register.
 *
 * These registers are the A fragments of mma.m16n8k16 as they stand, because the order of rows and columns
 * does not matter to a sum if all agree on it. Of the fragment's rows, g and g + 8 are 4g and 4g + 1 in the
 * first m-tile, 4g + 2 and 4g + 3 in the second; of its columns, 2t, 2t + 1, 2t + 8, 2t + 9 are the first
 * four of the lane's eight in the first step, the last four in the second. So no decoded weight passes
 * through shared memory; B fragments are 8 contiguous bytes of x; a lane's sums are 4 adjacent rows, hence
 * 16-byte stores; gate and up of SwiGLU meet in one lane; and expand's rows are 16-byte stores.
 *
 * x of a chunk is loaded a chunk ahead into registers, checked, cut at the threshold and put into shared
 * memory. What is beyond cols or n is 0 there. Bits beyond the matrix are 0, so the tails of W need no care.
 *
 * spmm     grid (slices of K, blocks of TOKENS tokens, tile rows): who reads the same weights runs side by
 * side. expand   grid (slices of the stride, 1, tile rows). Block: THREADS. Shared memory: the ring, two
 * indices, two chunks of x (Staging, SpmmShared). One barrier a chunk. Before it, the values of this chunk
 * (cp.async), its index and its x (stored a chunk earlier) are complete; after it, every warp has left the
 * chunk before, whose buffers are filled anew.
 *
 * Slices: partial sums go to the workspace in the order of the fragments. Of the blocks of a tile row and
 * token block, the last to arrive adds them in the order of the slices, so the result does not depend on
 * which it was.
 *
 * Bank conflicts: none in copies, index, x and B fragments; the gathers of values meet by chance.
 * Bytes: W once per TOKENS tokens, x once per tile row (L2), out; 8 n rows a slice of workspace (L2).
 * Reference: kernels/cpu.c (panel_products). Test: tests/gpu/spmm_test.cu. */
#include "cuda_ops.cuh"

namespace {

constexpr int LANES = 32;
constexpr int WORD_ROWS = 32;              // rows of a bitmap word, read as 32 bits
constexpr int WORDS = TILE_M / WORD_ROWS;  // words of one column, and warps of a block
constexpr int THREADS = WORDS * LANES;
constexpr int CHUNK_GTILES = 2;
constexpr int CHUNK_K = CHUNK_GTILES * TILE_K;
constexpr int STAGES = 4;
constexpr int UNIT = COLUMN_ALIGN;                  // values in 16 bytes
constexpr int RUN_UNITS = CHUNK_K * TILE_M / UNIT;  // of a chunk without zeros
constexpr int LANE_ROWS = 4;                        // a lane's part of a chunk
constexpr int LANE_COLS = 8;
constexpr int STEPS = CHUNK_K / 16;  // mma steps along K of a chunk
constexpr int STEP_COLS = LANE_COLS / STEPS;
constexpr int STEP_PAIRS = STEP_COLS / 2;  // two columns share a register
constexpr int M_TILES = WORD_ROWS / 16;    // mma tiles along the rows of a warp
constexpr int N_TILE = 8;                  // tokens of an mma
constexpr int X_UNITS = CHUNK_K / UNIT;    // 16-byte units of one token's chunk
constexpr int INDEX_PITCH = CHUNK_K + 4;   // 8 words x 4 columns of a warp's stores fall into 32 banks

static_assert(THREADS == CHUNK_K * WORDS, "one thread indexes one word of one column");
static_assert(LANES * LANE_ROWS * LANE_COLS == WORD_ROWS * CHUNK_K, "a warp decodes its word of a chunk");
static_assert(LANE_COLS == UNIT && X_UNITS == 4, "a lane's columns of one token are one 16-byte unit");
static_assert(STEP_PAIRS == 2 && LANE_ROWS == 2 * M_TILES, "an A fragment is 2 pairs of columns x 2 rows");
static_assert(UNIT * sizeof(fp16) == sizeof(uint4), "units are moved as uint4");

/* Where the decoder finds a chunk's values. */
struct Index {
    uint32_t word[WORDS][INDEX_PITCH];   // bits of 32 rows of a column
    uint32_t start[WORDS][INDEX_PITCH];  // shared-memory address of the first value of these rows
};

struct Staging {
    uint4 values[STAGES][RUN_UNITS];
    Index index[2];
};

extern __shared__ uint4 shared_memory[];

/* ---- the walk along a tile row ------------------------------------------------------------------------ */

/* A block's way through a slice. Chunks are counted from the tile row's first, and their number chooses their
 * buffers; GTiles from the matrix's first: the format's limit on them (tiled_cbc_layout) lets every index of
 * metadata fit in 32 bits. Registers hold what is loaded ahead of its use. */
struct Walk {
    const TiledCbc &w;
    Staging &shared;
    uint32_t row_first, end;      // GTiles; beyond end there are no values and no bits
    uint32_t run_first, run_end;  // units of the chunk to be copied next
    uint32_t word, col_info, gtile_offset, chunk_offset;  // of the chunk to be indexed next

    __device__ Walk(const TiledCbc &matrix, Staging &staging, size_t tile_row, uint32_t end_chunk)
        : w(matrix), shared(staging) {
        const uint32_t per_row = (uint32_t)((w.cols + TILE_K - 1) / TILE_K);
        row_first = (uint32_t)tile_row * per_row;
        end = row_first + min(per_row, end_chunk * CHUNK_GTILES);
    }

    /* Is the chunk in the slice and within the matrix? */
    __device__ bool has(uint32_t chunk) const { return row_first + chunk * CHUNK_GTILES < end; }

    __device__ void load_run(uint32_t chunk) {
        const uint32_t first = row_first + chunk * CHUNK_GTILES;
        run_first = w.tile_offset[min(first, end)];
        run_end = w.tile_offset[min(first + CHUNK_GTILES, end)];
    }

    /* One group of cp.async a chunk, an empty one beyond the slice, so that waiting can count groups. */
    __device__ void copy_run(uint32_t chunk) {
        uint4 *to = shared.values[chunk % STAGES];
        const uint4 *from = reinterpret_cast<const uint4 *>(w.values) + run_first;
        const uint32_t units = run_end - run_first;
#pragma unroll 1
        for (uint32_t unit = threadIdx.x; unit < units; unit += THREADS) {
            copy_async_16(to + unit, from + unit);
        }
        copy_async_commit();
    }

    /* The thread's column of a chunk and its word in that column. */
    __device__ static uint32_t index_col() { return threadIdx.x / WORDS; }
    __device__ static uint32_t index_word() { return threadIdx.x % WORDS; }

    __device__ void load_index(uint32_t chunk) {
        const uint32_t first = row_first + chunk * CHUNK_GTILES, own = first + index_col() / TILE_K;
        word = col_info = gtile_offset = chunk_offset = 0;
        if (own < end) {
            word = reinterpret_cast<const uint32_t *>(w.bitmap)[first * (TILE_K * WORDS) + threadIdx.x];
            col_info = w.col_info[first * TILE_K + index_col()];
            gtile_offset = w.tile_offset[own];
            chunk_offset = w.tile_offset[first];
        }
    }

    __device__ void store_index(uint32_t chunk) {
        const uint32_t set = __popc(word);
        uint32_t before = set;
#pragma unroll
        for (uint32_t step = 1; step < WORDS; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, before, step, WORDS);
            before += index_word() >= step ? other : 0;
        }
        before -= set;
        const uint32_t first = (gtile_offset - chunk_offset) * UNIT + (col_info >> 16) + before;
        Index &index = shared.index[chunk % 2];
        index.word[index_word()][index_col()] = word;
        index.start[index_word()][index_col()] =
            (uint32_t)__cvta_generic_to_shared(shared.values[chunk % STAGES]) +
            first * (uint32_t)sizeof(fp16);
    }

    /* All that comes before the first advance(). */
    __device__ void begin(uint32_t chunk) {
        load_index(chunk);
        for (uint32_t i = 0; i < STAGES - 1; i++) {
            load_run(chunk + i);
            copy_run(chunk + i);
        }
        load_run(chunk + STAGES - 1);
        store_index(chunk);
        load_index(chunk + 1);
    }

    /* Make a chunk ready to be decoded; prepare those behind it. */
    __device__ void advance(uint32_t chunk) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        copy_run(chunk + STAGES - 1);
        load_run(chunk + STAGES);
        store_index(chunk + 1);
        load_index(chunk + 2);
    }
};

/* ---- decoding ----------------------------------------------------------------------------------------- */

/* If bit is not 0, load the value at a shared-memory address and step to the next. In C++ every step costs a
 * second instruction. */
__device__ __forceinline__ void take_value(uint32_t &value, uint32_t &address, uint32_t bit) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.shared.u16 %0, [%1]; @p add.u32 %1, %1, 2; }"
                 : "+r"(value), "+r"(address)
                 : "r"(bit));
}

/* Four rows of one column: those of nibble `lane / 4` of the word. */
__device__ __forceinline__ void decode_nibble(uint32_t rows[LANE_ROWS], uint32_t word, uint32_t start) {
    const uint32_t shift = threadIdx.x % LANES / 4 * LANE_ROWS;
    const uint32_t bits = word >> shift, before = word & ~(~0u << shift);
    uint32_t address = start + (uint32_t)sizeof(fp16) * __popc(before);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        rows[r] = 0;
        take_value(rows[r], address, bits & 1u << r);
    }
}

/* The lane's part of a step: pairs[p][r] = row r of columns 2p (low half) and 2p + 1 of its four. */
__device__ __forceinline__ void decode(uint32_t pairs[STEP_PAIRS][LANE_ROWS], const Index &index, int step) {
    const int warp = threadIdx.x / LANES, col = threadIdx.x % 4 * LANE_COLS + step * STEP_COLS;
#pragma unroll
    for (int p = 0; p < STEP_PAIRS; p++) {
        const uint2 word = *reinterpret_cast<const uint2 *>(&index.word[warp][col + 2 * p]);
        const uint2 start = *reinterpret_cast<const uint2 *>(&index.start[warp][col + 2 * p]);
        uint32_t even[LANE_ROWS], odd[LANE_ROWS];
        decode_nibble(even, word.x, start.x);
        decode_nibble(odd, word.y, start.y);
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            pairs[p][r] = __byte_perm(even[r], odd[r], 0x5410);
        }
    }
}

/* ---- x ------------------------------------------------------------------------------------------------ */

struct Input {
    const fp16 *x;  // (n, cols)
    int n;
    size_t cols;
    const float *threshold;  // or NULL
};

/* A chunk of x in shared memory: each lane's four columns of a step, for every token. */
template <int TOKENS> using InputChunk = uint2[STEPS][TOKENS * X_UNITS];

/* The chunks of x for TOKENS tokens, by way of registers. Thread = units of 8 columns of a token. */
template <int TOKENS> struct InputTile {
    static constexpr int UNITS = TOKENS * X_UNITS;
    static constexpr int PER_THREAD = (UNITS + THREADS - 1) / THREADS;
    const Input &in;
    const fp16 *from[PER_THREAD];  // the unit in chunk 0
    uint32_t left[PER_THREAD];     // columns from there to the end; 0 if there is no such token
    uint4 ahead[PER_THREAD];
    uint32_t exponents;  // of all that was stored; see finite()

    __device__ InputTile(const Input &input, int first_token) : in(input), exponents(0) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int token = first_token + (threadIdx.x + i * THREADS) / X_UNITS;
            const size_t col = threadIdx.x % X_UNITS * UNIT;
            from[i] = in.x + token * in.cols + col;
            left[i] = is_unit(i) && token < in.n && col < in.cols ? (uint32_t)(in.cols - col) : 0;
        }
    }

    __device__ static bool is_unit(int i) { return threadIdx.x + i * THREADS < UNITS; }

    __device__ void load(uint32_t chunk) {
        const uint32_t k = chunk * CHUNK_K;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            ahead[i] = make_uint4(0, 0, 0, 0);
            if (k < left[i]) {
                ahead[i] = in.cols % UNIT == 0 ? *reinterpret_cast<const uint4 *>(from[i] + k)
                                               : load_slowly(from[i] + k, left[i] - k);
            }
        }
    }

    /* A token may begin on any 2 bytes, and its last unit be cut. */
    __device__ static uint4 load_slowly(const fp16 *values, uint32_t n) {
        uint32_t pair[4];
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t low = 2 * j < n ? values[2 * j] : 0;
            const uint32_t high = 2 * j + 1 < n ? values[2 * j + 1] : 0;
            pair[j] = low | high << 16;
        }
        return make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }

    __device__ void store(InputChunk<TOKENS> &chunk) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (is_unit(i)) {
                uint4 a = ahead[i];
                exponents |= carry(a.x) | carry(a.y) | carry(a.z) | carry(a.w);
                if (in.threshold) {  // rare with many tokens, so not worth a register between chunks
                    const float t = *in.threshold;
                    a = make_uint4(drop_small(a.x, t), drop_small(a.y, t), drop_small(a.z, t),
                                   drop_small(a.w, t));
                }
                chunk[0][threadIdx.x + i * THREADS] = make_uint2(a.x, a.y);
                chunk[1][threadIdx.x + i * THREADS] = make_uint2(a.z, a.w);
            }
        }
    }

    /* Only an exponent of ones, infinity or NaN, carries into the sign's place. */
    __device__ static uint32_t carry(uint32_t pair) { return (pair & 0x7c007c00u) + 0x04000400u; }
    __device__ bool finite() const { return (exponents & 0x80008000u) == 0; }

    __device__ static uint32_t drop_small(uint32_t pair, float threshold) {
        const float low = __half2float(__ushort_as_half((fp16)pair));
        const float high = __half2float(__ushort_as_half((fp16)(pair >> 16)));
        return (fabsf(low) <= threshold ? 0 : pair & 0xffffu) |
               (fabsf(high) <= threshold ? 0 : pair & 0xffff0000u);
    }
};

/* ---- spmm --------------------------------------------------------------------------------------------- */

template <int TOKENS> struct SpmmShared {
    Staging staging;
    InputChunk<TOKENS> x[2];
};

/* sums[m][i] of a thread: token 8 tile + 2t + i % 2, row 4g + 2m + i / 2 of its warp. */
template <int TOKENS> using Sums = float[TOKENS / N_TILE][M_TILES][4];

/* sums += a b, fp16 x fp16 -> fp32; low, high: columns 2t, 2t + 1 and 2t + 8, 2t + 9 of rows g, g + 8 of a */
__device__ __forceinline__ void mma_m16n8k16(float sums[4], const uint32_t low[2], const uint32_t high[2],
                                             uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(low[0]), "r"(low[1]), "r"(high[0]), "r"(high[1]), "r"(b.x), "r"(b.y));
}

/* Count a block's arrival; returns how many came before. One thread calls it, behind a barrier of its block: what any
 * thread of the block wrote before is then visible to every block that arrives later, behind a barrier of its own. */
__device__ __forceinline__ unsigned arrive(unsigned *counter) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/* Add up the partial sums of all slices. Returns true in the one block that has to go on, with the total. */
template <int TOKENS> __device__ bool join_slices(Sums<TOKENS> &sums, float *workspace, unsigned *counters) {
    const size_t tile = (size_t)blockIdx.z * gridDim.y + blockIdx.y, slices = gridDim.x;
    constexpr int QUADS = TOKENS / N_TILE * M_TILES;  // of a thread; of a block QUADS * THREADS
    float4 *partial = reinterpret_cast<float4 *>(workspace) + tile * slices * QUADS * THREADS + threadIdx.x;
    float4 *own = partial + blockIdx.x * QUADS * THREADS;
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        const float *s = sums[q / M_TILES][q % M_TILES];
        own[q * THREADS] = make_float4(s[0], s[1], s[2], s[3]);
    }

    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = arrive(&counters[tile]) == slices - 1;
        if (last) {
            counters[tile] = 0;
        }
    }
    __syncthreads();
    if (!last) {
        return false;
    }

    constexpr int BATCH = QUADS < 8 ? QUADS : 8;  // enough loads at once, and registers for them
#pragma unroll
    for (int first = 0; first < QUADS; first += BATCH) {
        float4 total[BATCH] = {};
#pragma unroll 1
        for (size_t slice = 0; slice < slices; slice++) {
#pragma unroll
            for (int q = 0; q < BATCH; q++) {
                const float4 p = __ldcg(partial + (slice * QUADS + first + q) * THREADS);
                total[q].x += p.x;
                total[q].y += p.y;
                total[q].z += p.z;
                total[q].w += p.w;
            }
        }
#pragma unroll
        for (int q = 0; q < BATCH; q++) {
            float *s = sums[(first + q) / M_TILES][(first + q) % M_TILES];
            s[0] = total[q].x;
            s[1] = total[q].y;
            s[2] = total[q].z;
            s[3] = total[q].w;
        }
    }
    return true;
}

/* What becomes of y[0 .. 3], rows row .. row + 3 of one token. */
__device__ __forceinline__ void finish_rows(void *out, Epilogue epilogue, int token, size_t row, size_t rows,
                                            const float y[LANE_ROWS]) {
    const int n_rows = (int)min((size_t)LANE_ROWS, rows - row);
    if (epilogue == EPILOGUE_SWIGLU) {
        __half *to = static_cast<__half *>(out) + (token * rows + row) / 2;
        for (int r = 0; r < LANE_ROWS; r += 2) {
            if (r < n_rows) {
                to[r / 2] = __float2half_rn(silu(y[r]) * y[r + 1]);
            }
        }
        return;
    }
    float *to = static_cast<float *>(out) + token * rows + row;
    const bool add = epilogue == EPILOGUE_ADD;
    if (rows % LANE_ROWS == 0) {
        float4 sum = add ? *reinterpret_cast<const float4 *>(to) : make_float4(0, 0, 0, 0);
        sum = make_float4(sum.x + y[0], sum.y + y[1], sum.z + y[2], sum.w + y[3]);
        *reinterpret_cast<float4 *>(to) = sum;
        return;
    }
    for (int r = 0; r < LANE_ROWS; r++) {
        if (r < n_rows) {
            to[r] = add ? to[r] + y[r] : y[r];
        }
    }
}

struct SpmmParams {
    void *out;
    TiledCbc w;
    Input input;
    Epilogue epilogue;
    float *workspace;
    unsigned *counters;
    DeviceReport *report;
    unsigned fault;  // what to note there
};

/* Blocks that an SM is to hold: as many as registers for the sums (TOKENS a thread) leave room for. */
constexpr int blocks_per_sm(int tokens) { return tokens <= 16 ? 3 : tokens <= 64 ? 2 : 1; }

template <int TOKENS>
__global__ void __launch_bounds__(THREADS, blocks_per_sm(TOKENS)) spmm_kernel(const SpmmParams params) {
    SpmmShared<TOKENS> &shared = *reinterpret_cast<SpmmShared<TOKENS> *>(shared_memory);
    const int lane = threadIdx.x % LANES;
    const int first_token = blockIdx.y * TOKENS;
    const size_t chunks = (params.w.cols + CHUNK_K - 1) / CHUNK_K;
    const uint32_t begin = (uint32_t)(chunks * blockIdx.x / gridDim.x);
    const uint32_t end = (uint32_t)(chunks * (blockIdx.x + 1) / gridDim.x);

    Walk walk(params.w, shared.staging, blockIdx.z, end);
    InputTile<TOKENS> x(params.input, first_token);
    x.load(begin);
    walk.begin(begin);
    x.store(shared.x[begin % 2]);
    x.load(begin + 1);

    Sums<TOKENS> sums = {};
    for (uint32_t chunk = begin; walk.has(chunk); chunk++) {
        walk.advance(chunk);
        x.store(shared.x[(chunk + 1) % 2]);
        x.load(chunk + 2);

#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t a[STEP_PAIRS][LANE_ROWS];
            decode(a, shared.staging.index[chunk % 2], step);
            const uint2 *b_units = shared.x[chunk % 2][step] + lane;
#pragma unroll
            for (int tile = 0; tile < TOKENS / N_TILE; tile++) {
                const uint2 b = b_units[tile * LANES];
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma_m16n8k16(sums[tile][m], &a[0][2 * m], &a[1][2 * m], b);
                }
            }
        }
    }
    if (!x.finite() && blockIdx.z == 0) {  // every tile row sees the same x
        note_fault(params.report, params.fault);
    }

    if (gridDim.x > 1 && !join_slices<TOKENS>(sums, params.workspace, params.counters)) {
        return;
    }
    const size_t row = (size_t)blockIdx.z * TILE_M + threadIdx.x / 4 * LANE_ROWS;
    if (row >= params.w.rows) {
        return;
    }
#pragma unroll
    for (int tile = 0; tile < TOKENS / N_TILE; tile++) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = first_token + tile * N_TILE + lane % 4 * 2 + odd;
            const float y[LANE_ROWS] = {sums[tile][0][odd], sums[tile][0][2 + odd], sums[tile][1][odd],
                                        sums[tile][1][2 + odd]};
            if (token < params.input.n) {
                finish_rows(params.out, params.epilogue, token, row, params.w.rows, y);
            }
        }
    }
}

/* How many slices of K: the number that keeps the busiest SM busy for the shortest time, counted in chunks
 * that an SM decodes. A block costs its chunks and START_CHUNKS to fill its pipeline; an SM with fewer blocks
 * than it can hold is no faster than a full one; and the last block of a tile reads the partial sums of all
 * its slices. */
int choose_slices(const CudaLaunch *c, size_t tiles, size_t chunks, int tokens, int resident) {
    constexpr size_t START_CHUNKS = 2, MAX_SLICES = 64, TOKENS_READ_PER_CHUNK = 32;
    const size_t partial_bytes = tiles * TILE_M * (size_t)tokens * sizeof(float);
    size_t best = 1, best_cost = SIZE_MAX;
    for (size_t slices = 1; slices <= min_size(chunks, MAX_SLICES); slices++) {
        if (slices > 1 && (slices * partial_bytes > c->workspace_bytes || tiles > N_COUNTERS)) {
            break;
        }
        const size_t per_sm = ceil_div(tiles * slices, (size_t)c->n_sms);
        const size_t reading = slices > 1 ? slices * (size_t)tokens / TOKENS_READ_PER_CHUNK : 0;
        const size_t cost = (per_sm > (size_t)resident ? per_sm : (size_t)resident) *
                                (ceil_div(chunks, slices) + START_CHUNKS) +
                            reading;
        if (cost < best_cost) {
            best = slices;
            best_cost = cost;
        }
    }
    return (int)best;
}

/* Let a kernel have its shared memory; returns how many of its blocks an SM can hold. */
template <typename Kernel>
int prepare_launch(const CudaLaunch *c, Kernel *kernel, size_t shared_bytes) {
    CHECK(shared_bytes <= c->shared_per_block);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
    int resident = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, THREADS, shared_bytes));
    CHECK(resident > 0);
    return resident;
}

template <int TOKENS>
void launch_spmm(const CudaLaunch *c, const SpmmParams &params) {
    const size_t shared_bytes = sizeof(SpmmShared<TOKENS>);
    const int resident = prepare_launch(c, spmm_kernel<TOKENS>, shared_bytes);
    const size_t tile_rows = tiled_cbc_tile_rows(params.w.rows);
    const size_t token_blocks = ceil_div((size_t)params.input.n, TOKENS);
    CHECK(tile_rows <= UINT16_MAX && token_blocks <= UINT16_MAX);
    const int slices =
        choose_slices(c, tile_rows * token_blocks, ceil_div(params.w.cols, CHUNK_K), TOKENS, resident);
    const dim3 grid((unsigned)slices, (unsigned)token_blocks, (unsigned)tile_rows);
    spmm_kernel<TOKENS><<<grid, THREADS, shared_bytes, c->stream>>>(params);
    CUDA_CHECK_LAUNCH(c->stream);
}

/* ---- expand ------------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(THREADS, 3)
    expand_kernel(fp16 *__restrict__ out, size_t stride, const TiledCbc w, size_t first_tile_row) {
    Staging &shared = *reinterpret_cast<Staging *>(shared_memory);
    const size_t tile_row = first_tile_row + blockIdx.z;
    const size_t chunks = (stride + CHUNK_K - 1) / CHUNK_K;
    const uint32_t begin = (uint32_t)(chunks * blockIdx.x / gridDim.x);
    const uint32_t end = (uint32_t)(chunks * (blockIdx.x + 1) / gridDim.x);
    const size_t row_in_tile = threadIdx.x / 4 * LANE_ROWS;
    const size_t row = tile_row * TILE_M + row_in_tile;
    const int n_rows = row < w.rows ? (int)min((size_t)LANE_ROWS, w.rows - row) : 0;
    fp16 *to = out + (blockIdx.z * (size_t)TILE_M + row_in_tile) * stride;

    Walk walk(w, shared, tile_row, end);
    walk.begin(begin);
    for (uint32_t chunk = begin; chunk < end; chunk++) {
        walk.advance(chunk);
        uint32_t pairs[STEPS][STEP_PAIRS][LANE_ROWS];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            decode(pairs[step], shared.index[chunk % 2], step);
        }
        const size_t col = (size_t)chunk * CHUNK_K + threadIdx.x % 4 * LANE_COLS;
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            if (r < n_rows && col < stride) {
                // As an intrinsic: the compiler splits the plain assignment into four stores.
                __stwb(reinterpret_cast<uint4 *>(to + r * stride + col),
                       make_uint4(pairs[0][0][r], pairs[0][1][r], pairs[1][0][r], pairs[1][1][r]));
            }
        }
    }
}

}  // namespace

void spmm_cuda(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x, int n, const float *threshold,
               Epilogue epilogue) {
    CHECK(w->format == FORMAT_TILED_CBC && n >= 1);
    CHECK((uintptr_t)x % sizeof(uint4) == 0 && (uintptr_t)out % sizeof(float4) == 0);
    CHECK(epilogue != EPILOGUE_SWIGLU || w->rows % 2 == 0);
    const SpmmParams params = {
        out,       w->cbc,        {x, n, w->cols, threshold}, epilogue, c->workspace, c->counters,
        c->report, fault_code(w),
    };
    if (n <= 8) {
        launch_spmm<8>(c, params);
    } else if (n <= 16) {
        launch_spmm<16>(c, params);
    } else if (n <= 32) {
        launch_spmm<32>(c, params);
    } else if (n <= 64) {
        launch_spmm<64>(c, params);
    } else {
        launch_spmm<128>(c, params);
    }
}

void expand_cuda(const CudaLaunch *c, fp16 *out, size_t stride, const Matrix *w, size_t first, size_t count) {
    CHECK(w->format == FORMAT_TILED_CBC && w->cols <= stride && stride <= INT32_MAX - CHUNK_K);
    CHECK(stride % UNIT == 0 && (uintptr_t)out % sizeof(uint4) == 0);
    CHECK(count >= 1 && count <= UINT16_MAX && first + count <= tiled_cbc_tile_rows(w->rows));
    constexpr size_t MIN_CHUNKS = 8;  // of a block, so that filling its pipeline does not count
    constexpr size_t WAVES = 4;  // blocks beyond what fits at once: those that end early make room for more
    const int resident = prepare_launch(c, expand_kernel, sizeof(Staging));
    const size_t wanted = ceil_div(WAVES * (size_t)(c->n_sms * resident), count);
    const size_t room = ceil_div(ceil_div(stride, CHUNK_K), MIN_CHUNKS);
    const dim3 grid((unsigned)min_size(wanted, room), 1, (unsigned)count);
    expand_kernel<<<grid, THREADS, sizeof(Staging), c->stream>>>(out, stride, w->cbc, first);
    CUDA_CHECK_LAUNCH(c->stream);
}
