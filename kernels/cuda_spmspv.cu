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
 *               bitmap, counts bits, and leaves for each group of 32 rows (bitmap word, address of the group's first
 *               value) in shared memory. The rank of every group costs a fraction of an instruction this way.
 *   copy        Values of the columns come through cp.async, STAGE_COLUMNS columns a stage, 8 lanes a column, 16 bytes a
 *               lane (columns begin on 16 bytes), STAGES stages in flight. A slot holds the widest column of the matrix.
 *   decode      Lane = 8 rows: a byte of the bitmap word. Each half of the byte (4 rows) loads the three aligned words that
 *               hold its at most 4 values wherever they begin, shifts them to the start, and spreads them to their rows
 *               with byte permutes; selectors come from a table of 16 entries. A row whose bit is 0 gets a zero from the
 *               permute itself: what was loaded and is not selected is never multiplied.
 *   multiply    fp16 pairs, FLUSH_COLUMNS columns long, then fp32.
 *
 * Sums of warps, then of slices, are added in a fixed order: the block of a tile row that arrives last adds the
 * slices' partial sums from the workspace and applies the epilogue. Barriers are those of the warp except around
 * compaction and the final sums.
 *
 * Bytes: active columns' values and bitmaps, all their ColInfo, the offsets of their GTiles, x once a tile row (L2).
 * Reference: kernels/cpu.c (cbc_product). Test: tests/test_kernels.c. Measured: tests/bench/NOTES.md. */
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
constexpr int INDEX_STRIDE = 8 * GROUPS + 16;  // bytes of one column's index: 16 more keep the banks apart
constexpr int RING_SLACK = 16;     // a decode may read past the last value of the last slot
constexpr int MAX_SLICE = 4096;    // columns

static_assert(ROWS_PER_LANE == 8, "a lane decodes one byte of bitmap");
static_assert(CHUNK % FLUSH_COLUMNS == 0 && FLUSH_COLUMNS % STAGE_COLUMNS == 0, "flushes fall between stages");
static_assert(THREADS == TILE_M, "the final sums take one row a thread");

/* How 4 rows take their values from a window of 4 (p: the first two, r: the next two). One entry for each 4 bits. */
struct Selector {
    unsigned spread;  // low half: permute of (p, 0) for rows 0, 1; high half: of (q, 0) for rows 2, 3
    unsigned next;    // low half: permute of (p, r) that gives q, the window's two values after those of rows 0, 1;
                      // high half: bytes that all four rows take
};

__device__ Selector make_selector(unsigned bits) {
    // Byte permutes pick from 8 bytes: 0 .. 3 of the first word, 4 .. 7 of the second, which is zero here.
    const auto spread_pair = [](unsigned two) {
        const unsigned low = two & 1 ? 0x10u : 0x44u;
        const unsigned high = two & 2 ? (two & 1 ? 0x32u : 0x10u) : 0x44u;
        return low | high << 8;
    };
    const unsigned first = __popc(bits & 3), all = __popc(bits);
    const unsigned window = first == 0 ? 0x3210u : first == 1 ? 0x5432u : 0x7654u;
    return {spread_pair(bits & 3) | spread_pair(bits >> 2) << 16, window | 2 * all << 16};
}

/* Shared memory, in this order; see shared_bytes(). */
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
__device__ int compact(uint16_t *list, half *input, const fp16 *x, int n_cols, float threshold, bool *finite) {
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
            input[slot] = v;
        }
        at += __popc(ballot);
    }
    __syncthreads();
    return total;
}

/* What lane = column knows of its column of a chunk. */
struct ColumnIndex {
    const fp16 *values;
    int copies;  // 16-byte pieces of values
    unsigned nnz;
};

/* Read the index of column `column` of the matrix, leave (word, address of its first value) of each group of rows in
 * `index`; the values will stand at `slot` in shared memory. */
__device__ ColumnIndex read_index(unsigned char *index, const TiledCbc &w, size_t column, unsigned slot) {
    const uint4 *bitmap = reinterpret_cast<const uint4 *>(w.bitmap + column * BITMAP_WORDS);
    const unsigned info = __ldg(w.col_info + column);
    const size_t first = (size_t)__ldg(w.tile_offset + column / TILE_K) * COLUMN_ALIGN + (info >> 16);
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
    return {w.values + first, (int)(nnz + COLUMN_ALIGN - 1) / COLUMN_ALIGN, nnz};
}

/* Rows of one half byte: sum[0], sum[1] += x * the rows' values, which begin at byte `address` of shared memory. */
__device__ __forceinline__ void multiply_rows(half2 *sum, const unsigned char *shared, unsigned address,
                                              const Selector &s, half2 x) {
    const unsigned *words = reinterpret_cast<const unsigned *>(shared + (address & ~3u));
    const unsigned w0 = words[0], w1 = words[1], w2 = words[2];
    const unsigned shift = address * 8;  // 0 or 16: only the low five bits count
    const unsigned p = __funnelshift_r(w0, w1, shift), r = __funnelshift_r(w1, w2, shift);
    const unsigned v01 = __byte_perm(p, 0, s.spread);
    const unsigned v23 = __byte_perm(__byte_perm(p, r, s.next), 0, s.spread >> 16);
    sum[0] = __hfma2(*reinterpret_cast<const half2 *>(&v01), x, sum[0]);
    sum[1] = __hfma2(*reinterpret_cast<const half2 *>(&v23), x, sum[1]);
}

