/* The attention of a step on the CPU: store keys and values, attend over a work list, merge.

   Compiled for one shape (HEAD_DIM, ROTARY_DIM, GROUP, PAGE_SIZE, SLOT, INTERLEAVED, ROW_TYPE, KV_TYPE; the keys
   of a page lie SLOT numbers apart), so that every loop over dims has a constant length and becomes vector
   instructions. Keys and values are read where they lie, once per item and block of four query rows; for many
   rows of an item they are widened once, a tile at a time, which changes no bit. All arithmetic is fp32, softmax
   in base 2. The arrays are those of `WorkList`; the Python beside this file says what each means. `float16.h`
   stands before this text.

   A row has the same bits whoever is read with it, so no sum is left to the compiler: products are fused with
   sums where it says so (`fused`) and nowhere else (-ffp-contract=off), and lanes are added in a fixed order. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* What a row comes in (queries, new keys and values, outputs), and what pages hold: the same, or e4m3. */
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
    if (x != x) return (row_t)((u.bits >> 16) | 64); /* a NaN stays one */
    return (row_t)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16);
}
#else
typedef float16_bits row_t;
static inline float load_row(row_t x) { return widen_float16(x); }
static inline row_t round_row(float x) { return round_float16(x); }
#endif

#if KV_TYPE == 3
typedef uint8_t kv_t;
/* its exponent and mantissa are the upper bits of a float's, 120 powers of two too low */
static inline kv_t round_kv(float x) {
    float size = fminf(fabsf(x), 448.0f);
    /* below 2^-6 codes are even steps of 2^-9: so are floats beside 2^14 */
    int small = size < 0x1p-6f;
    union { float value; uint32_t bits; } u = {small ? size + 0x1p14f : size * 0x1p-120f}, base = {0x1p14f};
    uint32_t code = small ? u.bits - base.bits : (u.bits + 0x7ffff + ((u.bits >> 20) & 1)) >> 20;
    return (kv_t)((x != x ? 0x7f : code) | (signbit(x) ? 0x80 : 0));
}
#else
typedef row_t kv_t;
static inline kv_t round_kv(float x) { return round_row(x); }
#endif

/* LANES floats, the widest that the processor has and that HEAD_DIM is a multiple of */
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
enum { VECS = HEAD_DIM / LANES };

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

static inline __attribute__((always_inline)) vec all_of(float x) { return x - (vec){0}; }

#if KV_TYPE == 3
/* The codes in the lowest bytes of words whose highest bit is that of the sign. */
static inline __attribute__((always_inline)) vec widen_codes(words codes) {
    words bits = (codes << 20) & 0x87f00000u;
    /* the largest code of all is a NaN: so are 32 bits that are all set */
    words nan = (words)((bits & 0x07f00000u) == 0x07f00000u);
    return (vec)((words)((vec)bits * 0x1p120f) | nan);
}
#endif

static inline vec load_vec(const kv_t *p) {
#if KV_TYPE == 0
    vec wide;
    memcpy(&wide, p, sizeof wide);
    return wide;
#elif KV_TYPE == 1
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    typedef uint32_t words __attribute__((vector_size(4 * LANES)));
    halves narrow;
    memcpy(&narrow, p, sizeof narrow);
    return (vec)(__builtin_convertvector(narrow, words) << 16);
#elif KV_TYPE == 3
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    typedef int32_t codes __attribute__((vector_size(4 * LANES)));
    bytes narrow;
    memcpy(&narrow, p, sizeof narrow);
    return widen_codes((words)__builtin_convertvector(narrow, codes));
#else
    float16_lanes narrow;
    memcpy(&narrow, p, sizeof narrow);
    return widen_float16_lanes(narrow);
#endif
}

static inline float load_kv(kv_t x) {
#if KV_TYPE == 3
    union { uint32_t bits; float value; } u = {(uint32_t)(x & 0x7f) << 20 | (uint32_t)(x & 0x80) << 24};
    return (x & 0x7f) == 0x7f ? NAN : u.value * 0x1p120f;
#else
    return load_row(x);
#endif
}

