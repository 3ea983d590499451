/* simd.h: the few vector operations that cpu_kernels.c is written in, for the instruction set that the
 * including file is compiled for. `vf` holds VW floats.
 *
 * Undoing a bitmap is the one operation that differs in kind: `expand_fp16(values, bits)` puts the next
 * popcount(bits) values into the lanes whose bit is set, zero into the others, for VW lanes. It may read up to
 * 64 bytes from `values` on, whatever the bits; what is read and not selected never reaches the result. */
#ifndef SPDP_SIMD_H
#define SPDP_SIMD_H

#include "fp16.h"

#if defined(__AVX512F__)

#include <immintrin.h>
#define VW 16
typedef __m512 vf;
static inline vf vf_zero(void) { return _mm512_setzero_ps(); }
static inline vf vf_set(float a) { return _mm512_set1_ps(a); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline float vf_sum(vf a) { return _mm512_reduce_add_ps(a); }
static inline vf vf_load_fp16(const fp16 *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
static inline void vf_store_fp16(fp16 *p, vf a) {
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where one is NaN
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vf_scale_by_power(vf a, vf n) { return _mm512_scalef_ps(a, n); }
#ifdef __AVX512VBMI2__
static inline vf expand_fp16(const fp16 *values, uint64_t bits) {
    return _mm512_cvtph_ps(_mm256_maskz_expandloadu_epi16((__mmask16)bits, values));
}
#else
static inline vf expand_fp16(const fp16 *values, uint64_t bits) {
    return _mm512_maskz_expand_ps((__mmask16)bits, vf_load_fp16(values));
}
#endif

#elif defined(__AVX2__)

#include <immintrin.h>
#define VW 8
typedef __m256 vf;
static inline vf vf_zero(void) { return _mm256_setzero_ps(); }
static inline vf vf_set(float a) { return _mm256_set1_ps(a); }
static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline float vf_sum(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline vf vf_load_fp16(const fp16 *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
static inline void vf_store_fp16(fp16 *p, vf a) {
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vf_scale_by_power(vf a, vf n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

/* For each byte of a bitmap, the pshufb selector that moves packed 16-bit values to their lanes; 0x80
 * gives zero. Nibbles: lane i of byte b takes value popcount(b & ((1 << i) - 1)), i.e. bytes 2v, 2v + 1. */
#define LANE(b, i)                                                                                    \
    ((b) >> (i) & 1 ? (uint16_t)((2 * __builtin_popcount((b) & ((1u << (i)) - 1))) * 0x0101u + 0x0100u) \
                    : (uint16_t)0x8080u)
#define BYTE(b) {LANE(b, 0), LANE(b, 1), LANE(b, 2), LANE(b, 3), LANE(b, 4), LANE(b, 5), LANE(b, 6), LANE(b, 7)}
#define BYTES4(b) BYTE(b), BYTE((b) + 1), BYTE((b) + 2), BYTE((b) + 3)
#define BYTES16(b) BYTES4(b), BYTES4((b) + 4), BYTES4((b) + 8), BYTES4((b) + 12)
#define BYTES64(b) BYTES16(b), BYTES16((b) + 16), BYTES16((b) + 32), BYTES16((b) + 48)
static const uint16_t expand_selector[256][8] __attribute__((aligned(64))) = {BYTES64(0u), BYTES64(64u),
                                                                               BYTES64(128u), BYTES64(192u)};
#undef LANE
#undef BYTE
#undef BYTES4
#undef BYTES16
#undef BYTES64

static inline vf expand_fp16(const fp16 *values, uint64_t bits) {
    const __m128i selector = _mm_load_si128((const void *)expand_selector[bits & 0xff]);
    return _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_loadu_si128((const void *)values), selector));
}

#else  // portable: GCC's vector types, four lanes, which every target has or the compiler takes apart

#define VW 4
typedef float vf __attribute__((vector_size(16)));
typedef uint32_t vi __attribute__((vector_size(16)));
static inline vf vf_zero(void) { return (vf){0}; }
static inline vf vf_set(float a) { return (vf){a, a, a, a}; }
static inline vf vf_load(const float *p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline void vf_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
static inline vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
static inline float vf_sum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
static inline vf vf_max(vf a, vf b) {
    const vi more = (vi)(a > b);
    return (vf)(((vi)a & more) | ((vi)b & ~more));
}
static inline vf vf_div(vf a, vf b) { return a / b; }
#define ROUND_MAGIC 0x1.8p23f  // |a| < 2^22: adding it leaves no fraction, and the integer in the low bits
static inline vf vf_round(vf a) { return (a + vf_set(ROUND_MAGIC)) - vf_set(ROUND_MAGIC); }
static inline vf vf_scale_by_power(vf a, vf n) {
    const vi exponent = (vi)(n + vf_set(ROUND_MAGIC)) - (vi)vf_set(ROUND_MAGIC) + 127;
    return a * (vf)(exponent << 23);
}
static inline vf vf_load_fp16(const fp16 *p) {
    return (vf){fp16_to_float(p[0]), fp16_to_float(p[1]), fp16_to_float(p[2]), fp16_to_float(p[3])};
}
static inline void vf_store_fp16(fp16 *p, vf a) {
    for (int i = 0; i < VW; i++) {
        p[i] = fp16_from_float(a[i]);
    }
}
static inline vf expand_fp16(const fp16 *values, uint64_t bits) {
    vf a = {0};
    for (int i = 0; i < VW; i++) {
        if (bits >> i & 1) {
            a[i] = fp16_to_float(*values++);
        }
    }
    return a;
}

#endif

/* e^a for a <= 0, relative error below 4e-7; below -87, where floats end, about 1e-38; NaN stays NaN.
 * e^a = 2^n e^f with f in [-ln 2 / 2, ln 2 / 2], and e^f by its series to f^6, whose next term is below 1.2e-7. */
static inline vf vf_exp(vf a) {
    a = vf_max(vf_set(-87.0f), a);
    const vf n = vf_round(vf_mul(a, vf_set(1.44269504f)));
    // ln 2 in two parts, the first short enough for n times it to be exact
    const vf f = vf_fma(n, vf_set(-1.42860682e-6f), vf_fma(n, vf_set(-0.69314575f), a));
    vf e = vf_set(1.0f / 720);
    e = vf_fma(e, f, vf_set(1.0f / 120));
    e = vf_fma(e, f, vf_set(1.0f / 24));
    e = vf_fma(e, f, vf_set(1.0f / 6));
    e = vf_fma(e, f, vf_set(0.5f));
    e = vf_fma(e, f, vf_set(1.0f));
    e = vf_fma(e, f, vf_set(1.0f));
    return vf_scale_by_power(e, n);
}

#endif
