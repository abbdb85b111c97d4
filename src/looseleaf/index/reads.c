/* Attention of decoding rows over host-resident segments, from query to state.

   A query head of a row takes two units. The first rotates the query into the frame of each segment and
   walks the graph, if the index is a graph. The second attends to the hits of the walk, or of another
   index, and to the tokens that are always read, in one softmax. Short units let threads finish
   together; the two may run on different threads. Included after `vectors.h` and `search.c`. */

#include <sched.h>

/* A KV head of a layer of a segment, for one query head. */
typedef struct {
    const Index *index;   /* NULL: all tokens are in `always` */
    const Keys *values;   /* values of the indexed keys, of VALUE_TYPE */
    const Keys *always[2]; /* keys and values that every row reads, of VALUE_TYPE */
    int64_t effort, top;  /* the effort of a search for `top` keys */
    /* estimated attention, unless `value_means` is NULL: mean values of the first `estimated` clusters,
       and the cluster of every key, or -1 */
    const float *value_means;
    const int32_t *cluster_of;
    int64_t estimated;
} Head;

/* A row's read of a segment: the row's `position` in the frame, and `want` hits of the index;
   for an output with a window, its earlier hits `found`. */
typedef struct {
    int64_t row, position, want;
    const Head *heads;
    const struct Found *found;
} Read;

typedef struct {
    const void *q; /* [rows, heads, DIM], unrotated; types are numbered as VALUE_TYPE */
    int64_t q_type, heads;
    const float *cos, *sin; /* [positions, half] */
    int64_t half, interleaved;
    const Read *reads;
    const int64_t *starts; /* the reads of the n-th reading row are starts[n] to starts[n + 1] - 1 */
    float scale;
    int64_t sampled; /* the unit with a recall measurement, or -1 */
    float *out, *lse; /* [rows, heads, DIM] and [rows, heads]; merged with their present contents */
    int64_t counts[5]; /* visible keys, keys read, vectors compared; of the sampled unit: exact keys, hits */
    const struct Window *windows; /* that of the n-th reading row; NULL: rows without windows */
    int64_t pairs;            /* query heads of reading rows */
    Candidates *walked;        /* [reads, heads] candidates of walks */
    int32_t *ready;           /* pairs + 1, in the order of their finished walks; then zeros */
    int64_t num_ready;
} Task;

typedef struct {
    float sum[DIM], top, total;
} State;

static float widen_number(const void *p, int64_t type, int64_t n) {
    if (type == 0) return ((const float *)p)[n];
    if (type == 2) return widen_float16(((const float16_bits *)p)[n]);
    uint32_t word = (uint32_t)((const uint16_t *)p)[n] << 16;
    float wide;
    memcpy(&wide, &word, sizeof wide);
    return wide;
}

static inline void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void rotate(const Task *task, int64_t row, int64_t head, int64_t position, float *query) {
    int64_t first = (row * task->heads + head) * DIM, half = task->half;
    const float *cos = task->cos + position * half, *sin = task->sin + position * half;
    for (int64_t n = 0; n < DIM; n++) query[n] = widen_number(task->q, task->q_type, first + n);
    for (int64_t n = 0; n < half; n++) {
        float *a = query + (task->interleaved ? 2 * n : n), *b = task->interleaved ? a + 1 : a + half;
        float x = *a, y = *b;
        *a = x * cos[n] - y * sin[n];
        *b = y * cos[n] + x * sin[n];
    }
}

/* Add `count` keys with `scores` to a state. Their values are `ids`, or consecutive from `first`. */
static void join(State *state, const float *scores, const int32_t *ids, int64_t first, int64_t count, const Keys *values) {
    float top = state->top;
    for (int64_t n = 0; n < count; n++) top = scores[n] > top ? scores[n] : top;
    if (top == -INFINITY) return;
    vec sum[VECS];
    float before = expf(state->top - top), total = state->total * before;
    for (int i = 0; i < VECS; i++) sum[i] = load_floats(state->sum + i * LANES) * before;
    for (int64_t n = 0; n < count; n++) {
        int64_t id = ids ? ids[n] : first + n;
        if (ids && n + 8 < count) fetch_value(key_as(VALUE_TYPE, values, ids[n + 8]));
        const char *value = key_as(VALUE_TYPE, values, id);
        float weight = expf(scores[n] - top);
        total += weight;
        for (int i = 0; i < VECS; i++) sum[i] += load_as(VALUE_TYPE, value, i * LANES) * weight;
    }
    memcpy(state->sum, sum, sizeof sum);
    state->top = top;
    state->total = total;
}

