// A call's work, cut into parts of about equal cost for threads.
#pragma once
#include <vector>

#include "kernels.h"

namespace relay {

// Bounds of the parts: part i goes from the i-th tile to before the (i + 1)-th. They depend on the
// call alone, so that the same number of threads gives the same bits.
std::vector<WorkIndex> partition(const relay_call& call);

// A unit whose tiles went to several parts, and their sums.
struct SplitUnit {
  Unit unit;
  std::vector<Accumulator> parts;
};

// carried_in, carried_out: of each part, see Kernels::attend.
std::vector<SplitUnit> split_units(const relay_call& call, const std::vector<WorkIndex>& bounds,
                                   const std::vector<Accumulator>& carried_in,
                                   const std::vector<Accumulator>& carried_out);

}  // namespace relay