/* from so many packed rows on it pays to widen keys and values once for all of them */
enum { WIDENING_ROWS = 9 };
enum { TILE = 64, MOST_ROWS = 64, STORE = 1, PARTIAL = 2, MERGE = 4 };
static const float LOG2_E = 1.44269504088896f, LN_2 = 0.693147180559945f;

typedef struct {
    /* the work list; NULL where there is none */
    const int32_t *num_items, *item_page_indptr, *item_entry_indptr, *item_kv_head, *item_explicit;
    const int32_t *page_indices, *page_positions;
    const int32_t *entry_row, *entry_offset, *entry_bound, *entry_mask, *entry_state;
    const int32_t *mask_words, *row_positions, *row_state_indptr, *slot_positions;
    /* of every row of the step: where its key goes, and where that stands in its frame */
    const int64_t *slots, *frame_positions;
    const float *cos, *sin, *slopes;
    float *state_out, *state_lse;
    int64_t num_rows, num_decode_rows, num_positions, num_states, num_kv_heads, window, slot_positions_stride;
    int64_t num_angles; /* positions that `cos` and `sin` have */
    /* how long the lists are */
    int64_t item_capacity, page_capacity, entry_capacity, num_mask_words;
    float softmax_scale, soft_cap;
} Plan;

/* What the lists name and is not there; the Python beside this file has a sentence for each. */
typedef enum { FINE, NO_ITEM, NO_PAGE, NO_ROW, NO_STATE, NO_ANGLE } Fault;

typedef struct { /* strides in elements; the dims of a head are neighbours */
    const row_t *q, *k, *v;
    kv_t *k_pages, *v_pages;
    row_t *out;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, out_row;
    int64_t k_page, k_page_head, v_page, v_page_head;
    int64_t num_queries, num_pages;
} Tensors;

static inline int outside(int64_t place, int64_t count) { return (uint64_t)place >= (uint64_t)count; }

/* 2^x for x <= 0, relative error below 3e-7; exactly 0 far below */
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

#if LANES >= 4 && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES 1
#endif
#endif

/* out[n] = the sum of the lanes of sums[n]: of neighbours, then of neighbouring pairs, and so on */
static inline __attribute__((always_inline)) void sum_lanes(const vec *sums, float *out) {
#ifdef SHUFFLES
#if LANES == 16
#define PAIRS(a, b)                                                                                       \
    (__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +           \
     __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#elif LANES == 8
#define PAIRS(a, b)                                                                                       \
    (__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +                                           \
     __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15))
#else
#define PAIRS(a, b)                                                                                       \
    (__builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7))
#endif
    vec level[LANES];
    for (int n = 0; n < LANES; n++) level[n] = sums[n];
    for (int left = LANES / 2; left; left /= 2)
        for (int n = 0; n < left; n++) level[n] = PAIRS(level[2 * n], level[2 * n + 1]);
    memcpy(out, level, sizeof *level);
#else
    for (int n = 0; n < LANES; n++) {
        vec level = sums[n];
        for (int left = LANES / 2; left; left /= 2)
            for (int i = 0; i < left; i++) level[i] = level[2 * i] + level[2 * i + 1];
        out[n] = level[0];
    }
#endif
}

/* the sum of the lanes, in the same order */
static inline float add_lanes(vec level) {
#ifdef SHUFFLES
    for (int left = LANES / 2; left; left /= 2) level = PAIRS(level, level);
#else
    for (int left = LANES / 2; left; left /= 2)
        for (int i = 0; i < left; i++) level[i] = level[2 * i] + level[2 * i + 1];
#endif
    return level[0];
}

#ifdef SHUFFLES
/* of rows w apart, the words whose number has bit w change places across the diagonal */
#define LOWER(w, l) ((l) & (w) ? LANES + (l) - (w) : (l))
#define UPPER(w, l) ((l) & (w) ? LANES + (l) : (l) + (w))
#define FOUR(f, w, l) f(w, l), f(w, (l) + 1), f(w, (l) + 2), f(w, (l) + 3)
#if LANES == 16
#define EVERY(f, w) FOUR(f, w, 0), FOUR(f, w, 4), FOUR(f, w, 8), FOUR(f, w, 12)
#elif LANES == 8
#define EVERY(f, w) FOUR(f, w, 0), FOUR(f, w, 4)
#else
#define EVERY(f, w) FOUR(f, w, 0)
#endif
#define EXCHANGE(w)                                                                                       \
    for (int i = 0; i < LANES; i++) {                                                                     \
        if (i & (w)) continue;                                                                            \
        words a = rows[i], b = rows[i + (w)];                                                             \
        rows[i] = __builtin_shufflevector(a, b, EVERY(LOWER, w));                                         \
        rows[i + (w)] = __builtin_shufflevector(a, b, EVERY(UPPER, w));                                   \
    }
