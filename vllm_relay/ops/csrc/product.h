// The product both halves of attention are made of: C[rows x columns] (+)= A[rows x steps] B[steps x
// columns], with a block of C kept in registers.
#pragma once
#include "abi.h"
#include "vec.h"

namespace relay {
namespace {

// How elements of type T are multiplied: in single steps as floats or, bf16 on a machine with
// vdpbf16ps, in pairs of steps. Weight: one step of a row of A.
template <class T>
struct Steps {
  static constexpr int each = 1;
  typedef float Weight;
  typedef vf Vector;
};

RELAY_INLINE vf dot(vf total, float weight, vf x) { return weight * x + total; }

#if defined(__AVX512BF16__)
template <>
struct Steps<bf16> {
  static constexpr int each = 2;
  typedef uint32_t Weight;
  typedef __m512i Vector;
};

RELAY_INLINE vf dot(vf total, uint32_t weight, __m512i x) {
  return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(weight), (__m512bh)x);
}
#endif

// Columns that the narrowest read of an operand gives.
template <class T>
constexpr int narrowest = Steps<T>::each * W;

// An operand in packed vectors of W columns.
template <class T>
struct Panels {
  const T* at;
  int64_t stride, panel;

  template <int N>
  RELAY_INLINE void read(int64_t step, typename Steps<T>::Vector (&x)[N]) const {
    for (int n = 0; n < N; ++n) {
      const T* p = at + step * stride + n * panel;
      if constexpr (Steps<T>::each == 1) {
        x[n] = widen(p);
      } else {
#if defined(__AVX512BF16__)
        x[n] = _mm512_loadu_si512(p);
#endif
      }
    }
  }

  // The step of which only the first of a pair counts; the other may hold anything.
  template <int N>
  RELAY_INLINE void read_half(int64_t step, typename Steps<T>::Vector (&x)[N]) const {
    read(step, x);
#if defined(__AVX512BF16__)
    if constexpr (Steps<T>::each == 2)
      for (int n = 0; n < N; ++n) x[n] = _mm512_and_si512(x[n], _mm512_set1_epi32(0xffff));
#endif
  }

  template <int N>
  RELAY_INLINE void in_order(vf (&)[N]) const {}
};

// An operand whose columns lie side by side, step after step. Only with `MASKED` may fewer than the
// columns asked for, `columns`, be there.
template <class T, bool MASKED>
struct Rows {
  const T* at;
  int64_t stride, columns;

  template <int N>
  RELAY_INLINE void read(int64_t step, typename Steps<T>::Vector (&x)[N]) const {
    if constexpr (Steps<T>::each == 1) {
      for (int n = 0; n < N; ++n) {
        const T* p = at + step * stride + n * W;
        if constexpr (MASKED)
          x[n] = columns - n * W < W ? widen_some(p, columns - n * W) : widen(p);
        else
          x[n] = widen(p);
      }
    } else {
      pairs(step, x, true);
    }
  }

  template <int N>
  RELAY_INLINE void read_half(int64_t step, typename Steps<T>::Vector (&x)[N]) const {
    if constexpr (Steps<T>::each == 1)
      read(step, x);
    else
      pairs(step, x, false);
  }

#if defined(__AVX512BF16__)
  RELAY_INLINE __m512i two_vectors(const T* p, int64_t first) const {
    if constexpr (MASKED) {
      const int64_t left = columns - first;
      if (left < 32) {
        const __mmask32 mask = left <= 0 ? 0 : (__mmask32)((1ull << left) - 1);
        return _mm512_maskz_loadu_epi16(mask, p + first);
      }
    }
    return _mm512_loadu_si512(p + first);
  }

  // Interleaving the halves of 128-bit lanes is cheapest; it leaves the columns in the order that
  // `in_order` undoes.
  template <int N>
  RELAY_INLINE void pairs(int64_t step, __m512i (&x)[N], bool both) const {
    static_assert(N % 2 == 0, "columns come 32 at a time");
    const T* first = at + 2 * step * stride;
    for (int n = 0; n < N; n += 2) {
      const __m512i a = two_vectors(first, n * W);
      const __m512i b = both ? two_vectors(first + stride, n * W) : _mm512_setzero_si512();
      x[n] = _mm512_unpacklo_epi16(a, b);
      x[n + 1] = _mm512_unpackhi_epi16(a, b);
    }
  }
#endif

