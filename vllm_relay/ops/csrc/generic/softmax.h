// The softmax over keys that are attended piece by piece: updated tile by tile (FlashAttention,
// arXiv 2205.14135, Alg. 1), merged where several threads or partials have a part of it.
#pragma once
#include "product.h"

namespace relay {
namespace {

constexpr float NEG_INF = -__builtin_inff();
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

RELAY_INLINE float exp2(float x) { return exp2(broadcast(x))[0]; }

// tanh x: below 0.6 a minimax polynomial, relative error 1e-7, else by 2 ** x.
RELAY_INLINE vf tanh(vf x) {
  const vf size = (vf)((vi)x & 0x7fffffff), square = x * x;
  vf p = broadcast(1.561303542e-2f);
  p = p * square - 5.221204665e-2f;
  p = p * square + 1.331312078e-1f;
  p = p * square - 3.333259769e-1f;
  const vf e = exp2(size * (-2.0f * LOG2E));
  const vf large = (vf)((vi)((1.0f - e) / (1.0f + e)) | ((vi)x & (int)0x80000000));
  return size < 0.6f ? p * square * x + x : large;
}

// Whether scores are more than products times a factor that keeps their order.
inline bool bends(const relay_scores& scores) {
  return scores.softcap || scores.slopes || !(scores.scale > 0);
}

// The factor of scores after `bend_scores`, in base 2.
inline float score_factor(const relay_scores& scores) {
  return bends(scores) ? 1.0f : (float)scores.scale * LOG2E;
}

// Scale, soft cap and ALiBi of a row's scores, in base 2. Only where `bends`: else `scale` is left
// to the softmax.
//   scores: [count] products of the query and the keys from `first` on, a multiple of W
RELAY_INLINE void bend_scores(const relay_call& call, const Unit& unit, int64_t row, int64_t first,
                              float* scores, int64_t count) {
  const float scale = (float)call.scores.scale;
  if (call.scores.softcap) {
    const float cap = (float)call.scores.softcap;
    // s = softcap tanh(s scale / softcap)
    for (int64_t i = 0; i < count; i += W)
      store(scores + i, tanh(load(scores + i) * (scale / cap)) * (cap * LOG2E));
  } else {
    for (int64_t i = 0; i < count; i += W) store(scores + i, load(scores + i) * (scale * LOG2E));
  }
  if (call.scores.slopes) {
    const auto [token, head] = row_of(call, unit, row);
    const float slope = call.scores.slopes[head] * LOG2E;
    const int64_t start = call.sequences[unit.sequence].start;
    vf distance = broadcast((float)(start + first - call.positions[token]));  // k - p
    for (int i = 0; i < W; ++i) distance[i] += (float)i;
    // s = s + slope (k - p)
    for (int64_t i = 0; i < count; i += W, distance += (float)W)
      store(scores + i, load(scores + i) + distance * slope);
  }
}

// Rows of one softmax update. A row's maximum and sum are chains of results, in whose latency the
// other rows are computed. Four rows need more than 16 registers.
constexpr int SOFTMAX_ROWS = REGISTER_ROWS < 8 ? 1 : 4;

// Adds a tile's scores to the softmax of R rows and writes their weights over them.
//   scores:  [R, count], rows `scores_row` apart, count a multiple of 2 W, to be multiplied by
//            `scale`; then their weights, Dot<T>::Weight [R, count / Dot::steps]
//   row_max: m, row_sum: l of the tiles before, [R]
//   factor:  [R], set to 2 ** (m - m'), the factor of each row's output so far
//   next: memory read soon, fetched here if the unit is one block of rows
template <class T, int R>
RELAY_INLINE void online_softmax_update(float* scores, int64_t scores_row, int64_t count,
                                        float scale, float* row_max, float* row_sum, float* factor,
                                        Prefetcher& next) {
  // m' = max(m, max_j s_j)
  vf high[R][2], base[R];
  float new_max[R];
  for (int r = 0; r < R; ++r) high[r][0] = high[r][1] = broadcast(NEG_INF);
  for (int64_t i = 0; i < count; i += 2 * W)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < 2; ++j)
        high[r][j] = max_keeping_nan(high[r][j], load(scores + r * scores_row + i + j * W));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const float tile_max = reduce_max(max_keeping_nan(high[r][0], high[r][1])) * scale;
    new_max[r] = tile_max > row_max[r] ? tile_max : row_max[r];
    // No key seen yet: any finite number in place of m' makes all weights 0.
    base[r] = broadcast(new_max[r] == NEG_INF ? 0.0f : new_max[r]);
  }
  // p_j = 2 ** (s_j - m')
  vf total[R][2] = {};
  typedef typename Dot<T>::Weight Weight;
  constexpr int LINES = W / 4;  // per row: about as many as the products fetch in this time
  const Prefetcher::Region soon = next.take(next.sharers == 1 ? count / (2 * W) * LINES * R : 0);
  for (int64_t i = 0, line = 0; i < count; i += 2 * W) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* at = scores + r * scores_row;
      const vf p = exp2(load(at + i) * scale - base[r]);
      const vf q = exp2(load(at + i + W) * scale - base[r]);
      total[r][0] += p;
      total[r][1] += q;
      Dot<T>::store_weights((Weight*)at + i / Dot<T>::steps, p, q);
      if (line < soon.lines)
        for (int n = 0; n < LINES; ++n, ++line)
          next.near ? fetch<1>(soon.at + 64 * line) : fetch<2>(soon.at + 64 * line);
    }
  }
  // l' = l 2 ** (m - m') + sum_j p_j
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    factor[r] = row_max[r] == new_max[r] ? 1.0f : exp2(row_max[r] - base[r][0]);
    row_max[r] = new_max[r];
    row_sum[r] = row_sum[r] * factor[r] + reduce_add(total[r][0] + total[r][1]);
  }
}

