// amx_bf16.h on a tile unit in plain C++, for machines without AMX. Compiled for tests only.
//
// Bits are those of Intel's manual for tdpbf16ps: a chain of fused multiply-adds for each half of
// the pairs, their sum added to C, inputs and results below the normal numbers taken as zeros. Only
// the payload of NaN may differ.
//
// machines: x86_64 AMD64
// flags: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mprefer-vector-width=512
// needs: has("avx2") && has("avx512bf16") && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl") && has("fma") && has_f16c()
// rank: -1
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RELAY_EMULATED_TILES

namespace relay {
namespace {

// A rule on whose breach a processor faults: here the process ends with its name.
inline void require(bool holds, const char* rule) {
  if (holds) return;
  fprintf(stderr, "tile unit: %s\n", rule);
  abort();
}

struct TileUnit {
  bool configured = false;
  int rows[8], row_bytes[8];
  alignas(64) uint8_t data[8][16][64];

  ~TileUnit() { require(!configured, "a thread ends without tilerelease"); }
};

inline TileUnit& tile_unit() {
  static thread_local TileUnit unit;
  return unit;
}

inline TileUnit& configured_unit(int tile) {
  TileUnit& unit = tile_unit();
  require(unit.configured, "used before ldtilecfg");
  require(unit.rows[tile] > 0, "used tile has no shape");
  return unit;
}

// config: [64], see TileConfig
inline void tile_configure(const void* config) {
  const uint8_t* bytes = (const uint8_t*)config;
  require(bytes[0] == 1, "palette is not 1");
  for (int i = 1; i < 16; ++i) require(bytes[i] == 0, "start row and reserved bytes are not zero");
  TileUnit& unit = tile_unit();
  for (int i = 0; i < 16; ++i) {
    uint16_t row_bytes;
    memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    const int rows = bytes[48 + i];
    require(rows <= 16, "more than 16 rows");
    require(row_bytes <= 64, "more than 64 bytes of a row");
    require((rows == 0) == (row_bytes == 0), "rows without bytes, or bytes without rows");
    require(i < 8 || rows == 0, "more than 8 tiles");
    if (i < 8) unit.rows[i] = rows, unit.row_bytes[i] = row_bytes;
  }
  memset(unit.data, 0, sizeof unit.data);
  unit.configured = true;
}

inline void tile_release() { tile_unit().configured = false; }

template <int T>
inline void tile_zero() {
  memset(configured_unit(T).data[T], 0, sizeof(TileUnit::data[T]));
}

// p: rows of the tile, `stride` bytes apart
template <int T>
inline void tile_load(const void* p, int64_t stride) {
  TileUnit& unit = configured_unit(T);
  memset(unit.data[T], 0, sizeof unit.data[T]);
  for (int r = 0; r < unit.rows[T]; ++r)
    memcpy(unit.data[T][r], (const char*)p + r * stride, unit.row_bytes[T]);
}

// p: rows of the tile, `stride` bytes apart
template <int T>
inline void tile_store(void* p, int64_t stride) {
  const TileUnit& unit = configured_unit(T);
  for (int r = 0; r < unit.rows[T]; ++r)
    memcpy((char*)p + r * stride, unit.data[T][r], unit.row_bytes[T]);
}

// x, or a zero of its sign where x is below the normal numbers.
inline float flushed(float x) {
  return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x;
}

// Element `half` of pair i of a row, as a float. row: [pairs, 2] bf16
inline float element(const uint8_t* row, int i, int half) {
  uint16_t bits;
  memcpy(&bits, row + 4 * i + 2 * half, 2);
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &wide, 4);
  return flushed(x);
}

// C[m, n] += A[m, k, 0] B[k, n, 0] + A[m, k, 1] B[k, n, 1]
template <int C, int A, int B>
inline void tile_multiply() {
  static_assert(C != A && C != B && A != B, "the tiles of a product differ");
  TileUnit& unit = configured_unit(A);
  configured_unit(B), configured_unit(C);
  require(unit.row_bytes[C] % 4 == 0 && unit.row_bytes[A] % 4 == 0, "half a pair");
  require(unit.rows[C] == unit.rows[A], "rows of C are not those of A");
  require(unit.row_bytes[C] == unit.row_bytes[B], "columns of C are not those of B");
  require(unit.row_bytes[A] == 4 * unit.rows[B], "steps of A are not those of B");
  const int columns = unit.row_bytes[C] / 4, pairs = unit.rows[B];
  float b[2][16][16];
  for (int k = 0; k < pairs; ++k)
    for (int n = 0; n < columns; ++n)
      for (int half = 0; half < 2; ++half) b[half][k][n] = element(unit.data[B][k], n, half);
  for (int m = 0; m < unit.rows[C]; ++m) {
    float sums[2][16] = {}, row[16];
    for (int k = 0; k < pairs; ++k)
      for (int half = 0; half < 2; ++half) {
        const float weight = element(unit.data[A][m], k, half);
        for (int n = 0; n < columns; ++n)
          sums[half][n] = flushed(__builtin_fmaf(weight, b[half][k][n], sums[half][n]));
      }
    memcpy(row, unit.data[C][m], sizeof row);
    for (int n = 0; n < columns; ++n)
      row[n] = flushed(flushed(row[n]) + flushed(sums[0][n] + sums[1][n]));
    memcpy(unit.data[C][m], row, 4 * columns);
  }
}

}  // namespace
}  // namespace relay

#include "amx_bf16.h"
