/* Attention of a prompt chunk over its request's paged cache, for bf16 queries and a bf16 or int8 cache.
 *
 * The keys and values of the request are first copied out of their blocks into the order in which the bf16 dot products
 * take them, once for all queries. Then eight query rows (tokens x heads of one KV head) at a time pass over blocks of
 * KEYS keys: scores, running softmax, weighted values, all in registers and the first-level cache.
 */
#define KEYS 64
#define QUERIES 8

#if HAVE_AVX512_BF16

typedef struct {
    const bf16 *query; /* [tokens][num_heads][head_dim] */
    bf16 *out;
    const bf16 *keys;   /* [KV head][key / 16][head_dim / 2][16][2] */
    const bf16 *values; /* [KV head][key / 2][head_dim][2] */
    int first_key, num_keys, padded; /* keys gathered, from position first_key on; padded to a multiple of KEYS */
    int start, num_tokens, num_heads, num_kv_heads, head_dim, window;
    float scale;
} Prefill;

/* 16 rows of 16 32-bit elements -> its transpose, rows 64 bytes apart. */
INLINE void transpose_16x16(const __m512i *rows, bf16 *to) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), low2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        __m512i high = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd), high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
        _mm512_storeu_si512(to + (i + 0) * 32, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(to + (i + 4) * 32, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(to + (i + 8) * 32, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(to + (i + 12) * 32, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

/* 32 elements in bf16, from element d of the row at `at`; zero if there is no such key: what nobody has written may be
 * NaN. */
INLINE __m512i row_part(const void *base, int64_t at, int dtype, int hd, int d, int present) {
    if (!present) return _mm512_setzero_si512();
    if (dtype == BF16) return _mm512_loadu_si512((const bf16 *)base + at + d);
    const int8_t *from = (const int8_t *)base + at + d;
    __m512 by = _mm512_set1_ps(row_scale(base, at, dtype, hd));
    __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + 16))));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(b, by), _mm512_mul_ps(a, by));
}

/* Copy KEYS keys and values of all KV heads, from the block's position on. */
INLINE void gather_rows(const Prefill *p, const Cache *c, int dtype, int block, bf16 *keys, bf16 *values) {
    int hd = p->head_dim, width = row_width(dtype, hd), from = block * KEYS, n = p->num_keys - from < KEYS ? p->num_keys - from : KEYS;
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    int64_t at[KEYS] = {0};
    find_slots(c, p->first_key + from, n, at);
    for (int head = 0; head < p->num_kv_heads; head++) {
        bf16 *to_keys = keys + ((int64_t)head * p->padded + from) * hd, *to_values = values + ((int64_t)head * p->padded + from) * hd;
        for (int d = 0; d < hd; d += 32) {
            for (int tile = 0; tile < KEYS; tile += 16) {
                __m512i rows[16];
                for (int k = 0; k < 16; k++) rows[k] = row_part(c->key, at[tile + k] + head * width, dtype, hd, d, tile + k < n);
                transpose_16x16(rows, to_keys + (int64_t)tile * hd + d * 16);
            }
            for (int k = 0; k < KEYS; k += 2) {
                __m512i a = row_part(c->value, at[k] + head * width, dtype, hd, d, k < n);
                __m512i b = row_part(c->value, at[k + 1] + head * width, dtype, hd, d, k + 1 < n);
                _mm512_storeu_si512(to_values + (int64_t)k * hd + 2 * d, _mm512_permutex2var_epi16(a, first, b));
                _mm512_storeu_si512(to_values + (int64_t)k * hd + 2 * d + 32, _mm512_permutex2var_epi16(a, second, b));
            }
        }
    }
}

static void gather_block(const Prefill *p, const Cache *c, int dtype, int block, bf16 *keys, bf16 *values) {
    if (dtype == INT8) gather_rows(p, c, INT8, block, keys, values);
    else gather_rows(p, c, BF16, block, keys, values);
}

#define PAIR_OF(pointer, i) ((__m512bh)_mm512_set1_epi32(((const int32_t *)(pointer))[i]))

