/* spMspV: out = W x for one token, W in Tiled-CBC, skipping what is zero in W and what is small in x.
 *
 *   out        (rows) fp32 or (rows / 2) fp16, by the epilogue       W  (rows, cols)  Tiled-CBC
 *   x          (cols) fp16                                          threshold  NULL or one float
 *
 * A column k is active if |x_k| > threshold. One block takes one tile row (256 rows) x one slice of the columns:
 *
 *   list        The block asks for ColInfo and TileOffset of its slice before x is there. With x it lists the active
 *               columns: number, start and size of the values, x. Its warps share the list in equal numbers of
 *               stages, so no warp walks over skipped columns.
 *   copy        A warp takes 32 active columns at a time. Values come through cp.async, STAGE_COLUMNS columns a
 *               stage, 8 lanes a column, 16 bytes a lane, STAGES stages in flight. A column goes to the place in its
 *               slot where it lies in 128-byte lines as it does in global memory: copies whose two sides differ in
 *               that fetch half of their sectors twice.
 *   index       Lane = column: it reads the column's 32 bytes of bitmap while the first values are on their way,
 *               counts bits, and leaves for each group of 32 rows (word, address of its first value) in shared
 *               memory. The rank of every group costs a fraction of an instruction this way.
 *   multiply    Lane = 4 neighbouring rows in each half of the tile: 4 bits of a word. (Neighbouring lanes then
 *               read neighbouring words of shared memory; 8 rows a lane double the bank conflicts.) Rows whose bit is
 *               set take the values from the lane's rank on, one after the other, under predicates that one
 *               instruction makes from the bits: what is not selected is never loaded. Products are summed in fp16,
 *               FLUSH_COLUMNS columns long, then in fp32.
 *
 * Sums of warps, then of slices, are added in a fixed order. The block of a tile row's last slice takes what the
 * other slices' blocks post as letters (cuda_ops.cuh) and applies the epilogue. It waits for blocks with smaller
 * numbers only, and those wait for nobody. Barriers are those of the warp except around the list and the sums of the
 * warps.
 *
 * Bytes: active columns' values, bitmaps and ColInfo, the offsets of their GTiles, x once a tile row (L2).
 * Reference: kernels/cpu.c (cbc_product). Test: tests/test_kernels.c. Measured: tests/bench/NOTES.md. */
#include <math.h>

#include "cuda_ops.cuh"

