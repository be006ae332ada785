// The C ABI: attention, fusion, packing. The choice of instruction set is in dispatch.cpp.
#include <new>

#include "kernels.h"
#include "threads.h"

using namespace relay;

namespace {

thread_local Arena scratch, carried;

bool blocks_exist(const relay_call& call) {
  for (int64_t i = 0; i < call.num_sequences; ++i) {
    const relay_sequence& sequence = call.sequences[i];
    const relay_layout& layout = call.layouts[sequence.layout];
    if (!layout.block_tokens) continue;
    const int64_t count = ceil_div(sequence.keys, layout.block_tokens);
    bool wrong = false;
    for (int64_t j = 0; j < count; ++j)
      wrong |= (uint32_t)sequence.table[j] >= (uint64_t)layout.blocks;
    if (wrong) return false;
  }
  return true;
}

// Tokens that a partial lacks keep -inf.
void clear_lse(const relay_call& call) {
  for (int64_t p = 0; p < call.num_partials; ++p)
    for (int64_t h = 0; h < call.heads; ++h)
      for (int64_t t = 0; t < call.tokens; ++t)
        *row_at<float>(call.partials[p].lse, t, h) = -__builtin_inff();
}

relay_error attend_sequences(const relay_call& call, const Kernels& kernels) {
  const std::vector<WorkIndex> bounds = partition(call);
  const int64_t parts = (int64_t)bounds.size() - 1;
  std::vector<Accumulator> carried_in(parts), carried_out(parts);
  if (parts > 1) {
    const int64_t floats = accumulator_floats(call.head_size);
    float* at = (float*)carried.get(2 * parts * floats * (int64_t)sizeof(float));
    if (!at) return RELAY_NO_MEMORY;
    for (int64_t i = 0; i < 2 * parts; ++i, at += floats)
      (i % 2 ? carried_out : carried_in)[i / 2] = accumulator_in(at, call.head_size);
  }
  std::atomic<bool> enough{true};
  in_parallel(call, parts, [&](int64_t i) {
    char* memory = scratch.get(kernels.scratch_bytes);
    if (memory)
      kernels.attend[call.dtype](call, bounds[i], bounds[i + 1], memory, carried_in[i],
                                 carried_out[i]);
    else
      enough = false;
  });
  if (!enough) return RELAY_NO_MEMORY;
  const std::vector<SplitUnit> split = split_units(call, bounds, carried_in, carried_out);
  in_parallel(call, (int64_t)split.size(), [&](int64_t i) {
    const std::vector<Accumulator>& sums = split[i].parts;
    kernels.merge_parts[call.dtype](call, split[i].unit, sums.data(), (int64_t)sums.size());
  });
  return RELAY_OK;
}

int64_t bytes_of(int64_t dtype) { return dtype == RELAY_F32 ? 4 : 2; }

}  // namespace

int relay_attend(const relay_call* given) try {
  const relay_call& call = *given;
  if (!blocks_exist(call)) return RELAY_BAD_BLOCK;
  if (call.fused.base) clear_lse(call);
  if (call.num_sequences > 0) {
    const relay_error error = attend_sequences(call, active_kernels());
    if (error) return error;
  }
  return call.fused.base ? relay_fuse(given) : RELAY_OK;
} catch (const std::bad_alloc&) {
  return RELAY_NO_MEMORY;
}

int relay_fuse(const relay_call* given) {
  const relay_call& call = *given;
  const Kernels& kernels = active_kernels();
  // Elements read; fewer take less time than waking a thread.
  const int64_t elements = call.tokens * call.heads * call.head_size * call.num_partials;
  int64_t parts = elements < 1 << 15 ? 1 : min(call.threads, call.tokens);
  if (parts < 1) parts = 1;
  in_parallel(call, parts, [&](int64_t i) {
    kernels.fuse[call.dtype](call, call.tokens * i / parts, call.tokens * (i + 1) / parts);
  });
  return RELAY_OK;
}

int64_t relay_packed(int64_t dtype, int64_t head_size, int64_t tokens, relay_layout* layout) {
  const Kernels& kernels = active_kernels();
  const int64_t width = kernels.panel_columns, each = kernels.packed_steps[dtype];
  *layout = {panels_of(true, head_size, width, each), panels_of(false, head_size, width, each), 0,
             0};
  layout->k.head = layout->v.head = rounded(tokens, PIECE) * head_size;
  return layout->k.head * bytes_of(dtype);
}

int relay_pack(const relay_call* given, const relay_layout* to) {
  const relay_call& call = *given;
  if (!blocks_exist(call)) return RELAY_BAD_BLOCK;
  const relay_sequence& sequence = *call.sequences;
  const relay_layout& from = *call.layouts;
  const Kernels& kernels = active_kernels();
  const int64_t width = kernels.panel_columns, each = kernels.packed_steps[call.dtype];
  const auto pack_block = [&](const relay_operand& source, const relay_operand& target, bool keys,
                              int64_t head, int64_t index) {
    const int64_t first = index * from.block_tokens;
    const int64_t tokens = min(from.block_tokens, sequence.keys - first);
    const int64_t read = head * source.head + sequence.table[index] * source.block;
    const int64_t written = head * target.head + token_offset(target, keys, first, width, each);
    const int64_t element = bytes_of(call.dtype);
    kernels.pack[call.dtype]((char*)target.base + written * element, target,
                             (const char*)source.base + read * element, source,
                             keys ? call.head_size : tokens, keys ? tokens : call.head_size);
  };
  // Blocks outermost: the heads of a block are adjacent.
  const int64_t heads = call.kv_heads, all = ceil_div(sequence.keys, from.block_tokens) * heads;
  const int64_t parts = call.threads < 1 ? 1 : call.threads;
  in_parallel(call, parts, [&](int64_t i) {
    for (int64_t j = all * i / parts; j < all * (i + 1) / parts; ++j) {
      pack_block(from.k, to->k, true, j % heads, j / heads);
      pack_block(from.v, to->v, false, j % heads, j / heads);
    }
  });
  return RELAY_OK;
}

const int64_t relay_sizes[6] = {sizeof(relay_operand), sizeof(relay_layout),
                                sizeof(relay_sequence), sizeof(relay_partial),
                                sizeof(relay_scores), sizeof(relay_call)};
