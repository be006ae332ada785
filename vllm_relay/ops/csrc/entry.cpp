// The C ABI: attention, fusion, the choice of instruction set. Packing is in pack.cpp.
#include <new>
#include <string>

#include "arena.h"
#include "dispatch.h"
#include "parallel.h"
#include "partition.h"

using namespace relay;

namespace {

thread_local Arena scratch, carried;

bool blocks_exist(const relay_call& call) {
  for (int64_t i = 0; i < call.num_sequences; ++i) {
    const relay_sequence& sequence = call.sequences[i];
    const relay_layout& layout = call.layouts[sequence.layout];
    if (!layout.block_tokens) continue;
    const int64_t count = (sequence.keys + layout.block_tokens - 1) / layout.block_tokens;
    bool wrong = false;
    for (int64_t j = 0; j < count; ++j)
      wrong |= (uint32_t)sequence.table[j] >= (uint64_t)layout.blocks;
    if (wrong) return false;
  }
  return true;
}

// Tokens that a partial lacks keep -inf.
void clear_lse(const relay_call& call) {
  for (int64_t p = 0; p < call.partials; ++p)
    for (int64_t h = 0; h < call.heads; ++h)
      for (int64_t t = 0; t < call.tokens; ++t)
        call.lse[p * call.lse_partial + h * call.lse_head + t * call.lse_token] =
            -__builtin_inff();
}

relay_error attend_sequences(const relay_call& call, const Kernels& kernels) {
  const std::vector<WorkIndex> bounds = partition(call);
  const int64_t parts = (int64_t)bounds.size() - 1;
  std::vector<Accumulator> carried_in(parts), carried_out(parts);
  if (parts > 1) {
    const int64_t out_row = rounded(call.head_size, PIECE);
    const int64_t floats = MAX_ROWS * (out_row + 2);
    float* at = (float*)carried.get(2 * parts * floats * (int64_t)sizeof(float));
    if (!at) return RELAY_NO_MEMORY;
    for (int64_t i = 0; i < 2 * parts; ++i, at += floats)
      (i % 2 ? carried_out : carried_in)[i / 2] = {at, at + MAX_ROWS * out_row,
                                                   at + MAX_ROWS * (out_row + 1)};
  }
  std::atomic<bool> enough{true};
  in_parallel(call.parallel, call.threads, parts, [&](int64_t i) {
    char* memory = scratch.get(kernels.scratch_bytes);
    if (memory)
      kernels.attend[call.dtype](call, bounds[i], bounds[i + 1], memory, carried_in[i],
                                 carried_out[i]);
    else
      enough = false;
  });
  if (!enough) return RELAY_NO_MEMORY;
  const std::vector<SplitUnit> split = split_units(call, bounds, carried_in, carried_out);
  in_parallel(call.parallel, call.threads, (int64_t)split.size(), [&](int64_t i) {
    const std::vector<Accumulator>& sums = split[i].parts;
    kernels.merge_parts[call.dtype](call, split[i].unit, sums.data(), (int64_t)sums.size());
  });
  return RELAY_OK;
}

void fuse_partials(const relay_call& call) {
  const size_t n = (size_t)call.partials;
  const int64_t element = call.out_dtype == RELAY_F32 ? 4 : 2;  // bytes
  std::vector<const void*> outs(n);
  std::vector<const float*> lses(n);
  const std::vector<int64_t> out_token(n, call.out_token), out_head(n, call.out_head);
  const std::vector<int64_t> lse_token(n, call.lse_token), lse_head(n, call.lse_head);
  for (size_t p = 0; p < n; ++p) {
    outs[p] = (const char*)call.out + (int64_t)p * call.out_partial * element;
    lses[p] = call.lse + (int64_t)p * call.lse_partial;
  }
  const relay_fuse_call fusion = {
      call.out_dtype,  call.dtype,       call.tokens,     call.heads,
      call.head_size,  call.partials,    call.threads,    outs.data(),
      lses.data(),     out_token.data(), out_head.data(), lse_token.data(),
      lse_head.data(), call.places,      call.fused,      call.fused_token,
      call.fused_head, call.parallel};
  relay_fuse(&fusion);
}

}  // namespace

int relay_attend(const relay_call* given) try {
  const relay_call& call = *given;
  if (!blocks_exist(call)) return RELAY_BAD_BLOCK;
  if (call.fused) clear_lse(call);
  if (call.num_sequences > 0) {
    const relay_error error = attend_sequences(call, active_kernels());
    if (error) return error;
  }
  if (call.fused) fuse_partials(call);
  return RELAY_OK;
} catch (const std::bad_alloc&) {
  return RELAY_NO_MEMORY;
}

int relay_fuse(const relay_fuse_call* given) {
  const relay_fuse_call& call = *given;
  const Kernels& kernels = active_kernels();
  const auto& fuse = call.dtype == call.fused_dtype ? kernels.fuse : kernels.fuse_float;
  // Elements read; fewer take less time than waking a thread.
  const int64_t elements = call.tokens * call.heads * call.head_size * call.partials;
  int64_t parts = elements < 1 << 15 ? 1 : call.threads;
  if (parts > call.tokens) parts = call.tokens;
  if (parts < 1) parts = 1;
  in_parallel(call.parallel, call.threads, parts, [&](int64_t i) {
    fuse[call.fused_dtype](call, call.tokens * i / parts, call.tokens * (i + 1) / parts);
  });
  return RELAY_OK;
}

const char* relay_isas(void) {
  static const std::string names = [] {
    std::string text;
    for (const Kernels* kernels : usable_kernels())
      text += std::string(text.empty() ? "" : " ") + kernels->name;
    return text;
  }();
  return names.c_str();
}

const char* relay_isa(void) { return active_kernels().name; }

int relay_use_isa(const char* name) { return choose_kernels(name); }

void relay_sizes(int64_t sizes[5]) {
  sizes[0] = sizeof(relay_operand);
  sizes[1] = sizeof(relay_layout);
  sizes[2] = sizeof(relay_sequence);
  sizes[3] = sizeof(relay_call);
  sizes[4] = sizeof(relay_fuse_call);
}