namespace {

constexpr int WARPS = 12;
constexpr int THREADS = 32 * WARPS;
constexpr int STAGE_COLUMNS = 4;   // one cp.async instruction serves so many columns
constexpr int STAGES = 2;
constexpr int RING_COLUMNS = STAGE_COLUMNS * STAGES;
constexpr int CHUNK = 32;          // columns that a warp indexes at once: one a lane
constexpr int FLUSH_COLUMNS = 16;  // products summed in fp16 before they go to fp32
constexpr int GROUPS = TILE_M / 32;
constexpr int ROWS_PER_LANE = TILE_M / 32;
constexpr int HALVES = 2;          // of a tile: 128 rows, 4 for each lane
constexpr unsigned SIZE = sizeof(half);  // bytes of a value
constexpr int PIECE = 16;          // bytes that one lane copies at once
constexpr int LINE = 128;
constexpr int LINE_PIECES = LINE / PIECE;
constexpr int GROUP_STRIDE = 16 * CHUNK + 16;  // bytes of one group in the index: 16 more keep the banks apart
constexpr int INDEX_BYTES = GROUPS / HALVES * GROUP_STRIDE;
constexpr int LETTERS_AT_ONCE = 16;
constexpr int MAX_SLICE = 4096;    // columns; shared memory may allow fewer
constexpr int STATIC_SHARED = 256; // bytes of the kernel's own variables, generously
constexpr int RESERVED_SHARED = 1024; // bytes that CUDA takes for every block on an SM
constexpr int MIN_BLOCKS = 3;      // that shall fit on an SM: bounds the registers

static_assert(ROWS_PER_LANE == 8 && HALVES == 2, "a lane takes 4 bits of a bitmap word in each half of the tile");
static_assert(STAGES == 2, "one stage is copied ahead");
static_assert(CHUNK % FLUSH_COLUMNS == 0 && FLUSH_COLUMNS % STAGE_COLUMNS == 0, "flushes fall between stages");
static_assert(STAGE_COLUMNS * LINE_PIECES == 32, "a warp copies a line of each of a stage's columns at once");
static_assert(TILE_M * sizeof(half) == 4 * LINE, "a column lies in at most five lines");
static_assert(COLUMN_ALIGN * sizeof(fp16) == PIECE, "columns begin with a piece");
static_assert(THREADS > TILE_M, "the final sums take a thread a row, and a warp to count");

/* Shared memory, in this order. */
struct Layout {
    int ring, index;          // byte offsets; of both there is one for each warp
    int list, gtiles, input;  // the active columns, where the values of each GTile of the slice begin, the columns' x
    int ring_bytes;           // of one warp; its sums must fit there in the end
    int total;
};

__host__ __device__ inline Layout shared_layout(int slice_cols, int slot_bytes) {
    Layout l;
    const int sums_bytes = TILE_M * (int)sizeof(float);
    l.ring_bytes = RING_COLUMNS * slot_bytes > sums_bytes ? RING_COLUMNS * slot_bytes : sums_bytes;
    l.ring = 0;
    l.index = l.ring + WARPS * l.ring_bytes;
    l.list = l.index + WARPS * INDEX_BYTES;
    l.gtiles = l.list + slice_cols * (int)sizeof(unsigned);
    // a slice may begin in the middle of a GTile; input is read 8 bytes at a time
    l.input = l.gtiles + (slice_cols / TILE_K / 2 + 2) * 2 * (int)sizeof(unsigned);
    l.total = l.input + slice_cols * (int)sizeof(half);
    return l;
}

/* What the list tells of an active column: its number in the slice | the piece of its GTile that it begins with <<
 * START_SHIFT | its pieces << PIECES_SHIFT. */
constexpr int START_SHIFT = 12, PIECES_SHIFT = 21;
static_assert(MAX_SLICE / TILE_K + 2 <= THREADS, "a thread takes the start of a GTile");
static_assert(MAX_SLICE <= 1 << START_SHIFT, "a column's number in its slice");
static_assert(TILE_M * TILE_K / COLUMN_ALIGN <= 1 << (PIECES_SHIFT - START_SHIFT), "the piece that it begins with");

/* List the active columns of x[0 .. n_cols-1] in order, and their x. info: ColInfo of the first one. Returns how
 * many; *finite: is every x of this thread? Waits for x, but not before it has asked for ColInfo. */
__device__ int list_active(unsigned *list, fp16 *input, const fp16 *x, const uint32_t *info, int n_cols,
                           float threshold, bool *finite) {
    constexpr int ROUNDS = (MAX_SLICE + THREADS - 1) / THREADS;
    __shared__ int counts[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rounds = (n_cols + THREADS - 1) / THREADS, begin = warp * rounds * 32;  // a warp's own range
    unsigned column[ROUNDS], active[ROUNDS];
    fp16 value[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS && i < rounds; i++) {
        const int k = begin + i * 32 + lane;
        column[i] = k < n_cols ? __ldg(info + k) : 0;
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < ROUNDS && i < rounds; i++) {
        const int k = begin + i * 32 + lane;
        value[i] = k < n_cols ? x[k] : 0;
    }
    int count = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS && i < rounds; i++) {
        *finite &= half_is_finite(value[i]);
        active[i] = __ballot_sync(~0u, fabsf(__half2float(__ushort_as_half(value[i]))) > threshold);
        count += __popc(active[i]);
    }
    if (lane == 0) {
        counts[warp] = count;
    }
    __syncthreads();
    int at = 0, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        at += w < warp ? counts[w] : 0;
        total += counts[w];
    }
#pragma unroll
    for (int i = 0; i < ROUNDS && i < rounds; i++) {
        if (active[i] >> lane & 1) {
            const int slot = at + __popc(active[i] & ((1u << lane) - 1));
            const unsigned nnz = column[i] & 0xffff, start = (column[i] >> 16) / COLUMN_ALIGN;
            list[slot] = (unsigned)(begin + i * 32 + lane) | start << START_SHIFT |
                         (nnz + COLUMN_ALIGN - 1) / COLUMN_ALIGN << PIECES_SHIFT;
            input[slot] = value[i];
        }
        at += __popc(active[i]);
    }
    __syncthreads();
    return total;
}

/* cp.async of a piece at line LINES behind both addresses, if the lane has more than LINES * LINE_PIECES left. */
template <int LINES> __device__ __forceinline__ void copy_piece(unsigned to, const void *from, int left) {
    asm volatile("{ .reg .pred p; setp.gt.s32 p, %2, %3;\n @p cp.async.cg.shared.global [%0 + %4], [%1 + %4], 16; }"
                 :
                 : "r"(to), "l"(from), "r"(left), "n"(LINES * LINE_PIECES), "n"(LINES * LINE)
                 : "memory");
}

