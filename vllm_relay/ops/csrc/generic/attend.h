// Attention of units of work, tile by tile (FlashAttention, arXiv 2205.14135, Alg. 1; queries of
// several requests as rows of one matrix: Hydragen, arXiv 2402.05099, section 3.2).
#pragma once
#include "softmax.h"
#include "tile.h"

namespace relay {
namespace {

// Copies a unit's queries to the scratch and empties its sums.
template <class T>
void begin_unit(const relay_call& call, const Unit& unit, Scratch<T>& scratch) {
  for (int64_t r = 0; r < unit.rows; ++r) {
    const auto [token, head] = row_of(call, unit, r);
    const T* from = row_at<T>(call.q, place_of(call, token), head);  // [D]
    typename Dot<T>::Weight* to = scratch.q + r * scratch.q_row;
    if constexpr (Dot<T>::steps > 1)
      __builtin_memcpy(to, from, call.head_size * sizeof(T));
    else
      for (int64_t d = 0; d < call.head_size; d += W) store(to + d, widen(from + d));
    scratch.sums.row_max[r] = NEG_INF;
    scratch.sums.row_sum[r] = 0;
  }
  __builtin_memset(scratch.sums.out, 0, unit.rows * scratch.out_row * sizeof(float));
}

// R rows of a unit against a tile. Keys that some of the rows do not see have weight 0 there, so a
// value of theirs that is not finite spreads to these rows as well. next_keys, next_values: of the
// next tile, fetched beside the two products; a whole tile ahead, or the products wait for memory.
template <class T, int R>
void attend_rows(const relay_call& call, const Unit& unit, int64_t row, const Tile<T>& tile,
                 Scratch<T>& scratch, Prefetcher& next_keys, Prefetcher& next_values) {
  typedef typename Dot<T>::Weight Weight;
  const relay_sequence& sequence = call.sequences[unit.sequence];
  const int64_t share = call.heads / call.kv_heads, size = call.head_size;
  const float scale = (float)call.scale * LOG2E;
  int64_t sees[R];  // keys that a row sees; never fewer than the row before
  for (int r = 0; r < R; ++r) {
    sees[r] = sequence.keys;
    if (sequence.causal) sees[r] -= sequence.queries - 1 - (unit.row + row + r) / share;
  }
  // scores[r, j] = q_r . k_j scale log2(e)
  int64_t slots = 0;
  int used = 0;
  for (; used < tile.count && tile.runs[used].first < sees[R - 1]; ++used) {
    const Run<T>& run = tile.runs[used];
    const int64_t tokens = min(run.tokens, sees[R - 1] - run.first);
    product<T, R>(scratch.q + row * scratch.q_row, scratch.q_row, tile.operands[KEYS],
                  run.at[KEYS], size, tokens, run.there, next_keys,
                  [&](int r, int64_t token, vf x) {
                    store(scratch.scores + r * SCORES_ROW + run.slot + token, x * scale);
                  });
    slots = run.slot + rounded(tokens, PIECE);
  }
  if (used == 0) return;
  // weights[r, j] = 2 ** (scores[r, j] - m_r); slots that are padding or unseen get -inf before.
  for (int r = 0; r < R; ++r) {
    float* scores = scratch.scores + r * SCORES_ROW;
    for (int i = 0; i < used; ++i) {
      const Run<T>& run = tile.runs[i];
      const int64_t end = i + 1 < used ? tile.runs[i + 1].slot : slots;
      int64_t seen = sees[r] - run.first;
      seen = seen < 0 ? 0 : seen < run.tokens ? seen : run.tokens;
      for (int64_t s = run.slot + seen; s < end; ++s) scores[s] = NEG_INF;
    }
    float* out = scratch.sums.out + (row + r) * scratch.out_row;
    const float factor = online_softmax_update<T>(scores, slots, scratch.sums.row_max[row + r],
                                                  scratch.sums.row_sum[row + r]);
    if (factor != 1.0f)
      for (int64_t d = 0; d < size; d += W) store(out + d, load(out + d) * factor);
  }
  // out[r, d] += sum_j weights[r, j] v[j, d]
  for (int i = 0; i < used; ++i) {
    const Run<T>& run = tile.runs[i];
    const int64_t tokens = min(run.tokens, sees[R - 1] - run.first);
    const Weight* weights = (const Weight*)scratch.scores + run.slot / Dot<T>::steps;
    product<T, R>(weights, SCORES_ROW, tile.operands[VALUES], run.at[VALUES], tokens, size, size,
                  next_values, [&](int r, int64_t channel, vf x) {
                    float* out = scratch.sums.out + (row + r) * scratch.out_row + channel;
                    store(out, load(out) + x);
                  });
  }
}

// attend_rows of `rows` <= R rows.
template <class T, int R, class... Rest>
void attend_up_to(int64_t rows, Rest&... rest) {
  if (rows == R) return attend_rows<T, R>(rest...);
  if constexpr (R > 1) attend_up_to<T, R - 1>(rows, rest...);
}

// All rows of a unit against a tile, in nearly equal blocks: 6 and 5 rows, not 8 and 3.
template <class T>
void attend_tile(const relay_call& call, const Unit& unit, const Tile<T>& tile,
                 Scratch<T>& scratch, Prefetcher& next_keys, Prefetcher& next_values) {
  for (int64_t row = 0; row < unit.rows;) {
    const int64_t left = unit.rows - row;
    const int64_t rows = ceil_div(left, ceil_div(left, REGISTER_ROWS));
    attend_up_to<T, REGISTER_ROWS>(rows, call, unit, row, tile, scratch, next_keys, next_values);
    row += rows;
  }
}

// Kernels::attend.
template <class T>
void attend(const relay_call& call, const WorkIndex& from, const WorkIndex& to, char* memory,
            const Accumulator& carried_in, const Accumulator& carried_out) {
  if (same(from, to)) return;
  Scratch<T> scratch(memory, call.head_size);
  Cursor at(call, from);
  Tile<T> tiles[2];
  Tile<T>*now = &tiles[0], *soon = &tiles[1];
  Prefetcher next_keys, next_values;
  locate_tile(call, at.unit, from.tile, *now);
  begin_unit(call, at.unit, scratch);
  bool from_start = from.tile == 0;  // this part computes the unit from its first tile on
  for (bool more = true; more;) {
    Cursor after = at;
    after.next();
    more = !after.at_end() && !same(after.index, to);
    const int64_t row_blocks = ceil_div(at.unit.rows, REGISTER_ROWS);
    next_keys.clear(row_blocks);
    next_values.clear(row_blocks);
    if (more) {
      locate_tile(call, after.unit, after.index.tile, *soon);
      prefetch_tile(*soon, KEYS, call.head_size, next_keys);
      prefetch_tile(*soon, VALUES, call.head_size, next_values);
    }
    pack_tile(*now, scratch, call.head_size);
    attend_tile(call, at.unit, *now, scratch, next_keys, next_values);
    const bool last = at.index.tile == at.unit.tiles - 1;
    if (last && from_start) {
      write_unit<T>(call, at.unit, scratch.sums);
    } else if (last || !more) {
      const Accumulator& keep = from_start ? carried_out : carried_in;
      __builtin_memcpy(keep.out, scratch.sums.out, at.unit.rows * scratch.out_row * sizeof(float));
      __builtin_memcpy(keep.row_max, scratch.sums.row_max, at.unit.rows * sizeof(float));
      __builtin_memcpy(keep.row_sum, scratch.sums.row_sum, at.unit.rows * sizeof(float));
    }
    if (more && last) {
      begin_unit(call, after.unit, scratch);
      from_start = true;
    }
    at = after;
    Tile<T>* swap = now;
    now = soon;
    soon = swap;
  }
}

}  // namespace
}  // namespace relay
