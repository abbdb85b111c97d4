/* IEEE 754 half-precision floats: conversion from and to fp32.

   On x86, gcc before 12 and clang before 15 lack the type; bit operations then give the same results.
   `read_source` puts this header before C files; the build defines LANES. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef HAS_FLOAT16
#if defined(__aarch64__)
#define HAS_FLOAT16 1
#elif !defined(__x86_64__)
#define HAS_FLOAT16 0
#elif defined(__clang__)
#define HAS_FLOAT16 (__clang_major__ >= 15)
#else
#define HAS_FLOAT16 (__GNUC__ >= 12)
#endif
#endif

typedef uint16_t float16_bits; /* the bits in memory */
typedef uint16_t float16_lanes __attribute__((vector_size(2 * LANES)));
typedef uint32_t word_lanes __attribute__((vector_size(4 * LANES)));
typedef float float_lanes __attribute__((vector_size(4 * LANES)));

static inline float widen_float16(float16_bits x) {
#if HAS_FLOAT16
    _Float16 half;
    memcpy(&half, &x, sizeof half);
    return (float)half;
#else
    /* exponent and mantissa are the upper bits of a float's, 112 powers of two too low */
    union { uint32_t bits; float value; } word = {(uint32_t)(x & 0x7fff) << 13};
    word.value *= 0x1p112f;
    if ((x & 0x7c00) == 0x7c00) word.bits |= 0x7f800000u;
    word.bits |= (uint32_t)(x & 0x8000) << 16;
    return word.value;
#endif
}

static inline __attribute__((always_inline)) float_lanes widen_float16_lanes(float16_lanes x) {
#if HAS_FLOAT16
    typedef _Float16 halves __attribute__((vector_size(2 * LANES)));
    return __builtin_convertvector((halves)x, float_lanes);
#else
    word_lanes wide = __builtin_convertvector(x, word_lanes);
    word_lanes bits = (word_lanes)((float_lanes)((wide & 0x7fffu) << 13) * 0x1p112f);
    word_lanes infinite = (word_lanes)((wide & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (float_lanes)(bits | infinite | (wide & 0x8000u) << 16);
#endif
}

static inline float16_bits round_float16(float x) {
#if HAS_FLOAT16
    _Float16 half = (_Float16)x;
    float16_bits bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
#else
    float size = fabsf(x);
    /* below 2^-14, halves are multiples of 2^-24, as are floats near 1/2 */
    int is_subnormal = size < 0x1p-14f;
    union { float value; uint32_t bits; } word = {is_subnormal ? size + 0.5f : size}, half = {0.5f};
    uint32_t code = is_subnormal ? word.bits - half.bits
                                 : ((word.bits + 0xfff + ((word.bits >> 13) & 1)) >> 13) - (112u << 10);
    if (size >= 65520.0f) code = 0x7c00;
    if (x != x) code = 0x7e00;
    return (float16_bits)(code | (signbit(x) ? 0x8000 : 0));
#endif
}
