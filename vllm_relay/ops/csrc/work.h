// The work of a call and its order: the same for every instruction set.
//
// sequence -> row blocks (query tokens x query heads of one KV head, up to MAX_ROWS) -> units: one
// KV head of a row block, or all of them -> tiles of keys.
#pragma once
#include <vector>

#include "abi.h"

namespace relay {

constexpr int64_t TILE_SLOTS = 384;  // keys of a tile at most, its runs padded to PIECE
// A unit of few rows waits for memory: in smaller tiles, what is fetched a tile ahead is still in
// the nearest caches when it is read.
constexpr int64_t MOST_FEW_ROWS = 16, FEW_ROWS_SLOTS = 128;
constexpr int64_t PIECE = 32;        // tokens
constexpr int64_t MAX_ROWS = 128;
constexpr int64_t MAX_HEAD_SIZE = 512;

struct Unit {
  int64_t sequence;
  int64_t kv_head, heads;  // KV heads from kv_head on
  int64_t row, rows;       // of each KV head
  int64_t first;  // key that one of the rows sees, or one before it
  int64_t keys;   // to the last that one of the rows sees
  int64_t tile_keys;
  int64_t tiles;  // of all its heads, which take turns; at least one of each, so that a unit
                  // without keys is written, too

  // Rows of all its KV heads, one head after the other.
  int64_t all_rows() const { return heads * rows; }
};

// A tile of a unit.
struct WorkIndex {
  int64_t sequence, row_block, kv_head, tile;
};

// Sums of a unit before they are normalised: O, m and l of FlashAttention's Alg. 1, in base 2.
struct Accumulator {
  float* out;      // [rows, head_size rounded to PIECE]
  float* row_max;  // [rows]
  float* row_sum;  // [rows]
};

// A unit whose tiles went to several parts, and their sums.
struct SplitUnit {
  Unit unit;
  std::vector<Accumulator> parts;
};

// Bounds of parts of about equal cost, for threads: part i goes from the i-th tile to before the
// (i + 1)-th. They depend on the call alone: the same number of threads gives the same bits.
std::vector<WorkIndex> partition(const relay_call& call);

// carried_in, carried_out: of each part, see Kernels::attend.
std::vector<SplitUnit> split_units(const relay_call& call, const std::vector<WorkIndex>& bounds,
                                   const std::vector<Accumulator>& carried_in,
                                   const std::vector<Accumulator>& carried_out);

// Internal linkage: the linker must not merge these with a copy compiled for instructions that the
// machine lacks.
namespace {

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// x in [0, most].
inline int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : min(x, most); }

inline int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

inline int64_t rounded(int64_t x, int64_t to) { return ceil_div(x, to) * to; }

// Rows of the first of nearly equal blocks with at most `most` rows each: 6 and 5, not 8 and 3.
inline int64_t even_block(int64_t rows, int64_t most) {
  return ceil_div(rows, ceil_div(rows, most));
}

template <class T>
inline T* row_at(const relay_rows& rows, int64_t token, int64_t head) {
  return (T*)rows.base + token * rows.token + head * rows.head;
}

// The row of q and of fused that a token has.
inline int64_t place_of(const relay_call& call, int64_t token) {
  return call.places ? call.places[token] : token;
}

// A KV head's packed keys or values: vectors of `width` columns, of `each` steps. Tokens are the
// columns of keys and the steps of values; either way a tile is contiguous.
inline relay_operand panels_of(bool keys, int64_t head_size, int64_t width, int64_t each) {
  if (keys) return {nullptr, width * each, width * head_size, 0, 0, RELAY_PANELS};
  return {nullptr, head_size * each, width * each, 0, 0, RELAY_PANELS};
}

// Elements before a token of a KV head's keys or values.
inline int64_t token_offset(const relay_operand& x, bool keys, int64_t token, int64_t width,
                            int64_t each) {
  if (x.kind == RELAY_PANELS) return keys ? token / width * x.panel : token / each * x.stride;
  return (x.kind == RELAY_ROWS) == keys ? token : token * x.stride;
}

// Accumulators of MAX_ROWS rows.
inline int64_t accumulator_floats(int64_t head_size) {
  return MAX_ROWS * (rounded(head_size, PIECE) + 2);
}

// memory: [accumulator_floats]
inline Accumulator accumulator_in(float* memory, int64_t head_size) {
  float* row_max = memory + MAX_ROWS * rounded(head_size, PIECE);
  return {memory, row_max, row_max + MAX_ROWS};
}

inline bool same_unit(const WorkIndex& a, const WorkIndex& b) {
  return a.sequence == b.sequence && a.row_block == b.row_block && a.kv_head == b.kv_head;
}

inline bool same(const WorkIndex& a, const WorkIndex& b) {
  return same_unit(a, b) && a.tile == b.tile;
}

inline int64_t tile_keys_of(const relay_layout& layout, int64_t rows) {
  const int64_t block = layout.block_tokens;
  const int64_t slots = rows <= MOST_FEW_ROWS ? FEW_ROWS_SLOTS : TILE_SLOTS;
  if (block == 0 || block % PIECE == 0) return slots;
  const int64_t padded = rounded(block, PIECE);
  return padded <= slots ? slots / padded * block : slots - 2 * PIECE;
}

// The rows of one sequence in blocks of nearly equal size.
struct RowBlocks {
  int64_t rows, each, count;

