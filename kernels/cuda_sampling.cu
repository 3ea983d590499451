/* cuda_sampling.cu: from logits to a token, as sample_token() in sampling.c does it.
 *
 *   report->token  the chosen id; -1 if a logit is not finite
 *   logits         (n) fp32, 16-byte aligned, not changed; 4 n bytes, which later passes find in cache
 *
 * Nothing is sorted. Top-k, top-p and the draw are one operation, select(): candidates have a rank (an
 * integer; all differ) and an amount (an integer); going down the ranks, at which does the running sum reach
 * what is wanted?
 *
 *            rank                       amount   wanted
 *   top-k    logit, then lower id       1        k              what ranks lower goes
 *   top-p    logit, then lower id       weight   top_p * total  what ranks lower goes
 *   draw     lower id                   weight   u * total      this is the token
 *
 * select() divides the interval of ranks into BINS bins, sums the amounts of each bin, finds the bin in which
 * what is wanted is reached, and goes on with that bin as the interval until it is a single rank. Once at
 * most THREADS candidates are left, each thread holds one of them and the logits are not looked at again.
 * That takes two passes over the logits for top-k and top-p (more where masses of them are nearly equal) and
 * one for the draw, after one that finds the largest, which is all of greedy, and one that adds weights up
 * roughly.
 *
 * Weights are those of sampling.c, exp((logit - largest) / temperature) in double, but times a power of two
 * that makes their sum about 2^61 and rounded to integers. Sums of integers do not depend on their order: so
 * they may be made with atomics and are still deterministic, a running sum never falls, and what is wanted is
 * always reached, also at u = 1. Rounding takes at most n / 2 of 2^61, less than n roundings of a sum in
 * double may.
 *
 * One block of THREADS threads. Shared: one set of bins, whose place gathered candidates take later. Barriers
 * separate: clearing bins | adding to them | reading them and announcing the bin found | gathering | taking
 * candidates.
 *
 * Reference: sampling.c. Test: tests/gpu/ops_test.cu. */
#include "cuda_ops.cuh"

#include <curand_kernel.h>
#include <float.h>

#define THREADS 1024
#define WARPS (THREADS / 32)
#define LOG_BINS 12
#define BINS (1 << LOG_BINS)
#define THREAD_BINS (BINS / THREADS)
#define WEIGHT_BITS 61    // the weights' sum is below 2^(WEIGHT_BITS + 1), with room for rounding below 2^63
#define FRACTION_BITS 56  // the smallest draw is 2^-33 and has 23 bits more
#define MAX_ID_BITS 30    // rank: 32 bits of logit, then these

static_assert(WARPS == 32, "one warp combines the results of all warps, one a lane");
static_assert(THREAD_BINS == 4, "a thread reads its bins' halves as one uint4 each");

typedef struct {
    uint64_t rank, amount;
} Candidate;

typedef struct {
    union {
        struct {
            // Sums of 64 bits in halves, as shared memory adds 32 bits at a time.
            alignas(16) unsigned low[BINS], high[BINS];
        } bins;
        Candidate candidates[THREADS];
    };
    int n_candidates;
    unsigned found;   // the bin in which the wanted sum is reached, and
    uint64_t before;  // the sum of all bins before it
    uint64_t warp_sums[WARPS];
    float warp_weights[WARPS];
    unsigned warp_largest[WARPS], warp_id[WARPS], warp_smallest[WARPS];
    float u;
} Shared;

/* The logits and what each pass needs to know of them. */
typedef struct {
    const float *logits;
    int n, id_bits;
    double largest, inverse_temperature, scale;
    uint64_t least;  // candidates of lower rank are out
} Candidates;

/* ---- numbers ------------------------------------------------------------------------------------------- */