/* scores[row][KEYS] of QUERIES rows against one block of keys. */
INLINE void block_scores(const bf16 *const *rows, const bf16 *keys, int hd, float scale, float (*scores)[KEYS]) {
    __m512 factor = _mm512_set1_ps(scale);
    for (int half = 0; half < KEYS / 32; half++) {
        const bf16 *tile0 = keys + (int64_t)(2 * half) * 16 * hd, *tile1 = tile0 + 16 * hd;
        __m512 a[QUERIES], b[QUERIES];
#pragma GCC unroll 8
        for (int r = 0; r < QUERIES; r++) a[r] = b[r] = _mm512_setzero_ps();
        for (int i = 0; i < hd / 2; i++) {
            __m512bh k0 = (__m512bh)_mm512_loadu_si512(tile0 + i * 32), k1 = (__m512bh)_mm512_loadu_si512(tile1 + i * 32);
#pragma GCC unroll 8
            for (int r = 0; r < QUERIES; r++) {
                __m512bh q = PAIR_OF(rows[r], i);
                a[r] = _mm512_dpbf16_ps(a[r], k0, q);
                b[r] = _mm512_dpbf16_ps(b[r], k1, q);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < QUERIES; r++) {
            _mm512_storeu_ps(scores[r] + half * 32, _mm512_mul_ps(a[r], factor));
            _mm512_storeu_ps(scores[r] + half * 32 + 16, _mm512_mul_ps(b[r], factor));
        }
    }
}

/* out[row][hd] = out * shrink[row] + weights[row] x values of one block. */
INLINE void block_values(const bf16 (*weights)[KEYS], const bf16 *values, int hd, const float *shrink, float *out) {
    for (int d = 0; d < hd; d += 32) {
        __m512 a[QUERIES], b[QUERIES];
#pragma GCC unroll 8
        for (int r = 0; r < QUERIES; r++) {
            __m512 by = _mm512_set1_ps(shrink[r]);
            a[r] = _mm512_mul_ps(by, _mm512_loadu_ps(out + r * hd + d));
            b[r] = _mm512_mul_ps(by, _mm512_loadu_ps(out + r * hd + d + 16));
        }
        for (int i = 0; i < KEYS / 2; i++) {
            const bf16 *pair = values + ((int64_t)i * hd + d) * 2;
            __m512bh v0 = (__m512bh)_mm512_loadu_si512(pair), v1 = (__m512bh)_mm512_loadu_si512(pair + 32);
#pragma GCC unroll 8
            for (int r = 0; r < QUERIES; r++) {
                __m512bh w = PAIR_OF(weights[r], i);
                a[r] = _mm512_dpbf16_ps(a[r], v0, w);
                b[r] = _mm512_dpbf16_ps(b[r], v1, w);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < QUERIES; r++) {
            _mm512_storeu_ps(out + r * hd + d, a[r]);
            _mm512_storeu_ps(out + r * hd + d + 16, b[r]);
        }
    }
}

/* Hide the keys of a block, at positions from `at` on, that a row at `position` doesn't see. */
static void hide_keys(float *scores, int at, int position, int window) {
    for (int k = 0; k < KEYS; k++) {
        int hidden = at + k > position || (window > 0 && at + k <= position - window);
        scores[k] = hidden ? -1e30f : scores[k];
    }
}

INLINE __m512 exp512(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147181f), x);
    __m512 p = _mm512_set1_ps(1.0f / 120);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* One row's running softmax over a block: weights rounded to bf16, their sum added, the factor on what was before. */
INLINE float soften(const float *scores, bf16 *weights, float *top, float *sum) {
    __m512 s[KEYS / 16], most = _mm512_set1_ps(*top);
#pragma GCC unroll 4
    for (int i = 0; i < KEYS / 16; i++) {
        s[i] = _mm512_loadu_ps(scores + i * 16);
        most = _mm512_max_ps(most, s[i]);
    }
    float next = _mm512_reduce_max_ps(most);
    __m512 by = _mm512_set1_ps(next), total = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < KEYS / 16; i++) {
        __m512 w = exp512(_mm512_sub_ps(s[i], by));
        w = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(s[i], _mm512_set1_ps(-1e29f), _CMP_GT_OQ), w);
        total = _mm512_add_ps(total, w);
        _mm256_storeu_si256((__m256i *)(weights + i * 16), (__m256i)_mm512_cvtneps_pbh(w));
    }
    float shrink = fast_exp(*top - next);
    *sum = *sum * shrink + _mm512_reduce_add_ps(total);
    *top = next;
    return shrink;
}

/* QUERIES rows of one KV head from row `begin` on: row = token * group + head within the group. */
INLINE void attend_rows(const Prefill *p, int head, int begin, int hd) {
    int group = p->num_heads / p->num_kv_heads, num_rows = p->num_tokens * group;
    const bf16 *rows[QUERIES];
    float out[QUERIES * MAX_HEAD_DIM], top[QUERIES], sum[QUERIES], shrink[QUERIES], scores[QUERIES][KEYS];
    bf16 weights[QUERIES][KEYS];
    int positions[QUERIES];
    for (int r = 0; r < QUERIES; r++) {
        int row = begin + r < num_rows ? begin + r : num_rows - 1; /* missing rows repeat the last */
        rows[r] = p->query + ((int64_t)(row / group) * p->num_heads + head * group + row % group) * hd;
        positions[r] = p->start + row / group;
        top[r] = -1e30f;
        sum[r] = 0.0f;
    }
    for (int i = 0; i < QUERIES * hd; i++) out[i] = 0.0f;
    int lowest = p->window > 0 && positions[0] + 1 > p->window ? positions[0] + 1 - p->window : 0;
    int from = (lowest > p->first_key ? lowest - p->first_key : 0) / KEYS * KEYS;
    int seen = positions[QUERIES - 1] + 1 - p->first_key; /* keys of the last row */
    for (int k = from; k < seen; k += KEYS) {
        int at = p->first_key + k;
        block_scores(rows, p->keys + ((int64_t)head * p->padded + k) * hd, hd, p->scale, scores);
        int edge = at + KEYS - 1 > positions[0] || (p->window > 0 && at <= positions[QUERIES - 1] - p->window);
        for (int r = 0; r < QUERIES; r++) {
            if (edge) hide_keys(scores[r], at, positions[r], p->window);
            shrink[r] = soften(scores[r], weights[r], &top[r], &sum[r]);
        }
        block_values((const bf16(*)[KEYS])weights, p->values + ((int64_t)head * p->padded + k) * hd, hd, shrink, out);
    }
    for (int r = 0; r < QUERIES && begin + r < num_rows; r++) {
        int row = begin + r;
        float by = 1.0f / sum[r];
        for (int d = 0; d < hd; d++) out[r * hd + d] *= by;
        store_row(p->out, ((int64_t)(row / group) * p->num_heads + head * group + row % group) * hd, BF16, hd, out + r * hd);
    }
}

static void attend_some_rows(const Prefill *p, int head, int begin, int end) {
    for (int row = begin; row < end; row += QUERIES) {
        if (p->head_dim == 64) attend_rows(p, head, row, 64);
        else if (p->head_dim == 128) attend_rows(p, head, row, 128);
        else attend_rows(p, head, row, p->head_dim);
    }
}

#endif