  RowBlocks(const relay_call& call, const relay_sequence& sequence)
      : rows(sequence.queries * (call.heads / call.kv_heads)),
        each(0),
        count(ceil_div(rows, MAX_ROWS)) {
    if (count) each = rounded(ceil_div(rows, count), 8);
    if (each) count = ceil_div(rows, each);
  }
};

// The row's token, counted in the sequence.
inline int64_t query_of(const relay_call& call, int64_t row) {
  return row / (call.heads / call.kv_heads);
}

// Keys [first, end) of a sequence.
struct Seen {
  int64_t first, end;
};

// Keys that a sequence's query sees.
inline Seen seen_by(const relay_call& call, const relay_sequence& sequence, int64_t query) {
  Seen seen = {0, sequence.keys};
  if (sequence.causal) seen.end -= sequence.queries - 1 - query;
  if (call.scores.window) {
    const int64_t position = call.positions[sequence.first + query];
    seen.first = position - sequence.start - call.scores.window + 1;
  }
  seen.end = max(seen.end, 0);
  return {clamp(seen.first, seen.end), seen.end};
}

inline Unit unit_at(const relay_call& call, const WorkIndex& index, const RowBlocks& blocks) {
  const relay_sequence& sequence = call.sequences[index.sequence];
  Unit unit;
  unit.sequence = index.sequence;
  unit.kv_head = index.kv_head;
  unit.row = index.row_block * blocks.each;
  unit.rows = min(blocks.rows - unit.row, blocks.each);
  // The last query sees up to the last key; with a window, any may see the first.
  const int64_t last = query_of(call, unit.row + unit.rows - 1);
  Seen seen = seen_by(call, sequence, last);
  for (int64_t query = query_of(call, unit.row); call.scores.window && query < last; ++query)
    seen.first = min(seen.first, seen_by(call, sequence, query).first);
  const relay_layout& layout = call.layouts[sequence.layout];
  const int64_t block = layout.block_tokens;
  unit.first = seen.first - seen.first % (block % PIECE ? block : PIECE);
  unit.keys = seen.end;
  unit.tile_keys = tile_keys_of(layout, unit.rows);
  // Few rows wait for memory, in which the heads of a KV block are adjacent.
  const bool few = unit.rows <= MOST_FEW_ROWS && call.kv_heads * unit.rows <= MAX_ROWS;
  unit.heads = few && block ? call.kv_heads : 1;
  const int64_t tiles = ceil_div(unit.keys - unit.first, unit.tile_keys);
  unit.tiles = unit.heads * max(tiles, 1);
  return unit;
}

struct TokenHead {
  int64_t token, head;
};

// The query token and head of one of a unit's all_rows.
inline TokenHead row_of(const relay_call& call, const Unit& unit, int64_t row) {
  const int64_t share = call.heads / call.kv_heads, at = unit.row + row % unit.rows;
  const int64_t kv_head = unit.kv_head + row / unit.rows;
  return {call.sequences[unit.sequence].first + at / share, kv_head * share + at % share};
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
    if ((index.kv_head += unit.heads) == call->kv_heads) index.kv_head = 0, ++index.row_block;
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
