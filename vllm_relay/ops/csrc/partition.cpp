#include <algorithm>

#include "work.h"

namespace relay {
namespace {

// Work below this is not worth waking threads for, in units of unit_cost.
constexpr int64_t LEAST_PART = 20000;
// No two threads run equally fast all the time, and the faster takes more parts.
constexpr int64_t PARTS_PER_THREAD = 4;

// Reading a key and its value from memory takes about as long as a dozen rows that use it, and a
// tile about as long as 16 keys besides.
int64_t tile_cost(const Unit& unit, int64_t tile) {
  const int64_t before = unit.first + tile / unit.heads * unit.tile_keys;
  const int64_t keys = std::min(unit.keys - before, unit.tile_keys);
  return (keys + 16) * (unit.rows + 12);
}

int64_t unit_cost(const Unit& unit) {
  return (unit.tiles - unit.heads) * tile_cost(unit, 0) +
         unit.heads * tile_cost(unit, unit.tiles - 1);
}

int64_t row_block_cost(const relay_call& call, const Unit& unit) {
  return call.kv_heads / unit.heads * unit_cost(unit);
}

}  // namespace

std::vector<WorkIndex> partition(const relay_call& call) {
  const WorkIndex end = {call.num_sequences, 0, 0, 0};
  int64_t total = 0;
  Cursor at(call, WorkIndex{0, 0, 0, 0});
  // The cursor has skipped sequences without queries.
  const WorkIndex start = at.at_end() ? end : at.index;
  for (; !at.at_end(); at.next_row_block()) total += row_block_cost(call, at.unit);
  int64_t parts = 1;
  if (call.threads > 1 && total >= LEAST_PART)
    parts = std::max(call.threads, std::min(PARTS_PER_THREAD * call.threads, total / LEAST_PART));
  std::vector<WorkIndex> bounds = {start};
  int64_t before = 0;
  at = Cursor(call, WorkIndex{0, 0, 0, 0});
  for (int64_t i = 1; i < parts; ++i) {
    const int64_t wanted = total / parts * i + total % parts * i / parts;
    while (!at.at_end() && before + row_block_cost(call, at.unit) <= wanted) {
      before += row_block_cost(call, at.unit);
      at.next_row_block();
    }
    if (at.at_end()) break;
    const int64_t unit = unit_cost(at.unit);
    WorkIndex bound = at.index;
    bound.kv_head = (wanted - before) / unit;
    bound.tile = std::min((wanted - before) % unit / tile_cost(at.unit, 0), at.unit.tiles - 1);
    bounds.push_back(bound);
  }
  bounds.push_back(end);
  return bounds;
}

std::vector<SplitUnit> split_units(const relay_call& call, const std::vector<WorkIndex>& bounds,
                                   const std::vector<Accumulator>& carried_in,
                                   const std::vector<Accumulator>& carried_out) {
  std::vector<SplitUnit> found;
  for (size_t i = 1; i + 1 < bounds.size(); ++i) {
    if (bounds[i].tile == 0) continue;
    const WorkIndex first = bounds[i];
    // The part before the first bound within the unit began it.
    SplitUnit split = {Cursor(call, first).unit, {carried_out[i - 1]}};
    for (; i + 1 < bounds.size() && same_unit(bounds[i], first); ++i)
      if (!same(bounds[i], bounds[i + 1])) split.parts.push_back(carried_in[i]);
    --i;
    found.push_back(split);
  }
  return found;
}

}  // namespace relay
