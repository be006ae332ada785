// The kernels of one instruction set. setup.py compiles this file once for each isa/NAME.h, with
// the flags that stand there and RELAY_ISA as NAME.
#define RELAY_TEXT_(x) #x
#define RELAY_TEXT(x) RELAY_TEXT_(x)
#define RELAY_JOIN_(a, b) a##b
#define RELAY_JOIN(a, b) RELAY_JOIN_(a, b)

#include RELAY_TEXT(../isa/RELAY_ISA.h)
#include "attend.h"

namespace relay {
namespace {

// Kernels::pack.
template <class T>
void pack_untyped(void* to, const relay_operand& panels, const void* from,
                  const relay_operand& operand, int64_t steps, int64_t columns) {
  pack((T*)to, panels, (const T*)from, operand, steps, columns);
}

}  // namespace
}  // namespace relay

// Constant data: nothing here runs before dispatch.cpp knows that the machine can run it.
extern "C" const relay::Kernels RELAY_JOIN(relay_kernels_, RELAY_ISA);
const relay::Kernels RELAY_JOIN(relay_kernels_, RELAY_ISA) = {
    RELAY_TEXT(RELAY_ISA),
    {relay::attend<relay::bf16>, relay::attend<relay::f16>, relay::attend<float>},
    {relay::merge_parts<relay::bf16>, relay::merge_parts<relay::f16>, relay::merge_parts<float>},
    {relay::fuse<relay::bf16, relay::bf16>, relay::fuse<relay::f16, relay::f16>,
     relay::fuse<float, float>},
    {relay::fuse<float, relay::bf16>, relay::fuse<float, relay::f16>, relay::fuse<float, float>},
    {relay::pack_untyped<relay::bf16>, relay::pack_untyped<relay::f16>,
     relay::pack_untyped<float>},
    relay::W,
    {relay::Dot<relay::bf16>::steps, relay::Dot<relay::f16>::steps, relay::Dot<float>::steps},
    relay::Scratch<float>::bytes(),
};
