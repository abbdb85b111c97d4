/* The attention of a step on the CPU: store keys and values, attend over a work list, merge states.

   The build defines one shape (HEAD_DIM, ROTARY_DIM, GROUP, PAGE_SIZE, SLOT, INTERLEAVED, ROW_TYPE, KV_TYPE),
   so that loops over dims have a constant length and become vector instructions. SLOT is the distance of the
   keys of a page, in elements. Keys and values are read in place, once per item and block of four query rows.
   For many rows of an item they are first widened, a tile at a time, with identical results. Arithmetic is
   fp32, softmax in base 2. The arrays are those of `WorkList`; native.py describes them. `rows.h` precedes
   this text.

   A row's bits do not depend on the other rows of its item, so the compiler must not reorder sums. Fused
   products are explicit (`fused`, with -ffp-contract=off), and lanes are summed in a fixed order. */

/* row_t: queries, new keys and values, outputs. kv_t: pages; the same type, or e4m3. */
#if KV_TYPE == 3
typedef uint8_t kv_t;
/* exponent and mantissa are the upper bits of a float's, 120 powers of two too low */
static inline kv_t round_kv(float x) {
    float size = fminf(fabsf(x), 448.0f);
    /* below 2^-6, codes are multiples of 2^-9, as are floats near 2^14 */
    int small = size < 0x1p-6f;
    union { float value; uint32_t bits; } u = {small ? size + 0x1p14f : size * 0x1p-120f}, base = {0x1p14f};
    uint32_t code = small ? u.bits - base.bits : (u.bits + 0x7ffff + ((u.bits >> 20) & 1)) >> 20;
    return (kv_t)((x != x ? 0x7f : code) | (signbit(x) ? 0x80 : 0));
}
#else
typedef row_t kv_t;
static inline kv_t round_kv(float x) { return round_row(x); }
#endif

enum { VECS = HEAD_DIM / LANES };

#if KV_TYPE == 3
/* Codes in the lowest byte of each word; the word's highest bit is the sign. */
static inline __attribute__((always_inline)) vec widen_codes(words codes) {
    words bits = (codes << 20) & 0x87f00000u;
    /* the largest code is NaN: all bits set */
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

/* packed rows from which widened keys and values pay off */
enum { WIDENING_ROWS = 9 };
enum { TILE = 64, MOST_ROWS = 64, STORE = 1, PARTIAL = 2, MERGE = 4 };
static const float LOG2_E = 1.44269504088896f, LN_2 = 0.693147180559945f;

typedef struct {
    /* the work list, or NULL */
    const int32_t *num_items, *item_page_indptr, *item_entry_indptr, *item_kv_head, *item_explicit;
    const int32_t *page_indices, *page_positions;
    const int32_t *entry_row, *entry_offset, *entry_bound, *entry_mask, *entry_state;
    const int32_t *mask_words, *row_positions, *row_state_indptr, *slot_positions;
    /* of every row of the step: flat slot of its key, and position in the frame */
    const int64_t *slots, *frame_positions;
    const float *cos, *sin, *slopes;
    float *state_out, *state_lse;
    int64_t num_rows, num_decode_rows, num_positions, num_states, num_kv_heads, window, slot_positions_stride;
    int64_t num_angles; /* rows of `cos` and `sin` */
    /* lengths of the lists */
    int64_t item_capacity, page_capacity, entry_capacity, num_mask_words;
    float softmax_scale, soft_cap;
} Plan;

/* Invalid indices in the lists; native.py has a message for each. */
typedef enum { FINE, NO_ITEM, NO_PAGE, NO_ROW, NO_STATE, NO_ANGLE } Fault;

typedef struct { /* strides in elements; the dims of a head are contiguous */
    const row_t *q, *k, *v;
    kv_t *k_pages, *v_pages;
    row_t *out;
    const float *sinks; /* of each query head, or NULL */
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, out_row;
    int64_t k_page, k_page_head, v_page, v_page_head;
    int64_t num_queries, num_pages;
} Tensors;

static inline int is_outside(int64_t index, int64_t count) { return (uint64_t)index >= (uint64_t)count; }

#if LANES >= 4 && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES 1
#endif
#endif

/* out[n] = sum of the lanes of sums[n]: first neighbours, then neighbouring pairs, and so on */
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
    for (int half = LANES / 2; half; half /= 2)
        for (int n = 0; n < half; n++) level[n] = PAIRS(level[2 * n], level[2 * n + 1]);
    memcpy(out, level, sizeof *level);
#else
    for (int n = 0; n < LANES; n++) {
        vec level = sums[n];
        for (int half = LANES / 2; half; half /= 2)
            for (int i = 0; i < half; i++) level[i] = level[2 * i] + level[2 * i + 1];
        out[n] = level[0];
    }
#endif
}