/* Leave in `index`, for each group of 32 rows and the same group of the tile's other half: (word, shared address of
 * its first value, the other's word and address). Returns the nonzeros.
 *   words   the column's bitmap     value   shared address of its first value */
__device__ unsigned write_index(unsigned char *index, const unsigned (&words)[GROUPS], unsigned value) {
    unsigned group[GROUPS + 1];
    group[0] = value;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        group[g + 1] = group[g] + SIZE * __popc(words[g]);
    }
#pragma unroll
    for (int g = 0; g < GROUPS / HALVES; g++) {
        const int other = g + GROUPS / HALVES;
        *reinterpret_cast<uint4 *>(index + g * GROUP_STRIDE) =
            make_uint4(words[g], group[g], words[other], group[other]);
    }
    return (group[GROUPS] - value) / SIZE;
}

/* A load that the compiler leaves where it is written. */
__device__ __forceinline__ uint4 load_now(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

/* The lane's four rows of one group: sum[i] += x * value for each row i whose bit is set.
 *   bits   the four rows' bits, from bit 1 on: there the compiler makes predicates of all at once
 *   value  shared address of the first set row's value, the next ones' follow */
__device__ __forceinline__ void multiply_rows(half2 *sum, unsigned bits, unsigned value, half2 x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (bits & (2u << i)) {
            const half *v = static_cast<const half *>(__cvta_shared_to_generic(value));
            sum[i] = __hfma2(__half2half2(*v), x, sum[i]);
            value += SIZE;
        }
    }
}

/* The sum of one row over n slices, from the letter of the first on. */
__device__ float take_sum(unsigned *letter, int n) {
    float sum = 0;
#pragma unroll 1
    for (int left = n; left > 0; left -= LETTERS_AT_ONCE, letter += LETTERS_AT_ONCE * TILE_M) {
        unsigned parts[LETTERS_AT_ONCE];
        take(parts, letter, TILE_M, left);
#pragma unroll
        for (int i = 0; i < LETTERS_AT_ONCE; i++) {
            sum += __uint_as_float(parts[i]);
        }
    }
    return sum;
}

