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
  // Fuses tokens [from, to) into this dtype: partials of the same dtype, or of float32.
  void (*fuse[3])(const relay_call&, int64_t from, int64_t to);
  void (*fuse_float[3])(const relay_call&, int64_t from, int64_t to);
  // Packs keys or values of one KV head: a block, or a dense run of tokens.
  void (*pack[3])(void* to, const relay_operand& panels, const void* from,
                  const relay_operand& operand, int64_t steps, int64_t columns);
  int64_t panel_columns;
  int64_t packed_steps[3];  // that lie side by side in a panel
  int64_t scratch_bytes;
};

// Those that were compiled and that this machine has, best first; never empty.
const std::vector<const Kernels*>& usable_kernels();

// The best, or the one that was chosen last.
const Kernels& active_kernels();

// False where the machine or the library has no such instruction set.
bool choose_kernels(const char* name);

}  // namespace relay