/* LANES rows of LANES words, in place: word `b` of row `a` becomes word `a` of row `b` */
static inline __attribute__((always_inline)) void transpose(words *rows) {
    EXCHANGE(1)
    EXCHANGE(2)
#if LANES >= 8
    EXCHANGE(4)
#endif
#if LANES >= 16
    EXCHANGE(8)
#endif
}
#endif

/* x turned to `position`, times `factor` */
static inline void turn(const row_t *x, int64_t position, const Plan *plan, float factor, float *turned) {
    const float *cos = plan->cos + position * (ROTARY_DIM / 2), *sin = plan->sin + position * (ROTARY_DIM / 2);
    for (int i = 0; i < ROTARY_DIM / 2; i++) {
        int a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : i + ROTARY_DIM / 2;
        float first = load_row(x[a]), second = load_row(x[b]);
        turned[a] = (first * cos[i] - second * sin[i]) * factor;
        turned[b] = (second * cos[i] + first * sin[i]) * factor;
    }
    for (int i = ROTARY_DIM; i < HEAD_DIM; i++) turned[i] = load_row(x[i]) * factor;
}

static Fault store_row(const Plan *plan, const Tensors *t, int64_t row) {
    int64_t slot = plan->slots[row];
    if (slot < 0) return FINE;
    int64_t page = slot / PAGE_SIZE, place = (slot % PAGE_SIZE) * SLOT;
    if (outside(page, t->num_pages)) return NO_PAGE;
    if (outside(plan->frame_positions[row], plan->num_angles)) return NO_ANGLE;
    for (int64_t head = 0; head < plan->num_kv_heads; head++) {
        const row_t *k = t->k + row * t->k_row + head * t->k_head;
        const row_t *v = t->v + row * t->v_row + head * t->v_head;
        kv_t *k_slot = t->k_pages + page * t->k_page + head * t->k_page_head + place;
        float turned[HEAD_DIM];
        turn(k, plan->frame_positions[row], plan, 1.0f, turned);
        for (int d = 0; d < HEAD_DIM; d++) k_slot[d] = round_kv(turned[d]);
        kv_t *v_slot = t->v_pages + page * t->v_page + head * t->v_page_head + place;
#if KV_TYPE == 3
        for (int d = 0; d < HEAD_DIM; d++) v_slot[d] = round_kv(load_row(v[d]));
#else
        memcpy(v_slot, v, HEAD_DIM * sizeof(kv_t));
#endif
    }
    return FINE;
}

/* Packed row `m` of an item is entry m / GROUP, query head m % GROUP of the KV head. */
typedef struct {
    int32_t row, position, bound, mask, state, head;
    float slope;
} PackedRow;

static inline PackedRow packed_row(const Plan *plan, int32_t first_entry, int32_t m, int64_t kv_head) {
    int32_t entry = first_entry + m / GROUP, head = (int32_t)kv_head * GROUP + m % GROUP;
    int32_t row = plan->entry_row[entry];
    PackedRow packed = {
        .row = row,
        .position = plan->row_positions[row] - plan->entry_offset[entry],
        .bound = plan->entry_bound[entry],
        .mask = plan->entry_mask[entry],
        .state = plan->entry_state[entry],
        .head = head,
        .slope = plan->slopes ? plan->slopes[head] * LOG2_E : 0.0f,
    };
    return packed;
}

/* Whether a key at `position` of the frame is hidden from a row besides by its bound. */
static inline int hidden(const Plan *plan, const PackedRow *row, int32_t position) {
    if (plan->window && row->position - position >= plan->window) return 1;
    /* bitmaps end where the keys of their segment do */
    int64_t place = (int64_t)row->mask + position / 32;
    if (row->mask < 0 || place >= plan->num_mask_words) return 0;
    uint32_t word = (uint32_t)plan->mask_words[place];
    return (word >> (position % 32)) & 1;
}

