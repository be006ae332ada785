"""The fusion and gather kernels compile for CUDA without a GPU."""

import pytest
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


FUSED = [
    *((capability, n, "bf16", n == 3) for capability in (80, 90) for n in (1, 3)),
    (90, 2, "fp32", False),
    (90, 2, "bf16", True),
]


@pytest.mark.parametrize(("capability", "n", "dtype", "has_index"), FUSED)
def test_fusion_compiles(capability, n, dtype, has_index):
    compile_fusion(capability, n, dtype, has_index)


@pytest.mark.parametrize("capability", [80, 90])
def test_gather_compiles(capability):
    compile_gather(capability)
