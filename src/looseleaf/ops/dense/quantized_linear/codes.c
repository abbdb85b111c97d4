/* Products in integers: activations in 8 bits per chunk of 32, sums of codes in integers, scales in fp32.

   No sum crosses lanes, and integer sums are exact. A row's fp32 operations have one order, whatever the other
   rows, the instruction set and the number of threads are. `pack.c` precedes this text. */

enum { CHUNK_SUBS = CHUNK / (SUB < CHUNK ? SUB : CHUNK) };

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* Rows in 8 bits. `corrections` are, per sub-block, the sum of the codes times -ZERO, or, for a format with mins,
   the sum of the codes times the scale. */
typedef struct {
    int8_t *codes;
    float *scales;
    union { int32_t count; float sum; } *corrections;
} Activations;

static inline int64_t activation_bytes(int64_t count, int64_t chunks) {
    return count * chunks * (CHUNK + (1 + CHUNK_SUBS) * sizeof(float));
}

/* The activations of `count` rows in `memory`. */
static Activations activations_in(void *memory, int64_t count, int64_t chunks) {
    float *scales = (float *)((int8_t *)memory + count * chunks * CHUNK);
    return (Activations){memory, scales, (void *)(scales + count * chunks)};
}

/* Rounds a chunk to codes from -127 to 127. A chunk with NaN or infinity has the scale NaN. */
INLINE void quantize_chunk(const row_t *x, int8_t *codes, float *scale, int32_t *sums) {
    float values[CHUNK];
    int32_t largest = 0;
    for (int n = 0; n < CHUNK; n++) {
        union { float value; int32_t bits; } u = {values[n] = load_row(x[n])};
        int32_t size = u.bits & 0x7fffffff; /* ordered as the floats */
        largest = size > largest ? size : largest;
    }
    union { int32_t bits; float value; } most = {largest};
    int is_finite = largest < 0x7f800000;
    /* below 2^-100 the inverse might overflow: zeros */
    float inverse = is_finite && most.value >= 0x1p-100f ? 127.0f / most.value : 0.0f;
    *scale = !is_finite ? NAN : inverse == 0.0f ? 0.0f : most.value / 127.0f;
    for (int sub = 0; sub < CHUNK_SUBS; sub++) {
        int32_t sum = 0;
        for (int n = sub * (CHUNK / CHUNK_SUBS); n < (sub + 1) * (CHUNK / CHUNK_SUBS); n++) {
            int32_t code = is_finite ? (int32_t)rintf(values[n] * inverse) : 0;
            codes[n] = (int8_t)code;
            sum += code;
        }
        sums[sub] = sum;
    }
}

/* Writes row number `row` of the activations. */
static void prepare_row(const row_t *x, int64_t row, int64_t chunks, Activations out) {
    out.codes += row * chunks * CHUNK, out.scales += row * chunks, out.corrections += row * chunks * CHUNK_SUBS;
    for (int64_t n = 0; n < chunks; n++) {
        int32_t sums[CHUNK_SUBS];
        quantize_chunk(x + n * CHUNK, out.codes + n * CHUNK, out.scales + n, sums);
        for (int sub = 0; sub < CHUNK_SUBS; sub++) {
            if (HAS_MIN) out.corrections[n].sum = out.scales[n] * (float)sums[0];
            else out.corrections[n * CHUNK_SUBS + sub].count = -ZERO * sums[sub];
        }
    }
}

/* LANES codes of scales or mins; those of formats with a zero code are signed. Compilers convert bytes one by one
   without the instruction. */
INLINE vec widen_codes(const uint8_t *p) {
#if LANES == 16 && defined(__AVX512F__)
    __m128i narrow = _mm_loadu_si128((const __m128i *)p);
    return (vec)_mm512_cvtepi32_ps(ZERO ? _mm512_cvtepi8_epi32(narrow) : _mm512_cvtepu8_epi32(narrow));
#elif LANES == 8 && defined(__AVX2__)
    __m128i narrow = _mm_loadl_epi64((const __m128i *)p);
    return (vec)_mm256_cvtepi32_ps(ZERO ? _mm256_cvtepi8_epi32(narrow) : _mm256_cvtepu8_epi32(narrow));
#else
    vec wide;
    for (int lane = 0; lane < LANES; lane++) wide[lane] = ZERO ? (float)(int8_t)p[lane] : (float)p[lane];
    return wide;
#endif
}