/* Some keys and values of an item; for many rows also widened: keys dim by dim, values key by key. */
typedef struct {
    const kv_t *key[TILE], *value[TILE];
    int32_t positions[TILE];
    int count, special;
    vec keys[HEAD_DIM][TILE / LANES], values[TILE][VECS];
} Tile;

/* What of a word is one number, as floats: `part` counts from the lowest bits. */
static inline __attribute__((always_inline)) vec widen(words packed, const int part) {
#if KV_TYPE == 0
    (void)part;
    return (vec)packed;
#elif KV_TYPE == 1
    return (vec)(part ? packed & 0xffff0000u : packed << 16);
#elif KV_TYPE == 3
    typedef int32_t codes __attribute__((vector_size(4 * LANES)));
    return widen_codes((words)((codes)(packed << (24 - 8 * part)) >> 24));
#else
    return widen_float16_lanes(__builtin_convertvector(packed >> (16 * part), float16_lanes));
#endif
}

/* The tile widened, so that the scores of one row and LANES keys are one vector. */
static void widen_tile(Tile *tile) {
    enum { NUMBERS = 4 / sizeof(kv_t), STEP = NUMBERS * LANES };
    const kv_t *key[TILE + LANES];
    memcpy(key, tile->key, sizeof tile->key);
    /* behind the last key it comes again: a number that nobody looks at */
    for (int n = 0; n < LANES; n++) key[tile->count + n] = tile->key[tile->count - 1];
    for (int first = 0; first < tile->count; first += LANES) {
        int dim = 0;
#ifdef SHUFFLES
        for (; dim + STEP <= HEAD_DIM; dim += STEP) {
            words rows[LANES];
            for (int n = 0; n < LANES; n++) memcpy(&rows[n], key[first + n] + dim, sizeof *rows);
            transpose(rows);
            for (int w = 0; w < LANES; w++)
                for (int part = 0; part < NUMBERS; part++)
                    tile->keys[dim + w * NUMBERS + part][first / LANES] = widen(rows[w], part);
        }
#endif
        for (; dim < HEAD_DIM; dim++)
            for (int n = 0; n < LANES; n++) tile->keys[dim][first / LANES][n] = load_kv(key[first + n][dim]);
    }
    for (int n = 0; n < tile->count; n++)
        for (int i = 0; i < VECS; i++) tile->values[n][i] = load_vec(tile->value[n] + i * LANES);
}

/* scores[m][n] = q[m] . keys[n], for ROWS rows and a tile of keys. Lane l of a sum has the dims l,
   l + LANES and so on; `sum_lanes` says how lanes are added up. */
static inline __attribute__((always_inline)) void score_tile(
    const int ROWS, const vec (*q)[VECS], const Tile *tile, vec (*scores)[TILE / LANES]) {
    vec sums[4][LANES];
    for (int first = 0; first < tile->count; first += LANES) {
        int some = tile->count - first < LANES ? tile->count - first : LANES;
        for (int n = 0; n < some; n++) {
            const kv_t *key = tile->key[first + n];
            vec sum[4];
            for (int i = 0; i < VECS; i++) {
                vec wide = load_vec(key + i * LANES);
                for (int m = 0; m < ROWS; m++) sum[m] = i ? fused_vec(q[m][i], wide, sum[m]) : q[m][i] * wide;
            }
            for (int m = 0; m < ROWS; m++) sums[m][n] = sum[m];
        }
        for (int m = 0; m < ROWS; m++) {
            for (int n = some; n < LANES; n++) sums[m][n] = (vec){0};
            sum_lanes(sums[m], (float *)&scores[m][first / LANES]);
        }
    }
}

/* The same for four rows from the widened tile, to the last bit: the same products, added up in the same
   order, but without a sum over the lanes of a vector. */
