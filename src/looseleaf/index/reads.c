/* What decoding rows read of segments in the host's memory, from the query to the state.

   `vectors.h` and `search.c` stand before this text. A query head of a row is read in two units: its
   query comes to the frame of each segment that the row reads and walks through the graph there, if
   the index is one; then keys are read that the walk, or another index, finds, and the ones that are
   always read, and all of it is one softmax. Of two units none is long, so threads end together; who
   walked need not read. */

#include <sched.h>

/* One KV head of a layer of a segment, as one query head reads it. */
typedef struct {
    const Index *index;   /* none: `always` is all there is */
    const Keys *values;   /* of the indexed keys, of VALUE_TYPE */
    const Keys *always[2]; /* keys and values that every row reads, likewise */
    int64_t effort, top;  /* the index is so thorough as to find `top` keys */
    /* clusters of the index whose keys count by mean key and mean value where they are not found, and
       the cluster of every key, or -1; no `value_means`, none */
    const float *value_means;
    const int32_t *cluster_of;
    int64_t estimated;
} Place;

/* A row's read of a segment: `place` in its frame, `want` keys found by the index; of an output with a
   window what was `found` before. */
typedef struct {
    int64_t row, place, want;
    const Place *heads;
    const struct Found *found;
} Read;

typedef struct {
    const void *q; /* rows of heads of DIM, as the model made them: type as VALUE_TYPE */
    int64_t q_type, heads;
    const float *cos, *sin; /* [positions, half] */
    int64_t half, interleaved;
    const Read *reads;
    const int64_t *starts; /* the reads of the n-th reading row are starts[n] to starts[n + 1] - 1 */
    float scale;
    int64_t sampled; /* the unit whose recall is measured, or -1 */
    float *out, *lse; /* [rows, heads, DIM] and [rows, heads]; what is there is joined */
    int64_t counts[5]; /* keys before the reads, keys read, vectors compared; of the sampled unit: keys wanted, found */
    const struct Window *windows; /* that of the n-th reading row; none: rows are on their own */
    int64_t pairs;            /* query heads of reading rows */
    Promising *walked;        /* what the walks left: [reads, heads] */
    int32_t *ready;           /* pairs whose walks are done, from 1 on, in that order; then zeros */
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

static void turn(const Task *task, int64_t row, int64_t head, int64_t place, float *query) {
    int64_t first = (row * task->heads + head) * DIM, half = task->half;
    const float *cos = task->cos + place * half, *sin = task->sin + place * half;
    for (int64_t n = 0; n < DIM; n++) query[n] = widen_number(task->q, task->q_type, first + n);
    for (int64_t n = 0; n < half; n++) {
        float *a = query + (task->interleaved ? 2 * n : n), *b = task->interleaved ? a + 1 : a + half;
        float x = *a, y = *b;
        *a = x * cos[n] - y * sin[n];
        *b = y * cos[n] + x * sin[n];
    }
}

/* Join `count` keys with these scores, whose values are named by `ids`, or come in order. */
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

/* The keys that the index finds for a query, best first, with their scores times the scale; the caller
   frees `ids`, and `scores` lie behind them. */
typedef struct {
    int32_t *ids;
    float *scores;
    int64_t count;
} Finds;

static int64_t effort_for(const Place *place, int64_t want) {
    int64_t effort = place->effort;
    return want > place->top ? llrint((double)effort * (double)want / (double)place->top) : effort;
}

static int64_t wanted(const Place *place, const Read *read) {
    int64_t count = place->index->keys.count;
    return read->want < count ? read->want : count;
}

/* What the walk for a query leaves, of an index that has one. */
static Promising walk_for(Task *task, const Place *place, const float *query, int64_t want) {
    Promising some = {NULL, 0};
    if (!walks(place->index, want)) return some;
    int64_t scanned = 0;
    Search search = {place->index, query, want, effort_for(place, want), NULL, NULL, &scanned, NULL, 0.0f, NULL, NULL};
    some = walk(&search);
    __atomic_fetch_add(&task->counts[2], scanned, __ATOMIC_RELAXED);
    return some;
}

static Finds find(Task *task, const Place *place, const float *query, int64_t want, Promising some, int sampled) {
    const Index *index = place->index;
    int32_t *ids = malloc((sizeof(int32_t) + sizeof(float)) * (size_t)(want + 1));
    Finds finds = {ids, (float *)(ids + want + 1), 0};
    int64_t scanned = 0;
    Search search = {index, query, want, effort_for(place, want), ids, finds.scores, &scanned, NULL, 0.0f, NULL, NULL};
    run_on(&search, some, place->values);
    while (finds.count < want && ids[finds.count] >= 0) finds.count++;
    if (sampled) measure(task, index, query, want, finds.scores);
    for (int64_t n = 0; n < finds.count; n++) finds.scores[n] *= task->scale;
    __atomic_fetch_add(&task->counts[1], finds.count, __ATOMIC_RELAXED);
    __atomic_fetch_add(&task->counts[2], scanned, __ATOMIC_RELAXED);
    return finds;
}

/* Join the keys that were not found, each by the mean key and mean value of its cluster: as many of
   these as the cluster has keys left, less the values of those that were found. */
static void join_estimate(const Task *task, State *state, const Place *place, const float *query, const Finds *finds) {
    const Index *index = place->index;
    int64_t clusters = place->estimated;
    if (!clusters || finds->count == index->keys.count) return;
    float *scores = malloc((sizeof(float) + sizeof(int32_t)) * (size_t)clusters), top = state->top;
    int32_t *left = (int32_t *)(scores + clusters);
    for (int64_t c = 0; c < clusters; c++) left[c] = index->starts[c + 1] - index->starts[c];
    for (int64_t n = 0; n < finds->count; n++)
        if (finds->ids[n] < index->built && place->cluster_of[finds->ids[n]] >= 0) left[place->cluster_of[finds->ids[n]]]--;
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
        for (int i = 0; i < VECS; i++) sum[i] += load_floats(place->value_means + c * DIM + i * LANES) * weight;
    }
    for (int64_t n = 0; n < finds->count; n++) {
        int32_t c = finds->ids[n] < index->built ? place->cluster_of[finds->ids[n]] : -1;
        if (c < 0 || !left[c]) continue;
        const char *value = key_as(VALUE_TYPE, place->values, finds->ids[n]);
        for (int i = 0; i < VECS; i++) sum[i] -= load_as(VALUE_TYPE, value, i * LANES) * scores[c];
    }
    memcpy(state->sum, sum, sizeof sum);
    state->top = top;
    state->total = total;
    free(scores);
}

