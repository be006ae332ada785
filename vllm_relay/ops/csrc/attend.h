// Attention of units of work, tile by tile.
#pragma once
#include "pack.h"
#include "softmax.h"
#include "work.h"

namespace relay {
namespace {

// A product may write up to 8 vectors beyond; rows must not all fall into the same few cache sets.
constexpr int64_t SCORES = SLOTS + 9 * W;
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

// A run of a tile's tokens that lie in one block.
template <class T>
struct Piece {
  const T *k, *v;
  int64_t first, tokens, there;  // there: tokens in memory from here to the end of the block
  int64_t slot;
};

template <class T>
struct Tile {
  relay_operand k, v;
  Piece<T> pieces[MOST_PIECES];
  int count = 0;
};

// What a thread works with.
template <class T>
struct Room {
  typedef typename Steps<T>::Weight Weight;
  int64_t q_row, out_row;
  Weight* q;              // [MOST_ROWS, q_row]
  float *out;             // [MOST_ROWS, out_row]
  float *peak, *weight;   // [MOST_ROWS]
  float* scores;          // [ROWS, SCORES]
  T *k, *v;               // a packed tile of each

  Room(char* at, int64_t head_size) {
    q_row = head_size / Steps<T>::each;
    out_row = rounded(head_size, PIECE);
    const auto take = [&](int64_t bytes) {
      char* here = at;
      at += rounded(bytes, 64);
      return here;
    };
    scores = (float*)take(ROWS * SCORES * sizeof(float));
    peak = (float*)take(MOST_ROWS * sizeof(float));
    weight = (float*)take(MOST_ROWS * sizeof(float));
    q = (Weight*)take(MOST_ROWS * q_row * sizeof(Weight));
    out = (float*)take(MOST_ROWS * out_row * sizeof(float));
    k = (T*)take(SLOTS * head_size * sizeof(T));
    v = (T*)take(SLOTS * head_size * sizeof(T));
  }