static void join_all(State *state, const Keys *const pair[2], const float *query, float scale) {
    enum { TILE = 128 };
    float scores[TILE];
    for (int64_t first = 0; first < pair[0]->count; first += TILE) {
        int64_t count = pair[0]->count - first < TILE ? pair[0]->count - first : TILE;
        for (int64_t n = 0; n < count; n++)
            scores[n] = score_as(VALUE_TYPE, query, key_as(VALUE_TYPE, pair[0], first + n)) * scale;
        join(state, scores, NULL, first, count, pair[1]);
    }
}

static void measure(Task *task, const Index *index, const float *query, int64_t want, const float *scores) {
    const Keys *keys = &index->keys;
    int64_t found = 0;
    Best best = {malloc(sizeof(Hit) * (size_t)(want + 1)), 0, want};
    for (int64_t n = 0; n < keys->count; n++) {
        float score = keys->exact ? score_as(VALUE_TYPE, query, exact_key(keys, n)) : score_key(keys, query, n);
        offer(&best, (Hit){score, (int32_t)n});
    }
    float last = best.hits[0].score;
    free(best.hits);
    for (int64_t n = 0; n < want; n++) found += scores[n] >= last - 1e-4f * fabsf(last) - 1e-6f;
    __atomic_fetch_add(&task->counts[3], want, __ATOMIC_RELAXED);
    __atomic_fetch_add(&task->counts[4], found < want ? found : want, __ATOMIC_RELAXED);
}

/* Hits of a query, best first, with scaled scores. The caller frees `ids`, which also frees `scores`. */
typedef struct {
    int32_t *ids;
    float *scores;
    int64_t count;
} HeadHits;

static int64_t effort_for(const Head *entry, int64_t want) {
    int64_t effort = entry->effort;
    return want > entry->top ? llrint((double)effort * (double)want / (double)entry->top) : effort;
}

static int64_t num_hits(const Head *entry, const Read *read) {
    int64_t count = entry->index->keys.count;
    return read->want < count ? read->want : count;
}

/* The candidates of a graph walk; empty for other indexes. */
static Candidates walk_for(Task *task, const Head *entry, const float *query, int64_t want) {
    Candidates candidates = {NULL, 0};
    if (!walks(entry->index, want)) return candidates;
    int64_t scanned = 0;
    Search search = {entry->index, query, want, effort_for(entry, want), NULL, NULL, &scanned, NULL, 0.0f, NULL, NULL};
    candidates = walk(&search);
    __atomic_fetch_add(&task->counts[2], scanned, __ATOMIC_RELAXED);
    return candidates;
}

static HeadHits find(Task *task, const Head *entry, const float *query, int64_t want, Candidates candidates, int sampled) {
    const Index *index = entry->index;
    int32_t *ids = malloc((sizeof(int32_t) + sizeof(float)) * (size_t)(want + 1));
    HeadHits hits = {ids, (float *)(ids + want + 1), 0};
    int64_t scanned = 0;
    Search search = {index, query, want, effort_for(entry, want), ids, hits.scores, &scanned, NULL, 0.0f, NULL, NULL};
    search_keys(&search, candidates, entry->values);
    while (hits.count < want && ids[hits.count] >= 0) hits.count++;
    if (sampled) measure(task, index, query, want, hits.scores);
    for (int64_t n = 0; n < hits.count; n++) hits.scores[n] *= task->scale;
    __atomic_fetch_add(&task->counts[1], hits.count, __ATOMIC_RELAXED);
    __atomic_fetch_add(&task->counts[2], scanned, __ATOMIC_RELAXED);
    return hits;
}

/* Add estimated attention over keys without a hit: the mean key of the cluster, weighted by the number
   of its remaining keys, with the sum of the cluster's values minus those of hits. */
