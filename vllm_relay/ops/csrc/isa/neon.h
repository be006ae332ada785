// NEON of ARMv8.0-A, which converts f16: vectors of 4 floats, 32 registers.
//
// -fno-schedule-insns: GCC moves the loads of all weights to the front of a step and spills sums.
//
// machines: aarch64 arm64
// flags: -march=armv8-a -fno-schedule-insns
// needs: true
// rank: 10
#pragma once
#include <arm_neon.h>

namespace relay {
constexpr int W = 4;
}

#include "../generic/vec.h"

namespace relay {
namespace {

// One register more than the sums and the columns holds the weight of a row.
constexpr bool WIDENS = false;
constexpr int REGISTER_ROWS = 8;
constexpr int register_vectors(int rows) {
  return rows <= 2 ? 8 : rows <= 4 ? 5 : rows <= 6 ? 4 : 3;
}
// Adjacent columns come, mostly, in a power of two.
constexpr int register_vectors_in_place(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }

RELAY_INLINE float reduce_max(vf x) { return vmaxvq_f32((float32x4_t)x); }

RELAY_INLINE float reduce_add(vf x) { return vaddvq_f32((float32x4_t)x); }

// p: [W]
RELAY_INLINE vf widen(const bf16* p) {
  return (vf)vshll_n_u16(vld1_u16((const uint16_t*)p), 16);
}

// p: [W]
RELAY_INLINE vf widen(const f16* p) {
  return (vf)vcvt_f32_f16((float16x4_t)vld1_u16((const uint16_t*)p));
}

// Rounds to nearest, ties to even. p: [W]
RELAY_INLINE void narrow(vf x, f16* p) {
  vst1_u16((uint16_t*)p, (uint16x4_t)vcvt_f16_f32((float32x4_t)x));
}

}  // namespace
}  // namespace relay
