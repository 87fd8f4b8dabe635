/* The kernels' entry points: one decode step of a dense decoder, paged attention alone, and packing of weights.
 *
 * A step serves the Llama, Mistral, Qwen2 and Qwen3 families. The residual stream, norms, sums and attention are fp32;
 * activations enter a product as bf16 (as fp32 where the weights are). Nothing here allocates or keeps state.
 */
#include "common.h"
#include "attention.h"
#include "matrix.h"
#include "prefill.h"
#include "rows.h"

typedef struct {
    const float *input_norm, *post_norm, *query_norm, *key_norm; /* the last two NULL where the family has none */
    Matrix qkv, output, gate_up, down;
    int32_t window, unused; /* keys a row sees, itself included; 0 = all */
    const float *key_sizes; /* [kv heads][head_dim]: queries are multiplied by it, keys divided; NULL = as they are */
} Layer;

typedef struct {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab, block_size, kv_dtype, unused;
    float eps, scale;
    int64_t layer_stride, value_offset, slot_stride; /* of the KV cache, in elements */
    void *cache;                                     /* [layers][2][blocks][block_size][kv heads][row] */
    const float *final_norm;
    Matrix head;
    const Layer *layers;
} Model;

static int first_key(const Layer *layer, int position) {
    return layer->window > 0 && position + 1 > layer->window ? position + 1 - layer->window : 0;
}

static int num_spans(int num_keys) { return (num_keys + SPAN - 1) / SPAN; }

static int widest_input(const Model *m) {
    int widest = m->intermediate > m->hidden ? m->intermediate : m->hidden;
    return widest > m->num_heads * m->head_dim ? widest : m->num_heads * m->head_dim;
}

static int longest_row(int rows, const int32_t *positions) {
    int longest = 0;
    for (int r = 0; r < rows; r++) longest = positions[r] + 1 > longest ? positions[r] + 1 : longest;
    return longest;
}

/* What the threads of a step share: activations between barriers. */
typedef struct {
    const Model *m;
    int rows, spans, table_width;
    float *hidden, *qkv, *attention, *activated, *parts;
    const float *cos, *sin; /* [rows][head_dim] */
    const int32_t *positions, *block_tables;
    const int64_t *slots;
} Step;

/* Bytes of scratch memory a step needs. */
int64_t dense_step_scratch(const Model *m, int rows, const int32_t *positions) {
    int64_t heads = m->num_heads, spans = num_spans(longest_row(rows, positions));
    int64_t row = (heads + 2 * m->num_kv_heads) * m->head_dim + heads * m->head_dim + m->intermediate + spans * heads * (m->head_dim + 2);
    return (int64_t)rows * row * (int64_t)sizeof(float);
}

/* Norm, rotate and store one head of one row: queries stay, scaled; keys and values go to the cache. */
static void place_head(const Step *s, const Layer *layer, int r, int h, void *keys, void *values) {
    const Model *m = s->m;
    int hd = m->head_dim, heads = m->num_heads, kv_heads = m->num_kv_heads;
    float *v = s->qkv + ((int64_t)r * (heads + 2 * kv_heads) + h) * hd;
    const float *norm = h < heads ? layer->query_norm : layer->key_norm;
    if (h < heads + kv_heads) {
        if (norm) rms_norm(v, norm, hd, m->eps, v);
        rotate(v, s->cos + (int64_t)r * hd, s->sin + (int64_t)r * hd, hd);
    }
    if (layer->key_sizes && h < heads + kv_heads) {
        const float *sizes = layer->key_sizes + (int64_t)(h < heads ? h / (heads / kv_heads) : h - heads) * hd;
        for (int d = 0; d < hd; d++) v[d] = h < heads ? v[d] * sizes[d] : v[d] / sizes[d];
    }
    if (h < heads) {
        for (int d = 0; d < hd; d++) v[d] *= m->scale;
    } else {
        int64_t at = s->slots[r] * m->slot_stride + (int64_t)((h - heads) % kv_heads) * row_width(m->kv_dtype, hd);
        store_row(h < heads + kv_heads ? keys : values, at, m->kv_dtype, hd, v);
    }
}