static inline __attribute__((always_inline)) void score_widened(
    const vec (*q)[VECS], const Tile *tile, vec (*scores)[TILE / LANES]) {
    enum { WIDTH = LANES >= 16 ? 4 : 1, SOME = LANES < 4 ? LANES : 4, PARTS = LANES / SOME };
    int vectors = (tile->count + LANES - 1) / LANES;
    for (int first = 0; first < vectors; first += WIDTH) {
        vec parts[PARTS][4][WIDTH]; /* the sums of SOME neighbouring lanes */
        for (int part = 0; part < PARTS; part++) {
            vec waiting[3][4][WIDTH]; /* sums of 1, 2 and 4 lanes that wait for their neighbours */
#pragma GCC unroll 4
            for (int lane = 0; lane < SOME; lane++) {
                vec sum[4][WIDTH];
                for (int i = 0; i < VECS; i++)
                    for (int w = 0; w < WIDTH; w++) {
                        int dim = i * LANES + part * SOME + lane;
                        vec keys = tile->keys[dim][first + w];
                        for (int m = 0; m < 4; m++) {
                            vec x = all_of(((const float *)q[m])[dim]);
                            sum[m][w] = i ? fused_vec(x, keys, sum[m][w]) : x * keys;
                        }
                    }
                int level = 0;
#pragma GCC unroll 2
                for (; lane >> level & 1; level++)
                    for (int m = 0; m < 4; m++)
                        for (int w = 0; w < WIDTH; w++) sum[m][w] = waiting[level][m][w] + sum[m][w];
                memcpy(waiting[level], sum, sizeof sum);
            }
            memcpy(parts[part], waiting[SOME / 2], sizeof *parts);
        }
        for (int m = 0; m < 4; m++)
            for (int w = 0; w < WIDTH; w++) {
                for (int left = PARTS / 2; left; left /= 2)
                    for (int n = 0; n < left; n++) parts[n][m][w] = parts[2 * n][m][w] + parts[2 * n + 1][m][w];
                scores[m][first + w] = parts[0][m][w];
            }
    }
}

/* acc[m] += sum over keys of scores[m][n] * values[n]; a key that no row has `seen` is not read as a
   number if `special`: it may be anything */
static inline __attribute__((always_inline)) void weigh_tile(
    const int ROWS, const int WIDENED, const int special, const Tile *tile, const int32_t *seen,
    const float (*scores)[TILE], vec (*acc)[VECS]) {
    enum { WIDTH = LANES >= 16 ? 4 : 2 }; /* vectors of each row that stay in registers */
    for (int first = 0; first < VECS; first += WIDTH) {
        int width = VECS - first < WIDTH ? VECS - first : WIDTH;
        vec sum[4][WIDTH];
        for (int m = 0; m < ROWS; m++)
            for (int i = 0; i < WIDTH; i++) sum[m][i] = i < width ? acc[m][first + i] : (vec){0};
        for (int n = 0; n < tile->count; n++) {
            if (special && !seen[n]) continue;
            for (int i = 0; i < WIDTH; i++) {
                if (VECS % WIDTH && i >= width) continue;
                vec wide = WIDENED ? tile->values[n][first + i] : load_vec(tile->value[n] + (first + i) * LANES);
                for (int m = 0; m < ROWS; m++) sum[m][i] = fused_vec(all_of(scores[m][n]), wide, sum[m][i]);
            }
        }
        for (int m = 0; m < ROWS; m++)
            for (int i = 0; i < WIDTH; i++)
                if (i < width) acc[m][first + i] = sum[m][i];
    }
}

/* Scores to weights, in place; the running maximum, sum and output move on. Past the tile's last key
   weights are 0, so that sums are of whole vectors. `score` is as aligned as a vector. */
