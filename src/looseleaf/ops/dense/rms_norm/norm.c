/* The RMS norm of rows, after an addition to them if there is one. `rows.h` precedes this text.

   Squares are summed in LANES partial sums, whose order is fixed. */

static inline float sum_vec(vec x) {
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

static inline float weight_at(const void *weight, int64_t n, int64_t is_wide) {
    return is_wide ? ((const float *)weight)[n] : load_row(((const row_t *)weight)[n]);
}

static void norm_row(row_t *x, const row_t *delta, const void *weight, int64_t is_wide, row_t *out,
                     int64_t features, float eps) {
    vec squares = {0};
    int64_t whole = features / LANES * LANES;
    for (int64_t n = 0; delta && n < features; n++) x[n] = round_row(load_row(x[n]) + load_row(delta[n]));
    for (int64_t n = 0; n < whole; n += LANES) {
        vec wide;
        for (int lane = 0; lane < LANES; lane++) wide[lane] = load_row(x[n + lane]);
        squares = fused_vec(wide, wide, squares);
    }
    float sum = sum_vec(squares);
    for (int64_t n = whole; n < features; n++) sum = fused(load_row(x[n]), load_row(x[n]), sum);
    float scale = 1.0f / sqrtf(sum / (float)features + eps);
    if (is_wide)
        for (int64_t n = 0; n < features; n++) out[n] = round_row(load_row(x[n]) * scale * weight_at(weight, n, 1));
    else
        for (int64_t n = 0; n < features; n++) out[n] = round_row(load_row(x[n]) * scale * weight_at(weight, n, 0));
}

typedef struct {
    int64_t rows, heads, features; /* `heads` norms a row */
    int64_t x_row, x_head, delta_row;
} Shape;

/* out[row][head] = weight * x / sqrt(mean(x^2) + eps), without gaps. With `delta`, x is first set to x + delta.
   `weight` is fp32 if it is wide, else of the rows' type. */
void looseleaf_rms_norm(const Shape *shape, row_t *x, const row_t *delta, const void *weight, int64_t is_wide,
                        row_t *out, float eps) {
    int64_t count = shape->rows * shape->heads;
#pragma omp parallel for schedule(static) if (count * shape->features > 1 << 15)
    for (int64_t n = 0; n < count; n++) {
        int64_t row = n / shape->heads, head = n % shape->heads;
        const row_t *added = delta ? delta + row * shape->delta_row + head * shape->features : NULL;
        norm_row(x + row * shape->x_row + head * shape->x_head, added, weight, is_wide, out + n * shape->features,
                 shape->features, eps);
    }
}