static void attend_task(const Step *s, const Layer *layer, int task, const void *keys, const void *values) {
    const Model *m = s->m;
    int r = task / s->spans, span = task % s->spans;
    int start = first_key(layer, s->positions[r]) + span * SPAN, last = s->positions[r] + 1;
    int stop = start + SPAN < last ? start + SPAN : last;
    if (start >= stop) return;
    Cache c = {keys, values, m->slot_stride, s->block_tables + (int64_t)r * s->table_width, m->block_size, m->num_kv_heads, 0.0f};
    const float *query = s->qkv + (int64_t)r * (m->num_heads + 2 * m->num_kv_heads) * m->head_dim;
    float *part = s->parts + (int64_t)task * m->num_heads * (m->head_dim + 2);
    attend(&c, m->kv_dtype, m->head_dim, m->num_heads / m->num_kv_heads, query, start, stop, part);
}

static void merge_head(const Step *s, const Layer *layer, int r, int head) {
    const Model *m = s->m;
    int64_t stride = (int64_t)m->num_heads * (m->head_dim + 2);
    int spans = num_spans(s->positions[r] + 1 - first_key(layer, s->positions[r]));
    const float *part = s->parts + (int64_t)r * s->spans * stride + (int64_t)head * (m->head_dim + 2);
    merge_spans(part, spans, stride, m->head_dim, s->attention + ((int64_t)r * m->num_heads + head) * m->head_dim);
}

static void add_tile(const Step *s, int tile, float (*y)[LANES]) {
    for (int r = 0; r < s->rows; r++)
        for (int i = 0; i < LANES; i++) s->hidden[(int64_t)r * s->m->hidden + tile * LANES + i] += y[r][i];
}

static void normed_input(const Step *s, const float *weight, Input *x, float *normed) {
    x->in = s->m->hidden;
    for (int r = 0; r < s->rows; r++) {
        rms_norm(s->hidden + (int64_t)r * s->m->hidden, weight, s->m->hidden, s->m->eps, normed);
        set_input(x, r, normed);
    }
}

static void plain_input(const Step *s, const float *from, int width, Input *x) {
    x->in = width;
    for (int r = 0; r < s->rows; r++) set_input(x, r, from + (int64_t)r * width);
}

/* One layer, by all threads of the enclosing parallel region; each `omp for` ends with a barrier. */
static void run_layer(const Step *s, int index, Input *x, float *normed) {
    const Model *m = s->m;
    const Layer *layer = m->layers + index;
    int64_t element = element_bytes(m->kv_dtype);
    char *keys = (char *)m->cache + index * m->layer_stride * element, *values = keys + m->value_offset * element;
    int all_heads = m->num_heads + 2 * m->num_kv_heads, width = all_heads * m->head_dim;
    float y[MAX_ROWS][LANES], z[MAX_ROWS][LANES];

    normed_input(s, layer->input_norm, x, normed);
#pragma omp for schedule(static)
    for (int tile = 0; tile < width / LANES; tile++) {
        product(&layer->qkv, tile, x, y);
        for (int r = 0; r < s->rows; r++) memcpy(s->qkv + (int64_t)r * width + tile * LANES, y[r], sizeof y[r]);
    }
#pragma omp for schedule(static)
    for (int i = 0; i < s->rows * all_heads; i++) place_head(s, layer, i / all_heads, i % all_heads, keys, values);
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < s->rows * s->spans; task++) attend_task(s, layer, task, keys, values);
#pragma omp for schedule(static)
    for (int i = 0; i < s->rows * m->num_heads; i++) merge_head(s, layer, i / m->num_heads, i % m->num_heads);
    plain_input(s, s->attention, m->num_heads * m->head_dim, x);