template <Epilogue EPILOGUE>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    spmspv_kernel(void *out, const TiledCbc w, const fp16 *x,
                  const float *__restrict__ threshold, int slice_cols, int slot_bytes, unsigned *letters,
                  DeviceReport *report, unsigned fault, int site) {
    extern __shared__ __align__(LINE) unsigned char shared[];
    __shared__ unsigned warp_nnz[WARPS];
    const Layout layout = shared_layout(slice_cols, slot_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slice = blockIdx.x, tile_row = blockIdx.y;
    const int first_col = slice * slice_cols, n_cols = min(slice_cols, (int)w.cols - first_col);
    const unsigned padded_cols = ((unsigned)w.cols + TILE_K - 1) / TILE_K * TILE_K;
    const unsigned row_start = (unsigned)tile_row * padded_cols + (unsigned)first_col;  // as a number of a column
    unsigned *list = reinterpret_cast<unsigned *>(shared + layout.list);
    unsigned *gtile_start = reinterpret_cast<unsigned *>(shared + layout.gtiles);  // in pieces
    fp16 *input = reinterpret_cast<fp16 *>(shared + layout.input);

    // nothing that a step launches writes thresholds or weights
    const float limit = threshold ? *threshold : 0.0f;
    const int n_gtiles = (first_col % TILE_K + n_cols - 1) / TILE_K + 1;
    if ((int)threadIdx.x < n_gtiles) {
        gtile_start[threadIdx.x] = __ldg(w.tile_offset + row_start / TILE_K + threadIdx.x);
    }
    bool finite = true;
    const int n_active = list_active(list, input, x + first_col, w.col_info + row_start, n_cols, limit, &finite);
    if (tile_row == 0) {
        if (!finite) {
            note_fault(report, fault);
        }
        if (threadIdx.x == 0) {
            // all ColInfo and TileOffset, but only the bitmaps of active columns; values are counted as nonzeros
            const size_t columns = (size_t)padded_cols * gridDim.y;
            ProductStats *products = &report->products[site];
            count(&products->elements, slice == 0 ? w.rows * w.cols : 0);
            count(&products->active_elements, n_active * w.rows);
            count(&products->bytes, (slice == 0 ? sizeof(uint32_t) * (columns + columns / TILE_K + 1) : 0) +
                                        (size_t)n_active * gridDim.y * BITMAP_WORDS * sizeof(uint64_t));
        }
    }

    unsigned char *index = shared + layout.index + warp * INDEX_BYTES;
    const unsigned ring = (unsigned)__cvta_generic_to_shared(shared + layout.ring + warp * layout.ring_bytes);
    // the lane's rows: where their bits begin in a word, turned to bit 1; the bits before them
    const unsigned bit = 4 * (lane % 8), turn = bit - 1, below = (1u << bit) - 1;
    // copies: 8 lanes a column
    const int copy_column = lane / LINE_PIECES, copy_lane = lane % LINE_PIECES;
    const unsigned char *copy_from = reinterpret_cast<const unsigned char *>(
        reinterpret_cast<uintptr_t>(w.values) / LINE * LINE + PIECE * copy_lane);
    const unsigned matrix_start =  // pieces of its first line before its first value
        (unsigned)(reinterpret_cast<uintptr_t>(w.values) / PIECE % LINE_PIECES);
    float sum[ROWS_PER_LANE] = {0};
    unsigned nnz = 0;

    // whole stages for every warp but the last that has columns
    const int stages_per_warp = (n_active + WARPS * STAGE_COLUMNS - 1) / (WARPS * STAGE_COLUMNS);
    const int share = stages_per_warp * STAGE_COLUMNS;
    const int begin = min(warp * share, n_active), end = min(begin + share, n_active);
    for (int chunk = begin; chunk < end; chunk += CHUNK) {
        const int m = min(CHUNK, end - chunk);
        // lane = column; one that is not there has no pieces and no bits
        const unsigned entry = lane < m ? list[chunk + lane] : 0, keep = lane < m ? ~0u : 0;
        const unsigned k = entry % (1u << START_SHIFT);
        const uint4 *bitmap = reinterpret_cast<const uint4 *>(w.bitmap + (size_t)(row_start + k) * BITMAP_WORDS);
        const uint4 low = load_now(bitmap), high = load_now(bitmap + 1);
        const unsigned start = entry >> START_SHIFT & ((1u << (PIECES_SHIFT - START_SHIFT)) - 1);
        const unsigned first = matrix_start + gtile_start[(first_col % TILE_K + k) / TILE_K] + start;  // piece
        const unsigned slot = ring + lane % RING_COLUMNS * slot_bytes;
        const unsigned value = slot + (first * PIECE - slot) % LINE;  // shared address of its first value

        constexpr int PLACE_SHIFT = 20;  // an SM has far less shared memory than 2^20 bytes
        const auto copy_stage = [&](int stage) {
            const int j = stage * STAGE_COLUMNS + copy_column;
            const unsigned line = __shfl_sync(~0u, first / LINE_PIECES, j);
            const unsigned place = __shfl_sync(~0u, value | entry >> PIECES_SHIFT << PLACE_SHIFT, j);
            const int phase = (int)(place % LINE / PIECE);  // pieces of the first line before the column's
            int left = (int)(place >> PLACE_SHIFT) + phase - copy_lane;
            left = stage < CHUNK / STAGE_COLUMNS ? left : 0;  // the shuffle wraps around behind the last column
            const unsigned to = (place & ((1u << PLACE_SHIFT) - LINE)) + PIECE * copy_lane;
            const unsigned char *from = copy_from + (size_t)line * LINE;
            copy_piece<0>(to, from, copy_lane >= phase ? left : 0);
            copy_piece<1>(to, from, left);
            copy_piece<2>(to, from, left);
            copy_piece<3>(to, from, left);
            copy_piece<4>(to, from, left);
            copy_async_commit();  // a group for every stage, full or not, so that waiting can count
        };
        const int n_stages = (m + STAGE_COLUMNS - 1) / STAGE_COLUMNS;
        if (n_stages > 0) {  // always: without a branch the compiler would wait for the bitmap first
            copy_stage(0);
        }
        const unsigned words[GROUPS] = {low.x & keep,  low.y & keep,  low.z & keep,  low.w & keep,
                                        high.x & keep, high.y & keep, high.z & keep, high.w & keep};
        nnz += write_index(index + 16 * lane, words, value);
        __syncwarp();
        for (int flush = 0; flush < n_stages; flush += FLUSH_COLUMNS / STAGE_COLUMNS) {
            half2 part[ROWS_PER_LANE] = {};  // both halves alike
            const int stages_end = min(flush + FLUSH_COLUMNS / STAGE_COLUMNS, n_stages);
            for (int stage = flush; stage < stages_end; stage++) {
                // Other lanes may still read what this copy overwrites. (With this barrier at the end of the loop the
                // compiler needs a third more instructions for the predicated ones before it.)
                __syncwarp();
                copy_stage(stage + STAGES - 1);
                copy_async_wait<STAGES - 1>();
                __syncwarp();  // every lane's copies of this stage have come
                const int at = stage * STAGE_COLUMNS;
                const uint2 xs = *reinterpret_cast<const uint2 *>(input + chunk + at);
                const half2 *pairs = reinterpret_cast<const half2 *>(&xs);
                const uint4 *groups = reinterpret_cast<const uint4 *>(index + lane / 8 * GROUP_STRIDE) + at;
#pragma unroll
                for (int c = 0; c < STAGE_COLUMNS; c++) {
                    const half2 x2 = c % 2 ? __high2half2(pairs[c / 2]) : __low2half2(pairs[c / 2]);
                    const uint4 g = groups[c];
                    multiply_rows(part, __funnelshift_r(g.x, g.x, turn), g.y + SIZE * __popc(g.x & below), x2);
                    multiply_rows(part + 4, __funnelshift_r(g.z, g.z, turn), g.w + SIZE * __popc(g.z & below), x2);
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS_PER_LANE; i++) {
                sum[i] += __low2float(part[i]);
            }
        }
        copy_async_wait<0>();
        __syncwarp();
    }

    // sums of the warps, each left in the warp's own ring
    unsigned char *rings = shared + layout.ring;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const float4 rows = {sum[4 * h], sum[4 * h + 1], sum[4 * h + 2], sum[4 * h + 3]};
        reinterpret_cast<float4 *>(rings + warp * layout.ring_bytes)[h * 32 + lane] = rows;
    }
    nnz = __reduce_add_sync(~0u, nnz);
    if (lane == 0) {
        warp_nnz[warp] = nnz;
    }
    __syncthreads();
    let_next_start();
    if (warp == WARPS - 1) {
        nnz = __reduce_add_sync(~0u, lane < WARPS ? warp_nnz[lane] : 0);
        if (lane == 0 && nnz > 0) {
            count(&report->products[site].active_nonzeros, nnz);
        }
    }
    const int row = threadIdx.x;
    if (row >= TILE_M) {  // whole warps
        return;
    }
    float y = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        y += reinterpret_cast<const float *>(rings + i * layout.ring_bytes)[row];
    }

    // sums of the slices, by the block of the last one
    const int n_others = (int)gridDim.x - 1;
    unsigned *letter = letters + (size_t)tile_row * n_others * TILE_M + row;
    if (slice < n_others) {
        post(letter + slice * TILE_M, y);
        return;
    }
    const size_t out_row = (size_t)tile_row * TILE_M + row;
    const bool writes = out_row < w.rows;
    const float old = EPILOGUE == EPILOGUE_ADD && writes ? static_cast<float *>(out)[out_row] : 0.0f;
    y += take_sum(letter, n_others);

    if (EPILOGUE == EPILOGUE_SWIGLU) {
        const float up = __shfl_down_sync(~0u, y, 1);
        if (row % 2 == 0 && writes) {
            static_cast<half *>(out)[out_row / 2] = __float2half_rn(silu(y) * up);
        }
    } else if (writes) {
        static_cast<float *>(out)[out_row] = old + y;
    }
}

