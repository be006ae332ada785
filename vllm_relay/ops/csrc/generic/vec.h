// Vectors of W floats in registers, conversions, and how elements enter a multiply-add.
//
// isa/NAME.h defines W, REGISTER_ROWS, register_vectors and register_vectors_in_place (product.h),
// WIDENS (attend.h), includes this file and adds what it has instructions for:
//   widen(const f16*), narrow(vf, f16*)
//   reduce_max, reduce_add, exp2 of vf, widen and narrow of bf16, in place of the templates here
//   Dot<T> for element types that are not multiplied as floats
//   MatrixProduct<T> (product.h) for those that are not multiplied vector by vector
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

template <class Vector>
RELAY_INLINE float reduce_max(Vector x) {
  float most = x[0];
  for (int i = 1; i < W; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

template <class Vector>
RELAY_INLINE float reduce_add(Vector x) {
  float total = x[0];
  for (int i = 1; i < W; ++i) total += x[i];
  return total;
}

// 2 ** x for x <= 0 (and for small x above), 0 below the smallest normal number.
template <class Vector>
RELAY_INLINE Vector exp2(Vector x) {
  const vf y = max_keeping_nan(x, broadcast(-126.0f));
  // Adding 1.5 * 2 ** 23 rounds to an integer and leaves it in the lowest bits.
  const vf shifted = y + 12582912.0f;
  const vf p = exp2_polynomial(y - (shifted - 12582912.0f));
  const vf result = (vf)((vi)p + ((vi)shifted << 23));
  return x < -126.0f ? vf{} : x == x ? result : x;  // a NaN's bits are arbitrary: return x
}

// p: [W]
RELAY_INLINE vf widen(const float* p) { return load(p); }

// p: [W]
template <class = void>
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
template <class = void>
RELAY_INLINE void narrow(vf x, bf16* p) {
  const vi bits = (vi)x;
  const vi rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const vi quiet = bits | 0x400000;  // a NaN must not be rounded to infinity
  const vi result = (x == x ? rounded : quiet) >> 16;
  const vh halves = __builtin_convertvector(result, vh);
  __builtin_memcpy(p, &halves, sizeof halves);
}

// Elements of type T in products: one step of the inner dimension at a time, as floats.
template <class T>
struct Dot {
  static constexpr int steps = 1;  // that one instruction multiplies and adds
  typedef float Weight;            // `steps` elements of one row of A
  typedef vf Vector;               // W columns of `steps` rows of B

  // total[c] += weight * x[c]
  static RELAY_INLINE vf add(vf total, Weight weight, Vector x) { return weight * x + total; }

  // p: [W, steps], one vector of a packed panel
  static RELAY_INLINE Vector load(const T* p) { return widen(p); }

  // x with all but the first of its steps zeroed.
  static RELAY_INLINE Vector first_step(Vector x) { return x; }

  // N vectors of adjacent columns, zeros from `columns` on where MASKED; !both: the first step
  // alone, the others zero.
  //   p: [steps, N * W], rows `stride` apart
  template <bool MASKED, int N>
  static RELAY_INLINE void load_adjacent(const T* p, int64_t, int64_t columns, bool,
                                         Vector (&x)[N]) {
    for (int n = 0; n < N; ++n) {
      if constexpr (MASKED)
        x[n] = columns - n * W < W ? widen_some(p + n * W, columns - n * W) : widen(p + n * W);
      else
        x[n] = widen(p + n * W);
    }
  }

  // Sums of vectors from load_adjacent, put into the order of the columns.
  template <int N>
  static RELAY_INLINE void restore_order(vf (&)[N]) {}

  // 2 W softmax weights, rounded to what `add` reads. to: [2 W / steps]
  static RELAY_INLINE void store_weights(Weight* to, vf low, vf high) {
    store(to, low);
    store(to + W, high);
  }

  // Packs W columns, and returns how many steps: the caller packs the rest element by element.
  //   panel: [steps / Dot::steps, W, Dot::steps], vectors `panel_stride` apart
  //   from:  [W, steps] with columns `stride` apart if across, else [steps, W] with steps `stride`
  //          apart
  static RELAY_INLINE int64_t pack(T*, int64_t, const T*, int64_t, bool, int64_t) { return 0; }
};

// The steps of one vector of a packed panel, as floats. p: [W, Dot::steps]
template <class T>
RELAY_INLINE void widen_steps(const T* p, vf (&x)[Dot<T>::steps]) {
  if constexpr (Dot<T>::steps == 1) {
    x[0] = widen(p);
  } else {
    static_assert(Dot<T>::steps == 2 && sizeof(T) == sizeof(bf16), "pairs of bf16");
    vi pairs;
    __builtin_memcpy(&pairs, p, sizeof pairs);
    x[0] = (vf)(pairs << 16);
    x[1] = (vf)(pairs & (int)0xffff0000);
  }
}

}  // namespace
}  // namespace relay
