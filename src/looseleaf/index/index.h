/* What a search is given. `vectors.h` stands before this text. */

typedef struct {
    Keys keys;
    int64_t built; /* the keys from here on are newer than the structure and scanned */
    /* graph: vertex v is key order[v] and has a code of its own, its neighbours are `degree` vertices
       ended by -1; a search begins at the first `entries` vertices */
    const int32_t *order, *links;
    const uint8_t *codes;
    const float *steps;
    int64_t degree, vertices, entries;
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