#if FORMAT == 39
/* formats.py has the codes */
static const uint8_t CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* The codes at indices below 16. */
INLINE bytes look_up(bytes indices) {
#if LANES == 16 && defined(__AVX512BW__)
    __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)CODES));
    return (bytes)_mm512_shuffle_epi8(table, (__m512i)indices);
#elif LANES == 8 && defined(__AVX2__)
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)CODES));
    return (bytes)_mm256_shuffle_epi8(table, (__m256i)indices);
#else
    for (int n = 0; n < 4 * LANES; n++) indices[n] = CODES[indices[n]];
    return indices;
#endif
}
#endif

/* Word `t` of a chunk for LANES rows: values 4t to 4t + 3 of each row. */
INLINE bytes load_word(const uint8_t *chunk, int t) {
    if (BITS == 8) return load_bytes(chunk + LINE * t);
    bytes pair = load_bytes(chunk + LINE * (t % 4)), word = t < 4 ? pair & 15 : pair >> 4;
#if FORMAT == 39
    return look_up(word);
#endif
    const uint8_t *upper = chunk + 4 * LINE;
    if (BITS == 5) {
        bytes plane = load_bytes(upper);
        word |= (t < 4 ? plane << (4 - t) : plane >> (t - 4)) & 16;
    }
    if (BITS == 6) {
        bytes plane = load_bytes(upper + LINE * (t / 4));
        word |= (t % 4 < 2 ? plane << (4 - t % 4 * 2) : plane >> (t % 4 * 2 - 4)) & 48;
    }
    return word;
}

INLINE ints four_codes(const int8_t *p) {
    int32_t word;
    memcpy(&word, p, sizeof word);
    return word - (ints){0};
}

/* Per lane: total plus the products of four codes of the matrix and of the activations. AVX2 sums pairs of products
   in 16 bits, which hold STEP words; its 8-bit codes have signs, for which `right` takes the sign of `word`. */
INLINE ints add_word(ints total, bytes word, ints right) {
#if INSTRUCTIONS >= 3 && defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)word, (__m512i)right);
#elif INSTRUCTIONS == 2 && defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)word, (__m256i)right);
#elif LANES == 8 && defined(__AVX2__)
    __m256i left = (__m256i)word, codes = (__m256i)right;
    if (BITS == 8) {
        left = _mm256_xor_si256(left, _mm256_set1_epi8(-128));
        codes = _mm256_sign_epi8(codes, left), left = _mm256_abs_epi8(left);
    }
    return (ints)_mm256_add_epi16((__m256i)total, _mm256_maddubs_epi16(left, codes));
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int n = 0; n < 4; n++) total[lane] += word[4 * lane + n] * ((int8_t)(right[lane] >> 8 * n));
    return total;
#endif
}