// online_softmax_update of `rows` <= R rows.
template <class T, int R = SOFTMAX_ROWS, class... Rest>
RELAY_INLINE void online_softmax_up_to(int64_t rows, Rest&&... rest) {
  if (rows == R) return online_softmax_update<T, R>(rest...);
  if constexpr (R > 1) online_softmax_up_to<T, R - 1>(rows, rest...);
}

// out = O / l,  lse = (m + log2 l) ln 2;  a row that attended to nothing: 0 and -inf. A sink that is
// not left to the fusion is one more key, without a value:  l = l + 2 ** (sink - m).
template <class Out>
void write_rows(const relay_call& call, const Unit& unit, const Accumulator& sums) {
  const relay_partial& partial = call.partials[call.sequences[unit.sequence].partial];
  const int64_t out_row = rounded(call.head_size, PIECE);
  for (int64_t r = 0; r < unit.all_rows(); ++r) {
    const auto [token, head] = row_of(call, unit, r);
    float row_max = sums.row_max[r], row_sum = sums.row_sum[r], factor = 1.0f;
    const bool has_sink = call.scores.sinks && !call.fused.base;
    const float sink = has_sink ? call.scores.sinks[head] * LOG2E : NEG_INF;
    if (sink != NEG_INF) {
      if (sink > row_max) {
        factor = exp2(row_max - sink);
        row_max = sink;
      }
      row_sum = row_sum * factor + exp2(sink - row_max);
    }
    const bool empty = row_sum == 0.0f;
    Out* out = row_at<Out>(partial.out, token, head);  // [D]
    const float inverse = empty ? 0.0f : factor / row_sum;
    for (int64_t d = 0; d < call.head_size; d += W)
      narrow(load(sums.out + r * out_row + d) * inverse, out + d);
    if (partial.lse.base)
      *row_at<float>(partial.lse, token, head) =
          empty ? NEG_INF : (row_max + __builtin_log2f(row_sum)) * LN2;
  }
}

template <class T>
void write_unit(const relay_call& call, const Unit& unit, const Accumulator& sums) {
  if (call.partial_dtype == RELAY_F32)
    write_rows<float>(call, unit, sums);
  else
    write_rows<T>(call, unit, sums);
}

// Merges the parts [count] of a unit into the first of them and writes the result.
template <class T>
void merge_parts(const relay_call& call, const Unit& unit, const Accumulator* parts,
                 int64_t count) {
  const int64_t out_row = rounded(call.head_size, PIECE);
  const Accumulator& total = parts[0];
  for (int64_t r = 0; r < unit.all_rows(); ++r) {
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

// Relay fusion: partials merged by their LSE (RelayAttention, arXiv 2402.14808, eq. 7-12).
// out = sum_p out_p exp(lse_p) / (sum_p exp(lse_p) + exp(sink)), for tokens [from, to) of the call.
template <class In, class Out>
void fuse_partials(const relay_call& call, int64_t from, int64_t to) {
  float total[MAX_HEAD_SIZE];
  for (int64_t token = from; token < to; ++token) {
    for (int64_t head = 0; head < call.heads; ++head) {
      const float* sink = call.scores.sinks ? call.scores.sinks + head : nullptr;
      float max = sink ? *sink : NEG_INF;
      int64_t live = 0;
      const auto lse = [&](int64_t p) {
        return *row_at<float>(call.partials[p].lse, token, head);
      };
      for (int64_t p = 0; p < call.num_partials; ++p) {
        if (__builtin_isinf(lse(p))) continue;  // attended to nothing: its out may hold NaN
        ++live;
        if (lse(p) > max) max = lse(p);
      }
      if (max == NEG_INF) max = 0;  // every LSE left is NaN, or none is left
      // total = sum_p out_p w_p, w_p = exp(lse_p - max)
      float weight = sink ? exp2((*sink - max) * LOG2E) : 0.0f;
      __builtin_memset(total, 0, call.head_size * sizeof(float));
      for (int64_t p = 0; p < call.num_partials; ++p) {
        if (__builtin_isinf(lse(p))) continue;
        const float w = exp2((lse(p) - max) * LOG2E);
        const In* out = row_at<In>(call.partials[p].out, token, head);  // [D]
        weight += w;
        for (int64_t d = 0; d < call.head_size; d += W)
          store(total + d, load(total + d) + widen(out + d) * w);
      }
      const float inverse = live ? 1.0f / weight : 0.0f;
      Out* fused = row_at<Out>(call.fused, place_of(call, token), head);  // [D]
      for (int64_t d = 0; d < call.head_size; d += W) narrow(load(total + d) * inverse, fused + d);
    }
  }
}

// Kernels::fuse.
template <class T>
void fuse(const relay_call& call, int64_t from, int64_t to) {
  if (call.partial_dtype == RELAY_F32)
    fuse_partials<float, T>(call, from, to);
  else
    fuse_partials<T, T>(call, from, to);
}

}  // namespace
}  // namespace relay
