// Loops on the threads of the caller's OpenMP runtime.
#pragma once
#include <atomic>

#include "abi.h"

namespace relay {

// fn(i) for every i below count, taken one after the other. All threads are asked for, however
// many there is work for: the runtime lets go of threads that a smaller team does not need, and
// with them of their arenas.
template <class Fn>
void in_parallel(relay_parallel parallel, int64_t threads, int64_t count, const Fn& fn) {
  struct Loop {
    const Fn* fn;
    int64_t count;
    std::atomic<int64_t> next;
  } loop = {&fn, count, {0}};
  const auto run = [](void* data) {
    Loop& l = *(Loop*)data;
    for (int64_t i; (i = l.next.fetch_add(1, std::memory_order_relaxed)) < l.count;) (*l.fn)(i);
  };
  if (count > 1 && threads > 1 && parallel)
    parallel(run, &loop, (unsigned)threads, 0);
  else
    run(&loop);
}

}  // namespace relay
