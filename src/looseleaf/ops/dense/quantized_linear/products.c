/* Calls of products: tiles of rows, sums with bias and residual, gates, rows by number.

   `codes.c` or `halves.c` precedes this text, with the kernels of a tile. */

/* rows of activations that stay in the cache */
enum { MOST_ROWS = 256 };
/* products of fewer values of the matrix use one thread */
enum { PARALLEL_VALUES = 1 << 16 };

static void multiply_rows(const Matrix *matrix, int64_t group, Activations activations, int64_t first, int count,
                          float out[][GROUP]) {
#define CASE(rows) \
    case rows: multiply_tile(matrix, group, activations, first, rows, out); return;
    switch (count) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if TILE > 4
        CASE(5) CASE(6)
#endif
#if TILE > 6
        CASE(7) CASE(8)
#endif
#if TILE > 8
        CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* x / (1 + exp(-x)) */
static inline float silu(float x) {
    float power = exp2_fast(-1.44269504088896f * fabsf(x));
    return (x < 0 ? x * power : x) / (1.0f + power);
}

/* Summands of the outputs, or NULL. */
typedef struct {
    const float *bias;
    const row_t *residual;
    int64_t residual_row;
} Added;

/* The outputs of row n are at out + n * out_row. */
typedef struct {
    row_t *out;
    int64_t out_row, gated;
    const Added *added;
} Call;

static void finish_row(const Matrix *matrix, const Call *call, int64_t row, int64_t group, const float *product,
                       const float *up) {
    int64_t outputs = call->gated ? matrix->outputs / 2 : matrix->outputs, first = group * GROUP;
    int64_t lanes = outputs - first < GROUP ? outputs - first : GROUP;
    const float *bias = call->added->bias ? call->added->bias + first : NULL;
    const row_t *residual = call->added->residual;
    if (residual) residual += row * call->added->residual_row + first;
    row_t *out = call->out + row * call->out_row + first, rounded[GROUP];
    /* loops of a constant length become vectors */
    float values[GROUP];
    if (up) for (int lane = 0; lane < GROUP; lane++) values[lane] = silu(product[lane]) * up[lane];
    else memcpy(values, product, sizeof values);
    if (lanes == GROUP) {
        if (bias) for (int lane = 0; lane < GROUP; lane++) values[lane] += bias[lane];
        if (residual) for (int lane = 0; lane < GROUP; lane++) values[lane] += load_row(residual[lane]);
        for (int lane = 0; lane < GROUP; lane++) rounded[lane] = round_row(values[lane]);
        memcpy(out, rounded, sizeof rounded);
        return;
    }
    for (int64_t lane = 0; lane < lanes; lane++) {
        float value = values[lane];
        if (bias) value += bias[lane];
        if (residual) value += load_row(residual[lane]);
        out[lane] = round_row(value);
    }
}

/* A group of outputs for all rows of a call, which begin at row `start`. */
static void run_group(const Matrix *matrix, const Call *call, Activations rows, int64_t start, int64_t count,
                      int64_t group) {
    float products[TILE][GROUP], ups[TILE][GROUP];
    for (int64_t first = 0; first < count; first += TILE) {
        int tile = count - first < TILE ? (int)(count - first) : TILE;
        multiply_rows(matrix, group, rows, first, tile, products);
        if (call->gated) multiply_rows(matrix, group + matrix->outputs / 2 / GROUP, rows, first, tile, ups);
        for (int n = 0; n < tile; n++)
            finish_row(matrix, call, start + first + n, group, products[n], call->gated ? ups[n] : NULL);
    }
}

/* out = x @ matrix.T + bias + residual, or, if gated, silu(x @ gate.T) * (x @ up.T) of a matrix [gate, up] whose
   halves are whole groups. Returns 1 if memory runs out. */
int looseleaf_multiply(const Matrix *matrix, const row_t *x, int64_t x_row, int64_t num_rows, row_t *out,
                       int64_t out_row, const Added *added, int64_t gated) {
    Call call = {out, out_row, gated, added};
    int64_t chunks = matrix->num_blocks * SUPER, held = num_rows < MOST_ROWS ? num_rows : MOST_ROWS;
    int64_t outputs = gated ? matrix->outputs / 2 : matrix->outputs, groups = (outputs + GROUP - 1) / GROUP;
    void *memory = malloc(activation_bytes(held, chunks) + 1);
    if (!memory) return 1;
    Activations rows = activations_in(memory, held, chunks);
    int threads = matrix->outputs * chunks * held > PARALLEL_VALUES / CHUNK;
#pragma omp parallel if (threads)
    for (int64_t start = 0; start < num_rows; start += held) {
        int64_t count = num_rows - start < held ? num_rows - start : held;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; row++)
            prepare_row(x + (start + row) * x_row, row, chunks, rows);
#pragma omp for schedule(static)
        for (int64_t group = 0; group < groups; group++) run_group(matrix, &call, rows, start, count, group);
    }
    free(memory);
    return 0;
}

/* Rows of the matrix by number, each value rounded once; numbers are in range. */
void looseleaf_rows(const Matrix *matrix, const int64_t *numbers, int64_t count, row_t *out) {
    int64_t blocks = matrix->num_blocks;
#pragma omp parallel for schedule(static) if (count > GROUP)
    for (int64_t n = 0; n < count; n++)
        write_row(matrix->packed + numbers[n] / GROUP * group_bytes(blocks), blocks, (int)(numbers[n] % GROUP),
                  out + n * blocks * BLOCK);
}
