/* Inner products of fp32 queries with keys of any stored type, and the order of hits.

   Compiled per DIM, LANES, KEY_TYPE and VALUE_TYPE. LANES is the widest vector width of the processor
   that divides DIM; KEY_TYPE is the type of compared keys, VALUE_TYPE that of exact keys and values. A
   key's id is its row number, so one copy of the keys serves all indexes over them.
   `float16.h` stands before this text. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) || defined(__i386__) /* compilers widen into the longest vectors by halves */
#include <immintrin.h>
#endif

enum { FLOAT32, BFLOAT16, FLOAT16, INT8 }; /* int8: times the scale of its key */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
enum { VECS = DIM / LANES };

typedef struct {
    const void *vectors;
    const float *scales;
    int64_t count, stride;
    /* the originals of copied keys, of VALUE_TYPE; NULL otherwise */
    const void *exact;
    int64_t exact_stride;
} Keys;

typedef struct {
    float score;
    int32_t id;
} Hit;

/* `type` is a compile-time constant here and below. */
#define SIZE(type) ((type) == FLOAT32 ? 4 : (type) == INT8 ? 1 : 2)

/* The address of number n of an array. */
INLINE const char *number(int type, const void *first, int64_t n) {
    return (const char *)first + n * SIZE(type);
}

/* LANES numbers from number n on. */
INLINE vec load_as(int type, const char *vector, int64_t n) {
    const char *p = number(type, vector, n);
#if LANES == 16 && defined(__AVX512F__)
    if (type == BFLOAT16)
        return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
    if (type == FLOAT16) return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
    if (type == INT8) return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
    typedef int8_t bytes_t __attribute__((vector_size(LANES)));
    typedef uint32_t words_t __attribute__((vector_size(4 * LANES)));
    typedef int32_t ints_t __attribute__((vector_size(4 * LANES)));
    float16_lanes halves;
    bytes_t bytes;
    if (type == BFLOAT16) {
        memcpy(&halves, p, sizeof halves);
        return (vec)(__builtin_convertvector(halves, words_t) << 16);
    }
    if (type == FLOAT16) {
        memcpy(&halves, p, sizeof halves);
        return widen_float16_lanes(halves);
    }
    if (type == INT8) {
        memcpy(&bytes, p, sizeof bytes);
        return __builtin_convertvector(__builtin_convertvector(bytes, ints_t), vec);
    }
#endif
    vec wide;
    memcpy(&wide, p, sizeof wide);
    return wide;
}

static inline vec load_floats(const float *p) {
    vec wide;
    memcpy(&wide, p, sizeof wide);
    return wide;
}

/* The sum of the lanes, by halves of halves. */
static inline float sum_vec(vec x) {
#if LANES == 16 && defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#elif LANES == 8
    typedef float quarter __attribute__((vector_size(16)));
    quarter a, b;
    memcpy(&a, &x, sizeof a);
    memcpy(&b, (char *)&x + sizeof a, sizeof b);
    a += b;
    return (a[0] + a[2]) + (a[1] + a[3]);
#else
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

INLINE const char *key_as(int type, const Keys *keys, int64_t ordinal) {
    return number(type, keys->vectors, ordinal * keys->stride);
}

static inline float score_floats(const float *query, const float *vector) {
    vec sum = load_floats(query) * load_floats(vector);
    for (int i = 1; i < VECS; i++) sum += load_floats(query + i * LANES) * load_floats(vector + i * LANES);
    return sum_vec(sum);
}

INLINE float score_as(int type, const float *query, const char *key) {
#if LANES != 16 || !defined(__AVX512F__)
    if (type == INT8) { /* compilers widen bytes better in a plain loop */
        float score = 0.0f;
#pragma omp simd reduction(+ : score)
        for (int i = 0; i < DIM; i++) score += query[i] * (float)((const int8_t *)key)[i];
        return score;
    }
#endif
    vec sum = load_floats(query) * load_as(type, key, 0);
    for (int i = 1; i < VECS; i++) sum += load_floats(query + i * LANES) * load_as(type, key, i * LANES);
    return sum_vec(sum);
}

static inline float score_key(const Keys *keys, const float *query, int64_t ordinal) {
    float score = score_as(KEY_TYPE, query, key_as(KEY_TYPE, keys, ordinal));
    return keys->scales ? score * keys->scales[ordinal] : score;
}

/* The original of a copied key. */
static inline const char *exact_key(const Keys *keys, int64_t ordinal) {
    return number(VALUE_TYPE, keys->exact, ordinal * keys->exact_stride);
}

/* The score of a key, by its original if it is a copy. */
static inline float score_exactly(const Keys *keys, const float *query, int64_t ordinal) {
    return keys->exact ? score_as(VALUE_TYPE, query, exact_key(keys, ordinal)) : score_key(keys, query, ordinal);
}

INLINE void fetch_lines(const char *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

static inline void fetch_key(const Keys *keys, int64_t ordinal) {
    fetch_lines(key_as(KEY_TYPE, keys, ordinal), DIM * SIZE(KEY_TYPE));
    if (keys->scales) __builtin_prefetch(keys->scales + ordinal);
}

static inline void fetch_value(const char *value) {
    fetch_lines(value, DIM * SIZE(VALUE_TYPE));
}

static inline void fetch_exactly(const Keys *keys, int64_t ordinal) {
    if (keys->exact) fetch_value(exact_key(keys, ordinal));
    else fetch_key(keys, ordinal);
}

static inline void widen(const Keys *keys, int64_t ordinal, float *out) {
    const char *key = key_as(KEY_TYPE, keys, ordinal);
    float scale = keys->scales ? keys->scales[ordinal] : 1.0f;
    for (int i = 0; i < VECS; i++) {
        vec wide = load_as(KEY_TYPE, key, i * LANES) * scale;
        memcpy(out + i * LANES, &wide, sizeof wide);
    }
}

/* Higher scores first, then lower ids, so that hits do not depend on the scan order. */
static inline int before(Hit a, Hit b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

/* A heap of the best hits, with the worst of them on top. */
typedef struct {
    Hit *hits;
    int64_t count, capacity;
} Best;

static inline void sink_top(Hit *hits, int64_t count, Hit hit) {
    int64_t at = 0;
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && before(hits[child], hits[child + 1])) child++;
        if (before(hits[child], hit)) break;
        hits[at] = hits[child];
        at = child;
    }
    hits[at] = hit;
}

static inline void offer(Best *best, Hit hit) {
    if (best->count == best->capacity) {
        if (best->capacity && before(hit, best->hits[0])) sink_top(best->hits, best->count, hit);
        return;
    }
    int64_t at = best->count++;
    while (at) {
        int64_t parent = (at - 1) / 2;
        if (before(hit, best->hits[parent])) break;
        best->hits[at] = best->hits[parent];
        at = parent;
    }
    best->hits[at] = hit;
}

/* Reverse sorted hits. */
static inline void reverse(Best *best) {
    for (int64_t n = 0; n < best->count / 2; n++) {
        Hit hit = best->hits[n];
        best->hits[n] = best->hits[best->count - 1 - n];
        best->hits[best->count - 1 - n] = hit;
    }
}

/* Sort a heap, best hits first. */
static inline void sort_heap(Best *best) {
    for (int64_t left = best->count - 1; left > 0; left--) {
        Hit last = best->hits[left];
        best->hits[left] = best->hits[0];
        sink_top(best->hits, left, last);
    }
}
