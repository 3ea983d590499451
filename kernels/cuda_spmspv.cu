/* spMspV: out = W x for one token, W in Tiled-CBC, skipping what is zero in W and what is small in x.
 *
 *   out        (rows) fp32 or (rows / 2) fp16, by the epilogue       W  (rows, cols)  Tiled-CBC
 *   x          (cols) fp16                                          threshold  NULL or one float
 *
 * A column k is active if |x_k| > threshold. One block takes one tile row (256 rows) x one slice of the columns:
 *
 *   compact     The block lists the active columns of its slice with ballots. Its warps share the list evenly, so no
 *               warp walks over skipped columns.
 *   index       A warp takes 32 active columns at a time. Lane = column: it reads ColInfo and the column's 32 bytes of
 *               bitmap, counts bits, and leaves for each group of 32 rows (bitmap word, x and the address of the group's
 *               first value) in shared memory. The rank of every group costs a fraction of an instruction this way.
 *   copy        Values of the columns come through cp.async, STAGE_COLUMNS columns a stage, 8 lanes a column, 16 bytes a
 *               lane (columns begin on 16 bytes), STAGES stages in flight. A slot holds the widest column of the matrix.
 *   decode      Lane = 4 neighbouring rows in each half of the tile: 4 bits of a bitmap word. (Neighbouring lanes then read
 *               neighbouring words of shared memory; 8 rows a lane save a few instructions and double the bank
 *               conflicts.) The lane loads the three aligned words that hold its at most 4 values wherever they begin,
 *               shifts them to the start, and spreads them to their rows with byte permutes; selectors come from a
 *               table of 16 entries. A row whose bit is 0 gets a zero from the permute itself: what was loaded and is
 *               not selected is never multiplied.
 *   multiply    fp16 pairs, FLUSH_COLUMNS columns long, then fp32.
 *
 * Sums of warps, then of slices, are added in a fixed order: the block of a tile row that arrives last adds the
 * slices' partial sums from the workspace and applies the epilogue. Barriers are those of the warp except around
 * compaction and the final sums.
 *
 * Bytes: active columns' values and bitmaps, all their ColInfo, the offsets of their GTiles, x once a tile row (L2).
 * Reference: kernels/cpu.c (cbc_product). Test: tests/test_kernels.c. Measured: tests/bench/NOTES.md. */
#include <math.h>

#include "cuda_ops.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int STAGE_COLUMNS = 4;   // one cp.async instruction serves so many columns
constexpr int STAGES = 2;
constexpr int RING_COLUMNS = STAGE_COLUMNS * STAGES;
constexpr int CHUNK = 32;          // columns that a warp indexes at once: one a lane
constexpr int FLUSH_COLUMNS = 16;  // products summed in fp16 before they go to fp32
constexpr int GROUPS = TILE_M / 32;
constexpr int ROWS_PER_LANE = TILE_M / 32;
constexpr int HALVES = 2;          // of a tile: 128 rows, 4 for each lane
constexpr int INDEX_STRIDE = 8 * GROUPS + 16;  // bytes of one column's index: 16 more keep the banks apart
constexpr int RING_SLACK = 16;     // a decode may read past the last value of the last slot
constexpr int MAX_SLICE = 4096;    // columns
constexpr int STATIC_SHARED = 1024; // bytes of the kernel's own variables, generously
constexpr int RESERVED_SHARED = 1024; // bytes that CUDA takes for every block on an SM
constexpr int MIN_BLOCKS = 4;      // that shall fit on an SM: bounds the registers

static_assert(ROWS_PER_LANE == 8 && HALVES == 2, "a lane decodes 4 bits of a bitmap word in each half of the tile");
static_assert(CHUNK % FLUSH_COLUMNS == 0 && FLUSH_COLUMNS % STAGE_COLUMNS == 0, "flushes fall between stages");
static_assert(TILE_M * sizeof(half) == 4 * 128, "a column is at most four copies of 8 lanes x 16 bytes");
static_assert(THREADS == TILE_M, "the final sums take one row a thread");

