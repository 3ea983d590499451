/* cuda_attention.cu: causal attention over the KV cache: decode (one token) and prefill (many).
 *
 *   out, q            (n, n_heads * head_dim) fp16
 *   k_cache, v_cache  (n_kv_heads, seq_len, head_dim) fp16, positions 0 .. *pos + n - 1 are filled
 *   qkv, rope         fp32, decode only, or NULL: then the kernel rotates and appends by itself (cuda_ops.cu: rope_append)
 *   head_dim          even, 2 .. 256; padded with zeros to PAD = 16, 32, 64, 128 or 256 on the chip
 *
 * What both kernels share. The query heads of one kv head (its group) are served together, so a key or
 * value that was fetched once serves them all. Softmax is online: a state (max, sum, out) with weights
 * 2^(score - max) is carried along the keys; scores are in units of log2(e), so that a weight is one ex2.
 * The max starts at the lowest finite float rather than at -infinity: then no difference of two maxima is
 * NaN. A masked score is -infinity, weight 0, while a score that is not finite by itself becomes NaN and
 * spoils its row: the product that reads the row reports it.
 * What lies beyond the visible positions is never read: zeros stand for it.
 * Rows of the cache are 2 * head_dim bytes apart, so 16-byte accesses need head_dim % 8 == 0; otherwise
 * they are 4 bytes wide.
 * Reference: attend() in cpu.c. Test: tests/gpu/attention_test.cu. */
#include "cuda_ops.cuh"

#include <float.h>
#include <math.h>

#define MAX_HEAD_DIM 256
#define CHUNK 8  // values of a 16-byte access

static_assert(sizeof(uint4) == CHUNK * sizeof(fp16), "a chunk is one 16-byte access");

