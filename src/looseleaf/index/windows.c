/* Attention of windows over host-resident segments (RetroAttention, by keys instead of pages).

   A unit is one query head of one output. The newest row searches. The rows before it continue their
   stored states with those hits that they have not read. The row at position p has read all hits of
   steps p and later, so one list of keys with their last steps suffices for all rows. The list is as
   long as the window's searches, not as the segment. Included after `reads.c`. */

/* Hits of a window's searches in a segment: for each head `counts` ascending ids, and the position of
   the last row with each hit. */
typedef struct Found {
    int32_t *ids, *steps;
    int64_t *counts;
    int64_t room; /* ids and steps of a head */
} Found;

/* The window of an output. The newest row is at `position`; row n is n positions earlier, and row
   `rows[n]` of the step. `out` and `lse` have the state of the row at position p in slot p % size.
   `booked` is the position of the newest row whose reads they include. `tallies` count first reads by n. */
typedef struct Window {
    int64_t position, count, size;
    const int64_t *rows;
    float *out, *lse; /* [size, heads, DIM] and [size, heads] */
    int64_t *booked, *tallies;
} Window;

static int by_id(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Record `ids`, ascending, as hits of this step; `steps` receives the previous step of each, or -1. Drops
   hits that no row of a later window needs, which bounds the list to the searches of size - 1 steps. */
static void book(const Window *window, const Found *found, int64_t head, const int32_t *ids, int32_t *steps, int64_t count) {
    int32_t *known = found->ids + head * found->room, *when = found->steps + head * found->room;
    int64_t had = found->counts[head], kept = 0, n = 0;
    int32_t *old = malloc(sizeof(int32_t) * 2 * (size_t)(had + 1)), *old_when = old + had + 1;
    memcpy(old, known, sizeof(int32_t) * (size_t)had);
    memcpy(old_when, when, sizeof(int32_t) * (size_t)had);
    int64_t oldest = window->position + 2 - window->size;
    for (int64_t m = 0; m < had || n < count;) {
        int is_new = n < count && (m == had || ids[n] <= old[m]);
        if (is_new) {
            int again = m < had && old[m] == ids[n];
            steps[n] = again ? old_when[m] : -1;
            m += again;
        }
        int32_t id = is_new ? ids[n++] : old[m], step = is_new ? (int32_t)window->position : old_when[m++];
        if (step < oldest) continue;
        known[kept] = id;
        when[kept++] = step;
    }
    found->counts[head] = kept;
    free(old);
}

/* The row `age` positions before the newest attends to those `ids` that it has not read. */
static void read_on(Task *task, const Window *window, const Read *read, int64_t head, int64_t age, State *state,
                    const int32_t *ids, const int32_t *steps, int64_t count) {
    const Head *entry = &read->heads[head];
    const Keys *keys = &entry->index->keys;
    int32_t *fresh = malloc((sizeof(int32_t) + sizeof(float)) * (size_t)(count + 1));
    float *scores = (float *)(fresh + count + 1), query[DIM];
    int64_t news = 0;
    for (int64_t n = 0; n < count; n++)
        if (steps[n] < window->position - age) fresh[news++] = ids[n];
    rotate(task, window->rows[age], head, read->position - age, query);
    for (int64_t n = 0; n < news; n++) {
        const char *key = keys->exact ? exact_key(keys, fresh[n]) : key_as(VALUE_TYPE, keys, fresh[n]);
        scores[n] = score_as(VALUE_TYPE, query, key) * task->scale;
    }
    join(state, scores, fresh, 0, news, entry->values);
    __atomic_fetch_add(&window->tallies[age], news, __ATOMIC_RELAXED);
    free(fresh);
}

/* The newest row reads a segment by its index; the earlier rows read its new hits. */
static void read_together(Task *task, const Window *window, const Read *read, int64_t head, State *states, int sampled) {
    const Head *entry = &read->heads[head];
    float query[DIM];
    rotate(task, window->rows[0], head, read->position, query);
    int64_t want = num_hits(entry, read);
    HeadHits hits = find(task, entry, query, want, walk_for(task, entry, query, want), sampled);
    join(&states[0], hits.scores, hits.ids, 0, hits.count, entry->values);
    join_all(&states[0], entry->always, query, task->scale);
    count_read(task, entry);
    __atomic_fetch_add(&window->tallies[0], hits.count + entry->always[0]->count, __ATOMIC_RELAXED);
    /* a row that reads all keys leaves none to later steps */
    if (read->want < entry->index->keys.count) {
        int32_t *steps = malloc(sizeof(int32_t) * (size_t)(hits.count + 1));
        qsort(hits.ids, (size_t)hits.count, sizeof(int32_t), by_id);
        book(window, read->found, head, hits.ids, steps, hits.count);
        for (int64_t age = 1; age < window->count; age++)
            read_on(task, window, read, head, age, &states[age], hits.ids, steps, hits.count);
        free(steps);
    }
    free(hits.ids);
}

static void join_state(State *state, const State *other) {
    if (other->total == 0.0f) return;
    float top = state->top > other->top ? state->top : other->top;
    float mine = state->total > 0.0f ? expf(state->top - top) : 0.0f, theirs = expf(other->top - top);
    for (int i = 0; i < DIM; i++) state->sum[i] = state->sum[i] * mine + other->sum[i] * theirs;
    state->total = state->total * mine + other->total * theirs;
    state->top = top;
}

void looseleaf_read_window(void *arg, int64_t unit) {
    Task *task = arg;
    int64_t head = unit % task->heads, which = unit / task->heads;
    const Window *window = &task->windows[which];
    State *states = malloc(sizeof(State) * (size_t)window->count);
    /* the stored states include an abandoned step: its repetition reads nothing again */
    int again = window->booked[head] == window->position;
    for (int64_t age = 0; age < window->count; age++) {
        int64_t at = (window->position - age) % window->size * task->heads + head;
        float none = -INFINITY;
        states[age] = stored(window->out + at * DIM, age || again ? window->lse + at : &none);
    }
    for (int64_t n = task->starts[which]; n < task->starts[which + 1] && !again; n++)
        if (task->reads[n].heads[head].index)
            read_together(task, window, &task->reads[n], head, states, unit == task->sampled);
    window->booked[head] = window->position;
    for (int64_t age = 0; age < window->count; age++) {
        int64_t at = (window->position - age) % window->size * task->heads + head;
        store(&states[age], window->out + at * DIM, window->lse + at);
        /* every row reads segments without an index again; stored states exclude them */
        for (int64_t n = task->starts[which]; n < task->starts[which + 1]; n++) {
            const Read *read = &task->reads[n];
            const Head *entry = &read->heads[head];
            if (entry->index) continue;
            float query[DIM];
            rotate(task, window->rows[age], head, read->position - age, query);
            join_all(&states[age], entry->always, query, task->scale);
            if (!age) count_read(task, entry);
        }
        int64_t to = window->rows[age] * task->heads + head;
        State total = stored(task->out + to * DIM, task->lse + to);
        join_state(&total, &states[age]);
        store(&total, task->out + to * DIM, task->lse + to);
    }
    free(states);
}