/* How 4 rows take their values from a window of 4 (p: the first two, r: the next two). One entry for each 4 bits: in its
 * low half the byte permute of (p, 0) for rows 1 and 0, in its high half that of (q, 0) for rows 3 and 2, where q is
 * the window behind the values of rows 0 and 1. Permutes pick from 8 bytes: 0 .. 3 of the first word, 4 .. 7 of the
 * second, which is zero here. Which of its bytes stand for zero is chosen such that min(entry & SHIFT_MASK, 32) is how
 * many bits lie between p and q: a table of half the size costs half the wavefronts. */
constexpr unsigned SHIFT_MASK = 0x30;

__device__ unsigned make_selector(unsigned bits) {
    const auto spread_pair = [](unsigned two) {
        const unsigned first = two & 1 ? 0x10u : 0x44u;
        const unsigned second = two & 2 ? (two & 1 ? 0x32u : 0x10u) : (two & 1 ? 0x55u : 0x44u);
        return second | first << 8;
    };
    return spread_pair(bits & 3) | spread_pair(bits >> 2) << 16;
}

/* Shared memory, in this order. */
struct Layout {
    int index, ring, list, input;  // byte offsets; index and ring are a warp's, WARPS times
    int ring_bytes;                // of one warp
    int total;
};

__host__ __device__ inline Layout shared_layout(int slice_cols, int slot_bytes) {
    Layout l;
    l.index = 0;
    l.ring = l.index + WARPS * CHUNK * INDEX_STRIDE;
    l.ring_bytes = RING_COLUMNS * slot_bytes + RING_SLACK;
    l.list = l.ring + WARPS * l.ring_bytes;
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

/* Shared memory by 32-bit address: the compiler's own addressing spends instructions on generic pointers. */
__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ unsigned load_shared(unsigned address) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ uint2 load_shared_2(unsigned address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}

/* Byte permute whose selector is known to be clean: __byte_perm() would mask it first. */
__device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned selector) {
    unsigned v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}

/* cp.async of 16 bytes at OFFSET behind both addresses, if OFFSET / 16 pieces are fewer than n. */
template <int OFFSET> __device__ __forceinline__ void copy_piece(unsigned to, const void *from, int n) {
    asm volatile("{ .reg .pred p; setp.gt.s32 p, %2, %3;\n @p cp.async.cg.shared.global [%0 + %4], [%1 + %4], 16; }"
                 :
                 : "r"(to), "l"(from), "r"(n), "n"(OFFSET / 16), "n"(OFFSET)
                 : "memory");
}

/* What lane = column knows of its column of a chunk. */
struct ColumnIndex {
    unsigned first;  // of its values, in pieces of 16 bytes
    int pieces;
    unsigned nnz;
};

/* Read the index of column `column` of the matrix, leave (word, shared address of its first value | x << 16) of each
 * group of rows in `index`; slot is the same for the column's first value. */
__device__ ColumnIndex read_index(unsigned char *index, const TiledCbc &w, size_t column, unsigned slot) {
    const uint4 *bitmap = reinterpret_cast<const uint4 *>(w.bitmap + column * BITMAP_WORDS);
    const unsigned info = __ldg(w.col_info + column);
    const unsigned first = __ldg(w.tile_offset + column / TILE_K) + (info >> 16) / COLUMN_ALIGN;
    const uint4 low = __ldg(bitmap), high = __ldg(bitmap + 1);
    const unsigned words[GROUPS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint4 *out = reinterpret_cast<uint4 *>(index);
#pragma unroll
    for (int g = 0; g < GROUPS; g += 2) {
        const unsigned second = slot + 2 * __popc(words[g]);
        out[g / 2] = make_uint4(words[g], slot, words[g + 1], second);
        slot = second + 2 * __popc(words[g + 1]);
    }
    const unsigned nnz = info & 0xffff;
    return {first, (int)(nnz + COLUMN_ALIGN - 1) / COLUMN_ALIGN, nnz};
}

/* The lane's four rows in each half of a column: sum += x * the rows' values, rows of a pair swapped.
 *   group      for each half: bitmap word, shared address of its first value | x << 16
 *   bit_shift  where the rows' four bits begin in the word; `below` masks the bits before them
 *   selectors  shared address of the table, 128-byte aligned
 * All loads come before their uses, so that those of both halves are in flight together. */
__device__ __forceinline__ void multiply_column(half2 *sum, const uint2 group[HALVES], unsigned below,
                                                unsigned bit_shift, unsigned selectors) {
    unsigned shift[HALVES], w[HALVES][3], s[HALVES];
    const unsigned x_twice = permute(group[0].y, 0, 0x3232);
    const half2 x = *reinterpret_cast<const half2 *>(&x_twice);
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        // 4 bytes an entry: turn the four bits to bit 2 and add the table's address in one operation
        s[h] = load_shared((__funnelshift_r(group[h].x, group[h].x, bit_shift - 2) & 0x3c) | selectors);
        const unsigned address = group[h].y + 2 * __popc(group[h].x & below), word = address & 0xfffc;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            w[h][i] = load_shared(word + 4 * i);
        }
        shift[h] = address * 8;  // 0 or 16: only the low five bits count
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const unsigned p = __funnelshift_r(w[h][0], w[h][1], shift[h]);
        const unsigned r = __funnelshift_r(w[h][1], w[h][2], shift[h]);
        const unsigned q = __funnelshift_rc(p, r, s[h] & SHIFT_MASK);
        const unsigned v10 = permute(p, 0, s[h]), v32 = permute(q, 0, s[h] >> 16);
        sum[2 * h] = __hfma2(*reinterpret_cast<const half2 *>(&v10), x, sum[2 * h]);
        sum[2 * h + 1] = __hfma2(*reinterpret_cast<const half2 *>(&v32), x, sum[2 * h + 1]);
    }
}

