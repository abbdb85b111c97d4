/* Products of rows and packed matrices: activations in 8 bits per chunk of 32, sums in integers, scales in fp32.

   A lane of a vector is a row of the matrix, so that no sum crosses lanes. Integer sums are exact. A row's fp32
   operations have one order, whatever the other rows, the instruction set and the number of threads are.
   `pack.c` precedes this text. INSTRUCTIONS: 0 plain C, 1 AVX2, 2 AVX-VNNI, 3 AVX-512 VNNI. */

#include <stdlib.h>

/* vectors of a pass, which share reads of activations */
enum { COLUMNS = 2, CHUNK_SUBS = CHUNK / (SUB < CHUNK ? SUB : CHUNK) };
/* activations of a call that stay in the cache, and rows of a tile */
enum { MOST_ROWS = 256, TILE = INSTRUCTIONS == 3 ? 8 : 4 };
/* distance of prefetches in bytes: prefetchers of processors stop at pages */
enum { AHEAD = 8192 };
/* products below this number of code bytes use one thread */
enum { PARALLEL_BYTES = 1 << 16 };

typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
#define INLINE static inline __attribute__((always_inline))

/* Rows in 8 bits. `corrections` are, per sub-block, the sum of the codes times -ZERO, or, for a format with mins,
   the sum of the codes times the scale. */
typedef struct {
    int8_t *codes;
    float *scales;
    union { int32_t count; float sum; } *corrections;
} Activations;

typedef struct {
    const uint8_t *packed;
    int64_t outputs, num_blocks;
} Matrix;

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

static void quantize_row(const row_t *x, int64_t chunks, Activations out) {
    for (int64_t n = 0; n < chunks; n++) {
        int32_t sums[CHUNK_SUBS];
        quantize_chunk(x + n * CHUNK, out.codes + n * CHUNK, out.scales + n, sums);
        for (int sub = 0; sub < CHUNK_SUBS; sub++) {
            if (HAS_MIN) out.corrections[n].sum = out.scales[n] * (float)sums[0];
            else out.corrections[n * CHUNK_SUBS + sub].count = -ZERO * sums[sub];
        }
    }
}

