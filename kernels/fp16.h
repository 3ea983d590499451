/* fp16.h: IEEE 754 binary16 as bits. The CPU kernels convert with vector instructions where they
 * exist; these two functions are the definition they are tested against. */
#ifndef SPDP_FP16_H
#define SPDP_FP16_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t fp16;  // sign 1 bit, exponent 5 bits (bias 15), fraction 10 bits

#define FP16_MAX 65504.0f
#define FP16_ONE 0x3c00

/* Plus and minus zero both count as zero. */
static inline bool fp16_is_zero(fp16 h) { return (h & 0x7fff) == 0; }
static inline bool fp16_is_finite(fp16 h) { return (h & 0x7c00) != 0x7c00; }

static inline float fp16_to_float(fp16 h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    const uint32_t magnitude = h & 0x7fff;
    uint32_t bits;
    if (magnitude >= 0x7c00) {  // infinity, NaN
        bits = 0x7f800000u | (magnitude & 0x3ff) << 13;
    } else if (magnitude >= 0x400) {  // normal: shift the fraction, rebias the exponent by 127 - 15
        bits = (magnitude << 13) + (112u << 23);
    } else {  // subnormal: magnitude * 2^-24, exact in a float
        const float f = (float)magnitude * 0x1p-24f;
        memcpy(&bits, &f, sizeof bits);
    }
    bits |= sign;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Round to nearest, ties to even; beyond FP16_MAX (after rounding) to infinity; NaN stays NaN. */
static inline fp16 fp16_from_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return (fp16)(sign | 0x7e00);
    }
    if (magnitude >= 0x47800000) {  // 2^16 and more
        return (fp16)(sign | 0x7c00);
    }
    if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves round(|f| * 2^24) in the fraction
        float small;
        memcpy(&small, &magnitude, sizeof small);
        small += 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &small, sizeof rounded);
        return (fp16)(sign | (rounded - 0x3f000000));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return (fp16)(sign | ((magnitude - (112u << 23) + 0xfff + odd) >> 13));
}

#endif
