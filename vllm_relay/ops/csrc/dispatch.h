// The choice among instruction sets.
#pragma once
#include <vector>

#include "kernels.h"

namespace relay {

// Those that were compiled and that this machine has, best first; never empty.
const std::vector<const Kernels*>& usable_kernels();

// The best, or the one that was chosen last.
const Kernels& active_kernels();

// False where the machine or the library has no such instruction set.
bool choose_kernels(const char* name);

}  // namespace relay
