// A tile of keys and values: located in memory, prefetched, packed where it must be; and the
// scratch memory of the thread that attends to it.
#pragma once
#include "../kernels.h"
#include "product.h"

namespace relay {
namespace {

// Floats of a row of scores. A product may write up to 8 vectors beyond the tile, and rows must
// not all fall into the same few cache sets.
constexpr int64_t SCORES_ROW = TILE_SLOTS + 9 * W;

template <class T>
struct Scratch {
  typedef typename Dot<T>::Weight Weight;
  static constexpr int64_t ROWS = MatrixProduct<T>::rows;
  int64_t q_row, out_row;  // elements of a row of q and of sums.out
  float* scores;           // [ROWS, SCORES_ROW], then softmax weights
  Weight* q;               // [MAX_ROWS, q_row]
  Accumulator sums;        // of MAX_ROWS
  T* packed[2];            // [TILE_SLOTS * D] each, a tile's keys and values
  MatrixProduct<T> product;

  Scratch(char* at, int64_t head_size) {
    q_row = head_size / Dot<T>::steps;
    out_row = rounded(head_size, PIECE);
    const auto take = [&](int64_t bytes) {
      char* here = at;
      at += rounded(bytes, 64);
      return here;
    };
    scores = (float*)take(ROWS * SCORES_ROW * sizeof(float));
    q = (Weight*)take(MAX_ROWS * q_row * sizeof(Weight));
    sums = accumulator_in((float*)take(accumulator_floats(head_size) * sizeof(float)), head_size);
    for (T*& operand : packed) operand = (T*)take(TILE_SLOTS * head_size * sizeof(T));
  }

