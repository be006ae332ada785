// Relay fusion: partials merged by their LSE (RelayAttention, arXiv 2402.14808, eq. 7-12).
#pragma once
#include "../kernels.h"
#include "softmax.h"

namespace relay {
namespace {

// out = sum_p out_p exp(lse_p) / sum_p exp(lse_p), for tokens [from, to) of the call.
template <class In, class Out>
void fuse(const relay_fuse_call& call, int64_t from, int64_t to) {
  float total[MAX_HEAD_SIZE];
  for (int64_t token = from; token < to; ++token) {
    for (int64_t head = 0; head < call.heads; ++head) {
      float max = NEG_INF;
      int64_t live = 0;
      const auto lse = [&](int64_t p) {
        return call.lses[p][head * call.lse_head[p] + token * call.lse_token[p]];
      };
      for (int64_t p = 0; p < call.partials; ++p) {
        if (__builtin_isinf(lse(p))) continue;  // attended to nothing: its out may hold NaN
        ++live;
        if (lse(p) > max) max = lse(p);
      }
      if (max == NEG_INF) max = 0;  // every LSE left is NaN, or none is left
      // total = sum_p out_p w_p, w_p = exp(lse_p - max)
      float weight = 0;
      __builtin_memset(total, 0, call.head_size * sizeof(float));
      for (int64_t p = 0; p < call.partials; ++p) {
        if (__builtin_isinf(lse(p))) continue;
        const float w = exp2((lse(p) - max) * LOG2E);
        const In* out = (const In*)call.outs[p] + token * call.out_token[p] +
                        head * call.out_head[p];  // [D]
        weight += w;
        for (int64_t d = 0; d < call.head_size; d += W)
          store(total + d, load(total + d) + widen(out + d) * w);
      }
      const float inverse = live ? 1.0f / weight : 0.0f;
      Out* fused = (Out*)call.fused +
                   (call.places ? call.places[token] : token) * call.fused_token +
                   head * call.fused_head;  // [D]
      for (int64_t d = 0; d < call.head_size; d += W) narrow(load(total + d) * inverse, fused + d);
    }
  }
}

}  // namespace
}  // namespace relay
