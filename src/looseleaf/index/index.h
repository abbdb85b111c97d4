/* The structs of indexes and searches. Included after `vectors.h`. */

typedef struct {
    Keys keys;
    int64_t built; /* keys from here on are not in the structure and are scanned */
    /* graph: vertex v is key order[v], with a code and `degree` neighbours ended by -1; searches enter
       at the first `entries` vertices */
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
    int32_t *ids; /* [want], best first, ended by -1 */
    float *scores;
    int64_t *scanned; /* number of compared keys and centroids */
    /* attention over the hits, unless `values` is NULL */
    const Keys *values; /* of VALUE_TYPE */
    float scale;
    float *out, *lse;
} Search;
