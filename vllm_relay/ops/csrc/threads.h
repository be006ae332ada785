// Loops on the threads of the caller's OpenMP runtime, and memory that a thread keeps.
#pragma once
#include <stdlib.h>

#include <atomic>

#include "abi.h"

namespace relay {

// Memory of a thread that is kept from call to call.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  ~Arena() { free(memory_); }

  // At least this many bytes, aligned to a page, with arbitrary contents; null: out of memory.
  char* get(int64_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = (char*)aligned_alloc(4096, size_);
      if (!memory_) size_ = 0;
    }
    return memory_;
  }

 private:
  char* memory_ = nullptr;
  int64_t size_ = 0;
};

// fn(i) for every i below count, taken one after the other. All threads are asked for, however
// many there is work for: the runtime lets go of threads that a smaller team does not need, and
// with them of their arenas.
template <class Fn>
void in_parallel(const relay_call& call, int64_t count, const Fn& fn) {
  struct Loop {
    const Fn* fn;
    int64_t count;
    std::atomic<int64_t> next;
  } loop = {&fn, count, {0}};
  const auto run = [](void* data) {
    Loop& l = *(Loop*)data;
    for (int64_t i; (i = l.next.fetch_add(1, std::memory_order_relaxed)) < l.count;) (*l.fn)(i);
  };
  if (count > 1 && call.threads > 1 && call.parallel)
    call.parallel(run, &loop, (unsigned)call.threads, 0);
  else
    run(&loop);
}

}  // namespace relay
