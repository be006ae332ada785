// Packing: keys or values into panels, once per segment, or a tile at a time where their layout
// cannot be multiplied in place.
#pragma once
#include "../abi.h"
#include "dot.h"

namespace relay {
namespace {

// Packs W columns at a time; steps and columns beyond those given become zeros.
//   to:   [panels, steps / Dot::steps, W, Dot::steps], strides in `panels`
//   from: [steps, columns], strides and order in `operand`
template <class T>
void pack(T* to, const relay_operand& panels, const T* from, const relay_operand& operand,
          int64_t steps, int64_t columns) {
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
    const int64_t wide = columns - c < W ? columns - c : W;
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

}  // namespace
}  // namespace relay
