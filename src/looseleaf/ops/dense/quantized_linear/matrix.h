/* The packed matrix of a product: 32 rows side by side, a row in a lane. `rows.h` precedes this text.

   The build defines the format: FORMAT (GGUF's number), BITS of a code, ZERO (the code of 0), SUPER (chunks of
   32 values in a block), SUB (values per scale), HAS_MIN and BLOCK_BYTES. formats.py has the numbers.
   INSTRUCTIONS: 0 plain C, 1 AVX2, 2 AVX-VNNI, 3 AVX-512 VNNI, 4 also AVX-512 BF16. */

#include <stdlib.h>

enum { GROUP = 32, CHUNK = 32, LINE = 4 * GROUP, BLOCK = CHUNK * SUPER };
/* the most vectors of a pass; vectors share reads of activations */
enum { COLUMNS = LANES == 8 ? 4 : 2 };
/* vectors of a pass of `count` rows: one row reads whole lines of a group, since a pass that skips half of each line
   takes longer from memory, and more rows need the registers */
#define COLUMNS_OF(count) ((count) == 1 ? COLUMNS : 2)
/* rows of a tile: as many sums as the processor has registers for */
#if BITS == 16
#define TILE (INSTRUCTIONS >= 3 ? 12 : 6)
#else
#define TILE (INSTRUCTIONS >= 3 ? 8 : 4)
#endif
/* distance of prefetches in bytes: prefetchers of processors stop at pages */
enum { AHEAD = 8192 };

typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const uint8_t *packed;
    int64_t outputs, num_blocks;
} Matrix;

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
