/* Best-first search of a graph by codes, and rescoring of its candidates by keys.

   Included after `vectors.h`, `codes.h` and `index.h`. */

/* A candidate in one word: score, complemented number (equal scores rank lower numbers first), and a
   bit that is set until the candidate is expanded. */
typedef int64_t Word;
enum { LAST = 0x7fffffff };

static inline Word word_of(int32_t score, int32_t number, int open) {
    return (Word)score << 32 | (uint32_t)(LAST - number) << 1 | (uint32_t)open;
}

static inline int32_t number_of(Word word) { return LAST - (int32_t)((uint32_t)word >> 1); }

/* Integers in the order of finite floats, and the inverse. */
static inline int32_t rank_of(float score) {
    int32_t bits;
    score += 0.0f; /* maps -0 to 0 */
    memcpy(&bits, &score, sizeof bits);
    return bits ^ ((bits >> 31) & LAST);
}

static inline float score_of(Word word) {
    int32_t rank = (int32_t)(word >> 32), bits = rank ^ ((rank >> 31) & LAST);
    float score;
    memcpy(&score, &bits, sizeof score);
    return score;
}

/* A descending array of `room` words, a multiple of eight, after eight sentinels. */
static Word *make_queue(int64_t least, int64_t *room) {
    *room = (least + 7) / 8 * 8;
    Word *row = aligned_alloc(64, sizeof(Word) * (size_t)(*room + 8));
    for (int64_t n = 0; n < *room + 8; n++) row[n] = n < 8 ? INT64_MAX : INT64_MIN;
    return row + 8;
}

static void free_queue(Word *row) { free(row - 8); }

/* Insert a word into a descending array, from the end on; drops the least word. */
static inline void insert(Word *row, int64_t room, Word word) {
#ifdef __AVX512F__
    /* a slot keeps its word, or takes the preceding word, or takes the new word between both */
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

/* Visited vertices, in order, and the scores of their codes. */
typedef struct {
    int32_t *vertices, *scores;
    int64_t count, room;
} Visited;

static void make_room(Visited *visited, int64_t more) {
    if (visited->count + more <= visited->room) return;
    while (visited->count + more > visited->room) visited->room *= 2;
    visited->vertices = realloc(visited->vertices, sizeof(int32_t) * (size_t)visited->room);
    visited->scores = realloc(visited->scores, sizeof(int32_t) * (size_t)visited->room);
}

/* WIDE candidates are expanded together, because loads of a single one leave memory idle. The links of
   NEXT further candidates are prefetched, since these mostly follow. AHEAD codes are prefetched. */
enum { WIDE = 2, NEXT = 4, AHEAD = 32 };

/* The unvisited vertices of `links`. `seen` is a bitmap of visited vertices. */
static int64_t follow(const int32_t *links, int64_t count, uint32_t *seen, int32_t *fresh) {
    int64_t news = 0, n = 0;
#ifdef __AVX512F__
    for (; n + 16 <= count; n += 16) {
        __m512i batch = _mm512_loadu_si512(links + n);
        __mmask16 valid = _mm512_cmpge_epi32_mask(batch, _mm512_setzero_si512());
        __m512i words = _mm512_mask_i32gather_epi32(batch, valid, _mm512_srli_epi32(batch, 5), seen, 4);
        __m512i bits = _mm512_sllv_epi32(_mm512_set1_epi32(1), _mm512_and_si512(batch, _mm512_set1_epi32(31)));
        __mmask16 unseen = _mm512_mask_testn_epi32_mask(valid, words, bits);
        /* stores all lanes, and overwrites the excess later: compressed stores are slow on batch processors */
        _mm512_storeu_si512(fresh + news, _mm512_maskz_compress_epi32(unseen, batch));
        for (int64_t last = news + __builtin_popcount(unseen); news < last; news++)
            seen[fresh[news] >> 5] |= 1u << (fresh[news] & 31);
        if (valid != 0xffff) return news;
    }
#endif
    for (; n < count && links[n] >= 0; n++) {
        uint32_t word = seen[links[n] >> 5], bit = 1u << (links[n] & 31);
        seen[links[n] >> 5] = word | bit;
        /* branchless, because the branch would be unpredictable */
        fresh[news] = links[n];
        news += !(word & bit);
    }
    return news;
}

/* Best-first search by codes, until the best `effort` visited vertices are expanded. */
static void visit_best(const Index *index, const Weights *weights, int64_t effort, Visited *visited) {
    /* candidates before `first` are expanded */
    int64_t room, first = 0, fetched = 0, news = index->entries;
    Word *queue = make_queue(effort, &room);
    uint32_t *seen = calloc((size_t)(index->vertices / 32 + 1), sizeof(uint32_t));
    make_room(visited, news);
    for (int32_t n = 0; n < (int32_t)news; n++) {
        visited->vertices[n] = n;
        seen[n >> 5] |= 1u << (n & 31);
    }
    while (news) {
        score_codes(weights, index->codes, visited->vertices + visited->count, news, fetched, AHEAD, visited->scores + visited->count);
        Word most = INT64_MIN;
        for (int64_t n = visited->count; n < visited->count + news; n++) {
            Word word = word_of(visited->scores[n], visited->vertices[n], 1);
            if (word <= queue[effort - 1]) continue;
            insert(queue, room, word);
            most = word > most ? word : most;
        }
        visited->count += news;
        while (first && queue[first - 1] <= most) first--;
        for (news = fetched = 0; !news;) {
            int32_t next[WIDE];
            int64_t num_next = 0, prefetched = 0;
            for (int64_t n = first; n < effort && queue[n] != INT64_MIN && prefetched < WIDE + NEXT; n++) {
                if (!(queue[n] & 1)) continue;
                int32_t vertex = number_of(queue[n]);
                fetch_lines((const char *)(index->links + vertex * index->degree), index->degree * 4);
                if (prefetched++ >= WIDE) continue;
                next[num_next++] = vertex;
                queue[n] ^= 1;
                first = n + 1;
            }
            if (!num_next) break;
            make_room(visited, WIDE * index->degree + 16);
            int32_t *fresh = visited->vertices + visited->count;
            for (int64_t n = 0; n < num_next; n++) {
                news += follow(index->links + next[n] * index->degree, index->degree, seen, fresh + news);
                for (; fetched < news && fetched < AHEAD; fetched++)
                    fetch_lines((const char *)index->codes + (int64_t)fresh[fetched] * HALF, HALF);
            }
        }
    }
    free(seen);
    free_queue(queue);
}

/* The score of rank `count` among visited vertices, by bisection. */
static int32_t score_of_rank(const Visited *visited, int64_t count) {
    if (visited->count <= count) return INT32_MIN;
    int64_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t n = 0; n < visited->count; n++) {
        low = visited->scores[n] < low ? visited->scores[n] : low;
        high = visited->scores[n] > high ? visited->scores[n] : high;
    }
    while (low < high) {
        int32_t middle = (int32_t)(high - (high - low) / 2);
        int64_t above = 0;
        for (int64_t n = 0; n < visited->count; n++) above += visited->scores[n] >= middle;
        if (above >= count) low = middle;
        else high = (int64_t)middle - 1;
    }
    return (int32_t)low;
}

