/* Edges between keys from the keys that queries found together.

   `vectors.h` stands before this text. Distance is minus the inner product. */

typedef struct {
    Keys keys;
    const int32_t *lists; /* `top` keys of each query, best first, ended by -1 */
    int64_t top;
    const int32_t *readers; /* `most_readers` queries that found each key, ended by -1 */
    int64_t most_readers;
    const int32_t *order; /* all keys, in the order in which edges are made to go back to them */
    int64_t degree;       /* of the edges a key chooses */
    int64_t width;        /* of all its edges, with reverse ones */
    int32_t *links;       /* `width` of each key */
} Projection;

static int compare(const void *a, const void *b) {
    const Hit *x = a, *y = b;
    return before(*x, *y) ? -1 : before(*y, *x) ? 1 : 0;
}

/* The keys found together with `key`, nearest to it first. */
static int64_t gather(const Projection *p, int64_t key, const float *at, uint64_t *seen, Hit *found) {
    int64_t count = 0;
    seen[key / 64] |= 1ull << (key % 64);
    for (int64_t r = 0; r < p->most_readers && p->readers[key * p->most_readers + r] >= 0; r++) {
        const int32_t *list = p->lists + p->readers[key * p->most_readers + r] * p->top;
        for (int64_t n = 0; n < p->top && list[n] >= 0; n++) {
            uint64_t bit = 1ull << (list[n] % 64), *word = &seen[list[n] / 64];
            if (*word & bit) continue;
            *word |= bit;
            found[count].id = list[n];
            found[count++].score = score_key(&p->keys, at, list[n]);
        }
    }
    for (int64_t n = 0; n < count; n++) seen[found[n].id / 64] = 0;
    seen[key / 64] = 0;
    qsort(found, (size_t)count, sizeof(Hit), compare);
    return count;
}

/* Keep a candidate unless one kept before is nearer to it than the key is; fill with the nearest. */
static void prune(const Projection *p, int64_t key, const Hit *found, int64_t count, float *kept, uint8_t *chosen) {
    int32_t *links = p->links + key * p->width;
    int64_t edges = 0;
    memset(chosen, 0, (size_t)count);
    for (int64_t n = 0; n < count && edges < p->degree; n++) {
        int hidden = 0;
        for (int64_t e = 0; e < edges && !hidden; e++)
            hidden = score_key(&p->keys, kept + e * DIM, found[n].id) > found[n].score;
        if (hidden) continue;
        widen(&p->keys, found[n].id, kept + edges * DIM);
        links[edges++] = found[n].id;
        chosen[n] = 1;
    }
    for (int64_t n = 0; n < count && edges < p->degree; n++)
        if (!chosen[n]) links[edges++] = found[n].id;
}

/* Edges back, as long as there is room, to one key after the other. */
static void add_reverse(const Projection *p) {
    int64_t width = p->width;
    int32_t *count = malloc(sizeof(int32_t) * (size_t)p->keys.count);
    int32_t *own = malloc(sizeof(int32_t) * (size_t)p->keys.count);
    for (int64_t key = 0; key < p->keys.count; key++) {
        int32_t edges = 0;
        while (edges < width && p->links[key * width + edges] >= 0) edges++;
        count[key] = own[key] = edges;
    }
    for (int64_t n = 0; n < p->keys.count; n++) {
        int64_t key = p->order[n];
        for (int32_t e = 0; e < own[key]; e++) {
            int32_t other = p->links[key * width + e];
            int32_t *back = p->links + other * width;
            if (count[other] == width) continue;
            int known = 0;
            for (int32_t b = 0; b < count[other] && !known; b++) known = back[b] == key;
            if (!known) back[count[other]++] = (int32_t)key;
        }
    }
    free(count);
    free(own);
}

/* `links` must be all -1 before. */
void looseleaf_project(const Projection *p, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t most = p->most_readers * p->top;
        uint64_t *seen = calloc((size_t)(p->keys.count / 64 + 1), sizeof(uint64_t));
        Hit *found = malloc(sizeof(Hit) * (size_t)(most + 1));
        uint8_t *chosen = malloc((size_t)most + 1);
        float *kept = malloc(sizeof(float) * (size_t)(p->degree * DIM)), at[DIM];
#pragma omp for schedule(dynamic, 64)
        for (int64_t key = 0; key < p->keys.count; key++) {
            if (p->readers[key * p->most_readers] < 0) continue;
            widen(&p->keys, key, at);
            int64_t count = gather(p, key, at, seen, found);
            prune(p, key, found, count, kept, chosen);
        }
        free(seen);
        free(found);
        free(chosen);
        free(kept);
    }
    add_reverse(p);
}

/* Where searches begin: of the keys that are not reached yet the one with the highest count, again
   and again; the first may have no edges. Returns how many there are, at most `most`. */
int32_t looseleaf_entries(const int32_t *links, int64_t count, int64_t width, const int32_t *counts,
                          int32_t *entries, int64_t most) {
    uint8_t *waiting = malloc((size_t)count + 1);
    int32_t *stack = malloc(sizeof(int32_t) * (size_t)(count + 1)), found = 0;
    for (int64_t key = 0; key < count; key++) waiting[key] = links[key * width] >= 0;
    while (found < most) {
        int64_t entry = -1;
        for (int64_t key = 0; key < count; key++)
            if ((waiting[key] || !found) && (entry < 0 || counts[key] > counts[entry])) entry = key;
        if (entry < 0) break;
        int64_t depth = 0;
        entries[found++] = stack[depth++] = (int32_t)entry;
        waiting[entry] = 0;
        while (depth) {
            const int32_t *behind = links + stack[--depth] * width;
            for (int64_t n = 0; n < width && behind[n] >= 0; n++) {
                if (!waiting[behind[n]]) continue;
                waiting[behind[n]] = 0;
                stack[depth++] = behind[n];
            }
        }
    }
    free(waiting);
    free(stack);
    return found;
}

/* Vertices in the order in which a search that looks behind everything meets them, entry by entry and
   then link by link: so neighbours lie near each other. Returns how many there are. */
int32_t looseleaf_order(const int32_t *links, int64_t count, int64_t width, const int32_t *entries,
                        int64_t num_entries, int32_t *order) {
    uint8_t *met = calloc((size_t)count + 1, 1);
    int32_t known = 0;
    for (int64_t n = 0; n < num_entries; n++) {
        met[entries[n]] = 1;
        order[known++] = entries[n];
    }
    for (int32_t n = 0; n < known; n++) {
        const int32_t *behind = links + order[n] * width;
        for (int64_t i = 0; i < width && behind[i] >= 0; i++) {
            if (met[behind[i]]) continue;
            met[behind[i]] = 1;
            order[known++] = behind[i];
        }
    }
    free(met);
    return known;
}
