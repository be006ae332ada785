// The online softmax of a row of scores, tile by tile (FlashAttention, arXiv 2205.14135, Alg. 1),
// in base 2.
#pragma once
#include "dot.h"

namespace relay {
namespace {

constexpr float NEG_INF = -__builtin_inff();
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

RELAY_INLINE float exp2(float x) { return exp2(broadcast(x))[0]; }

// Adds a tile's scores to a row's softmax and writes their weights over them. Returns 2 ** (m - m'),
// the factor for the row's output so far.
//   scores:  [count], a multiple of 2 W; then Dot<T>::Weight [count / Dot::steps]
//   row_max: m, row_sum: l of the tiles before
template <class T>
RELAY_INLINE float online_softmax_update(float* scores, int64_t count, float& row_max,
                                         float& row_sum) {
  // m' = max(m, max_j s_j)
  vf high[2] = {broadcast(NEG_INF), broadcast(NEG_INF)};
  for (int64_t i = 0; i < count; i += 2 * W)
    for (int j = 0; j < 2; ++j) high[j] = max_keeping_nan(high[j], load(scores + i + j * W));
  const float tile_max = reduce_max(max_keeping_nan(high[0], high[1]));
  const float new_max = tile_max > row_max ? tile_max : row_max;
  // No key seen yet: any finite number in place of m' makes all weights 0.
  const vf base = broadcast(new_max == NEG_INF ? 0.0f : new_max);
  // p_j = 2 ** (s_j - m')
  vf total[2] = {};
  typename Dot<T>::Weight* weights = (typename Dot<T>::Weight*)scores;
  for (int64_t i = 0; i < count; i += 2 * W) {
    const vf p = exp2(load(scores + i) - base), next = exp2(load(scores + i + W) - base);
    total[0] += p;
    total[1] += next;
    Dot<T>::store_weights(weights + i / Dot<T>::steps, p, next);
  }
  // l' = l 2 ** (m - m') + sum_j p_j
  const float factor = row_max == new_max ? 1.0f : exp2(row_max - base[0]);
  row_max = new_max;
  row_sum = row_sum * factor + reduce_add(total[0] + total[1]);
  return factor;
}

}  // namespace
}  // namespace relay