  static constexpr int64_t bytes() {
    return 64 * 8 + ROWS * SCORES_ROW * 4 + 2 * MAX_ROWS * 4 +
           2 * MAX_ROWS * MAX_HEAD_SIZE * 4 + 2 * TILE_SLOTS * MAX_HEAD_SIZE * (int64_t)sizeof(T);
  }
};

// Packs keys or values, W columns at a time; steps and columns beyond those given become zeros.
//   packed: [panels, steps / Dot::steps, W, Dot::steps], strides in `panels`
//   given:  [steps, columns], strides and order in `operand`
template <class T>
void pack(void* packed, const relay_operand& panels, const void* given,
          const relay_operand& operand, int64_t steps, int64_t columns) {
  T* to = (T*)packed;
  const T* from = (const T*)given;
  constexpr int EACH = Dot<T>::steps;
  if (operand.kind == RELAY_PANELS) {  // of the same width: copied
    for (int64_t c = 0; c < columns; c += W)
      for (int64_t s = 0; s < steps; s += EACH)
        __builtin_memcpy(to + c / W * panels.panel + s / EACH * panels.stride,
                         from + c / W * operand.panel + s / EACH * operand.stride,
                         W * EACH * sizeof(T));
    return;
  }
  const bool across = operand.kind == RELAY_ACROSS;
  const int64_t column_stride = across ? operand.stride : 1;
  const int64_t step_stride = across ? 1 : operand.stride;
  for (int64_t c = 0; c < columns; c += W) {
    T* panel = to + c / W * panels.panel;
    const int64_t wide = min(columns - c, W);
    int64_t s = 0;
    if (wide == W)
      s = Dot<T>::pack(panel, panels.stride, from + c * column_stride, operand.stride, across,
                       steps);
    // panel[s / EACH, i, s % EACH] = from[s, c + i]
    for (; s < steps; s += EACH) {
      T* step = panel + s / EACH * panels.stride;
      for (int i = 0; i < W; ++i)
        for (int e = 0; e < EACH; ++e)
          step[i * EACH + e] = i < wide && s + e < steps
                                   ? from[(c + i) * column_stride + (s + e) * step_stride]
                                   : T{};
    }
  }
}

// The operands of a tile: tokens are the columns of keys and the steps of values.
enum { KEYS, VALUES };

// A run of a tile's tokens that lie in one KV block (or in dense memory).
template <class T>
struct Run {
  const T* at[2];  // its first token, in the layout of Tile::operands
  int64_t first, tokens;
  int64_t there;  // tokens in memory from the first to the end of the block
  int64_t slot;   // its first column in a row of scores, a multiple of PIECE
};

template <class T>
struct Tile {
  relay_operand operands[2];
  Run<T> runs[TILE_SLOTS / PIECE];
  int count = 0;
};

template <class T>
void locate_tile(const relay_call& call, const Unit& unit, int64_t index, Tile<T>& tile) {
  const relay_sequence& sequence = call.sequences[unit.sequence];
  const relay_layout& layout = call.layouts[sequence.layout];
  tile.operands[KEYS] = layout.k;
  tile.operands[VALUES] = layout.v;
  tile.count = 0;
  const int64_t begin = unit.first + index / unit.heads * unit.tile_keys;
  const int64_t kv_head = unit.kv_head + index % unit.heads;
  const int64_t end = min(begin + unit.tile_keys, unit.keys);
  for (int64_t t = begin, slot = 0; t < end;) {
    int64_t block = 0, in = t, there = sequence.keys - t;
    if (layout.block_tokens) {
      block = sequence.table[t / layout.block_tokens];
      in = t % layout.block_tokens;
      there = layout.block_tokens - in;
    }
    Run<T>& run = tile.runs[tile.count++];
    run.first = t;
    run.tokens = min(end - t, there);
    run.there = there;
    run.slot = slot;
    for (int i = 0; i < 2; ++i) {
      const relay_operand& x = tile.operands[i];
      run.at[i] = (const T*)x.base + block * x.block + kv_head * x.head +
                  token_offset(x, i == KEYS, in, W, Dot<T>::steps);
    }
    slot += rounded(run.tokens, PIECE);
    t += run.tokens;
  }
}

// Has a tile's keys or values fetched, run by run, where at least half of the span is theirs.
template <class T>
void prefetch_tile(const Tile<T>& tile, int which, int64_t head_size, Prefetcher& prefetcher) {
  const relay_operand& operand = tile.operands[which];
  for (int i = 0; i < tile.count; ++i) {
    const int64_t tokens = tile.runs[i].tokens;
    const int64_t steps = which == KEYS ? head_size : tokens;
    const int64_t columns = which == KEYS ? tokens : head_size;
    int64_t span = steps * columns;
    if (operand.kind == RELAY_ROWS) span = (steps - 1) * operand.stride + columns;
    if (operand.kind == RELAY_ACROSS) span = (columns - 1) * operand.stride + steps;
    if (span < 2 * steps * columns) prefetcher.add(tile.runs[i].at[which], span * sizeof(T));
  }
}

// Keys or values as floats in panels; columns beyond those in memory become zeros.
//   to:   [panels, steps, W], strides in `panels`
//   from: [steps, columns], strides and order in `operand`, RELAY_ROWS or RELAY_PANELS
template <class T>
void widen_operand(float* to, const relay_operand& panels, const T* from,
                   const relay_operand& operand, int64_t steps, int64_t columns, int64_t there) {
  constexpr int EACH = Dot<T>::steps;
  for (int64_t c = 0; c < columns; c += W) {
    float* panel = to + c / W * panels.panel;
    if (operand.kind == RELAY_PANELS) {
      const T* at = from + c / W * operand.panel;
      for (int64_t s = 0; s < steps; s += EACH) {
        vf x[EACH];
        widen_steps(at + s / EACH * operand.stride, x);
        for (int e = 0; e < EACH; ++e)
          if (s + e < steps) store(panel + (s + e) * panels.stride, x[e]);
      }
    } else if (there - c >= W) {
      for (int64_t s = 0; s < steps; ++s)
        store(panel + s * panels.stride, widen(from + s * operand.stride + c));
    } else {
      for (int64_t s = 0; s < steps; ++s)
        store(panel + s * panels.stride, widen_some(from + s * operand.stride + c, there - c));
    }
  }
}

// A packed tile as floats in the scratch. Runs that adjoin there become one if `join`.
template <class T>
void widen_tile(const Tile<T>& tile, const Scratch<float>& scratch, int64_t head_size, bool join,
                Tile<float>& wide) {
  wide.count = 0;
  for (int which = 0; which < 2; ++which)
    wide.operands[which] = panels_of(which == KEYS, head_size, W, 1);
  for (int i = 0; i < tile.count; ++i) {
    const Run<T>& run = tile.runs[i];
    float* at[2];
    for (int which = 0; which < 2; ++which) {
      const bool keys = which == KEYS;
      at[which] = scratch.packed[which] + run.slot * head_size;
      widen_operand<T>(at[which], wide.operands[which], run.at[which], tile.operands[which],
                       keys ? head_size : run.tokens, keys ? run.tokens : head_size,
                       keys ? run.there : head_size);
    }
    Run<float>* last = wide.count ? &wide.runs[wide.count - 1] : nullptr;
    if (join && last && last->slot + last->tokens == run.slot)
      last->tokens = last->there += run.tokens;
    else
      wide.runs[wide.count++] = {{at[KEYS], at[VALUES]}, run.first, run.tokens, run.tokens,
                                 run.slot};
  }
}

// Packs keys and values whose columns lie across memory, which a product cannot read.
template <class T>
void pack_tile(Tile<T>& tile, Scratch<T>& scratch, int64_t head_size) {
  for (int which = 0; which < 2; ++which) {
    relay_operand& operand = tile.operands[which];
    if (operand.kind != RELAY_ACROSS) continue;
    const relay_operand panels = panels_of(which == KEYS, head_size, W, Dot<T>::steps);
    for (int i = 0; i < tile.count; ++i) {
      Run<T>& run = tile.runs[i];
      T* to = scratch.packed[which] + run.slot * head_size;
      pack<T>(to, panels, run.at[which], operand, which == KEYS ? head_size : run.tokens,
           which == KEYS ? run.tokens : head_size);
      run.at[which] = to;
    }
    operand = panels;
  }
}

}  // namespace
}  // namespace relay
