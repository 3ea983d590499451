/* spMspV: out = W x for one token, W in Tiled-CBC, skipping what is zero in W and what is small in x.
 *
 *   out        (rows) fp32 or (rows / 2) fp16, by the epilogue       W  (rows, cols)  Tiled-CBC
 *   x          (cols) fp16                                          threshold  NULL or one float
 *
 * A column k is active if |x_k| > threshold. One block takes one tile row (256 rows) x one slice of the columns:
 *
 *   compact     The block lists the active columns of its slice with ballots. Its warps share the list in equal
 *               numbers of stages, so no warp walks over skipped columns.
 *   index       A warp takes 32 active columns at a time. Lane = column: it reads ColInfo and the column's 32 bytes
 *               of bitmap, counts bits, and leaves for each group of 32 rows (word, address of its first value) in
 *               shared memory. The rank of every group costs a fraction of an instruction this way.
 *   copy        Values of the columns come through cp.async, STAGE_COLUMNS columns a stage, 8 lanes a column, 16
 *               bytes a lane, STAGES stages in flight. A column goes to the place in its slot where it lies in
 *               128-byte lines as it does in global memory: copies whose two sides differ in that fetch half of
 *               their sectors twice.
 *   multiply    Lane = 4 neighbouring rows in each half of the tile: 4 bits of a word. (Neighbouring lanes then
 *               read neighbouring words of shared memory; 8 rows a lane double the bank conflicts.) Rows whose bit is
 *               set take the values from the lane's rank on, one after the other, under predicates that one
 *               instruction makes from the bits: what is not selected is never loaded. Products are summed in fp16,
 *               FLUSH_COLUMNS columns long, then in fp32.
 *
 * Sums of warps, then of slices, are added in a fixed order: the block of a tile row that arrives last adds the
 * slices' partial sums from the workspace and applies the epilogue. Barriers are those of the warp except around
 * compaction and the final sums.
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
constexpr int MAX_SLICE = 4096;    // columns; shared memory may allow fewer
constexpr int STATIC_SHARED = 1024; // bytes of the kernel's own variables, generously
constexpr int RESERVED_SHARED = 1024; // bytes that CUDA takes for every block on an SM
constexpr int MIN_BLOCKS = 3;      // that shall fit on an SM: bounds the registers

static_assert(ROWS_PER_LANE == 8 && HALVES == 2, "a lane takes 4 bits of a bitmap word in each half of the tile");
static_assert(CHUNK % FLUSH_COLUMNS == 0 && FLUSH_COLUMNS % STAGE_COLUMNS == 0, "flushes fall between stages");
static_assert(STAGE_COLUMNS * LINE_PIECES == 32, "a warp copies a line of each of a stage's columns at once");
static_assert(TILE_M * sizeof(half) == 4 * LINE, "a column lies in at most five lines");
static_assert(COLUMN_ALIGN * sizeof(fp16) == PIECE, "columns begin with a piece");
static_assert(THREADS > TILE_M, "the final sums take a thread a row, and a warp to count");

/* Shared memory, in this order. */
struct Layout {
    int ring, index, chunk_x, list, input;  // byte offsets; the first three are a warp's, WARPS times
    int ring_bytes;                         // of one warp
    int total;
};

__host__ __device__ inline Layout shared_layout(int slice_cols, int slot_bytes) {
    Layout l;
    l.ring_bytes = RING_COLUMNS * slot_bytes;
    l.ring = 0;
    l.index = l.ring + WARPS * l.ring_bytes;
    l.chunk_x = l.index + WARPS * INDEX_BYTES;
    l.list = l.chunk_x + WARPS * CHUNK * (int)sizeof(fp16);
    l.input = l.list + slice_cols * (int)sizeof(uint16_t);
    l.total = l.input + slice_cols * (int)sizeof(half);
    return l;
}

