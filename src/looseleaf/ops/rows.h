/* Rows of activations and vectors of floats: types, loads, rounding and fused products.

   The build defines ROW_TYPE (0 fp32, 1 bfloat16, 2 float16) and LANES, the floats of a vector. `float16.h`
   precedes this text. Fused products are explicit, so that sums have one order in every copy of a loop. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if ROW_TYPE == 0
typedef float row_t;
static inline float load_row(row_t x) { return x; }
static inline row_t round_row(float x) { return x; }
#elif ROW_TYPE == 1
typedef uint16_t row_t; /* bfloat16: the upper half of a float */
static inline float load_row(row_t x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}
static inline row_t round_row(float x) {
    union { float value; uint32_t bits; } u = {x};
    if (x != x) return (row_t)((u.bits >> 16) | 64); /* keeps NaN */
    return (row_t)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16);
}
#else
typedef float16_bits row_t;
static inline float load_row(row_t x) { return widen_float16(x); }
static inline row_t round_row(float x) { return round_float16(x); }
#endif

/* A vector of LANES floats. */
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

/* x * y + z, rounded once where the processor can */
#if defined(__FMA__) || defined(__aarch64__)
static inline float fused(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
#else
static inline float fused(float x, float y, float z) { return x * y + z; }
#endif

static inline __attribute__((always_inline)) vec fused_vec(vec x, vec y, vec z) {
#if LANES == 16 && defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif LANES == 8 && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif LANES == 4 && defined(__FMA__)
    return (vec)_mm_fmadd_ps((__m128)x, (__m128)y, (__m128)z);
#elif LANES == 4 && defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
    for (int l = 0; l < LANES; l++) z[l] = fused(x[l], y[l], z[l]);
    return z;
#endif
}

static inline __attribute__((always_inline)) vec broadcast(float x) { return x - (vec){0}; }

/* 2^x for x <= 0: relative error below 3e-7, exactly 0 far below */
static inline float exp2_fast(float x) {
    float clamped = x < -126.0f ? -126.0f : x;
    float whole = rintf(clamped), f = clamped - whole;
    float p = 1.5403530e-4f;
    p = fused(p, f, 1.3333558e-3f);
    p = fused(p, f, 9.6181291e-3f);
    p = fused(p, f, 5.5504109e-2f);
    p = fused(p, f, 2.4022651e-1f);
    p = fused(p, f, 6.9314718e-1f);
    p = fused(p, f, 1.0f);
    union { int32_t bits; float value; } scale = {((int32_t)whole + 127) << 23};
    return x < -126.0f ? 0.0f : p * scale.value;
}
