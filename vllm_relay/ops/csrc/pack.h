// Operands in packed panels: once for good, or a tile at a time where they lie across.
#pragma once
#include "product.h"

namespace relay {
namespace {

#if defined(__AVX512F__)
// A 16 x 16 matrix of 32-bit elements, turned.
RELAY_INLINE void turn(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  }
  // Now r[4 g + j] holds, in lane l, rows 4 g .. 4 g + 3 of column 4 l + j.
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
    t[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}
#endif

// `from` packed into `to`, W columns at a time; steps and columns beyond are zeros.
template <class T>
void pack(T* to, const relay_operand& panels, const T* from, const relay_operand& operand,
          int64_t steps, int64_t columns) {
  constexpr int EACH = Steps<T>::each;
  if (operand.kind == RELAY_PANELS) {  // of the same width: in another place
    for (int64_t c = 0; c < columns; c += W)
      for (int64_t s = 0; s < steps; s += EACH)
        __builtin_memcpy(to + c / W * panels.panel + s / EACH * panels.stride,
                         from + c / W * operand.panel + s / EACH * operand.stride,
                         W * EACH * sizeof(T));
    return;
  }
  const int64_t across = operand.kind == RELAY_ACROSS ? operand.stride : 1;
  const int64_t along = operand.kind == RELAY_ACROSS ? 1 : operand.stride;
  for (int64_t c = 0; c < columns; c += W) {
    T* panel = to + c / W * panels.panel;
    const int64_t wide = columns - c < W ? columns - c : W;
    int64_t s = 0;
#if defined(__AVX512BF16__)
    if constexpr (EACH == 2) {
      if (wide == W && operand.kind == RELAY_ACROSS) {
        for (; s + 32 <= steps; s += 32) {
          __m512i rows[16];
          for (int i = 0; i < 16; ++i)
            rows[i] = _mm512_loadu_si512(from + (c + i) * across + s);
          turn(rows);
          for (int i = 0; i < 16; ++i)
            _mm512_storeu_si512(panel + (s / 2 + i) * panels.stride, rows[i]);
        }
      } else if (wide == W) {
        const __m512i order = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
            4, 19, 3, 18, 2, 17, 1, 16, 0);
        for (; s + 2 <= steps; s += 2) {
          const __m256i a = _mm256_loadu_si256((const __m256i*)(from + s * along + c));
          const __m256i b = _mm256_loadu_si256((const __m256i*)(from + (s + 1) * along + c));
          const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
          _mm512_storeu_si512(panel + s / 2 * panels.stride,
                              _mm512_permutexvar_epi16(order, both));
        }
      }
    }
#endif
    for (; s < steps; s += EACH) {
      T* step = panel + s / EACH * panels.stride;
      for (int i = 0; i < W; ++i)
        for (int e = 0; e < EACH; ++e)
          step[i * EACH + e] =
              i < wide && s + e < steps ? from[(c + i) * across + (s + e) * along] : T{};
    }
  }
}

}  // namespace
}  // namespace relay
