// Vectors of W floats, for one instruction set: the compiler's flags say which.
#pragma once
#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define RELAY_INLINE inline __attribute__((always_inline))

namespace relay {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
// Rows and vectors of columns of a product that are kept in registers at once.
constexpr int ROWS = 8;
constexpr int columns_for(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 6 : rows <= 6 ? 4 : 3; }
// The same where columns come in twos and, mostly, in a power of two.
constexpr int adjacent_columns_for(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int ROWS = 4;
constexpr int columns_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 3; }
constexpr int adjacent_columns_for(int rows) { return columns_for(rows); }
#else
constexpr int W = 4;
constexpr int ROWS = 4;
constexpr int columns_for(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
constexpr int adjacent_columns_for(int rows) { return columns_for(rows); }
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

RELAY_INLINE vf all(float x) { return x - vf{}; }

RELAY_INLINE vf load(const float* p) {
  vf x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

RELAY_INLINE void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }

// NaN in x stays, NaN in low does not.
RELAY_INLINE vf at_least(vf x, vf low) { return x < low ? low : x; }

RELAY_INLINE float largest(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int i = 1; i < W; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

RELAY_INLINE float sum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = x[0];
  for (int i = 1; i < W; ++i) total += x[i];
  return total;
#endif
}

// 2 ** x for x <= 0 (and for small x above), 0 below the smallest normal number. Minimax polynomial
// of 2 ** f on [-1/2, 1/2], relative error 1e-7.
RELAY_INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
  const vf y = (vf)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // the second, where NaN
  const vf n = (vf)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf y = at_least(x, all(-126.0f));
  // Adding 1.5 * 2 ** 23 rounds to an integer and leaves it in the lowest bits.
  const vf shifted = y + 12582912.0f;
  const vf n = shifted - 12582912.0f;
#endif
  const vf f = y - n;
  vf p = all(1.327646062e-3f);
  p = p * f + 9.675541244e-3f;
  p = p * f + 5.550713309e-2f;
  p = p * f + 2.402211973e-1f;
  p = p * f + 6.931469670e-1f;
  p = p * f + 1.000000072f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const vf result = (vf)((vi)p + ((vi)shifted << 23));
  return x < -126.0f ? vf{} : x == x ? result : x;  // the bits of a NaN may be any
#endif
}

RELAY_INLINE float exp2(float x) { return exp2(all(x))[0]; }

RELAY_INLINE vf widen(const float* p) { return load(p); }

RELAY_INLINE vf widen(const bf16* p) {
  vh x;
  __builtin_memcpy(&x, p, sizeof x);
  return (vf)(__builtin_convertvector(x, vi) << 16);
}

RELAY_INLINE vf widen(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vh x;
  __builtin_memcpy(&x, p, sizeof x);
  const vi bits = __builtin_convertvector(x, vi);
  const vi sign = (bits & 0x8000) << 16;
  // Exponent and mantissa in place, then the bias; the multiplication also gets subnormals right.
  const vf magnitude = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
  const vi special = (vi)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
  return (vf)((vi)magnitude | special | sign);
#endif
}

// The first `count` (fewer than W) of them, then zeros: nothing beyond is read.
template <class T>
RELAY_INLINE vf widen_some(const T* p, int64_t count) {
  T some[W] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = p[i];
  return widen(some);
}

RELAY_INLINE void narrow(vf x, float* p) { store(p, x); }

RELAY_INLINE void narrow(vf x, bf16* p) {
  const vi bits = (vi)x;
  const vi rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const vi quiet = bits | 0x400000;  // a NaN must not be rounded to infinity
  const vi result = (x == x ? rounded : quiet) >> 16;
  const vh halves = __builtin_convertvector(result, vh);
  __builtin_memcpy(p, &halves, sizeof halves);
}

RELAY_INLINE void narrow(vf x, f16* p) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256((__m256i*)p, halves);
#elif defined(__F16C__)
  const __m128i halves = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128((__m128i*)p, halves);
#else
  const vi bits = (vi)x;
  const vi sign = (bits >> 16) & 0x8000;
  const vf size = (vf)(bits & 0x7fffffff);
  // Below 2 ** -14 a half has fixed steps of 2 ** -24: an addition rounds to them.
  const vi small = (vi)(size + 0.5f) - (vi)all(0.5f);
  const vi scaled = (vi)size - (112 << 23);
  const vi normal = (scaled + 0xfff + ((scaled >> 13) & 1)) >> 13;
  vi result = size < 0x1p-14f ? small : normal;
  result = size >= 65520.0f ? vi{} + 0x7c00 : result;
  result = (x == x ? result : vi{} + 0x7e00) | sign;
  const vh halves = __builtin_convertvector(result, vh);
  __builtin_memcpy(p, &halves, sizeof halves);
#endif
}

}  // namespace
}  // namespace relay