#pragma omp for schedule(static)
    for (int tile = 0; tile < m->hidden / LANES; tile++) {
        product(&layer->output, tile, x, y);
        add_tile(s, tile, y);
    }
    normed_input(s, layer->post_norm, x, normed);
#pragma omp for schedule(static)
    for (int tile = 0; tile < m->intermediate / LANES; tile++) {
        product(&layer->gate_up, tile, x, y);
        product(&layer->gate_up, tile + m->intermediate / LANES, x, z);
        for (int r = 0; r < s->rows; r++)
            for (int i = 0; i < LANES; i++)
                s->activated[(int64_t)r * m->intermediate + tile * LANES + i] = y[r][i] / (1.0f + fast_exp(-y[r][i])) * z[r][i];
    }
    plain_input(s, s->activated, m->intermediate, x);
#pragma omp for schedule(static)
    for (int tile = 0; tile < m->hidden / LANES; tile++) {
        product(&layer->down, tile, x, y);
        add_tile(s, tile, y);
    }
}

/* Advance `rows` requests by one token each.
 * hidden: [rows][hidden], the embedded tokens; overwritten. cos, sin: [rows][head_dim], of the rows' positions. slots: where each row's own key and value go; a row at
 * position p sees the keys up to p, its own included. block_tables: [rows][table_width]. logits: [rows][vocab].
 * Returns 0, or -1 if a size is beyond what the kernel was built for. */
int dense_step(const Model *m, int rows, float *hidden, const float *cos, const float *sin, const int32_t *positions,
               const int64_t *slots, const int32_t *block_tables, int table_width, float *logits, void *scratch,
               int num_threads) {
    int heads = m->num_heads, hd = m->head_dim;
    if (rows < 1 || rows > MAX_ROWS || hd > MAX_HEAD_DIM || heads / m->num_kv_heads > MAX_GROUP) return -1;
    int spans = num_spans(longest_row(rows, positions)), widest = widest_input(m);
    float *qkv = scratch, *attention = qkv + (int64_t)rows * (heads + 2 * m->num_kv_heads) * hd;
    float *activated = attention + (int64_t)rows * heads * hd, *parts = activated + (int64_t)rows * m->intermediate;
    Step s = {m, rows, spans, table_width, hidden, qkv, attention, activated, parts, cos, sin, positions, block_tables, slots};
#pragma omp parallel num_threads(num_threads)
    {
        /* every thread prepares the inputs for itself: cheaper than a barrier, and they stay in its own cache */
        float exact[rows * widest], sums[rows * (widest / GROUP)], normed[widest], y[MAX_ROWS][LANES];
        bf16 rounded[rows * widest] __attribute__((aligned(64)));
        Input x = {exact, rounded, sums, rows, m->hidden};
        for (int index = 0; index < m->num_layers; index++) run_layer(&s, index, &x, normed);
        normed_input(&s, m->final_norm, &x, normed);
#pragma omp for schedule(static)
        for (int tile = 0; tile < m->vocab / LANES; tile++) {
            product(&m->head, tile, &x, y);
            for (int r = 0; r < rows; r++) memcpy(logits + (int64_t)r * m->vocab + tile * LANES, y[r], sizeof y[r]);
        }
    }
    return 0;
}

/* y[rows][out] = x[rows][in] times the transposed matrix, plus its bias; rows <= MAX_ROWS. */
int matrix_product(const Matrix *w, int rows, const float *from, float *to, int num_threads) {
    if (rows < 1 || rows > MAX_ROWS) return -1;
#pragma omp parallel num_threads(num_threads)
    {
        float exact[rows * w->in], sums[rows * (w->in / GROUP)], y[MAX_ROWS][LANES];
        bf16 rounded[rows * w->in] __attribute__((aligned(64)));
        Input x = {exact, rounded, sums, rows, w->in};
        for (int r = 0; r < rows; r++) set_input(&x, r, from + (int64_t)r * w->in);
#pragma omp for schedule(static)
        for (int tile = 0; tile < w->out / LANES; tile++) {
            product(w, tile, &x, y);
            for (int r = 0; r < rows; r++) memcpy(to + (int64_t)r * w->out + tile * LANES, y[r], sizeof y[r]);
        }
    }
    return 0;
}

