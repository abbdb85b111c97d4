/* What the rows of windows read of segments in the host's memory (RetroAttention, over keys).

   `reads.c` stands before this text. A unit is one query head of one output: its newest row searches;
   the rows before it attend to those of the keys it found that they have not read, and go on from the
   states they kept. Which row has read which key is known by the step that last found it: the row at
   position p has read what was found at p or later. So a list of keys with their steps tells it for all
   rows, and is as long as some searches, not as the segment. */

/* What the searches of a window found of a segment: for each head `counts` ids, rising, and the
   position of the row that found each last. */
typedef struct Found {
    int32_t *ids, *steps;
    int64_t *counts;
    int64_t room; /* ids and steps of a head */
} Found;

/* The rows of an output: the newest is at `position`, row n stands n before it, at row `rows[n]` of the
   step. The state of the row at position p is kept at place p % size, `booked` the position of the
   newest row whose reads are in it. `tallies` count what rows read for the first time, by n. */
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

/* Book that `ids`, rising, were found at this step; `steps` gets when each was found before, or -1. What
   no later row asks about is forgotten, so that a window's steps but one are all there is room for. */
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

/* A row that is `age` before the newest reads what it has not read of `ids`. */
static void read_on(Task *task, const Window *window, const Read *read, int64_t head, int64_t age, State *state,
                    const int32_t *ids, const int32_t *steps, int64_t count) {
    const Place *place = &read->heads[head];
    const Keys *keys = &place->index->keys;
    int32_t *fresh = malloc((sizeof(int32_t) + sizeof(float)) * (size_t)(count + 1));
    float *scores = (float *)(fresh + count + 1), query[DIM];
    int64_t news = 0;
    for (int64_t n = 0; n < count; n++)
        if (steps[n] < window->position - age) fresh[news++] = ids[n];
    turn(task, window->rows[age], head, read->place - age, query);
    for (int64_t n = 0; n < news; n++) {
        const char *key = keys->exact ? exact_key(keys, fresh[n]) : key_as(VALUE_TYPE, keys, fresh[n]);
        scores[n] = score_as(VALUE_TYPE, query, key) * task->scale;
    }
    join(state, scores, fresh, 0, news, place->values);
    __atomic_fetch_add(&window->tallies[age], news, __ATOMIC_RELAXED);
    free(fresh);
}

/* The newest row reads a segment by its index, and all others read on. */
static void read_together(Task *task, const Window *window, const Read *read, int64_t head, State *states, int sampled) {
    const Place *place = &read->heads[head];
    float query[DIM];
    turn(task, window->rows[0], head, read->place, query);
    int64_t want = wanted(place, read);
    Finds finds = find(task, place, query, want, walk_for(task, place, query, want), sampled);
    join(&states[0], finds.scores, finds.ids, 0, finds.count, place->values);
    join_all(&states[0], place->always, query, task->scale);
    count_read(task, place);
    __atomic_fetch_add(&window->tallies[0], finds.count + place->always[0]->count, __ATOMIC_RELAXED);
    /* who reads all keys leaves nothing to read */
    if (read->want < place->index->keys.count) {
        int32_t *steps = malloc(sizeof(int32_t) * (size_t)(finds.count + 1));
        qsort(finds.ids, (size_t)finds.count, sizeof(int32_t), by_id);
        book(window, read->found, head, finds.ids, steps, finds.count);
        for (int64_t age = 1; age < window->count; age++)
            read_on(task, window, read, head, age, &states[age], finds.ids, steps, finds.count);
        free(steps);
    }
    free(finds.ids);
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
    /* a step that was computed in vain is in what is kept: when it is made again nothing is read anew */
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
        /* what has no index every row reads anew, and nothing of it is kept */
        for (int64_t n = task->starts[which]; n < task->starts[which + 1]; n++) {
            const Read *read = &task->reads[n];
            const Place *place = &read->heads[head];
            if (place->index) continue;
            float query[DIM];
            turn(task, window->rows[age], head, read->place - age, query);
            join_all(&states[age], place->always, query, task->scale);
            if (!age) count_read(task, place);
        }
        int64_t to = window->rows[age] * task->heads + head;
        State total = stored(task->out + to * DIM, task->lse + to);
        join_state(&total, &states[age]);
        store(&total, task->out + to * DIM, task->lse + to);
    }
    free(states);
}
