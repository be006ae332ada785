// How a call is cut into work, and the work into equal parts: the same for every instruction set.
#pragma once
#include "abi.h"

namespace relay {

constexpr int64_t SLOTS = 384, PIECE = 32;
// Query rows of a unit: those of all tokens and query heads that read one KV head, in parts.
constexpr int64_t MOST_ROWS = 128;
constexpr int64_t MOST_PIECES = SLOTS / PIECE;
constexpr int64_t MOST_HEAD = 256;

// One KV head of some rows of a sequence.
struct Unit {
  int64_t sequence, head;
  int64_t row, rows;
  int64_t keys;   // that the last of the rows sees
  int64_t tile;   // keys of a tile
  int64_t tiles;  // at least one, so that a unit without keys is written, too
};

// A place in the work: a tile of a unit.
struct Place {
  int64_t sequence, part, head, tile;
};

// Sums of a unit that are not the whole: of the rows' outputs, maxima and weights.
struct Sums {
  float *out, *peak, *weight;
};

// What one instruction set offers, per dtype.
struct Kernels {
  const char* name;
  // Attend from one place up to another. Units begun or ended elsewhere: to `begun`, `ended`.
  void (*attend[3])(const relay_call&, const Place& from, const Place& to, char* scratch,
                    const Sums& begun, const Sums& ended);
  // Merge the sums of a unit's parts and write its result.
  void (*finish[3])(const relay_call&, const Unit&, const Sums* parts, int64_t count);
  // Tokens [from, to) of a merge into this dtype, of partials of the same or in float.
  void (*fuse[3])(const relay_fuse_call&, int64_t from, int64_t to);
  void (*fuse_float[3])(const relay_fuse_call&, int64_t from, int64_t to);
  // One block or dense run of tokens of one KV head, values or keys.
  void (*pack[3])(void* to, const relay_operand& panels, const void* from,
                  const relay_operand& operand, int64_t steps, int64_t columns);
  int64_t width;    // columns of a panel
  int64_t each[3];  // steps that are packed together
  int64_t scratch;  // bytes
};

// Every file that is compiled has these for itself: the linker must not take one with instructions
// that the machine lacks.
namespace {

inline int64_t rounded(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

inline int64_t tile_of(const relay_layout& layout) {
  const int64_t block = layout.block_tokens;
  if (block == 0 || block % PIECE == 0) return SLOTS;
  const int64_t padded = rounded(block, PIECE);
  return padded <= SLOTS ? SLOTS / padded * block : SLOTS - 2 * PIECE;
}

// The rows of one sequence, in parts of nearly equal size.
struct Parts {
  int64_t rows, each, count;

  Parts(const relay_call& call, const relay_sequence& sequence)
      : rows(sequence.queries * (call.heads / call.kv_heads)),
        each(0),
        count((rows + MOST_ROWS - 1) / MOST_ROWS) {
    if (count) each = rounded((rows + count - 1) / count, 8);
    if (each) count = (rows + each - 1) / each;
  }
};

inline Unit unit_of(const relay_call& call, int64_t index, const Parts& parts, int64_t part,
                    int64_t head) {
  const relay_sequence& sequence = call.sequences[index];
  Unit unit;
  unit.sequence = index;
  unit.head = head;
  unit.row = part * parts.each;
  unit.rows = parts.rows - unit.row < parts.each ? parts.rows - unit.row : parts.each;
  unit.keys = sequence.keys;
  if (sequence.causal) {
    const int64_t last = (unit.row + unit.rows - 1) / (call.heads / call.kv_heads);
    unit.keys -= sequence.queries - 1 - last;
    if (unit.keys < 0) unit.keys = 0;
  }
  unit.tile = tile_of(call.layouts[sequence.layout]);
  unit.tiles = (unit.keys + unit.tile - 1) / unit.tile;
  if (unit.tiles == 0) unit.tiles = 1;
  return unit;
}

// What a tile costs, about: reading a key and its value from memory takes as long as a dozen rows
// that use it, and every tile something besides.
inline int64_t cost_of_tile(const Unit& unit, int64_t tile) {
  int64_t keys = unit.keys - tile * unit.tile;
  if (keys > unit.tile) keys = unit.tile;
  return (keys + 16) * (unit.rows + 12);
}

inline int64_t cost_of(const Unit& unit) {
  return (unit.tiles - 1) * cost_of_tile(unit, 0) + cost_of_tile(unit, unit.tiles - 1);
}

inline bool same(const Place& a, const Place& b) {
  return a.sequence == b.sequence && a.part == b.part && a.head == b.head && a.tile == b.tile;
}

// Goes through the work in order; sequences without queries have none.
struct Cursor {
  const relay_call* call;
  Place place;
  Parts parts;
  Unit unit;

  Cursor(const relay_call& c, const Place& start)
      : call(&c), place(start), parts(c, c.sequences[start.sequence]), unit{} {
    settle();
  }

  bool at_end() const { return place.sequence >= call->num_sequences; }

  // On to the next tile.
  void next() {
    if (++place.tile == unit.tiles) next_unit();
  }

  void next_unit() {
    place.tile = 0;
    if (++place.head == call->kv_heads) place.head = 0, ++place.part;
    settle();
  }

  // On to the next part of the rows, for all KV heads.
  void next_part() {
    place.tile = place.head = 0;
    ++place.part;
    settle();
  }

 private:
  void settle() {
    while (place.part >= parts.count) {
      place.part = 0;
      if (++place.sequence >= call->num_sequences) return;
      parts = Parts(*call, call->sequences[place.sequence]);
    }
    unit = unit_of(*call, place.sequence, parts, place.part, place.head);
  }
};

}  // namespace
}  // namespace relay
