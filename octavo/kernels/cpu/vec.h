/* Vectors of VL float lanes, written once for every instruction set.
 *
 * GCC's and clang's vector extensions carry most of it; intrinsics stand where a compiler would not find the one
 * instruction by itself (fma, max, blend, bf16 conversion and dot product). Multiplication and addition are contracted
 * only where vfma() is called (the build passes -ffp-contract=off), so that the same value comes out of every unrolled
 * variant of a loop: that is what makes a token's result independent of its neighbours.
 */
#ifndef OCTAVO_VEC_H
#define OCTAVO_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define VL 16
#define ISA_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define VL 8
#define ISA_AVX2 1
#else
#define VL 4
#if defined(__aarch64__)
#define ISA_NEON 1
#endif
#endif

#if defined(ISA_AVX512) && defined(__AVX512BF16__)
#define HAVE_DPBF16 1
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

/* Element types, as Python numbers them. */
enum { F32 = 0, BF16 = 1, F16 = 2 };

INLINE int64_t size_of(const int type) { return type == F32 ? 4 : 2; }

INLINE vf vset(float x) { return (vf){0} + x; }
INLINE vu vset_u(uint32_t x) { return (vu){0} + x; }
INLINE vf vload(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE vu vload_u(const uint32_t *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE void vstore(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf vfma(vf a, vf b, vf c) { /* a * b + c */
#if defined(ISA_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(ISA_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(ISA_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* mask lanes are all ones or all zeros */
INLINE vf vselect(vi mask, vf a, vf b) {
#if defined(ISA_AVX512)
    return (vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)b, (__m512)a);
#elif defined(ISA_AVX2)
    return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
#endif
}

INLINE vf vmax(vf a, vf b) { /* b where a is NaN */
#if defined(ISA_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(ISA_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vselect(a > b, a, b);
#endif
}

/* Keeps NaN, so that a broken input shows. */
INLINE vf vclamp(vf x, float low, float high) {
    x = vselect(x < vset(low), vset(low), x);
    return vselect(x > vset(high), vset(high), x);
}

/* Lanes are combined in one fixed tree: upper half with lower half, and so on. */
#if defined(ISA_AVX512) || defined(ISA_AVX2)
INLINE __m128 vfold(vf v, const int max) {
#if defined(ISA_AVX512)
    __m256 a = _mm512_castps512_ps256((__m512)v), b = _mm512_extractf32x8_ps((__m512)v, 1);
    a = max ? _mm256_max_ps(a, b) : _mm256_add_ps(a, b);
#else
    __m256 a = (__m256)v;
#endif
    __m128 x = _mm256_castps256_ps128(a), y = _mm256_extractf128_ps(a, 1);
    x = max ? _mm_max_ps(x, y) : _mm_add_ps(x, y);
    y = _mm_movehl_ps(x, x);
    x = max ? _mm_max_ps(x, y) : _mm_add_ps(x, y);
    y = _mm_shuffle_ps(x, x, 1);
    return max ? _mm_max_ss(x, y) : _mm_add_ss(x, y);
}
INLINE float vsum(vf v) { return _mm_cvtss_f32(vfold(v, 0)); }
INLINE float vhmax(vf v) { return _mm_cvtss_f32(vfold(v, 1)); }
#else
INLINE float vsum(vf v) {
    UNROLL for (int n = VL / 2; n; n /= 2)
        UNROLL for (int i = 0; i < n; i++) v[i] += v[i + n];
    return v[0];
}
INLINE float vhmax(vf v) {
    UNROLL for (int n = VL / 2; n; n /= 2)
        UNROLL for (int i = 0; i < n; i++) v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
    return v[0];
}
#endif

/* 2^x, about 1 ulp; 0 where the result would be too small, huge or infinite where too large; NaN stays NaN. exp2(0) is exactly 1.
 * x = n + r with r in [-0.5, 0.5]; 2^r by its Taylor polynomial of degree 7, the last term spread over the lower ones
 * (error 2e-9), in few dependent steps. */
INLINE vf vexp2(vf x) {
#if defined(ISA_AVX512)
    __m512 y = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x); /* a NaN in the second operand stays */
    y = _mm512_min_ps(_mm512_set1_ps(200.0f), y);
    const __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf n = (vf)whole, r = (vf)y - n;
#else
    vi tiny = x < vset(-126.0f);
    x = vclamp(x, -126.0f, 127.0f);
    vf shifted = x + vset(12582912.0f); /* 1.5 * 2^23: the integer nearest to x stands in the low bits */
    vf n = shifted - vset(12582912.0f);
    vf r = x - n;
#endif
    vf r2 = r * r;
    vf low = vfma(vset(0.693147207f), r, vset(1.0f)), middle = vfma(vset(5.55032746e-2f), r, vset(0.240226507f));
    vf high = vfma(vset(1.54035304e-4f), r2, vfma(vset(1.34002889e-3f), r, vset(9.61812911e-3f)));
    vf p = vfma(vfma(high, r2, middle), r2, low);
#if defined(ISA_AVX512)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vi bits = ((vi)shifted - (vi)vset(12582912.0f) + 127) << 23;
    return vselect(tiny, vset(0.0f), p * (vf)bits);
#endif
}

#define LOG2E 1.44269504088896341f

INLINE vf vexp(vf x) { return vexp2(x * vset(LOG2E)); }

/* tanh(x) = 1 - 2 / (e^2x + 1); absolute error about 1e-7. */
INLINE vf vtanh(vf x) { return vset(1.0f) - vset(2.0f) / (vexp2(x * vset(2.0f * LOG2E)) + vset(1.0f)); }

/* ---- conversions; a half float stands in the low 16 bits of a lane ---- */

INLINE vf from_bf16(vu h) { return (vf)(h << 16); }

INLINE vu to_bf16(vf x) { /* round to nearest even; NaN stays NaN */
    vu u = (vu)x;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vi nan = x != x;
    return (rounded & ~(vu)nan) | (((u >> 16) | 0x40) & (vu)nan);
}

#if defined(ISA_AVX512)
INLINE __m256i narrow_bf16(vf x) {
#if defined(HAVE_DPBF16)
    return (__m256i)_mm512_cvtneps_pbh((__m512)x); /* takes denormals (below 1.2e-38) for zero */
#else
    return _mm512_cvtepi32_epi16((__m512i)to_bf16(x));
#endif
}
#endif

INLINE vf from_f16(vu h) {
#if defined(ISA_AVX512)
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h));
#else
    vu magnitude = (h & 0x7fff) << 13;
    vu special = (vu)((vi)(h & 0x7c00) == 0x7c00) & 0x7f800000;           /* infinity or NaN */
    vf x = (vf)magnitude * vset(0x1p112f);                                  /* rebias the exponent; exact, denormals too */
    return (vf)((vu)x | special | ((h & 0x8000) << 16));
#endif
}

