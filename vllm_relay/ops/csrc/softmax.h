// The online softmax of a row of scores, tile by tile (FlashAttention, arXiv 2205.14135, Alg. 1).
#pragma once
#include "product.h"

namespace relay {
namespace {

constexpr float NONE = -__builtin_inff();

// W weights, or two times W, to where the product reads them.
RELAY_INLINE void put(float* to, vf x) { store(to, x); }

#if defined(__AVX512BF16__)
RELAY_INLINE void put(uint32_t* to, vf low, vf high) {
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  __builtin_memcpy(to, &both, sizeof both);
}
#endif

// Turn scores (base 2, a multiple of 32 of them) into weights 2 ** (score - peak), written over
// them, and take them into the row's peak and weight. Returns what earlier sums are to be
// multiplied with.
template <class T>
RELAY_INLINE float soften(float* scores, int64_t count, float& peak, float& weight) {
  vf high[2] = {all(NONE), all(NONE)};
  for (int64_t i = 0; i < count; i += 2 * W)
    for (int j = 0; j < 2; ++j) high[j] = at_least(high[j], load(scores + i + j * W));
  const float highest = largest(at_least(high[0], high[1]));
  const float now = highest > peak ? highest : peak;
  // Nothing seen yet: any finite number in its place makes all weights 0.
  const vf base = all(now == NONE ? 0.0f : now);
  vf total[2] = {};
  typename Steps<T>::Weight* to = (typename Steps<T>::Weight*)scores;
  for (int64_t i = 0; i < count; i += 2 * W) {
    const vf low = exp2(load(scores + i) - base), next = exp2(load(scores + i + W) - base);
    total[0] += low;
    total[1] += next;
    if constexpr (Steps<T>::each == 1) {
      put(to + i, low);
      put(to + i + W, next);
    } else {
#if defined(__AVX512BF16__)
      put(to + i / 2, low, next);
#endif
    }
  }
  const float factor = peak == now ? 1.0f : exp2(peak - base[0]);
  peak = now;
  weight = weight * factor + sum(total[0] + total[1]);
  return factor;
}

}  // namespace
}  // namespace relay
