// Attention of units of work, tile by tile (FlashAttention, arXiv 2205.14135, Alg. 1; queries of
// several requests as rows of one matrix: Hydragen, arXiv 2402.05099, section 3.2).
#pragma once
#include <time.h>

#include "softmax.h"
#include "tile.h"

namespace relay {
namespace {

// Least rows of a unit whose tiles are widened: with fewer, widening takes longer than it saves.
constexpr int64_t WIDE_ROWS = 16;

// Nanoseconds of a product of REGISTER_ROWS rows in the first-level cache, the least of several.
//   b: [64 columns, 64 steps], in panels of zeros
template <class T>
int64_t product_ns(const T* b) {
  constexpr int64_t SIZE = 64, TIMES = 8;
  typename Dot<T>::Weight a[REGISTER_ROWS * SIZE] = {};
  float out[REGISTER_ROWS * SIZE];
  const relay_operand panels = panels_of(true, SIZE, W, Dot<T>::steps);
  int64_t least = INT64_MAX;
  for (int i = 0; i < TIMES; ++i) {
    Prefetcher none;
    timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    __asm__ volatile("" : : "r"(a) : "memory");  // the compiler must not know the factors
    product<T, REGISTER_ROWS, false>(a, SIZE, panels, b, SIZE, SIZE, SIZE, none, out, SIZE);
    __asm__ volatile("" : : "r"(out) : "memory");
    clock_gettime(CLOCK_MONOTONIC, &end);
    least = min(least, (end.tv_sec - begin.tv_sec) * 1000000000 + end.tv_nsec - begin.tv_nsec);
  }
  return least;
}

// Whether floats are multiplied faster than T. vdpbf16ps has twice the rate of an FMA on some
// machines and half of it on others, so it is timed, once.
template <class T>
bool floats_are_faster() {
  if constexpr (Dot<T>::steps == 1) {
    return true;  // elements are widened at every read
  } else {
    static const bool faster = [] {
      const float zeros[64 * 64] = {};
      return product_ns<float>(zeros) < product_ns<T>((const T*)zeros);
    }();
    return faster;
  }
}

// Whether the tiles of T are widened to floats, once for all rows of a unit that has WIDE_ROWS.
template <class T>
bool widens() {
  if constexpr (WIDENS && sizeof(T) < sizeof(float) && MatrixProduct<T>::rows == REGISTER_ROWS)
    return floats_are_faster<T>();
  else
    return false;
}

// Copies a unit's queries to the scratch and empties its sums. T: of the call; In: of products.
template <class T, class In>
void begin_unit(const relay_call& call, const Unit& unit, Scratch<In>& scratch) {
  for (int64_t r = 0; r < unit.all_rows(); ++r) {
    const auto [token, head] = row_of(call, unit, r);
    const T* from = row_at<T>(call.q, place_of(call, token), head);  // [D]
    typename Dot<In>::Weight* to = scratch.q + r * scratch.q_row;
    if constexpr (Dot<In>::steps > 1)
      __builtin_memcpy(to, from, call.head_size * sizeof(T));
    else
      for (int64_t d = 0; d < call.head_size; d += W) store(to + d, widen(from + d));
    scratch.sums.row_max[r] = NEG_INF;
    scratch.sums.row_sum[r] = 0;
  }
  __builtin_memset(scratch.sums.out, 0, unit.all_rows() * scratch.out_row * sizeof(float));
}

// Up to MatrixProduct::rows rows of a unit against a tile. Keys that some of the rows do not see
// have weight 0 there, so a value of theirs that is not finite spreads to these rows as well.
// next_keys, next_values: of the next tile, fetched beside the work; a whole tile ahead, or the
// products wait for memory.
template <class T>
void attend_rows(const relay_call& call, const Unit& unit, int64_t row, int64_t rows,
                 const Tile<T>& tile, Scratch<T>& scratch, Prefetcher& next_keys,
                 Prefetcher& next_values) {
  typedef typename Dot<T>::Weight Weight;
  const relay_sequence& sequence = call.sequences[unit.sequence];
  const int64_t size = call.head_size;
  const float scale = score_factor(call.scores);
  Seen seen[Scratch<T>::ROWS], by_any = {INT64_MAX, 0}, by_all = {0, INT64_MAX};
  const int64_t share = call.heads / call.kv_heads;  // rows of a query
  const int64_t first_row = unit.row + row % unit.rows;
  for (int64_t r = 0, query = query_of(call, first_row); r < rows; ++query) {
    const Seen by_query = seen_by(call, sequence, query);
    by_any = {min(by_any.first, by_query.first), max(by_any.end, by_query.end)};
    by_all = {max(by_all.first, by_query.first), min(by_all.end, by_query.end)};
    const int64_t end = min(rows, (query + 1) * share - first_row);
    while (r < end) seen[r++] = by_query;
  }
  int begin = 0;
  while (begin < tile.count && tile.runs[begin].first + tile.runs[begin].tokens <= by_any.first)
    ++begin;
  // scores[r, j] = q_r . k_j
  int64_t slots = 0;
  int used = begin;
  for (; used < tile.count && tile.runs[used].first < by_any.end; ++used) {
    const Run<T>& run = tile.runs[used];
    const int64_t tokens = min(run.tokens, by_any.end - run.first);
    scratch.product.template run<false>(rows, scratch.q + row * scratch.q_row, scratch.q_row,
                                        tile.operands[KEYS], run.at[KEYS], size, tokens, run.there,
                                        next_keys, scratch.scores + run.slot, SCORES_ROW);
    slots = run.slot + rounded(tokens, PIECE);
  }
  if (used == begin) return;
  // scores[r, j]: soft cap and ALiBi; -inf in slots that are padding or unseen
  const int64_t first_slot = tile.runs[begin].slot;
  for (int i = begin; i < used; ++i) {
    const Run<T>& run = tile.runs[i];
    const int64_t end = i + 1 < used ? tile.runs[i + 1].slot : slots;
    const bool all_seen = by_all.first <= run.first && run.first + run.tokens <= by_all.end &&
                          end - run.slot == run.tokens;
    if (bends(call.scores))
      for (int64_t r = 0; r < rows; ++r)
        bend_scores(call, unit, row + r, run.first, scratch.scores + r * SCORES_ROW + run.slot,
                    end - run.slot);
    if (all_seen) continue;
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = scratch.scores + r * SCORES_ROW;
      const int64_t from = clamp(seen[r].first - run.first, run.tokens);
      const int64_t to = clamp(seen[r].end - run.first, run.tokens);
      for (int64_t s = run.slot; s < run.slot + from; ++s) scores[s] = NEG_INF;
      for (int64_t s = run.slot + to; s < end; ++s) scores[s] = NEG_INF;
    }
  }
  // weights[r, j] = 2 ** (scale scores[r, j] - m_r)
  for (int64_t r = 0, some; r < rows; r += some) {
    some = even_block(rows - r, SOFTMAX_ROWS);
    float factor[SOFTMAX_ROWS];
    online_softmax_up_to<T>(some, scratch.scores + r * SCORES_ROW + first_slot, SCORES_ROW,
                            slots - first_slot, scale, scratch.sums.row_max + row + r,
                            scratch.sums.row_sum + row + r, factor, next_values);
    for (int64_t i = 0; i < some; ++i) {
      float* out = scratch.sums.out + (row + r + i) * scratch.out_row;
      if (factor[i] != 1.0f)
        for (int64_t d = 0; d < size; d += W) store(out + d, load(out + d) * factor[i]);
    }
  }
  // out[r, d] += sum_j weights[r, j] v[j, d]
  for (int i = begin; i < used; ++i) {
    const Run<T>& run = tile.runs[i];
    const int64_t tokens = min(run.tokens, by_any.end - run.first);
    // The weights of a row lie where its first score was.
    const Weight* weights = (const Weight*)(scratch.scores + first_slot);
    weights += (run.slot - first_slot) / Dot<T>::steps;
    scratch.product.template run<true>(rows, weights, SCORES_ROW, tile.operands[VALUES],
                                       run.at[VALUES], tokens, size, size, next_values,
                                       scratch.sums.out + row * scratch.out_row, scratch.out_row);
  }
}

// A unit's rows of one KV head against a tile of it.
template <class T>
void attend_tile(const relay_call& call, const Unit& unit, int64_t index, const Tile<T>& tile,
                 Scratch<T>& scratch, Prefetcher& next_keys, Prefetcher& next_values) {
  const int64_t first = index % unit.heads * unit.rows;
  for (int64_t row = 0, rows; row < unit.rows; row += rows) {
    rows = even_block(unit.rows - row, Scratch<T>::ROWS);
    attend_rows<T>(call, unit, first + row, rows, tile, scratch, next_keys, next_values);
  }
}

// Kernels::attend.
template <class T>
void attend(const relay_call& call, const WorkIndex& from, const WorkIndex& to, char* memory,
            const Accumulator& carried_in, const Accumulator& carried_out) {
  if (same(from, to)) return;
  Scratch<T> scratch(memory, call.head_size);
  Scratch<float> wide(memory + Scratch<T>::bytes(), call.head_size);
  wide.sums = scratch.sums;
  const int64_t wide_rows = widens<T>() ? WIDE_ROWS : INT64_MAX;
  const auto begin = [&](const Unit& unit) {
    if (unit.rows >= wide_rows)
      begin_unit<T>(call, unit, wide);
    else
      begin_unit<T>(call, unit, scratch);
  };
  Tile<float> wide_tile;
  Cursor at(call, from);
  Tile<T> tiles[2];
  Tile<T>*now = &tiles[0], *soon = &tiles[1];
  Prefetcher next_keys, next_values;
  locate_tile(call, at.unit, from.tile, *now);
  begin(at.unit);
  bool from_start = from.tile == 0;  // this part computes the unit from its first tile on
  for (bool more = true; more;) {
    Cursor after = at;
    after.next();
    more = !after.at_end() && !same(after.index, to);
    const int64_t row_blocks = ceil_div(at.unit.rows, Scratch<T>::ROWS);
    next_keys.clear(row_blocks);
    next_values.clear(row_blocks);
    if (more) {
      locate_tile(call, after.unit, after.index.tile, *soon);
      prefetch_tile(*soon, KEYS, call.head_size, next_keys);
      prefetch_tile(*soon, VALUES, call.head_size, next_values);
    }
    pack_tile(*now, scratch, call.head_size);
    if (at.unit.rows >= wide_rows) {
      // With a window, rows leave out the runs before it.
      widen_tile(*now, wide, call.head_size, !call.scores.window, wide_tile);
      attend_tile(call, at.unit, at.index.tile, wide_tile, wide, next_keys, next_values);
    } else {
      attend_tile(call, at.unit, at.index.tile, *now, scratch, next_keys, next_values);
    }
    const bool last = at.index.tile == at.unit.tiles - 1;
    if (last && from_start) {
      write_unit<T>(call, at.unit, scratch.sums);
    } else if (last || !more) {
      const Accumulator& keep = from_start ? carried_out : carried_in;
      const int64_t rows = at.unit.all_rows();
      __builtin_memcpy(keep.out, scratch.sums.out, rows * scratch.out_row * sizeof(float));
      __builtin_memcpy(keep.row_max, scratch.sums.row_max, rows * sizeof(float));
      __builtin_memcpy(keep.row_sum, scratch.sums.row_sum, rows * sizeof(float));
    }
    if (more && last) {
      begin(after.unit);
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