/* List the active columns of x[0 .. n_cols-1] in order. Returns how many; *finite: is every x of this thread? */
__device__ int compact(uint16_t *list, fp16 *input, const fp16 *x, int n_cols, float threshold, bool *finite) {
    __shared__ int counts[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rounds = (n_cols + THREADS - 1) / THREADS, begin = warp * rounds * 32;  // a warp's own range
    const auto load = [&](int i) {
        const int k = begin + i * 32 + lane;
        return k < n_cols ? __ushort_as_half(x[k]) : __ushort_as_half(0);
    };
    int count = 0;
    for (int i = 0; i < rounds; i++) {
        const half v = load(i);
        *finite &= half_is_finite(__half_as_ushort(v));
        count += __popc(__ballot_sync(~0u, fabsf(__half2float(v)) > threshold));
    }
    if (lane == 0) {
        counts[warp] = count;
    }
    __syncthreads();
    int at = 0, total = 0;
    for (int w = 0; w < WARPS; w++) {
        at += w < warp ? counts[w] : 0;
        total += counts[w];
    }
    for (int i = 0; i < rounds; i++) {
        const half v = load(i);
        const bool active = fabsf(__half2float(v)) > threshold;
        const unsigned ballot = __ballot_sync(~0u, active);
        if (active) {
            const int slot = at + __popc(ballot & ((1u << lane) - 1));
            list[slot] = (uint16_t)(begin + i * 32 + lane);
            input[slot] = __half_as_ushort(v);
        }
        at += __popc(ballot);
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

/* What lane = column knows of its column of a chunk. */
struct ColumnIndex {
    unsigned line;   // in which its values begin, counted from the line of the matrix's first value
    unsigned place;  // shared address of its first value | its pieces << PIECES_SHIFT
    unsigned nnz;
};
constexpr int PIECES_SHIFT = 20;  // an SM has far less shared memory than 2^20 bytes

/* Read the index of column `column` of the matrix. Leave in `index`, for each group of 32 rows and the same group of
 * the tile's other half: (word, shared address of its first value, the other's word and address). slot: where the
 * column may go. A lane whose column is not `present` reads it all the same, and leaves one without bits or values. */
__device__ ColumnIndex read_index(unsigned char *index, const TiledCbc &w, bool present, unsigned column,
                                  unsigned slot) {
    const uint4 *bitmap = reinterpret_cast<const uint4 *>(w.bitmap + (size_t)column * BITMAP_WORDS);
    const unsigned keep = present ? ~0u : 0;
    const unsigned info = __ldg(w.col_info + column) & keep, nnz = info & 0xffff;
    const unsigned matrix = (unsigned)(reinterpret_cast<uintptr_t>(w.values) / PIECE % LINE_PIECES);  // in its line
    const unsigned first = matrix + __ldg(w.tile_offset + column / TILE_K) + (info >> 16) / COLUMN_ALIGN;
    const uint4 low = __ldg(bitmap), high = __ldg(bitmap + 1);
    const unsigned words[GROUPS] = {low.x & keep,  low.y & keep,  low.z & keep,  low.w & keep,
                                    high.x & keep, high.y & keep, high.z & keep, high.w & keep};
    const unsigned place = slot + (first * PIECE - slot) % LINE;
    unsigned group[GROUPS];
    group[0] = place;
#pragma unroll
    for (int g = 1; g < GROUPS; g++) {
        group[g] = group[g - 1] + SIZE * __popc(words[g - 1]);
    }
#pragma unroll
    for (int g = 0; g < GROUPS / HALVES; g++) {
        const int other = g + GROUPS / HALVES;
        *reinterpret_cast<uint4 *>(index + g * GROUP_STRIDE) =
            make_uint4(words[g], group[g], words[other], group[other]);
    }
    return {first / LINE_PIECES, place | (nnz + COLUMN_ALIGN - 1) / COLUMN_ALIGN << PIECES_SHIFT, nnz};
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

template <Epilogue EPILOGUE>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    spmspv_kernel(void *out, const TiledCbc w, const fp16 *x,
                  const float *__restrict__ threshold, int slice_cols, int slot_bytes, float *workspace,
                  unsigned *arrived, DeviceReport *report, unsigned fault, int site) {
    extern __shared__ __align__(LINE) unsigned char shared[];
    __shared__ unsigned warp_nnz[WARPS];
    __shared__ bool last;
    const Layout layout = shared_layout(slice_cols, slot_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slice = blockIdx.x, tile_row = blockIdx.y;
    const int first_col = slice * slice_cols, n_cols = min(slice_cols, (int)w.cols - first_col);
    const unsigned padded_cols = ((unsigned)w.cols + TILE_K - 1) / TILE_K * TILE_K;
    const unsigned row_start = (unsigned)tile_row * padded_cols + (unsigned)first_col;  // as a number of a column
    uint16_t *list = reinterpret_cast<uint16_t *>(shared + layout.list);
    fp16 *input = reinterpret_cast<fp16 *>(shared + layout.input);

    const float limit = threshold ? *threshold : 0.0f;  // no kernel writes it
    wait_for_previous();  // x, the workspace and the counters are the previous kernels'

    // compact
    bool finite = true;
    const int n_active = compact(list, input, x + first_col, n_cols, limit, &finite);
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
    fp16 *chunk_x = reinterpret_cast<fp16 *>(shared + layout.chunk_x) + warp * CHUNK;
    const unsigned ring = (unsigned)__cvta_generic_to_shared(shared + layout.ring + warp * layout.ring_bytes);
    // the lane's rows: where their bits begin in a word, turned to bit 1; the bits before them
    const unsigned bit = 4 * (lane % 8), turn = bit - 1, below = (1u << bit) - 1;
    // copies: 8 lanes a column
    const int copy_column = lane / LINE_PIECES, copy_lane = lane % LINE_PIECES;
    const unsigned char *copy_from = reinterpret_cast<const unsigned char *>(
        reinterpret_cast<uintptr_t>(w.values) / LINE * LINE + PIECE * copy_lane);
    float sum[ROWS_PER_LANE] = {0};
    unsigned nnz = 0;

    // whole stages for every warp but the last that has columns
    const int stages_per_warp = (n_active + WARPS * STAGE_COLUMNS - 1) / (WARPS * STAGE_COLUMNS);
    const int share = stages_per_warp * STAGE_COLUMNS;
    const int begin = min(warp * share, n_active), end = min(begin + share, n_active);
    for (int chunk = begin; chunk < end; chunk += CHUNK) {
        const int m = min(CHUNK, end - chunk);
        const bool present = lane < m;
        const unsigned k = row_start + (present ? list[chunk + lane] : 0);
        const ColumnIndex column =
            read_index(index + 16 * lane, w, present, k, ring + lane % RING_COLUMNS * slot_bytes);
        nnz += column.nnz;
        chunk_x[lane] = present ? input[chunk + lane] : 0;
        __syncwarp();

        const auto copy_stage = [&](int stage) {
            const int j = stage * STAGE_COLUMNS + copy_column;
            const unsigned line = __shfl_sync(~0u, column.line, j), place = __shfl_sync(~0u, column.place, j);
            const int phase = (int)(place % LINE / PIECE);  // pieces of the first line before the column's
            int left = (int)(place >> PIECES_SHIFT) + phase - copy_lane;
            left = stage < CHUNK / STAGE_COLUMNS ? left : 0;  // the shuffle wraps around behind the last column
            const unsigned to = (place & ((1u << PIECES_SHIFT) - LINE)) + PIECE * copy_lane;
            const unsigned char *from = copy_from + (size_t)line * LINE;
            copy_piece<0>(to, from, copy_lane >= phase ? left : 0);
            copy_piece<1>(to, from, left);
            copy_piece<2>(to, from, left);
            copy_piece<3>(to, from, left);
            copy_piece<4>(to, from, left);
            copy_async_commit();  // a group for every stage, full or not, so that waiting can count
        };
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; stage++) {
            copy_stage(stage);
        }
        const int n_stages = (m + STAGE_COLUMNS - 1) / STAGE_COLUMNS;
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
                const half2 *pairs = reinterpret_cast<const half2 *>(chunk_x + at);
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

    // sums of the warps, through the memory of the index and the rings
    __syncthreads();
    let_next_start();
    float *warp_sums = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const float4 rows = {sum[4 * h], sum[4 * h + 1], sum[4 * h + 2], sum[4 * h + 3]};
        reinterpret_cast<float4 *>(warp_sums + warp * TILE_M + h * TILE_M / HALVES)[lane] = rows;
    }
    nnz = __reduce_add_sync(~0u, nnz);
    if (lane == 0) {
        warp_nnz[warp] = nnz;
    }
    __syncthreads();
    const int row = threadIdx.x;
    const bool has_row = row < TILE_M;  // warps have rows or have none
    float y = 0;
    if (has_row) {
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            y += warp_sums[i * TILE_M + row];
        }
    }
    if (warp == WARPS - 1) {
        nnz = __reduce_add_sync(~0u, lane < WARPS ? warp_nnz[lane] : 0);
        if (lane == 0 && nnz > 0) {
            count(&report->products[site].active_nonzeros, nnz);
        }
    }

    // asked for before it is known who needs it: the wait for it hides behind the one for the other blocks
    const size_t out_row = (size_t)tile_row * TILE_M + row;
    const bool writes = has_row && out_row < w.rows;
    const float old = EPILOGUE == EPILOGUE_ADD && writes ? static_cast<float *>(out)[out_row] : 0.0f;

    // sums of the slices, by the block that comes last
    const int n_slices = gridDim.x;
    if (n_slices > 1) {
        const size_t padded = (size_t)gridDim.y * TILE_M;
        float *partial = workspace + (size_t)tile_row * TILE_M + row;
        if (has_row) {
            __stcg(partial + slice * padded, y);
        }
        __syncthreads();
        if (row == 0) {
            last = arrive(&arrived[tile_row]) == (unsigned)n_slices - 1;
        }
        __syncthreads();
        if (!last) {
            return;
        }
        if (has_row) {
            y = 0;
#pragma unroll 8
            for (int s = 0; s < n_slices; s++) {
                y += __ldcg(partial + s * padded);
            }
        }
        if (row == 0) {
            arrived[tile_row] = 0;  // for the next launch
        }
    }

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
 * before it multiplies, every chunk of a warp some for its index, every slice some in the final sum. The constants
 * fit measured times with half of the columns active (tests/bench/NOTES.md). */
int choose_slice(const CudaLaunch *c, const Matrix *w, int slot_bytes) {
    constexpr double TIME_OF[MIN_BLOCKS + 1] = {0, 1.9, 2.2, 3};  // blocks at once
    constexpr double BLOCK_COLUMNS = 200, CHUNK_COLUMNS = 140, SLICE_COLUMNS = 32;
    constexpr double ACTIVE = 0.52;  // half, and some more by chance
    constexpr size_t STEP = 32;
    const size_t tile_rows = tiled_cbc_tile_rows(w->rows);
    const size_t most = c->workspace_bytes / (tile_rows * TILE_M * sizeof(float));
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
        const double cost = block * time + SLICE_COLUMNS * (double)slices;
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
    CHECK(grid.y < N_COUNTERS);  // the largest grid.y, too
    CHECK(slice_cols <= 65536 && (size_t)layout.total + STATIC_SHARED <= c->shared_per_block);
    CHECK(layout.total >= WARPS * TILE_M * (int)sizeof(float));
    CHECK((size_t)grid.x * grid.y * TILE_M * sizeof(float) <= c->workspace_bytes || grid.x == 1);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)c->shared_per_block - STATIC_SHARED));
    launch_overlapped(c, kernel, grid, THREADS, shared_bytes(c, layout, grid), out, w->cbc, x, threshold, slice_cols,
                      slot_bytes, c->workspace, c->counters, c->report, fault_code(w), (int)w->site);
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
