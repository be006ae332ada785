// AVX-512 (F, BW, DQ, VL): vectors of 16 floats, 32 registers.
//
// machines: x86_64 AMD64
// flags: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
// needs: has("avx2") && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl") && has("fma") && has_f16c()
// rank: 20
#pragma once
#include <immintrin.h>

namespace relay {
constexpr int W = 16;
}

#include "../generic/vec.h"

namespace relay {
namespace {

constexpr bool WIDENS = true;
constexpr int REGISTER_ROWS = 8;
constexpr int register_vectors(int rows) {
  return rows <= 2 ? 8 : rows <= 4 ? 6 : rows <= 6 ? 4 : 3;
}
// Adjacent columns come in twos and, mostly, in a power of two.
constexpr int register_vectors_in_place(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }

RELAY_INLINE float reduce_max(vf x) { return _mm512_reduce_max_ps((__m512)x); }

RELAY_INLINE float reduce_add(vf x) { return _mm512_reduce_add_ps((__m512)x); }

// 2 ** x for x <= 0 (and for small x above), 0 where it underflows.
RELAY_INLINE vf exp2(vf x) {
  const vf y = (vf)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // the second, where NaN
  const vf n = (vf)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (vf)_mm512_scalef_ps((__m512)exp2_polynomial(y - n), (__m512)n);
}

// p: [W]
RELAY_INLINE vf widen(const f16* p) {
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

// p: [W]
RELAY_INLINE void narrow(vf x, f16* p) {
  const __m256i halves = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256((__m256i*)p, halves);
}

}  // namespace
}  // namespace relay
