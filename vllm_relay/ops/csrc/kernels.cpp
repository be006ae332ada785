// Everything that depends on the instruction set; compiled once for each, RELAY_ISA its name.
#include "attend.h"
#include "fuse.h"

#define RELAY_TEXT_(x) #x
#define RELAY_TEXT(x) RELAY_TEXT_(x)
#define RELAY_JOIN_(a, b) a##b
#define RELAY_JOIN(a, b) RELAY_JOIN_(a, b)

namespace relay {
namespace {

template <class T>
void pack_any(void* to, const relay_operand& panels, const void* from,
              const relay_operand& operand, int64_t steps, int64_t columns) {
  pack((T*)to, panels, (const T*)from, operand, steps, columns);
}

const Kernels kernels = {
    RELAY_TEXT(RELAY_ISA),
    {attend<bf16>, attend<f16>, attend<float>},
    {finish<bf16>, finish<f16>, finish<float>},
    {fuse<bf16, bf16>, fuse<f16, f16>, fuse<float, float>},
    {fuse<float, bf16>, fuse<float, f16>, fuse<float, float>},
    {pack_any<bf16>, pack_any<f16>, pack_any<float>},
    W,
    {Steps<bf16>::each, Steps<f16>::each, Steps<float>::each},
    Room<float>::bytes(),
};

}  // namespace
}  // namespace relay

extern "C" const relay::Kernels* RELAY_JOIN(relay_kernels_, RELAY_ISA)(void) {
  return &relay::kernels;
}