/* A logit as an integer of the same order; -0 becomes +0, its equal. What is not finite lies outside. */
static __device__ __forceinline__ unsigned ordered(float logit) {
    const unsigned bits = __float_as_uint(logit + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
#define ORDERED_INFINITY 0xff800000u        // and above it NaN
#define ORDERED_MINUS_INFINITY 0x007fffffu  // and below it NaN with a sign

static __device__ __forceinline__ float logit_of(unsigned order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

static __device__ __forceinline__ uint64_t last_id(const Candidates &c) {
    return ((uint64_t)1 << c.id_bits) - 1;
}

static __device__ __forceinline__ uint64_t rank_of(const Candidates &c, float logit, int id) {
    return (uint64_t)ordered(logit) << c.id_bits | (last_id(c) - id);
}

static __device__ __forceinline__ uint64_t weight_of(const Candidates &c, float logit) {
    return __double2ull_rn(exp((logit - c.largest) * c.inverse_temperature) * c.scale);
}

/* The least integer that is not below fraction * total, but at least 1. Exact for fractions of 2^-33 to 1. */
static __device__ __forceinline__ uint64_t share_of(float fraction, uint64_t total) {
    const uint64_t f = (uint64_t)(fraction * (double)((uint64_t)1 << FRACTION_BITS));
    const uint64_t high = __umul64hi(f, total), low = f * total;
    const uint64_t whole = high << (64 - FRACTION_BITS) | low >> FRACTION_BITS;
    const uint64_t share = whole + (low << (64 - FRACTION_BITS) != 0);
    return share > 0 ? share : 1;
}

/* u in (0, 1], as philox_uniform() in sampling.c. */
static __device__ float draw_uniform(uint64_t seed, uint64_t step) {
    curandStatePhilox4_32_10_t state;
    curand_init(seed, step, 0, &state);
    return (float)curand(&state) * 0x1p-32f + 0x1p-33f;
}

/* ---- the block at work --------------------------------------------------------------------------------- */

/* Call use(id, logit, valid) for ids first .. last and a few beside them, so that all lanes of a warp call
 * together; valid: the id exists. A thread takes 4 logits with a load, VECTORS loads are under way. */
template <int VECTORS, class Use>
static __device__ __forceinline__ void for_each_logit(const Candidates &c, int first, int last, Use use) {
    for (int row = first / 4 * 4; row <= last; row += VECTORS * THREADS * 4) {
        float4 v[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int id = row + (i * THREADS + (int)threadIdx.x) * 4;
            v[i] = make_float4(0, 0, 0, 0);
            if (id + 4 <= c.n) {
                v[i] = __ldg((const float4 *)(c.logits + id));
            } else if (id < c.n) {
                v[i].x = c.logits[id];
                v[i].y = id + 1 < c.n ? c.logits[id + 1] : 0;
                v[i].z = id + 2 < c.n ? c.logits[id + 2] : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int id = row + (i * THREADS + (int)threadIdx.x) * 4;
            use(id, v[i].x, id < c.n);
            use(id + 1, v[i].y, id + 1 < c.n);
            use(id + 2, v[i].z, id + 2 < c.n);
            use(id + 3, v[i].w, id + 3 < c.n);
        }
    }
}

typedef struct {
    unsigned largest, smallest;  // ordered()
    int id;                      // of the largest, the lowest of equals
} Extremes;

static __device__ Extremes find_extremes(Shared &s, const Candidates &c) {
    unsigned largest = 0, smallest = ~0u, id = ~0u;
    for_each_logit<4>(c, 0, c.n - 1, [&](int i, float logit, bool valid) {
        const unsigned order = ordered(logit);
        if (valid && order > largest) {  // a thread's ids ascend: the first of equals stays
            largest = order;
            id = i;
        }
        smallest = valid ? min(smallest, order) : smallest;
    });
    const auto reduce_warp = [&]() {
        const unsigned most = __reduce_max_sync(~0u, largest);
        id = __reduce_min_sync(~0u, largest == most ? id : ~0u);
        largest = most;
        smallest = __reduce_min_sync(~0u, smallest);
    };
    reduce_warp();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) {
        s.warp_largest[warp] = largest;
        s.warp_id[warp] = id;
        s.warp_smallest[warp] = smallest;
    }
    __syncthreads();
    largest = s.warp_largest[lane];
    id = s.warp_id[lane];
    smallest = s.warp_smallest[lane];
    reduce_warp();
    return Extremes{largest, smallest, (int)id};
}

/* What weights are multiplied with: 2^WEIGHT_BITS over their sum, rounded to a power of two; so a rough sum
 * does, if it is not too low. A temperature whose inverse is no float counts as the least that has one: the
 * sum grows. */
static __device__ double weight_scale(Shared &s, const Candidates &c, float temperature) {
    const float largest = (float)c.largest, inverse = 1.0f / fmaxf(temperature, FLT_MIN);
    float sum = 0;
    for_each_logit<2>(c, 0, c.n - 1, [&](int, float logit, bool valid) {
        sum += valid ? __expf((logit - largest) * inverse) : 0.0f;
    });
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
        s.warp_weights[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = warp_sum(s.warp_weights[threadIdx.x % 32]);
    return scalbn(1.0, WEIGHT_BITS - ilogbf(sum));
}

/* Add to a bin; an amount of 0 adds nothing. To be called by whole warps: equal logits, of which there can be
 * many, are added up first, as atomics on one address would have to wait for each other. */
static __device__ __forceinline__ void add_to_bin(Shared &s, unsigned bin, uint64_t amount) {
    const unsigned adding = __ballot_sync(~0u, amount != 0);
    if (adding == 0) {
        return;
    }
    const int leader = __ffs(adding) - 1;
    const unsigned leader_bin = __shfl_sync(~0u, bin, leader);  // by all lanes, so not inside a condition
    if (__all_sync(~0u, amount == 0 || bin == leader_bin)) {
        for (int offset = 16; offset > 0; offset /= 2) {
            amount += __shfl_xor_sync(~0u, amount, offset);
        }
        amount = threadIdx.x % 32 == leader ? amount : 0;
    }
    if (amount != 0) {
        const unsigned low = (unsigned)amount;
        const unsigned carry = atomicAdd(&s.bins.low[bin], low) + low < low;
        const unsigned high = (unsigned)(amount >> 32) + carry;
        if (high != 0) {
            atomicAdd(&s.bins.high[bin], high);
        }
    }
}

static __device__ __forceinline__ uint64_t warp_running_sum(uint64_t v) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const uint64_t lower = __shfl_up_sync(~0u, v, offset);
        v += threadIdx.x % 32 >= offset ? lower : 0;
    }
    return v;
}

/* Find the first bin through which the running sum reaches wanted(total of all bins): s.found and s.before.
 * All additions must be done; on return bins may be overwritten. Returns what was wanted. */
template <class Wanted>
static __device__ uint64_t find_bin(Shared &s, Wanted wanted) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint4 low = ((const uint4 *)s.bins.low)[threadIdx.x];
    const uint4 high = ((const uint4 *)s.bins.high)[threadIdx.x];
    const uint64_t amounts[THREAD_BINS] = {(uint64_t)high.x << 32 | low.x, (uint64_t)high.y << 32 | low.y,
                                           (uint64_t)high.z << 32 | low.z, (uint64_t)high.w << 32 | low.w};
    const uint64_t own = amounts[0] + amounts[1] + amounts[2] + amounts[3];
    uint64_t through = warp_running_sum(own);
    if (lane == 31) {
        s.warp_sums[warp] = through;
    }
    __syncthreads();
    const uint64_t through_warp = warp_running_sum(s.warp_sums[lane]);
    const uint64_t before_warp = __shfl_sync(~0u, through_warp, (warp + 31) % 32);
    through += warp > 0 ? before_warp : 0;
    const uint64_t want = wanted(__shfl_sync(~0u, through_warp, 31));

    uint64_t before = through - own;
    if (before < want && want <= through) {  // true for one thread, as 0 < want <= total
        unsigned i = 0;
#pragma unroll
        for (int b = 0; b < THREAD_BINS - 1; b++) {
            if (i == b && before + amounts[b] < want) {
                before += amounts[b];
                i++;
            }
        }
        s.found = threadIdx.x * THREAD_BINS + i;
        s.before = before;
    }
    __syncthreads();
    return want;
}

enum Order { BY_LOGIT, BY_ID };
enum Measure { BY_COUNT, BY_WEIGHT };

/* The rank, among those from least to most, at which the running sum of amounts from above reaches wanted(sum
 * of all); that must be from 1 to the sum. */
template <Order ORDER, Measure MEASURE, class Wanted>
static __device__ uint64_t select(Shared &s, const Candidates &c, uint64_t least, uint64_t most,
                                  Wanted wanted) {
    // Pass on what lies in the interval with its rank; a warp calls together, amount 0 = not a candidate.
    const auto for_each_candidate = [&](auto use) {
        const int first = ORDER == BY_ID ? (int)(last_id(c) - most) : 0;
        const int last = ORDER == BY_ID ? (int)(last_id(c) - least) : c.n - 1;
        for_each_logit<1>(c, first, last, [&](int id, float logit, bool valid) {
            const uint64_t logit_rank = rank_of(c, logit, id);
            const uint64_t rank = ORDER == BY_ID ? last_id(c) - id : logit_rank;
            const bool in = valid && logit_rank >= c.least && rank >= least && rank <= most;
            use(rank, !in ? 0 : MEASURE == BY_COUNT ? 1 : weight_of(c, logit));
        });
    };

    bool gathered = false;
    Candidate own = {0, 0};
    uint64_t want = 0;
    for (;;) {
        ((uint4 *)s.bins.low)[threadIdx.x] = make_uint4(0, 0, 0, 0);
        ((uint4 *)s.bins.high)[threadIdx.x] = make_uint4(0, 0, 0, 0);
        if (threadIdx.x == 0) {
            s.n_candidates = 0;
        }
        __syncthreads();
        const int bits = 64 - __clzll((long long)(most - least)), shift = max(0, bits - LOG_BINS);
        if (gathered) {
            const bool in = own.rank >= least && own.rank <= most;
            add_to_bin(s, in ? (unsigned)((most - own.rank) >> shift) : 0, in ? own.amount : 0);
        } else {
            for_each_candidate([&](uint64_t rank, uint64_t amount) {
                add_to_bin(s, (unsigned)((most - rank) >> shift), amount);
            });
        }
        __syncthreads();
        want = find_bin(s, [&](uint64_t total) { return want > 0 ? want : wanted(total); });
        want -= s.before;
        most -= (uint64_t)s.found << shift;
        const uint64_t width = (uint64_t)1 << shift;
        least = most - least < width ? least : most - (width - 1);
        if (least == most) {
            return most;
        }
        if (!gathered) {
            for_each_candidate([&](uint64_t rank, uint64_t amount) {
                if (amount != 0) {
                    const int i = atomicAdd(&s.n_candidates, 1);  // their order does not matter
                    if (i < THREADS) {
                        s.candidates[i] = Candidate{rank, amount};
                    }
                }
            });
            __syncthreads();
            gathered = s.n_candidates <= THREADS;
            own = threadIdx.x < s.n_candidates && gathered ? s.candidates[threadIdx.x] : Candidate{0, 0};
            __syncthreads();
        }
    }
}

/* ---- kernel and launcher ------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS, 1)  // 1: aiming at two blocks an SM, ptxas spills
    sample_kernel(DeviceReport *__restrict__ report, const float *__restrict__ logits, int n, int id_bits,
                  SampleParams params, uint64_t step) {
    __shared__ Shared s;
    Candidates c = {logits, n, id_bits};
    if (threadIdx.x == 0) {
        s.u = draw_uniform(params.seed, step);  // read after several barriers
    }

    const Extremes extremes = find_extremes(s, c);
    const bool finite = extremes.largest < ORDERED_INFINITY && extremes.smallest > ORDERED_MINUS_INFINITY;
    if (!finite || params.temperature == 0) {
        if (threadIdx.x == 0) {
            report->token = finite ? extremes.id : -1;
        }
        return;
    }

    // The largest logit is subtracted before dividing, so that no temperature overflows.
    c.largest = logit_of(extremes.largest);
    c.inverse_temperature = 1.0 / params.temperature;
    c.scale = weight_scale(s, c, params.temperature);
    const uint64_t most = (uint64_t)extremes.largest << id_bits | (last_id(c) - extremes.id);
    c.least = (uint64_t)extremes.smallest << id_bits;
    if (params.top_k > 0 && params.top_k < n) {
        c.least =
            select<BY_LOGIT, BY_COUNT>(s, c, c.least, most, [&](uint64_t) { return (uint64_t)params.top_k; });
    }
    if (params.top_p < 1) {
        c.least = select<BY_LOGIT, BY_WEIGHT>(s, c, c.least, most,
                                              [&](uint64_t total) { return share_of(params.top_p, total); });
    }
    const uint64_t drawn = select<BY_ID, BY_WEIGHT>(s, c, last_id(c) - (n - 1), last_id(c),
                                                    [&](uint64_t total) { return share_of(s.u, total); });
    if (threadIdx.x == 0) {
        report->token = (int)(last_id(c) - drawn);
    }
}

void sample_cuda(const CudaLaunch *c, const float *logits, int n, const SampleParams *params, uint64_t step) {
    CHECK(n >= 1 && n <= 1 << MAX_ID_BITS && (uintptr_t)logits % sizeof(float4) == 0);
    // greedy looks at nothing but the logits
    CHECK(params->temperature == 0 ||
          (params->temperature > 0 && params->top_p > 0 && params->top_p <= 1 && params->top_k >= 0));
    int id_bits = 0;
    while (n > 1 << id_bits) {
        id_bits++;
    }
    sample_kernel<<<1, THREADS, 0, c->stream>>>(c->report, logits, n, id_bits, *params, step);
    CUDA_CHECK_LAUNCH(c->stream);
}