namespace {

/* One call of attention_cuda. */
struct Attention {
    fp16 *out;
    const fp16 *q;
    fp16 *k_cache, *v_cache;
    const float *qkv, *rope;
    const int *pos;
    int n, n_heads, group, head_dim, seq_len;
    float log2_scale;  // log2(e) / sqrt(head_dim): from q . k to the exponent of 2
};

__device__ __forceinline__ size_t cache_start(const Attention &a, int kv_head) {
    return (size_t)kv_head * (size_t)a.seq_len * (size_t)a.head_dim;
}

/* Where the vector of a token and query head starts in q and out. */
__device__ __forceinline__ size_t head_start(const Attention &a, int token, int head) {
    return ((size_t)token * (size_t)a.n_heads + (size_t)head) * (size_t)a.head_dim;
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* x, but NaN for +-infinity: a score of -infinity would otherwise get weight 0 and be forgotten. */
__device__ __forceinline__ float finite_or_nan(float x) {
    return fmaf(x, 0.0f, x);
}

/* Two neighbouring values as fp16. Rows and dims are even, so the address is a multiple of 4. */
__device__ __forceinline__ void store_pair(fp16 *to, float x, float y) {
    *reinterpret_cast<__half2 *>(to) = __floats2half2_rn(x, y);
}

/* ---- decode ----------------------------------------------------------------------------------------- */

/* One token. Bound by the bytes of the cache, 4 * head_dim per position and kv head.
 *
 * Grid (n_splits, n_kv_heads * sets), DECODE_THREADS a block. A set is up to HEADS query heads of a group;
 * larger groups take several sets, which then find keys and values in the L2 cache. n_splits follows from
 * kv_len_max and the device alone, so that a captured launch stays right: the blocks share out the real
 * length, in whole batches, and blocks left without work return at once.
 * Lanes: PAD / 8 of them hold one key, 16 bytes a lane, so a warp takes 256 / PAD neighbouring keys per
 * load. A batch is DECODE_UNROLL such loads of keys and as many of values by every warp, all in flight
 * together, the first batch before the kernel waits for the product that makes q, k and v. Each group of lanes
 * carries a state of its own over its keys: no barrier until the end.
 * Then states are joined: across the lanes of a warp by shuffles, across warps through shared memory, across
 * splits by the block of the last one, which takes what the others post as letters (cuda_ops.cuh). Each of these sums
 * has a fixed order. Across warps and splits every four values of an out vector are a thread's own business, which
 * finds the weights for itself: one barrier in all, and one wait for everything that is posted.
 * Shared: an out vector and a (max, sum) per warp and head.
 * Letters: of every set and split its heads' out vectors of PAD floats, with room for HEADS, then as many times (max,
 * sum, 0, 0): four words are waited for together. */

#define DECODE_WARPS 8
#define DECODE_THREADS (32 * DECODE_WARPS)
#define DECODE_UNROLL 4
#define MAX_SPLITS 64

template <int PAD, int HEADS>
struct DecodeShape {
    static constexpr int LANES = PAD / CHUNK;  // that hold one key
    static constexpr int KEYS = 32 / LANES;    // of one load by a warp
    static constexpr int BATCH = DECODE_WARPS * KEYS * DECODE_UNROLL;
    static constexpr int BLOCKS_PER_SM = HEADS == 1 ? 2 : 1;  // what registers allow
    static constexpr int QUADS = HEADS * PAD / 4;             // float4 of all out vectors
    static constexpr int POSTED = 2 * QUADS;                  // by a split: these, and to each its head's state
    static_assert(LANES >= 1 && 32 % LANES == 0, "a key lies within a warp");
};

/* The softmax over a part of the context, without its out vector. */
struct SoftmaxState {
    float max, sum;
};

/* 16 bytes of the cache, past L1: that is small while a product's shared memory is large, and would bound how many
 * loads are in flight. */
__device__ __forceinline__ uint4 load_once(const fp16 *p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

/* The chunk of a row (present or not) of which width values exist, zeros for the others. */
__device__ __forceinline__ uint4 load_chunk(const fp16 *chunk, int width, bool present, bool aligned) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (aligned) {
        if (present && width > 0) {
            v = load_once(chunk);
        }
    } else {
        const unsigned *pairs = reinterpret_cast<const unsigned *>(chunk);
        v.x = present && width > 0 ? pairs[0] : 0;
        v.y = present && width > 2 ? pairs[1] : 0;
        v.z = present && width > 4 ? pairs[2] : 0;
        v.w = present && width > 6 ? pairs[3] : 0;
    }
    return v;
}

__device__ __forceinline__ void chunk_to_float(float (&f)[CHUNK], const uint4 &chunk) {
    const __half2 *pairs = reinterpret_cast<const __half2 *>(&chunk);
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) {
        const float2 pair = __half22float2(pairs[i]);
        f[2 * i] = pair.x;
        f[2 * i + 1] = pair.y;
    }
}

/* The chunk of a row of fp32, zeros beyond width. */
__device__ __forceinline__ void load_floats(float (&f)[CHUNK], const float *chunk, int width, bool aligned) {
    if (aligned && width > 0) {
        const float4 low = reinterpret_cast<const float4 *>(chunk)[0], high = reinterpret_cast<const float4 *>(chunk)[1];
        const float values[CHUNK] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            f[i] = values[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            f[i] = i < width ? chunk[i] : 0.0f;
        }
    }
}

__device__ __forceinline__ uint4 round_chunk(const float (&x)[CHUNK]) {
    uint4 chunk;
    __half2 *pairs = reinterpret_cast<__half2 *>(&chunk);
#pragma unroll
    for (int i = 0; i < CHUNK; i += 2) {
        pairs[i / 2] = __floats2half2_rn(x[i], x[i + 1]);
    }
    return chunk;
}

/* Pairs turned by angles (cos, sin in turn) and rounded, with the very operations of rope_append. */
__device__ __forceinline__ uint4 rotate_chunk(const float (&x)[CHUNK], const float (&angle)[CHUNK]) {
    float turned[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; i += 2) {
        const float c = angle[i], s = angle[i + 1];
        turned[i] = __fsub_rn(__fmul_rn(x[i], c), __fmul_rn(x[i + 1], s));
        turned[i + 1] = __fadd_rn(__fmul_rn(x[i], s), __fmul_rn(x[i + 1], c));
    }
    return round_chunk(turned);
}

/* A chunk into a row of the cache, of which width values exist. */
__device__ __forceinline__ void store_chunk(fp16 *to, const uint4 &chunk, int width, bool aligned) {
    if (aligned && width > 0) {
        *reinterpret_cast<uint4 *>(to) = chunk;
    } else {
        const unsigned words[CHUNK / 2] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            if (2 * i < width) {
                reinterpret_cast<unsigned *>(to)[i] = words[i];
            }
        }
    }
}

/* A part of the context, for four values of a head's out vector. */
struct Part {
    SoftmaxState state;
    float4 out;
};

/* The parts joined, in their order. One without keys has max -FLT_MAX, sum 0 and out 0, and adds nothing. */
template <int N> __device__ __forceinline__ Part join_parts(const Part (&parts)[N]) {
    float max = parts[0].state.max;
#pragma unroll
    for (int i = 1; i < N; i++) {
        max = fmaxf(max, parts[i].state.max);
    }
    Part joined = {{max, 0}, make_float4(0, 0, 0, 0)};
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float weight = exp2_approx(parts[i].state.max - max);
        joined.state.sum += weight * parts[i].state.sum;
        joined.out.x += weight * parts[i].out.x;
        joined.out.y += weight * parts[i].out.y;
        joined.out.z += weight * parts[i].out.z;
        joined.out.w += weight * parts[i].out.w;
    }
    return joined;
}

