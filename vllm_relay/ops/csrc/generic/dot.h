// How elements of type T enter a multiply-add: one step of the inner dimension at a time, as
// floats, unless isa/NAME.h specialises Dot<T>.
#pragma once
#include "vec.h"

namespace relay {
namespace {

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

}  // namespace
}  // namespace relay
