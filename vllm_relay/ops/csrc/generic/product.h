// The matrix product that both halves of attention consist of, with a block of C kept in
// registers:  C[rows, columns] (+)= A[rows, steps] B[steps, columns].
//
// Scores: A = queries, B = keys, steps = channels, columns = tokens. Output: A = softmax weights,
// B = values, steps = tokens, columns = channels. The register block is the micro-kernel of
// Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
#pragma once
#include "../abi.h"
#include "dot.h"
#include "prefetch.h"

namespace relay {
namespace {

// B in packed panels of W columns.
template <class T>
struct PackedColumns {
  const T* at;            // [panels, steps / Dot::steps, W, Dot::steps]
  int64_t stride, panel;  // between vectors of a panel, between panels

  template <int N>
  RELAY_INLINE void read(int64_t step, typename Dot<T>::Vector (&x)[N]) const {
    for (int n = 0; n < N; ++n) x[n] = Dot<T>::load(at + step * stride + n * panel);
  }

  // The last vectors of an odd number of steps: what lies beside the last step may be anything.
  template <int N>
  RELAY_INLINE void read_last(int64_t step, typename Dot<T>::Vector (&x)[N]) const {
    for (int n = 0; n < N; ++n) x[n] = Dot<T>::first_step(Dot<T>::load(at + step * stride + n * panel));
  }

  template <int N>
  RELAY_INLINE void restore_order(vf (&)[N]) const {}
};

// B whose columns are adjacent in memory. Only with MASKED may fewer than the columns asked for,
// `columns`, exist.
template <class T, bool MASKED>
struct AdjacentColumns {
  const T* at;  // [steps, columns]
  int64_t stride, columns;

  template <int N>
  RELAY_INLINE void read(int64_t step, typename Dot<T>::Vector (&x)[N]) const {
    Dot<T>::template load_adjacent<MASKED>(at + Dot<T>::steps * step * stride, stride, columns, true, x);
  }

  template <int N>
  RELAY_INLINE void read_last(int64_t step, typename Dot<T>::Vector (&x)[N]) const {
    Dot<T>::template load_adjacent<MASKED>(at + Dot<T>::steps * step * stride, stride, columns, false, x);
  }

  template <int N>
  RELAY_INLINE void restore_order(vf (&x)[N]) const {
    Dot<T>::restore_order(x);
  }
};

// One register block: sink(row, vectors) gets a row of the product.
//   a: [R, steps / Dot::steps], rows `a_row` apart
template <class T, int R, int N, class B, class Sink>
RELAY_INLINE void register_block(const typename Dot<T>::Weight* a, int64_t a_row, const B& b,
                                 int64_t steps, Prefetcher& prefetcher, Sink sink) {
  typedef typename Dot<T>::Vector Vector;
  // As many lines are fetched as are read, over all blocks of rows that read them.
  const int64_t lines =
      R <= REGISTER_ROWS / 2 ? N : (N + prefetcher.sharers - 1) / prefetcher.sharers;
  vf total[R][N] = {};
  const int64_t whole = steps / Dot<T>::steps;
  // total[r, n] += a[r, step] x[n]
  const auto multiply = [&](int64_t step, const Vector(&x)[N]) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) total[r][n] = Dot<T>::add(total[r][n], a[r * a_row + step], x[n]);
    }
  };
  const Prefetcher::Region soon = prefetcher.take(whole * lines);
  const int64_t fetched = soon.lines / lines;
  int64_t step = 0;
  for (; step < fetched; ++step) {
    Vector x[N];
    b.read(step, x);
    for (int64_t i = 0; i < lines; ++i)
      __builtin_prefetch(soon.at + 64 * (step * lines + i), 0, 2);
    multiply(step, x);
  }
  for (; step < whole; ++step) {
    Vector x[N];
    b.read(step, x);
    multiply(step, x);
  }
  if (steps % Dot<T>::steps) {
    Vector x[N];
    b.read_last(step, x);
    multiply(step, x);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    b.restore_order(total[r]);
    sink(r, total[r]);
  }
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// All columns of C, register block by register block.
//   a:       [R, steps / Dot::steps], rows `a_row` apart
//   operand: B's layout; at: its first step and column, of one KV head
//   columns: that are asked for; there: that exist in memory, at least as many
//   sink(row, first column, vector): W columns of a row; beyond `columns` they are arbitrary
template <class T, int R, class Sink>
RELAY_INLINE void product(const typename Dot<T>::Weight* a, int64_t a_row,
                          const relay_operand& operand, const T* at, int64_t steps,
                          int64_t columns, int64_t there, Prefetcher& prefetcher, Sink sink) {
  const auto columns_from = [&](int64_t first, auto n) __attribute__((always_inline)) {
    return [&sink, first](int row, const auto& x) __attribute__((always_inline)) {
      for (int i = 0; i < decltype(n)::value; ++i) sink(row, first + i * W, x[i]);
    };
  };
  if (operand.kind == RELAY_PANELS) {
    constexpr int N = register_vectors(R);
    for (int64_t left = (columns + W - 1) / W, c = 0; left > 0;) {
      const PackedColumns<T> b = {at + c / W * operand.panel, operand.stride, operand.panel};
      // Two and two rather than three and one.
      if (left >= N && left != N + 1) {
        register_block<T, R, N>(a, a_row, b, steps, prefetcher, columns_from(c, Count<N>{}));
        left -= N, c += N * W;
      } else if (left >= 2) {
        register_block<T, R, 2>(a, a_row, b, steps, prefetcher, columns_from(c, Count<2>{}));
        left -= 2, c += 2 * W;
      } else {
        register_block<T, R, 1>(a, a_row, b, steps, prefetcher, columns_from(c, Count<1>{}));
        left -= 1, c += W;
      }
    }
    return;
  }
  constexpr int LEAST = Dot<T>::steps;  // vectors that the narrowest read gives
  constexpr int N = register_vectors_in_place(R) / LEAST * LEAST;
  for (int64_t c = 0; c < columns;) {
    if (c + N * W <= there && c + (N - LEAST) * W < columns) {
      const AdjacentColumns<T, false> b = {at + c, operand.stride, 0};
      register_block<T, R, N>(a, a_row, b, steps, prefetcher, columns_from(c, Count<N>{}));
      c += N * W;
    } else if (c + LEAST * W <= there) {
      const AdjacentColumns<T, false> b = {at + c, operand.stride, 0};
      register_block<T, R, LEAST>(a, a_row, b, steps, prefetcher, columns_from(c, Count<LEAST>{}));
      c += LEAST * W;
    } else {
      const AdjacentColumns<T, true> b = {at + c, operand.stride, there - c};
      register_block<T, R, LEAST>(a, a_row, b, steps, prefetcher, columns_from(c, Count<LEAST>{}));
      c += LEAST * W;
    }
  }
}

}  // namespace
}  // namespace relay
