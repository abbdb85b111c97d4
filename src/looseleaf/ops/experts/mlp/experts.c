/* The gated MLPs of each row's experts, summed by weight. `rows.h` precedes this text.

   `Added`, `Multiply` and `Matrix` are those of `products.c`, whose libraries may differ between the products. */

#include <stdlib.h>

typedef struct {
    const float *bias;
    const row_t *residual;
    int64_t residual_row;
} Added;

typedef int (*Multiply)(const void *matrix, const row_t *x, int64_t x_row, int64_t rows, row_t *out, int64_t out_row,
                        const Added *added, int64_t gated);

typedef struct {
    const uint8_t *packed;
    int64_t outputs, num_blocks;
} Matrix;

/* The matrices of all experts: that of one has `outputs` outputs and `bytes` bytes. */
typedef struct {
    Multiply multiply;
    const uint8_t *packed;
    int64_t bytes, outputs, num_blocks;
} Stacked;

typedef struct {
    int64_t rows, slots, experts, hidden, inner, x_row;
} Sizes;

static int run_expert(const Stacked *stacked, int64_t expert, const row_t *x, int64_t x_row, int64_t rows, row_t *out,
                      int64_t width, int64_t gated) {
    Matrix matrix = {stacked->packed + expert * stacked->bytes, stacked->outputs, stacked->num_blocks};
    Added none = {NULL, NULL, 0};
    return stacked->multiply(&matrix, x, x_row, rows, out, width, &none, gated);
}

/* out[row] = sum over slots of weights[row][slot] * down(silu(gate) * up), rounded once; `chosen` are the experts of
   each row. Experts add in their order. Returns 1 if memory runs out. */
int looseleaf_experts(const Stacked *gate_up, const Stacked *down, const Sizes *sizes, const row_t *x,
                      const int32_t *chosen, const float *weights, row_t *out) {
    int64_t rows = sizes->rows, hidden = sizes->hidden, inner = sizes->inner;
    row_t *gathered = malloc((rows * (2 * hidden + inner) + 1) * sizeof(row_t));
    float *total = calloc(rows * hidden + 1, sizeof(float)), *shares = malloc((rows + 1) * sizeof(float));
    int64_t *numbers = malloc((rows + 1) * sizeof(int64_t));
    int failed = !gathered || !total || !shares || !numbers;
    row_t *values = gathered + rows * hidden, *products = values + rows * inner;
    for (int64_t expert = 0; expert < sizes->experts && !failed; expert++) {
        int64_t count = 0;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t slot = 0; slot < sizes->slots; slot++)
                if (chosen[row * sizes->slots + slot] == expert) {
                    numbers[count] = row, shares[count] = weights[row * sizes->slots + slot];
                    memcpy(gathered + count++ * hidden, x + row * sizes->x_row, hidden * sizeof(row_t));
                    break;
                }
        if (!count) continue;
        failed = run_expert(gate_up, expert, gathered, hidden, count, values, inner, 1) ||
                 run_expert(down, expert, values, inner, count, products, hidden, 0);
        for (int64_t n = 0; n < count && !failed; n++)
            for (int64_t column = 0; column < hidden; column++) {
                float *sum = total + numbers[n] * hidden + column;
                *sum = fused(shares[n], load_row(products[n * hidden + column]), *sum);
            }
    }
    for (int64_t n = 0; n < rows * hidden && !failed; n++) out[n] = round_row(total[n]);
    free(gathered), free(total), free(shares), free(numbers);
    return failed;
}