  static constexpr int64_t bytes() {
    return 64 * 8 + ROWS * SCORES * 4 + 2 * MOST_ROWS * 4 + 2 * MOST_ROWS * MOST_HEAD * 4 +
           2 * SLOTS * MOST_HEAD * (int64_t)sizeof(T);
  }
};

template <class T>
void find_tile(const relay_call& call, const Unit& unit, int64_t index, Tile<T>& tile) {
  const relay_sequence& sequence = call.sequences[unit.sequence];
  const relay_layout& layout = call.layouts[sequence.layout];
  const relay_operand &k = tile.k = layout.k, &v = tile.v = layout.v;
  constexpr int EACH = Steps<T>::each;
  tile.count = 0;
  int64_t slot = 0, end = (index + 1) * unit.tile;
  if (end > unit.keys) end = unit.keys;
  for (int64_t t = index * unit.tile; t < end;) {
    int64_t block = 0, in = t, there = sequence.keys - t;
    if (layout.block_tokens) {
      block = sequence.table[t / layout.block_tokens];
      in = t % layout.block_tokens;
      there = layout.block_tokens - in;
    }
    Piece<T>& piece = tile.pieces[tile.count++];
    piece.first = t;
    piece.tokens = end - t < there ? end - t : there;
    piece.there = there;
    piece.slot = slot;
    const int64_t k_in = k.kind == RELAY_PANELS ? in / W * k.panel
                         : k.kind == RELAY_ROWS ? in
                                                : in * k.stride;
    const int64_t v_in = v.kind == RELAY_PANELS ? in / EACH * v.stride
                         : v.kind == RELAY_ROWS ? in * v.stride
                                                : in;
    piece.k = (const T*)k.base + block * k.block + unit.head * k.head + k_in;
    piece.v = (const T*)v.base + block * v.block + unit.head * v.head + v_in;
    slot += rounded(piece.tokens, PIECE);
    t += piece.tokens;
  }
}

// Have a tile's keys or values fetched, where they lie close together.
template <class T>
void expect(const Tile<T>& tile, bool keys, int64_t head_size, Ahead& ahead) {
  for (int i = 0; i < tile.count; ++i) {
    const Piece<T>& piece = tile.pieces[i];
    const relay_operand& operand = keys ? tile.k : tile.v;
    const int64_t steps = keys ? head_size : piece.tokens, columns = keys ? piece.tokens : head_size;
    int64_t span = steps * columns;
    if (operand.kind == RELAY_ROWS) span = (steps - 1) * operand.stride + columns;
    if (operand.kind == RELAY_ACROSS) span = (columns - 1) * operand.stride + steps;
    if (span < 2 * steps * columns) ahead.add(keys ? piece.k : piece.v, span * sizeof(T));
  }
}

// Pack what the product cannot read.
template <class T>
void make_panels(Tile<T>& tile, Room<T>& room, int64_t head_size) {
  constexpr int EACH = Steps<T>::each;
  relay_operand panels = {nullptr, W * EACH, W * head_size, 0, 0, RELAY_PANELS};
  if (tile.k.kind == RELAY_ACROSS) {
    for (int i = 0; i < tile.count; ++i) {
      Piece<T>& piece = tile.pieces[i];
      T* to = room.k + piece.slot * head_size;
      pack(to, panels, piece.k, tile.k, head_size, piece.tokens);
      piece.k = to;
    }
    tile.k = panels;
  }
  panels.stride = head_size * EACH;
  panels.panel = W * EACH;
  if (tile.v.kind == RELAY_ACROSS) {
    for (int i = 0; i < tile.count; ++i) {
      Piece<T>& piece = tile.pieces[i];
      T* to = room.v + piece.slot * head_size;
      pack(to, panels, piece.v, tile.v, piece.tokens, head_size);
      piece.v = to;
    }
    tile.v = panels;
  }
}

template <class T>
void read_queries(const relay_call& call, const Unit& unit, Room<T>& room) {
  const int64_t share = call.heads / call.kv_heads;
  const relay_sequence& sequence = call.sequences[unit.sequence];
  for (int64_t r = 0; r < unit.rows; ++r) {
    const int64_t token = sequence.first + (unit.row + r) / share;
    const int64_t head = unit.head * share + (unit.row + r) % share;
    const T* from = (const T*)call.q + (call.places ? call.places[token] : token) * call.q_token +
                    head * call.q_head;
    typename Steps<T>::Weight* to = room.q + r * room.q_row;
    if constexpr (Steps<T>::each == 2)
      __builtin_memcpy(to, from, call.head_size * sizeof(T));
    else
      for (int64_t d = 0; d < call.head_size; d += W) store(to + d, widen(from + d));
    room.peak[r] = NONE;
    room.weight[r] = 0;
  }
  __builtin_memset(room.out, 0, unit.rows * room.out_row * sizeof(float));
}

// R rows of a unit against a tile. Keys that some of the rows do not see have weight 0 there; a value
// of them that is not finite spreads all the same. keys_ahead, values_ahead: of the next tile, to be fetched beside
// the two products: a whole tile ahead, or memory is waited for.
template <class T, int R>
void attend_rows(const relay_call& call, const Unit& unit, int64_t row, const Tile<T>& tile,
                 Room<T>& room, Ahead& keys_ahead, Ahead& values_ahead) {
  typedef typename Steps<T>::Weight Weight;
  const relay_sequence& sequence = call.sequences[unit.sequence];
  const int64_t share = call.heads / call.kv_heads, size = call.head_size;
  const float scale = (float)call.scale * LOG2E;
  int64_t sees[R];  // keys, by row; more and more of them
  for (int r = 0; r < R; ++r) {
    sees[r] = sequence.keys;
    if (sequence.causal) sees[r] -= sequence.queries - 1 - (unit.row + row + r) / share;
  }
  int64_t slots = 0;
  int used = 0;
  for (; used < tile.count && tile.pieces[used].first < sees[R - 1]; ++used) {
    const Piece<T>& piece = tile.pieces[used];
    const int64_t left = sees[R - 1] - piece.first;
    const int64_t tokens = left < piece.tokens ? left : piece.tokens;
    product<T, R>(room.q + row * room.q_row, room.q_row, tile.k, piece.k, size, tokens,
                  piece.there, keys_ahead, [&](int r, int64_t token, vf x) {
                    store(room.scores + r * SCORES + piece.slot + token, x * scale);
                  });
    slots = piece.slot + rounded(tokens, PIECE);
  }
  if (used == 0) return;
  for (int r = 0; r < R; ++r) {
    float* scores = room.scores + r * SCORES;
    for (int i = 0; i < used; ++i) {
      const Piece<T>& piece = tile.pieces[i];
      const int64_t end = i + 1 < used ? tile.pieces[i + 1].slot : slots;
      int64_t seen = sees[r] - piece.first;
      seen = seen < 0 ? 0 : seen < piece.tokens ? seen : piece.tokens;
      for (int64_t s = piece.slot + seen; s < end; ++s) scores[s] = NONE;
    }
    float* out = room.out + (row + r) * room.out_row;
    const float factor = soften<T>(scores, slots, room.peak[row + r], room.weight[row + r]);
    if (factor != 1.0f)
      for (int64_t d = 0; d < size; d += W) store(out + d, load(out + d) * factor);
  }
  for (int i = 0; i < used; ++i) {
    const Piece<T>& piece = tile.pieces[i];
    const int64_t left = sees[R - 1] - piece.first;
    const int64_t tokens = left < piece.tokens ? left : piece.tokens;
    const Weight* weights = (const Weight*)room.scores + piece.slot / Steps<T>::each;
    product<T, R>(weights, SCORES, tile.v, piece.v, tokens, size, size, values_ahead,
                  [&](int r, int64_t channel, vf x) {
                    float* out = room.out + (row + r) * room.out_row + channel;
                    store(out, load(out) + x);
                  });
  }
}

template <class T>
void attend_tile(const relay_call& call, const Unit& unit, const Tile<T>& tile, Room<T>& room,
                 Ahead& keys_ahead, Ahead& values_ahead) {
  for (int64_t row = 0; row < unit.rows;) {
    const int64_t left = unit.rows - row, blocks = (left + ROWS - 1) / ROWS;
    const int64_t rows = (left + blocks - 1) / blocks;  // 6 and 5, not 8 and 3
#define RELAY_ROWS_CASE(n)                                                             \
  case n:                                                                              \
    if constexpr (n <= ROWS)                                                           \
      attend_rows<T, n>(call, unit, row, tile, room, keys_ahead, values_ahead);        \
    break;
    switch (rows) {
      RELAY_ROWS_CASE(1)
      RELAY_ROWS_CASE(2)
      RELAY_ROWS_CASE(3)
      RELAY_ROWS_CASE(4)
      RELAY_ROWS_CASE(5)
      RELAY_ROWS_CASE(6)
      RELAY_ROWS_CASE(7)
      RELAY_ROWS_CASE(8)
    }
#undef RELAY_ROWS_CASE
    row += rows;
  }
}

// The result of a unit whose sums are complete.
template <class Out>
void write_rows(const relay_call& call, const Unit& unit, const Sums& sums, int64_t out_row) {
  const int64_t share = call.heads / call.kv_heads;
  const relay_sequence& sequence = call.sequences[unit.sequence];
  for (int64_t r = 0; r < unit.rows; ++r) {
    const int64_t token = sequence.first + (unit.row + r) / share;
    const int64_t head = unit.head * share + (unit.row + r) % share;
    const bool empty = sums.weight[r] == 0.0f;
    Out* out = (Out*)call.out + sequence.partial * call.out_partial + token * call.out_token +
               head * call.out_head;
    const float part = empty ? 0.0f : 1.0f / sums.weight[r];
    for (int64_t d = 0; d < call.head_size; d += W)
      narrow(load(sums.out + r * out_row + d) * part, out + d);
    call.lse[sequence.partial * call.lse_partial + head * call.lse_head + token * call.lse_token] =
        empty ? NONE : (sums.peak[r] + __builtin_log2f(sums.weight[r])) * LN2;
  }
}

template <class T>
void write_unit(const relay_call& call, const Unit& unit, const Sums& sums) {
  const int64_t out_row = rounded(call.head_size, PIECE);
  if (call.out_dtype == RELAY_F32)
    write_rows<float>(call, unit, sums, out_row);
  else
    write_rows<T>(call, unit, sums, out_row);
}

template <class T>
void attend(const relay_call& call, const Place& from, const Place& to, char* scratch,
            const Sums& begun, const Sums& ended) {
  if (same(from, to)) return;
  Room<T> room(scratch, call.head_size);
  const Sums mine = {room.out, room.peak, room.weight};
  Cursor at(call, from);
  Tile<T> tiles[2];
  Tile<T>*now = &tiles[0], *soon = &tiles[1];
  Ahead keys_ahead, values_ahead;
  find_tile(call, at.unit, from.tile, *now);
  read_queries(call, at.unit, room);
  bool whole = from.tile == 0;  // so far
  for (bool more = true; more;) {
    Cursor after = at;
    after.next();
    more = !after.at_end() && !same(after.place, to);
    const int64_t sharers = (at.unit.rows + ROWS - 1) / ROWS;
    keys_ahead.clear(sharers);
    values_ahead.clear(sharers);
    if (more) {
      find_tile(call, after.unit, after.place.tile, *soon);
      expect(*soon, true, call.head_size, keys_ahead);
      expect(*soon, false, call.head_size, values_ahead);
    }
    make_panels(*now, room, call.head_size);
    attend_tile(call, at.unit, *now, room, keys_ahead, values_ahead);
    const bool last = at.place.tile == at.unit.tiles - 1;
    if (last && whole) {
      write_unit<T>(call, at.unit, mine);
    } else if (last || !more) {
      const Sums& keep = whole ? ended : begun;
      __builtin_memcpy(keep.out, room.out, at.unit.rows * room.out_row * sizeof(float));
      __builtin_memcpy(keep.peak, room.peak, at.unit.rows * sizeof(float));
      __builtin_memcpy(keep.weight, room.weight, at.unit.rows * sizeof(float));
    }
    if (more && last) {
      read_queries(call, after.unit, room);
      whole = true;
    }
    at = after;
    Tile<T>* swap = now;
    now = soon;
    soon = swap;
  }
}

// Sums of parts of the same rows into the first of them, and the result.
template <class T>
void finish(const relay_call& call, const Unit& unit, const Sums* parts, int64_t count) {
  const int64_t out_row = rounded(call.head_size, PIECE);
  const Sums& total = parts[0];
  for (int64_t r = 0; r < unit.rows; ++r) {
    float peak = NONE;
    for (int64_t i = 0; i < count; ++i)
      if (parts[i].peak[r] > peak) peak = parts[i].peak[r];
    const float base = peak == NONE ? 0.0f : peak;
    float weight = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float factor = exp2(parts[i].peak[r] - base);
      const float* from = parts[i].out + r * out_row;
      float* to = total.out + r * out_row;
      weight += parts[i].weight[r] * factor;
      for (int64_t d = 0; d < call.head_size; d += W)
        store(to + d, (i ? load(to + d) : vf{}) + load(from + d) * factor);
    }
    total.peak[r] = peak;
    total.weight[r] = weight;
  }
  write_unit<T>(call, unit, total);
}

}  // namespace
}  // namespace relay
