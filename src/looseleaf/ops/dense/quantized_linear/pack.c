/* Blocks of a GGUF matrix, rearranged for products: 32 rows side by side, four values of a row in a word.

   reference.py defines the values. `matrix.h` precedes this text.

   A group of 32 rows is [parameters of all blocks, rounded up to 64 bytes][codes of all chunks]. Parameters of a
   block are [32 scales in float16][32 mins in float16], and, for blocks of several chunks, the 32 scale codes and
   the 32 min codes of each sub-block. Codes of a chunk are [words 0 to 3 in the low and 4 to 7 in the high halves
   of bytes][upper bits]: byte 4r + j of word t is value 4t + j of row r. Bytes of 8-bit formats are whole codes. */

enum { WORDS = CHUNK / 4, SUBS = BLOCK / SUB, CODE_BYTES = CHUNK * GROUP * BITS / 8 };
enum { PARAMETER_BYTES = GROUP * (1 + HAS_MIN) * (2 + (SUPER > 1 ? SUBS : 0)) };

static inline int64_t parameter_bytes(int64_t num_blocks) {
    return (num_blocks * PARAMETER_BYTES + 63) / 64 * 64;
}

static inline int64_t group_bytes(int64_t num_blocks) {
    return parameter_bytes(num_blocks) + num_blocks * SUPER * CODE_BYTES;
}

static inline float16_bits half_at(const uint8_t *p) { return (float16_bits)(p[0] | p[1] << 8); }

/* The code of value `n` of a block, from 0 to 2^BITS - 1; for MXFP4 the index in its table of codes. */
static inline int code_at(const uint8_t *block, int n) {
#if FORMAT == 39 /* MXFP4: the bits of a float */
    return n < 16 ? block[1 + n] & 15 : block[n - 15] >> 4;
#elif FORMAT == 2 || FORMAT == 3 /* Q4_0, Q4_1 */
    const uint8_t *low = block + 2 * (1 + HAS_MIN);
    return n < 16 ? low[n] & 15 : low[n - 16] >> 4;
#elif FORMAT == 6 || FORMAT == 7 /* Q5_0, Q5_1 */
    const uint8_t *high = block + 2 * (1 + HAS_MIN), *low = high + 4;
    return (n < 16 ? low[n] & 15 : low[n - 16] >> 4) | (high[n / 8] >> n % 8 & 1) << 4;
#elif FORMAT == 8 /* Q8_0 */
    return block[2 + n] ^ 128;
#elif FORMAT == 12 /* Q4_K */
    return block[16 + n / 64 * 32 + n % 32] >> n / 32 % 2 * 4 & 15;
#elif FORMAT == 13 /* Q5_K */
    return (block[48 + n / 64 * 32 + n % 32] >> n / 32 % 2 * 4 & 15) | (block[16 + n % 32] >> n / 32 & 1) << 4;
#elif FORMAT == 14 /* Q6_K */
    int low = block[n / 128 * 64 + n % 64] >> n / 64 % 2 * 4 & 15;
    return low | (block[128 + n / 128 * 32 + n % 32] >> n / 32 % 4 * 2 & 3) << 4;
#else
#error "a format without a layout"
#endif
}

static inline float16_bits scale_of(const uint8_t *block) {
#if FORMAT == 39
    /* half of a power of two, since the codes are twice the floats; native.py checks the range */
    int power = block[0] - 128;
    return (float16_bits)(power >= -14 ? (power + 15) << 10 : 1 << (power + 24));
#else
    return half_at(block + (FORMAT == 14 ? 208 : 0));
#endif
}

/* The code of the scale of sub-block `n` or, with `of_min`, of its min. */
static inline uint8_t sub_code(const uint8_t *block, int n, int of_min) {
#if FORMAT == 14
    return block[192 + n];
#else
    /* twelve bytes hold 16 codes of 6 bits: four scales, four mins, then the low halves of the others */
    const uint8_t *codes = block + 4;
    if (n < 4) return codes[n + 4 * of_min] & 63;
    return (codes[n + 4] >> 4 * of_min & 15) | codes[n - 4 + 4 * of_min] >> 6 << 4;
#endif
}

static void pack_block(const uint8_t *block, int row, uint8_t *parameters, uint8_t *codes) {
    float16_bits *halves = (float16_bits *)parameters;
    halves[row] = scale_of(block);
    if (HAS_MIN) halves[GROUP + row] = half_at(block + 2);
    uint8_t *sub_codes = parameters + 2 * GROUP * (1 + HAS_MIN);
    for (int sub = 0; SUPER > 1 && sub < SUBS; sub++)
        for (int of_min = 0; of_min <= HAS_MIN; of_min++)
            sub_codes[(sub * (1 + HAS_MIN) + of_min) * GROUP + row] = sub_code(block, sub, of_min);
    for (int n = 0; n < BLOCK; n++) {
        int code = code_at(block, n), word = n % CHUNK / 4, byte = 4 * row + n % 4;
        uint8_t *chunk = codes + n / CHUNK * CODE_BYTES, *upper = chunk + 4 * LINE;
        if (BITS == 8) {
            chunk[LINE * word + byte] = (uint8_t)code;
            continue;
        }
        chunk[LINE * (word % 4) + byte] |= (uint8_t)((code & 15) << word / 4 * 4);
        if (BITS == 5) upper[byte] |= (uint8_t)(code >> 4 << word);
        if (BITS == 6) upper[LINE * (word / 4) + byte] |= (uint8_t)(code >> 4 << word % 4 * 2);
    }
}

/* Packs `rows` rows of `num_blocks` blocks; missing rows of the last group are zeros. */
void looseleaf_pack(const uint8_t *blocks, int64_t rows, int64_t row_bytes, int64_t num_blocks, uint8_t *packed) {
    int64_t bytes = group_bytes(num_blocks);
#pragma omp parallel for schedule(static)
    for (int64_t group = 0; group < (rows + GROUP - 1) / GROUP; group++) {
        uint8_t *parameters = packed + group * bytes, *codes = parameters + parameter_bytes(num_blocks);
        memset(parameters, 0, bytes);
        for (int row = 0; row < GROUP && group * GROUP + row < rows; row++)
            for (int64_t n = 0; n < num_blocks; n++)
                pack_block(blocks + (group * GROUP + row) * row_bytes + n * BLOCK_BYTES, row,
                           parameters + n * PARAMETER_BYTES, codes + n * SUPER * CODE_BYTES);
    }
}