/* own joined with n parts that other blocks post: their out and their state, each `stride` behind the one before. */
__device__ Part join_posted(Part own, uint4 *posted, int stride, int n) {
    constexpr int AT_ONCE = 8;
#pragma unroll 1
    for (int left = n; left > 0; left -= AT_ONCE, posted += (size_t)(2 * AT_ONCE * stride)) {
        uint4 v[2 * AT_ONCE];
        take(v, posted, stride, 2 * left);
        Part parts[1 + AT_ONCE] = {own};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const uint4 out = v[2 * i], state = v[2 * i + 1];
            parts[1 + i].state = {i < left ? __uint_as_float(state.x) : -FLT_MAX, __uint_as_float(state.y)};
            parts[1 + i].out = make_float4(__uint_as_float(out.x), __uint_as_float(out.y), __uint_as_float(out.z),
                                           __uint_as_float(out.w));
        }
        own = join_parts(parts);
    }
    return own;
}

/* Join the states of the lane groups of a warp: afterwards all of them hold the joined one. */
template <int LANES>
__device__ __forceinline__ void join_lanes(SoftmaxState &state, float (&out)[CHUNK]) {
    float max = state.max;
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) {
        max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
    }
    const float weight = exp2_approx(state.max - max);
    state = {max, state.sum * weight};
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        out[i] *= weight;
    }
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) {
        state.sum += __shfl_xor_sync(~0u, state.sum, offset);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            out[i] += __shfl_xor_sync(~0u, out[i], offset);
        }
    }
}

template <int PAD, int HEADS>
__global__ void __launch_bounds__(DECODE_THREADS, (DecodeShape<PAD, HEADS>::BLOCKS_PER_SM))
    decode_kernel(const Attention a, uint4 *letters) {
    using Shape = DecodeShape<PAD, HEADS>;
    __shared__ float4 warp_out[DECODE_WARPS][Shape::QUADS];
    __shared__ SoftmaxState warp_state[DECODE_WARPS][HEADS];

    // What is read before wait_for_previous(), the position, angles and rows of earlier positions, was written before
    // the kernel began that makes q, k and v.
    const int kv_len = *a.pos + 1, n_splits = (int)gridDim.x, split = (int)blockIdx.x;
    const int split_batches = (kv_len - 1) / (n_splits * Shape::BATCH) + 1;
    const int split_keys = split_batches * Shape::BATCH;
    const int n_active = (kv_len - 1) / split_keys + 1;  // splits that have keys
    if (split >= n_active) {
        return;
    }

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = lane % Shape::LANES * CHUNK;
    const int sets = (a.group - 1) / HEADS + 1, set = (int)blockIdx.y;
    const int kv_head = set / sets, first_head = set % sets * HEADS;  // of the group
    const int n_heads = min(HEADS, a.group - first_head);
    const int width = a.head_dim - dim;  // values that this lane's chunk of a row has, if under CHUNK
    const bool aligned = a.head_dim % CHUNK == 0;
    fp16 *k_rows = a.k_cache + cache_start(a, kv_head) + dim, *v_rows = a.v_cache + cache_start(a, kv_head) + dim;
    const int first_key = split * split_keys + warp * Shape::KEYS + lane / Shape::LANES;
    const int end = min((split + 1) * split_keys, kv_len);
    const int new_key = a.qkv ? kv_len - 1 : -1;  // is not in the cache yet

    uint4 k[DECODE_UNROLL], v[DECODE_UNROLL];
    bool present[DECODE_UNROLL];
    const auto load_batch = [&](int key) {
#pragma unroll
        for (int u = 0; u < DECODE_UNROLL; u++) {
            const int row = key + u * DECODE_WARPS * Shape::KEYS;
            const size_t at = (size_t)row * (size_t)a.head_dim;
            present[u] = row < end;
            k[u] = load_chunk(k_rows + at, width, present[u] && row != new_key, aligned);
            v[u] = load_chunk(v_rows + at, width, present[u] && row != new_key, aligned);
        }
    };
    float angle[CHUNK];
    if (a.qkv) {
        load_floats(angle, a.rope + (size_t)new_key * (size_t)a.head_dim + dim, width, aligned);
        load_batch(first_key);
    }
    wait_for_previous();
    let_next_start();

    float query[HEADS][CHUNK], out[HEADS][CHUNK] = {};
    uint4 new_k = make_uint4(0, 0, 0, 0), new_v = new_k;
    if (a.qkv) {
        const float *row = a.qkv + dim;
        float x[CHUNK];
        // The lanes whose key the new one is make it and its value.
        const int ahead = new_key - first_key;
        if (split == n_active - 1 && ahead >= 0 && ahead % (DECODE_WARPS * Shape::KEYS) == 0) {
            const size_t at = (size_t)new_key * (size_t)a.head_dim;
            load_floats(x, row + (size_t)(a.n_heads + kv_head) * (size_t)a.head_dim, width, aligned);
            new_k = rotate_chunk(x, angle);
            load_floats(x, row + (size_t)(a.n_heads + a.n_heads / a.group + kv_head) * (size_t)a.head_dim, width, aligned);
            new_v = round_chunk(x);
            store_chunk(k_rows + at, new_k, width, aligned);
            store_chunk(v_rows + at, new_v, width, aligned);
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            load_floats(x, row + (size_t)(kv_head * a.group + first_head + h) * (size_t)a.head_dim, h < n_heads ? width : 0,
                        aligned);
            chunk_to_float(query[h], rotate_chunk(x, angle));
        }
    } else {
        load_batch(first_key);
        const fp16 *q = a.q + head_start(a, 0, kv_head * a.group + first_head) + dim;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            chunk_to_float(query[h], load_chunk(q + h * a.head_dim, width, h < n_heads, aligned));
        }
    }
    SoftmaxState state[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            query[h][i] *= a.log2_scale;
        }
        state[h] = {-FLT_MAX, 0};
    }

    for (int key = first_key; key - first_key + split * split_keys < end; key += Shape::BATCH) {
        if (key != first_key) {
            load_batch(key);
        }
#pragma unroll
        for (int u = 0; u < DECODE_UNROLL; u++) {
            if (key + u * DECODE_WARPS * Shape::KEYS == new_key) {
                k[u] = new_k;
                v[u] = new_v;
            }
        }

        float score[HEADS][DECODE_UNROLL];
#pragma unroll
        for (int u = 0; u < DECODE_UNROLL; u++) {
            float values[CHUNK];
            chunk_to_float(values, k[u]);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                score[h][u] = 0;
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    score[h][u] = fmaf(query[h][i], values[i], score[h][u]);
                }
#pragma unroll
                for (int offset = 1; offset < Shape::LANES; offset *= 2) {
                    score[h][u] += __shfl_xor_sync(~0u, score[h][u], offset);
                }
            }
        }

        // From here on a score is its weight.
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float max = state[h].max;
#pragma unroll
            for (int u = 0; u < DECODE_UNROLL; u++) {
                score[h][u] = present[u] ? finite_or_nan(score[h][u]) : -INFINITY;
                max = fmaxf(max, score[h][u]);
            }
            const float shrink = exp2_approx(state[h].max - max);
            state[h] = {max, state[h].sum * shrink};
