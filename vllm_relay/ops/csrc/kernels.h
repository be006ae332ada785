// The kernels of one instruction set, as the rest of the library calls them, and their choice.
#pragma once
#include "work.h"

namespace relay {

// Arrays are indexed by relay_dtype.
struct Kernels {
  const char* name;
  // Attends from one tile up to another and writes the units that begin and end there. Sums of the
  // unit that an earlier part began go to carried_in, those of one that a later part ends to
  // carried_out. scratch: `scratch_bytes`.
  void (*attend[3])(const relay_call&, const WorkIndex& from, const WorkIndex& to, char* scratch,
                    const Accumulator& carried_in, const Accumulator& carried_out);
  // Merges the sums of a unit's parts [count] and writes its result.
  void (*merge_parts[3])(const relay_call&, const Unit&, const Accumulator* parts, int64_t count);
  // Fuses tokens [from, to).
  void (*fuse[3])(const relay_call&, int64_t from, int64_t to);
  // Packs keys or values of one KV head and block, or of a run of tokens.
  void (*pack[3])(void* to, const relay_operand& panels, const void* from,
                  const relay_operand& operand, int64_t steps, int64_t columns);
  int64_t panel_columns;
  int64_t packed_steps[3];  // that lie side by side in a panel
  int64_t scratch_bytes;
};

// The kernels of the instruction set in use.
const Kernels& active_kernels();

}  // namespace relay