/* Candidate keys of a walk, freed by `weigh`. */
typedef struct {
    int32_t *keys;
    int64_t count;
} Candidates;

static Candidates walk(const Search *search) {
    const Index *index = search->index;
    /* half as many expansions as hits suffice, because each visits several vertices */
    int64_t least = (search->want + 1) / 2, most = 2 * index->vertices;
    int64_t effort = search->effort > least ? search->effort : least;
    /* beyond this effort every vertex is a candidate */
    if (effort > most && most > least) effort = most;
    Weights weights;
    quantise_queries(&weights, search->query, index->steps);
    Visited visited = {malloc(sizeof(int32_t) * 4096), malloc(sizeof(int32_t) * 4096), 0, 4096};
    visit_best(index, &weights, effort, &visited);
    *search->scanned += visited.count;
    /* codes are inexact, so more candidates than hits are rescored */
    int32_t lowest = score_of_rank(&visited, search->want + effort * 3 / 4);
    Candidates candidates = {visited.vertices, 0};
    for (int64_t n = 0; n < visited.count; n++) {
        candidates.keys[candidates.count] = visited.vertices[n];
        candidates.count += visited.scores[n] >= lowest;
    }
    for (int64_t n = 0; n < candidates.count; n++) __builtin_prefetch(index->order + candidates.keys[n]);
    for (int64_t n = 0; n < candidates.count; n++) candidates.keys[n] = index->order[candidates.keys[n]];
    free(visited.scores);
    return candidates;
}

/* Rescore a walk's candidates by stored keys. `best` is ascending, which is also a valid heap. Most
   candidates become hits, so their `values`, if any, are prefetched too. */
static void weigh(const Search *search, Candidates candidates, const Keys *values, Best *best) {
    const Keys *keys = &search->index->keys;
    int64_t room;
    int32_t *scores = malloc(sizeof(int32_t) * (size_t)(candidates.count + 1));
    /* all scores before the insertions, which would stall on each key */
    for (int64_t n = 0; n < candidates.count; n++) {
        for (int64_t m = n ? n + 8 : 0; m <= n + 8 && m < candidates.count; m++) fetch_exactly(keys, candidates.keys[m]);
        if (values) fetch_value(key_as(VALUE_TYPE, values, candidates.keys[n]));
        scores[n] = rank_of(score_exactly(keys, search->query, candidates.keys[n]));
    }
    Word *hits = make_queue(best->capacity, &room);
    for (int64_t n = 0; n < candidates.count; n++) {
        Word word = word_of(scores[n], candidates.keys[n], 0);
        if (word > hits[best->capacity - 1]) insert(hits, room, word);
    }
    best->count = candidates.count < best->capacity ? candidates.count : best->capacity;
    for (int64_t n = 0; n < best->count; n++)
        best->hits[best->count - 1 - n] = (Hit){score_of(hits[n]), number_of(hits[n])};
    free_queue(hits);
    free(scores);
    free(candidates.keys);
}
