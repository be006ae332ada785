// The entry points: chooses the instruction set, cuts calls into parts for threads.
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "work.h"

using namespace relay;

// One for each instruction set; those that were not compiled are null.
extern "C" {
__attribute__((weak)) const Kernels* relay_kernels_avx512_bf16(void);
__attribute__((weak)) const Kernels* relay_kernels_avx512(void);
__attribute__((weak)) const Kernels* relay_kernels_avx2(void);
const Kernels* relay_kernels_portable(void);
}

namespace {

// Work below this is not worth waking threads for, in the units of cost_of.
constexpr int64_t WORTH_THREADS = 20000;
// Parts for each thread: no two threads run equally fast all the time, and the faster takes more.
constexpr int64_t PARTS_OF_THREAD = 4;

std::vector<const Kernels*> find_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a, b, c = 0, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);  // not every compiler asks
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      avx2;
  if (relay_kernels_avx512_bf16 && avx512 && __builtin_cpu_supports("avx512bf16"))
    found.push_back(relay_kernels_avx512_bf16());
  if (relay_kernels_avx512 && avx512) found.push_back(relay_kernels_avx512());
  if (relay_kernels_avx2 && avx2) found.push_back(relay_kernels_avx2());
#endif
  found.push_back(relay_kernels_portable());
  return found;
}

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> found = find_kernels();
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{all_kernels().front()};
  return kernels;
}

// Memory of a thread, kept from call to call.
struct Memory {
  char* at = nullptr;
  int64_t size = 0;

  char* get(int64_t bytes) {
    if (bytes > size) {
      free(at);
      size = rounded(bytes, 4096);
      at = (char*)aligned_alloc(4096, size);
      if (!at) size = 0;
    }
    return at;
  }

  ~Memory() { free(at); }
};

thread_local Memory scratch, sums;

// fn(i) for every i below count. All threads are asked for, however many there is work for: the
// runtime lets go of threads that a smaller team does not need, and of what they keep.
template <class Fn>
void in_parallel(relay_parallel parallel, int64_t threads, int64_t count, const Fn& fn) {
  struct Shared {
    const Fn* fn;
    int64_t count;
    std::atomic<int64_t> next;
  } shared = {&fn, count, {0}};
  const auto run = [](void* data) {
    Shared& s = *(Shared*)data;
    for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) (*s.fn)(i);
  };
  if (count > 1 && threads > 1 && parallel)
    parallel(run, &shared, (unsigned)threads, 0);
  else
    run(&shared);
}

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

// The work in parts of about equal cost: part i reaches from places[i] to places[i + 1].
std::vector<Place> cut(const relay_call& call) {
  const Place end = {call.num_sequences, 0, 0, 0};
  int64_t total = 0;
  Cursor at(call, Place{0, 0, 0, 0});
  // Not where it was put: sequences without queries are left out.
  const Place start = at.at_end() ? end : at.place;
  for (; !at.at_end(); at.next_part()) total += call.kv_heads * cost_of(at.unit);
  // What they are depends on the call alone, so that the same threads give the same bits.
  int64_t parts = 1;
  if (call.threads > 1 && total >= WORTH_THREADS)
    parts = std::max(call.threads, std::min(PARTS_OF_THREAD * call.threads, total / WORTH_THREADS));
  std::vector<Place> places = {start};
  int64_t before = 0;
  at = Cursor(call, Place{0, 0, 0, 0});
  for (int64_t i = 1; i < parts; ++i) {
    const int64_t wanted = total / parts * i + total % parts * i / parts;
    while (!at.at_end() && before + call.kv_heads * cost_of(at.unit) <= wanted) {
      before += call.kv_heads * cost_of(at.unit);
      at.next_part();
    }
    if (at.at_end()) break;
    const int64_t unit = cost_of(at.unit);
    Place place = at.place;
    place.head = (wanted - before) / unit;
    place.tile = (wanted - before) % unit / cost_of_tile(at.unit, 0);
    if (place.tile >= at.unit.tiles) place.tile = at.unit.tiles - 1;
    places.push_back(place);
  }
  places.push_back(end);
  return places;
}

