// NEON with BF16: bf16 is multiplied in pairs of steps (BFDOT).
//
// BFDOT rounds the sum of two products, and then the total, to odd; it flushes subnormals and
// ignores FPCR's rounding mode (but for FPCR.EBF, which Linux leaves off).
// No BFMMLA: its sums are 2 rows x 2 columns, those of register_block 1 row x W columns.
//
// machines: aarch64 arm64
// flags: -march=armv8.2-a+bf16 -fno-schedule-insns
// needs: has_bf16()
// rank: 20
#pragma once
#include "neon.h"

namespace relay {
namespace {

// Rounds to nearest, ties to even. p: [W]
RELAY_INLINE void narrow(vf x, bf16* p) {
  vst1_bf16((bfloat16_t*)p, vcvt_bf16_f32((float32x4_t)x));
}

template <>
struct Dot<bf16> {
  static constexpr int steps = 2;
  typedef uint32_t Weight;    // two bf16
  typedef uint16x8_t Vector;  // 4 columns of two bf16

  // total[c] += weight[0] x[c][0] + weight[1] x[c][1]
  static RELAY_INLINE vf add(vf total, Weight weight, Vector x) {
    const bfloat16x4_t pair = vcreate_bf16(weight);
    return (vf)vbfdotq_lane_f32((float32x4_t)total, (bfloat16x8_t)x, pair, 0);
  }

  static RELAY_INLINE Vector load(const bf16* p) { return vld1q_u16((const uint16_t*)p); }

  static RELAY_INLINE Vector first_step(Vector x) {
    return (Vector)vandq_u32((uint32x4_t)x, vdupq_n_u32(0xffff));
  }

  template <bool MASKED, int N>
  static RELAY_INLINE void load_adjacent(const bf16* p, int64_t stride, int64_t columns, bool both,
                                         Vector (&x)[N]) {
    static_assert(N % 2 == 0, "columns come 8 at a time");
    for (int n = 0; n < N; n += 2) {
      const Vector a = load_8<MASKED>(p + n * W, columns - n * W);
      const Vector b = both ? load_8<MASKED>(p + stride + n * W, columns - n * W) : Vector{};
      x[n] = vzip1q_u16(a, b);
      x[n + 1] = vzip2q_u16(a, b);
    }
  }

  template <int N>
  static RELAY_INLINE void restore_order(vf (&)[N]) {}

  static RELAY_INLINE void store_weights(Weight* to, vf low, vf high) {
    const bfloat16x8_t first = vcvtq_low_bf16_f32((float32x4_t)low);
    const bfloat16x8_t both = vcvtq_high_bf16_f32(first, (float32x4_t)high);
    __builtin_memcpy(to, &both, sizeof both);
  }

  static RELAY_INLINE int64_t pack(bf16* panel, int64_t panel_stride, const bf16* from,
                                   int64_t stride, bool across, int64_t steps) {
    uint16_t* to = (uint16_t*)panel;
    int64_t s = 0;
    if (across) {
      // A 4 x 4 matrix of pairs, transposed.
      for (; s + 8 <= steps; s += 8) {
        uint32x4_t r[4];
        for (int i = 0; i < 4; ++i) r[i] = (uint32x4_t)load(from + i * stride + s);
        const uint64x2_t a = (uint64x2_t)vtrn1q_u32(r[0], r[1]);
        const uint64x2_t b = (uint64x2_t)vtrn2q_u32(r[0], r[1]);
        const uint64x2_t c = (uint64x2_t)vtrn1q_u32(r[2], r[3]);
        const uint64x2_t d = (uint64x2_t)vtrn2q_u32(r[2], r[3]);
        uint16_t* at = to + s / 2 * panel_stride;
        vst1q_u16(at, (Vector)vzip1q_u64(a, c));
        vst1q_u16(at + panel_stride, (Vector)vzip1q_u64(b, d));
        vst1q_u16(at + 2 * panel_stride, (Vector)vzip2q_u64(a, c));
        vst1q_u16(at + 3 * panel_stride, (Vector)vzip2q_u64(b, d));
      }
      return s;
    }
    for (; s + 2 <= steps; s += 2) {
      const uint16x4_t a = vld1_u16((const uint16_t*)(from + s * stride));
      const uint16x4_t b = vld1_u16((const uint16_t*)(from + (s + 1) * stride));
      vst1q_u16(to + s / 2 * panel_stride, vcombine_u16(vzip1_u16(a, b), vzip2_u16(a, b)));
    }
    return s;
  }

 private:
  // 8 columns; with MASKED the first `columns` of them, then zeros.
  template <bool MASKED>
  static RELAY_INLINE Vector load_8(const bf16* p, int64_t columns) {
    if constexpr (MASKED) {
      if (columns < 8) {
        bf16 some[8] = {};
        for (int64_t i = 0; i < columns; ++i) some[i] = p[i];
        return load(some);
      }
    }
    return load(p);
  }
};

}  // namespace
}  // namespace relay
