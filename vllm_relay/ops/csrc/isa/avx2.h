// AVX2 with FMA and F16C: vectors of 8 floats, 16 registers.
//
// machines: x86_64 AMD64
// flags: -mavx2 -mfma -mf16c
// needs: has("avx2") && has("fma") && has_f16c()
// rank: 10
#pragma once
#include <immintrin.h>

namespace relay {
constexpr int W = 8;
}

#include "../generic/vec.h"

namespace relay {
namespace {

constexpr bool WIDENS = true;
constexpr int REGISTER_ROWS = 4;
constexpr int register_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 3; }
constexpr int register_vectors_in_place(int rows) { return register_vectors(rows); }

// p: [W]
RELAY_INLINE vf widen(const bf16* p) {
  const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return (vf)_mm256_slli_epi32(halves, 16);
}

// p: [W]
RELAY_INLINE vf widen(const f16* p) {
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}

// p: [W]
RELAY_INLINE void narrow(vf x, f16* p) {
  const __m128i halves = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128((__m128i*)p, halves);
}

}  // namespace
}  // namespace relay