static void count_read(Task *task, const Place *place) {
    int64_t always = place->always[0]->count, keys = place->index ? place->index->keys.count : 0;
    __atomic_fetch_add(&task->counts[0], always + keys, __ATOMIC_RELAXED);
    __atomic_fetch_add(&task->counts[1], always, __ATOMIC_RELAXED);
}

/* A state is stored as its output and its lse. */
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

/* The walks of a pair, which others may read then. */
static void walk_pair(Task *task, int64_t pair) {
    int64_t head = pair % task->heads, which = pair / task->heads;
    for (int64_t n = task->starts[which]; n < task->starts[which + 1]; n++) {
        const Read *read = &task->reads[n];
        const Place *place = &read->heads[head];
        if (!place->index) continue;
        float query[DIM];
        turn(task, read->row, head, read->place, query);
        task->walked[n * task->heads + head] = walk_for(task, place, query, wanted(place, read));
    }
    int64_t at = __atomic_fetch_add(&task->num_ready, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&task->ready[at], (int32_t)pair + 1, __ATOMIC_RELEASE);
}

/* The pair whose walks were done as number `at`: all walks have begun before it is asked for. */
static int64_t await_pair(Task *task, int64_t at) {
    int32_t pair;
    for (int64_t looks = 1; !(pair = __atomic_load_n(&task->ready[at], __ATOMIC_ACQUIRE)); looks++) {
        rest();
        /* who walks may wait for this core */
        if (looks % 1024 == 0) sched_yield();
    }
    task->ready[at] = 0;
    /* the last is there, so none is to come */
    if (at == task->pairs - 1) task->num_ready = 0;
    return pair - 1;
}

static void read_pair(Task *task, int64_t pair) {
    int64_t head = pair % task->heads, which = pair / task->heads;
    int64_t row = task->reads[task->starts[which]].row, at = row * task->heads + head;
    State state = stored(task->out + at * DIM, task->lse + at);
    for (int64_t n = task->starts[which]; n < task->starts[which + 1]; n++) {
        const Read *read = &task->reads[n];
        const Place *place = &read->heads[head];
        float query[DIM];
        turn(task, row, head, read->place, query);
        if (place->index) {
            Promising some = task->walked[n * task->heads + head];
            Finds finds = find(task, place, query, wanted(place, read), some, pair == task->sampled);
            join(&state, finds.scores, finds.ids, 0, finds.count, place->values);
            join_estimate(task, &state, place, query, &finds);
            free(finds.ids);
        }
        join_all(&state, place->always, query, task->scale);
        count_read(task, place);
    }
    store(&state, task->out + at * DIM, task->lse + at);
}

/* Units are begun in order: the walks of all pairs come first. */
void looseleaf_read(void *arg, int64_t unit) {
    Task *task = arg;
    if (unit < task->pairs) walk_pair(task, unit);
    else read_pair(task, await_pair(task, unit - task->pairs));
}
