/* Search in flat, ivf and graph indexes, and attention over the hits.

   A call runs a batch of searches, each with its own index and query, on OpenMP threads. Included after
   `vectors.h`, `codes.h`, `index.h` and `walk.h`. */

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
    int64_t effort = search->effort > 1 ? search->effort : 1;
    int64_t probes = effort < index->clusters ? effort : index->clusters;
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

/* Rescore hits among copies by the exact keys. */
static void rescore(const Keys *keys, const float *query, Best *best) {
    for (int64_t n = 0; n < best->count; n++) fetch_exactly(keys, best->hits[n].id);
    int64_t total = best->count;
    for (best->count = 0; best->count < total;) {
        Hit hit = best->hits[best->count];
        hit.score = score_exactly(keys, query, hit.id);
        offer(best, hit);
    }
}

/* Whether a search walks a graph, and not all keys. */
static int walks(const Index *index, int64_t want) { return index->links && want < index->keys.count; }

/* A search after its walk, if any, with `candidates`; `values` of hits are prefetched unless NULL. */
static void search_keys(const Search *search, Candidates candidates, const Keys *values) {
    const Index *index = search->index;
    int64_t want = search->want < index->keys.count ? search->want : index->keys.count, built = index->built;
    Best best = {malloc(sizeof(Hit) * (size_t)(want + 1)), 0, want};
    int by_graph = walks(index, want);
    if (by_graph) weigh(search, candidates, values, &best);
    else if (index->means && want < index->keys.count) scan_clusters(search, &best);
    else built = 0; /* all keys, or no structure */
    scan(search, built, index->keys.count, &best);
    if (by_graph && built == index->keys.count) {
        reverse(&best); /* `weigh` rescored and sorted them, last first */
    } else {
        if (index->keys.exact) rescore(&index->keys, search->query, &best);
        sort_heap(&best);
    }
    for (int64_t n = 0; n < search->want; n++) {
        search->ids[n] = n < best.count ? best.hits[n].id : -1;
        search->scores[n] = n < best.count ? best.hits[n].score : -INFINITY;
    }
    if (search->values) attend(search, best.hits, best.count);
    free(best.hits);
}

static void run(const Search *search) {
    Candidates none = {NULL, 0};
    *search->scanned = 0;
    search_keys(search, walks(search->index, search->want) ? walk(search) : none, search->values);
}

void looseleaf_search(const Search *searches, int64_t count, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < count; n++) run(&searches[n]);
}
