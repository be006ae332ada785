// The matrix product that both halves of attention consist of, with a block of C kept in
// registers:  C[rows, columns] (+)= A[rows, steps] B[steps, columns].
//
// Scores: A = queries, B = keys, steps = channels, columns = tokens. Output: A = softmax weights,
// B = values, steps = tokens, columns = channels. The register block is the micro-kernel of
// Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
#pragma once
#include <unistd.h>

#include "../work.h"
#include "vec.h"

namespace relay {
namespace {

// Whether what is fetched ahead goes to the first-level cache: measured on Zen 5, whose has 48 KB.
// One of 32 KB would lose it, and with it what is needed now.
inline bool fetches_into_first_level() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const bool large = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
  return large;
#else
  return false;
#endif
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// A line of 64 bytes into the cache of this level and those behind it.
template <int LEVEL>
RELAY_INLINE void fetch(const char* line) {
  __builtin_prefetch(line, 0, LEVEL == 1 ? 3 : 2);
}

// Memory that will be read soon, fetched into the cache line by line beside a product.
struct Prefetcher {
  struct Region {
    const char* at;
    int64_t lines;  // of 64 bytes
  };
  static constexpr int MAX_REGIONS = 32;
  Region regions[MAX_REGIONS];
  int count = 0, next = 0;
  int64_t sharers = 1;  // register blocks of rows over which the lines are spread
  const bool near = fetches_into_first_level();

  void clear(int64_t row_blocks) {
    count = next = 0;
    sharers = row_blocks;
  }

  void add(const void* at, int64_t bytes) {
    if (count < MAX_REGIONS) regions[count++] = {(const char*)at, (bytes + 63) / 64};
  }

  // Removes and returns up to `lines` lines of one region.
  RELAY_INLINE Region take(int64_t lines) {
    if (next == count) return {nullptr, 0};
    Region& region = regions[next];
    const int64_t taken = lines < region.lines ? lines : region.lines;
    const Region some = {region.at, taken};
    region.at += 64 * taken;
    region.lines -= taken;
    if (region.lines == 0) ++next;
    return some;
  }
};

// B in packed panels of W columns. LAST: of an odd number of steps; what lies beside the last one
// may be anything.
template <class T>
struct PackedColumns {
  const T* at;            // [panels, steps / Dot::steps, W, Dot::steps]
  int64_t stride, panel;  // between vectors of a panel, between panels

