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
constexpr int register_vectors_in_place(int rows) { return rows <= 3 ? 8 : rows <= 6 ? 4 : 2; }

RELAY_INLINE float reduce_max(vf x) { return _mm512_reduce_max_ps((__m512)x); }

RELAY_INLINE float reduce_add(vf x) { return _mm512_reduce_add_ps((__m512)x); }

// 2 ** x, 0 where it underflows: 2 ** floor(x) times 2 ** f, f = x - floor(x), by a minimax
// polynomial on [0, 1], relative error 1e-7. The instruction makes f 0 where x is infinite.
RELAY_INLINE vf exp2(vf x) {
  const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p = broadcast(1.877576897e-3f);
  p = p * f + 8.989340308e-3f;
  p = p * f + 5.582631707e-2f;
  p = p * f + 2.401536178e-1f;
  p = p * f + 6.931530730e-1f;
  p = p * f + 9.999999251e-1f;
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// p: [W]
RELAY_INLINE vf widen(const bf16* p) {
  const __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (vf)_mm512_slli_epi32(halves, 16);
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