#if INSTRUCTIONS == 1 && defined(__AVX2__)
/* 2^15 / (2 * 127 * 2^BITS) words; codes of MXFP4 are up to 24 */
enum { IN_PAIRS = 1, STEP = FORMAT == 39 ? 4 : BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1 };
INLINE ints sum_pairs(ints pairs) { return (ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
#else
enum { IN_PAIRS = 0, STEP = WORDS };
INLINE ints sum_pairs(ints pairs) { return pairs; }
#endif

/* A chunk of the matrix: its codes, and per column of LANES rows its scales and its min with its sign. */
typedef struct {
    const uint8_t *codes;
    vec scales[COLUMNS][CHUNK_SUBS], min[COLUMNS];
} Chunk;

/* sums[row][column] = the sum of the products of codes in a sub-block; `at` is the chunk of the first row. */
INLINE void sum_codes(const Chunk *chunk, int sub, Activations rows, int64_t at, int64_t chunks, const int count,
                      const int columns, ints sums[][COLUMNS]) {
    enum { COUNT = WORDS / CHUNK_SUBS };
    for (int row = 0; row < count; row++) {
        /* signed codes of AVX2 need no correction */
        int is_signed = HAS_MIN || (IN_PAIRS && BITS == 8);
        int32_t correction = is_signed ? 0 : rows.corrections[(at + row * chunks) * CHUNK_SUBS + sub].count;
        for (int column = 0; column < columns; column++) sums[row][column] = correction - (ints){0};
    }
#pragma GCC unroll 8
    for (int first = 0; first < COUNT; first += STEP) {
        ints pairs[TILE][COLUMNS] = {0};
        /* shifts of words by constants */
#pragma GCC unroll 8
        for (int t = sub * COUNT + first; t < sub * COUNT + COUNT && t < sub * COUNT + first + STEP; t++) {
            bytes word[COLUMNS];
            for (int column = 0; column < columns; column++)
                word[column] = load_word(chunk->codes + 4 * LANES * column, t);
            for (int row = 0; row < count; row++) {
                ints right = four_codes(rows.codes + (at + row * chunks) * CHUNK + 4 * t);
                for (int column = 0; column < columns; column++) {
                    ints *total = IN_PAIRS ? &pairs[row][column] : &sums[row][column];
                    *total = add_word(*total, word[column], right);
                }
            }
        }
        for (int row = 0; IN_PAIRS && row < count; row++)
            for (int column = 0; column < columns; column++) sums[row][column] += sum_pairs(pairs[row][column]);
    }
}

/* totals += the product of a chunk and `count` rows. */
INLINE void multiply_chunk(const Chunk *chunk, Activations rows, int64_t at, int64_t chunks, const int count,
                           const int columns, vec totals[][COLUMNS]) {
    vec products[TILE][COLUMNS];
    for (int sub = 0; sub < CHUNK_SUBS; sub++) {
        ints sums[TILE][COLUMNS];
        sum_codes(chunk, sub, rows, at, chunks, count, columns, sums);
        for (int row = 0; row < count; row++) {
            for (int column = 0; column < columns; column++) {
                vec wide = __builtin_convertvector(sums[row][column], vec), *product = &products[row][column];
                vec scale = chunk->scales[column][sub];
                *product = sub ? fused_vec(wide, scale, *product) : wide * scale;
            }
        }
    }
    for (int row = 0; row < count; row++, at += chunks) {
        for (int column = 0; column < columns; column++) {
            vec *total = &totals[row][column];
            *total = fused_vec(products[row][column], broadcast(rows.scales[at]), *total);
            if (HAS_MIN) *total = fused_vec(chunk->min[column], broadcast(rows.corrections[at].sum), *total);
        }
    }
}

/* Scales and mins of chunk `n` of a block; `scale` and `least` are the block's, per column. */
INLINE void load_parameters(const uint8_t *codes, int n, const vec *scale, const vec *least, const int columns,
                            Chunk *chunk) {
    for (int column = 0; column < columns; column++, codes += LANES) {
        chunk->scales[column][0] = scale[column], chunk->min[column] = least[column];
        if (SUPER == 1) continue;
        for (int sub = 0; sub < CHUNK_SUBS; sub++) {
            const uint8_t *scale_codes = codes + (n * CHUNK_SUBS + sub) * (1 + HAS_MIN) * GROUP;
            chunk->scales[column][sub] = scale[column] * widen_codes(scale_codes);
        }
        if (HAS_MIN) chunk->min[column] = -(least[column] * widen_codes(codes + (2 * n + 1) * GROUP));
    }
}

/* out[row][lane] = the product of `count` rows from the row `first` and a group of the matrix, for the lanes of one
   pass. */
INLINE void multiply_pass(const Matrix *matrix, int64_t group, int pass, Activations rows, int64_t first,
                          const int count, float out[][GROUP]) {
    int64_t chunks = matrix->num_blocks * SUPER, at = first * chunks;
    const int columns = COLUMNS_OF(count);
    int lanes = pass * columns * LANES;
    const uint8_t *block = matrix->packed + group * group_bytes(matrix->num_blocks);
    const uint8_t *data = block + parameter_bytes(matrix->num_blocks);
    vec totals[TILE][COLUMNS] = {0};
    for (int64_t n = 0; n < matrix->num_blocks; n++, block += PARAMETER_BYTES) {
        vec scale[COLUMNS], least[COLUMNS];
        for (int column = 0; column < columns; column++) {
            int lane = lanes + column * LANES;
            scale[column] = widen_halves(block + 2 * lane);
            least[column] = HAS_MIN ? widen_halves(block + 2 * (GROUP + lane)) : (vec){0};
        }
#pragma GCC unroll 1
        for (int sub = 0; sub < SUPER; sub++, at++, data += CODE_BYTES) {
            Chunk chunk = {data + 4 * lanes};
            for (int line = 0; pass == 0 && line < CODE_BYTES; line += 64) __builtin_prefetch(data + line + AHEAD);
            load_parameters(block + 2 * GROUP * (1 + HAS_MIN) + lanes, sub, scale, least, columns, &chunk);
            multiply_chunk(&chunk, rows, at, chunks, count, columns, totals);
        }
    }
    for (int row = 0; row < count; row++) memcpy(out[row] + lanes, totals[row], columns * sizeof **totals);
}

INLINE void multiply_tile(const Matrix *matrix, int64_t group, Activations rows, int64_t first, const int count,
                          float out[][GROUP]) {
    for (int pass = 0; pass < GROUP / (COLUMNS_OF(count) * LANES); pass++)
        multiply_pass(matrix, group, pass, rows, first, count, out);
}

/* The codes of a chunk of one row, from those of its group. */
INLINE void row_codes(const uint8_t *chunk, int row, uint8_t *codes) {
    for (int t = 0; t < (BITS == 8 ? WORDS : 4); t++) memcpy(codes + 4 * t, chunk + LINE * t + 4 * row, 4);
    if (BITS == 8) return;
    uint8_t upper[8] = {0};
    for (int t = 0; BITS > 4 && t < BITS - 4; t++) memcpy(upper + 4 * t, chunk + LINE * (4 + t) + 4 * row, 4);
    for (int n = 0; n < 16; n++) codes[16 + n] = codes[n] >> 4, codes[n] &= 15;
#if FORMAT == 39
    for (int n = 0; n < CHUNK; n++) codes[n] = CODES[codes[n]];
#endif
    for (int n = 0; BITS == 5 && n < CHUNK; n++) codes[n] |= (upper[n % 4] >> n / 4 & 1) << 4;
    for (int n = 0; BITS == 6 && n < CHUNK; n++) codes[n] |= (upper[n / 16 * 4 + n % 4] >> n / 4 % 4 * 2 & 3) << 4;
}

static void write_row(const uint8_t *group, int64_t num_blocks, int row, row_t *out) {
    const uint8_t *chunk = group + parameter_bytes(num_blocks);
    for (int64_t n = 0; n < num_blocks * SUPER; n++, chunk += CODE_BYTES, out += CHUNK) {
        const uint8_t *block = group + n / SUPER * PARAMETER_BYTES, *sub_codes = block + 2 * GROUP * (1 + HAS_MIN) + row;
        uint8_t codes[CHUNK];
        row_codes(chunk, row, codes);
        for (int sub = 0; sub < CHUNK_SUBS; sub++) {
            enum { COUNT = CHUNK / CHUNK_SUBS };
            int64_t at = (n % SUPER * CHUNK_SUBS + sub) * (1 + HAS_MIN) * GROUP;
            float scale = widen_float16(half_at(block + 2 * row)), min = 0.0f;
            if (HAS_MIN) min = widen_float16(half_at(block + 2 * (GROUP + row)));
            if (SUPER > 1) {
                scale *= ZERO ? (float)(int8_t)sub_codes[at] : (float)sub_codes[at];
                if (HAS_MIN) min *= -(float)sub_codes[at + GROUP];
            }
            for (int k = sub * COUNT; k < (sub + 1) * COUNT; k++)
                out[k] = round_row(scale * (float)(codes[k] - ZERO) + min);
        }
    }
}