#pragma unroll
            for (int u = 0; u < DECODE_UNROLL; u++) {
                score[h][u] = exp2_approx(score[h][u] - max);
                state[h].sum += score[h][u];
            }
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                out[h][i] *= shrink;
            }
        }

#pragma unroll
        for (int u = 0; u < DECODE_UNROLL; u++) {
            float values[CHUNK];
            chunk_to_float(values, v[u]);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    out[h][i] = fmaf(score[h][u], values[i], out[h][i]);
                }
            }
        }
    }

#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        join_lanes<Shape::LANES>(state[h], out[h]);
        if (lane < Shape::LANES) {
            float4 *quads = &warp_out[warp][(h * PAD + dim) / 4];
            quads[0] = make_float4(out[h][0], out[h][1], out[h][2], out[h][3]);
            quads[1] = make_float4(out[h][4], out[h][5], out[h][6], out[h][7]);
        }
        if (lane == 0) {
            warp_state[warp][h] = state[h];
        }
    }
    __syncthreads();

    // A thread joins four values over the warps and, in the block of the last split that has keys, over the splits.
    const int n_others = n_active - 1;
    uint4 *posted = letters + (size_t)set * n_splits * Shape::POSTED;  // by the first split
    fp16 *set_out = a.out + head_start(a, 0, kv_head * a.group + first_head);
#pragma unroll 1
    for (int i = threadIdx.x; i < n_heads * (PAD / 4); i += DECODE_THREADS) {
        const int h = i * 4 / PAD, d = i * 4 % PAD;
        Part parts[DECODE_WARPS];
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; w++) {
            parts[w] = {warp_state[w][h], warp_out[w][i]};
        }
        Part joined = join_parts(parts);
        if (split < n_others) {
            uint4 *mine = posted + (size_t)split * Shape::POSTED + i;
            post(mine, joined.out);
            post(mine + Shape::QUADS, make_float4(joined.state.max, joined.state.sum, 0, 0));
            continue;
        }
        joined = join_posted(joined, posted + i, Shape::QUADS, n_others);
        fp16 *to = set_out + h * a.head_dim + d;
        if (d < a.head_dim) {
            store_pair(to, joined.out.x / joined.state.sum, joined.out.y / joined.state.sum);
        }
        if (d + 2 < a.head_dim) {
            store_pair(to + 2, joined.out.z / joined.state.sum, joined.out.w / joined.state.sum);
        }
    }
}