INLINE vu to_f16(vf x) { /* round to nearest even; NaN stays NaN */
#if defined(ISA_AVX512)
    return (vu)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    vu u = (vu)x, sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    vu normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;           /* 2^-14 .. 65504, rounding up to infinity */
    vu denormal = (vu)((vf)a + vset(0.5f)) - (vu)vset(0.5f);                /* the adder rounds to multiples of 2^-24 */
    vi small = (vi)a < 0x38800000, large = (vi)a >= 0x47800000, nan = (vi)a > 0x7f800000;
    vu r = (denormal & (vu)small) | (normal & ~(vu)small);
    r = (r & ~(vu)large) | (0x7c00 & (vu)large);
    return sign | r | (0x200 & (vu)nan);
#endif
}

/* VL contiguous elements of a type that is a constant where this is inlined; i counts elements. */
INLINE vf load_as(const int type, const void *p, int64_t i) {
    if (type == F32) return vload((const float *)p + i);
    const uint16_t *h = (const uint16_t *)p + i;
#if defined(ISA_AVX512)
    const __m256i raw = _mm256_loadu_si256((const __m256i *)h);
    return type == F16 ? (vf)_mm512_cvtph_ps(raw) : from_bf16((vu)_mm512_cvtepu16_epi32(raw));
#elif defined(ISA_AVX2)
    const vu wide = (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)h));
#else
    vh raw;
    memcpy(&raw, h, sizeof raw);
    const vu wide = __builtin_convertvector(raw, vu);
#endif
#if !defined(ISA_AVX512)
    return type == BF16 ? from_bf16(wide) : from_f16(wide);
#endif
}

INLINE void store_as(const int type, void *p, int64_t i, vf v) {
    if (type == F32) { vstore((float *)p + i, v); return; }
    uint16_t *h = (uint16_t *)p + i;
#if defined(ISA_AVX512)
    __m256i raw = type == F16 ? _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) : narrow_bf16(v);
    _mm256_storeu_si256((__m256i *)h, raw);
#else
    vh raw = __builtin_convertvector(type == BF16 ? to_bf16(v) : to_f16(v), vh);
    memcpy(h, &raw, sizeof raw);
#endif
}

/* The same for the last n < VL elements; lanes past them read as zero. */
INLINE vf load_tail(const int type, const void *p, int64_t i, int64_t n) {
    char raw[VL * 4] = {0};
    memcpy(raw, (const char *)p + i * size_of(type), (size_t)(n * size_of(type)));
    return load_as(type, raw, 0);
}

INLINE void store_tail(const int type, void *p, int64_t i, int64_t n, vf v) {
    char raw[VL * 4];
    store_as(type, raw, 0, v);
    memcpy((char *)p + i * size_of(type), raw, (size_t)(n * size_of(type)));
}

INLINE vf load_n(const int type, const void *p, int64_t i, int64_t n) {
    return n >= VL ? load_as(type, p, i) : load_tail(type, p, i, n);
}

INLINE void store_n(const int type, void *p, int64_t i, int64_t n, vf v) {
    if (n >= VL) store_as(type, p, i, v);
    else store_tail(type, p, i, n, v);
}

/* The value that storing and loading again would give. */
INLINE vf round_as(const int type, vf v) {
    if (type == F32) return v;
#if defined(ISA_AVX512)
    if (type == BF16) return from_bf16((vu)_mm512_cvtepu16_epi32(narrow_bf16(v)));
#endif
    return type == BF16 ? from_bf16(to_bf16(v)) : from_f16(to_f16(v));
}

#endif