/* Blocks that an SM holds at once, at most MIN_BLOCKS; 0: not even one. */
int blocks_at_once(const CudaLaunch *c, const Layout &layout) {
    const size_t block = (size_t)layout.total + STATIC_SHARED + RESERVED_SHARED;
    return (int)min_size(MIN_BLOCKS, (c->shared_per_block + RESERVED_SHARED) / block);
}

/* Columns of a slice. The fullest SM decides: it computes its blocks as many at a time as it has room for, and fewer
 * at once, which cannot hide each other's waiting, take longer than their share. Every block costs some columns
 * before it multiplies, every chunk of a warp some for its index, every slice and every batch of letters some in the
 * final sum. The constants fit measured times with half of the columns active (tests/bench/NOTES.md). */
int choose_slice(const CudaLaunch *c, const Matrix *w, int slot_bytes) {
    constexpr double TIME_OF[MIN_BLOCKS + 1] = {0, 1.9, 2.2, 3};  // blocks at once
    constexpr double BLOCK_COLUMNS = 230, CHUNK_COLUMNS = 70, SLICE_COLUMNS = 16, LETTERS_COLUMNS = 200;
    constexpr double ACTIVE = 0.52;  // half, and some more by chance
    constexpr size_t STEP = 32;
    const size_t tile_rows = tiled_cbc_tile_rows(w->rows);
    const size_t most = 1 + N_LETTERS / (tile_rows * TILE_M);
    size_t best = 0;
    double best_cost = INFINITY;
    for (size_t slices = 1; slices <= min_size(most, ceil_div(w->cols, STEP)); slices++) {
        const size_t slice = round_up(ceil_div(w->cols, slices), STEP);
        if (slice > MAX_SLICE) {
            continue;
        }
        const int at_once = blocks_at_once(c, shared_layout((int)slice, slot_bytes));
        if (at_once == 0) {
            continue;
        }
        const size_t per_sm = ceil_div(tile_rows * slices, (size_t)c->n_sms);
        const double time = (double)(per_sm / at_once) * TIME_OF[at_once] + TIME_OF[per_sm % at_once];
        const double chunks = ceil((double)slice * ACTIVE / (WARPS * CHUNK));
        const double block = (double)slice + CHUNK_COLUMNS * chunks + BLOCK_COLUMNS;
        const double batches = (double)ceil_div(slices - 1, LETTERS_AT_ONCE);
        const double sums = SLICE_COLUMNS * (double)slices + LETTERS_COLUMNS * batches;
        const double cost = block * time + sums;
        if (cost < best_cost) {
            best = slice;
            best_cost = cost;
        }
    }
    CHECK(best > 0);
    return (int)best;
}