/* sum of the lanes in the same order */
static inline float add_lanes(vec level) {
#ifdef SHUFFLES
    for (int half = LANES / 2; half; half /= 2) level = PAIRS(level, level);
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) level[i] = level[2 * i] + level[2 * i + 1];
#endif
    return level[0];
}

#ifdef SHUFFLES
/* exchanges blocks of rows w apart: words with bit w of their index swap across the diagonal */
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
/* transposes LANES rows of LANES words in place */
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

/* x rotated to `position`, times `factor` */
static inline void rotate(const row_t *x, int64_t position, const Plan *plan, float factor, float *rotated) {
    const float *cos = plan->cos + position * (ROTARY_DIM / 2), *sin = plan->sin + position * (ROTARY_DIM / 2);
    for (int i = 0; i < ROTARY_DIM / 2; i++) {
        int a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : i + ROTARY_DIM / 2;
        float first = load_row(x[a]), second = load_row(x[b]);
        rotated[a] = (first * cos[i] - second * sin[i]) * factor;
        rotated[b] = (second * cos[i] + first * sin[i]) * factor;
    }
    for (int i = ROTARY_DIM; i < HEAD_DIM; i++) rotated[i] = load_row(x[i]) * factor;
}

static Fault store_row(const Plan *plan, const Tensors *t, int64_t row) {
    int64_t slot = plan->slots[row];
    if (slot < 0) return FINE;
    int64_t page = slot / PAGE_SIZE, offset = (slot % PAGE_SIZE) * SLOT;
    if (is_outside(page, t->num_pages)) return NO_PAGE;
    if (is_outside(plan->frame_positions[row], plan->num_angles)) return NO_ANGLE;
    for (int64_t head = 0; head < plan->num_kv_heads; head++) {
        const row_t *k = t->k + row * t->k_row + head * t->k_head;
        kv_t *k_slot = t->k_pages + page * t->k_page + head * t->k_page_head + offset;
        float rotated[HEAD_DIM];
        rotate(k, plan->frame_positions[row], plan, 1.0f, rotated);
        for (int d = 0; d < HEAD_DIM; d++) k_slot[d] = round_kv(rotated[d]);
        if (t->v_pages == t->k_pages) continue; /* keys are the values */
        const row_t *v = t->v + row * t->v_row + head * t->v_head;
        kv_t *v_slot = t->v_pages + page * t->v_page + head * t->v_page_head + offset;
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

/* Whether a window or a bitmap hides the key at `position` from a row. */
static inline int hidden(const Plan *plan, const PackedRow *row, int32_t position) {
    if (plan->window && row->position - position >= plan->window) return 1;
    /* a bitmap may end at the last key of its segment */
    int64_t index = (int64_t)row->mask + position / 32;
    if (row->mask < 0 || index >= plan->num_mask_words) return 0;
    uint32_t word = (uint32_t)plan->mask_words[index];
    return (word >> (position % 32)) & 1;
}

/* Keys and values of an item; for many rows also widened: keys by dim, values by key. */
typedef struct {
    const kv_t *key[TILE], *value[TILE];
    int32_t positions[TILE];
    int count, checked;
    vec keys[HEAD_DIM][TILE / LANES], values[TILE][VECS];
} Tile;

/* The numbers at index `part` of each word, counted from the lowest bits, as floats. */
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

/* Widens the tile, so that one vector holds the scores of a row and LANES keys. */
static void widen_tile(Tile *tile) {
    enum { NUMBERS = 4 / sizeof(kv_t), STEP = NUMBERS * LANES };
    const kv_t *key[TILE + LANES];
    memcpy(key, tile->key, sizeof tile->key);
    /* the last key is repeated; its extra scores are unused */
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

/* scores[m][n] = q[m] . keys[n], for ROWS rows and a tile of keys. Lane l sums the dims l, l + LANES and so on;
   `sum_lanes` adds the lanes. */
static inline __attribute__((always_inline)) void score_tile(
    const int ROWS, const vec (*q)[VECS], const Tile *tile, vec (*scores)[TILE / LANES]) {
    vec sums[4][LANES];
    for (int first = 0; first < tile->count; first += LANES) {
        int count = tile->count - first < LANES ? tile->count - first : LANES;
        for (int n = 0; n < count; n++) {
            const kv_t *key = tile->key[first + n];
            vec sum[4];
            for (int i = 0; i < VECS; i++) {
                vec wide = load_vec(key + i * LANES);
                for (int m = 0; m < ROWS; m++) sum[m] = i ? fused_vec(q[m][i], wide, sum[m]) : q[m][i] * wide;
            }
            for (int m = 0; m < ROWS; m++) sums[m][n] = sum[m];
        }
        for (int m = 0; m < ROWS; m++) {
            for (int n = count; n < LANES; n++) sums[m][n] = (vec){0};
            sum_lanes(sums[m], (float *)&scores[m][first / LANES]);
        }
    }
}

/* The same for four rows from the widened tile, bit for bit: equal products in an equal order of sums, but
   without horizontal sums. */
static inline __attribute__((always_inline)) void score_widened(
    const vec (*q)[VECS], const Tile *tile, vec (*scores)[TILE / LANES]) {
    enum { WIDTH = LANES >= 16 ? 4 : 1, LANE_GROUP = LANES < 4 ? LANES : 4, PARTS = LANES / LANE_GROUP };
    int vectors = (tile->count + LANES - 1) / LANES;
    for (int first = 0; first < vectors; first += WIDTH) {
        vec parts[PARTS][4][WIDTH]; /* sums of LANE_GROUP neighbouring lanes */
        for (int part = 0; part < PARTS; part++) {
            vec pending[3][4][WIDTH]; /* sums of 1, 2 and 4 lanes, until their neighbours are complete */
#pragma GCC unroll 4
            for (int lane = 0; lane < LANE_GROUP; lane++) {
                vec sum[4][WIDTH];
                for (int i = 0; i < VECS; i++)
                    for (int w = 0; w < WIDTH; w++) {
                        int dim = i * LANES + part * LANE_GROUP + lane;
                        vec keys = tile->keys[dim][first + w];
                        for (int m = 0; m < 4; m++) {
                            vec x = broadcast(((const float *)q[m])[dim]);
                            sum[m][w] = i ? fused_vec(x, keys, sum[m][w]) : x * keys;
                        }
                    }
                int level = 0;
#pragma GCC unroll 2
                for (; lane >> level & 1; level++)
                    for (int m = 0; m < 4; m++)
                        for (int w = 0; w < WIDTH; w++) sum[m][w] = pending[level][m][w] + sum[m][w];
                memcpy(pending[level], sum, sizeof sum);
            }
            memcpy(parts[part], pending[LANE_GROUP / 2], sizeof *parts);
        }
        for (int m = 0; m < 4; m++)
            for (int w = 0; w < WIDTH; w++) {
                for (int half = PARTS / 2; half; half /= 2)
                    for (int n = 0; n < half; n++) parts[n][m][w] = parts[2 * n][m][w] + parts[2 * n + 1][m][w];
                scores[m][first + w] = parts[0][m][w];
            }
    }
}

/* acc[m] += sum over keys of scores[m][n] * values[n]. With `checked`, values that no row has `seen` are
   skipped: they may be NaN. */
static inline __attribute__((always_inline)) void accumulate_tile(
    const int ROWS, const int WIDENED, const int checked, const Tile *tile, const int32_t *seen,
    const float (*scores)[TILE], vec (*acc)[VECS]) {
    enum { WIDTH = LANES >= 16 ? 4 : 2 }; /* vectors per row in registers */
    for (int first = 0; first < VECS; first += WIDTH) {
        int width = VECS - first < WIDTH ? VECS - first : WIDTH;
        vec sum[4][WIDTH];
        for (int m = 0; m < ROWS; m++)
            for (int i = 0; i < WIDTH; i++) sum[m][i] = i < width ? acc[m][first + i] : (vec){0};
        for (int n = 0; n < tile->count; n++) {
            if (checked && !seen[n]) continue;
            for (int i = 0; i < WIDTH; i++) {
                if (VECS % WIDTH && i >= width) continue;
                vec wide = WIDENED ? tile->values[n][first + i] : load_vec(tile->value[n] + (first + i) * LANES);
                for (int m = 0; m < ROWS; m++) sum[m][i] = fused_vec(broadcast(scores[m][n]), wide, sum[m][i]);
            }
        }
        for (int m = 0; m < ROWS; m++)
            for (int i = 0; i < WIDTH; i++)
                if (i < width) acc[m][first + i] = sum[m][i];
    }
}

/* Turns scores into weights in place and updates the running maximum, sum and output. Weights after the tile's
   last key are 0, so that sums take whole vectors. `score` has the alignment of a vector. */
static inline __attribute__((always_inline)) void softmax_tile(
    const Plan *plan, const PackedRow *row, const Tile *tile, float *score, int32_t *seen, float *peak,
    float *total, vec *acc) {
    int count = (tile->count + LANES - 1) / LANES * LANES;
    if (plan->soft_cap != 0.0f) {
        float cap = plan->soft_cap * LOG2_E;
        for (int n = 0; n < tile->count; n++) score[n] = cap * tanhf(score[n] / cap);
    }
    if (tile->checked) {
        for (int n = 0; n < tile->count; n++) {
            int32_t position = tile->positions[n];
            int is_hidden = position < 0 || position >= row->bound || hidden(plan, row, position);
            seen[n] |= !is_hidden;
            score[n] = is_hidden ? -INFINITY : score[n] - row->slope * (float)(row->position - position);
        }
    }
    for (int n = tile->count; n < count; n++) score[n] = -INFINITY;
    float top = *peak;
    /* NaN never becomes the maximum, but its weight is NaN too */
#pragma omp simd reduction(max : top)
    for (int n = 0; n < count; n++) top = score[n] > top ? score[n] : top;
    if (top == -INFINITY) { /* no key visible so far, or NaN scores only */
        for (int n = 0; n < tile->count; n++)
            if (score[n] != score[n]) *total = NAN;
        memset(score, 0, sizeof(float) * (size_t)count);
        return;
    }
#pragma omp simd
    for (int n = 0; n < count; n++) score[n] = exp2_fast(score[n] - top);
    vec sums = *(const vec *)score;
    for (int n = LANES; n < count; n += LANES) sums += *(const vec *)(score + n);
    float shrink = exp2_fast(*peak - top);
    *total = fused(*total, shrink, add_lanes(sums));
    *peak = top;
    if (shrink != 1.0f)
        for (int i = 0; i < VECS; i++) acc[i] *= shrink;
}

/* Packed rows that read the keys of an item together. */
typedef struct {
    PackedRow rows[MOST_ROWS];
    vec q[MOST_ROWS][VECS], acc[MOST_ROWS][VECS];
    float peak[MOST_ROWS], total[MOST_ROWS];
    int count, masked;
    int32_t least, most; /* least and largest bound */
} Readers;

/* ROWS of the readers from `first` on, over a tile. */
static inline __attribute__((always_inline)) void read_tile(
    const int ROWS, const int WIDENED, const Plan *plan, const Tile *tile, Readers *readers, int first) {
    vec scores[4][TILE / LANES];
    int32_t seen[TILE];
    vec (*acc)[VECS] = readers->acc + first;
    if (tile->checked) memset(seen, 0, sizeof seen);
    if (WIDENED) score_widened(readers->q + first, tile, scores);
    else score_tile(ROWS, readers->q + first, tile, scores);
    for (int m = 0; m < ROWS; m++)
        softmax_tile(plan, &readers->rows[first + m], tile, (float *)scores[m], seen, &readers->peak[first + m],
               &readers->total[first + m], acc[m]);
    if (tile->checked) accumulate_tile(ROWS, WIDENED, 1, tile, seen, (const float (*)[TILE])scores, acc);
    else accumulate_tile(ROWS, WIDENED, 0, tile, seen, (const float (*)[TILE])scores, acc);
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

/* Many readers over a tile, which is widened first. */
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
        int32_t entry = plan->item_entry_indptr[item], query_row = plan->entry_row[entry + (first + m) / GROUP];
        if (is_outside(query_row, plan->num_positions) || is_outside(query_row, t->num_queries)) return NO_ROW;
        PackedRow row = packed_row(plan, entry, first + m, kv_head);
        if (is_outside(row.state, plan->num_states)) return NO_STATE;
        if (row.position >= plan->num_angles) return NO_ANGLE;
        const row_t *query = t->q + row.row * t->q_row + row.head * t->q_head;
        /* a row before the frame sees no key in it: any angle is correct */
        rotate(query, row.position < 0 ? 0 : row.position, plan, plan->softmax_scale * LOG2_E,
             (float *)readers->q[m]);
        readers->least = row.bound < readers->least ? row.bound : readers->least;
        readers->most = row.bound > readers->most ? row.bound : readers->most;
        readers->masked |= row.mask >= 0;
        readers->rows[m] = row;
        readers->peak[m] = -INFINITY;
        readers->total[m] = 0.0f;
    }
    /* blocks of four rows: the last row is repeated, and its extra results are unused */
    int padded = readers->count < WIDENING_ROWS ? readers->count : (readers->count + 3) / 4 * 4;
    for (int m = readers->count; m < padded; m++) {
        readers->rows[m] = readers->rows[m - 1];
        memcpy(readers->q[m], readers->q[m - 1], sizeof *readers->q);
        readers->peak[m] = -INFINITY;
        readers->total[m] = 0.0f;
    }
    for (int m = 0; m < padded; m++) memset(readers->acc[m], 0, sizeof *readers->acc);
    return FINE;
}

static void end_rows(const Plan *plan, Readers *readers) {
    for (int m = 0; m < readers->count; m++) {
        int64_t index = (int64_t)readers->rows[m].state * plan->num_kv_heads * GROUP + readers->rows[m].head;
        float total = readers->total[m], scale = total == 0.0f ? 0.0f : 1.0f / total;
        for (int i = 0; i < VECS; i++) readers->acc[m][i] *= scale;
        memcpy(plan->state_out + index * HEAD_DIM, readers->acc[m], sizeof readers->acc[m]);
        plan->state_lse[index] = total == 0.0f ? -INFINITY : (readers->peak[m] + log2f(total)) * LN_2;
    }
}

/* Adds slots `first` to `first + count` of a page to the tile. Their positions are in `positions`, or count
   from `start` at the page's first slot. */
static inline __attribute__((always_inline)) void add_keys(
    const Tensors *t, Tile *tile, int64_t page, int64_t kv_head, int32_t start, const int32_t *positions, int first,
    int count) {
    const kv_t *key = t->k_pages + page * t->k_page + kv_head * t->k_page_head;
    const kv_t *value = t->v_pages + page * t->v_page + kv_head * t->v_page_head;
    for (int slot = first; slot < first + count; slot++) {
        tile->key[tile->count] = key + slot * SLOT;
        tile->value[tile->count] = value + slot * SLOT;
        tile->positions[tile->count++] = positions ? positions[slot] : start + slot;
    }
}

/* Packed rows `first` to `first + count` of an item, over all its keys. */
static Fault read_item(
    const Plan *plan, const Tensors *t, int32_t item, int64_t kv_head, int32_t first, int count) {
    enum { RUN = PAGE_SIZE < TILE ? PAGE_SIZE : TILE };
    int32_t first_page = plan->item_page_indptr[item], last_page = plan->item_page_indptr[item + 1];
    Readers readers;
    Tile tile;
    readers.count = count;
    Fault fault = begin_rows(plan, t, item, kv_head, first, &readers);
    if (fault) return fault;
    tile.count = 0;
    tile.checked = readers.masked;
    for (int32_t ordinal = first_page; ordinal < last_page; ordinal++) {
        int64_t page = plan->page_indices[ordinal];
        int32_t start = plan->page_positions[ordinal], slots = PAGE_SIZE;
        const int32_t *positions = NULL;
        if (is_outside(page, t->num_pages)) return NO_PAGE;
        if (plan->item_explicit[item]) positions = plan->slot_positions + page * plan->slot_positions_stride;
        else if (start >= readers.most) slots = 0;
        else if (readers.most - start < PAGE_SIZE) slots = readers.most - start;
        int slot = 0;
        do { /* repeats for pages with more slots than a tile */
            int run = slots - slot < RUN ? slots - slot : RUN;
            if (!positions) tile.checked |= start < 0 || start + slots > readers.least;
            add_keys(t, &tile, page, kv_head, start, positions, slot, run);
            slot += RUN;
            int last = ordinal + 1 == last_page && slot >= slots;
            if (tile.count && (last || tile.count + RUN > TILE)) {
                if (count >= WIDENING_ROWS) read_widened(plan, &tile, &readers);
                else read_keys(plan, &tile, &readers);
                tile.count = 0;
                tile.checked = readers.masked;
            }
        } while (PAGE_SIZE > TILE && slot < slots);
    }
    end_rows(plan, &readers);
    return FINE;
}

static Fault run_unit(const Plan *plan, const Tensors *t, int32_t item, int64_t kv_head) {
    int32_t only_head = plan->item_kv_head[item];
    if (only_head >= 0 && only_head != kv_head) return FINE;
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
            top = lse > top || lse != lse ? lse : top; /* keeps NaN */
        }
        if (t->sinks && top != -INFINITY) {
            /* the state (0, sink) */
            float sink = t->sinks[head];
            top = sink > top || sink != sink ? sink : top;
            total = exp2_fast((sink - top) * LOG2_E);
        }
        for (int32_t state = first; state < last && top != -INFINITY; state++) {
            float lse = plan->state_lse[state * heads + head];
            if (lse == -INFINITY) continue; /* its output is undefined */
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

/* Runs the `phases` of a step, with a barrier of all threads after each. Returns the largest `Fault`; entries
   with valid indices are processed in any case. */
int looseleaf_attention(const Plan *plan, const Tensors *tensors, int64_t phases) {
    int fault = FINE;
#define RECORD(call)                                                                                        \
    do {                                                                                                  \
        int code = call;                                                                                 \
        fault = code > fault ? code : fault;                                                            \
    } while (0)
#pragma omp parallel reduction(max : fault)
    {
        if (phases & STORE) {
#pragma omp for
            for (int64_t row = 0; row < plan->num_rows; row++) RECORD(store_row(plan, tensors, row));
        }
        if (phases & PARTIAL) {
            int64_t heads = plan->num_kv_heads, units = plan->num_items[0] * heads;
            int64_t lses = plan->num_states * heads * GROUP;
            if (is_outside(plan->num_items[0], plan->item_capacity + 1)) units = 0, fault = NO_ITEM;
#pragma omp for
            for (int64_t index = 0; index < lses; index++) plan->state_lse[index] = -INFINITY;
#pragma omp for schedule(dynamic, 1)
            for (int64_t unit = 0; unit < units; unit++)
                RECORD(run_unit(plan, tensors, (int32_t)(unit / heads), unit % heads));
        }
        if (phases & MERGE) {
#pragma omp for
            for (int64_t row = 0; row < plan->num_decode_rows; row++) RECORD(merge_row(plan, tensors, row));
        }
    }
    return fault;
}
