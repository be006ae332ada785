// The work of a call and its order: the same for every instruction set.
//
// sequence -> row blocks (query tokens x query heads of one KV head, up to MAX_ROWS) -> KV heads
// -> tiles of keys. A unit is one KV head of one row block.
#pragma once
#include "abi.h"

namespace relay {

constexpr int64_t TILE_SLOTS = 384;  // keys of a tile, its runs padded to multiples of PIECE
constexpr int64_t PIECE = 32;        // tokens
constexpr int64_t MAX_ROWS = 128;
constexpr int64_t MAX_HEAD_SIZE = 256;

struct Unit {
  int64_t sequence, kv_head;
  int64_t row, rows;
  int64_t keys;  // that the last of the rows sees
  int64_t tile_keys;
  int64_t tiles;  // at least one, so that a unit without keys is written, too
};

// A tile of a unit.
struct WorkIndex {
  int64_t sequence, row_block, kv_head, tile;
};

// Internal linkage: the linker must not merge these with a copy compiled for instructions that the
// machine lacks.
namespace {

inline int64_t rounded(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

inline bool same(const WorkIndex& a, const WorkIndex& b) {
  return a.sequence == b.sequence && a.row_block == b.row_block && a.kv_head == b.kv_head &&
         a.tile == b.tile;
}

inline int64_t tile_keys_of(const relay_layout& layout) {
  const int64_t block = layout.block_tokens;
  if (block == 0 || block % PIECE == 0) return TILE_SLOTS;
  const int64_t padded = rounded(block, PIECE);
  return padded <= TILE_SLOTS ? TILE_SLOTS / padded * block : TILE_SLOTS - 2 * PIECE;
}

// The rows of one sequence in blocks of nearly equal size.
struct RowBlocks {
  int64_t rows, each, count;

  RowBlocks(const relay_call& call, const relay_sequence& sequence)
      : rows(sequence.queries * (call.heads / call.kv_heads)),
        each(0),
        count((rows + MAX_ROWS - 1) / MAX_ROWS) {
    if (count) each = rounded((rows + count - 1) / count, 8);
    if (each) count = (rows + each - 1) / each;
  }
};

inline Unit unit_at(const relay_call& call, const WorkIndex& index, const RowBlocks& blocks) {
  const relay_sequence& sequence = call.sequences[index.sequence];
  Unit unit;
  unit.sequence = index.sequence;
  unit.kv_head = index.kv_head;
  unit.row = index.row_block * blocks.each;
  unit.rows = blocks.rows - unit.row < blocks.each ? blocks.rows - unit.row : blocks.each;
  unit.keys = sequence.keys;
  if (sequence.causal) {
    const int64_t last = (unit.row + unit.rows - 1) / (call.heads / call.kv_heads);
    unit.keys -= sequence.queries - 1 - last;
    if (unit.keys < 0) unit.keys = 0;
  }
  unit.tile_keys = tile_keys_of(call.layouts[sequence.layout]);
  unit.tiles = (unit.keys + unit.tile_keys - 1) / unit.tile_keys;
  if (unit.tiles == 0) unit.tiles = 1;
  return unit;
}

// Goes through the tiles in order; sequences without queries have none.
struct Cursor {
  const relay_call* call;
  WorkIndex index;
  RowBlocks blocks;
  Unit unit;

  Cursor(const relay_call& c, const WorkIndex& start)
      : call(&c), index(start), blocks(c, c.sequences[start.sequence]), unit{} {
    enter_unit();
  }

  bool at_end() const { return index.sequence >= call->num_sequences; }

  // On to the next tile.
  void next() {
    if (++index.tile < unit.tiles) return;
    index.tile = 0;
    if (++index.kv_head == call->kv_heads) index.kv_head = 0, ++index.row_block;
    enter_unit();
  }

  // On to the next row block, for all KV heads.
  void next_row_block() {
    index.tile = index.kv_head = 0;
    ++index.row_block;
    enter_unit();
  }

 private:
  void enter_unit() {
    while (index.row_block >= blocks.count) {
      index.row_block = 0;
      if (++index.sequence >= call->num_sequences) return;
      blocks = RowBlocks(*call, call->sequences[index.sequence]);
    }
    unit = unit_at(*call, index, blocks);
  }
};

}  // namespace
}  // namespace relay
