// Vectors of W floats in registers, and conversions that every instruction set computes alike.
//
// isa/NAME.h defines W, includes this file and adds what it has instructions for:
//   reduce_max, reduce_add, exp2      of a vector; `any_isa` below has them in plain C++
//   widen(const f16*), narrow(vf, f16*)
//   REGISTER_ROWS, register_vectors, register_vectors_in_place     see product.h
//   Dot<T> for element types that are not multiplied as floats     see dot.h
#pragma once
#include <stdint.h>

#define RELAY_INLINE inline __attribute__((always_inline))

namespace relay {
namespace {

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

RELAY_INLINE vf broadcast(float x) { return x - vf{}; }

// p: [W]
RELAY_INLINE vf load(const float* p) {
  vf x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

// p: [W]
RELAY_INLINE void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }

// max(x, low), where a NaN in x stays and one in low does not.
RELAY_INLINE vf max_keeping_nan(vf x, vf low) { return x < low ? low : x; }

// 2 ** f for f in [-1/2, 1/2]: a minimax polynomial, relative error 1e-7.
RELAY_INLINE vf exp2_polynomial(vf f) {
  vf p = broadcast(1.327646062e-3f);
  p = p * f + 9.675541244e-3f;
  p = p * f + 5.550713309e-2f;
  p = p * f + 2.402211973e-1f;
  p = p * f + 6.931469670e-1f;
  return p * f + 1.000000072f;
}

namespace any_isa {

RELAY_INLINE float reduce_max(vf x) {
  float most = x[0];
  for (int i = 1; i < W; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

RELAY_INLINE float reduce_add(vf x) {
  float total = x[0];
  for (int i = 1; i < W; ++i) total += x[i];
  return total;
}

// 2 ** x for x <= 0 (and for small x above), 0 below the smallest normal number.
RELAY_INLINE vf exp2(vf x) {
  const vf y = max_keeping_nan(x, broadcast(-126.0f));
  // Adding 1.5 * 2 ** 23 rounds to an integer and leaves it in the lowest bits.
  const vf shifted = y + 12582912.0f;
  const vf p = exp2_polynomial(y - (shifted - 12582912.0f));
  const vf result = (vf)((vi)p + ((vi)shifted << 23));
  return x < -126.0f ? vf{} : x == x ? result : x;  // a NaN's bits are arbitrary: return x
}

}  // namespace any_isa

// p: [W]
RELAY_INLINE vf widen(const float* p) { return load(p); }

// p: [W]
RELAY_INLINE vf widen(const bf16* p) {
  vh x;
  __builtin_memcpy(&x, p, sizeof x);
  return (vf)(__builtin_convertvector(x, vi) << 16);
}

// The first `count` < W elements of p, then zeros: nothing beyond them is read. p: [count]
template <class T>
RELAY_INLINE vf widen_some(const T* p, int64_t count) {
  T some[W] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = p[i];
  return widen(some);
}

// p: [W]
RELAY_INLINE void narrow(vf x, float* p) { store(p, x); }

// Rounds to nearest, ties to even. p: [W]
RELAY_INLINE void narrow(vf x, bf16* p) {
  const vi bits = (vi)x;
  const vi rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const vi quiet = bits | 0x400000;  // a NaN must not be rounded to infinity
  const vi result = (x == x ? rounded : quiet) >> 16;
  const vh halves = __builtin_convertvector(result, vh);
  __builtin_memcpy(p, &halves, sizeof halves);
}

}  // namespace
}  // namespace relay