static inline __attribute__((always_inline)) void soften(
    const Plan *plan, const PackedRow *row, const Tile *tile, float *score, int32_t *seen, float *peak,
    float *total, vec *acc) {
    int count = (tile->count + LANES - 1) / LANES * LANES;
    if (plan->soft_cap != 0.0f) {
        float cap = plan->soft_cap * LOG2_E;
        for (int n = 0; n < tile->count; n++) score[n] = cap * tanhf(score[n] / cap);
    }
    if (tile->special) {
        for (int n = 0; n < tile->count; n++) {
            int32_t position = tile->positions[n];
            int gone = position < 0 || position >= row->bound || hidden(plan, row, position);
            seen[n] |= !gone;
            score[n] = gone ? -INFINITY : score[n] - row->slope * (float)(row->position - position);
        }
    }
    for (int n = tile->count; n < count; n++) score[n] = -INFINITY;
    float top = *peak;
    /* a score that is not a number is no maximum, but has a weight that is none either */
#pragma omp simd reduction(max : top)
    for (int n = 0; n < count; n++) top = score[n] > top ? score[n] : top;
    if (top == -INFINITY) { /* nothing seen so far, or nothing that is a number */
        for (int n = 0; n < tile->count; n++)
            if (score[n] != score[n]) *total = NAN;
        memset(score, 0, sizeof(float) * (size_t)count);
        return;
    }
#pragma omp simd
    for (int n = 0; n < count; n++) score[n] = exp2_fast(score[n] - top);
    vec sums = *(const vec *)score;
    for (int n = LANES; n < count; n += LANES) sums += *(const vec *)(score + n);
    float kept = exp2_fast(*peak - top);
    *total = fused(*total, kept, add_lanes(sums));
    *peak = top;
    if (kept != 1.0f)
        for (int i = 0; i < VECS; i++) acc[i] *= kept;
}

/* Packed rows that go over the keys of an item together, so that these are widened once. */
typedef struct {
    PackedRow rows[MOST_ROWS];
    vec q[MOST_ROWS][VECS], acc[MOST_ROWS][VECS];
    float peak[MOST_ROWS], total[MOST_ROWS];
    int count, masked;
    int32_t least, most; /* of their bounds */
} Readers;

/* ROWS of the readers, from `first` on, over a tile. */
static inline __attribute__((always_inline)) void read_tile(
    const int ROWS, const int WIDENED, const Plan *plan, const Tile *tile, Readers *readers, int first) {
    vec scores[4][TILE / LANES];
    int32_t seen[TILE];
    vec (*acc)[VECS] = readers->acc + first;
    if (tile->special) memset(seen, 0, sizeof seen);
    if (WIDENED) score_widened(readers->q + first, tile, scores);
    else score_tile(ROWS, readers->q + first, tile, scores);
    for (int m = 0; m < ROWS; m++)
        soften(plan, &readers->rows[first + m], tile, (float *)scores[m], seen, &readers->peak[first + m],
               &readers->total[first + m], acc[m]);
    if (tile->special) weigh_tile(ROWS, WIDENED, 1, tile, seen, (const float (*)[TILE])scores, acc);
    else weigh_tile(ROWS, WIDENED, 0, tile, seen, (const float (*)[TILE])scores, acc);
}

static void read_keys(const Plan *plan, const Tile *tile, Readers *readers) {
    int first = 0;
    for (; first + 4 <= readers->count; first += 4) read_tile(4, 0, plan, tile, readers, first);
    switch (readers->count - first) {
        case 1: read_tile(1, 0, plan, tile, readers, first); break;
        case 2: read_tile(2, 0, plan, tile, readers, first); break;
        case 3: read_tile(3, 0, plan, tile, readers, first); break;
        default: break;
    }
}

/* Many readers over a tile that is widened for them. */
static void read_widened(const Plan *plan, Tile *tile, Readers *readers) {
    widen_tile(tile);
    for (int first = 0; first < readers->count; first += 4) read_tile(4, 1, plan, tile, readers, first);
}

