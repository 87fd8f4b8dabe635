/* What a layer does to rows between its products, in bf16 with fp32 inside: one pass over memory each. */

INLINE float sum_of_squares(const float *x, int n) {
    float s = 0.0f;
    for (int i = 0; i < n; i++) s += x[i] * x[i];
    return s;
}

static void rms_norm(const float *x, const float *weight, int n, float eps, float *out) {
    float r = 1.0f / sqrtf(sum_of_squares(x, n) / n + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * r * weight[i];
}

static void rotate(float *x, const float *cos, const float *sin, int head_dim) {
    int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* x, out: [rows][n]; weight: [n]; all bf16. */
void rms_norm_rows(const bf16 *x, const bf16 *weight, int rows, int n, float eps, bf16 *out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int r = 0; r < rows; r++) {
        const bf16 *from = x + (int64_t)r * n;
        bf16 *to = out + (int64_t)r * n;
        float s = 0.0f;
        for (int i = 0; i < n; i++) s += from_bf16(from[i]) * from_bf16(from[i]);
        float by = 1.0f / sqrtf(s / n + eps);
        for (int i = 0; i < n; i++) to[i] = to_bf16(from_bf16(from[i]) * by * from_bf16(weight[i]));
    }
}

/* gate_up: [rows][2][n] bf16 -> out [rows][n]: silu(gate) * up. */
void silu_mul_rows(const bf16 *gate_up, int rows, int n, bf16 *out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int r = 0; r < rows; r++) {
        const bf16 *gate = gate_up + (int64_t)r * 2 * n, *up = gate + n;
        bf16 *to = out + (int64_t)r * n;
        for (int i = 0; i < n; i++) {
            float g = from_bf16(gate[i]);
            to[i] = to_bf16(g / (1.0f + fast_exp(-g)) * from_bf16(up[i]));
        }
    }
}

/* heads: [rows][all heads][head_dim] bf16, the first num_rotated of which are normed (norm: [num_rotated][head_dim]
 * bf16 or NULL) and rotated in place; cos, sin: [rows][head_dim] fp32. Returns -1 for a head_dim that is too large. */
int rotate_rows(bf16 *heads, const bf16 *norm, float eps, const float *cos, const float *sin, int rows, int all_heads,
                int num_rotated, int head_dim, int num_threads) {
    if (head_dim > MAX_HEAD_DIM) return -1;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int r = 0; r < rows; r++) {
        for (int h = 0; h < num_rotated; h++) {
            bf16 *head = heads + ((int64_t)r * all_heads + h) * head_dim;
            float x[MAX_HEAD_DIM], weight[MAX_HEAD_DIM];
            load_row(head, 0, BF16, head_dim, x);
            if (norm) {
                load_row(norm, (int64_t)h * head_dim, BF16, head_dim, weight);
                rms_norm(x, weight, head_dim, eps, x);
            }
            rotate(x, cos + (int64_t)r * head_dim, sin + (int64_t)r * head_dim, head_dim);
            store_row(head, 0, BF16, head_dim, x);
        }
    }
    return 0;
}
