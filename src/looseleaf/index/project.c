/* Edges between keys in the top lists of the same queries (RoarGraph's projection).

   Distance is the negative inner product. Included after `vectors.h`. */

typedef struct {
    Keys keys;
    const int32_t *lists; /* [queries, top] keys, best first, ended by -1 */
    int64_t top;
    const int32_t *readers; /* [keys, most_readers] queries with the key in their list, ended by -1 */
    int64_t most_readers;
    const int32_t *order; /* all keys, in the order of adding their reverse edges */
    int64_t degree;       /* most forward edges of a key */
    int64_t width;        /* most edges of a key, reverse ones included */
    int32_t *links;       /* [keys, width] */
} Projection;

static int compare(const void *a, const void *b) {
    const Hit *x = a, *y = b;
    return before(*x, *y) ? -1 : before(*y, *x) ? 1 : 0;
}

/* The keys in the lists of `key`'s readers, nearest to `key` first. */
static int64_t gather(const Projection *p, int64_t key, const float *at, uint64_t *seen, Hit *candidates) {
    int64_t count = 0;
    seen[key / 64] |= 1ull << (key % 64);
    for (int64_t r = 0; r < p->most_readers && p->readers[key * p->most_readers + r] >= 0; r++) {
        const int32_t *list = p->lists + p->readers[key * p->most_readers + r] * p->top;
        for (int64_t n = 0; n < p->top && list[n] >= 0; n++) {
            uint64_t bit = 1ull << (list[n] % 64), *word = &seen[list[n] / 64];
            if (*word & bit) continue;
            *word |= bit;
            candidates[count].id = list[n];
            candidates[count++].score = score_key(&p->keys, at, list[n]);
        }
    }
    for (int64_t n = 0; n < count; n++) seen[candidates[n].id / 64] = 0;
    seen[key / 64] = 0;
    qsort(candidates, (size_t)count, sizeof(Hit), compare);
    return count;
}

/* Select candidates, except those nearer to a selected candidate than to the key; fill up with the
   nearest rejected ones. */
static void prune(const Projection *p, int64_t key, const Hit *candidates, int64_t count, float *vectors, uint8_t *selected) {
    int32_t *links = p->links + key * p->width;
    int64_t edges = 0;
    memset(selected, 0, (size_t)count);
    for (int64_t n = 0; n < count && edges < p->degree; n++) {
        int hidden = 0;
        for (int64_t e = 0; e < edges && !hidden; e++)
            hidden = score_key(&p->keys, vectors + e * DIM, candidates[n].id) > candidates[n].score;
        if (hidden) continue;
        widen(&p->keys, candidates[n].id, vectors + edges * DIM);
        links[edges++] = candidates[n].id;
        selected[n] = 1;
    }
    for (int64_t n = 0; n < count && edges < p->degree; n++)
        if (!selected[n]) links[edges++] = candidates[n].id;
}

/* Add reverse edges while there is room, key by key in `order`. */
static void add_reverse(const Projection *p) {
    int64_t width = p->width;
    int32_t *count = malloc(sizeof(int32_t) * (size_t)p->keys.count);
    int32_t *forward = malloc(sizeof(int32_t) * (size_t)p->keys.count);
    for (int64_t key = 0; key < p->keys.count; key++) {
        int32_t edges = 0;
        while (edges < width && p->links[key * width + edges] >= 0) edges++;
        count[key] = forward[key] = edges;
    }
    for (int64_t n = 0; n < p->keys.count; n++) {
        int64_t key = p->order[n];
        for (int32_t e = 0; e < forward[key]; e++) {
            int32_t target = p->links[key * width + e];
            int32_t *back = p->links + target * width;
            if (count[target] == width) continue;
            int exists = 0;
            for (int32_t b = 0; b < count[target] && !exists; b++) exists = back[b] == key;
            if (!exists) back[count[target]++] = (int32_t)key;
        }
    }
    free(count);
    free(forward);
}

/* `links` must be initialised to -1. */
void looseleaf_project(const Projection *p, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t most = p->most_readers * p->top;
        uint64_t *seen = calloc((size_t)(p->keys.count / 64 + 1), sizeof(uint64_t));
        Hit *candidates = malloc(sizeof(Hit) * (size_t)(most + 1));
        uint8_t *selected = malloc((size_t)most + 1);
        float *vectors = malloc(sizeof(float) * (size_t)(p->degree * DIM)), at[DIM];
#pragma omp for schedule(dynamic, 64)
        for (int64_t key = 0; key < p->keys.count; key++) {
            if (p->readers[key * p->most_readers] < 0) continue;
            widen(&p->keys, key, at);
            int64_t count = gather(p, key, at, seen, candidates);
            prune(p, key, candidates, count, vectors, selected);
        }
        free(seen);
        free(candidates);
        free(selected);
        free(vectors);
    }
    add_reverse(p);
}

/* Entry points of searches: repeatedly the unreached key with the highest count. The first may have no
   edges. Returns their number, at most `most`. */
int32_t looseleaf_entries(const int32_t *links, int64_t count, int64_t width, const int32_t *counts,
                          int32_t *entries, int64_t most) {
    uint8_t *unreached = malloc((size_t)count + 1);
    int32_t *stack = malloc(sizeof(int32_t) * (size_t)(count + 1)), num = 0;
    for (int64_t key = 0; key < count; key++) unreached[key] = links[key * width] >= 0;
    while (num < most) {
        int64_t entry = -1;
        for (int64_t key = 0; key < count; key++)
            if ((unreached[key] || !num) && (entry < 0 || counts[key] > counts[entry])) entry = key;
        if (entry < 0) break;
        int64_t depth = 0;
        entries[num++] = stack[depth++] = (int32_t)entry;
        unreached[entry] = 0;
        while (depth) {
            const int32_t *neighbours = links + stack[--depth] * width;
            for (int64_t n = 0; n < width && neighbours[n] >= 0; n++) {
                if (!unreached[neighbours[n]]) continue;
                unreached[neighbours[n]] = 0;
                stack[depth++] = neighbours[n];
            }
        }
    }
    free(unreached);
    free(stack);
    return num;
}

/* The vertices reachable from `entries` in breadth-first order, so that neighbours are near each target
   in memory. Returns their number. */
int32_t looseleaf_order(const int32_t *links, int64_t count, int64_t width, const int32_t *entries,
                        int64_t num_entries, int32_t *order) {
    uint8_t *visited = calloc((size_t)count + 1, 1);
    int32_t num = 0;
    for (int64_t n = 0; n < num_entries; n++) {
        visited[entries[n]] = 1;
        order[num++] = entries[n];
    }
    for (int32_t n = 0; n < num; n++) {
        const int32_t *neighbours = links + order[n] * width;
        for (int64_t i = 0; i < width && neighbours[i] >= 0; i++) {
            if (visited[neighbours[i]]) continue;
            visited[neighbours[i]] = 1;
            order[num++] = neighbours[i];
        }
    }
    free(visited);
    return num;
}
