/* Inner products of fp32 queries with keys of any stored type, and how hits are ordered.

   Compiled for one DIM, KEY_TYPE and LANES, the widest vector that the processor has and DIM is a
   multiple of. A key that is named by its ordinal lies at row `rows[ordinal]` of `vectors`, or at
   `ordinal` itself where there is no table: so one copy of the keys serves every index over them. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if KEY_TYPE == 0
typedef float stored_t;
#elif KEY_TYPE == 1
typedef uint16_t stored_t; /* bfloat16: the upper half of a float */
#elif KEY_TYPE == 2
typedef _Float16 stored_t;
#else
typedef int8_t stored_t; /* times the scale of its key */
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
enum { VECS = DIM / LANES };

typedef struct {
    const stored_t *vectors;
    const float *scales;
    const int64_t *rows;
    int64_t count, stride;
} Keys;

typedef struct {
    float score;
    int32_t id;
} Hit;

static inline vec load_key(const stored_t *p) {
#if KEY_TYPE == 0
    vec wide;
    memcpy(&wide, p, sizeof wide);
    return wide;
#elif KEY_TYPE == 1
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    typedef uint32_t words __attribute__((vector_size(4 * LANES)));
    halves narrow;
    memcpy(&narrow, p, sizeof narrow);
    return (vec)(__builtin_convertvector(narrow, words) << 16);
#else
    typedef stored_t narrow_t __attribute__((vector_size(sizeof(stored_t) * LANES)));
    narrow_t narrow;
    memcpy(&narrow, p, sizeof narrow);
#if KEY_TYPE == 3
    typedef int32_t words __attribute__((vector_size(4 * LANES)));
    return __builtin_convertvector(__builtin_convertvector(narrow, words), vec);
#else
    return __builtin_convertvector(narrow, vec);
#endif
#endif
}

static inline vec load_floats(const float *p) {
    vec wide;
    memcpy(&wide, p, sizeof wide);
    return wide;
}

/* The sum of the lanes, by halves of halves. */
static inline float sum_vec(vec x) {
#if LANES == 16
    typedef float half __attribute__((vector_size(32)));
    half low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (char *)&x + sizeof low, sizeof high);
    low += high;
#elif LANES == 8
    vec low = x;
#endif
#if LANES >= 8
    typedef float quarter __attribute__((vector_size(16)));
    quarter a, b;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, (char *)&low + sizeof a, sizeof b);
    a += b;
    return (a[0] + a[2]) + (a[1] + a[3]);
#else
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

static inline int64_t row_of(const Keys *keys, int64_t ordinal) {
    return keys->rows ? keys->rows[ordinal] : ordinal;
}

static inline const stored_t *key_at(const Keys *keys, int64_t ordinal) {
    return keys->vectors + row_of(keys, ordinal) * keys->stride;
}

static inline float score_floats(const float *query, const float *vector) {
    vec sum = load_floats(query) * load_floats(vector);
    for (int i = 1; i < VECS; i++) sum += load_floats(query + i * LANES) * load_floats(vector + i * LANES);
    return sum_vec(sum);
}

static inline float score_key(const Keys *keys, const float *query, int64_t ordinal) {
    const stored_t *key = key_at(keys, ordinal);
#if KEY_TYPE == 3 /* compilers widen bytes better in a plain loop */
    float score = 0.0f;
#pragma omp simd reduction(+ : score)
    for (int i = 0; i < DIM; i++) score += query[i] * (float)key[i];
#else
    vec sum = load_floats(query) * load_key(key);
    for (int i = 1; i < VECS; i++) sum += load_floats(query + i * LANES) * load_key(key + i * LANES);
    float score = sum_vec(sum);
#endif
    return keys->scales ? score * keys->scales[ordinal] : score;
}

static inline void fetch_ahead(const Keys *keys, int64_t ordinal) {
    const char *p = (const char *)key_at(keys, ordinal);
    for (size_t i = 0; i < DIM * sizeof(stored_t); i += 64) __builtin_prefetch(p + i);
}

static inline void widen(const Keys *keys, int64_t ordinal, float *out) {
    const stored_t *key = key_at(keys, ordinal);
    float scale = keys->scales ? keys->scales[ordinal] : 1.0f;
    for (int i = 0; i < VECS; i++) {
        vec wide = load_key(key + i * LANES) * scale;
        memcpy(out + i * LANES, &wide, sizeof wide);
    }
}

/* Higher scores first, then lower ids: so hits do not depend on the order of a scan. */
static inline int before(Hit a, Hit b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

/* A heap with the last of the best hits on top. */
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

/* Best first. */
static inline void settle(Best *best) {
    for (int64_t left = best->count - 1; left > 0; left--) {
        Hit last = best->hits[left];
        best->hits[left] = best->hits[0];
        sink_top(best->hits, left, last);
    }
}