  template <bool LAST, int N>
  RELAY_INLINE void read(int64_t step, typename Dot<T>::Vector (&x)[N]) const {
    for (int n = 0; n < N; ++n) {
      x[n] = Dot<T>::load(at + step * stride + n * panel);
      if constexpr (LAST) x[n] = Dot<T>::first_step(x[n]);
    }
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

  template <bool LAST, int N>
  RELAY_INLINE void read(int64_t step, typename Dot<T>::Vector (&x)[N]) const {
    const T* from = at + Dot<T>::steps * step * stride;
    Dot<T>::template load_adjacent<MASKED>(from, stride, columns, !LAST, x);
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
  // As many lines are fetched as are read (of widened tiles, twice as many), over all blocks of
  // rows that read them: `lines` beside the steps in which each of the N vectors is a line. Fetched
  // much faster, they would crowd out the reads.
  constexpr int READ = W * Dot<T>::steps * (int)sizeof(T), STEPS = READ < 64 ? 64 / READ : 1;
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
  const Prefetcher::Region soon = prefetcher.take(whole / STEPS * lines);
  const int64_t times = soon.lines / lines;
  int64_t step = 0;
  const auto fetch_and_multiply = [&](auto level) __attribute__((always_inline)) {
    for (int64_t time = 0; time < times; ++time) {
      for (int64_t i = 0; i < lines; ++i)
        fetch<decltype(level)::value>(soon.at + 64 * (time * lines + i));
#pragma GCC unroll 4
      for (int i = 0; i < STEPS; ++i, ++step) {
        Vector x[N];
        b.template read<false>(step, x);
        multiply(step, x);
      }
    }
  };
  prefetcher.near ? fetch_and_multiply(Count<1>{}) : fetch_and_multiply(Count<2>{});
  for (; step < whole; ++step) {
    Vector x[N];
    b.template read<false>(step, x);
    multiply(step, x);
  }
  if (steps % Dot<T>::steps) {
    Vector x[N];
    b.template read<true>(step, x);
    multiply(step, x);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    b.restore_order(total[r]);
    sink(r, total[r]);
  }
}

// All columns of C, register block by register block: added to what it holds if ADD, else written.
//   a:       [R, steps / Dot::steps], rows `a_row` apart
//   operand: B's layout; at: its first step and column, of one KV head
//   columns: that are asked for; there: that exist in memory, at least as many
//   c:       [R, columns and up to 8 vectors more], rows `c_row` apart; beyond `columns` arbitrary
template <class T, int R, bool ADD>
void product(const typename Dot<T>::Weight* a, int64_t a_row, const relay_operand& operand,
             const T* at, int64_t steps, int64_t columns, int64_t there, Prefetcher& prefetcher,
             float* c, int64_t c_row) {
  int64_t column = 0;
  // The next n * W columns of B.
  const auto block = [&](auto n, const auto& b) __attribute__((always_inline)) {
    constexpr int N = decltype(n)::value;
    float* to = c + column;
    const auto sink = [=](int row, const vf(&x)[N]) __attribute__((always_inline)) {
      for (int i = 0; i < N; ++i) {
        float* sums = to + row * c_row + i * W;
        store(sums, ADD ? load(sums) + x[i] : x[i]);
      }
    };
    register_block<T, R, N>(a, a_row, b, steps, prefetcher, sink);
    column += N * W;
  };
  if (operand.kind == RELAY_PANELS) {
    constexpr int N = register_vectors(R);
    while (column < columns) {
      const PackedColumns<T> b = {at + column / W * operand.panel, operand.stride, operand.panel};
      const int64_t left = ceil_div(columns - column, W);
      // Two and two rather than three and one.
      if (left >= N && left != N + 1)
        block(Count<N>{}, b);
      else if (left >= 2)
        block(Count<2>{}, b);
      else
        block(Count<1>{}, b);
    }
    return;
  }
  constexpr int LEAST = Dot<T>::steps;  // vectors that the narrowest read gives
  constexpr int N = register_vectors_in_place(R) / LEAST * LEAST;
  constexpr int HALF = (N + LEAST) / 2 / LEAST * LEAST;
  // Whether n vectors are there, the last of them not in vain.
  const auto fits = [&](int n) {
    return column + n * W <= there && column + (n - LEAST) * W < columns;
  };
  while (column < columns) {
    const AdjacentColumns<T, false> b = {at + column, operand.stride, 0};
    // Two and two rather than three and one.
    const bool twice = 2 * HALF == N + LEAST && fits(2 * HALF) && !fits(2 * HALF + LEAST);
    if (!twice && fits(N)) {
      block(Count<N>{}, b);
      continue;
    }
    if constexpr (HALF > LEAST) {
      if (fits(HALF)) {
        block(Count<HALF>{}, b);
        continue;
      }
    }
    if (fits(LEAST))
      block(Count<LEAST>{}, b);
    else
      block(Count<LEAST>{}, AdjacentColumns<T, true>{at + column, operand.stride, there - column});
  }
}

// product of `rows` <= R rows.
template <class T, bool ADD, int R = REGISTER_ROWS, class... Rest>
RELAY_INLINE void product_up_to(int64_t rows, Rest&&... rest) {
  if (rows == R) return product<T, R, ADD>(rest...);
  if constexpr (R > 1) product_up_to<T, ADD, R - 1>(rows, rest...);
}

// The product as attention calls it, and what a thread keeps between its calls. An instruction set
// may specialise it.
template <class T>
struct MatrixProduct {
  static constexpr int rows = REGISTER_ROWS;  // at most, of one call

  // Arguments of `product`, after the number of rows.
  template <bool ADD, class... Rest>
  RELAY_INLINE void run(int64_t rows, Rest&&... rest) {
    product_up_to<T, ADD>(rows, rest...);
  }
};

}  // namespace
}  // namespace relay