template <int PAD, int HEADS>
void launch_decode(const CudaLaunch *c, const Attention &a, int kv_len_max) {
    using Shape = DecodeShape<PAD, HEADS>;
    const size_t sets = (size_t)(a.n_heads / a.group) * ceil_div((size_t)a.group, HEADS);
    // One wave of blocks, each with a batch at least.
    const size_t wave = (size_t)c->n_sms * Shape::BLOCKS_PER_SM / sets;
    const size_t useful = min_size(ceil_div((size_t)kv_len_max, Shape::BATCH), MAX_SPLITS);
    const size_t n_splits = wave > 1 ? min_size(wave, useful) : 1;
    CHECK(sets < 65536);  // the largest grid.y
    CHECK(n_splits == 1 || sets * n_splits * Shape::POSTED * (sizeof(uint4) / sizeof *c->letters) <= N_LETTERS);
    launch_overlapped(c, decode_kernel<PAD, HEADS>, dim3((unsigned)n_splits, (unsigned)sets), DECODE_THREADS, 0, a,
                      reinterpret_cast<uint4 *>(c->letters));
}

/* ---- prefill ---------------------------------------------------------------------------------------- */

/* Many tokens: flash attention on Tensor Cores (mma.sync m16n8k16, fp16 in, fp32 sums).
 *
 * A kv head has n * group query rows, row r = token r / group, head r % group of the group: so the heads of
 * a group share the loads of keys and values. Grid (n_kv_heads, ceil(n * group / ROWS)), PREFILL_THREADS a
 * block; the rows that see most come first, so that the short blocks fill the gaps at the end. A block owns
 * ROWS rows, a warp ROW_TILES tiles of 16 of them, and walks over tiles of KEYS positions up to the last
 * one that its rows see.
 * Shared: the query rows, STAGES tiles of keys, STAGES tiles of values; rows of PAD fp16, swizzled.
 * Stages: while tile t is multiplied, cp.async brings tile t + 1 into the other stage. The one barrier per
 * tile says both that tile t has arrived for everyone and that everyone is done with tile t - 1, whose place
 * tile t + 1 takes.
 * Per tile and warp: scores S = Q K^T in registers | mask, where the diagonal crosses | online softmax; the
 * four lanes that share a row agree on its max | P rounded to fp16, whose registers are the next operand as
 * they lie | O += P V. Sums of weights stay per lane until the end. The shapes fix the order of every sum.
 * Rows beyond n * group and positions that no row of the block sees are zeros in shared memory: no NaN of
 * unwritten cache reaches P V as 0 * NaN.
 * Flops: 4 * head_dim per visible pair of row and position. */

#define PREFILL_WARPS 4
#define PREFILL_THREADS (32 * PREFILL_WARPS)
#define STAGES 2
#define MMA_ROWS 16  // rows of a query tile, and keys or dims of one ldmatrix.x4 of K or V

template <int PAD>
struct PrefillShape {
    // 32 rows a warp halve the shared-memory reads per product; at 256 dims registers allow 16 only.
    static constexpr int ROW_TILES = PAD <= 128 ? 2 : 1;
    static constexpr int ROWS = PREFILL_WARPS * ROW_TILES * MMA_ROWS;
    static constexpr int KEYS = PAD <= 64 ? 64 : PAD <= 128 ? 48 : 32;  // whose scores registers still hold
    static constexpr int ROW_BYTES = PAD * (int)sizeof(fp16);
    static constexpr int CHUNKS = PAD / CHUNK;  // 16-byte chunks of a row
    static constexpr int TILE_BYTES = KEYS * ROW_BYTES;
    static constexpr int K_START = ROWS * ROW_BYTES, V_START = K_START + STAGES * TILE_BYTES;
    static constexpr int SHARED_BYTES = V_START + STAGES * TILE_BYTES;
    static_assert(PAD % MMA_ROWS == 0 && KEYS % MMA_ROWS == 0, "whole operands");
    static_assert(K_START % ROW_BYTES == 0 && TILE_BYTES % ROW_BYTES == 0, "tiles start where a row could");
};

/* Byte offset of a chunk in a tile. Chunks are swapped about within their row so that the same chunk of 8
 * rows in turn, what one phase of ldmatrix reads, lies in 8 different groups of 4 banks. The pattern repeats
 * every 8 rows, and being an exclusive or it commutes: offset(row, chunk ^ c) = offset(row, chunk) ^ 16 c. */
template <int PAD>
__device__ __forceinline__ unsigned chunk_offset(unsigned row, unsigned chunk) {
    constexpr unsigned chunks = PrefillShape<PAD>::CHUNKS, swapped = chunks < 8 ? chunks : 8;
    constexpr unsigned rows_per_line = 8 / swapped;  // rows in the 128 bytes that span all banks
    return row * PrefillShape<PAD>::ROW_BYTES + (chunk ^ row / rows_per_line % swapped) * 16;
}

