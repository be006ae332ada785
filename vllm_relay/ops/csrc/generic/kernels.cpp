// The kernels of one instruction set. setup.py compiles this file once for each isa/NAME.h, with
// the flags that stand there and RELAY_ISA as NAME.
#define RELAY_TEXT_(x) #x
#define RELAY_TEXT(x) RELAY_TEXT_(x)
#define RELAY_JOIN_(a, b) a##b
#define RELAY_JOIN(a, b) RELAY_JOIN_(a, b)

#include RELAY_TEXT(../isa/RELAY_ISA.h)
#include "attend.h"

namespace relay {

// Constant data: nothing here runs before dispatch.cpp knows that the machine can run it.
extern "C" const Kernels RELAY_JOIN(relay_kernels_, RELAY_ISA);
const Kernels RELAY_JOIN(relay_kernels_, RELAY_ISA) = {
    RELAY_TEXT(RELAY_ISA),
    {attend<bf16>, attend<f16>, attend<float>},
    {merge_parts<bf16>, merge_parts<f16>, merge_parts<float>},
    {fuse<bf16>, fuse<f16>, fuse<float>},
    {pack<bf16>, pack<f16>, pack<float>},
    W,
    {Dot<bf16>::steps, Dot<f16>::steps, Dot<float>::steps},
    max(Scratch<bf16>::bytes(), Scratch<float>::bytes()) + Scratch<float>::bytes(),
};

}  // namespace relay
