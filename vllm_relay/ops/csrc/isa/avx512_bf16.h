// AVX-512 with BF16: bf16 is multiplied in pairs of steps (vdpbf16ps).
//
// machines: x86_64 AMD64
// flags: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mprefer-vector-width=512
// needs: has("avx2") && has("avx512bf16") && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl") && has("fma") && has_f16c()
// rank: 30
#pragma once
#include "avx512.h"

namespace relay {
namespace {

// A 16 x 16 matrix of 32-bit elements, transposed in place.
RELAY_INLINE void transpose(__m512i (&r)[16]) {
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

template <>
struct Dot<bf16> {
  static constexpr int steps = 2;
  typedef uint32_t Weight;  // two bf16
  typedef __m512i Vector;   // 16 columns of two bf16

  // total[c] += weight[0] x[c][0] + weight[1] x[c][1]
  static RELAY_INLINE vf add(vf total, Weight weight, Vector x) {
    return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(weight), (__m512bh)x);
  }

  static RELAY_INLINE Vector load(const bf16* p) { return _mm512_loadu_si512(p); }

  static RELAY_INLINE Vector first_step(Vector x) {
    return _mm512_and_si512(x, _mm512_set1_epi32(0xffff));
  }

  // Interleaving the halves of 128-bit lanes is cheapest; `restore_order` undoes the order of
  // columns that it leaves.
  template <bool MASKED, int N>
  static RELAY_INLINE void load_adjacent(const bf16* p, int64_t stride, int64_t columns, bool both,
                                         Vector (&x)[N]) {
    static_assert(N % 2 == 0, "columns come 32 at a time");
    for (int n = 0; n < N; n += 2) {
      const __m512i a = load_32<MASKED>(p + n * W, columns - n * W);
      const __m512i b =
          both ? load_32<MASKED>(p + stride + n * W, columns - n * W) : _mm512_setzero_si512();
      x[n] = _mm512_unpacklo_epi16(a, b);
      x[n + 1] = _mm512_unpackhi_epi16(a, b);
    }
  }

  template <int N>
  static RELAY_INLINE void restore_order(vf (&x)[N]) {
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int n = 0; n < N; n += 2) {
      const __m512 a = (__m512)x[n], b = (__m512)x[n + 1];
      x[n] = (vf)_mm512_permutex2var_ps(a, low, b);
      x[n + 1] = (vf)_mm512_permutex2var_ps(a, high, b);
    }
  }

  static RELAY_INLINE void store_weights(Weight* to, vf low, vf high) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    __builtin_memcpy(to, &both, sizeof both);
  }

  static RELAY_INLINE int64_t pack(bf16* panel, int64_t panel_stride, const bf16* from,
                                   int64_t stride, bool across, int64_t steps) {
    int64_t s = 0;
    if (across) {
      for (; s + 32 <= steps; s += 32) {
        __m512i rows[16];
        for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(from + i * stride + s);
        transpose(rows);
        for (int i = 0; i < 16; ++i)
          _mm512_storeu_si512(panel + (s / 2 + i) * panel_stride, rows[i]);
      }
      return s;
    }
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0);
    for (; s + 2 <= steps; s += 2) {
      const __m256i a = _mm256_loadu_si256((const __m256i*)(from + s * stride));
      const __m256i b = _mm256_loadu_si256((const __m256i*)(from + (s + 1) * stride));
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
      _mm512_storeu_si512(panel + s / 2 * panel_stride, _mm512_permutexvar_epi16(order, both));
    }
    return s;
  }

 private:
  // 32 columns; with MASKED the first `columns` of them, then zeros.
  template <bool MASKED>
  static RELAY_INLINE __m512i load_32(const bf16* p, int64_t columns) {
    if constexpr (MASKED) {
      if (columns < 32) {
        const __mmask32 mask = columns <= 0 ? 0 : (__mmask32)((1ull << columns) - 1);
        return _mm512_maskz_loadu_epi16(mask, p);
      }
    }
    return _mm512_loadu_si512(p);
  }
};

}  // namespace
}  // namespace relay
