// setup.py defines RELAY_ISAS: ISA(name, needs) for each isa/*.h that it compiled, best first.
#include <string.h>

#include <atomic>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#define has(feature) __builtin_cpu_supports(feature)
#endif

#define ISA(name, needs) extern "C" const relay::Kernels relay_kernels_##name;
RELAY_ISAS
#undef ISA

namespace relay {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports("f16c") does not compile everywhere.
[[maybe_unused]] bool has_f16c() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

std::vector<const Kernels*> find_kernels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  std::vector<const Kernels*> found;
#define ISA(name, needs) \
  if (needs) found.push_back(&relay_kernels_##name);
  RELAY_ISAS
#undef ISA
  return found;
}

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> kernels{usable_kernels().front()};
  return kernels;
}

}  // namespace

const std::vector<const Kernels*>& usable_kernels() {
  static const std::vector<const Kernels*> found = find_kernels();
  return found;
}

const Kernels& active_kernels() { return *active().load(std::memory_order_relaxed); }

bool choose_kernels(const char* name) {
  for (const Kernels* kernels : usable_kernels()) {
    if (!strcmp(kernels->name, name)) {
      active() = kernels;
      return true;
    }
  }
  return false;
}

}  // namespace relay
