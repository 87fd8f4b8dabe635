/* Paged attention for few query rows a request: reads keys and values in place through the block table.
 *
 * A slot (one token's place in one layer) holds a row of head_dim elements for each KV head; a row's query sees the keys at the
 * positions [first, last) of its request. Work is split over rows and spans of SPAN keys, all heads of a span in one
 * task so that memory is read in order; partial results are merged at the end, so one long row uses every thread.
 */
#define SPAN 256
#define TILE 16
#define MAX_HEAD_DIM 256
#define MAX_GROUP 128

typedef struct {
    const void *key, *value; /* of this layer, slot 0 */
    int64_t slot_stride;     /* in elements */
    const int32_t *block_table;
    int block_size, num_kv_heads;
    float softcap; /* 0 = none */
} Cache;

/* One KV head's group of queries against n keys. part: [group][2 + hd] = running maximum, sum, weighted values.
 * `ahead` are the next tile's slots: fetching them row by row while this tile computes hides the memory's latency,
 * which blocks scattered over the pool would otherwise expose (twice the speed after 4,096 tokens). */
INLINE void attend_tile(const Cache *c, int dtype, int hd, int group, const float *query, const int64_t *at, int n,
                        const int64_t *ahead, float *part) {
    float score[MAX_GROUP][TILE], acc[MAX_GROUP][MAX_HEAD_DIM];
    int64_t element = element_bytes(dtype), row_bytes = row_width(dtype, hd) * element;
    for (int t = 0; t < n; t++) {
        float k[MAX_HEAD_DIM];
        for (int64_t b = 0; b < row_bytes; b += 64) __builtin_prefetch((const char *)c->key + ahead[t] * element + b);
        load_row(c->key, at[t], dtype, hd, k);
        float by = row_scale(c->key, at[t], dtype, hd);
        for (int g = 0; g < group; g++) {
            float s = 0.0f;
            for (int d = 0; d < hd; d++) s += query[g * hd + d] * k[d];
            score[g][t] = dtype == INT8 ? s * by : s;
        }
    }
    for (int g = 0; g < group; g++) {
        float *state = part + (int64_t)g * (hd + 2);
        if (c->softcap > 0)
            for (int t = 0; t < n; t++) score[g][t] = c->softcap * tanhf(score[g][t] / c->softcap);
        float top = state[0];
        for (int t = 0; t < n; t++) top = score[g][t] > top ? score[g][t] : top;
        for (int t = n; t < TILE; t++) score[g][t] = top;
        float sum = 0.0f;
        for (int t = 0; t < TILE; t++) {
            float p = t < n ? fast_exp(score[g][t] - top) : 0.0f;
            score[g][t] = p;
            sum += p;
        }
        float shrink = fast_exp(state[0] - top);
        for (int d = 0; d < hd; d++) acc[g][d] = state[2 + d] * shrink;
        state[1] = state[1] * shrink + sum;
        state[0] = top;
    }
    for (int t = 0; t < n; t++) {
        float v[MAX_HEAD_DIM];
        for (int64_t b = 0; b < row_bytes; b += 64) __builtin_prefetch((const char *)c->value + ahead[t] * element + b);
        load_row(c->value, at[t], dtype, hd, v);
        float by = row_scale(c->value, at[t], dtype, hd);
        for (int g = 0; g < group; g++) {
            float p = dtype == INT8 ? score[g][t] * by : score[g][t];
            for (int d = 0; d < hd; d++) acc[g][d] += p * v[d];
        }
    }
    for (int g = 0; g < group; g++) memcpy(part + (int64_t)g * (hd + 2) + 2, acc[g], (size_t)hd * sizeof(float));
}

static void find_slots(const Cache *c, int start, int n, int64_t *at) {
    for (int t = 0; t < n; t++) {
        int position = start + t;
        int64_t slot = (int64_t)c->block_table[position / c->block_size] * c->block_size + position % c->block_size;
        at[t] = slot * c->slot_stride;
    }
}

/* Keys [start, stop), not empty, against all heads of one row. part: [num_heads][2 + hd]. */
INLINE void attend_span(const Cache *c, int dtype, int hd, int group, const float *query, int start, int stop,
                        float *part) {
    for (int h = 0; h < c->num_kv_heads * group; h++) {
        float *state = part + (int64_t)h * (hd + 2);
        state[0] = -1e30f; /* below every score; not infinity, which the compiler may assume away */
        for (int d = 1; d < hd + 2; d++) state[d] = 0.0f;
    }
    int64_t at[2][TILE];
    int width = row_width(dtype, hd);
    int n = stop - start < TILE ? stop - start : TILE, odd = 0;
    find_slots(c, start, n, at[0]);
    for (int tile = start; tile < stop; tile += TILE, odd ^= 1) {
        int64_t *here = at[odd], *next = at[odd ^ 1];
        int left = stop - tile - TILE, ahead = left < 0 ? 0 : left < TILE ? left : TILE;
        find_slots(c, tile + TILE, ahead, next);
        for (int t = ahead; t < TILE; t++) next[t] = here[0];
        for (int h = 0; h < c->num_kv_heads; h++) {
            attend_tile(c, dtype, hd, group, query + h * group * hd, here, n, next, part + (int64_t)h * group * (hd + 2));
            for (int t = 0; t < n; t++) here[t] += width;
            for (int t = 0; t < TILE; t++) next[t] += width;
        }
        for (int t = 0; t < TILE; t++) next[t] -= (int64_t)c->num_kv_heads * width;
        n = ahead;
    }
}

/* Sizes known to the compiler are several times faster; the usual ones get code of their own, as far as compiling stays
 * a matter of seconds. */
#define ATTEND(DTYPE, HD, GROUP) \
    if (dtype == DTYPE && hd == HD && group == GROUP) { attend_span(c, DTYPE, HD, GROUP, query, start, stop, part); return; }
static void attend(const Cache *c, int dtype, int hd, int group, const float *query, int start, int stop, float *part) {
    ATTEND(BF16, 64, 1) ATTEND(BF16, 64, 2) ATTEND(BF16, 64, 3) ATTEND(BF16, 64, 4) ATTEND(BF16, 64, 7) ATTEND(BF16, 64, 8)
    ATTEND(BF16, 128, 1) ATTEND(BF16, 128, 2) ATTEND(BF16, 128, 3) ATTEND(BF16, 128, 4) ATTEND(BF16, 128, 7) ATTEND(BF16, 128, 8)
    ATTEND(INT8, 64, 3) ATTEND(INT8, 64, 4) ATTEND(INT8, 64, 7) ATTEND(INT8, 128, 2) ATTEND(INT8, 128, 4)
    ATTEND(FP32, 64, 3)
    attend_span(c, dtype, hd, group, query, start, stop, part);
}

/* Merge one head's partial results of `num_spans` spans, `stride` floats apart, into out[hd]. */
static void merge_spans(const float *part, int num_spans, int64_t stride, int hd, float *out) {
    float top = -1e30f, sum = 0.0f;
    for (int s = 0; s < num_spans; s++) top = part[s * stride] > top ? part[s * stride] : top;
    for (int d = 0; d < hd; d++) out[d] = 0.0f;
    for (int s = 0; s < num_spans; s++) {
        const float *p = part + s * stride;
        float weight = fast_exp(p[0] - top);
        sum += weight * p[1];
        for (int d = 0; d < hd; d++) out[d] += weight * p[2 + d];
    }
    for (int d = 0; d < hd; d++) out[d] /= sum;
}
