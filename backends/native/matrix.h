/* Packed weights, and products of a few rows with them.
 *
 * A matrix is packed in tiles of 16 outputs and groups of 32 inputs, pairs of inputs interleaved: a vector lane is an
 * output, so nothing is summed across lanes, and memory is read once, in order. Element j of a pair's 32 elements
 * belongs to output j / 2 of the tile and to input j % 2 of the pair.
 *   W_Q4   two pairs a 32 bytes (low and high nibbles), then fp16 d[16], m[16]:  w = q * d + m   (GGUF's Q4_0, Q4_1)
 *   W_Q8   32 int8 a pair, then fp16 d[16]:                                      w = q * d       (GGUF's Q8_0)
 *   W_BF16 32 bf16 a pair                              W_FP32 32 floats a pair; the product is then fp32 throughout
 */
#define LANES 16
#define GROUP 32
#define PAIRS (GROUP / 2)
#define MAX_ROWS 8

enum { W_BF16 = 0, W_Q4 = 1, W_Q8 = 2, W_FP32 = 3 };

typedef struct {
    const uint8_t *data; /* [out / 16][in / 32][group bytes] */
    const float *bias;   /* [out] or NULL */
    int32_t out, in, kind, unused;
} Matrix;

static int64_t group_bytes(int kind) {
    return kind == W_Q4 ? 320 : kind == W_Q8 ? 544 : kind == W_BF16 ? 1024 : 2048;
}

int64_t packed_bytes(int kind, int out, int in) { return (int64_t)(out / LANES) * (in / GROUP) * group_bytes(kind); }

static void pack_group(int kind, int in, int tile, int g, const void *values, uint8_t *to) {
    for (int pair = 0; pair < PAIRS; pair++)
        for (int j = 0; j < 32; j++) {
            int64_t at = (int64_t)(tile * LANES + j / 2) * in + g * GROUP + pair * 2 + j % 2;
            if (kind == W_Q4) {
                uint8_t q = ((const uint8_t *)values)[at], *byte = to + pair / 2 * 32 + j;
                *byte = pair % 2 ? (uint8_t)(*byte | q << 4) : q;
            } else if (kind == W_Q8) {
                to[pair * 32 + j] = ((const uint8_t *)values)[at];
            } else if (kind == W_BF16) {
                ((bf16 *)to)[pair * 32 + j] = ((const bf16 *)values)[at];
            } else {
                ((float *)to)[pair * 32 + j] = ((const float *)values)[at];
            }
        }
}

/* values: row-major [out][in]: uint8 0..15, int8, bf16 or fp32. d, m: fp16 [out][in / 32]. Returns -1 on sizes that
 * are no multiples of 16 outputs and 32 inputs. */
int pack_matrix(int kind, int out, int in, const void *values, const uint16_t *d, const uint16_t *m, uint8_t *packed) {
    if (out % LANES || in % GROUP) return -1;
    int groups = in / GROUP;
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < out / LANES; tile++)
        for (int g = 0; g < groups; g++) {
            uint8_t *to = packed + ((int64_t)tile * groups + g) * group_bytes(kind);
            pack_group(kind, in, tile, g, values, to);
            uint16_t *scales = (uint16_t *)(to + (kind == W_Q4 ? 256 : 512));
            for (int lane = 0; lane < LANES && (kind == W_Q4 || kind == W_Q8); lane++) {
                scales[lane] = d[(int64_t)(tile * LANES + lane) * groups + g];
                if (kind == W_Q4) scales[LANES + lane] = m[(int64_t)(tile * LANES + lane) * groups + g];
            }
        }
    return 0;
}

/* Rows as a product takes them. */
typedef struct {
    float *exact; /* [rows][in] */
    bf16 *values; /* [rows][in], rounded */
    float *sums;  /* [rows][in / 32]: sums of the rounded values of a group, for the minima of W_Q4 */
    int rows, in;
} Input;

