#include "sampling.h"

#include <math.h>
#include <string.h>

void philox4x32_10(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]) {
    uint32_t x0 = counter[0], x1 = counter[1], x2 = counter[2], x3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = (uint64_t)0xd2511f53 * x0;
        const uint64_t product1 = (uint64_t)0xcd9e8d57 * x2;
        x0 = (uint32_t)(product1 >> 32) ^ x1 ^ k0;
        x1 = (uint32_t)product1;
        x2 = (uint32_t)(product0 >> 32) ^ x3 ^ k1;
        x3 = (uint32_t)product0;
        k0 += 0x9e3779b9;
        k1 += 0xbb67ae85;
    }
    out[0] = x0;
    out[1] = x1;
    out[2] = x2;
    out[3] = x3;
}

float philox_uniform(uint64_t seed, uint64_t step) {
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {0, 0, (uint32_t)step, (uint32_t)(step >> 32)};
    uint32_t x[4];
    philox4x32_10(x, counter, key);
    return (float)x[0] * 0x1p-32f + 0x1p-33f;
}

/* One integer that orders candidates: by logit, then the lower id is larger. All differ. */
static uint64_t rank_of(float logit, int id) {
    const float f = logit + 0.0f;  // -0 becomes +0, its equal
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)ordered << 32 | (UINT32_MAX - (uint32_t)id);
}

static int rank_id(uint64_t rank) { return (int)(UINT32_MAX - (uint32_t)rank); }

/* A heap gives ranks from the largest down, and costs only as much as what is taken from it. */
static void heap_sift(uint64_t *heap, size_t n, size_t i) {
    const uint64_t moving = heap[i];
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        child += child + 1 < n && heap[child + 1] > heap[child];
        if (heap[child] <= moving) {
            break;
        }
        heap[i] = heap[child];
    }
    heap[i] = moving;
}

static void heap_build(uint64_t *heap, size_t n) {
    for (size_t i = n / 2; i-- > 0;) {
        heap_sift(heap, n, i);
    }
}

static uint64_t heap_pop(uint64_t *heap, size_t *n) {
    const uint64_t top = heap[0];
    heap[0] = heap[--*n];
    if (*n > 0) {
        heap_sift(heap, *n, 0);
    }
    return top;
}

/* From here on a candidate is its weight, exp((logit - largest) / temperature): softmax without its
 * denominator, as every later step compares with sums of weights. Weight 0 is a candidate that is out. */

static void drop_below(double *weight, const float *logits, int n, uint64_t least) {
    for (int i = 0; i < n; i++) {
        if (rank_of(logits[i], i) < least) {
            weight[i] = 0;
        }
    }
}

static double sum_weights(const double *weight, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += weight[i];
    }
    return sum;
}

static void keep_top_k(double *weight, const float *logits, int n, int k, uint64_t *heap) {
    for (int i = 0; i < n; i++) {
        heap[i] = rank_of(logits[i], i);
    }
    size_t left = (size_t)n;
    heap_build(heap, left);
    uint64_t least = 0;
    for (int i = 0; i < k; i++) {
        least = heap_pop(heap, &left);
    }
    drop_below(weight, logits, n, least);
}

/* Only weights of at least cutoff enter the heap. The others, fewer than n, sum to less than half of what
 * top_p leaves out, so those in the heap reach top_p without them; the other half is far more than
 * rounding of the sums can take (1 - top_p >= 2^-24 against n * 2^-53). */
static void keep_top_p(double *weight, const float *logits, int n, double top_p, uint64_t *heap) {
    const double total = sum_weights(weight, n);
    const double cutoff = (1 - top_p) * total / (2.0 * n);
    size_t left = 0;
    for (int i = 0; i < n; i++) {
        if (weight[i] >= cutoff) {
            heap[left++] = rank_of(logits[i], i);
        }
    }
    heap_build(heap, left);
    const double enough = top_p * total;
    uint64_t least = 0;
    for (double sum = 0; sum < enough && left > 0;) {
        least = heap_pop(heap, &left);
        sum += weight[rank_id(least)];
    }
    drop_below(weight, logits, n, least);
}

/* The first id whose cumulative weight reaches u of the total. The last one that raises the sum reaches all
 * of it, as the total is the same sum, so u = 1 ends there. */
static int invert(const double *weight, int n, double u) {
    const double target = u * sum_weights(weight, n);
    int i = 0;
    for (double sum = weight[0]; sum < target; sum += weight[i]) {
        i++;
    }
    return i;
}

static int largest(const float *logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) {
        if (logits[i] > logits[best]) {
            best = i;
        }
    }
    return best;
}

size_t sample_workspace(int n) { return (size_t)n * (sizeof(double) + sizeof(uint64_t)); }

int sample_token(const float *logits, int n, const SampleParams *params, uint64_t step, void *workspace) {
    const int best = largest(logits, n);
    if (params->temperature == 0) {
        return best;
    }
    double *weight = workspace;
    uint64_t *heap = (uint64_t *)(weight + n);
    // The largest logit is subtracted before dividing, so that no temperature overflows.
    for (int i = 0; i < n; i++) {
        weight[i] = exp(((double)logits[i] - (double)logits[best]) / (double)params->temperature);
    }
    if (params->top_k > 0 && params->top_k < n) {
        keep_top_k(weight, logits, n, params->top_k, heap);
    }
    if (params->top_p < 1) {
        keep_top_p(weight, logits, n, (double)params->top_p, heap);
    }
    return invert(weight, n, (double)philox_uniform(params->seed, step));
}
