"""Compile the plan kernels for CUDA without a GPU; run by test_plan_triton.py."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_relay.ops.planning import kernels as plan

LONG = ("hash_ptr", "best_ptr", "report_ptr")  # int64


def compile_for(capability: int, kernel: Any, constants: dict[str, Any]) -> None:
    """Down to a cubin, with the types that the launcher passes."""
    signature = {
        name: "constexpr"
        if name in constants
        else ("*i64" if name in LONG else "*i32")
        if name.endswith("_ptr")
        else "i32"
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


if __name__ == "__main__":
    for capability in (80, 90):
        for levels in (1, 3):
            sizes = {"CHUNK_R": 1024, "CHUNK_C": plan.CHUNK_COLUMNS}
            depths = plan.checkpoints(2048)
            common = {"BLOCK_SIZE": 16, "LEVELS": levels, "DENSE": levels // 3, "STATS": plan.STATS}
            compile_for(
                capability,
                plan.sign_kernel,
                {**common, "CHECKPOINTS": depths, "CHUNK_C": plan.CHUNK_COLUMNS},
            )
            level = {"LEVEL": levels - 1}
            compile_for(capability, plan.match_kernel, {**level, "CHECKPOINTS": depths, **sizes})
            compile_for(capability, plan.score_kernel, {**level, "CHUNK_R": 1024})
            compile_for(capability, plan.settle_kernel, {**common, **sizes})