/* cp.async of BYTES, or of zeros (nothing is read then). */
template <int BYTES>
__device__ __forceinline__ void copy_async_or_zero(unsigned shared, const void *global, bool present) {
    const int from_global = present ? BYTES : 0;
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                     "r"(from_global)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES),
                     "r"(from_global)
                     : "memory");
    }
}

/* Start the copy of a row's chunk of which width values exist; zeros for the others. */
__device__ __forceinline__ void copy_chunk(unsigned shared, const fp16 *chunk, int width, bool present,
                                           bool aligned) {
    if (aligned) {
        copy_async_or_zero<16>(shared, chunk, present && width > 0);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i += 2) {
            copy_async_or_zero<4>(shared + i * sizeof(fp16), chunk + i, present && width > i);
        }
    }
}

/* Start the copies of a tile of positions of keys and of values, in caches of this kv head that begin at
 * start; zeros from end on. Not unrolled: addresses held for later would cost the registers that the sums
 * need. */
template <int PAD>
__device__ __forceinline__ void copy_tiles(unsigned k_tile, unsigned v_tile, const Attention &a, size_t start,
                                           int first, int end) {
    using Shape = PrefillShape<PAD>;
    constexpr int STEP = PREFILL_THREADS / Shape::CHUNKS;  // rows that the block copies at once
    static_assert(Shape::KEYS % STEP == 0, "no thread has a chunk more than another");
    const int chunk = (int)(threadIdx.x % Shape::CHUNKS), width = a.head_dim - chunk * CHUNK;
#pragma unroll 1
    for (int row = (int)(threadIdx.x / Shape::CHUNKS); row < Shape::KEYS; row += STEP) {
        const unsigned to = chunk_offset<PAD>(row, chunk);
        const size_t from = start + (size_t)(first + row) * (size_t)a.head_dim + chunk * CHUNK;
        const bool present = first + row < end, aligned = a.head_dim % CHUNK == 0;
        copy_chunk(k_tile + to, a.k_cache + from, width, present, aligned);
        copy_chunk(v_tile + to, a.v_cache + from, width, present, aligned);
    }
}

/* Four 8 x 8 matrices of fp16: lane l gives the address of row l % 8 of matrix l / 8 and gets of each
 * matrix the values 2 (l % 4) and the next of row l / 4. */
__device__ __forceinline__ void load_matrices(unsigned (&m)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared));
}

/* The same, each matrix transposed on the way. */
__device__ __forceinline__ void load_matrices_transposed(unsigned (&m)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared));
}

/* c (16 x 8) += a (16 x 16) b (16 x 8). Lane l holds columns 2 (l % 4) and the next of rows l / 4 (c[0],
 * c[1]) and l / 4 + 8 (c[2], c[3]). */
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pack_pair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned *>(&pair);
}