/* Bytes of scratch memory for `paged_attention`. */
int64_t paged_attention_scratch(int num_rows, int num_heads, int head_dim, int max_keys) {
    return (int64_t)num_rows * num_heads * (head_dim + (int64_t)num_spans(max_keys) * (head_dim + 2)) * (int64_t)sizeof(float);
}

/* Attention of single query rows. query, out: [num_rows][num_heads][head_dim] fp32 or bf16; key, value: one layer of
 * the cache, slot 0; row r reads row r of block_tables and sees the keys at positions [first[r], last[r]), not empty.
 * Returns 0, or -1 if a size is beyond what the kernel was built for. */
int paged_attention(const void *query, int query_dtype, void *out, const void *key, const void *value, int kv_dtype,
                    int64_t slot_stride, const int32_t *block_tables, int table_width, const int32_t *first,
                    const int32_t *last, int num_rows, int num_heads, int num_kv_heads, int head_dim, int block_size,
                    float scale, float softcap, float *scratch, int num_threads) {
    int group = num_heads / num_kv_heads;
    if (head_dim > MAX_HEAD_DIM || group > MAX_GROUP) return -1;
    int longest = 0, row_width = num_heads * head_dim;
    for (int r = 0; r < num_rows; r++) longest = last[r] - first[r] > longest ? last[r] - first[r] : longest;
    int spans = num_spans(longest);
    float *scaled = scratch, *parts = scratch + (int64_t)num_rows * row_width;
    int64_t stride = (int64_t)num_heads * (head_dim + 2);
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (int r = 0; r < num_rows; r++) {
            load_row(query, (int64_t)r * row_width, query_dtype, row_width, scaled + (int64_t)r * row_width);
            for (int i = 0; i < row_width; i++) scaled[(int64_t)r * row_width + i] *= scale;
        }
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < num_rows * spans; task++) {
            int r = task / spans, start = first[r] + task % spans * SPAN, stop = start + SPAN < last[r] ? start + SPAN : last[r];
            if (start >= stop) continue;
            Cache c = {key, value, slot_stride, block_tables + (int64_t)r * table_width, block_size, num_kv_heads, softcap};
            attend(&c, kv_dtype, head_dim, group, scaled + (int64_t)r * row_width, start, stop, parts + task * stride);
        }
#pragma omp for schedule(static)
        for (int i = 0; i < num_rows * num_heads; i++) {
            int r = i / num_heads, head = i % num_heads;
            float merged[MAX_HEAD_DIM];
            const float *part = parts + (int64_t)r * spans * stride + (int64_t)head * (head_dim + 2);
            merge_spans(part, num_spans(last[r] - first[r]), stride, head_dim, merged);
            store_row(out, (int64_t)i * head_dim, query_dtype, head_dim, merged);
        }
    }
    return 0;
}

/* Write each row's heads into its slot. rows: [num_rows][num_kv_heads][head_dim] of a float type, row_stride elements
 * apart; cache: one layer's keys or values, slot 0. */
void store_slots(const void *rows, int dtype, int64_t row_stride, int num_rows, int num_kv_heads, int head_dim,
                 const int64_t *slots, void *cache, int kv_dtype, int64_t slot_stride, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int r = 0; r < num_rows; r++)
        for (int h = 0; h < num_kv_heads; h++) {
            float x[head_dim];
            load_row(rows, r * row_stride + (int64_t)h * head_dim, dtype, head_dim, x);
            store_row(cache, slots[r] * slot_stride + (int64_t)h * row_width(kv_dtype, head_dim), kv_dtype, head_dim, x);
        }
}

/* Copy pieces of some layers, keys and values, from one KV cache into another. pieces: [num_pieces][3] = source offset,
 * target offset and number of bytes, within the keys of a layer; values lie a kv stride further. */