// A unit whose tiles went to several parts, and which.
struct Shared {
  Unit unit;
  std::vector<Sums> parts;
};

std::vector<Shared> shared_units(const relay_call& call, const std::vector<Place>& places,
                                 const std::vector<Sums>& begun, const std::vector<Sums>& ended) {
  std::vector<Shared> found;
  for (size_t i = 1; i + 1 < places.size(); ++i) {
    if (places[i].tile == 0) continue;
    Place first = places[i];
    first.tile = 0;
    const auto same_unit = [&](size_t j) {
      Place other = places[j];
      other.tile = 0;
      return same(other, first);
    };
    Shared shared = {Cursor(call, first).unit, {}};
    // Its beginning is the end of the part before, where that does not lie within it, too.
    shared.parts.push_back(ended[i - 1]);
    for (; i + 1 < places.size() && same_unit(i); ++i)
      if (!same(places[i], places[i + 1])) shared.parts.push_back(begun[i]);
    --i;
    found.push_back(shared);
  }
  return found;
}

void fuse_partials(const relay_call& call) {
  const size_t n = (size_t)call.partials;
  const int64_t element = call.out_dtype == RELAY_F32 ? 4 : 2;
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

extern "C" {

int relay_attend(const relay_call* given) try {
  const relay_call& call = *given;
  if (!blocks_exist(call)) return RELAY_BAD_BLOCK;
  const Kernels& kernels = *chosen().load(std::memory_order_relaxed);
  if (call.fused) {
    for (int64_t p = 0; p < call.partials; ++p)
      for (int64_t h = 0; h < call.heads; ++h)
        for (int64_t t = 0; t < call.tokens; ++t)
          call.lse[p * call.lse_partial + h * call.lse_head + t * call.lse_token] =
              -__builtin_inff();
  }
  if (call.num_sequences > 0) {
    const std::vector<Place> places = cut(call);
    const int64_t parts = (int64_t)places.size() - 1;
    // Where the sums of units go that begin before a part, and of those that end after it.
    const int64_t out_row = rounded(call.head_size, PIECE);
    const int64_t floats = MOST_ROWS * (out_row + 2);
    std::vector<Sums> begun(parts), ended(parts);
    if (parts > 1) {
      float* at = (float*)sums.get(2 * parts * floats * (int64_t)sizeof(float));
      if (!at) return RELAY_NO_MEMORY;
      for (int64_t i = 0; i < 2 * parts; ++i, at += floats)
        (i % 2 ? ended : begun)[i / 2] = {at, at + MOST_ROWS * out_row,
                                          at + MOST_ROWS * (out_row + 1)};
    }
    std::atomic<bool> enough{true};
    in_parallel(call.parallel, call.threads, parts, [&](int64_t i) {
      char* memory = scratch.get(kernels.scratch);
      if (memory)
        kernels.attend[call.dtype](call, places[i], places[i + 1], memory, begun[i], ended[i]);
      else
        enough = false;
    });
    if (!enough) return RELAY_NO_MEMORY;
    const std::vector<Shared> shared = shared_units(call, places, begun, ended);
    in_parallel(call.parallel, call.threads, (int64_t)shared.size(), [&](int64_t i) {
      const Shared& unit = shared[i];
      kernels.finish[call.dtype](call, unit.unit, unit.parts.data(), (int64_t)unit.parts.size());
    });
  }
  if (call.fused) fuse_partials(call);
  return RELAY_OK;
} catch (const std::bad_alloc&) {
  return RELAY_NO_MEMORY;
}

int relay_fuse(const relay_fuse_call* given) {
  const relay_fuse_call& call = *given;
  const Kernels& kernels = *chosen().load(std::memory_order_relaxed);
  const auto& fuse = call.dtype == call.fused_dtype ? kernels.fuse : kernels.fuse_float;
  // Elements that are read; fewer take less time than waking a thread.
  const int64_t elements = call.tokens * call.heads * call.head_size * call.partials;
  int64_t parts = elements < 1 << 15 ? 1 : call.threads;
  if (parts > call.tokens) parts = call.tokens;
  if (parts < 1) parts = 1;
  in_parallel(call.parallel, call.threads, parts, [&](int64_t i) {
    fuse[call.fused_dtype](call, call.tokens * i / parts, call.tokens * (i + 1) / parts);
  });
  return RELAY_OK;
}

int64_t relay_packed(int64_t dtype, int64_t head_size, int64_t tokens, relay_layout* layout) {
  const Kernels& kernels = *chosen().load(std::memory_order_relaxed);
  const int64_t each = kernels.each[dtype], width = kernels.width;
  const int64_t head = rounded(tokens, PIECE) * head_size;
  // Tokens are the columns of keys and the steps of values; either way a tile lies in one piece.
  layout->k = {nullptr, width * each, width * head_size, head, 0, RELAY_PANELS};
  layout->v = {nullptr, head_size * each, width * each, head, 0, RELAY_PANELS};
  layout->block_tokens = layout->blocks = 0;
  return head * (dtype == RELAY_F32 ? 4 : 2);
}

int relay_pack(int64_t dtype, int64_t head_size, int64_t kv_heads, const relay_layout* from,
               const relay_sequence* sequence, const relay_layout* to, int64_t threads,
               relay_parallel parallel) {
  const Kernels& kernels = *chosen().load(std::memory_order_relaxed);
  const int64_t element = dtype == RELAY_F32 ? 4 : 2, each = kernels.each[dtype];
  const int64_t paged = from->block_tokens;
  const int64_t run = paged ? paged : SLOTS;
  const int64_t runs = (sequence->keys + run - 1) / run;
  if (paged)
    for (int64_t i = 0; i < runs; ++i)
      if ((uint32_t)sequence->table[i] >= (uint64_t)from->blocks) return RELAY_BAD_BLOCK;
  const auto one = [&](const relay_operand& source, const relay_operand& target, bool keys,
                       int64_t head, int64_t index) {
    const int64_t first = index * run;
    int64_t tokens = sequence->keys - first;
    if (tokens > run) tokens = run;
    int64_t offset = head * source.head;
    if (paged)
      offset += sequence->table[index] * source.block;
    else  // a column of keys, a step of values
      offset += first * ((source.kind == RELAY_ROWS) == keys ? 1 : source.stride);
    const int64_t place = keys ? first / kernels.width * target.panel : first / each * target.stride;
    kernels.pack[dtype]((char*)target.base + (head * target.head + place) * element, target,
                        (const char*)source.base + offset * element, source,
                        keys ? head_size : tokens, keys ? tokens : head_size);
  };
  // Runs outermost: the heads of a block lie side by side.
  const int64_t all = runs * kv_heads, count = threads < 1 ? 1 : threads;
  in_parallel(parallel, count, count, [&](int64_t i) {
    for (int64_t j = all * i / count; j < all * (i + 1) / count; ++j) {
      one(from->k, to->k, true, j % kv_heads, j / kv_heads);
      one(from->v, to->v, false, j % kv_heads, j / kv_heads);
    }
  });
  return RELAY_OK;
}

const char* relay_isas(void) {
  static const std::string names = [] {
    std::string text;
    for (const Kernels* kernels : all_kernels())
      text += std::string(text.empty() ? "" : " ") + kernels->name;
    return text;
  }();
  return names.c_str();
}

const char* relay_isa(void) { return chosen().load()->name; }

int relay_use_isa(const char* name) {
  for (const Kernels* kernels : all_kernels()) {
    if (!strcmp(kernels->name, name)) {
      chosen() = kernels;
      return 1;
    }
  }
  return 0;
}

void relay_sizes(int64_t sizes[5]) {
  sizes[0] = sizeof(relay_operand);
  sizes[1] = sizeof(relay_layout);
  sizes[2] = sizeof(relay_sequence);
  sizes[3] = sizeof(relay_call);
  sizes[4] = sizeof(relay_fuse_call);
}

}  // extern "C"