template <Epilogue EPILOGUE>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    spmspv_kernel(void *out, const TiledCbc w, const fp16 *x,
                  const float *__restrict__ threshold, int slice_cols, int slot_bytes, float *workspace,
                  unsigned *arrived, DeviceReport *report, unsigned fault, int site) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ __align__(128) unsigned selectors[16];
    __shared__ unsigned warp_nnz[WARPS];
    __shared__ bool last;
    const Layout layout = shared_layout(slice_cols, slot_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slice = blockIdx.x, tile_row = blockIdx.y;
    const int first_col = slice * slice_cols, n_cols = min(slice_cols, (int)w.cols - first_col);
    const size_t row_start = (size_t)tile_row * ((w.cols + TILE_K - 1) / TILE_K * TILE_K) + first_col;
    uint16_t *list = reinterpret_cast<uint16_t *>(shared + layout.list);
    fp16 *input = reinterpret_cast<fp16 *>(shared + layout.input);
    if (threadIdx.x < 16) {
        selectors[threadIdx.x] = make_selector(threadIdx.x);
    }

    const float limit = threshold ? *threshold : 0.0f;  // no kernel writes it
    wait_for_previous();  // x, the workspace and the counters are the previous kernels'

    // compact (its barriers also publish the selectors)
    bool finite = true;
    const int n_active = compact(list, input, x + first_col, n_cols, limit, &finite);
    if (tile_row == 0) {
        if (!finite) {
            note_fault(report, fault);
        }
        if (threadIdx.x == 0) {
            // all ColInfo and TileOffset, but only the bitmaps of active columns; values are counted as nonzeros
            const size_t columns = (w.cols + TILE_K - 1) / TILE_K * TILE_K * gridDim.y;
            ProductStats *products = &report->products[site];
            count(&products->elements, slice == 0 ? w.rows * w.cols : 0);
            count(&products->active_elements, n_active * w.rows);
            count(&products->bytes, (slice == 0 ? sizeof(uint32_t) * (columns + columns / TILE_K + 1) : 0) +
                                        (size_t)n_active * gridDim.y * BITMAP_WORDS * sizeof(uint64_t));
        }
    }

    unsigned char *index = shared + layout.index + warp * CHUNK * INDEX_STRIDE;
    const unsigned ring = shared_address(shared + layout.ring + warp * layout.ring_bytes);
    const unsigned bit_shift = 4 * (lane % 8), below = (1u << bit_shift) - 1;
    const unsigned table = shared_address(selectors), index_base = shared_address(index);
    const unsigned lane_index = index_base + lane / 8 * 8;
    // copies: 8 lanes a column
    const int copy_column = lane / 8, copy_lane = lane % 8;
    const unsigned copy_to = ring + copy_column * slot_bytes + 16 * copy_lane;
    const unsigned char *copy_from = reinterpret_cast<const unsigned char *>(w.values) + 16 * copy_lane;
    asm volatile("" : "+l"(copy_from));  // one sum: the compiler would add its parts anew for every copy
    float sum[ROWS_PER_LANE] = {0};
    unsigned nnz = 0;

    const int share = (n_active + WARPS - 1) / WARPS;
    const int begin = warp * share, end = min(begin + share, n_active);
    for (int chunk = begin; chunk < end; chunk += CHUNK) {
        const int m = min(CHUNK, end - chunk);
        // index: lanes without a column leave one without bits, and copy nothing
        ColumnIndex column = {0, 0, 0};
        if (lane < m) {
            column = read_index(index + lane * INDEX_STRIDE, w, row_start + list[chunk + lane],
                                (ring + lane % RING_COLUMNS * slot_bytes) | (unsigned)input[chunk + lane] << 16);
            nnz += column.nnz;
        } else {
            uint4 *empty = reinterpret_cast<uint4 *>(index + lane * INDEX_STRIDE);
#pragma unroll
            for (int g = 0; g < GROUPS / 2; g++) {
                empty[g] = make_uint4(0, ring, 0, ring);
            }
        }
        __syncwarp();

        const auto copy_stage = [&](int stage) {
            const int j = stage * STAGE_COLUMNS + copy_column;
            const unsigned first = __shfl_sync(~0u, column.first, j);
            int n = __shfl_sync(~0u, column.pieces, j) - copy_lane;
            n = stage < CHUNK / STAGE_COLUMNS ? n : 0;  // the shuffle wraps around behind the last column
            const unsigned to = copy_to + stage % STAGES * (STAGE_COLUMNS * slot_bytes);
            const unsigned char *from = copy_from + (size_t)first * 16;
            copy_piece<0>(to, from, n);
            copy_piece<128>(to, from, n);
            copy_piece<256>(to, from, n);
            copy_piece<384>(to, from, n);
            copy_async_commit();  // a group for every stage, full or not, so that waiting can count
        };
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; stage++) {
            copy_stage(stage);
        }
        const int n_stages = (m + STAGE_COLUMNS - 1) / STAGE_COLUMNS;
        for (int flush = 0; flush < n_stages; flush += FLUSH_COLUMNS / STAGE_COLUMNS) {
            half2 pairs[ROWS_PER_LANE / 2];
#pragma unroll
            for (int i = 0; i < ROWS_PER_LANE / 2; i++) {
                pairs[i] = __half2half2(__ushort_as_half(0));
            }
            const int stages_end = min(flush + FLUSH_COLUMNS / STAGE_COLUMNS, n_stages);
            for (int stage = flush; stage < stages_end; stage++) {
                copy_stage(stage + STAGES - 1);
                copy_async_wait<STAGES - 1>();
                __syncwarp();  // every lane's copies of this stage have come
                const unsigned at = stage * (STAGE_COLUMNS * INDEX_STRIDE);
                uint2 group[STAGE_COLUMNS][HALVES];
#pragma unroll
                for (int c = 0; c < STAGE_COLUMNS; c++) {
#pragma unroll
                    for (int h = 0; h < HALVES; h++) {
                        group[c][h] = load_shared_2(lane_index + at + c * INDEX_STRIDE + h * 8 * GROUPS / HALVES);
                    }
                }
#pragma unroll
                for (int c = 0; c < STAGE_COLUMNS; c++) {
                    multiply_column(pairs, group[c], below, bit_shift, table);
                }
                __syncwarp();  // before the next copy overwrites what other lanes may still read
            }
#pragma unroll
            for (int i = 0; i < ROWS_PER_LANE / 2; i++) {
                const float2 f = __half22float2(pairs[i]);
                sum[2 * i + 1] += f.x;
                sum[2 * i] += f.y;
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
    float y = 0;
    nnz = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        y += warp_sums[i * TILE_M + row];
        nnz += warp_nnz[i];
    }
    if (row == 0 && nnz > 0) {
        count(&report->products[site].active_nonzeros, nnz);
    }

    // asked for before it is known who needs it: the wait for it hides behind the one for the other blocks
    const size_t out_row = (size_t)tile_row * TILE_M + row;
    const float old = EPILOGUE == EPILOGUE_ADD && out_row < w.rows ? static_cast<float *>(out)[out_row] : 0.0f;

    // sums of the slices, by the block that comes last
    const int n_slices = gridDim.x;
    if (n_slices > 1) {
        const size_t padded = (size_t)gridDim.y * TILE_M;
        float *partial = workspace + (size_t)tile_row * TILE_M + row;
        __stcg(partial + slice * padded, y);
        __syncthreads();
        if (row == 0) {
            last = arrive(&arrived[tile_row]) == (unsigned)n_slices - 1;
        }
        __syncthreads();
        if (!last) {
            return;
        }
        y = 0;
#pragma unroll 8
        for (int s = 0; s < n_slices; s++) {
            y += __ldcg(partial + s * padded);
        }
        if (row == 0) {
            arrived[tile_row] = 0;  // for the next launch
        }
    }

    if (EPILOGUE == EPILOGUE_SWIGLU) {
        const float up = __shfl_down_sync(~0u, y, 1);
        if (row % 2 == 0 && out_row < w.rows) {
            static_cast<half *>(out)[out_row / 2] = __float2half_rn(silu(y) * up);
        }
    } else if (out_row < w.rows) {
        static_cast<float *>(out)[out_row] = old + y;
    }
}

/* Columns of a slice. The fullest SM decides: it computes its blocks MIN_BLOCKS at a time, and fewer blocks at once,
 * which cannot hide each other's waiting, take longer than their share. Every block costs some columns before it
 * multiplies, every chunk of a warp some for its index, every slice some in the final sum. The constants fit measured
 * times with half of the columns active (tests/bench/NOTES.md). */
int choose_slice(const CudaLaunch *c, const Matrix *w) {
    constexpr double TIME_OF[MIN_BLOCKS] = {0, 2.0, 2.3, 3.15};  // blocks at once, where MIN_BLOCKS take MIN_BLOCKS
    constexpr double BLOCK_COLUMNS = 200, CHUNK_COLUMNS = 140, SLICE_COLUMNS = 34;
    constexpr double ACTIVE = 0.52;  // half, and some more by chance
    constexpr size_t STEP = 32;
    const size_t tile_rows = tiled_cbc_tile_rows(w->rows);
    const size_t most = c->workspace_bytes / (tile_rows * TILE_M * sizeof(float));
    size_t best = 0;
    double best_cost = INFINITY;
    for (size_t slices = 1; slices <= min_size(most, ceil_div(w->cols, STEP)); slices++) {
        const size_t slice = round_up(ceil_div(w->cols, slices), STEP);
        const size_t per_sm = ceil_div(tile_rows * slices, (size_t)c->n_sms);
        const double time = (double)(per_sm / MIN_BLOCKS * MIN_BLOCKS) + TIME_OF[per_sm % MIN_BLOCKS];
        const double chunks = ceil((double)slice * ACTIVE / (WARPS * CHUNK));
        const double block = (double)slice + CHUNK_COLUMNS * chunks + BLOCK_COLUMNS;
        const double cost = block * time + SLICE_COLUMNS * (double)slices;
        if (slice <= MAX_SLICE && cost < best_cost) {
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
    if (!c->overlap || per_sm >= MIN_BLOCKS) {
        return needed;
    }
    const size_t share = (c->shared_per_block + RESERVED_SHARED) / per_sm / 128 * 128;
    return max_size(needed, share - RESERVED_SHARED - STATIC_SHARED);
}

template <Epilogue EPILOGUE>
void launch(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x, const float *threshold, int slice_cols) {
    const auto kernel = spmspv_kernel<EPILOGUE>;
    // At least one piece: lanes without a column still point at a slot.
    const int slot_bytes = (int)(max_size(w->cbc.max_col_values, COLUMN_ALIGN) * sizeof(fp16));
    slice_cols = slice_cols > 0 ? slice_cols : choose_slice(c, w);
    const Layout layout = shared_layout(slice_cols, slot_bytes);
    const dim3 grid((unsigned)ceil_div(w->cols, (size_t)slice_cols), (unsigned)tiled_cbc_tile_rows(w->rows));
    CHECK(grid.y <= N_COUNTERS && slice_cols <= 65536 && (size_t)layout.total + STATIC_SHARED <= c->shared_per_block);
    CHECK(layout.total >= WARPS * TILE_M * (int)sizeof(float));
    CHECK(layout.list + STATIC_SHARED + RESERVED_SHARED <= 1 << 16);  // an address of a value shares a word with x
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
