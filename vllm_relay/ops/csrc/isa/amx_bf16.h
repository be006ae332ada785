// AMX with BF16: packed bf16 is multiplied in tiles (tdpbf16ps), all else as in avx512_bf16.h.
//
// machines: x86_64 AMD64
// flags: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16 -mprefer-vector-width=512
// needs: has("avx2") && has("avx512bf16") && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl") && has("fma") && has_f16c() && has_amx_bf16()
// rank: 40
#pragma once
#include "avx512_bf16.h"
#include "../generic/product.h"

namespace relay {
namespace {

// The tile unit of a thread: eight tiles of up to 16 rows of 64 bytes. Tests define
// RELAY_EMULATED_TILES and these functions before they include this file.
#ifndef RELAY_EMULATED_TILES

// The compiler's intrinsics do not tell it that tileloadd reads memory (GCC 12); these do.

// config: [64 bytes], see TileConfig
RELAY_INLINE void tile_configure(const void* config) {
  __asm__ volatile("ldtilecfg (%0)" : : "r"(config) : "memory");
}

RELAY_INLINE void tile_release() { __asm__ volatile("tilerelease"); }

template <int T>
RELAY_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
}

// p: rows of the tile, `stride` bytes apart
template <int T>
RELAY_INLINE void tile_load(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(T) : "memory");
}

// p: rows of the tile, `stride` bytes apart
template <int T>
RELAY_INLINE void tile_store(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(T) : "memory");
}

// C[m, n] += A[m, k, 0] B[k, n, 0] + A[m, k, 1] B[k, n, 1]
template <int C, int A, int B>
RELAY_INLINE void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

// The shapes of tiles, as ldtilecfg reads them.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "as in the instruction's memory");

template <>
struct MatrixProduct<bf16> {
  static constexpr int rows = 32;

  // Tiles that stay configured would be saved at every switch of threads.
  ~MatrixProduct() {
    if (tile_rows_) tile_release();
  }

  // Arguments of `product`, after the number of rows.
  template <bool ADD>
  void run(int64_t count, const uint32_t* a, int64_t a_row, const relay_operand& operand,
           const bf16* at, int64_t steps, int64_t columns, int64_t there, Prefetcher& prefetcher,
           float* c, int64_t c_row) {
    if (operand.kind != RELAY_PANELS) {  // tiles cannot read it
      for (int64_t row = 0, some; row < count; row += some) {
        some = even_block(count - row, REGISTER_ROWS);
        product_up_to<bf16, ADD>(some, a + row * a_row, a_row, operand, at, steps, columns, there,
                                 prefetcher, c + row * c_row, c_row);
      }
      return;
    }
    // One tile of rows or two, which share a row where their number is odd: all have one shape.
    const int64_t each = count > TILE ? ceil_div(count, 2) : count, second = count - each;
    configure(each);
    const Rows from = {a, a_row, second};
    const Rows tail = {tail_a_, TILE, second};
    if (steps % STEPS) {
      const uint32_t* last = a + steps / STEPS * TILE;
      const __mmask16 pairs = (1u << ceil_div(steps % STEPS, 2)) - 1;
      for (int64_t r = 0; r < count; ++r)
        _mm512_store_si512(tail_a_ + r * TILE, _mm512_maskz_loadu_epi32(pairs, last + r * a_row));
    }
    for (int64_t column = 0; column < columns; column += 2 * TILE) {
      const Panels b = {at + column / TILE * operand.panel, operand.stride, operand.panel};
      const Sums to = {c + column, c_row};
      const bool two = column + TILE < columns;
      if (second && two)
        block<2, 2, ADD>(from, tail, b, steps, prefetcher, to);
      else if (second)
        block<2, 1, ADD>(from, tail, b, steps, prefetcher, to);
      else if (two)
        block<1, 2, ADD>(from, tail, b, steps, prefetcher, to);
      else
        block<1, 1, ADD>(from, tail, b, steps, prefetcher, to);
    }
  }

 private:
  static constexpr int64_t TILE = 16;   // rows of a tile, and its columns of 4 bytes
  static constexpr int64_t STEPS = 32;  // of a tile of A or B, in pairs
  enum { C00, C01, C10, C11, A0, A1, B0, B1 };
  static_assert(W == TILE, "a tile has the columns of a panel");

  struct Rows {
    const uint32_t* at;  // [rows, steps / 2]
    int64_t row;         // between rows
    int64_t second;      // first row of the second tile
  };

