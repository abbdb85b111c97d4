/* Search in flat, clustered and graph indexes, and the attention over what was found.

   `vectors.h` stands before this text. A call has many searches, each with its own index and query;
   threads take one at a time, and nothing here knows Python. */

typedef struct {
    Keys keys;
    int64_t built; /* the keys from here on are newer than the structure and scanned */
    /* graph: `degree` neighbours of each key, ended by -1, and the keys where a search begins */
    const int32_t *links;
    int64_t degree;
    const int32_t *entries;
    int64_t num_entries;
    /* clusters: the members of cluster c are members[starts[c]] to members[starts[c + 1] - 1] */
    const float *means;
    const int32_t *starts, *members;
    int64_t clusters;
} Index;

typedef struct {
    const Index *index;
    const float *query;
    int64_t want, effort;
    int32_t *ids; /* `want` of them, best first, ended by -1 */
    float *scores;
    int64_t *scanned; /* keys and centroids */
    /* attention over the hits; no `values`, none */
    const Keys *values; /* of VALUE_TYPE */
    float scale;
    float *out, *lse;
} Search;

static void scan(const Search *search, int64_t first, int64_t last, Best *best) {
    const Keys *keys = &search->index->keys;
    for (int64_t n = first; n < last; n++) {
        Hit hit = {score_key(keys, search->query, n), (int32_t)n};
        offer(best, hit);
    }
    *search->scanned += last - first;
}

static void scan_clusters(const Search *search, Best *best) {
    const Index *index = search->index;
    int64_t probes = search->effort < index->clusters ? search->effort : index->clusters;
    Best nearest = {malloc(sizeof(Hit) * (size_t)(probes + 1)), 0, probes};
    for (int64_t c = 0; c < index->clusters; c++) {
        Hit hit = {score_floats(search->query, index->means + c * DIM), (int32_t)c};
        offer(&nearest, hit);
    }
    *search->scanned += index->clusters;
    for (int64_t p = 0; p < nearest.count; p++) {
        int32_t c = nearest.hits[p].id;
        for (int32_t m = index->starts[c]; m < index->starts[c + 1]; m++) {
            if (m + 4 < index->starts[c + 1]) fetch_key(&index->keys, index->members[m + 4]);
            Hit hit = {score_key(&index->keys, search->query, index->members[m]), index->members[m]};
            offer(best, hit);
        }
        *search->scanned += index->starts[c + 1] - index->starts[c];
    }
    free(nearest.hits);
}

/* Candidates, best first. `marks` are twice their keys, and one more if they were looked behind. */
typedef struct {
    float *scores;
    int32_t *marks;
    int64_t count, capacity;
} Queue;

/* Take a hit in; its place, or the capacity if it is no better than any. */
static inline int64_t take_in(Queue *queue, Hit hit) {
    float *scores = queue->scores;
    int32_t *marks = queue->marks;
    int64_t count = queue->count, last = queue->capacity - 1;
    if (count > last) {
        if (hit.score < scores[last] || (hit.score == scores[last] && hit.id >= marks[last] / 2)) return last + 1;
        count = last;
    }
    /* all are compared, many at once: a search by halves would be guessed wrong at every step */
    int32_t place = 0;
    for (int64_t n = 0; n < count; n++)
        place += (scores[n] > hit.score) | ((scores[n] == hit.score) & ((marks[n] >> 1) < hit.id));
    memmove(scores + place + 1, scores + place, sizeof(float) * (size_t)(count - place));
    memmove(marks + place + 1, marks + place, sizeof(int32_t) * (size_t)(count - place));
    scores[place] = hit.score;
    marks[place] = 2 * hit.id;
    queue->count = count + 1;
    return place;
}

static inline void fetch_links(const Index *index, int64_t key) {
    const char *p = (const char *)(index->links + key * index->degree);
    for (int64_t i = 0; i < index->degree * 4; i += 64) __builtin_prefetch(p + i);
}

/* Candidates whose links are followed at once: one alone leaves the memory idle while it waits for
   the links. Keys that are on their way while others are compared: of more a processor can't keep
   track, and waits for them before it compares. */
enum { WIDE = 4, AHEAD = 8 };