  template <int N>
  RELAY_INLINE void in_order(vf (&x)[N]) const {
#if defined(__AVX512BF16__)
    if constexpr (Steps<T>::each == 2) {
      const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
      const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
      for (int n = 0; n < N; n += 2) {
        const __m512 a = (__m512)x[n], b = (__m512)x[n + 1];
        x[n] = (vf)_mm512_permutex2var_ps(a, low, b);
        x[n + 1] = (vf)_mm512_permutex2var_ps(a, high, b);
      }
    }
#endif
  }
};

// Memory that will be read soon, fetched into the cache line by line beside a product.
struct Ahead {
  struct Region {
    const char* at;
    int64_t lines;
  };
  static constexpr int MOST = 32;
  Region regions[MOST];
  int count = 0, next = 0;
  int64_t sharers = 1;  // blocks of rows over which to spread it

  void clear(int64_t blocks_of_rows) {
    count = next = 0;
    sharers = blocks_of_rows;
  }

  void add(const void* at, int64_t bytes) {
    if (count < MOST) regions[count++] = {(const char*)at, (bytes + 63) / 64};
  }

  // Up to `lines` lines of one region.
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

// One block of C: what `done(row, vectors)` gets is the product of that row.
template <class T, int R, int N, class B, class Done>
RELAY_INLINE void block(const typename Steps<T>::Weight* a, int64_t a_row, const B& b,
                        int64_t steps, Ahead& ahead, Done done) {
  typedef typename Steps<T>::Vector Vector;
  constexpr int EACH = Steps<T>::each;
  // As many lines as are read, over all blocks of rows that read them.
  const int64_t lines = R <= ROWS / 2 ? N : (N + ahead.sharers - 1) / ahead.sharers;
  vf total[R][N] = {};
  const int64_t whole = steps / EACH;
  const auto multiply = [&](int64_t step, const Vector(&x)[N]) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) total[r][n] = dot(total[r][n], a[r * a_row + step], x[n]);
    }
  };
  const Ahead::Region soon = ahead.take(whole * lines);
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
  if (steps % EACH) {
    Vector x[N];
    b.read_half(step, x);
    multiply(step, x);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    b.in_order(total[r]);
    done(r, total[r]);
  }
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// All columns of C, in blocks.
//   operand: of one KV head, `at` its first step and column. steps: of A and B.
//   columns: asked for; `there`: that exist in memory, at least as many.
//   done(row, first column, vector): W columns of a row; beyond `columns` they mean nothing.
template <class T, int R, class Done>
RELAY_INLINE void product(const typename Steps<T>::Weight* a, int64_t a_row,
                          const relay_operand& operand, const T* at, int64_t steps,
                          int64_t columns, int64_t there, Ahead& ahead, Done done) {
  const auto give = [&](int64_t first, auto n) __attribute__((always_inline)) {
    return [&done, first](int row, const auto& x) __attribute__((always_inline)) {
      for (int i = 0; i < decltype(n)::value; ++i) done(row, first + i * W, x[i]);
    };
  };
  if (operand.kind == RELAY_PANELS) {
    constexpr int N = columns_for(R);
    for (int64_t left = (columns + W - 1) / W, c = 0; left > 0;) {
      const Panels<T> b = {at + c / W * operand.panel, operand.stride, operand.panel};
      // Two and two rather than three and one.
      if (left >= N && left != N + 1) {
        block<T, R, N>(a, a_row, b, steps, ahead, give(c, Count<N>{}));
        left -= N, c += N * W;
      } else if (left >= 2) {
        block<T, R, 2>(a, a_row, b, steps, ahead, give(c, Count<2>{}));
        left -= 2, c += 2 * W;
      } else {
        block<T, R, 1>(a, a_row, b, steps, ahead, give(c, Count<1>{}));
        left -= 1, c += W;
      }
    }
    return;
  }
  constexpr int EACH = Steps<T>::each;
  constexpr int N = adjacent_columns_for(R) / EACH * EACH;
  for (int64_t c = 0; c < columns;) {
    if (c + N * W <= there && c + (N - EACH) * W < columns) {
      const Rows<T, false> b = {at + c, operand.stride, 0};
      block<T, R, N>(a, a_row, b, steps, ahead, give(c, Count<N>{}));
      c += N * W;
    } else if (c + EACH * W <= there) {
      const Rows<T, false> b = {at + c, operand.stride, 0};
      block<T, R, EACH>(a, a_row, b, steps, ahead, give(c, Count<EACH>{}));
      c += EACH * W;
    } else {
      const Rows<T, true> b = {at + c, operand.stride, there - c};
      block<T, R, EACH>(a, a_row, b, steps, ahead, give(c, Count<EACH>{}));
      c += EACH * W;
    }
  }
}

}  // namespace
}  // namespace relay
