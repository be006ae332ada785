// A tile of keys and values: located in memory, prefetched, packed where it must be.
#pragma once
#include "pack.h"
#include "prefetch.h"
#include "scratch.h"

namespace relay {
namespace {

// A run of a tile's tokens that lie in one KV block (or in dense memory).
template <class T>
struct Run {
  const T *k, *v;  // of its first token, in the layout of Tile::k and Tile::v
  int64_t first, tokens;
  int64_t there;  // tokens in memory from the first to the end of the block
  int64_t slot;   // its first column in a row of scores, a multiple of PIECE
};

template <class T>
struct Tile {
  relay_operand k, v;
  Run<T> runs[TILE_SLOTS / PIECE];
  int count = 0;
};

template <class T>
void locate_tile(const relay_call& call, const Unit& unit, int64_t index, Tile<T>& tile) {
  const relay_sequence& sequence = call.sequences[unit.sequence];
  const relay_layout& layout = call.layouts[sequence.layout];
  const relay_operand &k = tile.k = layout.k, &v = tile.v = layout.v;
  constexpr int EACH = Dot<T>::steps;
  tile.count = 0;
  int64_t slot = 0, end = (index + 1) * unit.tile_keys;
  if (end > unit.keys) end = unit.keys;
  for (int64_t t = index * unit.tile_keys; t < end;) {
    int64_t block = 0, in = t, there = sequence.keys - t;
    if (layout.block_tokens) {
      block = sequence.table[t / layout.block_tokens];
      in = t % layout.block_tokens;
      there = layout.block_tokens - in;
    }
    Run<T>& run = tile.runs[tile.count++];
    run.first = t;
    run.tokens = end - t < there ? end - t : there;
    run.there = there;
    run.slot = slot;
    // Tokens are the columns of keys and the steps of values.
    const int64_t k_in = k.kind == RELAY_PANELS ? in / W * k.panel
                         : k.kind == RELAY_ROWS ? in
                                                : in * k.stride;
    const int64_t v_in = v.kind == RELAY_PANELS ? in / EACH * v.stride
                         : v.kind == RELAY_ROWS ? in * v.stride
                                                : in;
    run.k = (const T*)k.base + block * k.block + unit.kv_head * k.head + k_in;
    run.v = (const T*)v.base + block * v.block + unit.kv_head * v.head + v_in;
    slot += rounded(run.tokens, PIECE);
    t += run.tokens;
  }
}

// Has a tile's keys or values fetched, run by run, where at least half of the span is theirs.
template <class T>
void prefetch_tile(const Tile<T>& tile, bool keys, int64_t head_size, Prefetcher& prefetcher) {
  for (int i = 0; i < tile.count; ++i) {
    const Run<T>& run = tile.runs[i];
    const relay_operand& operand = keys ? tile.k : tile.v;
    const int64_t steps = keys ? head_size : run.tokens, columns = keys ? run.tokens : head_size;
    int64_t span = steps * columns;
    if (operand.kind == RELAY_ROWS) span = (steps - 1) * operand.stride + columns;
    if (operand.kind == RELAY_ACROSS) span = (columns - 1) * operand.stride + steps;
    if (span < 2 * steps * columns) prefetcher.add(keys ? run.k : run.v, span * sizeof(T));
  }
}

// Packs keys and values whose columns lie across memory, which a product cannot read.
template <class T>
void pack_tile(Tile<T>& tile, Scratch<T>& scratch, int64_t head_size) {
  constexpr int EACH = Dot<T>::steps;
  relay_operand panels = {nullptr, W * EACH, W * head_size, 0, 0, RELAY_PANELS};
  if (tile.k.kind == RELAY_ACROSS) {
    for (int i = 0; i < tile.count; ++i) {
      Run<T>& run = tile.runs[i];
      T* to = scratch.k + run.slot * head_size;
      pack(to, panels, run.k, tile.k, head_size, run.tokens);
      run.k = to;
    }
    tile.k = panels;
  }
  panels.stride = head_size * EACH;
  panels.panel = W * EACH;
  if (tile.v.kind == RELAY_ACROSS) {
    for (int i = 0; i < tile.count; ++i) {
      Run<T>& run = tile.runs[i];
      T* to = scratch.v + run.slot * head_size;
      pack(to, panels, run.v, tile.v, run.tokens, head_size);
      run.v = to;
    }
    tile.v = panels;
  }
}

}  // namespace
}  // namespace relay