/* Shared memory to ask for. A grid that starts before the previous kernel has ended finds room where that one ended
 * first, and would crowd there while other SMs idle. Memory that a block asks for beyond what it needs keeps every SM
 * from taking more blocks than its share of the grid; an SM has shared_per_block and RESERVED_SHARED of it. */
size_t shared_bytes(const CudaLaunch *c, const Layout &layout, const dim3 &grid) {
    const size_t needed = (size_t)layout.total, per_sm = ceil_div((size_t)grid.x * grid.y, (size_t)c->n_sms);
    if (!c->overlap || per_sm >= (size_t)blocks_at_once(c, layout)) {
        return needed;
    }
    const size_t share = (c->shared_per_block + RESERVED_SHARED) / per_sm / 128 * 128;
    return max_size(needed, share - RESERVED_SHARED - STATIC_SHARED);
}

template <Epilogue EPILOGUE>
void launch(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x, const float *threshold, int slice_cols) {
    const auto kernel = spmspv_kernel<EPILOGUE>;
    // the widest column, wherever it begins in its first line
    const int slot_bytes = (int)(w->cbc.max_col_values * sizeof(fp16)) + LINE - PIECE;
    slice_cols = slice_cols > 0 ? slice_cols : choose_slice(c, w, slot_bytes);
    const Layout layout = shared_layout(slice_cols, slot_bytes);
    const dim3 grid((unsigned)ceil_div(w->cols, (size_t)slice_cols), (unsigned)tiled_cbc_tile_rows(w->rows));
    CHECK(slice_cols <= MAX_SLICE && slice_cols % STAGE_COLUMNS == 0);
    CHECK((size_t)layout.total + STATIC_SHARED <= c->shared_per_block);
    CHECK(grid.y < 65536 && (size_t)(grid.x - 1) * grid.y * TILE_M <= N_LETTERS);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)c->shared_per_block - STATIC_SHARED));
    launch_overlapped(c, kernel, grid, THREADS, shared_bytes(c, layout, grid), out, w->cbc, x, threshold, slice_cols,
                      slot_bytes, c->letters, c->report, fault_code(w), (int)w->site);
}

}  // namespace

void spmspv_cuda(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x, const float *threshold,
                 Epilogue epilogue, int slice_cols) {
    CHECK(w->format == FORMAT_TILED_CBC && w->cols < INT32_MAX / 2);
    switch (epilogue) {
    case EPILOGUE_STORE: launch<EPILOGUE_STORE>(c, out, w, x, threshold, slice_cols); break;
    case EPILOGUE_ADD: launch<EPILOGUE_ADD>(c, out, w, x, threshold, slice_cols); break;
    case EPILOGUE_SWIGLU: launch<EPILOGUE_SWIGLU>(c, out, w, x, threshold, slice_cols); break;
    }
}
