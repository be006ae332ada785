// The C ABI: segments packed into panels.
#include "dispatch.h"
#include "parallel.h"

using namespace relay;

int64_t relay_packed(int64_t dtype, int64_t head_size, int64_t tokens, relay_layout* layout) {
  const Kernels& kernels = active_kernels();
  const int64_t each = kernels.packed_steps[dtype], width = kernels.panel_columns;
  const int64_t head = rounded(tokens, PIECE) * head_size;
  // Tokens are the columns of keys and the steps of values; either way a tile is contiguous.
  layout->k = {nullptr, width * each, width * head_size, head, 0, RELAY_PANELS};
  layout->v = {nullptr, head_size * each, width * each, head, 0, RELAY_PANELS};
  layout->block_tokens = layout->blocks = 0;
  return head * (dtype == RELAY_F32 ? 4 : 2);
}

int relay_pack(int64_t dtype, int64_t head_size, int64_t kv_heads, const relay_layout* from,
               const relay_sequence* sequence, const relay_layout* to, int64_t threads,
               relay_parallel parallel) {
  const Kernels& kernels = active_kernels();
  const int64_t element = dtype == RELAY_F32 ? 4 : 2;  // bytes
  const int64_t each = kernels.packed_steps[dtype];
  const int64_t paged = from->block_tokens;
  const int64_t run = paged ? paged : TILE_SLOTS;  // tokens packed at once
  const int64_t runs = (sequence->keys + run - 1) / run;
  if (paged)
    for (int64_t i = 0; i < runs; ++i)
      if ((uint32_t)sequence->table[i] >= (uint64_t)from->blocks) return RELAY_BAD_BLOCK;
  const auto pack_run = [&](const relay_operand& source, const relay_operand& target, bool keys,
                            int64_t head, int64_t index) {
    const int64_t first = index * run;
    int64_t tokens = sequence->keys - first;
    if (tokens > run) tokens = run;
    int64_t offset = head * source.head;
    if (paged)
      offset += sequence->table[index] * source.block;
    else  // a column of keys, a step of values
      offset += first * ((source.kind == RELAY_ROWS) == keys ? 1 : source.stride);
    const int64_t place =
        keys ? first / kernels.panel_columns * target.panel : first / each * target.stride;
    kernels.pack[dtype]((char*)target.base + (head * target.head + place) * element, target,
                        (const char*)source.base + offset * element, source,
                        keys ? head_size : tokens, keys ? tokens : head_size);
  };
  // Runs outermost: the heads of a block are adjacent.
  const int64_t all = runs * kv_heads, count = threads < 1 ? 1 : threads;
  in_parallel(parallel, count, count, [&](int64_t i) {
    for (int64_t j = all * i / count; j < all * (i + 1) / count; ++j) {
      pack_run(from->k, to->k, true, j % kv_heads, j / kv_heads);
      pack_run(from->v, to->v, false, j % kv_heads, j / kv_heads);
    }
  });
  return RELAY_OK;
}
