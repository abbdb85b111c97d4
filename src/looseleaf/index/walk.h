/* The walk through a graph: from vertex to vertex by codes, then the best that were met by their keys.

   `vectors.h`, `codes.h` and `index.h` stand before this text. */

/* A candidate in one word: its score, then its number turned round, so that of equals the lower one
   is more, then whether it was not looked behind yet. */
typedef int64_t Word;
enum { LAST = 0x7fffffff };

static inline Word word_of(int32_t score, int32_t number, int open) {
    return (Word)score << 32 | (uint32_t)(LAST - number) << 1 | (uint32_t)open;
}

static inline int32_t number_of(Word word) { return LAST - (int32_t)((uint32_t)word >> 1); }

/* Whole numbers in the order of finite floats, and back. */
static inline int32_t rank_of(float score) {
    int32_t bits;
    score += 0.0f; /* there is one zero */
    memcpy(&bits, &score, sizeof bits);
    return bits ^ ((bits >> 31) & LAST);
}

static inline float score_of(Word word) {
    int32_t rank = (int32_t)(word >> 32), bits = rank ^ ((rank >> 31) & LAST);
    float score;
    memcpy(&score, &bits, sizeof score);
    return score;
}

/* Words, the most first, `room` of them, a multiple of eight; eight more stand before them. */
static Word *make_row(int64_t least, int64_t *room) {
    *room = (least + 7) / 8 * 8;
    Word *row = aligned_alloc(64, sizeof(Word) * (size_t)(*room + 8));
    for (int64_t n = 0; n < *room + 8; n++) row[n] = n < 8 ? INT64_MAX : INT64_MIN;
    return row + 8;
}

static void free_row(Word *row) { free(row - 8); }

/* Take a word in, from the end on; the least falls out. */
static inline void take_in(Word *row, int64_t room, Word word) {
#ifdef __AVX512F__
    /* a place keeps its word, or gets the one before it, or the new one between both */
    __m512i all = _mm512_set1_epi64(word), here = _mm512_load_si512(row + room - 8);
    for (int64_t n = room - 8; n >= 0; n -= 8) {
        __m512i before = _mm512_load_si512(row + n - 8);
        __m512i moved = _mm512_min_epi64(_mm512_alignr_epi64(here, before, 7), all);
        _mm512_store_si512(row + n, _mm512_max_epi64(here, moved));
        if (_mm512_cmpgt_epi64_mask(before, all) & 0x80) break;
        here = before;
    }
#else
    int64_t place = 0;
    for (int64_t n = 0; n < room; n++) place += row[n] > word;
    if (place == room) return;
    memmove(row + place + 1, row + place, sizeof(Word) * (size_t)(room - place - 1));
    row[place] = word;
#endif
}

/* Vertices in the order in which they were met, and the scores of their codes. */
typedef struct {
    int32_t *vertices, *scores;
    int64_t count, room;
} Met;

static void make_room(Met *met, int64_t more) {
    if (met->count + more <= met->room) return;
    while (met->count + more > met->room) met->room *= 2;
    met->vertices = realloc(met->vertices, sizeof(int32_t) * (size_t)met->room);
    met->scores = realloc(met->scores, sizeof(int32_t) * (size_t)met->room);
}

/* Candidates whose links are followed at once: one alone leaves the memory idle while it waits for
   the links. Those after them will mostly be next, so their links are called for too. Codes that are
   on their way while others are compared. */
enum { WIDE = 2, NEXT = 4, AHEAD = 32 };

/* Links that were not seen before. `seen` has 32 vertices a word. */
static int64_t follow(const int32_t *links, int64_t count, uint32_t *seen, int32_t *fresh) {
    int64_t news = 0, n = 0;
#ifdef __AVX512F__
    for (; n + 16 <= count; n += 16) {
        __m512i some = _mm512_loadu_si512(links + n);
        __mmask16 there = _mm512_cmpge_epi32_mask(some, _mm512_setzero_si512());
        __m512i words = _mm512_mask_i32gather_epi32(some, there, _mm512_srli_epi32(some, 5), seen, 4);
        __m512i bits = _mm512_sllv_epi32(_mm512_set1_epi32(1), _mm512_and_si512(some, _mm512_set1_epi32(31)));
        __mmask16 unseen = _mm512_mask_testn_epi32_mask(there, words, bits);
        /* all lanes are stored, of which the first count: compressing into memory is slow on some processors */
        _mm512_storeu_si512(fresh + news, _mm512_maskz_compress_epi32(unseen, some));
        for (int64_t last = news + __builtin_popcount(unseen); news < last; news++)
            seen[fresh[news] >> 5] |= 1u << (fresh[news] & 31);
        if (there != 0xffff) return news;
    }
#endif
    for (; n < count && links[n] >= 0; n++) {
        uint32_t was = seen[links[n] >> 5], bit = 1u << (links[n] & 31);
        seen[links[n] >> 5] = was | bit;
        /* without a branch, which nothing could guess */
        fresh[news] = links[n];
        news += !(was & bit);
    }
    return news;
}

