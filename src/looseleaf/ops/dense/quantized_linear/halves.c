/* Products with 16-bit floats: sums in fp32, activations not rounded.

   A group of 32 rows is a sequence of words: word n of a lane holds values 2n and 2n + 1 of a row. A row's operations
   have one order, as in `codes.c`. FORMAT 30 is bfloat16, 1 float16. Two bfloat16 values by two activations in
   bfloat16 are one instruction where the processor has it. `matrix.h` precedes this text. */

enum { CODE_BYTES = CHUNK * GROUP * 2 };

#if INSTRUCTIONS == 4 && FORMAT == 30 && ROW_TYPE == 1 && defined(__AVX512BF16__)
#define IN_PAIRS 1
typedef row_t value_t;
#else
#define IN_PAIRS 0
typedef float value_t;
#endif

typedef struct {
    value_t *values;
} Activations;

static inline int64_t group_bytes(int64_t num_blocks) { return num_blocks * CODE_BYTES; }

/* Packs `rows` rows of `num_blocks` chunks; missing rows of the last group are zeros. */
void looseleaf_pack(const uint8_t *blocks, int64_t rows, int64_t row_bytes, int64_t num_blocks, uint8_t *packed) {
    int64_t words = num_blocks * CHUNK / 2;
#pragma omp parallel for schedule(static)
    for (int64_t group = 0; group < (rows + GROUP - 1) / GROUP; group++) {
        uint8_t *out = packed + group * group_bytes(num_blocks);
        memset(out, 0, group_bytes(num_blocks));
        for (int64_t row = 0; row < GROUP && group * GROUP + row < rows; row++)
            for (int64_t n = 0; n < words; n++)
                memcpy(out + n * LINE + 4 * row, blocks + (group * GROUP + row) * row_bytes + 4 * n, 4);
    }
}

static inline int64_t activation_bytes(int64_t count, int64_t chunks) {
    return count * chunks * CHUNK * sizeof(value_t);
}

static Activations activations_in(void *memory, int64_t count, int64_t chunks) { return (Activations){memory}; }

static void prepare_row(const row_t *x, int64_t row, int64_t chunks, Activations out) {
    value_t *values = out.values + row * chunks * CHUNK;
#if IN_PAIRS
    memcpy(values, x, chunks * CHUNK * sizeof *x);
#else
    for (int64_t n = 0; n < chunks * CHUNK; n++) values[n] = load_row(x[n]);
#endif
}

INLINE float16_lanes narrow_words(words x) {
#if LANES == 16 && defined(__AVX512F__)
    return (float16_lanes)_mm512_cvtepi32_epi16((__m512i)x);
#elif LANES == 8 && defined(__AVX2__)
    __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);
    return (float16_lanes)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 8));
#else
    return __builtin_convertvector(x, float16_lanes);
#endif
}

/* The first and the second values of LANES words. */
INLINE void widen_word(bytes word, vec *first, vec *second) {
#if FORMAT == 30
    *first = (vec)((words)word << 16), *second = (vec)((words)word & 0xffff0000u);
#else
    float16_lanes low = narrow_words((words)word & 0xffffu), high = narrow_words((words)word >> 16);
    *first = widen_halves((const uint8_t *)&low), *second = widen_halves((const uint8_t *)&high);
#endif
}

#if IN_PAIRS
/* totals += the products of words at `data` and the pairs of each row at `values`. */
INLINE void multiply_word(const uint8_t *data, const value_t *values, int64_t row_values, const int count,
                          const int columns, vec totals[][COLUMNS]) {
    bytes word[COLUMNS];
    for (int column = 0; column < columns; column++) word[column] = load_bytes(data + 4 * LANES * column);
    for (int row = 0; row < count; row++) {
        uint32_t pair;
        memcpy(&pair, values + row * row_values, sizeof pair);
        words pairs = pair - (words){0};
        for (int column = 0; column < columns; column++)
            totals[row][column] = (vec)_mm512_dpbf16_ps((__m512)totals[row][column], (__m512bh)word[column],
                                                        (__m512bh)pairs);
    }
}
#else
INLINE void multiply_word(const uint8_t *data, const value_t *values, int64_t row_values, const int count,
                          const int columns, vec totals[][COLUMNS]) {
    vec pair[2][COLUMNS];
    for (int column = 0; column < columns; column++)
        widen_word(load_bytes(data + 4 * LANES * column), &pair[0][column], &pair[1][column]);
    for (int odd = 0; odd < 2; odd++) {
        for (int row = 0; row < count; row++) {
            vec value = broadcast(values[row * row_values + odd]);
            for (int column = 0; column < columns; column++)
                totals[row][column] = fused_vec(pair[odd][column], value, totals[row][column]);
        }
    }
}
#endif

/* out[row][lane] = the product of `count` rows from the row `first` and a group of the matrix. */
INLINE void multiply_tile(const Matrix *matrix, int64_t group, Activations rows, int64_t first, const int count,
                          float out[][GROUP]) {
    const int columns = COLUMNS_OF(count);
    int64_t row_values = matrix->num_blocks * CHUNK;
    const uint8_t *start = matrix->packed + group * group_bytes(matrix->num_blocks);
    const value_t *values = rows.values + first * row_values;
    for (int lane = 0; lane < GROUP; lane += columns * LANES) {
        vec totals[TILE][COLUMNS] = {0};
        for (int64_t n = 0; n < row_values; n += 2) {
            const uint8_t *data = start + n / 2 * LINE + 4 * lane;
            for (int byte = 0; byte < 4 * columns * LANES; byte += 64) __builtin_prefetch(data + byte + AHEAD);
            multiply_word(data, values + n, row_values, count, columns, totals);
        }
        for (int row = 0; row < count; row++) memcpy(out[row] + lane, totals[row], columns * sizeof **totals);
    }
}

static void write_row(const uint8_t *group, int64_t num_blocks, int row, row_t *out) {
    for (int64_t n = 0; n < num_blocks * CHUNK; n++) {
        uint16_t half;
        memcpy(&half, group + n / 2 * LINE + 4 * row + n % 2 * 2, 2);
        union { uint32_t bits; float value; } wide = {(uint32_t)half << 16};
        out[n] = round_row(FORMAT == 30 ? wide.value : widen_float16(half));
    }
}
