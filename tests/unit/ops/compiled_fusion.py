"""Compile the fusion and gather kernels for CUDA without a GPU; run by test_fusion_triton.py."""

from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_relay.ops.fusion.triton import _fuse_kernel
from vllm_relay.ops.step.gather import _gather_kernel


def compile_fusion(capability: int, n: int, dtype: str, has_index: bool) -> None:
    """Down to a cubin, with the types that the launcher passes for head size 96."""
    # A stride of 1 reaches the kernel as a constant, as in every launch on dense channels.
    signature = {
        "out_ptr": f"*{dtype}",
        "out_ptrs": (f"*{dtype}",) * n,
        "lse_ptrs": ("*fp32",) * n,
        "index_ptr": "*i32",
        "out_strides": ("i32", "i32", "constexpr"),
        "outs_strides": (("i32", "i32", "constexpr"),) * n,
        "lses_strides": (("i32", "constexpr"),) * n,
        "index_stride": "i32",
        "num_heads": "i32",
    }
    at = {name: i for i, name in enumerate(_fuse_kernel.arg_names)}
    ones = dict.fromkeys(
        [
            (at["out_strides"], 2),
            *((at["outs_strides"], i, 2) for i in range(n)),
            *((at["lses_strides"], i, 1) for i in range(n)),
        ],
        1,
    )
    constants = {"HEAD_SIZE": 96, "HAS_INDEX": has_index, "BLOCK_H": 16, "BLOCK_D": 128}
    source = ASTSource(
        _fuse_kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants | ones,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]


def compile_gather(capability: int) -> None:
    constants = {"channel_stride": 1, "HEAD_SIZE": 96, "BLOCK": 2048}
    pointers = {"x_ptr": "*bf16", "out_ptr": "*bf16", "index_ptr": "*i32"}
    signature = {
        name: pointers.get(name, "constexpr" if name in constants else "i32")
        for name in _gather_kernel.arg_names
    }
    source = ASTSource(_gather_kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


if __name__ == "__main__":
    for capability, n in product((80, 90), (1, 3)):
        compile_fusion(capability, n, "bf16", has_index=n == 3)
        compile_gather(capability)
    compile_fusion(90, 2, "fp32", has_index=False)
    compile_fusion(90, 2, "bf16", has_index=True)