static void join_estimate(const Task *task, State *state, const Head *entry, const float *query, const HeadHits *hits) {
    const Index *index = entry->index;
    int64_t clusters = entry->estimated;
    if (!clusters || hits->count == index->keys.count) return;
    float *scores = malloc((sizeof(float) + sizeof(int32_t)) * (size_t)clusters), top = state->top;
    int32_t *left = (int32_t *)(scores + clusters);
    for (int64_t c = 0; c < clusters; c++) left[c] = index->starts[c + 1] - index->starts[c];
    for (int64_t n = 0; n < hits->count; n++)
        if (hits->ids[n] < index->built && entry->cluster_of[hits->ids[n]] >= 0) left[entry->cluster_of[hits->ids[n]]]--;
    for (int64_t c = 0; c < clusters; c++) {
        if (!left[c]) continue;
        scores[c] = score_floats(query, index->means + c * DIM) * task->scale;
        top = scores[c] > top ? scores[c] : top;
    }
    vec sum[VECS];
    float before = state->top > -INFINITY ? expf(state->top - top) : 0.0f, total = state->total * before;
    for (int i = 0; i < VECS; i++) sum[i] = load_floats(state->sum + i * LANES) * before;
    for (int64_t c = 0; c < clusters; c++) {
        if (!left[c]) continue;
        scores[c] = expf(scores[c] - top);
        total += scores[c] * (float)left[c];
        float weight = scores[c] * (float)(index->starts[c + 1] - index->starts[c]);
        for (int i = 0; i < VECS; i++) sum[i] += load_floats(entry->value_means + c * DIM + i * LANES) * weight;
    }
    for (int64_t n = 0; n < hits->count; n++) {
        int32_t c = hits->ids[n] < index->built ? entry->cluster_of[hits->ids[n]] : -1;
        if (c < 0 || !left[c]) continue;
        const char *value = key_as(VALUE_TYPE, entry->values, hits->ids[n]);
        for (int i = 0; i < VECS; i++) sum[i] -= load_as(VALUE_TYPE, value, i * LANES) * scores[c];
    }
    memcpy(state->sum, sum, sizeof sum);
    state->top = top;
    state->total = total;
    free(scores);
}

static void count_read(Task *task, const Head *entry) {
    int64_t always = entry->always[0]->count, keys = entry->index ? entry->index->keys.count : 0;
    __atomic_fetch_add(&task->counts[0], always + keys, __ATOMIC_RELAXED);
    __atomic_fetch_add(&task->counts[1], always, __ATOMIC_RELAXED);
}

/* The state of a stored output and lse. */
static State stored(const float *out, const float *lse) {
    State state;
    memcpy(state.sum, out, sizeof state.sum);
    state.top = *lse;
    state.total = state.top > -INFINITY ? 1.0f : 0.0f;
    if (state.total == 0.0f) memset(state.sum, 0, sizeof state.sum);
    return state;
}

static void store(const State *state, float *out, float *lse) {
    float share = state->total > 0.0f ? 1.0f / state->total : 0.0f;
    for (int i = 0; i < DIM; i++) out[i] = state->sum[i] * share;
    *lse = state->total > 0.0f ? state->top + logf(state->total) : -INFINITY;
}

/* The walks of a pair; announces the pair as ready. */
static void walk_pair(Task *task, int64_t pair) {
    int64_t head = pair % task->heads, which = pair / task->heads;
    for (int64_t n = task->starts[which]; n < task->starts[which + 1]; n++) {
        const Read *read = &task->reads[n];
        const Head *entry = &read->heads[head];
        if (!entry->index) continue;
        float query[DIM];
        rotate(task, read->row, head, read->position, query);
        task->walked[n * task->heads + head] = walk_for(task, entry, query, num_hits(entry, read));
    }
    int64_t at = __atomic_fetch_add(&task->num_ready, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&task->ready[at], (int32_t)pair + 1, __ATOMIC_RELEASE);
}

/* Wait for the pair whose walks finish as number `at`. All walks have begun before this call. */
static int64_t await_pair(Task *task, int64_t at) {
    int32_t pair;
    for (int64_t polls = 1; !(pair = __atomic_load_n(&task->ready[at], __ATOMIC_ACQUIRE)); polls++) {
        rest();
        /* a walking thread may need this core */
        if (polls % 1024 == 0) sched_yield();
    }
    task->ready[at] = 0;
    /* the last pair resets the count */
    if (at == task->pairs - 1) task->num_ready = 0;
    return pair - 1;
}

static void read_pair(Task *task, int64_t pair) {
    int64_t head = pair % task->heads, which = pair / task->heads;
    int64_t row = task->reads[task->starts[which]].row, at = row * task->heads + head;
    State state = stored(task->out + at * DIM, task->lse + at);
    for (int64_t n = task->starts[which]; n < task->starts[which + 1]; n++) {
        const Read *read = &task->reads[n];
        const Head *entry = &read->heads[head];
        float query[DIM];
        rotate(task, row, head, read->position, query);
        if (entry->index) {
            Candidates candidates = task->walked[n * task->heads + head];
            HeadHits hits = find(task, entry, query, num_hits(entry, read), candidates, pair == task->sampled);
            join(&state, hits.scores, hits.ids, 0, hits.count, entry->values);
            join_estimate(task, &state, entry, query, &hits);
            free(hits.ids);
        }
        join_all(&state, entry->always, query, task->scale);
        count_read(task, entry);
    }
    store(&state, task->out + at * DIM, task->lse + at);
}

/* Units begin in order: the walks of all pairs precede the reads. */
void looseleaf_read(void *arg, int64_t unit) {
    Task *task = arg;
    if (unit < task->pairs) walk_pair(task, unit);
    else read_pair(task, await_pair(task, unit - task->pairs));
}
