// Scratch memory of one thread between memory and registers, laid out in a given buffer.
#pragma once
#include "../kernels.h"
#include "dot.h"

namespace relay {
namespace {

// Floats of a row of scores. A product may write up to 8 vectors beyond the tile, and rows must
// not all fall into the same few cache sets.
constexpr int64_t SCORES_ROW = TILE_SLOTS + 9 * W;

template <class T>
struct Scratch {
  typedef typename Dot<T>::Weight Weight;
  int64_t q_row, out_row;     // elements of a row of q and of out
  Weight* q;                  // [MAX_ROWS, q_row]
  float *out;                 // [MAX_ROWS, out_row], not yet divided by row_sum
  float *row_max, *row_sum;   // [MAX_ROWS], of the softmax in base 2
  float* scores;              // [REGISTER_ROWS, SCORES_ROW], then softmax weights
  T *k, *v;                   // [TILE_SLOTS * D] each, a packed tile

  Scratch(char* at, int64_t head_size) {
    q_row = head_size / Dot<T>::steps;
    out_row = rounded(head_size, PIECE);
    const auto take = [&](int64_t bytes) {
      char* here = at;
      at += rounded(bytes, 64);
      return here;
    };
    scores = (float*)take(REGISTER_ROWS * SCORES_ROW * sizeof(float));
    row_max = (float*)take(MAX_ROWS * sizeof(float));
    row_sum = (float*)take(MAX_ROWS * sizeof(float));
    q = (Weight*)take(MAX_ROWS * q_row * sizeof(Weight));
    out = (float*)take(MAX_ROWS * out_row * sizeof(float));
    k = (T*)take(TILE_SLOTS * head_size * sizeof(T));
    v = (T*)take(TILE_SLOTS * head_size * sizeof(T));
  }

  static constexpr int64_t bytes() {
    return 64 * 8 + REGISTER_ROWS * SCORES_ROW * 4 + 2 * MAX_ROWS * 4 +
           2 * MAX_ROWS * MAX_HEAD_SIZE * 4 + 2 * TILE_SLOTS * MAX_HEAD_SIZE * (int64_t)sizeof(T);
  }
};

}  // namespace
}  // namespace relay