static void set_input(Input *x, int row, const float *from) {
    float *exact = x->exact + (int64_t)row * x->in;
    bf16 *to = x->values + (int64_t)row * x->in;
    memcpy(exact, from, (size_t)x->in * sizeof(float));
    for (int g = 0; g < x->in / GROUP; g++) {
        float s = 0.0f;
#if HAVE_AVX512_BF16
        __m512 a = _mm512_loadu_ps(from + g * GROUP), b = _mm512_loadu_ps(from + g * GROUP + 16);
        __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        _mm512_storeu_si512(to + g * GROUP, rounded);
        a = _mm512_castsi512_ps(_mm512_slli_epi32(rounded, 16));
        b = _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(0xffff), rounded));
        s = _mm512_reduce_add_ps(_mm512_add_ps(a, b));
#else
        for (int i = 0; i < GROUP; i++) {
            to[g * GROUP + i] = to_bf16(from[g * GROUP + i]);
            s += from_bf16(to[g * GROUP + i]);
        }
#endif
        x->sums[(int64_t)row * (x->in / GROUP) + g] = s;
    }
}

/* The fp32 weights of one pair, in element order; for kinds and machines without a vector path. */
static void unpack_pair(int kind, const uint8_t *group, int pair, float *out) {
    for (int j = 0; j < 32; j++) {
        if (kind == W_Q4) {
            float d = from_fp16(((const uint16_t *)(group + 256))[j / 2]), m = from_fp16(((const uint16_t *)(group + 288))[j / 2]);
            out[j] = (float)(group[pair / 2 * 32 + j] >> (pair % 2 * 4) & 15) * d + m;
        } else if (kind == W_Q8) {
            out[j] = (float)((const int8_t *)group)[pair * 32 + j] * from_fp16(((const uint16_t *)(group + 512))[j / 2]);
        } else if (kind == W_BF16) {
            out[j] = from_bf16(((const bf16 *)group)[pair * 32 + j]);
        } else {
            out[j] = ((const float *)group)[pair * 32 + j];
        }
    }
}

static void plain_product(const Matrix *w, int tile, const Input *x, float (*y)[LANES]) {
    int groups = w->in / GROUP;
    const uint8_t *at = w->data + (int64_t)tile * groups * group_bytes(w->kind);
    for (int r = 0; r < x->rows; r++)
        for (int lane = 0; lane < LANES; lane++) y[r][lane] = w->bias ? w->bias[tile * LANES + lane] : 0.0f;
    for (int g = 0; g < groups; g++, at += group_bytes(w->kind))
        for (int pair = 0; pair < PAIRS; pair++) {
            float weights[32];
            unpack_pair(w->kind, at, pair, weights);
            for (int r = 0; r < x->rows; r++) {
                int64_t i = (int64_t)r * x->in + g * GROUP + pair * 2;
                float a = w->kind == W_FP32 ? x->exact[i] : from_bf16(x->values[i]);
                float b = w->kind == W_FP32 ? x->exact[i + 1] : from_bf16(x->values[i + 1]);
                for (int lane = 0; lane < LANES; lane++) y[r][lane] += weights[2 * lane] * a + weights[2 * lane + 1] * b;
            }
        }
}

#if HAVE_AVX512_BF16
/* Two consecutive bf16 inputs of row r, in every lane. */
#define INPUT_PAIR(r, pair) ((__m512bh)_mm512_set1_epi32(((const int32_t *)(x->values + (int64_t)(r) * x->in))[pair]))

INLINE void group_q4(const uint8_t *at, const Input *x, int rows, int base, int g, int groups, __m512 *acc) {
    /* bf16 of 0..15, twice: the index's fifth bit, the next nibble's lowest, then doesn't matter */
    const __m512i table = _mm512_set_epi16(
        0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0,
        0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0);
    __m512 even[MAX_ROWS], odd[MAX_ROWS];
    for (int r = 0; r < rows; r++) even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(at + i * 32)));
        __m512bh low = (__m512bh)_mm512_permutexvar_epi16(bytes, table);
        __m512bh high = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table);
        for (int r = 0; r < rows; r++) {
            even[r] = _mm512_dpbf16_ps(even[r], low, INPUT_PAIR(r, base + 2 * i));
            odd[r] = _mm512_dpbf16_ps(odd[r], high, INPUT_PAIR(r, base + 2 * i + 1));
        }
    }
    __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at + 256)));
    __m512 m = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at + 288)));
    for (int r = 0; r < rows; r++) {
        acc[r] = _mm512_fmadd_ps(d, _mm512_add_ps(even[r], odd[r]), acc[r]);
        acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(x->sums[(int64_t)r * groups + g]), acc[r]);
    }
}

