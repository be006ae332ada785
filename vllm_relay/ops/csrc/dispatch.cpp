// The C ABI: the choice of instruction set.
//
// setup.py defines RELAY_ISAS: ISA(name, needs) for each isa/*.h that it compiled, best first.
#include <string.h>

#include <atomic>
#include <string>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#define has(feature) __builtin_cpu_supports(feature)
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
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

// AMX with BF16, its registers saved by the system (XCR0) and granted to the process (Linux,
// Documentation/arch/x86/xstate.rst). Others may have asked before; asking again is harmless.
[[maybe_unused]] bool has_amx_bf16() {
#if defined(__linux__)
  unsigned a, b, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  constexpr unsigned amx_bf16 = 1 << 22, amx_tile = 1 << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (amx_bf16 | amx_tile))) return false;
  constexpr unsigned tile_config = 1 << 17, tile_data = 1 << 18;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if (~a & (tile_config | tile_data)) return false;
  constexpr long request_permission = 0x1023, tile_data_feature = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, request_permission, tile_data_feature) == 0;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
[[maybe_unused]] bool has_bf16() {
#if defined(__linux__)
  return getauxval(AT_HWCAP2) & (1 << 14);  // HWCAP2_BF16, which older headers lack
#else
  return false;
#endif
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

// Those that were compiled and that this machine has, best first; never empty.
const std::vector<const Kernels*> usable = find_kernels();
std::atomic<const Kernels*> active{usable.front()};

}  // namespace

const Kernels& active_kernels() { return *active.load(std::memory_order_relaxed); }

}  // namespace relay

const char* relay_isas(void) {
  static const std::string names = [] {
    std::string text;
    for (const relay::Kernels* kernels : relay::usable)
      text += std::string(text.empty() ? "" : " ") + kernels->name;
    return text;
  }();
  return names.c_str();
}

const char* relay_isa(void) { return relay::active_kernels().name; }

int relay_use_isa(const char* name) {
  for (const relay::Kernels* kernels : relay::usable) {
    if (strcmp(kernels->name, name)) continue;
    relay::active = kernels;
    return 1;
  }
  return 0;
}