template <Epilogue EPILOGUE>
__global__ void __launch_bounds__(THREADS)
    spmspv_kernel(void *__restrict__ out, const TiledCbc w, const fp16 *__restrict__ x,
                  const float *__restrict__ threshold, int slice_cols, int slot_bytes, float *workspace,
                  unsigned *arrived, DeviceReport *report, unsigned fault, int site) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Selector selectors[16];
    __shared__ bool last;
    const Layout layout = shared_layout(slice_cols, slot_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slice = blockIdx.x, tile_row = blockIdx.y;
    uint16_t *list = reinterpret_cast<uint16_t *>(shared + layout.list);
    half *input = reinterpret_cast<half *>(shared + layout.input);
    if (threadIdx.x < 16) {
        selectors[threadIdx.x] = make_selector(threadIdx.x);
    }

    // compact (its barriers also publish the selectors)
    const int first_col = slice * slice_cols, n_cols = min(slice_cols, (int)w.cols - first_col);
    bool finite = true;
    const int n_active = compact(list, input, x + first_col, n_cols, threshold ? *threshold : 0.0f, &finite);
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
    const unsigned ring = layout.ring + warp * layout.ring_bytes;
    const size_t row_start = (size_t)tile_row * ((w.cols + TILE_K - 1) / TILE_K * TILE_K) + first_col;
    const unsigned byte_shift = 8 * (lane % 4), below = (1u << byte_shift) - 1;
    const unsigned char *lane_index = index + lane / 4 * 8;
    const int copy_column = lane / 8, copy_piece = lane % 8;
    float sum[ROWS_PER_LANE] = {0};
    unsigned nnz = 0;

    const int share = (n_active + WARPS - 1) / WARPS;
    const int begin = warp * share, end = min(begin + share, n_active);
    for (int chunk = begin; chunk < end; chunk += CHUNK) {
        const int m = min(CHUNK, end - chunk);
        // index: lanes without a column leave one without bits, and copy nothing
        ColumnIndex column = {w.values, 0, 0};
        half2 column_input = __half2half2(__ushort_as_half(0));
        if (lane < m) {
            column = read_index(index + lane * INDEX_STRIDE, w, row_start + list[chunk + lane],
                                ring + lane % RING_COLUMNS * slot_bytes);
            column_input = __half2half2(input[chunk + lane]);
            nnz += column.nnz;
        } else {
            uint4 *empty = reinterpret_cast<uint4 *>(index + lane * INDEX_STRIDE);
#pragma unroll
            for (int g = 0; g < GROUPS / 2; g++) {
                empty[g] = make_uint4(0, ring, 0, ring);
            }
        }
        *reinterpret_cast<half2 *>(index + lane * INDEX_STRIDE + 8 * GROUPS) = column_input;
        __syncwarp();

        const int n_stages = (m + STAGE_COLUMNS - 1) / STAGE_COLUMNS;
        const auto copy_stage = [&](int stage) {
            const int j = stage * STAGE_COLUMNS + copy_column;
            const auto values = reinterpret_cast<const unsigned char *>(
                __shfl_sync(~0u, reinterpret_cast<unsigned long long>(column.values), j & 31));
            const int copies = __shfl_sync(~0u, column.copies, j & 31);
            if (stage < n_stages) {
                unsigned char *to = shared + ring + j % RING_COLUMNS * slot_bytes;
#pragma unroll
                for (int i = copy_piece; i < TILE_M / COLUMN_ALIGN; i += 8) {
                    if (i < copies) {
                        copy_async_16(to + 16 * i, values + 16 * i);
                    }
                }
            }
            copy_async_commit();  // a group for every stage, full or not, so that waiting can count
        };
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; stage++) {
            copy_stage(stage);
        }
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
#pragma unroll
                for (int c = 0; c < STAGE_COLUMNS; c++) {
                    const unsigned at = (stage * STAGE_COLUMNS + c) * INDEX_STRIDE;
                    const uint2 group = *reinterpret_cast<const uint2 *>(lane_index + at);
                    const half2 xv = *reinterpret_cast<const half2 *>(index + at + 8 * GROUPS);
                    const unsigned address = group.y + 2 * __popc(group.x & below);
                    const unsigned bits = group.x >> byte_shift;
                    const Selector low = selectors[bits & 15], high = selectors[bits >> 4 & 15];
                    multiply_rows(pairs, shared, address, low, xv);
                    multiply_rows(pairs + 2, shared, address + (low.next >> 16), high, xv);
                }
                __syncwarp();  // before the next copy overwrites what other lanes may still read
            }