template <int PAD>
__global__ void __launch_bounds__(PREFILL_THREADS, 2) prefill_kernel(const Attention a) {
    using Shape = PrefillShape<PAD>;
    constexpr int ROW_TILES = Shape::ROW_TILES, KEYS = Shape::KEYS, ROW_BYTES = Shape::ROW_BYTES;
    extern __shared__ __align__(1024) unsigned char shared[];  // a multiple of every ROW_BYTES

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int kv_head = (int)blockIdx.x, n_rows = a.n * a.group, pos = *a.pos;
    const int first_row = (int)(gridDim.y - 1 - blockIdx.y) * Shape::ROWS;
    const int last_row = min(first_row + Shape::ROWS, n_rows) - 1;
    const int kv_end = pos + last_row / a.group + 1;  // positions that the block sees
    const size_t start = cache_start(a, kv_head);
    const unsigned q_tile = (unsigned)__cvta_generic_to_shared(shared);
    const unsigned k_tiles = q_tile + Shape::K_START, v_tiles = q_tile + Shape::V_START;

    for (int i = (int)threadIdx.x; i < Shape::ROWS * Shape::CHUNKS; i += PREFILL_THREADS) {
        const int row = i / Shape::CHUNKS, chunk = i % Shape::CHUNKS, dim = chunk * CHUNK;
        const int token = (first_row + row) / a.group, head = kv_head * a.group + (first_row + row) % a.group;
        copy_chunk(q_tile + chunk_offset<PAD>(row, chunk), a.q + head_start(a, token, head) + dim,
                   a.head_dim - dim, first_row + row < n_rows, a.head_dim % CHUNK == 0);
    }
    copy_tiles<PAD>(k_tiles, v_tiles, a, start, 0, kv_end);
    copy_async_commit();

    // The softmax of the lane's two rows of each row tile: max as an exponent of 2, out in pairs per 8 dims.
    const int warp_row = first_row + warp * ROW_TILES * MMA_ROWS;
    float max[ROW_TILES][2], sum[ROW_TILES][2], out[ROW_TILES][PAD / 8][4] = {};
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        max[r][0] = max[r][1] = -FLT_MAX;
        sum[r][0] = sum[r][1] = 0;
    }
    const int warp_last_row = min(warp_row + ROW_TILES * MMA_ROWS, n_rows) - 1;
    const int visible_to_all = pos + warp_row / a.group + 1;
    const int visible_to_any = warp_row < n_rows ? pos + warp_last_row / a.group + 1 : 0;

    // What the lane addresses in ldmatrix. Q and V: matrices 0 and 1 are rows 0 .. 7 and 8 .. 15, 2 and 3
    // their next chunk; K: matrices 0 and 1 are two chunks of keys 0 .. 7, 2 and 3 of keys 8 .. 15. For
    // further chunks see chunk_offset.
    const int near_rows = lane % 16, near_chunk = lane / 16;
    const unsigned q_lane = q_tile + chunk_offset<PAD>(warp * ROW_TILES * MMA_ROWS + near_rows, near_chunk);
    const unsigned k_lane = k_tiles + chunk_offset<PAD>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const unsigned v_lane = v_tiles + chunk_offset<PAD>(near_rows, near_chunk);

    for (int first = 0, stage = 0; first < kv_end; first += KEYS, stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads();  // this tile has arrived; the one before has been used
        if (first + KEYS < kv_end) {
            const unsigned next = (unsigned)((stage ^ 1) * Shape::TILE_BYTES);
            copy_tiles<PAD>(k_tiles + next, v_tiles + next, a, start, first + KEYS, kv_end);
            copy_async_commit();
        }
        if (first >= visible_to_any) {
            continue;  // beyond the diagonal for this warp
        }
        const unsigned this_stage = (unsigned)(stage * Shape::TILE_BYTES);

        float score[ROW_TILES][KEYS / 8][4] = {};
#pragma unroll 4  // further addresses held in registers would make the kernel spill
        for (int dim = 0; dim < PAD; dim += 16) {
            const unsigned chunk = dim / CHUNK * 16;
            unsigned query[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                load_matrices(query[r], (q_lane ^ chunk) + r * MMA_ROWS * ROW_BYTES);
            }
#pragma unroll
            for (int key = 0; key < KEYS; key += 16) {
                unsigned k[4];
                load_matrices(k, ((k_lane + this_stage) ^ chunk) + key * ROW_BYTES);
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    multiply_add(score[r][key / 8], query[r], k[0], k[1]);
                    multiply_add(score[r][key / 8 + 1], query[r], k[2], k[3]);
                }
            }
        }

#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    score[r][j][i] = finite_or_nan(score[r][j][i]);
                }
            }
        }
        if (first + KEYS > visible_to_all) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = warp_row + r * MMA_ROWS + i / 2 * 8 + lane / 4;
                    const int visible = pos + row / a.group + 1;
#pragma unroll
                    for (int j = 0; j < KEYS / 8; j++) {
                        if (first + j * 8 + lane % 4 * 2 + i % 2 >= visible) {
                            score[r][j][i] = -INFINITY;
                        }
                    }
                }
            }
        }

#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            float tile_max[2] = {-INFINITY, -INFINITY}, shrink[2];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    tile_max[i / 2] = fmaxf(tile_max[i / 2], score[r][j][i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(~0u, tile_max[i], 1));
                tile_max[i] = fmaxf(tile_max[i], __shfl_xor_sync(~0u, tile_max[i], 2));
                const float new_max = fmaxf(max[r][i], tile_max[i] * a.log2_scale);
                shrink[i] = exp2_approx(max[r][i] - new_max);
                max[r][i] = new_max;
                sum[r][i] *= shrink[i];
            }
            // From here on a score is its weight.
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    score[r][j][i] = exp2_approx(fmaf(score[r][j][i], a.log2_scale, -max[r][i / 2]));
                    sum[r][i / 2] += score[r][j][i];
                }
            }
#pragma unroll
            for (int j = 0; j < PAD / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    out[r][j][i] *= shrink[i / 2];
                }
            }
        }

#pragma unroll
        for (int key = 0; key < KEYS; key += 16) {
            unsigned p[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const float(&s)[4] = score[r][key / 8], (&t)[4] = score[r][key / 8 + 1];
                p[r][0] = pack_pair(s[0], s[1]);
                p[r][1] = pack_pair(s[2], s[3]);
                p[r][2] = pack_pair(t[0], t[1]);
                p[r][3] = pack_pair(t[2], t[3]);
            }
#pragma unroll
            for (int dim = 0; dim < PAD; dim += 16) {
                unsigned v[4];
                load_matrices_transposed(v, ((v_lane + this_stage) ^ (dim / CHUNK * 16)) + key * ROW_BYTES);
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    multiply_add(out[r][dim / 8], p[r], v[0], v[1]);
                    multiply_add(out[r][dim / 8 + 1], p[r], v[2], v[3]);
                }
            }
        }
    }

