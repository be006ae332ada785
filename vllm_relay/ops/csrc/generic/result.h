// Results of a unit: written to its partial, and merged where several parts computed it.
#pragma once
#include "scratch.h"
#include "softmax.h"

namespace relay {
namespace {

// out = O / l,  lse = (m + log2 l) ln 2;  a row that attended to nothing: 0 and -inf.
template <class Out>
void write_rows(const relay_call& call, const Unit& unit, const Accumulator& sums,
                int64_t out_row) {
  const int64_t share = call.heads / call.kv_heads;
  const relay_sequence& sequence = call.sequences[unit.sequence];
  for (int64_t r = 0; r < unit.rows; ++r) {
    const int64_t token = sequence.first + (unit.row + r) / share;
    const int64_t head = unit.kv_head * share + (unit.row + r) % share;
    const bool empty = sums.row_sum[r] == 0.0f;
    Out* out = (Out*)call.out + sequence.partial * call.out_partial + token * call.out_token +
               head * call.out_head;  // [D]
    const float inverse = empty ? 0.0f : 1.0f / sums.row_sum[r];
    for (int64_t d = 0; d < call.head_size; d += W)
      narrow(load(sums.out + r * out_row + d) * inverse, out + d);
    call.lse[sequence.partial * call.lse_partial + head * call.lse_head + token * call.lse_token] =
        empty ? NEG_INF : (sums.row_max[r] + __builtin_log2f(sums.row_sum[r])) * LN2;
  }
}

template <class T>
void write_unit(const relay_call& call, const Unit& unit, const Accumulator& sums) {
  const int64_t out_row = rounded(call.head_size, PIECE);
  if (call.out_dtype == RELAY_F32)
    write_rows<float>(call, unit, sums, out_row);
  else
    write_rows<T>(call, unit, sums, out_row);
}

// Merges the parts [count] of a unit into the first of them and writes the result.
template <class T>
void merge_parts(const relay_call& call, const Unit& unit, const Accumulator* parts,
                 int64_t count) {
  const int64_t out_row = rounded(call.head_size, PIECE);
  const Accumulator& total = parts[0];
  for (int64_t r = 0; r < unit.rows; ++r) {
    float max = NEG_INF;
    for (int64_t i = 0; i < count; ++i)
      if (parts[i].row_max[r] > max) max = parts[i].row_max[r];
    const float base = max == NEG_INF ? 0.0f : max;
    // O = sum_i O_i 2 ** (m_i - m),  l = sum_i l_i 2 ** (m_i - m)
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float factor = exp2(parts[i].row_max[r] - base);
      const float* from = parts[i].out + r * out_row;  // [out_row]
      float* to = total.out + r * out_row;
      sum += parts[i].row_sum[r] * factor;
      for (int64_t d = 0; d < call.head_size; d += W)
        store(to + d, (i ? load(to + d) : vf{}) + load(from + d) * factor);
    }
    total.row_max[r] = max;
    total.row_sum[r] = sum;
  }
  write_unit<T>(call, unit, total);
}

}  // namespace
}  // namespace relay