#pragma unroll
            for (int i = 0; i < ROWS_PER_LANE / 2; i++) {
                const float2 f = __half22float2(pairs[i]);
                sum[2 * i] += f.x;
                sum[2 * i + 1] += f.y;
            }
        }
        copy_async_wait<0>();
        __syncwarp();
    }

    // sums of the warps, through the memory of the index and the rings
    __syncthreads();
    float *warp_sums = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int i = 0; i < ROWS_PER_LANE; i++) {
        warp_sums[warp * TILE_M + ROWS_PER_LANE * lane + i] = sum[i];
    }
    nnz = __reduce_add_sync(~0u, nnz);
    if (lane == 0 && nnz > 0) {
        count(&report->products[site].active_nonzeros, nnz);
    }
    __syncthreads();
    const int row = threadIdx.x;
    float y = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        y += warp_sums[i * TILE_M + row];
    }

    // sums of the slices, by the block that comes last
    const int n_slices = gridDim.x;
    if (n_slices > 1) {
        const size_t padded = (size_t)gridDim.y * TILE_M;
        float *partial = workspace + (size_t)tile_row * TILE_M + row;
        __stcg(partial + slice * padded, y);
        __threadfence();
        __syncthreads();
        if (row == 0) {
            last = atomicAdd(&arrived[tile_row], 1) == (unsigned)n_slices - 1;
        }
        __syncthreads();
        if (!last) {
            return;
        }
        __threadfence();
        y = 0;
        for (int s = 0; s < n_slices; s++) {
            y += __ldcg(partial + s * padded);
        }
        if (row == 0) {
            arrived[tile_row] = 0;  // for the next launch
        }
    }

    const size_t out_row = (size_t)tile_row * TILE_M + row;
    if (EPILOGUE == EPILOGUE_SWIGLU) {
        const float up = __shfl_down_sync(~0u, y, 1);
        if (row % 2 == 0 && out_row < w.rows) {
            static_cast<half *>(out)[out_row / 2] = __float2half_rn(silu(y) * up);
        }
    } else if (out_row < w.rows) {
        float *o = static_cast<float *>(out) + out_row;
        *o = EPILOGUE == EPILOGUE_ADD ? *o + y : y;
    }
}

/* Columns of a slice: as many slices as fill the GPU's blocks in whole waves, weighed against what each block costs
 * before it multiplies (in columns: compaction and the first loads take about as long as OVERHEAD_COLUMNS). */
int choose_slice(const CudaLaunch *c, const Matrix *w, int blocks_per_sm) {
    constexpr int OVERHEAD_COLUMNS = 256, STEP = 32;
    const int cols = (int)w->cols, tile_rows = (int)tiled_cbc_tile_rows(w->rows);
    const int resident = blocks_per_sm * c->n_sms;
    const size_t padded_bytes = (size_t)tile_rows * TILE_M * sizeof(float);
    int best = cols, best_cost = INT32_MAX;
    for (int slice = STEP; slice < cols + STEP && slice <= MAX_SLICE; slice += STEP) {
        const int slices = (cols + slice - 1) / slice;
        const int waves = (tile_rows * slices + resident - 1) / resident;
        const int cost = waves * (slice + OVERHEAD_COLUMNS);
        if (cost <= best_cost && (size_t)slices * padded_bytes <= c->workspace_bytes) {
            best = slice;
            best_cost = cost;
        }
    }
    CHECK(best_cost < INT32_MAX);
    return best;
}

template <Epilogue EPILOGUE>
void launch(const CudaLaunch *c, void *out, const Matrix *w, const fp16 *x, const float *threshold, int slice_cols) {
    const auto kernel = spmspv_kernel<EPILOGUE>;
    const int slot_bytes = (int)round_up(w->cbc.max_col_values * sizeof(fp16), 16) + (w->cbc.max_col_values == 0 ? 16 : 0);
    if (slice_cols == 0) {
        // Blocks that fit on an SM, with a list of middling length: the list is the smallest part of shared memory.
        int blocks_per_sm;
        const int bytes = shared_layout(512, slot_bytes).total;
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)c->shared_per_block - 1024));
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, THREADS, bytes));
        CHECK(blocks_per_sm > 0);
        slice_cols = choose_slice(c, w, blocks_per_sm);
    }
    const dim3 grid((unsigned)ceil_div(w->cols, (size_t)slice_cols), (unsigned)tiled_cbc_tile_rows(w->rows));
    const Layout layout = shared_layout(slice_cols, slot_bytes);
    CHECK(grid.y <= N_COUNTERS && slice_cols <= 65536 && (size_t)layout.total + 1024 <= c->shared_per_block);
    CHECK(layout.total >= WARPS * TILE_M * (int)sizeof(float) && (uintptr_t)x % sizeof(fp16) == 0);
    CHECK((size_t)grid.x * grid.y * TILE_M * sizeof(float) <= c->workspace_bytes || grid.x == 1);
    kernel<<<grid, THREADS, layout.total, c->stream>>>(out, w->cbc, x, threshold, slice_cols, slot_bytes, c->workspace,
                                                       c->counters, c->report, fault_code(w), w->site);
    CUDA_CHECK_LAUNCH(c->stream);
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