#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[r][i] += __shfl_xor_sync(~0u, sum[r][i], 1);
            sum[r][i] += __shfl_xor_sync(~0u, sum[r][i], 2);
            const float factor = 1.0f / sum[r][i];
            const int row = warp_row + r * MMA_ROWS + i * 8 + lane / 4;
            fp16 *to = a.out + head_start(a, row / a.group, kv_head * a.group + row % a.group);
#pragma unroll
            for (int j = 0; j < PAD / 8; j++) {
                const int dim = j * 8 + lane % 4 * 2;
                if (row < n_rows && dim < a.head_dim) {
                    store_pair(to + dim, out[r][j][2 * i] * factor, out[r][j][2 * i + 1] * factor);
                }
            }
        }
    }
}

template <int PAD>
void launch_prefill(const CudaLaunch *c, const Attention &a) {
    using Shape = PrefillShape<PAD>;
    const size_t blocks = ceil_div((size_t)a.n * (size_t)a.group, Shape::ROWS);
    CHECK(blocks < 65536);  // grid.y
    CHECK(Shape::SHARED_BYTES <= c->shared_per_block);
    CUDA_CHECK(cudaFuncSetAttribute(prefill_kernel<PAD>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Shape::SHARED_BYTES));
    prefill_kernel<PAD><<<dim3((unsigned)(a.n_heads / a.group), (unsigned)blocks), PREFILL_THREADS,
                          Shape::SHARED_BYTES, c->stream>>>(a);
    CUDA_CHECK_LAUNCH(c->stream);
}

/* ---- both ------------------------------------------------------------------------------------------- */

template <int PAD>
void launch(const CudaLaunch *c, const Attention &a, int kv_len_max) {
    constexpr int MOST_HEADS = PAD <= 128 ? 8 : 4;  // whose out vectors, one per warp, fit in shared memory
    if (a.n > 1) {
        launch_prefill<PAD>(c, a);
    } else if (a.group == 1) {
        launch_decode<PAD, 1>(c, a, kv_len_max);
    } else if (a.group <= 4) {
        launch_decode<PAD, 4>(c, a, kv_len_max);
    } else {
        launch_decode<PAD, MOST_HEADS>(c, a, kv_len_max);
    }
}

}  // namespace

void attention_cuda(const CudaLaunch *c, fp16 *out, const fp16 *q, fp16 *k_cache, fp16 *v_cache, const float *qkv,
                    const float *rope, const AttentionShape *shape, const int *pos, int n, int kv_len_max) {
    CHECK(!qkv || (n == 1 && rope && (uintptr_t)qkv % sizeof(float4) == 0 && (uintptr_t)rope % sizeof(float4) == 0));
    CHECK(shape->n_kv_heads >= 1 && shape->n_heads >= 1 && shape->n_heads % shape->n_kv_heads == 0);
    CHECK(shape->head_dim >= 2 && shape->head_dim <= MAX_HEAD_DIM && shape->head_dim % 2 == 0);
    CHECK(n >= 1 && n <= kv_len_max && kv_len_max <= shape->seq_len);
    const fp16 *const arrays[] = {out, q, k_cache, v_cache};
    for (const fp16 *array : arrays) {
        CHECK((uintptr_t)array % sizeof(uint4) == 0);
    }
    Attention a;
    a.out = out;
    a.q = q;
    a.k_cache = k_cache;
    a.v_cache = v_cache;
    a.qkv = qkv;
    a.rope = rope;
    a.pos = pos;
    a.n = n;
    a.n_heads = shape->n_heads;
    a.group = shape->n_heads / shape->n_kv_heads;
    a.head_dim = shape->head_dim;
    a.seq_len = shape->seq_len;
    a.log2_scale = (float)(M_LOG2E / sqrt((double)shape->head_dim));
    CHECK((size_t)n * (size_t)a.group < (size_t)1 << 30);
    if (shape->head_dim <= 16) {
        launch<16>(c, a, kv_len_max);
    } else if (shape->head_dim <= 32) {
        launch<32>(c, a, kv_len_max);
    } else if (shape->head_dim <= 64) {
        launch<64>(c, a, kv_len_max);
    } else if (shape->head_dim <= 128) {
        launch<128>(c, a, kv_len_max);
    } else {
        launch<MAX_HEAD_DIM>(c, a, kv_len_max);
    }
}
