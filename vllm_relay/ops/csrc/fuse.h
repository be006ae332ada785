// Relay fusion: partials merged by their LSE (RelayAttention, arXiv 2402.14808, eq. 7-12).
#pragma once
#include "softmax.h"
#include "work.h"

namespace relay {
namespace {

template <class In, class Out>
void fuse(const relay_fuse_call& call, int64_t from, int64_t to) {
  float total[MOST_HEAD];
  for (int64_t token = from; token < to; ++token) {
    for (int64_t head = 0; head < call.heads; ++head) {
      float peak = NONE;
      int64_t live = 0;
      const auto lse = [&](int64_t p) {
        return call.lses[p][head * call.lse_head[p] + token * call.lse_token[p]];
      };
      for (int64_t p = 0; p < call.partials; ++p) {
        if (__builtin_isinf(lse(p))) continue;  // attended to nothing, and its out may be anything
        ++live;
        if (lse(p) > peak) peak = lse(p);
      }
      if (peak == NONE) peak = 0;  // nothing but NaN is left, or nothing
      float weight = 0;
      __builtin_memset(total, 0, call.head_size * sizeof(float));
      for (int64_t p = 0; p < call.partials; ++p) {
        if (__builtin_isinf(lse(p))) continue;
        const float w = exp2((lse(p) - peak) * 1.44269504f);
        const In* out = (const In*)call.outs[p] + token * call.out_token[p] +
                        head * call.out_head[p];
        weight += w;
        for (int64_t d = 0; d < call.head_size; d += W)
          store(total + d, load(total + d) + widen(out + d) * w);
      }
      const float part = live ? 1.0f / weight : 0.0f;
      Out* fused = (Out*)call.fused +
                   (call.places ? call.places[token] : token) * call.fused_token +
                   head * call.fused_head;
      for (int64_t d = 0; d < call.head_size; d += W) narrow(load(total + d) * part, fused + d);
    }
  }
}

}  // namespace
}  // namespace relay
