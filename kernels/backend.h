/* backend.h: the operations that a forward pass is made of, and the memory they work on.
 *
 * A backend is one table of functions. The forward pass (model/model.c) is written once over it. Every
 * operation's CPU version is the reference for its CUDA version.
 *
 * Conventions: n = number of tokens (1 in decode); activations are row-major (n, width); inputs of
 * products are fp16, rounded once where they are produced; the residual stream and all sums are fp32.
 * Pointers are to the backend's memory. Operations run in the order of the calls; finish() waits. */
#ifndef SPDP_BACKEND_H
#define SPDP_BACKEND_H

#include "matrix.h"
#include "random_weights.h"
#include "sampling.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the products of decode steps (n = 1) had to touch, summed per site. */
typedef struct {
    uint64_t elements;          // rows * cols of Tiled-CBC matrices
    uint64_t active_elements;   // ... in columns that were not skipped
    uint64_t active_nonzeros;   // nonzeros in those columns
    uint64_t bytes;             // weight bytes needed, metadata included; dense matrices too
} ProductStats;

/* Sizes that the attention operations share. */
typedef struct {
    int n_heads, n_kv_heads, head_dim;
    int seq_len;  // positions that a cache has room for
} AttentionShape;

typedef struct Backend Backend;
struct Backend {
    const char *name;                  // "cpu"
    char device[128];                  // what it runs on, for people
    int max_tokens;                    // largest n it wants in one call (prefill chunk)
    bool own_memory;                   // apart from the process's, so that upload() copies
    bool records;                      // does begin_step() ever replay?
    ProductStats stats[N_SITES];       // brought up to date by finish(), reset by the caller
    void *ctx;                         // the backend's own

    /* Memory. alloc gives zeros, NULL when there is no room. upload makes host bytes (which stay mapped
     * and unchanged while the backend lives) readable for operations until the backend is freed; NULL when
     * there is no room. write and read copy between the host and the backend's memory; read waits. */
    void *(*alloc)(Backend *be, size_t bytes);
    void (*release)(Backend *be, void *p);
    const void *(*upload)(Backend *be, const void *host, size_t bytes);
    void (*write)(Backend *be, void *to, const void *host, size_t bytes);
    void (*read)(Backend *be, void *host, const void *from, size_t bytes);

    /* Bytes that can be had from now on. */
    size_t (*memory_free)(Backend *be);

    /* Bytes that products of n tokens with a matrix need on top, taken when first needed and kept for all.
     *   w       its format, rows and cols count
     *   swiglu  for matmul_swiglu? */
    size_t (*product_bytes)(Backend *be, const Matrix *w, int n, bool swiglu);

    /* Make a matrix of random weights, readable until the backend is freed.
     *   w        format, rows and cols are given, storage is filled in
     *   nnz      its nonzeros
     *   weights  values in the backend's memory
     * false: no room. Every backend makes the same matrix. */
    bool (*random_matrix)(Backend *be, Matrix *w, size_t *nnz, const RandomWeights *weights);

    /* Energy that the device has taken since some moment, joules; NAN where it cannot be measured. */
    double (*energy_joules)(Backend *be);

    /* Clock of the device's cores at this moment, MHz; of a CPU the mean over all cores of the machine, idle ones too.
     * NAN where it is not known. */
    double (*clock_mhz)(Backend *be);

    /* GB/s of a streaming read of more memory than any cache holds, the best of several; NAN if there is no room. */
    double (*read_ceiling)(Backend *be);

    /* Around the operations of one forward pass. repeats: they are the same, on the same pointers, in every step
     * that says so (what the pointers point to may differ). begin_step returns false when the backend has recorded
     * such a step and replays it: the operations need not be called. */
    bool (*begin_step)(Backend *be, bool repeats);
    void (*end_step)(Backend *be);

    /* out[i] = row ids[i] of table.   out (n, cols) fp32;  ids (n) */
    void (*embed)(Backend *be, float *out, const Matrix *table, const int *ids, int n);

