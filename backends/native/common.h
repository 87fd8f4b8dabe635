/* Element types and conversions shared by the kernels. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define HAVE_AVX512_BF16 1
#else
#define HAVE_AVX512_BF16 0
#endif

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
enum { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3 };

INLINE float from_bf16(bf16 x) {
    union { uint32_t u; float f; } v = {(uint32_t)x << 16};
    return v.f;
}

INLINE float from_fp16(uint16_t x) {
    _Float16 h;
    memcpy(&h, &x, sizeof h);
    return (float)h;
}

/* Round to nearest even, as torch does. The inputs here are never NaN unless the model's own values are. */
INLINE bf16 to_bf16(float x) {
    union { float f; uint32_t u; } v = {x};
    uint32_t rounded = (v.u + 0x7fff + ((v.u >> 16) & 1)) >> 16;
    return (bf16)((v.u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* exp for any x below 88, relative error under 3e-7; a polynomial, so that compilers vectorise it. */
INLINE float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float f = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts keeps f exact for large n */
    float p = 1.0f / 5040;
    p = p * f + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    union { int32_t i; float f; } s = {((int32_t)n + 127) << 23};
    return p * s.f;
}

/* An int8 row is n values and, right behind them, the fp32 scale they share. Only the cache has such rows. */
#define SCALE_BYTES ((int)sizeof(float))

INLINE int64_t element_bytes(int dtype) { return dtype == FP32 ? 4 : dtype == INT8 ? 1 : 2; }

/* Elements from one head's row of a cache slot to the next. */
INLINE int row_width(int dtype, int n) { return dtype == INT8 ? n + SCALE_BYTES : n; }

INLINE float row_scale(const void *base, int64_t at, int dtype, int n) {
    float scale = 1.0f;
    if (dtype == INT8) memcpy(&scale, (const int8_t *)base + at + n, SCALE_BYTES);
    return scale;
}

/* Of an int8 row: the values without their scale, which is cheaper to apply to a sum over them. */
INLINE void load_row(const void *base, int64_t at, int dtype, int n, float *out) {
    if (dtype == BF16) {
        const bf16 *p = (const bf16 *)base + at;
        for (int i = 0; i < n; i++) out[i] = from_bf16(p[i]);
    } else if (dtype == FP16) {
        const _Float16 *p = (const _Float16 *)base + at;
        for (int i = 0; i < n; i++) out[i] = (float)p[i];
    } else if (dtype == INT8) {
        const int8_t *p = (const int8_t *)base + at;
        for (int i = 0; i < n; i++) out[i] = (float)p[i];
    } else {
        memcpy(out, (const float *)base + at, (size_t)n * sizeof(float));
    }
}

/* The largest magnitude becomes 127. Magnitudes are compared as integers, so that a NaN is the largest of all and
 * stays one, in the scale. */
INLINE void store_int8_row(int8_t *to, int n, const float *from) {
    union { uint32_t u; float f; } most = {0};
    for (int i = 0; i < n; i++) {
        union { float f; uint32_t u; } x = {from[i]};
        uint32_t magnitude = x.u & 0x7fffffff;
        most.u = magnitude > most.u ? magnitude : most.u;
    }
    float scale = most.f / 127.0f, by = most.f > 1e-30f && most.f < INFINITY ? 127.0f / most.f : 0.0f;
    for (int i = 0; i < n; i++) to[i] = (int8_t)(int)rintf(by > 0.0f ? from[i] * by : 0.0f);
    memcpy(to + n, &scale, SCALE_BYTES);
}

INLINE void store_row(void *base, int64_t at, int dtype, int n, const float *from) {
    if (dtype == BF16) {
        bf16 *p = (bf16 *)base + at;
        for (int i = 0; i < n; i++) p[i] = to_bf16(from[i]);
    } else if (dtype == FP16) {
        _Float16 *p = (_Float16 *)base + at;
        for (int i = 0; i < n; i++) p[i] = (_Float16)from[i];
    } else if (dtype == INT8) {
        store_int8_row((int8_t *)base + at, n, from);
    } else {
        memcpy((float *)base + at, from, (size_t)n * sizeof(float));
    }
}