INLINE bytes load_bytes(const uint8_t *p) {
    bytes x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE vec widen_halves(const uint8_t *p) {
#if LANES == 16 && defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    float16_lanes narrow;
    memcpy(&narrow, p, sizeof narrow);
    return widen_float16_lanes(narrow);
#endif
}

/* LANES codes of scales or mins; those of formats with a zero code are signed. */
INLINE vec widen_codes(const uint8_t *p) {
    typedef int8_t signed_codes __attribute__((vector_size(LANES)));
    typedef uint8_t unsigned_codes __attribute__((vector_size(LANES)));
    if (ZERO) {
        signed_codes narrow;
        memcpy(&narrow, p, sizeof narrow);
        return __builtin_convertvector(__builtin_convertvector(narrow, ints), vec);
    }
    unsigned_codes narrow;
    memcpy(&narrow, p, sizeof narrow);
    return __builtin_convertvector(__builtin_convertvector(narrow, ints), vec);
}

/* Word `t` of a chunk for LANES rows: values 4t to 4t + 3 of each row. */
INLINE bytes load_word(const uint8_t *chunk, int t) {
    if (BITS == 8) return load_bytes(chunk + LINE * t);
    bytes pair = load_bytes(chunk + LINE * (t % 4)), word = t < 4 ? pair & 15 : pair >> 4;
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
#if INSTRUCTIONS == 3 && defined(__AVX512VNNI__)
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
/* 2^15 / (2 * 127 * 2^BITS) words */
enum { IN_PAIRS = 1, STEP = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1 };
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
                      ints sums[][COLUMNS]) {
    enum { COUNT = WORDS / CHUNK_SUBS };
    for (int row = 0; row < count; row++) {
        /* signed codes of AVX2 need no correction */
        int is_signed = HAS_MIN || (IN_PAIRS && BITS == 8);
        int32_t correction = is_signed ? 0 : rows.corrections[(at + row * chunks) * CHUNK_SUBS + sub].count;
        for (int column = 0; column < COLUMNS; column++) sums[row][column] = correction - (ints){0};
    }
    for (int first = 0; first < COUNT; first += STEP) {
        ints pairs[TILE][COLUMNS] = {0};
        for (int t = sub * COUNT + first; t < sub * COUNT + COUNT && t < sub * COUNT + first + STEP; t++) {
            bytes word[COLUMNS];
            for (int column = 0; column < COLUMNS; column++)
                word[column] = load_word(chunk->codes + 4 * LANES * column, t);
            for (int row = 0; row < count; row++) {
                ints right = four_codes(rows.codes + (at + row * chunks) * CHUNK + 4 * t);
                for (int column = 0; column < COLUMNS; column++) {
                    ints *total = IN_PAIRS ? &pairs[row][column] : &sums[row][column];
                    *total = add_word(*total, word[column], right);
                }
            }
        }
        for (int row = 0; IN_PAIRS && row < count; row++)
            for (int column = 0; column < COLUMNS; column++) sums[row][column] += sum_pairs(pairs[row][column]);
    }
}

/* totals += the product of a chunk and `count` rows. */
INLINE void multiply_chunk(const Chunk *chunk, Activations rows, int64_t at, int64_t chunks, const int count,
                           vec totals[][COLUMNS]) {
    vec products[TILE][COLUMNS];
    for (int sub = 0; sub < CHUNK_SUBS; sub++) {
        ints sums[TILE][COLUMNS];
        sum_codes(chunk, sub, rows, at, chunks, count, sums);
        for (int row = 0; row < count; row++) {
            for (int column = 0; column < COLUMNS; column++) {
                vec wide = __builtin_convertvector(sums[row][column], vec), *product = &products[row][column];
                vec scale = chunk->scales[column][sub];
                *product = sub ? fused_vec(wide, scale, *product) : wide * scale;
            }
        }
    }
    for (int row = 0; row < count; row++, at += chunks) {
        for (int column = 0; column < COLUMNS; column++) {
            vec *total = &totals[row][column];
            *total = fused_vec(products[row][column], broadcast(rows.scales[at]), *total);
            if (HAS_MIN) *total = fused_vec(chunk->min[column], broadcast(rows.corrections[at].sum), *total);
        }
    }
}

/* Scales and mins of chunk `n` of a block; `scale` and `least` are the block's, per column. */
INLINE void load_parameters(const uint8_t *codes, int n, const vec *scale, const vec *least, Chunk *chunk) {
    for (int column = 0; column < COLUMNS; column++, codes += LANES) {
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
    int lanes = pass * COLUMNS * LANES;
    const uint8_t *block = matrix->packed + group * group_bytes(matrix->num_blocks);
    const uint8_t *data = block + parameter_bytes(matrix->num_blocks);
    vec totals[TILE][COLUMNS] = {0};
    for (int64_t n = 0; n < matrix->num_blocks; n++, block += PARAMETER_BYTES) {
        vec scale[COLUMNS], least[COLUMNS];
        for (int column = 0; column < COLUMNS; column++) {
            int lane = lanes + column * LANES;
            scale[column] = widen_halves(block + 2 * lane);
            least[column] = HAS_MIN ? widen_halves(block + 2 * (GROUP + lane)) : (vec){0};
        }
#pragma GCC unroll 1
        for (int sub = 0; sub < SUPER; sub++, at++, data += CODE_BYTES) {
            Chunk chunk = {data + 4 * lanes};
            for (int line = 0; pass == 0 && line < CODE_BYTES; line += 64) __builtin_prefetch(data + line + AHEAD);
            load_parameters(block + 2 * GROUP * (1 + HAS_MIN) + lanes, sub, scale, least, &chunk);
            multiply_chunk(&chunk, rows, at, chunks, count, totals);
        }
    }
    for (int row = 0; row < count; row++) memcpy(out[row] + lanes, totals[row], sizeof *totals);
}

INLINE void multiply_tile(const Matrix *matrix, int64_t group, Activations rows, int64_t first, const int count,
                          float out[][GROUP]) {
    for (int pass = 0; pass < GROUP / (COLUMNS * LANES); pass++)
        multiply_pass(matrix, group, pass, rows, first, count, out);
}

static void multiply_rows(const Matrix *matrix, int64_t group, Activations rows, int64_t first, int count,
                          float out[][GROUP]) {
    switch (count) {
    case 1: multiply_tile(matrix, group, rows, first, 1, out); return;
    case 2: multiply_tile(matrix, group, rows, first, 2, out); return;
    case 3: multiply_tile(matrix, group, rows, first, 3, out); return;
    case 4: multiply_tile(matrix, group, rows, first, 4, out); return;
#if INSTRUCTIONS == 3
    case 5: multiply_tile(matrix, group, rows, first, 5, out); return;
    case 6: multiply_tile(matrix, group, rows, first, 6, out); return;
    case 7: multiply_tile(matrix, group, rows, first, 7, out); return;
    case 8: multiply_tile(matrix, group, rows, first, 8, out); return;
#endif
    }
}

/* x / (1 + exp(-x)) */
static inline float silu(float x) {
    float power = exp2_fast(-1.44269504088896f * fabsf(x));
    return (x < 0 ? x * power : x) / (1.0f + power);
}

/* Summands of the outputs, or NULL. */
typedef struct {
    const float *bias;
    const row_t *residual;
    int64_t residual_row;
} Added;

/* The outputs of row n are at out + n * out_row. */
typedef struct {
    row_t *out;
    int64_t out_row, gated;
    const Added *added;
} Call;

static void finish_row(const Matrix *matrix, const Call *call, int64_t row, int64_t group, const float *product,
                       const float *up) {
    int64_t outputs = call->gated ? matrix->outputs / 2 : matrix->outputs, first = group * GROUP;
    int64_t lanes = outputs - first < GROUP ? outputs - first : GROUP;
    const float *bias = call->added->bias ? call->added->bias + first : NULL;
    const row_t *residual = call->added->residual;
    if (residual) residual += row * call->added->residual_row + first;
    float values[GROUP];
    for (int lane = 0; lane < GROUP; lane++) values[lane] = up ? silu(product[lane]) * up[lane] : product[lane];
    for (int64_t lane = 0; lane < lanes; lane++) {
        float value = values[lane];
        if (bias) value += bias[lane];
        if (residual) value += load_row(residual[lane]);
        call->out[row * call->out_row + first + lane] = round_row(value);
    }
}

/* A group of outputs for all rows of a call, which begin at row `start`. */
static void run_group(const Matrix *matrix, const Call *call, Activations rows, int64_t start, int64_t count,
                      int64_t group) {
    float products[TILE][GROUP], ups[TILE][GROUP];
    for (int64_t first = 0; first < count; first += TILE) {
        int tile = count - first < TILE ? (int)(count - first) : TILE;
        multiply_rows(matrix, group, rows, first, tile, products);
        if (call->gated) multiply_rows(matrix, group + matrix->outputs / 2 / GROUP, rows, first, tile, ups);
        for (int n = 0; n < tile; n++)
            finish_row(matrix, call, start + first + n, group, products[n], call->gated ? ups[n] : NULL);
    }
}

static Activations row_at(Activations rows, int64_t row, int64_t chunks) {
    return (Activations){rows.codes + row * chunks * CHUNK, rows.scales + row * chunks,
                         rows.corrections + row * chunks * CHUNK_SUBS};
}

/* out = x @ matrix.T + bias + residual, or, if gated, silu(x @ gate.T) * (x @ up.T) of a matrix [gate, up] whose
   halves are whole groups. Returns 1 if memory runs out. */
int looseleaf_multiply(const Matrix *matrix, const row_t *x, int64_t x_row, int64_t num_rows, row_t *out,
                       int64_t out_row, const Added *added, int64_t gated) {
    Call call = {out, out_row, gated, added};
    int64_t chunks = matrix->num_blocks * SUPER, held = num_rows < MOST_ROWS ? num_rows : MOST_ROWS;
    int64_t outputs = gated ? matrix->outputs / 2 : matrix->outputs, groups = (outputs + GROUP - 1) / GROUP;
    int64_t code_bytes = (held * chunks * CHUNK + LINE - 1) / LINE * LINE;
    int8_t *memory = malloc(code_bytes + held * chunks * (1 + CHUNK_SUBS) * sizeof(float));
    if (!memory) return 1;
    float *scales = (float *)(memory + code_bytes);
    Activations rows = {memory, scales, (void *)(scales + held * chunks)};
    int threads = matrix->outputs * chunks * held > PARALLEL_BYTES / CHUNK;
#pragma omp parallel if (threads)
    for (int64_t start = 0; start < num_rows; start += held) {
        int64_t count = num_rows - start < held ? num_rows - start : held;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; row++)
            quantize_row(x + (start + row) * x_row, chunks, row_at(rows, row, chunks));
#pragma omp for schedule(static)
        for (int64_t group = 0; group < groups; group++) run_group(matrix, &call, rows, start, count, group);
    }
    free(memory);
    return 0;
}

/* The codes of a chunk of one row, from those of its group. */
INLINE void row_codes(const uint8_t *chunk, int row, uint8_t *codes) {
    for (int t = 0; t < (BITS == 8 ? WORDS : 4); t++) memcpy(codes + 4 * t, chunk + LINE * t + 4 * row, 4);
    if (BITS == 8) return;
    uint8_t upper[8] = {0};
    for (int t = 0; BITS > 4 && t < BITS - 4; t++) memcpy(upper + 4 * t, chunk + LINE * (4 + t) + 4 * row, 4);
    for (int n = 0; n < 16; n++) codes[16 + n] = codes[n] >> 4, codes[n] &= 15;
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

/* Rows of the matrix by number, each value rounded once; numbers are in range. */
void looseleaf_rows(const Matrix *matrix, const int64_t *numbers, int64_t count, row_t *out) {
    int64_t blocks = matrix->num_blocks;
#pragma omp parallel for schedule(static) if (count > GROUP)
    for (int64_t n = 0; n < count; n++)
        write_row(matrix->packed + numbers[n] / GROUP * group_bytes(blocks), blocks, (int)(numbers[n] % GROUP),
                  out + n * blocks * BLOCK);
}
