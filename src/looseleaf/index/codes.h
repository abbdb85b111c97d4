/* Scores of keys quantised to four bits per dim, with one step per dim, by integer products.

   Component d of a key is about low[d] + steps[d] * code[d]. Keys are ranked by the sums of
   query[d] * steps[d] * code[d], with query[d] * steps[d] in eight bits; `low` does not change the
   ranking. The sums are integers and equal on every machine. The low four bits of a code's bytes
   hold the first half of the dims. Included after `vectors.h`. */

enum { HALF = (DIM + 1) / 2 };

/* A quantised query: dims of the low four bits of codes, and of the high ones. */
typedef struct {
    _Alignas(64) int8_t low[HALF], high[HALF];
} Weights;

static void quantise_queries(Weights *weights, const float *query, const float *steps) {
    float products[2 * HALF] = {0}, top = 0.0f;
    for (int i = 0; i < DIM; i++) {
        products[i] = query[i] * steps[i];
        top = fabsf(products[i]) > top ? fabsf(products[i]) : top;
    }
    float scale = top > 1e-30f && top < INFINITY ? 127.0f / top : 0.0f;
    for (int i = 0; i < HALF; i++) {
        weights->low[i] = (int8_t)(scale ? rintf(products[i] * scale) : 0.0f);
        weights->high[i] = (int8_t)(scale ? rintf(products[HALF + i] * scale) : 0.0f);
    }
}

static inline int32_t score_code(const Weights *weights, const uint8_t *code) {
    int32_t score = 0;
    int i = 0;
#ifdef __AVX512VNNI__
    __m512i sums = _mm512_setzero_si512(), four = _mm512_set1_epi8(15);
    for (; i + 64 <= HALF; i += 64) {
        __m512i both = _mm512_loadu_si512(code + i);
        sums = _mm512_dpbusd_epi32(sums, _mm512_and_si512(both, four), _mm512_load_si512(weights->low + i));
        both = _mm512_and_si512(_mm512_srli_epi16(both, 4), four);
        sums = _mm512_dpbusd_epi32(sums, both, _mm512_loadu_si512(weights->high + i));
    }
    if (HALF >= 64) score = _mm512_reduce_add_epi32(sums);
#endif
#ifdef __AVX2__
    if (HALF % 64 >= 32 || (HALF >= 32 && !i)) {
        __m256i sums = _mm256_setzero_si256(), four = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        for (; i + 32 <= HALF; i += 32) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(code + i));
            /* fits sixteen bits: at most 4 * 15 * 127 */
            __m256i pairs = _mm256_add_epi16(
                _mm256_maddubs_epi16(_mm256_and_si256(both, four), _mm256_loadu_si256((const __m256i *)(weights->low + i))),
                _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(both, 4), four),
                                     _mm256_loadu_si256((const __m256i *)(weights->high + i))));
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
        }
        __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
        score += _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
    }
#endif
    for (; i < HALF; i++) score += weights->low[i] * (code[i] & 15) + weights->high[i] * (code[i] >> 4);
    return score;
}

/* Scores of `count` vertices. The first `fetched` codes are prefetched; prefetches `ahead` codes. */
static void score_codes(const Weights *weights, const uint8_t *codes, const int32_t *vertices, int64_t count,
                        int64_t fetched, int64_t ahead, int32_t *scores) {
    int64_t n = 0;
#ifdef __AVX512VNNI__
    if (HALF % 64 == 0) {
        __m512i four = _mm512_set1_epi8(15), sums[4];
        for (; n + 4 <= count; n += 4) { /* reduces four sums together */
            for (; fetched < count && fetched < n + 4 + ahead; fetched++)
                fetch_lines((const char *)codes + (int64_t)vertices[fetched] * HALF, HALF);
            for (int m = 0; m < 4; m++) {
                const uint8_t *code = codes + (int64_t)vertices[n + m] * HALF;
                sums[m] = _mm512_setzero_si512();
                for (int i = 0; i + 64 <= HALF; i += 64) {
                    __m512i both = _mm512_loadu_si512(code + i), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), four);
                    sums[m] = _mm512_dpbusd_epi32(sums[m], _mm512_and_si512(both, four), _mm512_load_si512(weights->low + i));
                    sums[m] = _mm512_dpbusd_epi32(sums[m], high, _mm512_load_si512(weights->high + i));
                }
            }
            __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[0], sums[1]), _mm512_unpackhi_epi32(sums[0], sums[1]));
            __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[2], sums[3]), _mm512_unpackhi_epi32(sums[2], sums[3]));
            __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
            __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
            __m128i all = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
            _mm_storeu_si128((__m128i *)(scores + n), all);
        }
    }
#endif
    for (; n < count; n++) {
        for (; fetched < count && fetched <= n + ahead; fetched++)
            fetch_lines((const char *)codes + (int64_t)vertices[fetched] * HALF, HALF);
        scores[n] = score_code(weights, codes + (int64_t)vertices[n] * HALF);
    }
}
