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
    const Keys *values;
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
            if (m + 4 < index->starts[c + 1]) fetch_ahead(&index->keys, index->members[m + 4]);
            Hit hit = {score_key(&index->keys, search->query, index->members[m]), index->members[m]};
            offer(best, hit);
        }
        *search->scanned += index->starts[c + 1] - index->starts[c];
    }
    free(nearest.hits);
}

/* The place of a hit in a sorted list, or -1 behind its end. */
static inline int64_t place_of(const Hit *sorted, int64_t count, int64_t capacity, Hit hit) {
    if (count == capacity && !before(hit, sorted[count - 1])) return -1;
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (before(sorted[middle], hit)) low = middle + 1;
        else high = middle;
    }
    return low;
}

static inline void fetch_links(const Index *index, int64_t key) {
    const char *p = (const char *)(index->links + key * index->degree);
    for (int64_t i = 0; i < index->degree * 4; i += 64) __builtin_prefetch(p + i);
}

/* Candidates whose links are followed at once: one alone leaves the memory idle while it waits for
   the links, and then for the first key. */
enum { WIDE = 4 };

/* Links that were not seen before; their keys are on their way when they are scored. */
static int64_t follow(const Index *index, const int32_t *links, int64_t count, uint64_t *seen, int32_t *fresh) {
    int64_t news = 0;
    for (int64_t n = 0; n < count && links[n] >= 0; n++) {
        uint64_t bit = 1ull << (links[n] % 64), *word = &seen[links[n] / 64];
        if (*word & bit) continue;
        *word |= bit;
        fetch_ahead(&index->keys, links[n]);
        fresh[news++] = links[n];
    }
    return news;
}

/* Best first from the entries; `effort` hits are kept, and every one of them is looked behind. */
static void walk(const Search *search, Best *best) {
    const Index *index = search->index;
    int64_t effort = search->effort > search->want ? search->effort : search->want;
    Hit *found = malloc(sizeof(Hit) * (size_t)effort);
    uint8_t *done = malloc((size_t)effort);
    uint64_t *seen = calloc((size_t)(index->built / 64 + 1), sizeof(uint64_t));
    int64_t most = index->degree * WIDE > index->num_entries ? index->degree * WIDE : index->num_entries;
    int32_t *fresh = malloc(sizeof(int32_t) * (size_t)(most + 1));
    /* none before `first` is left to look behind */
    int64_t count = 0, first = 0, news = follow(index, index->entries, index->num_entries, seen, fresh);
    while (news) {
        *search->scanned += news;
        for (int64_t n = 0; n < news; n++) {
            Hit hit = {score_key(&index->keys, search->query, fresh[n]), fresh[n]};
            int64_t place = place_of(found, count, effort, hit);
            if (place < 0) continue;
            int64_t moved = (count < effort ? count : effort - 1) - place;
            memmove(found + place + 1, found + place, sizeof(Hit) * (size_t)moved);
            memmove(done + place + 1, done + place, (size_t)moved);
            found[place] = hit;
            done[place] = 0;
            if (count < effort) count++;
            if (place < first) first = place;
        }
        for (news = 0; !news;) {
            int32_t next[WIDE];
            int64_t chosen = 0;
            for (; first < count && chosen < WIDE; first++) {
                if (done[first]) continue;
                done[first] = 1;
                next[chosen++] = found[first].id;
                fetch_links(index, found[first].id);
            }
            if (!chosen) break;
            for (int64_t n = 0; n < chosen; n++)
                news += follow(index, index->links + next[n] * index->degree, index->degree, seen, fresh + news);
        }
    }
    for (int64_t n = 0; n < count; n++) offer(best, found[n]);
    free(found);
    free(done);
    free(seen);
    free(fresh);
}

static void attend(const Search *search, const Hit *hits, int64_t count) {
    vec sum[VECS];
    memset(sum, 0, sizeof sum);
    float top = count ? hits[0].score * search->scale : -INFINITY, total = 0.0f;
    for (int64_t n = 0; n < count; n++) {
        if (n + 4 < count) fetch_ahead(search->values, hits[n + 4].id);
        const stored_t *value = key_at(search->values, hits[n].id);
        float weight = expf(hits[n].score * search->scale - top);
        total += weight;
        float scale = search->values->scales ? search->values->scales[hits[n].id] : 1.0f;
        for (int i = 0; i < VECS; i++) sum[i] += load_key(value + i * LANES) * (weight * scale);
    }
    for (int i = 0; i < VECS; i++) {
        sum[i] *= count ? 1.0f / total : 0.0f;
        memcpy(search->out + i * LANES, &sum[i], sizeof sum[i]);
    }
    *search->lse = count ? top + logf(total) : -INFINITY;
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
