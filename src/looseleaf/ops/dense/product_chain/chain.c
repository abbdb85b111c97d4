/* Products of few rows, one after the other, with norms before them. `norm.c` precedes this text.

   `Added` and `Multiply` are those of `products.c`, whose libraries may differ from stage to stage. */

#include <stdlib.h>

typedef struct {
    const float *bias;
    const row_t *residual;
    int64_t residual_row;
} Added;

typedef int (*Multiply)(const void *matrix, const row_t *x, int64_t x_row, int64_t rows, row_t *out, int64_t out_row,
                        const Added *added, int64_t gated);

/* Numbers of buffers; `residual` is -1 without one. Outputs begin at column `column`. */
typedef struct {
    Multiply multiply;
    const void *matrix;
    const float *bias;
    const void *norm; /* weight of the norm of the input, or NULL */
    int64_t norm_is_wide, features, input, residual, output, column, gated;
} Stage;

typedef struct {
    row_t *rows;
    int64_t stride;
} Buffer;

/* Runs `count` stages over `rows` rows. Returns 1 if memory runs out. */
int looseleaf_chain(const Stage *stages, int64_t count, const Buffer *buffers, int64_t rows, float eps) {
    int64_t widest = 0;
    for (int64_t n = 0; n < count; n++) widest = stages[n].features > widest ? stages[n].features : widest;
    row_t *normed = malloc(rows * widest * sizeof(row_t) + 1);
    int failed = !normed;
    for (int64_t n = 0; n < count && !failed; n++) {
        const Stage *stage = &stages[n];
        const Buffer *out = &buffers[stage->output], *residual = buffers + (stage->residual < 0 ? 0 : stage->residual);
        Buffer x = buffers[stage->input];
        Added added = {stage->bias, NULL, 0};
        if (stage->residual >= 0) added.residual = residual->rows, added.residual_row = residual->stride;
        if (stage->norm) {
            Shape shape = {rows, 1, stage->features, x.stride, 0, 0};
            looseleaf_rms_norm(&shape, x.rows, NULL, stage->norm, stage->norm_is_wide, normed, eps);
            x = (Buffer){normed, stage->features};
        }
        failed = stage->multiply(stage->matrix, x.rows, x.stride, rows, out->rows + stage->column, out->stride, &added,
                                 stage->gated);
    }
    free(normed);
    return failed;
}

typedef int (*Attention)(const void *plan, const void *tensors, int64_t phases);

/* Attention of a layer, and the stages after it. */
typedef struct {
    Attention attention;
    const void *plan, *tensors;
    int64_t phases, first, count;
} Layer;

/* Numbers of the buffers of a layer's input and output; the output is the next layer's input, and the outputs take turns
   in two buffers. */
typedef struct {
    int64_t input, output;
    Buffer other;
} Turns;

/* Runs layers. Returns 0, 1 if memory runs out, or a fault of attention plus 1. */
int looseleaf_layers(const Layer *layers, int64_t count, const Stage *stages, Buffer *buffers, const Turns *turns,
                     int64_t rows, float eps) {
    Buffer other = turns->other;
    for (int64_t n = 0; n < count; n++) {
        const Layer *layer = &layers[n];
        int fault = layer->attention(layer->plan, layer->tensors, layer->phases);
        if (fault) return fault + 1;
        if (looseleaf_chain(stages + layer->first, layer->count, buffers, rows, eps)) return 1;
        Buffer output = buffers[turns->output];
        buffers[turns->input] = output, buffers[turns->output] = other, other = output;
    }
    return 0;
}