/* Links that were not seen before. `seen` has 32 keys a word. */
static int64_t follow(const int32_t *links, int64_t count, uint32_t *seen, int32_t *fresh) {
    int64_t news = 0, n = 0;
#if LANES == 16
    for (; n + 16 <= count; n += 16) {
        __m512i some = _mm512_loadu_si512(links + n);
        __mmask16 there = _mm512_cmpge_epi32_mask(some, _mm512_setzero_si512());
        __m512i words = _mm512_mask_i32gather_epi32(some, there, _mm512_srli_epi32(some, 5), seen, 4);
        __m512i bits = _mm512_sllv_epi32(_mm512_set1_epi32(1), _mm512_and_si512(some, _mm512_set1_epi32(31)));
        __mmask16 unseen = _mm512_mask_testn_epi32_mask(there, words, bits);
        _mm512_mask_compressstoreu_epi32(fresh + news, unseen, some);
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

/* Best first from the entries; `effort` hits are kept, and every one of them is looked behind. */
static void walk(const Search *search, Best *best) {
    const Index *index = search->index;
    int64_t effort = search->effort > search->want ? search->effort : search->want;
    uint32_t *seen = calloc((size_t)(index->built / 32 + 1), sizeof(uint32_t));
    int64_t most = index->degree * WIDE > index->num_entries ? index->degree * WIDE : index->num_entries;
    /* scores and keys of the candidates, then of those that are compared next */
    int32_t *room = malloc(sizeof(int32_t) * (size_t)(2 * effort + most + 16));
    Queue queue = {(float *)room, room + effort, 0, effort};
    int32_t *fresh = queue.marks + effort;
    /* none before `first` is left to look behind */
    int64_t first = 0, news = follow(index->entries, index->num_entries, seen, fresh), fetched = 0;
    while (news) {
        *search->scanned += news;
        for (int64_t n = 0; n < news; n++) {
            for (; fetched < news && fetched <= n + AHEAD; fetched++) fetch_key(&index->keys, fresh[fetched]);
            int64_t place = take_in(&queue, (Hit){score_key(&index->keys, search->query, fresh[n]), fresh[n]});
            if (place < first) first = place;
        }
        for (news = fetched = 0; !news;) {
            int32_t next[WIDE];
            int64_t chosen = 0;
            for (; first < queue.count && chosen < WIDE; first++) {
                if (queue.marks[first] % 2) continue;
                next[chosen++] = queue.marks[first]++ / 2;
                fetch_links(index, next[chosen - 1]);
            }
            if (!chosen) break;
            for (int64_t n = 0; n < chosen; n++) {
                news += follow(index->links + next[n] * index->degree, index->degree, seen, fresh + news);
                for (; fetched < news && fetched < AHEAD; fetched++) fetch_key(&index->keys, fresh[fetched]);
            }
        }
    }
    for (int64_t n = 0; n < queue.count; n++) offer(best, (Hit){queue.scores[n], queue.marks[n] / 2});
    free(seen);
    free(room);
}

static void attend(const Search *search, const Hit *hits, int64_t count) {
    vec sum[VECS];
    memset(sum, 0, sizeof sum);
    float top = count ? hits[0].score * search->scale : -INFINITY, total = 0.0f;
    for (int64_t n = 0; n < count; n++) {
        if (n + 4 < count) fetch_value(key_as(VALUE_TYPE, search->values, hits[n + 4].id));
        const char *value = key_as(VALUE_TYPE, search->values, hits[n].id);
        float weight = expf(hits[n].score * search->scale - top);
        total += weight;
        for (int i = 0; i < VECS; i++) sum[i] += load_as(VALUE_TYPE, value, i * LANES) * weight;
    }
    for (int i = 0; i < VECS; i++) {
        sum[i] *= count ? 1.0f / total : 0.0f;
        memcpy(search->out + i * LANES, &sum[i], sizeof sum[i]);
    }
    *search->lse = count ? top + logf(total) : -INFINITY;
}

/* Keys that were found as copies get the scores of what they are copies of. */
static void judge(const Keys *keys, const float *query, Best *best) {
    for (int64_t n = 0; n < best->count; n++) fetch_value(exact_key(keys, best->hits[n].id));
    int64_t found = best->count;
    for (best->count = 0; best->count < found;) {
        Hit hit = best->hits[best->count];
        hit.score = score_as(VALUE_TYPE, query, exact_key(keys, hit.id));
        offer(best, hit);
    }
}

static void run(const Search *search) {
    const Index *index = search->index;
    int64_t want = search->want < index->keys.count ? search->want : index->keys.count;
    Best best = {malloc(sizeof(Hit) * (size_t)(want + 1)), 0, want};
    *search->scanned = 0;
    int64_t built = index->built;
    if (want == index->keys.count || !(index->links || index->means)) built = 0; /* all, or no structure */
    else if (index->means) scan_clusters(search, &best);
    else walk(search, &best);
    scan(search, built, index->keys.count, &best);
    if (index->keys.exact) judge(&index->keys, search->query, &best);
    settle(&best);
    for (int64_t n = 0; n < search->want; n++) {
        search->ids[n] = n < best.count ? best.hits[n].id : -1;
        search->scores[n] = n < best.count ? best.hits[n].score : -INFINITY;
    }
    if (search->values) attend(search, best.hits, best.count);
    free(best.hits);
}

void looseleaf_search(const Search *searches, int64_t count, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < count; n++) run(&searches[n]);
}
