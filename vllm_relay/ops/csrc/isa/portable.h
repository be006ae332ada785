// Portable C++: vectors of 4 floats, as the compiler's vector extension lowers them.
//
// machines: any
// flags:
// needs: true
// rank: 0
#pragma once

namespace relay {
constexpr int W = 4;
}

#include "../generic/vec.h"

namespace relay {
namespace {

constexpr bool WIDENS = false;
constexpr int REGISTER_ROWS = 4;
constexpr int register_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
constexpr int register_vectors_in_place(int rows) { return register_vectors(rows); }

// p: [W]
RELAY_INLINE vf widen(const f16* p) {
  vh x;
  __builtin_memcpy(&x, p, sizeof x);
  const vi bits = __builtin_convertvector(x, vi);
  const vi sign = (bits & 0x8000) << 16;
  // Exponent and mantissa in place, then the bias; the multiplication also gets subnormals right.
  const vf magnitude = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
  const vi special = (vi)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
  return (vf)((vi)magnitude | special | sign);
}

// Rounds to nearest, ties to even. p: [W]
RELAY_INLINE void narrow(vf x, f16* p) {
  const vi bits = (vi)x;
  const vi sign = (bits >> 16) & 0x8000;
  const vf size = (vf)(bits & 0x7fffffff);
  // Below 2 ** -14 a half has fixed steps of 2 ** -24: an addition rounds to them.
  const vi small = (vi)(size + 0.5f) - (vi)broadcast(0.5f);
  const vi scaled = (vi)size - (112 << 23);
  const vi normal = (scaled + 0xfff + ((scaled >> 13) & 1)) >> 13;
  vi result = size < 0x1p-14f ? small : normal;
  result = size >= 65520.0f ? vi{} + 0x7c00 : result;
  result = (x == x ? result : vi{} + 0x7e00) | sign;
  const vh halves = __builtin_convertvector(result, vh);
  __builtin_memcpy(p, &halves, sizeof halves);
}

}  // namespace
}  // namespace relay