    /* out = x / sqrt(mean(x^2) + eps) * weight.   out (n, dim) fp16;  x (n, dim) fp32;  weight (dim) */
    void (*rmsnorm)(Backend *be, fp16 *out, const float *x, const fp16 *weight, int n, int dim, float eps);

    /* out = W x.   out (n, rows) fp32;  x (n, cols) fp16.
     * threshold: NULL, or one float: elements with |x_k| <= *threshold count as zero where W is
     * Tiled-CBC. Exact zeros are skipped anyway. An x that is not finite is remembered for finish(). */
    void (*matmul)(Backend *be, float *out, const Matrix *w, const fp16 *x, int n, const float *threshold);

    /* out += W x: the same, added to the residual stream. */
    void (*matmul_add)(Backend *be, float *out, const Matrix *w, const fp16 *x, int n,
                       const float *threshold);

    /* out_i = silu(y_2i) * y_2i+1 with y = W x, gate and up interleaved.   out (n, rows / 2) fp16 */
    void (*matmul_swiglu)(Backend *be, fp16 *out, const Matrix *w, const fp16 *x, int n,
                          const float *threshold);

    /* Rotate q and k by position, append k and v to one layer's cache, then causal attention of tokens
     * *pos .. *pos + n - 1 over positions 0 .. own.
     *   out      (n, n_heads * head_dim) fp16
     *   q        (n, n_heads * head_dim) fp16, work space: undefined afterwards
     *   k_cache, v_cache  (n_kv_heads, seq_len, head_dim) fp16; positions *pos .. *pos + n - 1 are written
     *   qkv      (n, (n_heads + 2 n_kv_heads) * head_dim) fp32
     *   rope     (seq_len, head_dim) fp32: cos, sin of pair i at [2i], [2i + 1]; pairs are adjacent
     *   pos      one int: position of the first token */
    void (*attention)(Backend *be, fp16 *out, fp16 *q, fp16 *k_cache, fp16 *v_cache, const float *qkv,
                      const float *rope, const AttentionShape *shape, const int *pos, int n);

    /* Choose a token by sample_token() from one row of logits (n): finish(), then ERR_NUMBER if a logit is
     * not finite. */
    int (*sample)(Backend *be, int *id, const float *logits, int n, const SampleParams *params, uint64_t step,
                  Error *err);

    /* Wait for everything and report the first input of a product that was not finite since the last call:
     * ERR_NUMBER, naming layer and site. */
    int (*finish)(Backend *be, Error *err);

    void (*free)(Backend *be);  // releases be itself; NULL is not allowed
};

/* ERR_NUMBER with the words that every backend uses. */
int input_fault(int layer, Site site, Error *err);
int logit_fault(Error *err);

/* The CPU backend.
 *   n_threads  0 = one per physical core that this process may use
 *   isa        NULL = the best this machine runs; or "avx512vbmi2", "avx512", "avx2", "portable"
 * Returns 0, ERR_USAGE (no such instruction set in this build or machine) or ERR_MEMORY. */
int backend_cpu(Backend **be, int n_threads, const char *isa, Error *err);

/* The CUDA backend on a device of compute capability 8.0 or more.
 *   graphs  record the decode step once and replay it; false launches every kernel of every step
 * Returns 0; ERR_OPEN where there is no usable driver, device or cuBLAS; ERR_USAGE (no such device, no CUDA in this
 * build); ERR_MEMORY.
 * Failures after that are faults of the device or ours: the program ends with a message. */
int backend_cuda(Backend **be, int device, bool graphs, Error *err);

/* A backend by name: "cpu", "cuda", or "auto": CUDA where it is built in and works, else the CPU.
 *   device, graphs   for CUDA          n_threads, isa   for the CPU
 *   note    with "auto": why CUDA is not used, note->code 0 if there is nothing to say. May be NULL. */
int backend_open(Backend **be, const char *name, int device, bool graphs, int n_threads, const char *isa, Error *note,
                 Error *err);

#ifdef __cplusplus
}
#endif
#endif
