// Memory that will be read soon, fetched into the cache line by line beside a product.
#pragma once
#include "vec.h"

namespace relay {
namespace {

struct Prefetcher {
  struct Region {
    const char* at;
    int64_t lines;  // of 64 bytes
  };
  static constexpr int MAX_REGIONS = 32;
  Region regions[MAX_REGIONS];
  int count = 0, next = 0;
  int64_t sharers = 1;  // register blocks of rows over which the lines are spread

  void clear(int64_t row_blocks) {
    count = next = 0;
    sharers = row_blocks;
  }

  void add(const void* at, int64_t bytes) {
    if (count < MAX_REGIONS) regions[count++] = {(const char*)at, (bytes + 63) / 64};
  }

  // Removes and returns up to `lines` lines of one region.
  RELAY_INLINE Region take(int64_t lines) {
    if (next == count) return {nullptr, 0};
    Region& region = regions[next];
    const int64_t taken = lines < region.lines ? lines : region.lines;
    const Region some = {region.at, taken};
    region.at += 64 * taken;
    region.lines -= taken;
    if (region.lines == 0) ++next;
    return some;
  }
};

}  // namespace
}  // namespace relay