INLINE void group_q8(const uint8_t *at, const Input *x, int rows, int base, __m512 *acc) {
    __m512 even[MAX_ROWS], odd[MAX_ROWS];
    for (int r = 0; r < rows; r++) even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int i = 0; i < PAIRS; i++) {
        __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at + i * 32))));
        __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at + i * 32 + 16))));
        __m512bh weights = _mm512_cvtne2ps_pbh(b, a); /* exact: 8 bits of mantissa hold an int8 */
        for (int r = 0; r < rows; r++) {
            if (i % 2) odd[r] = _mm512_dpbf16_ps(odd[r], weights, INPUT_PAIR(r, base + i));
            else even[r] = _mm512_dpbf16_ps(even[r], weights, INPUT_PAIR(r, base + i));
        }
    }
    __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at + 512)));
    for (int r = 0; r < rows; r++) acc[r] = _mm512_fmadd_ps(d, _mm512_add_ps(even[r], odd[r]), acc[r]);
}

INLINE void group_bf16(const uint8_t *at, const Input *x, int rows, int base, __m512 *acc) {
    __m512 odd[MAX_ROWS];
    for (int r = 0; r < rows; r++) odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; i += 2) {
        __m512bh first = (__m512bh)_mm512_loadu_si512(at + i * 64), second = (__m512bh)_mm512_loadu_si512(at + i * 64 + 64);
        for (int r = 0; r < rows; r++) {
            acc[r] = _mm512_dpbf16_ps(acc[r], first, INPUT_PAIR(r, base + i));
            odd[r] = _mm512_dpbf16_ps(odd[r], second, INPUT_PAIR(r, base + i + 1));
        }
    }
    for (int r = 0; r < rows; r++) acc[r] = _mm512_add_ps(acc[r], odd[r]);
}

INLINE void vector_product(const Matrix *w, int tile, const Input *x, int rows, int kind, float (*y)[LANES]) {
    int groups = w->in / GROUP;
    const uint8_t *at = w->data + (int64_t)tile * groups * group_bytes(kind);
    __m512 acc[MAX_ROWS];
    for (int r = 0; r < rows; r++) acc[r] = w->bias ? _mm512_loadu_ps(w->bias + tile * LANES) : _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, at += group_bytes(kind)) {
        if (kind == W_Q4) group_q4(at, x, rows, g * PAIRS, g, groups, acc);
        else if (kind == W_Q8) group_q8(at, x, rows, g * PAIRS, acc);
        else group_bf16(at, x, rows, g * PAIRS, acc);
    }
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(y[r], acc[r]);
}

#define ROWS(KIND, R) case R: vector_product(w, tile, x, R, KIND, y); return;
#define VECTOR_PRODUCT(KIND) \
    switch (x->rows) { ROWS(KIND, 1) ROWS(KIND, 2) ROWS(KIND, 3) ROWS(KIND, 4) ROWS(KIND, 5) ROWS(KIND, 6) ROWS(KIND, 7) ROWS(KIND, 8) }
#endif

/* y[row] = the 16 outputs of one tile, bias included. */
static void product(const Matrix *w, int tile, const Input *x, float (*y)[LANES]) {
#if HAVE_AVX512_BF16
    if (w->kind == W_Q4) VECTOR_PRODUCT(W_Q4)
    if (w->kind == W_Q8) VECTOR_PRODUCT(W_Q8)
    if (w->kind == W_BF16) VECTOR_PRODUCT(W_BF16)
#endif
    plain_product(w, tile, x, y);
}