static Fault begin_rows(
    const Plan *plan, const Tensors *t, int32_t item, int64_t kv_head, int32_t first, Readers *readers) {
    readers->least = INT32_MAX;
    readers->most = 0;
    readers->masked = plan->window != 0 || plan->slopes != 0 || plan->item_explicit[item];
    for (int m = 0; m < readers->count; m++) {
        int32_t entry = plan->item_entry_indptr[item], who = plan->entry_row[entry + (first + m) / GROUP];
        if (outside(who, plan->num_positions) || outside(who, t->num_queries)) return NO_ROW;
        PackedRow row = packed_row(plan, entry, first + m, kv_head);
        if (outside(row.state, plan->num_states)) return NO_STATE;
        if (row.position >= plan->num_angles) return NO_ANGLE;
        const row_t *query = t->q + row.row * t->q_row + row.head * t->q_head;
        /* a row before the frame sees nothing in it, and has no angle there */
        turn(query, row.position < 0 ? 0 : row.position, plan, plan->softmax_scale * LOG2_E,
             (float *)readers->q[m]);
        readers->least = row.bound < readers->least ? row.bound : readers->least;
        readers->most = row.bound > readers->most ? row.bound : readers->most;
        readers->masked |= row.mask >= 0;
        readers->rows[m] = row;
        readers->peak[m] = -INFINITY;
        readers->total[m] = 0.0f;
    }
    /* many are read by fours: the last comes again, and nobody asks what it saw */
    int all = readers->count < WIDENING_ROWS ? readers->count : (readers->count + 3) / 4 * 4;
    for (int m = readers->count; m < all; m++) {
        readers->rows[m] = readers->rows[m - 1];
        memcpy(readers->q[m], readers->q[m - 1], sizeof *readers->q);
        readers->peak[m] = -INFINITY;
        readers->total[m] = 0.0f;
    }
    for (int m = 0; m < all; m++) memset(readers->acc[m], 0, sizeof *readers->acc);
    return FINE;
}

static void end_rows(const Plan *plan, Readers *readers) {
    for (int m = 0; m < readers->count; m++) {
        int64_t place = (int64_t)readers->rows[m].state * plan->num_kv_heads * GROUP + readers->rows[m].head;
        float total = readers->total[m], scale = total == 0.0f ? 0.0f : 1.0f / total;
        for (int i = 0; i < VECS; i++) readers->acc[m][i] *= scale;
        memcpy(plan->state_out + place * HEAD_DIM, readers->acc[m], sizeof readers->acc[m]);
        plan->state_lse[place] = total == 0.0f ? -INFINITY : (readers->peak[m] + log2f(total)) * LN_2;
    }
}

/* Slots `first` to `first + some` of a page into the tile; `start` is where its first slot stands, or
   `places` where all of them do. */
static inline __attribute__((always_inline)) void add_keys(
    const Tensors *t, Tile *tile, int64_t page, int64_t kv_head, int32_t start, const int32_t *places, int first,
    int some) {
    const kv_t *key = t->k_pages + page * t->k_page + kv_head * t->k_page_head;
    const kv_t *value = t->v_pages + page * t->v_page + kv_head * t->v_page_head;
    for (int slot = first; slot < first + some; slot++) {
        tile->key[tile->count] = key + slot * SLOT;
        tile->value[tile->count] = value + slot * SLOT;
        tile->positions[tile->count++] = places ? places[slot] : start + slot;
    }
}

/* Packed rows `first` to `first + count` of an item over all its keys. */
static Fault read_item(
    const Plan *plan, const Tensors *t, int32_t item, int64_t kv_head, int32_t first, int count) {
    enum { AT_ONCE = PAGE_SIZE < TILE ? PAGE_SIZE : TILE };
    int32_t first_page = plan->item_page_indptr[item], last_page = plan->item_page_indptr[item + 1];
    Readers readers;
    Tile tile;
    readers.count = count;
    Fault fault = begin_rows(plan, t, item, kv_head, first, &readers);
    if (fault) return fault;
    tile.count = 0;
    tile.special = readers.masked;
    for (int32_t ordinal = first_page; ordinal < last_page; ordinal++) {
        int64_t page = plan->page_indices[ordinal];
        int32_t start = plan->page_positions[ordinal], slots = PAGE_SIZE;
        const int32_t *places = NULL;
        if (outside(page, t->num_pages)) return NO_PAGE;
        if (plan->item_explicit[item]) places = plan->slot_positions + page * plan->slot_positions_stride;
        else if (start >= readers.most) slots = 0;
        else if (readers.most - start < PAGE_SIZE) slots = readers.most - start;
        int slot = 0;
        do { /* once, but for pages of more slots than a tile */
            int some = slots - slot < AT_ONCE ? slots - slot : AT_ONCE;
            if (!places) tile.special |= start < 0 || start + slots > readers.least;
            add_keys(t, &tile, page, kv_head, start, places, slot, some);
            slot += AT_ONCE;
            int last = ordinal + 1 == last_page && slot >= slots;
            if (tile.count && (last || tile.count + AT_ONCE > TILE)) {
                if (count >= WIDENING_ROWS) read_widened(plan, &tile, &readers);
                else read_keys(plan, &tile, &readers);
                tile.count = 0;
                tile.special = readers.masked;
            }
        } while (PAGE_SIZE > TILE && slot < slots);
    }
    end_rows(plan, &readers);
    return FINE;
}