void copy_pieces(const char *source, char *target, const int64_t *pieces, int num_pieces, const int32_t *layers,
                 int num_layers, int64_t source_kv_stride, int64_t target_kv_stride) {
    for (int i = 0; i < num_layers; i++)
        for (int kv = 0; kv < 2; kv++) {
            const char *from = source + (2 * (int64_t)layers[i] + kv) * source_kv_stride;
            char *to = target + (2 * (int64_t)layers[i] + kv) * target_kv_stride;
            for (int p = 0; p < num_pieces; p++)
                memcpy(to + pieces[3 * p + 1], from + pieces[3 * p], pieces[3 * p + 2]);
        }
}

static int gathered_keys(int first_key, int stop) { return (stop - first_key + KEYS - 1) / KEYS * KEYS; }

static int lowest_key(int start, int window) { return window > 0 && start + 1 > window ? start + 1 - window : 0; }

/* Bytes of scratch memory for `paged_prefill`; 0: this machine has no such kernel. */
int64_t paged_prefill_scratch(int start, int num_tokens, int num_kv_heads, int head_dim, int window) {
#if HAVE_AVX512_BF16
    int64_t padded = gathered_keys(lowest_key(start, window), start + num_tokens);
    return 2 * padded * num_kv_heads * head_dim * (int64_t)sizeof(bf16) + 64;
#else
    (void)start, (void)num_tokens, (void)num_kv_heads, (void)head_dim, (void)window;
    return 0;
#endif
}

/* Attention of one request's tokens at positions [start, start + num_tokens), all in the cache already.
 * query, out: [num_tokens][num_heads][head_dim] bf16; key, value: one layer of a bf16 or int8 cache, slot 0; a token sees the
 * `window` positions up to its own (0 = all). scratch: 64-byte aligned.
 * Returns 0, or -1 if this machine or a size is not what the kernel was built for. */
int paged_prefill(const void *query, void *out, const void *key, const void *value, int kv_dtype,
                  int64_t slot_stride, const int32_t *block_table, int start, int num_tokens, int num_heads, int num_kv_heads, int head_dim,
                  int block_size, float scale, int window, void *scratch, int num_threads) {
#if HAVE_AVX512_BF16
    if (head_dim % 32 || head_dim > MAX_HEAD_DIM || (kv_dtype != BF16 && kv_dtype != INT8)) return -1;
    int first = lowest_key(start, window), padded = gathered_keys(first, start + num_tokens);
    bf16 *keys = scratch, *values = keys + (int64_t)padded * num_kv_heads * head_dim;
    Cache c = {key, value, slot_stride, block_table, block_size, num_kv_heads, 0.0f};
    Prefill p = {query, out, keys, values, first, start + num_tokens - first, padded, start, num_tokens, num_heads,
                 num_kv_heads, head_dim, window, scale};
    int num_rows = num_tokens * (num_heads / num_kv_heads), rows_a_task = 8 * QUERIES;
    int tasks = (num_rows + rows_a_task - 1) / rows_a_task;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (int block = 0; block < padded / KEYS; block++) gather_block(&p, &c, kv_dtype, block, keys, values);
        /* the last rows see the most keys: start with them, so that no thread is left with a long task */
#pragma omp for schedule(dynamic, 1)
        for (int i = tasks * num_kv_heads - 1; i >= 0; i--) {
            int begin = i / num_kv_heads * rows_a_task, end = begin + rows_a_task < num_rows ? begin + rows_a_task : num_rows;
            attend_some_rows(&p, i % num_kv_heads, begin, end);
        }
    }
    return 0;
#else
    (void)query, (void)out, (void)key, (void)value, (void)kv_dtype, (void)slot_stride, (void)block_table, (void)start, (void)num_tokens;
    (void)num_heads, (void)num_kv_heads, (void)head_dim, (void)block_size, (void)scale, (void)window, (void)scratch;
    (void)num_threads;
    return -1;
#endif
}