  struct Panels {
    const bf16* at;         // [panels, steps / 2, TILE, 2]
    int64_t stride, panel;  // between pairs of steps, between panels
  };

  struct Sums {
    float* at;    // [rows, N TILE]
    int64_t row;  // between rows
  };

  int64_t tile_rows_ = 0;                      // of the tiles of A and C; 0: not configured
  alignas(64) uint32_t tail_a_[rows * TILE];   // [rows, STEPS / 2], the last steps, then zeros
  alignas(64) bf16 tail_b_[2 * TILE * STEPS];  // [2, STEPS / 2, TILE, 2], the same

  void configure(int64_t tile_rows) {
    if (tile_rows == tile_rows_) return;
    tile_rows_ = tile_rows;
    TileConfig config;
    for (int i = C00; i <= B1; ++i) {
      config.rows[i] = (uint8_t)(i < B0 ? tile_rows : STEPS / 2);
      config.row_bytes[i] = 64;
    }
    tile_configure(&config);
  }

  // C (+)= A B, for M tiles of rows and N of columns.
  template <int M, int N, bool ADD>
  void block(const Rows& a, const Rows& tail, const Panels& b, int64_t steps,
             Prefetcher& prefetcher, const Sums& c) {
    const int64_t c_bytes = c.row * sizeof(float);
    float* second = c.at + a.second * c.row;
    begin<C00, ADD>(c.at, c_bytes);
    if constexpr (N == 2) begin<C01, ADD>(c.at + TILE, c_bytes);
    if constexpr (M == 2) begin<C10, ADD>(second, c_bytes);
    if constexpr (M == 2 && N == 2) begin<C11, ADD>(second + TILE, c_bytes);
    // As many lines are fetched as are read, over all blocks of rows that read them.
    const int64_t whole = steps / STEPS, lines = ceil_div(TILE * N, prefetcher.sharers);
    const Prefetcher::Region soon = prefetcher.take(whole * lines);
    for (int64_t i = 0; i < whole; ++i) {
      for (int64_t line = i * lines; line < min(soon.lines, (i + 1) * lines); ++line)
        __builtin_prefetch(soon.at + 64 * line, 0, 2);
      multiply<M, N>({a.at + i * TILE, a.row, a.second},
                     {b.at + i * TILE * b.stride, b.stride, b.panel});
    }
    if (steps % STEPS) {
      copy_tail<N>({b.at + whole * TILE * b.stride, b.stride, b.panel}, steps % STEPS);
      multiply<M, N>(tail, {tail_b_, 2 * TILE, TILE * STEPS});
    }
    tile_store<C00>(c.at, c_bytes);
    if constexpr (N == 2) tile_store<C01>(c.at + TILE, c_bytes);
    if constexpr (M == 2) tile_store<C10>(second, c_bytes);
    if constexpr (M == 2 && N == 2) tile_store<C11>(second + TILE, c_bytes);
  }

  template <int T, bool ADD>
  RELAY_INLINE void begin(const float* p, int64_t stride) {
    if constexpr (ADD)
      tile_load<T>(p, stride);
    else
      tile_zero<T>();
  }

  // C += A B, STEPS of them.
  template <int M, int N>
  RELAY_INLINE void multiply(const Rows& a, const Panels& b) {
    const int64_t a_bytes = a.row * sizeof(uint32_t), b_bytes = b.stride * sizeof(bf16);
    tile_load<A0>(a.at, a_bytes);
    tile_load<B0>(b.at, b_bytes);
    tile_multiply<C00, A0, B0>();
    if constexpr (N == 2) {
      tile_load<B1>(b.at + b.panel, b_bytes);
      tile_multiply<C01, A0, B1>();
    }
    if constexpr (M == 2) {
      tile_load<A1>(a.at + a.second * a.row, a_bytes);
      tile_multiply<C10, A1, B0>();
      if constexpr (N == 2) tile_multiply<C11, A1, B1>();
    }
  }

  // The last steps of N panels, then zeros: what lies behind them may not exist, or be NaN.
  template <int N>
  void copy_tail(const Panels& b, int64_t steps) {
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t s = 0; s < STEPS; s += 2) {
        __m512i pairs = _mm512_setzero_si512();
        if (s < steps) pairs = Dot<bf16>::load(b.at + n * b.panel + s / 2 * b.stride);
        if (s + 1 == steps) pairs = Dot<bf16>::first_step(pairs);
        _mm512_store_si512(tail_b_ + (n * STEPS + s) * TILE, pairs);
      }
    }
  }
};

}  // namespace
}  // namespace relay