static Fault run_unit(const Plan *plan, const Tensors *t, int32_t item, int64_t kv_head) {
    int32_t only = plan->item_kv_head[item];
    if (only >= 0 && only != kv_head) return FINE;
    int32_t pages = plan->item_page_indptr[item], entries = plan->item_entry_indptr[item];
    int32_t last_page = plan->item_page_indptr[item + 1], last_entry = plan->item_entry_indptr[item + 1];
    if (pages < 0 || last_page > plan->page_capacity || entries < 0 || last_entry > plan->entry_capacity)
        return NO_ITEM;
    int32_t packed = (last_entry - entries) * GROUP;
    for (int32_t first = 0; first < packed; first += MOST_ROWS) {
        int count = packed - first < MOST_ROWS ? packed - first : MOST_ROWS;
        Fault fault = read_item(plan, t, item, kv_head, first, count);
        if (fault) return fault;
    }
    return FINE;
}

static Fault merge_row(const Plan *plan, const Tensors *t, int64_t row) {
    int32_t first = plan->row_state_indptr[row], last = plan->row_state_indptr[row + 1];
    if (first < 0 || last > plan->num_states) return NO_STATE;
    int64_t heads = plan->num_kv_heads * GROUP;
    for (int64_t head = 0; head < heads; head++) {
        float top = -INFINITY, total = 0.0f, sum[HEAD_DIM];
        memset(sum, 0, sizeof sum);
        for (int32_t state = first; state < last; state++) {
            float lse = plan->state_lse[state * heads + head];
            top = lse > top || lse != lse ? lse : top; /* one that is not a number stays */
        }
        for (int32_t state = first; state < last && top != -INFINITY; state++) {
            float lse = plan->state_lse[state * heads + head];
            if (lse == -INFINITY) continue; /* its output may be anything */
            float weight = exp2_fast((lse - top) * LOG2_E);
            const float *out = plan->state_out + (state * heads + head) * HEAD_DIM;
            total += weight;
            for (int d = 0; d < HEAD_DIM; d++) sum[d] = fused(weight, out[d], sum[d]);
        }
        float scale = total == 0.0f ? 0.0f : 1.0f / total;
        row_t *out = t->out + row * t->out_row + head * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) out[d] = round_row(sum[d] * scale);
    }
    return FINE;
}

/* The phases of a step that `phases` names, each done by all threads before the next begins. Returns
   the largest `Fault`: what the lists say of anything else is done all the same. */
int looseleaf_attention(const Plan *plan, const Tensors *tensors, int64_t phases) {
    int fault = FINE;
#define NOTE(call)                                                                                        \
    do {                                                                                                  \
        int found = call;                                                                                 \
        fault = found > fault ? found : fault;                                                            \
    } while (0)
#pragma omp parallel reduction(max : fault)
    {
        if (phases & STORE) {
#pragma omp for
            for (int64_t row = 0; row < plan->num_rows; row++) NOTE(store_row(plan, tensors, row));
        }
        if (phases & PARTIAL) {
            int64_t heads = plan->num_kv_heads, units = plan->num_items[0] * heads;
            int64_t lses = plan->num_states * heads * GROUP;
            if (outside(plan->num_items[0], plan->item_capacity + 1)) units = 0, fault = NO_ITEM;
#pragma omp for
            for (int64_t place = 0; place < lses; place++) plan->state_lse[place] = -INFINITY;
#pragma omp for schedule(dynamic, 1)
            for (int64_t unit = 0; unit < units; unit++)
                NOTE(run_unit(plan, tensors, (int32_t)(unit / heads), unit % heads));
        }
        if (phases & MERGE) {
#pragma omp for
            for (int64_t row = 0; row < plan->num_decode_rows; row++) NOTE(merge_row(plan, tensors, row));
        }
    }
    return fault;
}