/* Best first by codes: all that was met, and the best `effort` of them were looked behind. */
static void meet(const Index *index, const Asked *asked, int64_t effort, Met *met) {
    /* none before `first` is left to look behind */
    int64_t room, first = 0, fetched = 0, news = index->entries;
    Word *queue = make_row(effort, &room);
    uint32_t *seen = calloc((size_t)(index->vertices / 32 + 1), sizeof(uint32_t));
    make_room(met, news);
    for (int32_t n = 0; n < (int32_t)news; n++) {
        met->vertices[n] = n;
        seen[n >> 5] |= 1u << (n & 31);
    }
    while (news) {
        score_codes(asked, index->codes, met->vertices + met->count, news, fetched, AHEAD, met->scores + met->count);
        Word most = INT64_MIN;
        for (int64_t n = met->count; n < met->count + news; n++) {
            Word word = word_of(met->scores[n], met->vertices[n], 1);
            if (word <= queue[effort - 1]) continue;
            take_in(queue, room, word);
            most = word > most ? word : most;
        }
        met->count += news;
        while (first && queue[first - 1] <= most) first--;
        for (news = fetched = 0; !news;) {
            int32_t next[WIDE];
            int64_t chosen = 0, called = 0;
            for (int64_t n = first; n < effort && queue[n] != INT64_MIN && called < WIDE + NEXT; n++) {
                if (!(queue[n] & 1)) continue;
                int32_t vertex = number_of(queue[n]);
                fetch_lines((const char *)(index->links + vertex * index->degree), index->degree * 4);
                if (called++ >= WIDE) continue;
                next[chosen++] = vertex;
                queue[n] ^= 1;
                first = n + 1;
            }
            if (!chosen) break;
            make_room(met, WIDE * index->degree + 16);
            int32_t *fresh = met->vertices + met->count;
            for (int64_t n = 0; n < chosen; n++) {
                news += follow(index->links + next[n] * index->degree, index->degree, seen, fresh + news);
                for (; fetched < news && fetched < AHEAD; fetched++)
                    fetch_lines((const char *)index->codes + (int64_t)fresh[fetched] * HALF, HALF);
            }
        }
    }
    free(seen);
    free_row(queue);
}

/* The score of the last of the best `count` that were met, halving what is left between two bounds. */
static int32_t last_of(const Met *met, int64_t count) {
    if (met->count <= count) return INT32_MIN;
    int64_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t n = 0; n < met->count; n++) {
        low = met->scores[n] < low ? met->scores[n] : low;
        high = met->scores[n] > high ? met->scores[n] : high;
    }
    while (low < high) {
        int32_t middle = (int32_t)(high - (high - low) / 2);
        int64_t above = 0;
        for (int64_t n = 0; n < met->count; n++) above += met->scores[n] >= middle;
        if (above >= count) low = middle;
        else high = (int64_t)middle - 1;
    }
    return (int32_t)low;
}

/* What a walk leaves: keys that may be among the best. Who takes it frees it. */
typedef struct {
    int32_t *keys;
    int64_t count;
} Promising;

static Promising walk(const Search *search) {
    const Index *index = search->index;
    /* of as many as are wanted half are enough to look behind: what they lead to is met as well */
    int64_t least = (search->want + 1) / 2, most = 2 * index->vertices;
    int64_t effort = search->effort > least ? search->effort : least;
    /* three quarters of it are kept: with twice the vertices all of them, and more is only memory */
    if (effort > most && most > least) effort = most;
    Asked asked;
    ask_codes(&asked, search->query, index->steps);
    Met met = {malloc(sizeof(int32_t) * 4096), malloc(sizeof(int32_t) * 4096), 0, 4096};
    meet(index, &asked, effort, &met);
    *search->scanned += met.count;
    /* codes are wrong by a little: more than are wanted are read as they are */
    int32_t lowest = last_of(&met, search->want + effort * 3 / 4);
    Promising some = {met.vertices, 0};
    for (int64_t n = 0; n < met.count; n++) {
        some.keys[some.count] = met.vertices[n];
        some.count += met.scores[n] >= lowest;
    }
    for (int64_t n = 0; n < some.count; n++) __builtin_prefetch(index->order + some.keys[n]);
    for (int64_t n = 0; n < some.count; n++) some.keys[n] = index->order[some.keys[n]];
    free(met.scores);
    return some;
}

/* The best of a walk's keys as they are stored, the last of them first, which is a heap too. Most of
   them are hits, so `values` are called for with them, if they are to be read. */
static void weigh(const Search *search, Promising some, const Keys *values, Best *best) {
    const Keys *keys = &search->index->keys;
    int64_t room;
    int32_t *scores = malloc(sizeof(int32_t) * (size_t)(some.count + 1));
    /* all scores first: what goes on where would wait for each key */
    for (int64_t n = 0; n < some.count; n++) {
        for (int64_t m = n ? n + 8 : 0; m <= n + 8 && m < some.count; m++) fetch_exactly(keys, some.keys[m]);
        if (values) fetch_value(key_as(VALUE_TYPE, values, some.keys[n]));
        scores[n] = rank_of(score_exactly(keys, search->query, some.keys[n]));
    }
    Word *hits = make_row(best->capacity, &room);
    for (int64_t n = 0; n < some.count; n++) {
        Word word = word_of(scores[n], some.keys[n], 0);
        if (word > hits[best->capacity - 1]) take_in(hits, room, word);
    }
    best->count = some.count < best->capacity ? some.count : best->capacity;
    for (int64_t n = 0; n < best->count; n++)
        best->hits[best->count - 1 - n] = (Hit){score_of(hits[n]), number_of(hits[n])};
    free_row(hits);
    free(scores);
    free(some.keys);
}
