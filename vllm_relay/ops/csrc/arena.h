// Memory of a thread that is kept from call to call.
#pragma once
#include <stdint.h>
#include <stdlib.h>

namespace relay {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
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

}  // namespace relay
